//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/procfs"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// bench is a run of the program.
type bench struct {
	*config
	report   *report
	progress io.Writer

	field       *field // that runs
	contestants []*contestant
	closers     []func(context.Context) error
}

func (b *bench) say(format string, args ...any) { fmt.Fprintf(b.progress, format+"\n", args...) }

func (b *bench) onStop(f func(context.Context) error) { b.closers = append(b.closers, f) }

// stop ends all that was started, the last first.
func (b *bench) stop(ctx context.Context) error {
	var errs []error
	for _, f := range slices.Backward(b.closers) {
		errs = append(errs, f(ctx))
	}
	b.closers, b.contestants, b.field = nil, nil, nil
	return errors.Join(errs...)
}

// usage is what has been used up to a moment.
type usage struct {
	at      time.Time
	commits int64
	own     time.Duration // processor time of this process
	servers time.Duration // of the contestant's processes
}

// A meter reads usage.
type meter struct {
	processes []*sessiondtest.Process
	etcd      *clientv3.Client // nil without etcd
}

func (m meter) read(ctx context.Context) (usage, error) {
	u := usage{own: ownTime()}
	for _, p := range m.processes {
		t, _, err := processUse(p.Pid())
		if err != nil {
			return u, err
		}
		u.servers += t
	}
	if m.etcd != nil {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		status, err := m.etcd.Status(ctx, m.etcd.Endpoints()[0])
		if err != nil {
			return u, err
		}
		u.commits = int64(status.RaftIndex)
	}
	u.at = time.Now()
	return u, nil
}

// memory is what the processes have in memory.
func (m meter) memory() int64 {
	var sum int64
	for _, p := range m.processes {
		if _, rss, err := processUse(p.Pid()); err == nil {
			sum += rss
		}
	}
	return sum
}

// ownTime is the processor time that this process has used.
func ownTime() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// processUse gives the processor time and the memory of a process.
func processUse(pid int) (time.Duration, int64, error) {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return 0, 0, err
	}
	stat, err := p.Stat()
	if err != nil {
		return 0, 0, err
	}
	return time.Duration(stat.CPUTime() * float64(time.Second)), int64(stat.ResidentMemory()), nil
}

// loop is a measurement: callers that do a thing over and over.
type loop struct {
	callers         int
	settle, measure time.Duration
	meter           meter
	do              func(ctx context.Context, caller int) error
	// began, if set, is called once it counts.
	began func()
}

// outcome is what came of a loop.
type outcome struct {
	rate      float64
	latencies []time.Duration // sorted
	use       use
	rss       int64
}

// use is what an operation used.
type use struct {
	commits      float64
	own, servers time.Duration
}

// patience bounds an operation: what takes longer hangs.
const patience = 30 * time.Second

// run measures. The rate counts what ended in time; latencies also have what was under way at the end, for that is where callers
// are that nobody served.
func (l loop) run(ctx context.Context) (outcome, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	start := time.Now().Add(l.settle)
	end := start.Add(l.measure)
	type sample struct {
		took    time.Duration
		counted bool
	}
	samples := make([][]sample, l.callers)
	var wg sync.WaitGroup
	for caller := range l.callers {
		wg.Go(func() {
			for {
				began := time.Now()
				if began.After(end) || ctx.Err() != nil {
					return
				}
				opCtx, stop := context.WithTimeout(ctx, patience)
				err := l.do(opCtx, caller)
				stop()
				ended := time.Now()
				if err != nil {
					cancel(err)
					return
				}
				if ended.After(start) {
					samples[caller] = append(samples[caller], sample{ended.Sub(began), ended.Before(end)})
				}
			}
		})
	}
	before, err := l.wait(ctx, start)
	if err == nil && l.began != nil {
		l.began()
	}
	var after usage
	if err == nil {
		after, err = l.wait(ctx, end)
	}
	wg.Wait()
	if cause := context.Cause(ctx); cause != nil {
		return outcome{}, cause
	}
	if err != nil {
		return outcome{}, err
	}
	out := outcome{rss: l.meter.memory()}
	n := 0
	for _, list := range samples {
		for _, s := range list {
			if s.counted {
				n++
			}
			out.latencies = append(out.latencies, s.took)
		}
	}
	if len(out.latencies) == 0 {
		return outcome{}, errors.New("not one operation ended in time")
	}
	slices.Sort(out.latencies)
	out.rate = float64(n) / l.measure.Seconds()
	out.use = after.since(before, float64(max(n, 1)))
	return out, nil
}

// wait reads the meter at a moment.
func (l loop) wait(ctx context.Context, at time.Time) (usage, error) {
	timer := time.NewTimer(time.Until(at))
	defer timer.Stop()
	select {
	case <-timer.C:
		return l.meter.read(ctx)
	case <-ctx.Done():
		return usage{}, context.Cause(ctx)
	}
}

func (u usage) since(before usage, n float64) use {
	return use{
		commits: float64(u.commits-before.commits) / n,
		own:     time.Duration(float64(u.own-before.own) / n),
		servers: time.Duration(float64(u.servers-before.servers) / n),
	}
}

// quantile is of a sorted list.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	i := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[max(i, 0)]
}

// median of numbers; those that are not a number do not count.
func median(list []float64) float64 {
	list = slices.DeleteFunc(slices.Clone(list), math.IsNaN)
	if len(list) == 0 {
		return math.NaN()
	}
	slices.Sort(list)
	if n := len(list); n%2 == 0 {
		return (list[n/2-1] + list[n/2]) / 2
	}
	return list[len(list)/2]
}
