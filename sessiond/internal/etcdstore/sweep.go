package etcdstore

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// Large, because etcd counts all that is left of a range for each page of it.
	passPage = 10_000
	// How many keys one transaction removes, each with a compare or two of its own.
	removeTogether = 30
	// How many nodes sweep after a node's death, one after the other: the later ones find nothing left to do.
	sweepers   = 3
	sweepAfter = time.Second
	sweepRetry = 500 * time.Millisecond
)

// queued is a lock entry as it was read.
type queued struct {
	entryRecord

	key               string
	created, modified int64
}

func toQueued(kv *mvccpb.KeyValue) (queued, bool) {
	rec, err := decodeEntry(kv.Value)
	return queued{entryRecord: rec, key: string(kv.Key), created: kv.CreateRevision, modified: kv.ModRevision}, err == nil
}

// passes reads all queues from end to end for those who look for entries. Who comes while a pass is under way shares the
// next one with all who do.
type passes struct {
	turn chan struct{}

	mu   sync.Mutex
	next *pass
}

type pass struct {
	visits []func(queue []queued)
	// The entries of front-ends that are asked for. Thousands may be when they die together, so nobody looks for each in each queue.
	owned map[string][]queued
	done  chan struct{}
	err   error
}

func newPasses() *passes { return &passes{turn: make(chan struct{}, 1)} }

// run shows each queue that has entries to visit, in one goroutine, and returns when all have been shown.
func (p *passes) run(ctx context.Context, s *Store, visit func(queue []queued)) error {
	_, err := p.join(ctx, s, func(next *pass) { next.visits = append(next.visits, visit) })
	return err
}

// of returns the entries of a front-end.
func (p *passes) of(ctx context.Context, s *Store, frontEnd string) ([]queued, error) {
	mine, err := p.join(ctx, s, func(next *pass) {
		if next.owned == nil {
			next.owned = map[string][]queued{}
			next.visits = append(next.visits, next.sort)
		}
		next.owned[frontEnd] = nil
	})
	if err != nil {
		return nil, err
	}
	return slices.Clone(mine.owned[frontEnd]), nil // who asks for the same may share it
}

// sort keeps the entries that are asked for.
func (p *pass) sort(queue []queued) {
	for _, e := range queue {
		if entries, ok := p.owned[e.FrontEnd]; ok {
			p.owned[e.FrontEnd] = append(entries, e)
		}
	}
}

// join says what a pass is to do, and returns when it has been done.
func (p *passes) join(ctx context.Context, s *Store, say func(next *pass)) (*pass, error) {
	p.mu.Lock()
	if p.next == nil {
		p.next = &pass{done: make(chan struct{})}
	}
	mine := p.next
	say(mine)
	p.mu.Unlock()
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-mine.done:
		return mine, mine.err
	}
	p.mu.Lock()
	begun := p.next != mine
	if !begun {
		p.next = nil
	}
	p.mu.Unlock()
	if !begun {
		// It is not for this caller alone, so it does not end with it.
		mine.err = s.readQueues(context.WithoutCancel(ctx), mine.visits)
		close(mine.done)
	}
	<-mine.done
	return mine, mine.err
}

func (s *Store) readQueues(ctx context.Context, visits []func(queue []queued)) error {
	var queue []queued
	show := func() {
		if len(queue) > 0 {
			for _, visit := range visits {
				visit(queue)
			}
		}
		queue = nil
	}
	from, end := s.keys.allLocks(), clientv3.GetPrefixRangeEnd(s.keys.allLocks())
	current := ""
	for {
		octx, cancel := s.op(ctx)
		resp, err := s.kv.Get(octx, from, clientv3.WithRange(end), clientv3.WithLimit(passPage))
		cancel()
		if err != nil {
			return err
		}
		for _, kv := range resp.Kvs {
			key := string(kv.Key)
			if prefix := key[:strings.LastIndexByte(key, '/')]; prefix != current {
				show()
				current = prefix
			}
			if e, ok := toQueued(kv); ok {
				queue = append(queue, e)
			}
			from = key + "\x00"
		}
		if !resp.More {
			show()
			return nil
		}
	}
}

// removal is a key to be removed if its compares hold.
type removal struct {
	key  string
	cmps []compare
}

// remove removes keys, many in a transaction, as long as the guard holds: kept says that it did not.
func (s *Store) remove(ctx context.Context, guard []compare, removals []removal) (kept bool, err error) {
	for chunk := range slices.Chunk(removals, removeTogether) {
		var ops []operation
		for _, r := range chunk {
			ops = append(ops, new(txnOp).fill(r.cmps, []operation{opDelete(r.key)}, nil))
		}
		octx, cancel := s.op(ctx)
		resp, err := s.txn(octx, guard, ops, nil)
		cancel()
		if err != nil {
			return false, err
		}
		if !resp.Succeeded {
			return true, nil
		}
	}
	return false, nil
}

// sweeper removes what dead nodes and front-ends have left in the queues.
type sweeper struct {
	grace  time.Duration
	kicked chan struct{}

	// Front-ends of entries that are attached nowhere, and since when. Used by one goroutine.
	missing map[string]time.Time
}

func newSweeper(grace time.Duration) *sweeper {
	return &sweeper{grace: grace, kicked: make(chan struct{}, 1), missing: map[string]time.Time{}}
}

func (w *sweeper) kick() {
	select {
	case w.kicked <- struct{}{}:
	default:
	}
}

// sweep sweeps after each kick until ctx ends.
func (s *Store) sweep(ctx context.Context) {
	for {
		select {
		case <-s.sweeper.kicked:
		case <-ctx.Done():
			return
		}
		if s.live.wait(ctx) != nil {
			return
		}
		for again := s.sweepTurn(ctx); again > 0; again = s.sweepTurn(ctx) {
			select {
			case <-s.sweeper.kicked:
			case <-time.After(again):
			case <-ctx.Done():
				return
			}
		}
	}
}

// sweepTurn sweeps when it is this node's turn, and returns when to sweep again; 0: there is no need.
func (s *Store) sweepTurn(ctx context.Context) time.Duration {
	living, err := s.livingNodes(ctx)
	if err != nil {
		return sweepRetry
	}
	slices.Sort(living)
	turn := slices.Index(living, s.node)
	if turn < 0 || turn >= sweepers {
		return 0
	}
	pause(ctx, time.Duration(turn)*sweepAfter)
	again, err := s.sweepOnce(ctx)
	if err != nil && ctx.Err() == nil {
		return sweepRetry
	}
	return again
}

func (s *Store) livingNodes(ctx context.Context) ([]string, error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	resp, err := s.kv.Get(octx, s.keys.allNodes(), clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, err
	}
	return s.nodeIDs(resp), nil
}

// sweepOnce removes the waiting entries of nodes that do not live, unless a retry on another node has taken them over, and
// the entries of front-ends that were attached and have not been for the grace period. The holder's entry of a dead
// node stays: it may be held, and then it is its front-end's to claim.
func (s *Store) sweepOnce(ctx context.Context) (again time.Duration, err error) {
	// Who is missing before and after the pass is dead: an entry is made only by a node that has its key.
	before, err := s.livingNodes(ctx)
	if err != nil {
		return 0, err
	}
	var waiting, owned []queued
	behind := map[string]queued{} // the first of the queue, by the key of one that waits
	err = s.passes.run(ctx, s, func(queue []queued) {
		first := slices.MinFunc(queue, func(a, b queued) int { return int(a.created - b.created) })
		for _, e := range queue {
			if e.created != first.created && !slices.Contains(before, e.Node) {
				waiting = append(waiting, e)
				behind[e.key] = first
			}
			if e.Attached {
				owned = append(owned, e)
			}
		}
	})
	if err != nil {
		return 0, err
	}
	after, err := s.livingNodes(ctx)
	if err != nil {
		return 0, err
	}
	var removals []removal
	for _, e := range waiting {
		if !slices.Contains(after, e.Node) {
			// Not if the one before all others has gone meanwhile: a node whose key went with its lease may live and know nothing of it,
			// and have granted the next one.
			first := behind[e.key]
			removals = append(removals, removal{e.key, []compare{
				writtenAt(e.key, e.modified),
				createdAt(first.key, first.created),
			}})
		}
	}
	abandoned := len(removals) > 0
	gone, again, err := s.goneFrontEnds(ctx, owned)
	if err != nil {
		return 0, err
	}
	for _, e := range owned {
		if _, ok := gone[e.FrontEnd]; ok {
			removals = append(removals, removal{e.key, []compare{
				createdAt(e.key, e.created),
				missing(s.keys.frontEnd(e.FrontEnd)),
			}})
		}
	}
	if len(removals) > 0 {
		s.logger.InfoContext(ctx, "removing what dead nodes and front-ends left in the queues", "entries", len(removals))
	}
	_, err = s.remove(ctx, nil, removals)
	if abandoned {
		again = max(again, sweepRetry) // for those that stayed
	}
	return again, err
}

// goneFrontEnds says which front-ends of entries have been attached nowhere for the grace period, counted from when they can know
// that their node has died, and when to look again because of those that have not been for so long.
func (s *Store) goneFrontEnds(ctx context.Context, entries []queued) (gone map[string]struct{}, again time.Duration, err error) {
	if len(entries) == 0 {
		clear(s.sweeper.missing)
		return nil, 0, nil
	}
	octx, cancel := s.op(ctx)
	defer cancel()
	resp, err := s.kv.Get(octx, s.keys.allFrontEnds(), clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, 0, err
	}
	attached := make(map[string]struct{}, len(resp.Kvs))
	for _, kv := range resp.Kvs {
		attached[string(kv.Key)] = struct{}{}
	}
	now := time.Now()
	gone = map[string]struct{}{}
	since := map[string]time.Time{}
	longest := map[time.Duration]time.Duration{} // what is left for any of those with the same time, so that one pass finds all of them
	for _, e := range entries {
		if _, ok := attached[s.keys.frontEnd(e.FrontEnd)]; ok {
			continue
		}
		first, ok := s.sweeper.missing[e.FrontEnd]
		if !ok {
			first = now
		}
		grace := s.sweeper.grace + s.live.lateness.of(e.FrontEnd)
		if left := grace - now.Sub(first); left > 0 {
			since[e.FrontEnd] = first
			longest[grace] = max(longest[grace], left)
		} else {
			gone[e.FrontEnd] = struct{}{}
		}
	}
	if len(longest) > 0 {
		again = slices.Min(slices.Collect(maps.Values(longest)))
	}
	s.sweeper.missing = since
	return gone, again, nil
}
