package etcdstore

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// slowLease grants after a second, one id after the other.
type slowLease struct {
	clientv3.Lease

	granted atomic.Int64
}

func (l *slowLease) Grant(_ context.Context, ttl int64) (*clientv3.LeaseGrantResponse, error) {
	time.Sleep(time.Second)
	return &clientv3.LeaseGrantResponse{ID: clientv3.LeaseID(l.granted.Add(1)), TTL: ttl}, nil
}

// Only the first key of a TTL waits for a grant: the next lease is there before the one in use is full. And a lease takes so many keys and
// no more, for all of them go at one go (S12).
func TestNobodyWaitsForTheNextLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &slowLease{}
		background := func(f func(context.Context)) { go f(t.Context()) }
		l := newLeases(slow, new(atomic.Int64), &terms{}, newExpiry(), window, background)
		keys := map[clientv3.LeaseID]int{}
		for n := range 10 * maxKeysPerLease {
			began := time.Now()
			id, until, err := l.takeFor(t.Context(), time.Hour, 0)
			if err != nil {
				t.Fatal(err)
			}
			if waited := time.Since(began); n > 0 && waited > 0 {
				t.Fatalf("key %d waited %v", n, waited)
			}
			if left := time.Until(until); left < time.Hour {
				t.Fatalf("key %d: its lease has %v left", n, left)
			}
			keys[id]++
			time.Sleep(time.Second / manyKeysPerLease * 2)
		}
		for id, count := range keys {
			if count > maxKeysPerLease {
				t.Errorf("lease %d has %d keys", id, count)
			}
		}
		synctest.Wait()
		if got := int(slow.granted.Load()); len(keys) < 10 || got > len(keys)+1 {
			t.Errorf("%d leases were granted, %d used", got, len(keys))
		}
	})
}

// What is put again on the lease that it is on takes no room: a session that is saved over and over needs a lease a window.
func TestSavedAgainOnItsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &slowLease{}
		background := func(f func(context.Context)) { go f(t.Context()) }
		l := newLeases(slow, new(atomic.Int64), &terms{}, newExpiry(), window, background)
		var on clientv3.LeaseID
		for range 10 * maxKeysPerLease {
			id, _, err := l.takeFor(t.Context(), time.Hour, on)
			if err != nil {
				t.Fatal(err)
			}
			on = id
		}
		if got := slow.granted.Load(); got != 1 {
			t.Errorf("%d leases", got)
		}
		time.Sleep(window(time.Hour) + time.Second)
		if id, until, err := l.takeFor(t.Context(), time.Hour, on); err != nil || id == on || time.Until(until) < time.Hour {
			t.Errorf("after the window: lease %d until %v, error %v", id, until, err)
		}
	})
}
