package etcdstore

import (
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// services are the rules on one node's store.
type services struct {
	store    *Store
	sessions *session.Service
	locks    *lock.Service
	messages *message.Service
}

func newServices(t *testing.T, prefix string) *services {
	t.Helper()
	s := open(t, prefix)
	return &services{
		store:    s,
		sessions: session.NewService(s, session.DefaultMaxBytes),
		locks:    lock.NewService(s, lock.DefaultMaxWaiters, nil),
		messages: message.NewService(s, nil),
	}
}

func (s *services) create(t *testing.T) string {
	t.Helper()
	created, err := s.sessions.Create(t.Context(), "", []byte("data"), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return created.ID
}

func (s *services) acquire(t *testing.T, id string) lock.Grant {
	t.Helper()
	g, err := s.locks.Acquire(t.Context(), lock.Request{Session: id, TTL: lock.DefaultTTL, Timeout: 10 * time.Second, Read: true})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// commits counts the raft entries that f adds, without those that grant leases, and without those by which the member ends the leases
// that other tests left. They belong to no operation.
func commits(t *testing.T, f func(), stores ...*Store) int {
	t.Helper()
	count := func() int {
		grants := int64(0)
		for _, s := range stores {
			grants += s.LeaseGrants()
		}
		member, n := etcd.Member().Server, 0
		waitFor(t, 10*time.Second, "all that is committed is carried out", func() bool {
			// The ends of leases are counted when they are carried out.
			committed, ended := member.CommittedIndex(), leasesEnded(t)
			n = int(committed) - int(grants) - ended
			return member.AppliedIndex() == committed && leasesEnded(t) == ended
		})
		return n
	}
	before := count()
	f()
	return count() - before
}

// What belongs to no operation is not counted as one's.
func TestCommitsAreOfTheOperation(t *testing.T) {
	lease := etcd.Client()
	granted, err := lease.Grant(t.Context(), 60)
	if err != nil {
		t.Fatal(err)
	}
	got := commits(t, func() {
		if _, err := lease.Revoke(t.Context(), granted.ID); err != nil {
			t.Fatal(err)
		}
	})
	if got != 0 {
		t.Errorf("the end of a lease counts as %d commits", got)
	}
}

// leasesEnded is how many leases members in this process have ended.
func leasesEnded(t *testing.T) int {
	t.Helper()
	families, err := prometheus.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() == "etcd_debugging_lease_revoked_total" {
			return int(family.GetMetric()[0].GetCounter().GetValue())
		}
	}
	t.Fatal("etcd does not count the ends of leases")
	return 0
}

// What an operation costs is fixed: a commit is a raft entry with its fsync.
func TestCommits(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	const n = 20
	cycle := func(saveReleases bool) {
		g := s.acquire(t, id)
		save := session.Save{ID: id, Data: []byte("more"), TTL: time.Hour, Token: g.Token, Request: g.Request, Release: saveReleases}
		if _, err := s.sessions.Save(t.Context(), save); err != nil {
			t.Fatal(err)
		}
		if !saveReleases {
			if err := s.locks.Release(t.Context(), id, g.Request, g.Token); err != nil {
				t.Fatal(err)
			}
		}
	}
	publish := func(size int) {
		_, err := s.messages.Publish(t.Context(), message.Publish{Session: id, Stream: "s", Payload: make([]byte, size), TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
	}
	tests := []struct {
		name string
		want int
		op   func()
	}{
		{"acquire with read, save with release", 2, func() { cycle(true) }},
		{"acquire with read, save, release", 3, func() { cycle(false) }},
		{"create", 1, func() { s.create(t) }},
		{"read", 0, func() {
			if _, _, err := s.sessions.Read(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}},
		{"touch of a fresh session", 0, func() {
			if _, err := s.sessions.Touch(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}},
		{"publish", 1, func() { publish(100) }},
		{"destroy", 1, func() {
			if _, err := s.sessions.Destroy(t.Context(), "gone"); err != nil {
				t.Fatal(err)
			}
		}},
		{"trim of nothing", 0, func() {
			if _, err := s.messages.Trim(t.Context(), id, "other", 1<<60, 0); err != nil {
				t.Fatal(err)
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.op()
			got := commits(t, func() {
				for range n {
					tt.op()
				}
			}, s.store)
			if got != n*tt.want {
				t.Errorf("%d times: %d commits, want %d each", n, got, tt.want)
			}
		})
	}

	t.Run("publish of 3 MiB", func(t *testing.T) {
		if got := commits(t, func() { publish(3 << 20) }, s.store); got != 3 {
			t.Errorf("%d commits, want 3", got)
		}
	})
	for stream, want := range map[string]int{"s": 1, "none": 0} {
		t.Run("retain", func(t *testing.T) {
			if got := commits(t, func() {
				if err := s.messages.Retain(t.Context(), id, stream, message.MaxTTL); err != nil {
					t.Fatal(err)
				}
			}, s.store); got != want {
				t.Errorf("%d commits, want %d", got, want)
			}
		})
	}
	t.Run("trim", func(t *testing.T) {
		if got := commits(t, func() {
			if removed, err := s.messages.Trim(t.Context(), id, "s", 1<<60, 0); err != nil || removed != n+2 {
				t.Errorf("trim: %d, %v", removed, err)
			}
		}, s.store); got != 1 {
			t.Errorf("%d commits, want 1", got)
		}
	})
	t.Run("try of a held lock", func(t *testing.T) {
		g := s.acquire(t, id)
		got := commits(t, func() {
			for range n {
				_, holder, err := s.locks.TryAcquire(t.Context(), lock.Request{Session: id, TTL: lock.DefaultTTL})
				if err != nil || holder != g.Request {
					t.Fatalf("try: %q, %v", holder, err)
				}
			}
		}, s.store)
		if got != 0 {
			t.Errorf("%d commits, want none", got)
		}
	})
}

// L6: a queue over two nodes is served in order, each acquire costs one commit and each hand-over wakes one waiter.
func TestHandOver(t *testing.T) {
	prefix := rand.Text() + "/"
	nodes := []*services{newServices(t, prefix), newServices(t, prefix)}
	a := nodes[0]
	id := a.create(t)
	first := a.acquire(t, id)

	const n = 30
	order := make(chan int, n)
	var wg sync.WaitGroup
	defer wg.Wait()
	got := commits(t, func() {
		for i := range n {
			node := nodes[i%2]
			wg.Go(func() {
				g, err := node.locks.Acquire(t.Context(), lock.Request{Session: id, TTL: lock.DefaultTTL, Timeout: 30 * time.Second})
				if err != nil {
					t.Error(err)
					return
				}
				order <- i
				if err := node.locks.Release(t.Context(), id, g.Request, g.Token); err != nil {
					t.Error(err)
				}
			})
			waitQueue(t, a.store, id, i+2)
		}
	}, nodes[0].store, nodes[1].store)
	if got != n {
		t.Errorf("%d commits for %d waiters", got, n)
	}

	checks := nodes[0].store.WaiterChecks() + nodes[1].store.WaiterChecks()
	got = commits(t, func() {
		if err := a.locks.Release(t.Context(), id, first.Request, first.Token); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
	}, nodes[0].store, nodes[1].store)
	if got != n+1 {
		t.Errorf("%d commits for %d releases", got, n+1)
	}
	checks = nodes[0].store.WaiterChecks() + nodes[1].store.WaiterChecks() - checks
	if checks != n {
		t.Errorf("%d looks at the queue for %d hand-overs", checks, n)
	}
	for i := range n {
		if got := <-order; got != i {
			t.Fatalf("place %d: waiter %d", i, got)
		}
	}
}

// waitQueue waits until a queue has so many entries.
func waitQueue(t *testing.T, s *Store, id string, length int) {
	t.Helper()
	waitFor(t, 5*time.Second, fmt.Sprintf("queue of %d", length), func() bool {
		resp, err := s.kv.Get(t.Context(), s.keys.locks(id), clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil {
			t.Fatal(err)
		}
		return int(resp.Count) == length
	})
}

func waitFor(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	end := time.After(within)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// L4: a lease that died in the pool does not fail an acquire.
func TestDeadPoolLease(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	g := s.acquire(t, id)
	if err := s.locks.Release(t.Context(), id, g.Request, g.Token); err != nil {
		t.Fatal(err)
	}
	s.store.pool.mu.Lock()
	for _, list := range s.store.pool.idle {
		for _, l := range list {
			if _, err := s.store.lease.Revoke(t.Context(), l.id); err != nil {
				t.Error(err)
			}
		}
	}
	s.store.pool.mu.Unlock()
	s.acquire(t, id)
}

// S1: a shared lease that died does not fail a save.
func TestDeadSharedLease(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	lease := s.store.leases.class(time.Hour).id
	if _, err := s.store.lease.Revoke(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	if _, err := s.sessions.Save(t.Context(), session.Save{ID: id, TTL: time.Hour}); !errors.Is(err, session.ErrNotFound) {
		t.Fatalf("save of an expired session: %v", err)
	}
	s.create(t)
}

// S9: a record of an unknown format is an error of its own, never a missing session.
func TestUnknownFormat(t *testing.T) {
	s := newServices(t, "")
	id := s.create(t)
	if _, err := s.store.kv.Put(t.Context(), s.store.keys.session(id), "\x02whatever"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.sessions.Read(t.Context(), id); !errors.Is(err, session.ErrFormat) || errors.Is(err, session.ErrNotFound) {
		t.Errorf("read: %v", err)
	}
	if _, err := s.sessions.Touch(t.Context(), id); !errors.Is(err, session.ErrFormat) {
		t.Errorf("touch: %v", err)
	}
	if _, err := s.locks.Acquire(t.Context(), lock.Request{Session: id, TTL: time.Minute, Timeout: time.Second, Read: true}); !errors.Is(err, session.ErrFormat) {
		t.Errorf("acquire: %v", err)
	}
	waitQueue(t, s.store, id, 0)
}
