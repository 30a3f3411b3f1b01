package etcdstore

import (
	"crypto/rand"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// L3, L4, L6: whoever made or removed entries, and whatever this node remembers of it, an acquire holds the lock only if no entry is
// older than its own.
func TestTailIsExact(t *testing.T) {
	prefix := rand.Text() + "/"
	here, there := newServices(t, prefix), newServices(t, prefix)
	try := func(t *testing.T, s *services, id string) (*place, bool) {
		t.Helper()
		name := rand.Text()
		p, ok := s.store.Place(lock.Request{Session: id, ID: name, Holder: name, TTL: time.Minute}).(*place)
		if !ok {
			t.Fatal("another kind of place")
		}
		t.Cleanup(p.Close)
		v, err := p.Join(t.Context(), false)
		if err != nil {
			t.Fatal(err)
		}
		return p, v.Held()
	}
	release := func(t *testing.T, s *services, p *place) {
		t.Helper()
		if err := s.locks.Release(t.Context(), p.r.Session, p.r.ID, uint64(p.created)); err != nil {
			t.Fatal(err)
		}
	}
	first := func(t *testing.T, s *services, id string) *place {
		t.Helper()
		p, held := try(t, s, id)
		if !held {
			t.Fatal("not held, though nobody else has it")
		}
		return p
	}
	waits := func(t *testing.T, s *services, id string) *place {
		t.Helper()
		p, held := try(t, s, id)
		if held {
			t.Fatal("held, though another holds it")
		}
		return p
	}
	remove := func(t *testing.T, key string) {
		t.Helper()
		if _, err := etcd.KV().Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	tests := []struct {
		name string
		run  func(t *testing.T, id string)
	}{
		{"again and again", func(t *testing.T, id string) {
			for range 5 {
				release(t, here, first(t, here, id))
			}
		}},
		{"held by another node", func(t *testing.T, id string) {
			release(t, here, first(t, here, id))
			p := first(t, there, id)
			waits(t, here, id).Leave(t.Context())
			release(t, there, p)
			release(t, here, first(t, here, id))
		}},
		{"the last one gave up, the holder did not", func(t *testing.T, id string) {
			p := first(t, here, id)
			waits(t, here, id).Leave(t.Context())
			waits(t, here, id).Leave(t.Context())
			release(t, here, p)
			release(t, here, first(t, here, id))
		}},
		{"the holder went, a waiter of another node did not", func(t *testing.T, id string) {
			p := first(t, here, id)
			w := waits(t, there, id)
			release(t, here, p)
			waits(t, here, id).Leave(t.Context())
			release(t, there, w)
		}},
		{"no tail, with a holder", func(t *testing.T, id string) {
			release(t, here, first(t, here, id))
			p := first(t, there, id)
			remove(t, here.store.keys.tail(id))
			waits(t, here, id).Leave(t.Context())
			release(t, there, p)
		}},
		{"no tail, without a holder", func(t *testing.T, id string) {
			release(t, here, first(t, here, id))
			remove(t, here.store.keys.tail(id))
			release(t, here, first(t, here, id))
		}},
		{"entry ended by itself", func(t *testing.T, id string) {
			remove(t, first(t, here, id).key)
			release(t, here, first(t, here, id))
		}},
		{"session made anew", func(t *testing.T, id string) {
			first(t, here, id)
			if _, err := there.sessions.Destroy(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			if _, err := there.sessions.Create(t.Context(), id, nil, time.Hour); err != nil {
				t.Fatal(err)
			}
			p := first(t, there, id)
			waits(t, here, id).Leave(t.Context())
			release(t, there, p)
			release(t, here, first(t, here, id))
		}},
		{"dead lease of the tail", func(t *testing.T, id string) {
			p := first(t, here, id)
			if _, err := here.store.lease.Revoke(t.Context(), here.store.tails.of(id).tail); err != nil {
				t.Fatal(err)
			}
			release(t, here, p)
			release(t, here, first(t, here, id))
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { tt.run(t, here.create(t)) })
	}
}

// An acquire of a session that was locked before does not read the queue: etcd would visit every entry that ever was in it since the
// last compaction. If this node has removed the entry before its own, it does not look whether that has gone either.
func TestAcquireReadsNoQueue(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	g := s.acquire(t, id)
	etcds := gateOf(t, s)
	releases := []func() error{
		func() error { return s.locks.Release(t.Context(), id, g.Request, g.Token) },
		func() error {
			_, err := s.sessions.Save(t.Context(), session.Save{ID: id, TTL: time.Hour, Token: g.Token, Request: g.Request, Release: true})
			return err
		},
	}
	for _, release := range releases {
		done := make(chan error, 1)
		go func() { done <- release() }()
		(<-etcds.arrived).pass <- nil
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		granted := make(chan lock.Grant, 1)
		go func() { granted <- s.acquire(t, id) }()
		x := <-etcds.arrived
		for _, op := range x.req.Success {
			if r := op.GetRequestRange(); r != nil && string(r.Key) != s.store.keys.session(id) {
				t.Errorf("reads from %s to %s", r.Key, r.RangeEnd)
			}
		}
		x.pass <- nil
		g = <-granted
	}
}

// L6, L7: one that joins a queue knows from its own step who holds the lock, who is before it and how many wait, and reads nothing
// more, even when the lock is handed over meanwhile.
func TestJoinKnowsItsPlace(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	join := func(name string) (*place, lock.View) {
		p, ok := s.store.Place(lock.Request{Session: id, ID: name, Holder: name, TTL: time.Minute}).(*place)
		if !ok {
			t.Fatal("another kind of place")
		}
		t.Cleanup(p.Close)
		v, err := p.Join(t.Context(), false)
		if err != nil {
			t.Fatal(err)
		}
		return p, v
	}
	release := func(p *place) {
		if err := s.locks.Release(t.Context(), id, p.r.ID, uint64(p.created)); err != nil {
			t.Fatal(err)
		}
	}
	first, _ := join("first")
	places := []*place{first}
	reads := s.store.kv.KV
	s.store.kv.KV = nil // whoever reads panics
	for n := range 5 {
		p, v := join(fmt.Sprint(n))
		if v.Held() || v.Own == nil || int64(v.Own.Token) != p.created || v.First == nil || v.First.Holder != "first" || v.Waiting != n+1 {
			t.Errorf("%d: %+v, held by %+v", n, v, v.First)
		}
		if before := places[n].key; p.waiter.standing.before != before {
			t.Errorf("%d: behind %s, not %s", n, p.waiter.standing.before, before)
		}
		places = append(places, p)
	}
	// Two hand-overs that the node's memory of the first has not caught up with.
	for n := range maxChain - 1 {
		release(places[n])
		p, v := join(fmt.Sprint("late", n))
		if want := places[n+1].r.Holder; v.Held() || v.First == nil || v.First.Holder != want || v.Waiting != 5 {
			t.Errorf("after %d: %+v, held by %+v, not %s", n, v, v.First, want)
		}
		places = append(places, p)
	}
	s.store.kv.KV = reads
	release(places[2])
	p, v := join("later")
	if want := places[3].r.Holder; v.Held() || v.First == nil || v.First.Holder != want || v.Waiting != 5 {
		t.Errorf("after three: %+v, held by %+v, not %s", v, v.First, want)
	}
	// Who is gone in the middle is counted still, at most.
	places[5].Leave(t.Context())
	p.Leave(t.Context())
	if _, v := join("last"); v.Held() || v.First == nil || v.Waiting < 4 || v.Waiting > 6 {
		t.Errorf("after leaves: %+v, held by %+v", v, v.First)
	}
}

// S12: tails go with their sessions, or by themselves, and few leases serve many.
func TestTailsEnd(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	acquire := func(id string) {
		g := s.acquire(t, id)
		if err := s.locks.Release(t.Context(), id, g.Request, g.Token); err != nil {
			t.Fatal(err)
		}
	}
	tails := func() []string {
		resp, err := s.store.kv.Get(t.Context(), s.store.keys.prefix+"q/", clientv3.WithPrefix())
		if err != nil {
			t.Fatal(err)
		}
		var found []string
		for _, kv := range resp.Kvs {
			if kv.Lease == 0 {
				t.Errorf("%s has no lease", kv.Key)
			}
			found = append(found, string(kv.Key))
		}
		return found
	}
	acquire(id)
	if got := tails(); len(got) != 1 {
		t.Fatalf("tails %v", got)
	}
	if _, err := s.sessions.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if got := tails(); len(got) != 0 {
		t.Errorf("of a destroyed session: %v", got)
	}
	short, err := s.sessions.Create(t.Context(), "", nil, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	acquire(short.ID)
	waitFor(t, 15*time.Second, "the tail of an expired session has gone", func() bool { return len(tails()) == 0 })
}

// The number of heads that a node remembers is bounded; what is forgotten is read again.
func TestHeadsAreBounded(t *testing.T) {
	tails := newTails(nil, nil, nil, nil, nil)
	for i := range 2 * maxHeads {
		tails.setHead(fmt.Sprint(i), made{key: "k", created: int64(i + 1)})
		if n := len(tails.ends.young) + len(tails.ends.old); n > maxHeads {
			t.Fatalf("%d heads", n)
		}
		if e := tails.of(fmt.Sprint(max(i-maxHeads/2+1, 0))); e.head.key == "" {
			t.Fatalf("one of the last %d is forgotten", maxHeads/2)
		}
	}
	tails.setHead("s", made{key: "new", created: 2})
	tails.setHead("s", made{key: "late", created: 1})
	if e := tails.of("s"); e.head.key != "new" {
		t.Errorf("head is %v", e.head)
	}
}

// L4: only the head itself is known to have gone, not another entry of the same key, nor one that came after it.
func TestRemovedHead(t *testing.T) {
	tails := newTails(nil, nil, nil, nil, nil)
	gone := func(key string, revision int64) bool {
		tails.removed("s", key, revision)
		return tails.of("s").gone
	}
	tails.setHead("s", made{key: "k", created: 5})
	if gone("other", 6) || gone("k", 4) {
		t.Error("what has gone is not the head")
	}
	if !gone("k", 6) {
		t.Error("the head has gone")
	}
	tails.setHead("s", made{key: "k", created: 7})
	if gone("k", 6) {
		t.Error("made anew after one of the same key had gone")
	}
}
