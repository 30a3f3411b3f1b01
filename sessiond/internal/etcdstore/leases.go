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
	// When a lease ends etcd removes its keys at one go and syncs its file, with which all others wait: the more keys it has, the longer
	// they wait, and the fewer, the more leases there are to end.
	maxKeysPerLease = 256
	// With so many keys on a lease the next one is granted, so that nobody has to wait for it.
	manyKeysPerLease = maxKeysPerLease / 2
	maxLeaseWindow   = time.Minute
	// The window of leases that are full before it is over.
	shortWindow = time.Second
	// How many leases' ends and how many TTL classes are remembered.
	maxKnownLeases = 1 << 16
	maxClasses     = 1 << 10
	// Of how many sessions it is remembered which lease they were saved on.
	maxSaved = 1 << 14
	// How much a new leader of etcd gives leases on top of their TTLs: its election timeout, which is a second by default.
	maxExtension = 10 * time.Second
)

// leases hands out the shared leases of sessions and messages. Those of one TTL that are written within a window of
// time share one, which lasts for the TTL, the window, so that no key ends before its TTL, and some slack. Nobody refreshes
// these leases: they are ended when the slack begins (expiry), or end by themselves, and take what was not written again with them.
//
// While very many keys are written a lease is full long before its window is over, and so the next ones get a short window. What was written
// at the same time is then due that much sooner, and there is time to end it bit by bit before it is late.
type leases struct {
	lease  clientv3.Lease
	grants *atomic.Int64
	terms  *terms
	expiry *expiry
	window func(ttl time.Duration) time.Duration
	hurry  bool                 // use short windows
	slack  func() time.Duration // of a new lease
	// background runs a function beside the caller until it returns or the store is closed.
	background func(func(context.Context))
	saved      *recent[clientv3.LeaseID] // by session: the lease that it is on, as far as this node knows

	mu      sync.Mutex
	classes map[time.Duration]*leaseClass
	known   map[clientv3.LeaseID]sharedLease
}

type sharedLease struct {
	until time.Time // its keys live until then
	sure  bool      // at least
}

type leaseClass struct {
	ttl  time.Duration
	turn chan struct{} // held by who looks at or replaces the fields below
	classLease
	since   time.Time // when it was taken into use
	keys    int
	next    classLease
	ordered bool // the next one
}

// classLease is a lease that keys of a class are put on.
type classLease struct {
	id     clientv3.LeaseID // 0: none
	usable time.Time
	until  time.Time // keys on it live until then, at least
}

func newLeases(lease clientv3.Lease, grants *atomic.Int64, terms *terms, expiry *expiry, window func(ttl time.Duration) time.Duration, background func(func(context.Context))) *leases {
	return &leases{
		lease:      lease,
		grants:     grants,
		terms:      terms,
		expiry:     expiry,
		window:     window,
		hurry:      true,
		slack:      newSlack,
		background: background,
		saved:      newRecent[clientv3.LeaseID](maxSaved),
		classes:    map[time.Duration]*leaseClass{},
		known:      map[clientv3.LeaseID]sharedLease{},
	}
}

// window is how long keys of a TTL may share a lease, which is how much later than asked they may end.
func window(ttl time.Duration) time.Duration {
	return max(min(maxLeaseWindow, ttl/10).Truncate(time.Second), time.Second)
}

func roundUp(d time.Duration) time.Duration {
	return (d + time.Second - 1).Truncate(time.Second)
}

// takeFor returns a lease on which keys live for at least ttl from now, and until when they do: for a key that is on a lease, if it is known
// on which, or 0.
func (l *leases) takeFor(ctx context.Context, ttl time.Duration, on clientv3.LeaseID) (clientv3.LeaseID, time.Time, error) {
	c := l.class(roundUp(ttl))
	if err := c.lock(ctx); err != nil {
		return 0, time.Time{}, err
	}
	defer c.unlock()
	short := c.fillsWithin(shortWindow / 2)
	if !c.has(on) {
		c.classLease, c.next, c.keys, c.since = c.next, classLease{}, 0, time.Now()
	}
	if !c.has(on) {
		granted, err := l.grant(ctx, c.ttl, short)
		if err != nil {
			return 0, time.Time{}, err
		}
		c.classLease = granted
	}
	if c.id != on {
		c.keys++
	}
	if c.keys >= manyKeysPerLease && c.next.id == 0 && !c.ordered {
		c.ordered = true
		short := c.fillsWithin(shortWindow / 2)
		l.background(func(ctx context.Context) { l.order(ctx, c, short) })
	}
	return c.id, c.until, nil
}

// has says whether the lease can take a key that is on one already, or on none.
func (c *leaseClass) has(on clientv3.LeaseID) bool {
	return c.id != 0 && !time.Now().After(c.usable) && (c.keys < maxKeysPerLease || c.id == on)
}

// fillsWithin says whether the lease is full so soon after it was taken into use, at the pace until now.
func (c *leaseClass) fillsWithin(d time.Duration) bool {
	return c.keys > 0 && time.Since(c.since)*maxKeysPerLease <= d*time.Duration(c.keys)
}

func (c *leaseClass) lock(ctx context.Context) error {
	select {
	case c.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *leaseClass) unlock() { <-c.turn }

// order has the next lease of a class granted. If that fails, who needs it will find out.
func (l *leases) order(ctx context.Context, c *leaseClass, short bool) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	next, _ := l.grant(ctx, c.ttl, short)
	if c.lock(context.WithoutCancel(ctx)) == nil { // it is held for as long as a grant takes, at most
		c.next, c.ordered = next, false
		c.unlock()
	}
}

func (l *leases) grant(ctx context.Context, ttl time.Duration, short bool) (classLease, error) {
	now := time.Now() // the lease runs from a later moment on
	// With a short window there is so much more slack.
	asked := ttl + l.window(ttl) + l.slack()
	if isShort(ttl, asked) != (short && l.hurry) {
		asked += time.Second
	}
	resp, err := l.lease.Grant(ctx, int64(asked/time.Second))
	if err != nil {
		return classLease{}, err
	}
	l.grants.Add(1)
	granted := time.Duration(resp.TTL) * time.Second
	window := l.windowOf(ttl, granted)
	lives := ttl + window
	due := time.Now().Add(lives)
	l.expiry.add(dueLease{id: resp.ID, at: due, late: due.Add(l.window(ttl) - window), slack: granted - lives})
	c := classLease{resp.ID, now.Add(window), now.Add(lives)}
	l.remember(resp.ID, sharedLease{c.until, true})
	return c, nil
}

// isShort says whether a lease for a TTL has the short window: then it was granted for an odd number of seconds more. Etcd keeps nothing else
// of a lease that says so to other nodes, and all have to agree until when its keys live.
func isShort(ttl, granted time.Duration) bool { return (granted-ttl)/time.Second%2 != 0 }

// windowOf is the window of a lease for a TTL.
func (l *leases) windowOf(ttl, granted time.Duration) time.Duration {
	if l.hurry && isShort(ttl, granted) {
		return shortWindow
	}
	return l.window(ttl)
}

// drop forgets a lease that turned out to be gone.
func (l *leases) drop(ctx context.Context, ttl time.Duration, id clientv3.LeaseID) {
	c := l.class(roundUp(ttl))
	if c.lock(ctx) == nil {
		if c.id == id {
			c.id = 0
		}
		c.unlock()
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
		c = &leaseClass{ttl: ttl, turn: make(chan struct{}, 1)}
		l.classes[ttl] = c
	}
	return c
}

// remaining is what is left of keys of a TTL on a lease. It asks etcd about a lease of another node, once. A leader of etcd counts leases that
// it found from its election on; one that led before it and was paused may still have the earlier countdown, and end a lease
// by that. So what it says is sure only of leases that have been granted since.
func (l *leases) remaining(ctx context.Context, id clientv3.LeaseID, ttl time.Duration) (left time.Duration, sure bool, err error) {
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
		granted := time.Duration(resp.GrantedTTL) * time.Second
		ends := now.Add(time.Duration(max(resp.TTL, 0)) * time.Second)
		lives := roundUp(ttl) + l.windowOf(roundUp(ttl), granted) // from its grant on
		known.until = ends.Add(-max(granted-lives, 0))
		began := ends.Add(-granted)
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
