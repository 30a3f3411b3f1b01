package etcdstore

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// How many leases of one TTL may lie idle: as many callers may come and go without one being granted or left to end. Those
	// of short TTLs are refreshed often, so they are fewer, down to the least, if it would take more calls a second.
	maxIdleLeases   = 1024
	minIdleLeases   = 64
	refreshesSecond = 75
	poolTick        = 250 * time.Millisecond
	forgetIdle      = time.Minute
	minLockSlack    = 2 * time.Second
	revokeAtMost    = time.Second
	leaseCallLimit  = opTimeout
)

// pool has the leases of lock entries, one each. To grant or revoke a lease costs a commit, to refresh one costs none:
// so those that are idle are kept alive, with some slack over the TTL, and those that come back after a release are used
// again. A lease is never refreshed by the pool while an entry has it.
//
// A lease that was renewed is good only for the term of raft in which it was granted. A renewal is no raft write: the leader
// alone knows of it. One that is paused and goes on when another has been elected still has its own countdown. It answers
// renewals, of which the new one knows nothing; and it has what had ended by its own countdown revoked, which etcd forwards to
// the new one, whoever has renewed the lease there. Who never led while the lease existed has no countdown. And a lease
// that was never renewed needs none of this: nobody's countdown of it is shorter than that from its grant.
type pool struct {
	lease  clientv3.Lease
	grants *atomic.Int64
	terms  *terms

	mu   sync.Mutex
	idle map[time.Duration][]pooled // by the lease's own TTL, the last used last
	held map[string]heldLease       // by key of the entry
}

type pooled struct {
	id       clientv3.LeaseID
	leaseTTL time.Duration
	granted  uint64    // it was granted in this term or a later one
	until    time.Time // lives until then, at least, up to a term
	term     uint64    // that term: granted, or anyTerm if it was not renewed
	used     time.Time
}

// anyTerm is later than all.
const anyTerm = math.MaxUint64

type heldLease struct {
	pooled
	created int64 // revision of the entry
	first   bool  // it is the oldest of its queue
}

func newPool(lease clientv3.Lease, grants *atomic.Int64, terms *terms) *pool {
	return &pool{lease: lease, grants: grants, terms: terms, idle: map[time.Duration][]pooled{}, held: map[string]heldLease{}}
}

// lockLeaseTTL is the TTL of the leases that serve a lock's TTL.
func lockLeaseTTL(ttl time.Duration) time.Duration {
	return (ttl + max(minLockSlack, ttl/10)).Truncate(time.Second)
}

// refreshAfter is how old an idle lease may be until it is refreshed.
func refreshAfter(leaseTTL time.Duration) time.Duration { return max(leaseTTL/24, time.Second/2) }

// maxIdle is how many leases of a TTL may lie idle.
func maxIdle(leaseTTL time.Duration) int {
	return min(max(int(refreshAfter(leaseTTL).Seconds()*refreshesSecond), minIdleLeases), maxIdleLeases)
}

// enough is what must be left of a lease that is handed out: the lock's TTL and the time that its transaction may take.
func enough(ttl time.Duration) time.Duration { return ttl + (lockLeaseTTL(ttl)-ttl)/4 }

// take returns a lease with enough left for a lock of the TTL.
func (p *pool) take(ctx context.Context, ttl time.Duration) (pooled, error) {
	leaseTTL := lockLeaseTTL(ttl)
	now, term := time.Now(), p.terms.now()
	for {
		l, ok := p.pop(leaseTTL)
		if !ok {
			break
		}
		if l.term < term {
			continue // it ends by itself
		}
		if l.until.Sub(now) >= enough(ttl) {
			return l, nil
		}
		if l.granted < term {
			continue
		}
		switch l, err := p.refresh(ctx, l); {
		case err == nil:
			return l, nil
		case !errors.Is(err, rpctypes.ErrLeaseNotFound):
			return pooled{}, err
		}
	}
	resp, err := p.lease.Grant(ctx, int64(leaseTTL/time.Second))
	if err != nil {
		return pooled{}, err
	}
	p.grants.Add(1)
	return pooled{
		id: resp.ID, leaseTTL: leaseTTL, granted: term,
		until: now.Add(time.Duration(resp.TTL) * time.Second), term: anyTerm,
	}, nil
}

func (p *pool) pop(leaseTTL time.Duration) (pooled, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.idle[leaseTTL]
	for len(list) > 0 {
		l := list[len(list)-1]
		list = list[:len(list)-1]
		if time.Now().Before(l.until) {
			p.idle[leaseTTL] = list
			return l, true
		}
	}
	delete(p.idle, leaseTTL)
	return pooled{}, false
}

// put takes a lease back that no entry has.
func (p *pool) put(l pooled) {
	l.used = time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.putLocked(l)
}

func (p *pool) putLocked(l pooled) {
	if list := p.idle[l.leaseTTL]; len(list) < maxIdle(l.leaseTTL) && time.Now().Before(l.until) {
		p.idle[l.leaseTTL] = append(list, l)
	}
}

// hold notes that an entry, made at a revision, has the lease.
func (p *pool) hold(key string, created int64, l pooled) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held[key] = heldLease{pooled: l, created: created}
}

// extend notes that the lease of a waiting entry was refreshed.
func (p *pool) extend(key string, created int64, l pooled) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h, ok := p.held[key]; ok && h.created == created {
		h.pooled = l
		p.held[key] = h
	}
}

// setFirst notes that an entry is the oldest of its queue.
func (p *pool) setFirst(key string, created int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h, ok := p.held[key]; ok && h.created == created {
		h.first = true
		p.held[key] = h
	}
}

// isFirst says whether an entry is known to be the oldest of its queue, if it is there.
func (p *pool) isFirst(key string, created int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.held[key]
	return h.first && h.created == created
}

// of returns the lease of an entry if it is one of this pool.
func (p *pool) of(key string, created int64) (pooled, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h, ok := p.held[key]
	return h.pooled, ok && h.created == created
}

// released notes that an entry was removed at a revision, and takes its lease back if it still lives.
func (p *pool) released(key string, removed int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h, ok := p.held[key]
	if !ok || h.created > removed {
		return
	}
	delete(p.held, key)
	h.used = time.Now()
	p.putLocked(h.pooled)
}

func (p *pool) refresh(ctx context.Context, l pooled) (pooled, error) {
	now := time.Now()
	resp, err := p.lease.KeepAliveOnce(ctx, l.id)
	if err != nil {
		return pooled{}, err
	}
	p.terms.see(resp.GetRaftTerm())
	l.until, l.term = now.Add(time.Duration(resp.TTL)*time.Second), l.granted
	return l, nil
}

// run keeps idle leases alive until ctx ends, and lets go of what has not been used for long.
func (p *pool) run(ctx context.Context) {
	tick := time.NewTicker(poolTick)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		for _, l := range p.due() {
			if time.Since(l.used) > forgetIdle || l.granted < p.terms.now() {
				continue // it ends by itself
			}
			rctx, cancel := context.WithTimeout(ctx, leaseCallLimit)
			l, err := p.refresh(rctx, l)
			cancel()
			if err == nil {
				p.mu.Lock()
				if list := p.idle[l.leaseTTL]; len(list) < maxIdle(l.leaseTTL) { // others have come back meanwhile
					p.idle[l.leaseTTL] = slices.Insert(list, 0, l)
				}
				p.mu.Unlock()
			}
		}
	}
}

// due takes out what has to be refreshed by now, and forgets entries whose leases have ended.
func (p *pool) due() []pooled {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	var due []pooled
	for leaseTTL, list := range p.idle {
		// The slack is at least a twelfth of the lease's TTL and about 1 s; half of it is left after this.
		keep := leaseTTL - refreshAfter(leaseTTL)
		var fresh []pooled
		for _, l := range list {
			if l.until.Sub(now) < keep {
				due = append(due, l)
			} else {
				fresh = append(fresh, l)
			}
		}
		if len(fresh) == 0 {
			delete(p.idle, leaseTTL)
		} else {
			p.idle[leaseTTL] = fresh
		}
	}
	maps.DeleteFunc(p.held, func(_ string, h heldLease) bool { return now.Sub(h.until) > time.Minute })
	return due
}

// close revokes the idle leases, as far as that is quickly done; the others end by themselves.
func (p *pool) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, revokeAtMost)
	defer cancel()
	p.mu.Lock()
	idle := p.idle
	p.idle = map[time.Duration][]pooled{}
	p.mu.Unlock()
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, list := range idle {
		for _, l := range list {
			wg.Go(func() {
				// Nothing is lost with an error: the lease ends by itself.
				_, _ = p.lease.Revoke(ctx, l.id)
			})
		}
	}
}
