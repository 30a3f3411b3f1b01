package etcdstore

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
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

// grantedLease grants at once, with the TTLs that it is asked for or the least that it grants.
type grantedLease struct {
	clientv3.Lease

	least int64
	ttls  []int64 // by id - 1
}

func (l *grantedLease) Grant(_ context.Context, ttl int64) (*clientv3.LeaseGrantResponse, error) {
	l.ttls = append(l.ttls, max(ttl, l.least))
	return &clientv3.LeaseGrantResponse{ID: clientv3.LeaseID(len(l.ttls)), TTL: l.ttls[len(l.ttls)-1]}, nil
}

func (l *grantedLease) TimeToLive(_ context.Context, id clientv3.LeaseID, _ ...clientv3.LeaseOption) (*clientv3.LeaseTimeToLiveResponse, error) {
	ttl := l.ttls[id-1]
	return &clientv3.LeaseTimeToLiveResponse{ResponseHeader: &etcdserverpb.ResponseHeader{}, ID: id, TTL: ttl, GrantedTTL: ttl}, nil
}

// S1, S12: what is written while leases are full long before their window is over is due soon after its TTL, and not late for as long as ever.
// That takes no more leases. When less is written the window is used again.
func TestShortWindows(t *testing.T) {
	const ttl = time.Hour
	// fill has leases taken for so many keys, with pauses between them. It returns how long each of the leases has keys live.
	fill := func(t *testing.T, l *leases, keys int, every time.Duration) (lives []time.Duration) {
		var last clientv3.LeaseID
		for range keys {
			id, until, err := l.takeFor(t.Context(), ttl, 0)
			if err != nil {
				t.Fatal(err)
			}
			if left := time.Until(until); left < ttl {
				t.Fatalf("lease %d has %v left", id, left)
			}
			if id != last {
				lives = append(lives, time.Until(until))
			}
			last = id
			synctest.Wait() // for the next lease
			time.Sleep(every)
		}
		return lives
	}
	background := func(t *testing.T) func(f func(context.Context)) {
		return func(f func(context.Context)) { go f(t.Context()) }
	}
	t.Run("fast and slow", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			etcd, e := &grantedLease{}, newExpiry()
			l := newLeases(etcd, new(atomic.Int64), &terms{}, e, window, background(t))
			lives := fill(t, l, 10*maxKeysPerLease, shortWindow/(4*maxKeysPerLease))
			if len(lives) != 10 || lives[0] < ttl+window(ttl)-time.Second {
				t.Fatalf("leases of %v", lives)
			}
			for i, lived := range lives[1:] {
				if lived > ttl+shortWindow {
					t.Errorf("keys live for %v on lease %d", lived, i+2)
				}
			}
			for _, d := range e.due {
				early := d.late.Sub(d.at)
				if (early == 0) != (d.id == 1) || early != 0 && early != window(ttl)-shortWindow {
					t.Errorf("lease %d is late %v after it is due", d.id, early)
				}
				if d.slack-early < minSlack {
					t.Errorf("etcd ends lease %d %v after it is late", d.id, d.slack-early)
				}
			}
			// The one that is there by now has the short window still.
			lives = fill(t, l, 3*maxKeysPerLease, window(ttl)/(2*maxKeysPerLease))
			if last := lives[len(lives)-1]; len(lives) > 6 || last < ttl+window(ttl)/2 {
				t.Errorf("then leases of %v", lives)
			}
		})
	})
	t.Run("not for tails", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			tails := newTails(&grantedLease{}, new(atomic.Int64), &terms{}, newExpiry(), background(t))
			for _, lived := range fill(t, tails.leases, 10*maxKeysPerLease, 0) {
				if lived != 2*ttl {
					t.Errorf("a lease of %v", lived)
				}
			}
		})
	})
	// Whatever etcd grants, all nodes make the same of it.
	for _, ttl := range []time.Duration{time.Second, 90 * time.Second, time.Hour} {
		for least := range int64(2) {
			for _, short := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) {
					etcd, e := &grantedLease{least: 2*int64(ttl/time.Second) + 200 + least}, newExpiry()
					if least == 0 {
						etcd.least = 0
					}
					l := newLeases(etcd, new(atomic.Int64), &terms{}, e, window, background(t))
					granted, err := l.grant(t.Context(), ttl, short)
					if err != nil {
						t.Fatal(err)
					}
					other := newLeases(etcd, new(atomic.Int64), &terms{}, newExpiry(), window, background(t))
					left, _, err := other.remaining(t.Context(), granted.id, ttl)
					if lives := time.Until(granted.until); err != nil || left != lives || time.Until(e.due[0].at) != lives {
						t.Errorf("%v, short window: %v: %v, %v of another node, due after %v: %v", ttl, short, lives, left, time.Until(e.due[0].at), err)
					}
					if want := ttl + shortWindow; least == 0 && short && left != want {
						t.Errorf("%v: keys live for %v", ttl, left)
					}
				})
			}
		}
	}
}
