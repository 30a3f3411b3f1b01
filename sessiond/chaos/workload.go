package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/sessiond/sessiond/client"
)

// load says how much a workload does.
type load struct {
	// slots is how many sessions there are at a time, and actors how many clients each has.
	slots, actors int
	// operations is after how many a session is replaced by the next: a search for an order must end.
	operations int
	// doubts is after how many writes with an unknown outcome it is replaced: each doubles the orders to try.
	doubts int
	// abandons is in which part of the sessions, one in so many, some holders die or are late.
	abandons int
	// lockTTL is the least TTL of locks: twice as much is the most.
	lockTTL time.Duration
	// patience is how long an acquire waits.
	patience time.Duration
	// settled is how long it takes at most until what was cut off has been carried out, or never will be.
	settled time.Duration
}

// Sessions live for an hour, or so short that they end under the hands of their clients.
const (
	longSession  = time.Hour
	briefSession = 3 * time.Second
)

// How long a client waits after an operation that brought no answer: longer each time.
const (
	leastWait = 200 * time.Millisecond
	mostWait  = 2 * time.Second
)

// A workload is clients at work on sessions, one session after the other in each slot, whose histories are judged as they end.
type workload struct {
	load
	seed    uint64
	clients []*client.Client
	// attached tells those of the clients that attach.
	attached []bool
	clock    clock
	// judge takes the history of a session.
	judge func([]Op)

	left sync.WaitGroup // destroys under way

	mu     sync.Mutex
	unsure []string // sessions that may be made once more, by a create whose outcome nobody knows
}

// random is a source of its own for each use, so that what one does changes nothing for the others.
func random(seed uint64, what ...uint64) *rand.Rand {
	mixed := seed
	for _, w := range what {
		mixed = (mixed ^ w) * 0x9e3779b97f4a7c15
		mixed ^= mixed >> 29
	}
	return rand.New(rand.NewPCG(seed, mixed))
}

func pick[T any](r *rand.Rand, from []T) T { return from[r.IntN(len(from))] }

// pause waits, or returns false if ctx has ended.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// run works until stop ends, then finishes what is under way. When it returns, all sessions have been destroyed, or ctx has ended.
func (w *workload) run(ctx, stop context.Context) {
	var slots sync.WaitGroup
	for slot := range w.slots {
		slots.Go(func() {
			for n := 0; stop.Err() == nil && ctx.Err() == nil; n++ {
				w.round(ctx, stop, slot, n)
			}
		})
	}
	slots.Wait()
	w.left.Wait()
	// A create that was cut off may have been carried out when its session had been destroyed already.
	if len(w.unsure) > 0 {
		pause(ctx, w.settled)
	}
	for _, id := range w.unsure {
		w.destroy(ctx, id)
	}
}

// round is the life of one session, with all its incarnations.
func (w *workload) round(ctx, stop context.Context, slot, n int) {
	rng := random(w.seed, uint64(slot), uint64(n))
	r := &round{
		workload: w, stop: stop, id: fmt.Sprintf("chaos-%d-%d", slot, n), ttl: longSession,
		blind: rng.IntN(4) == 0, destroys: rng.IntN(3) == 0, late: rng.IntN(w.abandons) == 0,
	}
	if rng.IntN(5) == 0 {
		r.ttl = briefSession
	}
	first := r.actor(0, rng)
	for !r.over() {
		o, _ := first.create(ctx, r.id, first.value(), r.ttl)
		if o.Outcome == OK || o.Outcome == Exists {
			break
		}
		if !pause(stop, 200*time.Millisecond) {
			break
		}
	}
	var actors sync.WaitGroup
	for i := range w.actors {
		a := r.actor(i+1, random(w.seed, uint64(slot), uint64(n), uint64(i)+1))
		actors.Go(func() {
			wait := leastWait
			for !r.over() && ctx.Err() == nil {
				if a.act(ctx).Outcome != Unknown {
					wait = leastWait
					continue
				}
				// Whatever broke takes a moment to mend. Without this, failures would be most of the history.
				pause(stop, wait/2+time.Duration(a.rng.Int64N(int64(wait))))
				wait = min(2*wait, mostWait)
			}
		})
	}
	actors.Wait()
	// What is in the end is what the history must explain.
	last := r.actor(w.actors+1, rng)
	for ctx.Err() == nil {
		if o, _ := last.read(ctx, r.id); o.Outcome != Unknown {
			break
		}
		pause(ctx, 200*time.Millisecond)
	}
	w.left.Go(func() { w.destroy(ctx, r.id) })
	if slices.ContainsFunc(r.ops, func(o Op) bool { return o.Kind == Create && o.Outcome == Unknown }) {
		w.mu.Lock()
		w.unsure = append(w.unsure, r.id)
		w.mu.Unlock()
	}
	w.judge(r.ops)
}

// destroy removes a session that nobody uses any more.
func (w *workload) destroy(ctx context.Context, id string) {
	for i := 0; ctx.Err() == nil; i++ {
		if _, err := w.clients[i%len(w.clients)].Destroy(ctx, id); err == nil {
			return
		}
		pause(ctx, 500*time.Millisecond)
	}
}

type round struct {
	*workload
	stop context.Context //nolint:containedctx // It ends the round, and is asked by everybody in it.
	id   string
	ttl  time.Duration
	// blind: saves without a condition are among those that are done. destroys: so are destroys. late: some that hold or wait go away,
	// or take longer than the TTL, so that the others have to wait for its end.
	blind, destroys, late bool

	mu     sync.Mutex
	ops    []Op
	unsure int
}

func (r *round) over() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stop.Err() != nil || len(r.ops) >= r.operations || r.unsure >= r.doubts
}

func (r *round) record(o Op) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ops = append(r.ops, o)
	if o.Outcome == Unknown && (o.Kind == Create || o.Kind == Save || o.Kind == Destroy || o.Kind == Release) {
		r.unsure++
	}
}

// An actor is a client of one session.
type actor struct {
	*caller
	*round

	rng    *rand.Rand
	values int
	old    []client.Grant // to come too late with
	name   string
}

func (r *round) actor(id int, rng *rand.Rand) *actor {
	c := rng.IntN(len(r.clients))
	return &actor{
		caller: &caller{Client: r.clients[c], id: id, attached: r.attached[c], clock: r.clock, record: r.record},
		round:  r, rng: rng, name: fmt.Sprintf("holder-%d", id),
	}
}

// value makes one that nobody else makes.
func (a *actor) value() string {
	a.values++
	return fmt.Sprintf("%s/%d.%d", a.round.id, a.caller.id, a.values)
}

// act does something, and returns the last operation of it.
func (a *actor) act(ctx context.Context) Op {
	switch n := a.rng.IntN(100); {
	case n < 42:
		return a.cycle(ctx)
	case n < 54:
		return a.try(ctx)
	case n < 70:
		o, _ := a.read(ctx, a.round.id)
		return a.again(ctx, o)
	case n < 82:
		return a.swap(ctx)
	case n < 85:
		if !a.blind {
			return a.swap(ctx)
		}
		o, _ := a.save(ctx, a.round.id, a.value(), "", client.SaveOptions{TTL: a.ttl})
		return o
	case n < 90:
		return a.tooLate(ctx)
	case n < 93:
		o, _ := a.touch(ctx, a.round.id)
		return o
	case n < 95:
		o, _ := a.create(ctx, a.round.id, a.value(), a.ttl)
		return o
	case n < 97:
		if !a.destroys {
			return a.swap(ctx)
		}
		o, _ := a.destroy(ctx, a.round.id)
		return a.again(ctx, o)
	default:
		if !a.late {
			return a.swap(ctx)
		}
		return a.vanish(ctx)
	}
}

// destroy is the caller's; the round's is for what is left.
func (a *actor) destroy(ctx context.Context, id string) (Op, error) { return a.caller.destroy(ctx, id) }

// again makes the session anew, or leaves that to another, if it has gone.
func (a *actor) again(ctx context.Context, o Op) Op {
	if o.Outcome == NotFound || o.Kind == Destroy && o.Outcome == OK {
		o, _ = a.create(ctx, a.round.id, a.value(), a.ttl)
	}
	return o
}

func (a *actor) options() client.AcquireOptions {
	opts := client.AcquireOptions{TTL: a.lockTTL, Timeout: a.patience}
	if a.rng.IntN(4) == 0 {
		opts.TTL += time.Duration(a.rng.Int64N(int64(a.lockTTL))).Truncate(time.Millisecond)
	}
	if a.rng.IntN(2) == 0 {
		opts.Holder = a.name
	}
	if a.rng.IntN(4) == 0 {
		opts.Timeout = time.Duration(1+a.rng.IntN(300)) * time.Millisecond
	}
	return opts
}

// cycle is what locks are for: acquire, work, save, release; with all that can go wrong on the way.
func (a *actor) cycle(ctx context.Context) Op {
	opts, tries := a.options(), 1
	if a.rng.IntN(2) == 0 {
		opts.RequestID = fmt.Sprintf("request-%d-%x", a.caller.id, a.rng.Uint64())
		tries = 3
	}
	grant, o, err := a.acquire(ctx, a.round.id, tries, opts)
	if err != nil {
		return a.again(ctx, o)
	}
	return a.work(ctx, grant)
}

func (a *actor) try(ctx context.Context) Op {
	grant, o, _ := a.tryAcquire(ctx, a.round.id, a.options())
	if o.Outcome != OK {
		return o
	}
	return a.work(ctx, grant)
}

// work is done under a lock.
func (a *actor) work(ctx context.Context, grant client.Grant) (o Op) {
	a.old = append(a.old, grant)
	id, parent := a.round.id, string(grant.Session.Data)
	save := func(release bool) Op {
		value := a.value()
		o, err := a.save(ctx, id, value, parent, client.SaveOptions{TTL: a.ttl, Grant: &grant, Release: release})
		if err == nil {
			parent = value
		}
		return o
	}
	switch n := a.rng.IntN(100); {
	case n < 25:
		pause(a.stop, time.Duration(a.rng.IntN(20))*time.Millisecond)
	case n < 29 && a.late:
		// Others may have it by then, and what is done with the grant must come too late.
		pause(a.stop, grant.TTL+time.Duration(a.rng.Int64N(int64(a.lockTTL))))
	case n < 31 && a.late:
		return o // it dies, as far as the others can see
	}
	if a.rng.IntN(12) == 0 {
		// One of its earlier grants, which is over, or this one.
		_, _ = a.release(ctx, pick(a.rng, a.old))
	}
	switch n := a.rng.IntN(100); {
	case n < 45:
		return save(true)
	case n < 65:
		if o = save(false); o.Outcome == OK {
			o = save(true)
		}
		return o
	case n < 80:
		save(false)
	case n < 90:
		o, _ = a.save(ctx, id, a.value(), parent, client.SaveOptions{
			TTL: a.ttl, Grant: &grant, Release: true, ExpectedRevision: grant.Session.Revision,
		})
		return o
	}
	o, _ = a.release(ctx, grant)
	return o
}

// swap saves without a lock, on condition that nobody else has.
func (a *actor) swap(ctx context.Context) Op {
	o, err := a.read(ctx, a.round.id)
	if err != nil {
		return a.again(ctx, o)
	}
	o, _ = a.save(ctx, a.round.id, a.value(), o.Got, client.SaveOptions{TTL: a.ttl, ExpectedRevision: o.Revision})
	return o
}

// tooLate comes with a grant that is over, mostly.
func (a *actor) tooLate(ctx context.Context) (o Op) {
	if len(a.old) == 0 {
		return a.swap(ctx)
	}
	grant := pick(a.rng, a.old)
	if a.rng.IntN(2) == 0 {
		o, _ = a.release(ctx, grant)
		return o
	}
	found, err := a.read(ctx, a.round.id)
	if err != nil {
		return a.again(ctx, found)
	}
	o, _ = a.save(ctx, a.round.id, a.value(), found.Got, client.SaveOptions{TTL: a.ttl, Grant: &grant, ExpectedRevision: found.Revision})
	return o
}

// vanish waits for the lock and goes away meanwhile.
func (a *actor) vanish(ctx context.Context) Op {
	cause := errors.New("the caller went away")
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(a.rng.IntN(50))*time.Millisecond, cause)
	defer cancel()
	grant, o, err := a.acquire(ctx, a.round.id, 1, a.options())
	if err != nil {
		o.Outcome = TimedOut // no sign that anything is broken
		return o
	}
	return a.work(context.WithoutCancel(ctx), grant)
}
