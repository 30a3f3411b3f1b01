package etcdstore

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// How long a tail is kept, from one to two times: while locks of a session are taken more often than that, it is there.
	tailTTL = 30 * time.Second
	// How many sessions' heads are remembered, at most.
	maxHeads = 1 << 14
	// How many of a queue's first entries are read. While an acquire is under way, or waits for company, the lock may be handed
	// over more than once.
	maxChain = 3
)

// tails tell whether a new lock entry is the first of its queue without a look at the queue. To range over a queue, be it
// only to count it, etcd visits all keys that were ever in it since the last compaction, live or not: thousands, for a session
// that is locked again and again.
//
// Whatever makes an entry writes its key to the session's tail in the same step, and gets the tail before it along. So an
// entry knows, as of the moment at which it is made, which one was made before it. If that one was the first of the
// queue at some time, all that were older had gone, for entries only ever go; and if it has gone too, the queue was empty.
// Which entry was the first at some time, each node remembers of the last it has seen (the head); the one behind it is, once
// the head has gone, and so on. Whether they are still there, the step that makes the new one reads; of a head that this node itself
// has removed it needs no read, for an entry that has gone does not come back: one of the same key is another, made later.
//
// In the same way a new entry that is not the first knows from its own step who holds the lock, and who is before it, if that is
// the entry that this node believed to be the last. A tail that is missing, or that names another entry, says nothing: then
// the queue is read.
//
// The version of a tail numbers the entries, so the difference of two is how many are between, or were.
//
// A tail ends with its lease, or when its session is destroyed. It must not end with its entry's lease, which goes back to the
// pool and may live for ever.
type tails struct {
	*leases

	ends *recent[ends] // by session
}

// made is an entry as it was made.
type made struct {
	key     string
	created int64
	// Its number, and the revision at which the tail was made that counted it. 0: it is not known.
	number, counter int64
}

// ends are what a node knows of a queue.
type ends struct {
	head made             // was the first at some time
	gone bool             // the head has been removed
	last made             // is the last that this node knows of
	tail clientv3.LeaseID // of the session's tail
}

func newTails(lease clientv3.Lease, grants *atomic.Int64, terms *terms, expiry *expiry, background func(func(context.Context))) *tails {
	same := func(ttl time.Duration) time.Duration { return ttl }
	t := &tails{leases: newLeases(lease, grants, terms, expiry, same, background), ends: newRecent[ends](maxHeads)}
	t.hurry = false // they are of use for as long as they last
	return t
}

// of returns what is known of a session's queue. The keys are empty if nothing is.
func (t *tails) of(sessionID string) ends { return t.ends.of(sessionID) }

// setHead notes an entry that is the first of its queue, or was.
func (t *tails) setHead(sessionID string, m made) {
	t.ends.set(sessionID, func(e *ends) {
		if m.created > e.head.created {
			e.head, e.gone = m, false
		}
	})
}

// removed notes that an entry was removed at a revision.
func (t *tails) removed(sessionID, key string, revision int64) {
	t.ends.set(sessionID, func(e *ends) {
		e.gone = e.gone || e.head.key == key && e.head.created < revision
	})
}

// setLast notes an entry that has been made, and the lease that the tail got with it.
func (t *tails) setLast(sessionID string, m made, tail clientv3.LeaseID) {
	t.ends.set(sessionID, func(e *ends) {
		if m.created > e.last.created {
			e.last, e.tail = m, tail
		}
	})
}

// lease returns one for the tail of a session: the same again while it can be used.
func (t *tails) lease(ctx context.Context, sessionID string) (clientv3.LeaseID, error) {
	id, _, err := t.takeFor(ctx, tailTTL, t.of(sessionID).tail)
	return id, err
}

// surroundings are what the step that makes an entry reads to know where in the queue it is.
type surroundings struct {
	session string
	known   []made // the head, those behind it, and the last, as far as they are known, each once
	gone    int    // how many of them have gone, from the head on; the others are read
	chain   int    // how many of them follow each other with none between, from the head on
}

// surroundings prepares the reads of an entry that is about to be made.
func (s *Store) surroundings(sessionID string) surroundings {
	e := s.tails.of(sessionID)
	around := surroundings{session: sessionID}
	if e.head.key == "" {
		return around
	}
	around.known = s.hub.chain(sessionID, e.head, maxChain)
	around.chain = len(around.known)
	if !slices.ContainsFunc(around.known, func(m made) bool { return m.key == e.last.key }) && e.last.created > e.head.created {
		around.known = append(around.known, e.last)
	}
	if e.gone {
		around.gone = 1
	}
	return around
}

// ops are the reads. With nothing known they count the queue. Who is before the entry is then read afterwards: etcd sorts a queue by
// reading the whole of it, and within a write that would hold up everybody else's.
func (a surroundings) ops(k keys) []operation {
	if len(a.known) == 0 {
		return []operation{opCount(k.locks(a.session))}
	}
	var ops []operation
	for _, m := range a.known[a.gone:] {
		ops = append(ops, opGet(m.key))
	}
	return ops
}

// found is where a new entry is in its queue.
type found struct {
	first bool // there is none before it
	// Else, if it is known: the holder's entry, the key of the one before, and how many there are behind the holder's, at most.
	holder  *mvccpb.KeyValue
	before  string
	waiting int
}

// found looks at the answers to the reads, and at the tail before the entry.
func (a surroundings) found(answers []*etcdserverpb.ResponseOp, own made, tail *mvccpb.KeyValue) found {
	if len(a.known) == 0 {
		return found{first: answers[0].GetResponseRange().Count == 1}
	}
	if tail == nil {
		return found{}
	}
	var f found
	older := true // all that are older than the one at hand have gone
	var holder made
	for i, m := range a.known {
		var kv *mvccpb.KeyValue
		if i >= a.gone {
			if kvs := answers[i-a.gone].GetResponseRange().Kvs; len(kvs) > 0 && kvs[0].CreateRevision == m.created {
				kv = kvs[0]
			}
		}
		older = older && i < a.chain
		if older && kv != nil {
			f.holder, holder = kv, m
		}
		older = older && kv == nil
		if m.key != string(tail.Value) || m.created != tail.ModRevision {
			continue
		}
		if kv != nil {
			f.before = m.key
		} else if older {
			return found{first: true}
		}
	}
	if f.holder == nil || f.before == "" || holder.counter == 0 || holder.counter != own.counter {
		return found{}
	}
	f.waiting = int(own.number - holder.number)
	return f
}
