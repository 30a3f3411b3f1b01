// Package etcdstore keeps sessions, locks and messages in etcd.
//
// Whatever must hold at one moment is a compare of the transaction that changes something, never a read before it. Which compare
// failed tells what the else branch reads, or, where hardly any fails, a read afterwards: what all who share a transaction carry, all
// wait for. A commit of etcd is what an operation costs, so:
//
//   - sessions and messages share leases by TTL (leases), lock entries take theirs out of a pool (pool), so that hardly
//     any operation grants or revokes one;
//   - shared leases are ended one by one before etcd would end many at a time (expiry), because with that everybody waits;
//   - what comes while a transaction is under way is sent together, as one transaction (group);
//   - a new lock entry knows from the one made before it whether it is the first, without a look at the queue (tails);
//   - a node has one watch for all its waiters and one for all its subscribers (hub), opened once: a watch that is opened
//     for one waiter at a revision gone by would join etcd's slow group and cost 100 ms a hand-over;
//   - what a session stores of messages is known from the same watches (room), so that a publish need not look whether there is room.
//
// A node has a key on a lease that it keeps alive, the only one (liveness), and notes on the same lease which front-ends
// are attached to it. What dead nodes and front-ends leave in the queues is found by passes over all queues (passes), not by an
// index or by lists in memory: a pass is needed only when something dies, a cluster has at most as many entries as
// requests are under way, and a list in memory is lost with its node. What an expired session leaves is removed by
// one of the nodes that see it go (cleaner).
//
// Every call to etcd has a deadline, and whatever etcd answers that is not about the data is session.ErrUnavailable.
package etcdstore

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

const (
	// How long an operation may take before the store counts as not reachable.
	opTimeout = 2500 * time.Millisecond
	// How often a node asks whether the store can be reached, and how old a good answer may be until it cannot.
	probeEvery = 400 * time.Millisecond
	downAfter  = 2600 * time.Millisecond
	// The same while the watches are not open yet.
	probeOpening = 20 * time.Millisecond
	// How long a give-up may keep its caller waiting.
	leaveTimeout = time.Second
	// How often a transaction is tried with another lease when its lease is gone.
	leaseTries = 8
)

// KV is what a Store needs for reads and transactions.
type KV interface {
	Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error)
	Put(ctx context.Context, key, value string, opts ...clientv3.OpOption) (*clientv3.PutResponse, error)
	Delete(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.DeleteResponse, error)
	// Txn sends a transaction once. It only reads the request, of which parts are in others too, and keeps nothing of it. Errors
	// are rpctypes', or the context's, as with the transactions of clientv3.
	Txn(ctx context.Context, req *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error)
}

// Config describes a Store.
type Config struct {
	// KV serves reads and transactions.
	KV KV
	// Lease serves leases.
	Lease clientv3.Lease
	// Watcher serves watches.
	Watcher Watcher
	// Members is how many members of a cluster the clients take in turn.
	Members int
	// Metrics takes the store's metrics. Default: none are served.
	Metrics prometheus.Registerer
	// Prefix is put before every key.
	Prefix string
	// AttachGrace is how long a front-end may be attached nowhere. Default lock.DefaultAttachGrace.
	AttachGrace time.Duration
	// Logger takes changes in the state of the store.
	Logger *slog.Logger
}

// Watcher opens watches.
type Watcher interface {
	// Watch tells what is put under a prefix, what is removed, or both, from its first response on, which says that it has begun.
	// The channel is closed when ctx ends, and when the watch breaks off, after a response that says why.
	Watch(ctx context.Context, prefix string, puts, removals bool) <-chan clientv3.WatchResponse
	// RequestProgress has the watches of the context's metadata give a sign of life, as a response without events.
	RequestProgress(ctx context.Context) error
}

// Store implements session.Store, lock.Store, lock.FrontEndStore and message.Store. Its methods may be called concurrently.
type Store struct {
	kv     kv
	lease  lease
	keys   keys
	logger *slog.Logger
	node   string
	marks  atomic.Uint64
	grants atomic.Int64
	checks atomic.Int64
	terms  terms
	// joining is held by those who make a lock entry.
	joining chan struct{}

	group   *group
	expiry  *expiry
	leases  *leases
	tails   *tails
	pool    *pool
	hub     *hub
	left    *leftovers
	health  *health
	live    *liveness
	passes  *passes
	sweeper *sweeper
	cleaner *cleaner

	cancel context.CancelFunc
	wg     sync.WaitGroup
}

var (
	_ session.Store      = (*Store)(nil)
	_ lock.Store         = (*Store)(nil)
	_ lock.FrontEndStore = (*Store)(nil)
	_ message.Store      = (*Store)(nil)
)

// Open starts a Store. It does not wait for etcd. Close it before its clients.
func Open(cfg Config) *Store {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Store{
		kv:     kv{KV: cfg.KV, members: cfg.Members},
		lease:  lease{Lease: cfg.Lease, members: cfg.Members},
		keys:   keys{prefix: cfg.Prefix},
		logger: cfg.Logger,
		node:   rand.Text(),
		cancel: cancel,

		joining: make(chan struct{}, maxJoining),
	}
	s.group = newGroup(cfg.KV)
	if cfg.Metrics != nil {
		cfg.Metrics.MustRegister(s.group.sizes)
	}
	background := func(f func(context.Context)) { s.wg.Go(func() { f(ctx) }) }
	s.expiry = newExpiry()
	s.leases = newLeases(s.lease, &s.grants, &s.terms, s.expiry, window, background)
	s.tails = newTails(s.lease, &s.grants, &s.terms, s.expiry, background)
	s.pool = newPool(s.lease, &s.grants, &s.terms)
	s.left = newLeftovers()
	s.health = newHealth()
	s.live = newLiveness(s.keys)
	s.passes = newPasses()
	s.sweeper = newSweeper(cmp.Or(cfg.AttachGrace, lock.DefaultAttachGrace))
	s.cleaner = newCleaner(s.node)
	s.hub = newHub(s.keys)
	s.hub.released = s.pool.released
	s.hub.expired = s.cleaner.expired
	s.hub.died = s.nodeDied

	s.wg.Go(func() { s.pool.run(ctx) })
	s.wg.Go(func() { s.probe(ctx) })
	s.wg.Go(func() { s.clearLeftovers(ctx) })
	s.wg.Go(func() { s.keepNode(ctx) })
	s.wg.Go(func() { s.sweep(ctx) })
	s.wg.Go(func() { s.clean(ctx) })
	s.wg.Go(func() { s.expire(ctx) })
	for _, w := range []watched{
		{
			prefix: s.keys.prefix, handle: s.hub.onDelete, removals: true,
			opened: func(context.Context) error {
				s.hub.wakeAll()
				s.nodeDied() // perhaps, while there was no watch
				return nil
			},
		},
		{
			prefix: s.keys.allMessages(), handle: s.hub.onMessage, puts: true,
			opened: func(context.Context) error {
				s.hub.wakeAll()
				return nil
			},
		},
		{prefix: s.keys.allFrontEnds(), handle: s.live.onFrontEnd, opened: s.loadFrontEnds, puts: true, removals: true},
	} {
		s.wg.Go(func() { s.watch(ctx, cfg.Watcher, w) })
	}
	return s
}

// Close stops the Store. Nothing may use it any more.
func (s *Store) Close(ctx context.Context) {
	s.left.kickAll()
	s.cancel()
	s.wg.Wait()
	if !s.isDown() {
		s.removeLeftovers(ctx)
		s.pool.close(ctx)
		s.leave(ctx)
	}
	s.group.close()
}

// Down is closed while etcd cannot be reached.
func (s *Store) Down() <-chan struct{} { return s.health.downChan() }

// Up is closed while etcd can be reached and the watches are open.
func (s *Store) Up() <-chan struct{} { return s.health.upChan() }

// LeaseGrants counts the leases that this node was granted, each of which cost a commit that belongs to no operation.
func (s *Store) LeaseGrants() int64 { return s.grants.Load() }

// WaiterChecks counts how often waiters looked at their queue.
func (s *Store) WaiterChecks() int64 { return s.checks.Load() }

func (s *Store) isDown() bool {
	select {
	case <-s.Down():
		return true
	default:
		return false
	}
}

// op is the context of the calls of one operation.
func (s *Store) op(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(withRequireLeader(ctx), opTimeout)
}

var requireLeader = metadata.Pairs(rpctypes.MetadataRequireLeaderKey, rpctypes.MetadataHasLeader)

// withRequireLeader is etcd's, with the same metadata for all whose own context has none: a map for each is a good part of what an
// operation takes.
func withRequireLeader(ctx context.Context) context.Context {
	if _, there := metadata.FromOutgoingContext(ctx); there {
		return clientv3.WithRequireLeader(ctx)
	}
	return metadata.NewOutgoingContext(ctx, requireLeader)
}

// txn runs a transaction that is about more than one session, or none. All others go through the group.
func (s *Store) txn(ctx context.Context, cmps []compare, then, els []operation) (*etcdserverpb.TxnResponse, error) {
	return s.kv.Txn(ctx, &etcdserverpb.TxnRequest{Compare: cmps, Success: then, Failure: els})
}

// fail turns an error of etcd into one of ours; ctx is the caller's.
func (s *Store) fail(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, rpctypes.ErrRequestTooLarge), errors.Is(err, rpctypes.ErrTooManyOps),
		errors.Is(err, rpctypes.ErrDuplicateKey), errors.Is(err, rpctypes.ErrGRPCRequestTooLarge):
		return fmt.Errorf("etcd refuses the request: %w", err)
	default:
		return fmt.Errorf("%w: %w", session.ErrUnavailable, err)
	}
}

// health says whether etcd can be reached, as two channels of which one is closed, or none before that is known.
type health struct {
	mu       sync.Mutex
	down, up chan struct{}
	isDown   bool
	isUp     bool
}

func newHealth() *health {
	return &health{down: make(chan struct{}), up: make(chan struct{})}
}

func (h *health) downChan() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.down
}

func (h *health) upChan() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.up
}

// set returns whether that is a change.
func (h *health) set(up bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case up && !h.isUp:
		h.isUp = true
		close(h.up)
		if h.isDown {
			h.isDown = false
			h.down = make(chan struct{})
		}
		return true
	case !up && !h.isDown:
		h.isDown = true
		close(h.down)
		if h.isUp {
			h.isUp = false
			h.up = make(chan struct{})
		}
		return true
	}
	return false
}

// probe asks etcd for a linearizable read again and again. One probe serves all who wait on this node.
func (s *Store) probe(ctx context.Context) {
	lastGood := time.Now()
	for {
		began := time.Now()
		limit := max(downAfter-began.Sub(lastGood), downAfter/4)
		pctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), limit)
		resp, err := s.kv.Get(pctx, s.keys.allNodes(), clientv3.WithPrefix(), clientv3.WithKeysOnly())
		cancel()
		if err == nil {
			s.terms.see(resp.Header.RaftTerm)
			s.cleaner.setNodes(s.nodeIDs(resp))
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && s.hub.watching() && s.live.isKnown():
			lastGood = began
			if s.health.set(true) {
				s.logger.InfoContext(ctx, "etcd is reachable")
			}
		case err == nil:
			// A watch that is not open yet does not take a node down that answers: those who wait read again when it is.
			lastGood = began
		case time.Since(lastGood) >= downAfter:
			if s.health.set(false) {
				s.logger.ErrorContext(ctx, "etcd is not reachable", "error", err)
			}
		}
		every := probeEvery
		if !s.hub.watching() || !s.live.isKnown() {
			every = probeOpening
		}
		wait := time.NewTimer(every)
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return
		}
	}
}
