package etcdstore

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// Revoking a lease removes its keys at one go; very many of them would stall etcd.
	maxKeysPerLease = 1000
	maxLeaseWindow  = time.Minute
	// How many leases' ends and how many TTL classes are remembered.
	maxKnownLeases = 1 << 16
	maxClasses     = 1 << 10
	// How much a new leader of etcd gives leases on top of their TTLs: its election timeout, which is a second by default.
	maxExtension = 10 * time.Second
)

// leases hands out the shared leases of sessions and messages. Those of one TTL that are written within a window of
// time share one, which lasts for the TTL and the window, so that no key ends before its TTL. Nobody revokes or
// refreshes these leases: they end by themselves, and take what was not written again with them.
type leases struct {
	lease  clientv3.Lease
	grants *atomic.Int64
	terms  *terms
	window func(ttl time.Duration) time.Duration

	mu      sync.Mutex
	classes map[time.Duration]*leaseClass
	known   map[clientv3.LeaseID]sharedLease
}

type sharedLease struct {
	until time.Time // lives until then
	sure  bool      // at least
}

type leaseClass struct {
	turn   chan struct{} // held by who looks at or replaces the fields below
	id     clientv3.LeaseID
	usable time.Time
	until  time.Time // lives until then, at least
	keys   int
}

func newLeases(lease clientv3.Lease, grants *atomic.Int64, terms *terms, window func(ttl time.Duration) time.Duration) *leases {
	return &leases{
		lease:   lease,
		grants:  grants,
		terms:   terms,
		window:  window,
		classes: map[time.Duration]*leaseClass{},
		known:   map[clientv3.LeaseID]sharedLease{},
	}
}

// window is how long keys of a TTL may share a lease, which is how much later than asked they may end.
func window(ttl time.Duration) time.Duration {
	return max(min(maxLeaseWindow, ttl/10).Truncate(time.Second), time.Second)
}

func roundUp(d time.Duration) time.Duration {
	return (d + time.Second - 1).Truncate(time.Second)
}

// take returns a lease that lives for at least ttl from now, and until when it does.
func (l *leases) take(ctx context.Context, ttl time.Duration) (clientv3.LeaseID, time.Time, error) {
	return l.takeFor(ctx, ttl, 0)
}

// takeFor is take for a key that is already on a lease.
func (l *leases) takeFor(ctx context.Context, ttl time.Duration, on clientv3.LeaseID) (clientv3.LeaseID, time.Time, error) {
	ttl = roundUp(ttl)
	c := l.class(ttl)
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return 0, time.Time{}, ctx.Err()
	}
	defer func() { <-c.turn }()

	now := time.Now() // the lease runs from a later moment on
	if c.id == 0 || now.After(c.usable) || (c.keys >= maxKeysPerLease && c.id != on) {
		resp, err := l.lease.Grant(ctx, int64((ttl+l.window(ttl))/time.Second))
		if err != nil {
			return 0, time.Time{}, err
		}
		l.grants.Add(1)
		c.id, c.keys, c.usable = resp.ID, 0, now.Add(l.window(ttl))
		c.until = now.Add(time.Duration(resp.TTL) * time.Second)
		l.remember(resp.ID, sharedLease{c.until, true})
	}
	if c.id != on {
		c.keys++
	}
	return c.id, c.until, nil
}

// drop forgets a lease that turned out to be gone.
func (l *leases) drop(ctx context.Context, ttl time.Duration, id clientv3.LeaseID) {
	c := l.class(roundUp(ttl))
	select {
	case c.turn <- struct{}{}:
		if c.id == id {
			c.id = 0
		}
		<-c.turn
	case <-ctx.Done():
	}
}

func (l *leases) class(ttl time.Duration) *leaseClass {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.classes[ttl]
	if c == nil {
		if len(l.classes) >= maxClasses {
			clear(l.classes)
		}
		c = &leaseClass{turn: make(chan struct{}, 1)}
		l.classes[ttl] = c
	}
	return c
}

// remaining is what is left of a lease. It asks etcd about a lease of another node, once. A leader of etcd counts leases that
// it found from its election on; one that led before it and was paused may still have the earlier countdown, and end a lease
// by that. So what it says is sure only of leases that have been granted since.
func (l *leases) remaining(ctx context.Context, id clientv3.LeaseID) (left time.Duration, sure bool, err error) {
	l.mu.Lock()
	known, ok := l.known[id]
	l.mu.Unlock()
	if !ok {
		now := time.Now()
		resp, err := l.lease.TimeToLive(ctx, id)
		if err != nil {
			return 0, false, err
		}
		l.terms.see(resp.GetRaftTerm())
		known.until = now.Add(time.Duration(max(resp.TTL, 0)) * time.Second)
		began := known.until.Add(-time.Duration(resp.GrantedTTL) * time.Second)
		known.sure = began.After(l.terms.since().Add(maxExtension))
		l.remember(id, known)
	}
	return max(time.Until(known.until), 0), known.sure, nil
}

func (l *leases) remember(id clientv3.LeaseID, known sharedLease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.known) >= maxKnownLeases {
		now := time.Now()
		maps.DeleteFunc(l.known, func(_ clientv3.LeaseID, l sharedLease) bool { return now.After(l.until) })
	}
	if len(l.known) >= maxKnownLeases {
		clear(l.known)
	}
	l.known[id] = known
}
