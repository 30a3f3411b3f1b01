package etcdstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// L6: a release between a look at the queue and the wait is not missed: two callers on two nodes pass the lock to and fro, and no
// hand-over waits for a timer.
func TestPingPong(t *testing.T) {
	prefix := rand.Text() + "/"
	nodes := []*services{newServices(t, prefix), newServices(t, prefix)}
	id := nodes[0].create(t)
	const rounds = 200
	var wg sync.WaitGroup
	for _, n := range nodes {
		wg.Go(func() {
			for range rounds {
				began := time.Now()
				g, err := n.locks.Acquire(t.Context(), lock.Request{Session: id, TTL: lock.DefaultTTL, Timeout: 30 * time.Second})
				if err != nil {
					t.Error(err)
					return
				}
				if waited := time.Since(began); waited > 2*time.Second {
					t.Errorf("waited for %v", waited)
				}
				if err := n.locks.Release(t.Context(), id, g.Request, g.Token); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// L6, S12: a crowd that gives up leaves nothing: neither entries nor waiters nor leases that somebody keeps alive.
func TestCrowdGivesUp(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	held := s.acquire(t, id)
	const n = 100
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			timeout := 30 * time.Second
			if i%2 == 0 {
				timeout = 50 * time.Millisecond
			}
			_, err := s.locks.Acquire(ctx, lock.Request{Session: id, TTL: lock.DefaultTTL, Timeout: timeout})
			if !errors.Is(err, lock.ErrTimeout) && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	waitFor(t, 20*time.Second, "half of them wait", func() bool {
		resp, err := s.store.kv.Get(t.Context(), s.store.keys.locks(id), clientv3.WithPrefix(), clientv3.WithCountOnly())
		return err == nil && resp.Count >= n/2
	})
	cancel()
	wg.Wait()
	waitQueue(t, s.store, id, 1)
	s.store.hub.mu.Lock()
	waiters := len(s.store.hub.waiters)
	s.store.hub.mu.Unlock()
	if waiters > 0 {
		t.Errorf("%d sessions with waiters", waiters)
	}
	waitFor(t, 5*time.Second, "leases are back", func() bool {
		s.store.pool.mu.Lock()
		defer s.store.pool.mu.Unlock()
		idle := 0
		for _, list := range s.store.pool.idle {
			idle += len(list)
		}
		return len(s.store.pool.held) == 1 && idle <= maxIdleLeases
	})
	if err := s.locks.Release(t.Context(), id, held.Request, held.Token); err != nil {
		t.Fatal(err)
	}
	s.acquire(t, id)
}

// L8: a caller that is gone at the moment of the grant leaves no lock held, whenever that moment is.
func TestGoneAtTheGrant(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	for i := range 60 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*100*time.Microsecond)
		g, err := s.locks.Acquire(ctx, lock.Request{Session: id, TTL: lock.DefaultTTL, Timeout: 10 * time.Second})
		cancel()
		if err == nil {
			if err := s.locks.Release(t.Context(), id, g.Request, g.Token); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		waitQueue(t, s.store, id, 0)
	}
}

// L6: when watches break off, those who wait look for themselves once they are open again.
func TestBrokenWatch(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	held := s.acquire(t, id)
	done := make(chan error, 1)
	go func() {
		_, err := s.locks.Acquire(t.Context(), lock.Request{Session: id, TTL: lock.DefaultTTL, Timeout: 20 * time.Second})
		done <- err
	}()
	waitQueue(t, s.store, id, 2)
	waitFor(t, 5*time.Second, "it waits", func() bool {
		s.store.hub.mu.Lock()
		defer s.store.hub.mu.Unlock()
		for _, ws := range s.store.hub.waiters {
			for w := range ws {
				return w.known
			}
		}
		return false
	})
	// The deletion is not seen: as if it had happened while the watch was away.
	s.store.hub.mu.Lock()
	if _, err := s.store.kv.Delete(t.Context(), s.store.keys.lock(id, held.Request)); err != nil {
		t.Error(err)
	}
	for _, ws := range s.store.hub.waiters {
		for w := range ws {
			w.standing.before = "something else"
		}
	}
	s.store.hub.mu.Unlock()
	s.store.hub.wakeAll()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// M4: the number of a session's stored messages is limited.
func TestStoredMessages(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	var ops []operation
	for i := range message.MaxStored - 1 {
		ops = append(ops, opPut(s.store.keys.message(id, "s", fmt.Sprint(i))+lastName(1, 0), encodeLast([]byte("x")), clientv3.NoLease))
		if len(ops) == maxTxnOps || i == message.MaxStored-2 {
			if _, err := s.store.txn(t.Context(), nil, ops, nil); err != nil {
				t.Fatal(err)
			}
			ops = nil
		}
	}
	publish := message.Publish{Session: id, Stream: "s", Payload: []byte("last"), TTL: time.Minute, Request: "last"}
	if _, err := s.messages.Publish(t.Context(), publish); err != nil {
		t.Fatal(err)
	}
	publish.Request = "more"
	if _, err := s.messages.Publish(t.Context(), publish); err == nil {
		t.Error("no limit")
	} else if e, ok := errors.AsType[*message.TooManyError](err); !ok || e.Limit != message.MaxStored || e.Bytes {
		t.Error(err)
	}
	// A part of the stream goes in hundreds, the rest at one go.
	resp, err := s.store.kv.Get(t.Context(), s.store.keys.message(id, "s", "500")+lastName(1, 0))
	if err != nil {
		t.Fatal(err)
	}
	removed, err := s.messages.Trim(t.Context(), id, "s", uint64(resp.Kvs[0].CreateRevision), 0)
	if err != nil || removed < 500 || removed > 700 {
		t.Errorf("trim: %d, %v", removed, err)
	}
	rest, err := s.messages.Trim(t.Context(), id, "s", 1<<60, 0)
	if err != nil || removed+rest != message.MaxStored {
		t.Errorf("trim: %d, %v", rest, err)
	}
}

// L6: when thousands come at once, those who have to wait until others have made their entries are not told that the store cannot
// be reached. They are served in their turn; who gives up meanwhile, the lock's own timeout, or a store that is down ends the wait at once.
func TestTooManyAtOnce(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	for range maxJoining {
		s.store.joining <- struct{}{}
	}
	acquire := func(ctx context.Context, timeout time.Duration) error {
		g, err := s.locks.Acquire(ctx, lock.Request{Session: id, TTL: lock.DefaultTTL, Timeout: timeout})
		if err != nil {
			return err
		}
		return s.locks.Release(t.Context(), id, g.Request, g.Token)
	}
	gone, leave := context.WithCancel(t.Context())
	leave()
	if err := acquire(gone, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that has gone: %v", err)
	}
	if err := acquire(t.Context(), 50*time.Millisecond); !errors.Is(err, lock.ErrTimeout) {
		t.Errorf("a caller that waits for no longer: %v", err)
	}
	served := make(chan error, 1)
	go func() { served <- acquire(t.Context(), time.Minute) }()
	select {
	case err := <-served:
		t.Fatalf("served before its turn: %v", err)
	case <-time.After(opTimeout + 500*time.Millisecond):
	}
	<-s.store.joining
	if err := <-served; err != nil {
		t.Errorf("in its turn: %v", err)
	}

	s.store.joining <- struct{}{}
	go func() { served <- acquire(t.Context(), time.Minute) }()
	s.store.health.set(false)
	if err := <-served; !errors.Is(err, session.ErrUnavailable) {
		t.Errorf("the store is down: %v", err)
	}
	s.store.health.set(true)
	for range maxJoining {
		<-s.store.joining
	}
}
