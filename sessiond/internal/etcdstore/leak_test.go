package etcdstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// counts are what must not grow over months.
type counts struct {
	keys, watchers, goroutines int
	leases                     map[clientv3.LeaseID]bool
}

func count(t *testing.T, prefix string) counts {
	t.Helper()
	keys, err := etcd.Client().Get(t.Context(), prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		t.Fatal(err)
	}
	leases, err := etcd.Client().Leases(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := counts{keys: int(keys.Count), watchers: -1, goroutines: runtime.NumGoroutine(), leases: map[clientv3.LeaseID]bool{}}
	for _, l := range leases.Leases {
		c.leases[l.ID] = true
	}
	families, err := prometheus.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "etcd_debugging_mvcc_watcher_total" {
			c.watchers = int(f.GetMetric()[0].GetGauge().GetValue())
		}
	}
	if c.watchers < 0 {
		t.Fatal("etcd does not count its watchers")
	}
	return c
}

// newLeases is how many leases there are that were not there before.
func (c counts) newLeases(before counts) int {
	n := 0
	for id := range c.leases {
		if !before.leases[id] {
			n++
		}
	}
	return n
}

// O5, L3, S12: cycles, refused tries, waits that run out, and sessions that are destroyed or left to expire, with locks held and
// messages stored, leave no key, lease, watch or goroutine behind. It is 20,000 operations, or what 12 s are enough for; 80,000
// more run on the store in memory.
func TestNothingLeaks(t *testing.T) {
	prefix := rand.Text() + "/"
	before := count(t, prefix)
	until := func(t *testing.T, what string, ok func(now counts) bool) {
		t.Helper()
		end := time.Now().Add(maxSlack + 15*time.Second) // of leases that took keys of short TTLs
		for now := count(t, prefix); !ok(now); now = count(t, prefix) {
			if time.Now().After(end) {
				t.Fatalf("%s: %d keys, %d watchers, %d goroutines, %d new leases; at first: %d, %d, %d", what,
					now.keys, now.watchers, now.goroutines, now.newLeases(before), before.keys, before.watchers, before.goroutines)
			}
			<-time.After(100 * time.Millisecond)
		}
	}
	var done atomic.Int64
	t.Run("while the nodes run", func(t *testing.T) {
		nodes := []*services{newServices(t, prefix), newServices(t, prefix)}
		idle := count(t, prefix)
		const callers, want = 128, 20_000
		shared := make([]string, callers/2)
		for i := range shared {
			shared[i] = nodes[i%2].create(t)
		}
		enough := time.Now().Add(12 * time.Second)
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				for r := 0; done.Load() < want && time.Now().Before(enough); r++ {
					n, err := nodes[(i+r)%2].mixed(t.Context(), shared[i%len(shared)], r)
					// A machine that is busy with other things may be too slow for a call; what such a one left is cleared too.
					if err != nil && !errors.Is(err, session.ErrUnavailable) {
						t.Error(err)
						return
					}
					done.Add(int64(n))
				}
			})
		}
		wg.Wait()
		t.Logf("%d operations", done.Load())
		for _, id := range shared {
			if _, err := nodes[0].sessions.Destroy(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		// A bounded number of leases lies ready for the next locks, for a minute.
		until(t, "with idle nodes", func(now counts) bool {
			return now.keys <= idle.keys && now.watchers <= idle.watchers && now.goroutines <= idle.goroutines && now.newLeases(before) <= 2*maxIdleLeases+8
		})
		for _, n := range nodes {
			n.store.hub.mu.Lock()
			if len(n.store.hub.waiters)+len(n.store.hub.feeds) > 0 {
				t.Errorf("%d sessions with waiters, %d with subscribers", len(n.store.hub.waiters), len(n.store.hub.feeds))
			}
			n.store.hub.mu.Unlock()
		}
	})
	// The leases that sessions of an hour and tails shared end by themselves: one for so many keys, and one or two more of each node.
	shared := 2*int(done.Load())/maxKeysPerLease + 10
	until(t, "with the nodes stopped", func(now counts) bool {
		return now.keys == 0 && now.watchers <= before.watchers && now.goroutines <= before.goroutines && now.newLeases(before) <= shared
	})
}

// mixed is some operations, which leave nothing behind. It returns how many.
func (s *services) mixed(ctx context.Context, id string, round int) (int, error) {
	const ttl = 5 * time.Second
	got, err := s.locks.Acquire(ctx, lock.Request{Session: id, TTL: ttl, Timeout: time.Minute, Read: true})
	if err != nil {
		return 0, fmt.Errorf("acquire: %w", err)
	}
	if _, holder, err := s.locks.TryAcquire(ctx, lock.Request{Session: id, TTL: ttl}); err != nil || holder == "" {
		return 0, fmt.Errorf("try of a held lock: %q, %w", holder, err)
	}
	operations := 2
	if round%4 == 0 {
		if _, err := s.locks.Acquire(ctx, lock.Request{Session: id, TTL: ttl, Timeout: time.Millisecond}); !errors.Is(err, lock.ErrTimeout) {
			return 0, fmt.Errorf("wait for a held lock: %w", err)
		}
		operations++
	}
	if err := s.locks.Release(ctx, id, got.Request, got.Token); err != nil && !errors.Is(err, lock.ErrNotHeld) {
		return 0, fmt.Errorf("release: %w", err)
	}
	if round%2 == 0 {
		return operations, nil
	}

	own, err := s.sessions.Create(ctx, "", nil, 2*time.Second)
	if err != nil {
		return 0, fmt.Errorf("create: %w", err)
	}
	gone := func(err error) bool { return err == nil || errors.Is(err, session.ErrNotFound) } // on a slow machine it expires
	if _, err := s.locks.Acquire(ctx, lock.Request{Session: own.ID, TTL: ttl, Timeout: time.Second}); !gone(err) {
		return 0, fmt.Errorf("acquire: %w", err)
	}
	if _, err := s.messages.Publish(ctx, message.Publish{Session: own.ID, Stream: "s", TTL: ttl}); !gone(err) {
		return 0, fmt.Errorf("publish: %w", err)
	}
	if round%8 == 1 {
		return operations + 1, nil // left to its TTL
	}
	if _, err := s.sessions.Destroy(ctx, own.ID); err != nil {
		return 0, fmt.Errorf("destroy: %w", err)
	}
	return operations + 1, nil
}
