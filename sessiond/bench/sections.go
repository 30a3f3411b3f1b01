//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// A work is one thing that contestants do in turns.
type work struct {
	name, title string
	callers     int
	unit        string // of the rate
	base        string // whom to compare with; empty: raw Puts
	long        bool   // left out in quick runs
	can         func(c *contestant) bool
	run         func(ctx context.Context, c *contestant, l loop) (round, error)
}

// takeTurns lets all who can do a work do it, round after round. One that fails is reported and does not stop the others.
func (b *bench) takeTurns(ctx context.Context, field []*contestant, works ...work) error {
	for _, w := range works {
		if w.long && b.quick {
			continue
		}
		b.say("%s", w.title)
		failed := map[*contestant]bool{}
		for n := range b.rounds {
			for _, c := range field {
				if !w.can(c) || failed[c] {
					continue
				}
				r, err := w.run(ctx, c, loop{callers: w.callers, settle: b.settle, measure: b.measure, meter: c.meter})
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				if err != nil {
					failed[c] = true
					b.report.fail(w, c.name, err)
					b.say("  round %d  %-32s FAILED: %v", n+1, c.name, err)
					continue
				}
				b.report.add(w, c.name, n, r)
				b.say("  round %d  %-32s %s", n+1, c.name, r)
			}
		}
	}
	return nil
}

// runCycle measures callers that each have a session of their own: no one waits for another's lock.
func (b *bench) runCycle(ctx context.Context) error {
	var works []work
	for _, callers := range []int{1, 16, 128} {
		works = append(works, work{
			name: fmt.Sprintf("cycle-%d", callers), callers: callers, unit: "cycles/s",
			long:  callers == 16,
			title: fmt.Sprintf("cycle (acquire, read 1 KiB, save 1 KiB, release), %s, each on its own session", people(callers)),
			can:   func(c *contestant) bool { return c.cycle != nil },
			run: func(ctx context.Context, c *contestant, l loop) (round, error) {
				l.do = func(ctx context.Context, caller int) error { return c.cycle(ctx, caller, caller, func() {}) }
				return l.round(ctx)
			},
		})
	}
	for _, callers := range []int{1, 128} {
		works = append(works, work{
			name: fmt.Sprintf("read-%d", callers), callers: callers, unit: "reads/s",
			long:  callers == 1,
			title: fmt.Sprintf("read 1 KiB, %s", people(callers)),
			can:   func(c *contestant) bool { return c.read != nil },
			run: func(ctx context.Context, c *contestant, l loop) (round, error) {
				l.do = func(ctx context.Context, caller int) error { return c.read(ctx, caller, caller) }
				return l.round(ctx)
			},
		})
	}
	return b.takeTurns(ctx, b.contestants, works...)
}

func people(callers int) string {
	if callers == 1 {
		return "1 caller"
	}
	return fmt.Sprintf("%d callers", callers)
}

// round runs the loop.
func (l loop) round(ctx context.Context) (round, error) {
	out, err := l.run(ctx)
	if err != nil {
		return round{}, err
	}
	return newRound(out), nil
}

// runContention measures callers that want the same session.
func (b *bench) runContention(ctx context.Context) error {
	locks := func(c *contestant) bool { return c.locks }
	var works []work
	for _, callers := range []int{2, 16, 64} {
		works = append(works, work{
			name: fmt.Sprintf("contended-%d", callers), callers: callers, unit: "hand-overs/s",
			long:  callers == 2,
			title: fmt.Sprintf("%s on one session, again and again", people(callers)),
			// A Put of one caller after the other is the limit here.
			can: func(c *contestant) bool { return locks(c) || c.name == namePut || c.name == namePut3 },
			run: func(ctx context.Context, c *contestant, l loop) (round, error) {
				if !c.locks {
					l.callers = 1
					l.do = func(ctx context.Context, caller int) error { return c.cycle(ctx, caller, 0, func() {}) }
					return l.round(ctx)
				}
				return contend(ctx, c, l)
			},
		})
	}
	works = append(works, work{
		name: "refused", callers: 16, unit: "tries/s",
		title: "16 callers that try to acquire what another holds, and are refused",
		can:   func(c *contestant) bool { return c.refused != nil },
		run:   refuse,
	}, work{
		name: "burst", callers: burstCalls, unit: "bursts/s",
		title: fmt.Sprintf("bursts of %d calls at once on one session, with handlers of %s", burstCalls, burstHandler),
		can:   locks,
		run: func(ctx context.Context, c *contestant, l loop) (round, error) {
			return burst(ctx, c, l.meter, b.bursts)
		},
	})
	return b.takeTurns(ctx, b.contestants, works...)
}

// A queue watches who holds the lock of one session, and who was there before.
type queue struct {
	mu       sync.Mutex
	arrivals int64
	waiting  map[int]int64 // callers that wait: number of the arrival
	held     bool
	last     int       // who held it last
	freed    time.Time // when that one was done with what it did under the lock

	handOvers []time.Duration
	grants    int
	overtaken int64 // by each grant, those who had come earlier
	worst     int64
	overlaps  int
}

func (q *queue) arrive(caller int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.arrivals++
	q.waiting[caller] = q.arrivals
}

// hold is called under the lock.
func (q *queue) hold(caller int) {
	now := time.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	mine := q.waiting[caller]
	delete(q.waiting, caller)
	earlier := int64(0)
	for _, theirs := range q.waiting {
		if theirs < mine {
			earlier++
		}
	}
	q.grants++
	q.overtaken += earlier
	q.worst = max(q.worst, earlier)
	if q.held {
		q.overlaps++
	}
	// It counts as handed over only to another caller, for whoever comes back at once did not have to be woken.
	if !q.freed.IsZero() && q.last != caller {
		q.handOvers = append(q.handOvers, now.Sub(q.freed))
	}
	q.held = true
}

// free is called under the lock, when all that is left to do is to save and release.
func (q *queue) free(caller int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.held, q.last, q.freed = false, caller, time.Now()
}

// restart forgets what happened before it counts.
func (q *queue) restart() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.handOvers, q.grants, q.overtaken, q.worst = nil, 0, 0, 0
}

// contend has all callers want one session. The latency is the wait and the work.
func contend(ctx context.Context, c *contestant, l loop) (round, error) {
	q := &queue{waiting: map[int]int64{}}
	l.began = q.restart
	l.do = func(ctx context.Context, caller int) error {
		q.arrive(caller)
		return c.cycle(ctx, caller, 0, func() {
			q.hold(caller)
			q.free(caller)
		})
	}
	out, err := l.run(ctx)
	if err != nil {
		return round{}, err
	}
	r := newRound(out)
	slices.Sort(q.handOvers)
	r.HandOver = micros(quantile(q.handOvers, 0.5))
	r.Overtaken = float64(q.overtaken) / float64(max(q.grants, 1))
	r.WorstOvertaken = q.worst
	r.MaxOverMedian = float64(out.latencies[len(out.latencies)-1]) / float64(max(quantile(out.latencies, 0.5), 1))
	if q.overlaps > 0 {
		return round{}, fmt.Errorf("two held the lock at once, %d times", q.overlaps)
	}
	return r, nil
}

// refuse has all callers try in vain.
func refuse(ctx context.Context, c *contestant, l loop) (_ round, err error) {
	try, release, err := c.refused(ctx)
	if err != nil {
		return round{}, err
	}
	defer func() { err = errors.Join(err, release(context.WithoutCancel(ctx))) }()
	l.do = try
	return l.round(ctx)
}

const (
	burstCalls   = 16
	burstHandler = 5 * time.Millisecond
)

// burst has 16 callers come at once. The latency is the time until all are served.
func burst(ctx context.Context, c *contestant, m meter, bursts int) (round, error) {
	var took []time.Duration
	var before usage
	const unmeasured = 1 // for connections and the like
	for n := range unmeasured + bursts {
		if n == unmeasured {
			var err error
			if before, err = m.read(ctx); err != nil {
				return round{}, err
			}
		}
		began := time.Now()
		errs := make([]error, burstCalls)
		var wg sync.WaitGroup
		for caller := range burstCalls {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, patience)
				defer cancel()
				errs[caller] = c.cycle(ctx, caller, 0, func() { <-time.After(burstHandler) })
			})
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				return round{}, err
			}
		}
		if n >= unmeasured {
			took = append(took, time.Since(began))
		}
	}
	after, err := m.read(ctx)
	if err != nil {
		return round{}, err
	}
	slices.Sort(took)
	out := outcome{latencies: took, rss: m.memory(), use: after.since(before, float64(bursts))}
	for _, d := range took {
		out.rate += d.Seconds()
	}
	out.rate = float64(len(took)) / out.rate
	return newRound(out), nil
}

// runMessages measures the way of a message: from the call that publishes it to whoever has subscribed.
func (b *bench) runMessages(ctx context.Context) error {
	return b.takeTurns(ctx, b.contestants,
		work{
			name: "put", callers: 1, unit: "puts/s", title: "one Put after the other, for comparison with the next",
			can: func(c *contestant) bool { return c.name == namePut || c.name == namePut3 },
			run: func(ctx context.Context, c *contestant, l loop) (round, error) {
				l.do = func(ctx context.Context, caller int) error { return c.cycle(ctx, caller, caller, func() {}) }
				return l.round(ctx)
			},
		},
		work{
			name: "message", callers: 1, unit: "messages/s", title: "publish 1 KiB to delivery, from one node to another if there are more",
			can: func(c *contestant) bool { return c.messages != nil },
			run: deliver,
		})
}

func deliver(ctx context.Context, c *contestant, l loop) (round, error) {
	send, stop, err := c.messages.open(ctx)
	if err != nil {
		return round{}, err
	}
	defer stop()
	var took []time.Duration
	l.began = func() {}
	counts := time.Now().Add(l.settle)
	l.do = func(ctx context.Context, _ int) error {
		began := time.Now()
		d, err := send(ctx)
		if began.After(counts) {
			took = append(took, d)
		}
		return err
	}
	out, err := l.run(ctx)
	if err != nil {
		return round{}, err
	}
	slices.Sort(took)
	out.latencies = took
	return newRound(out), nil
}
