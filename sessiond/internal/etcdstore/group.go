package etcdstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// How many transactions may be under way before what comes is gathered. With two, 128 callers took half
	// as many commits again, for no more cycles.
	maxUnderWay = 1
	// So many steps, half of what goes into one transaction, are sent beside what is under way. While etcd syncs and carries out the one,
	// the node prepares the other: with 128 callers on etcd apart up to a seventh more cycles. With fewer the share of each in what
	// a transaction costs grows faster than that gains.
	plenty = maxGroupOps / 2
	// After so long a transaction counts as under way no more, so that one that a member leaves unanswered holds up nobody
	// for longer.
	patience = 50 * time.Millisecond
	// How long a step that is in no hurry waits for company: some commits, so that who just misses one meets the next.
	companyTimeout = 3 * time.Millisecond
	// Bounds on one transaction. Etcd's own defaults are 128 operations, where what counts is how many there are on each level
	// added up, and 1.5 MiB.
	maxGroupOps   = 128
	maxGroupBytes = 1 << 20
)

// errNotSent says that a step was not sent, so it certainly has not been carried out.
var errNotSent = errors.New("not sent")

// group sends transactions to etcd: at once while none is under way. What comes while one is under way is gathered, and sent when that
// has been answered or when it has become plenty, as one transaction of nested ones, each with its own compares and its own
// answer. A commit costs about the same however much is in it, so that what many callers do at the same time costs little
// more than what one does.
//
// A transaction is one moment, and etcd evaluates all compares before it carries out the first operation. So steps that
// touch the same keys are kept out of one transaction: two lock entries would get the same revision, and with it the same
// fencing token; two messages the same position; a key written twice, or written and deleted, makes etcd refuse the whole.
// All steps name the session that they are about, all their keys are that session's, and there is one step for a session in a
// transaction, with one exception: a release, and after it another request's acquire. No compare of either would come out
// otherwise after what the other changes; the operations are carried out in this order, so the acquire finds the queue without the
// entry that went and the session as it was saved; and the token is greater than the one before it, which was given at an
// earlier revision.
//
// An acquire of a session whose queue has a waiter on this node already is in no hurry. It waits a moment for company: the
// answer to a release goes to the one caller and the grant to the next, so when callers come again and again the acquire
// of the one and the release of the other arrive at about the same time, and if the acquire were sent alone the release, for
// which all others wait, would have to wait for its commit.
//
// When etcd refuses a transaction as a whole because of one step (its lease has ended, say), the steps are sent again one by
// one. That there is no space left is no refusal: the first write beyond the quota is carried out and answered with that error
// all the same. While there is none, what only removes does not share a transaction with what writes, which etcd refuses.
type group struct {
	kv       KV
	limit    int           // transactions under way
	patience time.Duration // until one counts no more
	sizes    prometheus.Histogram

	ctx    context.Context //nolint:containedctx // of transactions that belong to several callers; ends with close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	underWay int
	full     bool    // the last that would have written met no space
	queue    []*step // as it will be sent; while there is room for a transaction only patient ones
}

// step is a transaction of one caller.
type step struct {
	// about is the key of the session that it is about.
	about string
	role  role
	// entry is the lock entry that is removed or made, for the roles that do.
	entry string
	// holds says that it comes from who holds the session's lock. It goes before the acquires that wait to be sent.
	holds bool
	// urgent says that somebody waits for it. It is sent beside a transaction that is under way.
	urgent bool
	// patient says that it is in no hurry: it goes with the next transaction that is sent, or alone after a moment.
	patient bool // under the group's lock

	cmps      []compare
	then, els []operation
	// late makes, right before the step is sent, the last of what it does then, at most so many operations: reads of what
	// changes quickly. Not nil only with most.
	late func() []operation
	most int

	bytes  int
	answer chan answer
	left   atomic.Bool // nobody waits for the answer any more
}

// role says what else of its session may share a transaction with a step.
type role int

const (
	apart    role = iota // nothing
	releases             // an acquire after it
	acquires             // a release before it
)

type answer struct {
	resp *etcdserverpb.TxnResponse
	err  error
}

func newGroup(kv KV) *group {
	g := &group{
		kv: kv, limit: maxUnderWay, patience: patience,
		sizes: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "sessiond_etcd_transaction_operations",
			Help:    "How many callers' operations a transaction sent to etcd carried.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 8),
		}),
	}
	g.ctx, g.cancel = context.WithCancel(clientv3.WithRequireLeader(context.Background()))
	return g
}

// close ends what is under way and waits for it. Nothing may be sent any more.
func (g *group) close() {
	g.cancel()
	g.wg.Wait()
}

// txn sends a step, alone or together with others, and returns its answer. An error that is not errNotSent leaves open
// whether it was carried out, unless it says so itself.
func (g *group) txn(ctx context.Context, s *step) (*etcdserverpb.TxnResponse, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%w: %w", errNotSent, ctx.Err())
	}
	s.measure()
	g.mu.Lock()
	room := g.limit
	if s.urgent {
		room++
	}
	if g.underWay < room && len(g.queue) == 0 && !s.patient {
		g.underWay++
		g.mu.Unlock()
		// In the caller's goroutine and with its context: there is nobody else's step in it.
		defer g.started()()
		g.sizes.Observe(1)
		s.finish()
		return g.send(ctx, s)
	}
	s.answer = make(chan answer, 1)
	if s.patient {
		timer := time.AfterFunc(companyTimeout, func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			s.patient = false
			g.sendQueue(g.limit)
		})
		defer timer.Stop()
	}
	g.enqueue(s)
	g.sendQueue(room)
	g.mu.Unlock()

	select {
	case a := <-s.answer:
		return a.resp, a.err
	case <-ctx.Done():
	}
	if g.withdraw(s) {
		return nil, fmt.Errorf("%w: %w", errNotSent, ctx.Err())
	}
	s.left.Store(true)
	select {
	case a := <-s.answer:
		return a.resp, a.err
	default:
		return nil, ctx.Err()
	}
}

// enqueue puts a step at the end of the queue, or, if it is the holder's, before the first acquire of the same session: those
// all wait for the holder.
func (g *group) enqueue(s *step) {
	at := -1
	if s.holds {
		at = slices.IndexFunc(g.queue, func(other *step) bool { return other.about == s.about && other.role == acquires })
	}
	if at < 0 {
		at = len(g.queue)
	}
	g.queue = slices.Insert(g.queue, at, s)
}

// withdraw takes a step out of the queue, unless it has been sent.
func (g *group) withdraw(s *step) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.Index(g.queue, s)
	if i < 0 {
		return false
	}
	g.queue = slices.Delete(g.queue, i, i+1)
	return true
}

// started is called when a transaction is sent, and what it returns when its answer is there.
func (g *group) started() (ended func()) {
	next := sync.OnceFunc(g.next)
	timer := time.AfterFunc(g.patience, next)
	return func() {
		timer.Stop()
		next()
	}
}

// next is called when a transaction does not count as under way any more.
func (g *group) next() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.underWay--
	g.sendQueue(g.limit)
}

// sendQueue sends what has been gathered, if less than room are under way (one more if it is plenty), and unless all of it is patient.
// What does not fit into one transaction is sent in another at the same time: that costs etcd more work, but waiting would keep
// those who do much about one session from sharing a sync to disk.
func (g *group) sendQueue(room int) {
	if len(g.queue) >= plenty {
		room++
	}
	if g.underWay >= room {
		return
	}
	for slices.ContainsFunc(g.queue, func(s *step) bool { return !s.patient }) {
		steps := g.gather()
		g.underWay++
		g.wg.Go(func() { g.sendAll(steps) })
	}
}

// gather takes out of the queue what goes into one transaction. The first step always does. Steps about one session keep
// their order.
func (g *group) gather() []*step {
	var steps, rest []*step
	type share struct {
		role  role
		entry string
	}
	about := make(map[string]share, len(g.queue))
	ops, bytes := 0, 0
	for _, s := range g.queue {
		own := max(ops, s.ops())
		fits := len(steps) == 0 || len(steps)+1+own <= maxGroupOps && bytes+s.bytes <= maxGroupBytes &&
			(!g.full || s.writes() == steps[0].writes())
		if other, there := about[s.about]; there {
			fits = fits && other.role == releases && s.role == acquires && other.entry != s.entry
			about[s.about] = share{apart, ""}
		} else if fits {
			about[s.about] = share{s.role, s.entry}
		} else {
			about[s.about] = share{apart, ""}
		}
		if !fits {
			rest = append(rest, s)
			continue
		}
		steps = append(steps, s)
		ops, bytes = own, bytes+s.bytes
	}
	g.queue = rest
	return steps
}

// writes says whether a step may need space.
func (s *step) writes() bool { return slices.ContainsFunc(s.then, isPut) }

// heard notes whether there was space for what was sent.
func (g *group) heard(err error, writes bool) {
	if err != nil && !errors.Is(err, rpctypes.ErrNoSpace) || !writes {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.full = err != nil
}

// ops is how many operations etcd counts for a step.
func (s *step) ops() int { return max(len(s.cmps), len(s.then)+s.most, len(s.els)) }

// finish makes what is made late.
func (s *step) finish() {
	if s.late != nil {
		s.then = append(s.then, s.late()...)
		s.late, s.most = nil, 0
	}
}

// measure finds out how many bytes a step takes in a request, at most.
func (s *step) measure() {
	for _, c := range s.cmps {
		s.bytes += cmpBytes(c)
	}
	for _, ops := range [][]operation{s.then, s.els} {
		for _, op := range ops {
			s.bytes += opBytes(op)
		}
	}
}

// send sends one step as a transaction of its own.
func (g *group) send(ctx context.Context, s *step) (*etcdserverpb.TxnResponse, error) {
	resp, err := g.kv.Txn(ctx, &etcdserverpb.TxnRequest{Compare: s.cmps, Success: s.then, Failure: s.els})
	g.heard(err, s.writes())
	return resp, err
}

// sendAll sends steps as one transaction.
func (g *group) sendAll(steps []*step) {
	ended := g.started()
	g.sizes.Observe(float64(len(steps)))
	for _, s := range steps {
		s.finish() // not under the group's lock, for which all callers wait
	}
	// Each caller has its own limit, which began earlier.
	ctx, cancel := context.WithTimeout(g.ctx, opTimeout)
	defer cancel()
	if len(steps) == 1 {
		resp, err := g.send(ctx, steps[0])
		ended()
		steps[0].answer <- answer{resp, err}
		return
	}
	ops, nested := make([]operation, len(steps)), make([]txnOp, len(steps))
	for i, s := range steps {
		ops[i] = nested[i].fill(s.cmps, s.then, s.els)
	}
	resp, err := g.kv.Txn(ctx, &etcdserverpb.TxnRequest{Success: ops})
	g.heard(err, slices.ContainsFunc(steps, (*step).writes))
	if refused(err) {
		g.sendSingly(ctx, steps)
		ended()
		return
	}
	// The answers wake many. The next transaction, for which many more wait, goes before them, and so it is started last.
	g.wg.Go(func() { answerAll(steps, resp, err) })
	ended()
}

// answerAll hands out the answers to steps that were sent as one transaction.
func answerAll(steps []*step, resp *etcdserverpb.TxnResponse, err error) {
	for i, s := range steps {
		if err != nil {
			s.answer <- answer{nil, err}
			continue
		}
		own := resp.Responses[i].GetResponseTxn()
		own.Header = resp.Header // nested answers have no revision of their own
		s.answer <- answer{own, nil}
	}
}

// sendSingly sends steps of which one has made etcd refuse all.
func (g *group) sendSingly(ctx context.Context, steps []*step) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, s := range steps {
		if s.left.Load() {
			continue // and nothing has been changed
		}
		wg.Go(func() {
			g.sizes.Observe(1)
			resp, err := g.send(ctx, s)
			s.answer <- answer{resp, err}
		})
	}
}

// refused says whether etcd has looked at a transaction and refused it, because of something in it.
func refused(err error) bool {
	for _, target := range []error{
		rpctypes.ErrLeaseNotFound, rpctypes.ErrDuplicateKey, rpctypes.ErrTooManyOps, rpctypes.ErrRequestTooLarge,
		rpctypes.ErrGRPCRequestTooLarge, rpctypes.ErrKeyNotFound,
	} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}
