package etcdstore

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// ended says whether a lease has.
func ended(t *testing.T, id clientv3.LeaseID) bool {
	t.Helper()
	resp, err := etcd.Client().TimeToLive(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return resp.TTL < 0
}

// has says whether there are keys with a prefix.
func has(t *testing.T, prefix string) bool {
	t.Helper()
	resp, err := etcd.KV().Get(t.Context(), prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		t.Fatal(err)
	}
	return resp.Count > 0
}

// dueOf is what a node remembers of a lease that it was granted.
func dueOf(t *testing.T, s *Store, id clientv3.LeaseID) dueLease {
	t.Helper()
	s.expiry.mu.Lock()
	defer s.expiry.mu.Unlock()
	i := slices.IndexFunc(s.expiry.due, func(d dueLease) bool { return d.id == id })
	if i < 0 {
		t.Fatalf("lease %x is not to be looked after", id)
	}
	return s.expiry.due[i]
}

// dueNow is a lease that is due whatever is left of it.
func dueNow(id clientv3.LeaseID) dueLease {
	return dueLease{id: id, at: time.Now(), slack: 1 << 20 * time.Second}
}

// S1, S12: sessions, messages and tails go when they are due, not before, and not only when etcd would end their lease.
func TestGoneWhenDue(t *testing.T) {
	t.Parallel()
	s := newServices(t, "")
	keys := s.store.keys
	id := s.create(t)
	for name, put := range map[string]func() (key string, least time.Duration){
		"session": func() (string, time.Duration) {
			created, err := s.sessions.Create(t.Context(), "", nil, time.Second)
			if err != nil {
				t.Fatal(err)
			}
			return keys.session(created.ID), created.Remaining
		},
		"message": func() (string, time.Duration) {
			if _, err := s.messages.Publish(t.Context(), message.Publish{Session: id, Stream: "s", Request: "r", TTL: time.Second}); err != nil {
				t.Fatal(err)
			}
			return keys.message(id, "s", "r") + lastName(0, 0), 0
		},
		"tail": func() (string, time.Duration) {
			lease, until, err := s.store.tails.takeFor(t.Context(), time.Second, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.store.kv.Put(t.Context(), keys.tail(id), "", clientv3.WithLease(lease)); err != nil {
				t.Fatal(err)
			}
			return keys.tail(id), time.Until(until)
		},
	} {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			key, least := put()
			due := dueOf(t, s.store, leaseOf(t, key))
			waitFor(t, 10*time.Second, key+" has gone", func() bool { return !has(t, key) })
			if lived := time.Since(began); lived < least {
				t.Errorf("gone after %v, promised were %v", lived, least)
			}
			late := time.Since(due.at)
			t.Logf("gone %v after it was due", late)
			if late >= due.slack {
				t.Errorf("gone %v after it was due: its lease would have ended after %v", late, due.slack)
			}
			if !ended(t, due.id) {
				t.Error("its lease has not ended")
			}
		})
	}
}

// S1, S12: what is saved, touched or destroyed, and made anew, right before its lease is ended stays; the others on that go.
func TestSavedWhenDue(t *testing.T) {
	for name, meanwhile := range map[string]func(s *services, id string) error{
		"touched": func(s *services, id string) error {
			_, err := s.sessions.Touch(t.Context(), id)
			return err
		},
		"saved": func(s *services, id string) error {
			_, err := s.sessions.Save(t.Context(), session.Save{ID: id, TTL: time.Hour})
			return err
		},
		"made anew": func(s *services, id string) error {
			if _, err := s.sessions.Destroy(t.Context(), id); err != nil {
				return err
			}
			_, err := s.sessions.Create(t.Context(), id, nil, time.Hour)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			prefix := rand.Text() + "/"
			s, other := open(t, prefix), newServices(t, prefix) // which takes other leases
			other.store.terms.see(1 << 40)                      // and so writes every touch
			ids := []string{"a", "kept", "z"}
			for _, id := range ids {
				if _, _, err := s.CreateSession(t.Context(), id, nil, time.Hour); err != nil {
					t.Fatal(err)
				}
			}
			lease := leaseOf(t, s.keys.session("a"))
			if err := meanwhile(other, "kept"); err != nil {
				t.Fatal(err)
			}
			if again := s.expireLease(t.Context(), dueNow(lease)); again != 0 {
				t.Fatalf("again after %v", again)
			}
			for _, id := range ids {
				if _, _, err := other.store.ReadSession(t.Context(), id); (id == "kept") != (err == nil) || err != nil && !errors.Is(err, session.ErrNotFound) {
					t.Errorf("%s: %v", id, err)
				}
			}
			// What comes too late for the lease takes another.
			if _, _, err := s.CreateSession(t.Context(), "late", nil, time.Hour); err != nil {
				t.Error(err)
			}
		})
	}
}

// S1: when keys are due, etcd's leader says. A new one counts leases anew, and what it has told other nodes of a session's time holds, whatever
// the node that was granted the lease thinks.
func TestExpiryGoesByTheLeader(t *testing.T) {
	t.Parallel()
	prefix := rand.Text() + "/"
	s, other := newServices(t, prefix), newServices(t, prefix)
	created, err := s.sessions.Create(t.Context(), "", nil, 2*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	key := s.store.keys.session(created.ID)
	lease := leaseOf(t, key)
	due := dueOf(t, s.store, lease)
	waitFor(t, 5*time.Second, "half of its time is over", func() bool { return time.Until(due.at) < time.Second })
	if _, err := etcd.Client().KeepAliveOnce(t.Context(), lease); err != nil { // which has the leader count anew
		t.Fatal(err)
	}
	left, _, err := other.store.leases.remaining(t.Context(), lease, 2*time.Second)
	until := time.Now().Add(left)
	if err != nil || !until.After(due.at) {
		t.Fatalf("%v until %v, of what was due at %v: %v", left, until, due.at, err)
	}
	due.at = time.Now()
	if again := s.store.expireLease(t.Context(), due); again < left || !has(t, key) {
		t.Errorf("again after %v, %v before it is due", again, left)
	}
	waitFor(t, 10*time.Second, "the session has gone", func() bool { return !has(t, key) })
	if time.Now().Before(until) {
		t.Error("gone before the time that another node was told")
	}
	if late := time.Since(until); late >= due.slack {
		t.Errorf("gone %v after it was due: its lease would have ended after %v", late, due.slack)
	}
}

// S1: no node believes that a session lives longer than the one does that will remove it.
func TestNoNodeExpectsMore(t *testing.T) {
	prefix := rand.Text() + "/"
	s, other := newServices(t, prefix), newServices(t, prefix)
	for _, ttl := range []time.Duration{time.Second, 1500 * time.Millisecond, 90 * time.Second, time.Hour, 24 * time.Hour} {
		created, err := s.sessions.Create(t.Context(), "", nil, ttl)
		if err != nil {
			t.Fatal(err)
		}
		lease := leaseOf(t, s.store.keys.session(created.ID))
		due := dueOf(t, s.store, lease)
		if early := time.Until(due.at); early < ttl {
			t.Errorf("%v: due after %v", ttl, early)
		}
		for name, n := range map[string]*services{"the same": s, "another": other} {
			left, _, err := n.store.leases.remaining(t.Context(), lease, ttl)
			if until := time.Now().Add(left); err != nil || left < ttl-time.Second || until.After(due.at.Add(time.Millisecond)) {
				t.Errorf("%v, %s node: %v until %v, due at %v: %v", ttl, name, left, until, due.at, err)
			}
		}
	}
}

// S12: if the node that was granted the lease has gone, etcd ends it with what is on it when the slack is over.
func TestExpiryWithoutItsNode(t *testing.T) {
	t.Parallel()
	prefix := rand.Text() + "/"
	s, other := newServices(t, prefix), newServices(t, prefix)
	s.store.leases.slack = func() time.Duration { return 2 * time.Second }
	created, err := s.sessions.Create(t.Context(), "", nil, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	lease := leaseOf(t, s.store.keys.session(created.ID))
	due := dueOf(t, s.store, lease)
	s.store.Close(t.Context())
	waitFor(t, 15*time.Second, "the session has gone", func() bool {
		_, _, err := other.sessions.Read(t.Context(), created.ID)
		return errors.Is(err, session.ErrNotFound)
	})
	if late := time.Since(due.at); late < due.slack-time.Second {
		t.Errorf("gone %v after it was due: with its lease it would be %v", late, due.slack)
	}
	waitFor(t, 5*time.Second, "the lease has gone", func() bool { return ended(t, lease) })
}

// S12: leases are looked after in the order in which they are due, and of so many and no more.
func TestDueInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newExpiry()
		began := time.Now()
		for i, after := range []time.Duration{3, 1, 2, 1} {
			e.add(dueLease{id: clientv3.LeaseID(i), at: began.Add(after * time.Second)})
		}
		var order []clientv3.LeaseID
		for len(order) < 4 {
			d, ok, wait := e.next()
			if ok {
				if d.at.After(time.Now()) {
					t.Errorf("lease %d comes %v early", d.id, time.Until(d.at))
				}
				order = append(order, d.id)
				continue
			}
			if wait <= 0 {
				t.Fatalf("%v, and nothing to wait for", order)
			}
			time.Sleep(wait)
		}
		if order[2] != 2 || order[3] != 0 || time.Since(began) != 3*time.Second {
			t.Errorf("order %v after %v", order, time.Since(began))
		}
		for range maxDue + 10 {
			e.add(dueLease{at: began})
		}
		if len(e.due) != maxDue {
			t.Errorf("%d leases", len(e.due))
		}
	})
}

// S12: of what is due, that is ended first which is late first.
func TestLateFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newExpiry()
		now := time.Now()
		for i, late := range []time.Duration{30, 10, 20} {
			e.add(dueLease{id: clientv3.LeaseID(i), at: now.Add(-time.Duration(i)), late: now.Add(late * time.Second)})
		}
		for _, want := range []clientv3.LeaseID{1, 2, 0} {
			if d, ok, _ := e.next(); !ok || d.id != want {
				t.Errorf("lease %d, want %d", d.id, want)
			}
		}
		if _, ok, wait := e.next(); ok || wait != 0 {
			t.Errorf("there is more, in %v", wait)
		}
		// What etcd's leader gives more time is late so much later.
		d := dueLease{at: now.Add(-time.Hour), late: now.Add(-time.Hour + time.Minute)}.in(time.Second)
		if d.at != now.Add(time.Second) || d.late != now.Add(time.Second+time.Minute) {
			t.Errorf("due in %v, late in %v", d.at.Sub(now), d.late.Sub(now))
		}
	})
}

// S12: what is due is ended bit by bit while there is time, and faster the later it gets.
func TestPausesOfExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const took = 10 * time.Millisecond
		e := newExpiry()
		if got := e.pauseAfter(took); got != 2*took {
			t.Errorf("after the last one %v", got)
		}
		now := time.Now()
		for range 200 {
			e.add(dueLease{at: now, late: now.Add(10 * time.Second)})
		}
		e.next()
		ended := 1
		for {
			time.Sleep(took + e.pauseAfter(took))
			if time.Since(now) > 10*time.Second {
				break
			}
			if _, ok, _ := e.next(); !ok {
				break
			}
			ended++
		}
		if since := time.Since(now); ended != 200 || since < 9*time.Second || since > 10*time.Second {
			t.Errorf("%d of 200 after %v", ended, since)
		}
		for _, c := range []struct {
			n          int
			left, want time.Duration
		}{
			{n: 1, left: 10 * time.Second, want: 4 * took},
			{n: 1000, left: 10 * time.Second, want: 2 * took},
			{n: 1000, left: -time.Second, want: took * 3 / 2},
			{n: 1, left: -time.Minute, want: took / 2},
		} {
			e := newExpiry()
			now := time.Now()
			for range c.n + 1 {
				e.add(dueLease{at: now, late: now.Add(c.left)})
			}
			e.next()
			if got := e.pauseAfter(took); got != c.want {
				t.Errorf("%d leases, %v until they are late: a pause of %v, want %v", c.n, c.left, got, c.want)
			}
		}
	})
}

// slowRevokes are leases that are due, the end of which takes some time.
type slowRevokes struct {
	clientv3.Lease

	took  time.Duration
	ended []time.Time
}

func (l *slowRevokes) TimeToLive(context.Context, clientv3.LeaseID, ...clientv3.LeaseOption) (*clientv3.LeaseTimeToLiveResponse, error) {
	return &clientv3.LeaseTimeToLiveResponse{ResponseHeader: &etcdserverpb.ResponseHeader{}}, nil
}

func (l *slowRevokes) Revoke(context.Context, clientv3.LeaseID) (*clientv3.LeaseRevokeResponse, error) {
	time.Sleep(l.took)
	l.ended = append(l.ended, time.Now())
	return &clientv3.LeaseRevokeResponse{}, nil
}

// S12: a node that has time to end its leases before they are late takes its time.
func TestExpiryTakesItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 100
		l := &slowRevokes{took: 10 * time.Millisecond}
		s := &Store{lease: lease{Lease: l, members: 1}, expiry: newExpiry()}
		began := time.Now()
		for i := range n {
			s.expiry.add(dueLease{id: clientv3.LeaseID(i + 1), at: began, late: began.Add(4 * time.Second), slack: time.Minute})
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		s.expire(ctx)
		if len(l.ended) != n {
			t.Fatalf("%d of %d have ended", len(l.ended), n)
		}
		if last := l.ended[n-1].Sub(began); last < 3900*time.Millisecond || last > 4100*time.Millisecond {
			t.Errorf("the last one ended after %v", last)
		}
	})
}
