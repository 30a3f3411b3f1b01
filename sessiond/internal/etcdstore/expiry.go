package etcdstore

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// How much longer than its keys a shared lease lasts, in whole seconds: as long as it may take to end very many, and some more that
	// differs, so that etcd does not end many at once of a node that has stopped.
	minSlack, maxSlack = 10 * time.Second, 30 * time.Second
	// No lease is ended after one for so many times as long as that took; up to expireMost times while that is soon enough for all that
	// are due not to be late; less a half for each second that they are late, and expireLeast times at least.
	expirePauses = 2.0
	expireMost   = 4.0
	expireLeast  = 0.5
	// When to try again.
	expireRetry = 250 * time.Millisecond
	// How many leases a node ends. Beyond it etcd does that.
	maxDue = maxKnownLeases
)

// expiry ends shared leases when their keys are due. Etcd would do so too, but has up to 16 in its log at a time, and for each it removes
// all keys at one go and syncs its file, with which everybody else waits: when very many sessions are due at once, for seconds. So a lease has
// some slack, and when that begins the node that was granted it ends it, one after the other and with pauses. If that node has stopped or
// cannot keep up, etcd ends the lease when the slack is over.
//
// Transactions that remove the keys and leave an empty lease to etcd do not have the file synced, but cost a compare for each key, which reads
// it, and a sync when the lease ends after all. They held up others no less.
//
// What was written while very many were written is due sooner than it is late (leases): it is ended with longer pauses, as they can be had.
//
// A shared lease is never refreshed, and what is written or touched is moved to another one unless this one still lasts for its TTL. So a
// key that is on a lease which is due is due itself.
//
// Whether a lease is due, etcd's leader says, who also tells other nodes how long its keys have yet. A new leader counts all leases anew, and
// so has very many be due together; these too are ended one by one then.
type expiry struct {
	more chan struct{}

	mu  sync.Mutex
	due []dueLease // that may not be due yet, by time
	now []dueLease // that are, by when they are late
}

type dueLease struct {
	id    clientv3.LeaseID
	at    time.Time     // not earlier than this its keys are due
	late  time.Time     // from then on they are late
	slack time.Duration // lasts for so much longer
}

// in is the lease if its keys are due in so long.
func (d dueLease) in(left time.Duration) dueLease {
	at := time.Now().Add(left)
	d.at, d.late = at, at.Add(d.late.Sub(d.at))
	return d
}

func newExpiry() *expiry { return &expiry{more: make(chan struct{}, 1)} }

// newSlack returns the slack of a lease that is about to be granted.
func newSlack() time.Duration {
	return minSlack + time.Duration(rand.N(int64((maxSlack-minSlack)/time.Second)+1))*time.Second
}

// add notes a lease, unless there are too many.
func (e *expiry) add(d dueLease) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.due)+len(e.now) >= maxDue {
		return
	}
	var i int
	e.due, i = insert(e.due, d, func(d dueLease) time.Time { return d.at })
	if i > 0 {
		return
	}
	select {
	case e.more <- struct{}{}:
	default:
	}
}

// insert puts a lease behind those that have the same time or an earlier one, and says where that is.
func insert(list []dueLease, d dueLease, by func(dueLease) time.Time) ([]dueLease, int) {
	i, _ := slices.BinarySearchFunc(list, by(d), func(other dueLease, t time.Time) int {
		if by(other).After(t) {
			return 1
		}
		return -1
	})
	return slices.Insert(list, i, d), i
}

// next takes out a lease that is due, of several the one that is late first. If there is none, it says how long until there is; 0: there are
// none at all.
func (e *expiry) next() (d dueLease, ok bool, wait time.Duration) {
	now := time.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for ; n < len(e.due) && !e.due[n].at.After(now); n++ {
		e.now, _ = insert(e.now, e.due[n], func(d dueLease) time.Time { return d.late })
	}
	if e.due = e.due[n:]; len(e.due) == 0 {
		e.due = nil
	}
	switch {
	case len(e.now) > 0:
		d, e.now = e.now[0], e.now[1:]
		if len(e.now) == 0 {
			e.now = nil
		}
		return d, true, 0
	case len(e.due) > 0:
		return dueLease{}, false, e.due[0].at.Sub(now)
	default:
		return dueLease{}, false, 0
	}
}

// pauseAfter is how long to end no lease after one that took so long.
func (e *expiry) pauseAfter(took time.Duration) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	pauses := expirePauses
	if n := len(e.now); n > 0 {
		if late := time.Since(e.now[0].late); late > 0 {
			pauses = max(expirePauses-late.Seconds()/2, expireLeast)
		} else {
			share := time.Until(e.now[n-1].late) / time.Duration(n)
			pauses = min(max(float64(share)/float64(took)-1, expirePauses), expireMost)
		}
	}
	return time.Duration(float64(took) * pauses)
}

// expire ends leases that are due until ctx ends.
func (s *Store) expire(ctx context.Context) {
	for ctx.Err() == nil {
		d, ok, wait := s.expiry.next()
		if ok {
			if again := s.expireLease(ctx, d); again > 0 {
				s.expiry.add(d.in(again))
			}
			continue
		}
		pauseFor(ctx, s.expiry.more, wait)
	}
}

// expireLease ends a lease if its leader says that its keys are due. It returns when to try again; 0: there is no need.
func (s *Store) expireLease(ctx context.Context, d dueLease) (again time.Duration) {
	octx, cancel := s.op(ctx)
	defer cancel()
	resp, err := s.lease.TimeToLive(octx, d.id)
	switch {
	case err != nil:
		pause(ctx, expireRetry) // the others will not fare better
		return expireRetry
	case resp.TTL < 0:
		return 0 // it has ended
	}
	s.terms.see(resp.GetRaftTerm())
	if left := time.Duration(resp.TTL)*time.Second - d.slack; left >= 0 { // in whole seconds, rounded down
		return left + expireRetry
	}
	began := time.Now()
	if _, err := s.lease.Revoke(octx, d.id); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		pause(ctx, expireRetry)
		return expireRetry
	}
	pause(ctx, s.expiry.pauseAfter(time.Since(began)))
	return 0
}
