package etcdstore

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// waiting has a caller wait for the lock of a session, behind one entry, and returns what it is granted.
func waiting(t *testing.T, s *services, id string) <-chan lock.Grant {
	t.Helper()
	granted := make(chan lock.Grant, 1)
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	wg.Go(func() {
		defer close(granted)
		g, err := s.locks.Acquire(t.Context(), lock.Request{Session: id, TTL: lock.DefaultTTL, Timeout: 10 * time.Second, Read: true})
		if err != nil {
			t.Error(err)
			return
		}
		granted <- g
	})
	waitFor(t, 5*time.Second, "it waits", func() bool {
		s.store.hub.mu.Lock()
		defer s.store.hub.mu.Unlock()
		for w := range s.store.hub.waiters[escaper.Replace(id)] {
			if w.known && w.standing.before != "" {
				return true
			}
		}
		return false
	})
	return granted
}

// L4, L6: on one node the lock is handed over by the release itself: the grant is as of the release's revision, and shows what was
// saved with it.
func TestTurnComesWithTheRelease(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	held := s.acquire(t, id)
	granted := waiting(t, s, id)
	save := session.Save{ID: id, Data: []byte("saved"), TTL: time.Hour, Token: held.Token, Request: held.Request, Release: true}
	revision, err := s.sessions.Save(t.Context(), save)
	if err != nil {
		t.Fatal(err)
	}
	next := <-granted
	if next.Position != revision || next.Data == nil || string(next.Data.Data) != "saved" || next.Data.Revision != revision || next.Token <= held.Token {
		t.Errorf("saved at %d, granted %+v with %+v", revision, next, next.Data)
	}
	if left := time.Until(next.Until); left < lock.DefaultTTL {
		t.Errorf("%v left of a TTL of %v", left, lock.DefaultTTL)
	}
	granted = waiting(t, s, id)
	if err := s.locks.Release(t.Context(), id, next.Request, next.Token); err != nil {
		t.Fatal(err)
	}
	if last := <-granted; last.Position <= last.Token || string(last.Data.Data) != "saved" {
		t.Errorf("granted %+v with %+v", last, last.Data)
	}
}

// L4: a turn is given only if the waiter's own entry is still there; if it has gone, the waiter takes a new one.
func TestNoTurnWithoutAnEntry(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	held := s.acquire(t, id)
	granted := waiting(t, s, id)
	var before *waiter
	s.store.hub.mu.Lock()
	for w := range s.store.hub.waiters[escaper.Replace(id)] {
		before = w
	}
	gone := before.standing.created
	s.store.hub.mu.Unlock()

	etcds := gateOf(t, s)
	s.store.group.limit = 2
	released := make(chan error, 1)
	go func() { released <- s.locks.Release(t.Context(), id, held.Request, held.Token) }()
	release := <-etcds.arrived
	if _, err := etcd.KV().Delete(t.Context(), before.own); err != nil {
		t.Fatal(err)
	}
	join := <-etcds.arrived
	join.pass <- nil // behind the entry that is being released
	waitQueue(t, s.store, id, 2)
	release.pass <- nil
	if err := <-released; err != nil {
		t.Fatal(err)
	}
	next := <-granted
	if int64(next.Token) <= gone {
		t.Errorf("token %d after an entry of revision %d", next.Token, gone)
	}
	go func() { released <- s.locks.Release(t.Context(), id, next.Request, next.Token) }()
	(<-etcds.arrived).pass <- nil
	if err := <-released; err != nil {
		t.Error(err)
	}
}

// L6: when the answer to a release is lost, or the release fails, the next one does not wait for it.
func TestTurnWithoutAnAnswer(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	held := s.acquire(t, id)
	granted := waiting(t, s, id)
	etcds := gateOf(t, s)
	released := make(chan error, 1)
	go func() { released <- s.locks.Release(t.Context(), id, held.Request, held.Token+1) }()
	(<-etcds.arrived).pass <- nil
	if err := <-released; !errors.Is(err, lock.ErrNotHeld) {
		t.Fatal(err)
	}
	select {
	case g := <-granted:
		t.Fatalf("granted %+v", g)
	default:
	}
	began := time.Now()
	go func() { released <- s.locks.Release(t.Context(), id, held.Request, held.Token) }()
	(<-etcds.arrived).pass <- errLost
	if err := <-released; !errors.Is(err, session.ErrUnavailable) {
		t.Fatal(err)
	}
	next := <-granted
	if took := time.Since(began); took > time.Second {
		t.Errorf("granted after %v", took)
	}
	if next.Token <= held.Token {
		t.Errorf("token %d after %d", next.Token, held.Token)
	}
}

// L4: a waiter whose lease has too little left for a whole TTL is not given its turn by the release: it refreshes the lease first.
func TestNoTurnWithoutEnoughLease(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	held := s.acquire(t, id)
	granted := waiting(t, s, id)
	s.store.hub.mu.Lock()
	for w := range s.store.hub.waiters[escaper.Replace(id)] {
		w.standing.ready = time.Now()
	}
	s.store.hub.mu.Unlock()
	if next := s.store.hub.successor(id, s.store.keys.lock(id, held.Request)); next != nil {
		t.Error("promised a turn")
	}
	if err := s.locks.Release(t.Context(), id, held.Request, held.Token); err != nil {
		t.Fatal(err)
	}
	if next := <-granted; next.Token <= held.Token || time.Until(next.Until) < lock.DefaultTTL {
		t.Errorf("granted %+v", next)
	}
}

// L4: a waiting entry's lease is refreshed when too little is left of it for a whole TTL, and spared otherwise.
func TestCheckRefreshes(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	s.acquire(t, id)
	p, ok := s.store.Place(lock.Request{Session: id, ID: "waiter", Holder: "waiter", TTL: lock.DefaultTTL}).(*place)
	if !ok {
		t.Fatal("another kind of place")
	}
	defer p.Close()
	if _, err := p.Join(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	defer p.Leave(t.Context())
	until := p.lease.until
	if _, err := p.Check(t.Context()); err != nil || p.lease.until != until {
		t.Errorf("lease with enough left: %v, until %v instead of %v", err, p.lease.until, until)
	}
	p.lease.until = time.Now().Add(lock.DefaultTTL)
	if _, err := p.Check(t.Context()); err != nil || time.Until(p.lease.until) < enough(lock.DefaultTTL) {
		t.Errorf("lease with too little left: %v, %v left", err, time.Until(p.lease.until))
	}
}
