package etcdstore

import (
	"errors"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// In these tests a lease is made one of an earlier term of raft, in which another member led: that one may still have it
// revoked, by a countdown of which nobody else knows, however often it is renewed now.

// earlier makes a lease one that was granted, and renewed, in an earlier term.
func earlier(l pooled) pooled {
	l.granted--
	l.term = l.granted
	return l
}

// revoke is what the member does that led then.
func revoke(t *testing.T, id clientv3.LeaseID) {
	t.Helper()
	if _, err := etcd.Client().Revoke(t.Context(), id); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		t.Fatal(err)
	}
}

func hourLong(id, name string) lock.Request {
	// In its long TTL the pool renews nothing by itself.
	return lock.Request{Session: id, ID: name, Holder: name, TTL: time.Hour, Timeout: 10 * time.Second}
}

// stillHeld checks that a grant's entry is there, and that the grant says how long its lease lives.
func stillHeld(t *testing.T, s *services, g lock.Grant) {
	t.Helper()
	v, err := s.store.Look(t.Context(), lock.Request{Session: g.Session, ID: g.Request})
	if err != nil || !v.Held() || v.Own.Token != g.Token {
		t.Errorf("the lock is lost: %+v, %v", v, err)
	}
	if left := time.Until(g.Until); left > lockLeaseTTL(time.Hour) || left < time.Hour {
		t.Errorf("%v left of a lease of %v", left, lockLeaseTTL(time.Hour))
	}
}

// join puts a request into a queue in which another one holds the lock.
func join(t *testing.T, s *services, r lock.Request) *place {
	t.Helper()
	p, ok := s.store.Place(r).(*place)
	if !ok {
		t.Fatal("another kind of place")
	}
	t.Cleanup(p.Close)
	if v, err := p.Join(t.Context(), false); err != nil || v.Held() {
		t.Fatalf("%+v, %v", v, err)
	}
	return p
}

// L4, L6: a waiter whose lease is from an earlier term gets another one before it gets the lock, and keeps its place; also if
// the release itself looks for the next one.
func TestWaiterOfAnEarlierTerm(t *testing.T) {
	for name, long := range map[string]bool{"which is due to be renewed": false, "which would last": true} {
		t.Run(name, func(t *testing.T) {
			s := newServices(t, t.Name()+"/")
			id := s.create(t)
			first, err := s.locks.Acquire(t.Context(), hourLong(id, "first"))
			if err != nil {
				t.Fatal(err)
			}
			p := join(t, s, hourLong(id, "waiter"))
			behind := join(t, s, hourLong(id, "behind"))
			p.lease = earlier(p.lease)
			if !long {
				p.lease.until = time.Now()
			}
			s.store.hub.mu.Lock()
			p.waiter.standing.term = p.lease.term
			s.store.hub.mu.Unlock()
			old := p.lease.id
			if err := s.locks.Release(t.Context(), id, first.Request, first.Token); err != nil {
				t.Fatal(err)
			}
			v, err := p.Check(t.Context())
			if err != nil || !v.Held() || p.lease.id == old {
				t.Fatalf("%+v, %v, lease %x", v, err, p.lease.id)
			}
			revoke(t, old)
			stillHeld(t, s, lock.Grant{Session: id, Request: "waiter", Token: v.Own.Token, Until: v.Until})
			if v, err := behind.Check(t.Context()); err != nil || v.Held() || v.Own == nil {
				t.Errorf("behind it: %+v, %v", v, err)
			}
			behind.Leave(t.Context())
			p.Leave(t.Context())
			waitQueue(t, s.store, id, 0)
		})
	}
}

// L4: a waiter renews the lease that it has as long as the term lasts, which costs no commit.
func TestWaiterOfThisTerm(t *testing.T) {
	s := newServices(t, t.Name()+"/")
	id := s.create(t)
	first, err := s.locks.Acquire(t.Context(), hourLong(id, "first"))
	if err != nil {
		t.Fatal(err)
	}
	p := join(t, s, hourLong(id, "waiter"))
	was := p.lease.id
	for range 3 {
		p.lease.until = time.Now()
		if v, err := p.Check(t.Context()); err != nil || v.Held() || p.lease.id != was || p.lease.term != p.lease.granted {
			t.Fatalf("%+v, %v, lease %+v", v, err, p.lease)
		}
	}
	if err := s.locks.Release(t.Context(), id, first.Request, first.Token); err != nil {
		t.Fatal(err)
	}
	if v, err := p.Check(t.Context()); err != nil || !v.Held() || p.lease.id != was {
		t.Fatalf("%+v, %v, lease %+v", v, err, p.lease)
	}
	p.Leave(t.Context())
}

// L4: a pool hands out no lease that was renewed in an earlier term, nor renews one.
func TestPoolOfAnEarlierTerm(t *testing.T) {
	for name, change := range map[string]func(pooled) pooled{
		"renewed then": earlier,
		"to be renewed": func(l pooled) pooled {
			l.granted--
			l.until = time.Now().Add(time.Hour)
			return l
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServices(t, t.Name()+"/")
			id := s.create(t)
			acquire := func() (lock.Grant, clientv3.LeaseID) {
				g, err := s.locks.Acquire(t.Context(), hourLong(id, "caller"))
				if err != nil {
					t.Fatal(err)
				}
				l, ok := s.store.pool.of(s.store.keys.lock(id, "caller"), int64(g.Token))
				if !ok {
					t.Fatal("no lease")
				}
				return g, l.id
			}
			g, old := acquire()
			if err := s.locks.Release(t.Context(), id, g.Request, g.Token); err != nil {
				t.Fatal(err)
			}
			s.store.pool.mu.Lock()
			for _, list := range s.store.pool.idle {
				for i := range list {
					list[i] = change(list[i])
				}
			}
			s.store.pool.mu.Unlock()
			taken, err := s.store.pool.take(t.Context(), time.Hour)
			if err != nil || taken.id == old {
				t.Errorf("the lease of an earlier term was handed out: %+v, %v", taken, err)
			}
			s.store.pool.put(taken)
			g, _ = acquire()
			revoke(t, old)
			stillHeld(t, s, g)
		})
	}
}

// L8, L4: a retry gets the grant of the first call with the same lease, unless how long that lives is known no more: then it gets
// another, in the same place.
func TestRetryInALaterTerm(t *testing.T) {
	for name, later := range map[string]bool{"in the same term": false, "in a later term": true} {
		for where, same := range map[string]bool{"on the same node": true, "on another node": false} {
			t.Run(name+" "+where, func(t *testing.T) {
				s := newServices(t, t.Name()+"/")
				id := s.create(t)
				key := s.store.keys.lock(id, "caller")
				first, err := s.locks.Acquire(t.Context(), hourLong(id, "caller"))
				if err != nil {
					t.Fatal(err)
				}
				l, _ := s.store.pool.of(key, int64(first.Token))
				if later {
					s.makeEarlier(t, key, l.id)
					s.store.pool.extend(key, int64(first.Token), earlier(l))
				}
				node := s
				if !same {
					node = newServices(t, t.Name()+"/")
				}
				again, err := node.locks.Acquire(t.Context(), hourLong(id, "caller"))
				if err != nil || again.Token != first.Token {
					t.Fatalf("%+v, %v", again, err)
				}
				if got := leaseOf(t, key); (got != l.id) != later {
					t.Errorf("lease %x, was %x", got, l.id)
				}
				if later {
					revoke(t, l.id)
				}
				stillHeld(t, node, again)
			})
		}
	}
}

// makeEarlier writes an entry as it would be had its lease been granted in an earlier term.
func (s *services) makeEarlier(t *testing.T, key string, lease clientv3.LeaseID) {
	t.Helper()
	resp, err := etcd.KV().Get(t.Context(), key)
	if err != nil || len(resp.Kvs) == 0 {
		t.Fatal(resp, err)
	}
	rec, err := decodeEntry(resp.Kvs[0].Value)
	if err != nil {
		t.Fatal(err)
	}
	rec.Term--
	if _, err := etcd.KV().Put(t.Context(), key, rec.encode(), clientv3.WithLease(lease)); err != nil {
		t.Fatal(err)
	}
}

func leaseOf(t *testing.T, key string) clientv3.LeaseID {
	t.Helper()
	resp, err := etcd.KV().Get(t.Context(), key)
	if err != nil || len(resp.Kvs) == 0 {
		t.Fatal(resp, err)
	}
	return clientv3.LeaseID(resp.Kvs[0].Lease)
}

// L8: if a retry has taken the entry over, the earlier call neither moves nor removes it.
func TestMoveAfterARetry(t *testing.T) {
	s := newServices(t, t.Name()+"/")
	id := s.create(t)
	if _, err := s.locks.Acquire(t.Context(), hourLong(id, "first")); err != nil {
		t.Fatal(err)
	}
	p := join(t, s, hourLong(id, "waiter"))
	retry := join(t, s, hourLong(id, "waiter"))
	was := leaseOf(t, p.key)
	p.lease = earlier(p.lease)
	p.lease.until = time.Now()
	if v, err := p.Check(t.Context()); !errors.Is(err, session.ErrUnavailable) {
		t.Fatalf("%+v, %v", v, err)
	}
	p.Leave(t.Context())
	if got := leaseOf(t, p.key); got != was {
		t.Errorf("lease %x, was %x", got, was)
	}
	retry.Leave(t.Context())
	waitQueue(t, s.store, id, 1)
}

// S1: what is left of a session whose lease another node took is believed only if the lease is from the time since etcd's
// leader changed; a touch writes it anew otherwise.
func TestTouchAfterAChangeOfLeader(t *testing.T) {
	s, other := newServices(t, t.Name()+"/"), newServices(t, t.Name()+"/")
	id := s.create(t)
	lease := func() clientv3.LeaseID { return leaseOf(t, s.store.keys.session(id)) }
	touch := func(n *services) {
		t.Helper()
		if left, err := n.sessions.Touch(t.Context(), id); err != nil || left < 50*time.Minute {
			t.Fatal(left, err)
		}
	}
	was := lease()
	touch(other)
	if lease() != was {
		t.Fatal("a fresh session was written again")
	}
	third := newServices(t, t.Name()+"/")
	third.store.terms.see(1 << 40)
	touch(third)
	if lease() == was {
		t.Error("the session was left on a lease of an earlier term")
	}
	was = lease()
	touch(third)
	if lease() != was {
		t.Error("a session on a lease of the node's own was written again")
	}
}
