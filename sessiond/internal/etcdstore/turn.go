package etcdstore

import (
	"context"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// How long a waiter that has been promised its turn waits for it, when it has heard already that the entry before its own
// has gone. The answer to the release may be lost.
const promiseTimeout = 10 * time.Millisecond

// turn is a grant that a release brought along.
type turn struct {
	revision int64
	session  []*mvccpb.KeyValue
}

// successor is the waiter on this node that is next when an entry is released: the release itself reads, after it has
// removed the entry, whether the next one is still there, and the session for it. So if it was the holder that released, the
// next one holds the lock in the same atomic step, and no read of its own comes between. The holder's entry was the first;
// the next one's was made after it with none in between, for it saw that one right before its own; and no entry is ever
// made at an earlier place.
//
// A waiter is promised its turn only while its lease has enough left. Nil stands for none: it waits on another node, it
// has to refresh its lease, or nobody waits. Then it hears from the watch.
type successor struct {
	hub *hub
	w   *waiter
	at  standing
}

// successor promises the waiter behind an entry its turn. It must be settled.
func (h *hub) successor(sessionID, entry string) *successor {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.waiters) == 0 {
		return nil
	}
	for w := range h.waiters[escaper.Replace(sessionID)] {
		if w.known && w.standing.before == entry && !w.promised && w.turn == nil && time.Now().Before(w.standing.ready) {
			w.promised = true
			return &successor{hub: h, w: w, at: w.standing}
		}
	}
	return nil
}

// reads are to be carried out after the entry has been removed.
func (n *successor) reads() []operation {
	if n == nil {
		return nil
	}
	return []operation{opGetKey(n.w.own), readRecord(n.w.record, n.at.read)}
}

// granted takes the answers to the reads, of which the first has the index given, and wakes the waiter with them.
func (n *successor) granted(resp *etcdserverpb.TxnResponse, first int) {
	if n == nil {
		return
	}
	own, sess := resp.Responses[first].GetResponseRange().Kvs, resp.Responses[first+1].GetResponseRange().Kvs
	if len(own) == 0 || own[0].CreateRevision != n.at.created || resp.Header.RaftTerm > n.at.term {
		return // it has gone, or its lease has to be renewed first; the waiter finds out
	}
	n.hub.mu.Lock()
	defer n.hub.mu.Unlock()
	if n.w.promised && n.w.standing.created == n.at.created {
		n.w.promised = false
		n.w.turn = &turn{revision: resp.Header.Revision, session: sess}
		n.w.signal()
	}
}

// settle has the waiter look for itself if the release did not bring its turn.
func (n *successor) settle() {
	if n == nil {
		return
	}
	n.hub.mu.Lock()
	defer n.hub.mu.Unlock()
	if n.w.promised {
		n.w.promised = false
		n.w.signal()
	}
}

// remindLocked leaves a waiter that has been promised its turn alone, although it has come by what was heard, until it is time that
// the release brought it.
func (h *hub) remindLocked(w *waiter) {
	before := w.standing.before
	time.AfterFunc(promiseTimeout, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if w.promised && w.standing.before == before {
			w.promised = false
			w.signal()
		}
	})
}

// turnOf returns the turn that a release brought a waiter, or nil. If one is on its way it waits for a moment.
func (h *hub) turnOf(ctx context.Context, w *waiter) *turn {
	t, promised := h.turnNow(w)
	if t != nil || !promised {
		return t
	}
	timer := time.NewTimer(promiseTimeout)
	defer timer.Stop()
	select {
	case <-w.wake:
	case <-timer.C:
	case <-ctx.Done():
	}
	t, _ = h.turnNow(w)
	return t
}

func (h *hub) turnNow(w *waiter) (t *turn, promised bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return w.turn, w.promised
}
