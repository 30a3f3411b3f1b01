//go:build unix

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// How many callers make or end what is measured at rest.
const builders = 256

// A big is a node on which there is very much of something.
type big struct {
	*embedded
	client *client.Client
	others []string // sessions of those who have nothing to do with it
}

func (b *bench) launchBig(ctx context.Context, name string, args ...string) (*big, error) {
	node, err := b.launchEmbedded(ctx, name, args...)
	if err != nil {
		return nil, err
	}
	c, err := client.New([]string{node.Addr}, client.Options{CallTimeout: patience})
	if err != nil {
		return nil, err
	}
	b.onStop(func(context.Context) error { return c.Close() })
	if err := sessiondtest.Poll(ctx, c.Ready); err != nil {
		return nil, err
	}
	g := &big{embedded: node, client: c}
	g.others, err = g.create(ctx, sessionCount, 24*time.Hour)
	return g, err
}

// create makes sessions.
func (g *big) create(ctx context.Context, n int, ttl time.Duration) ([]string, error) {
	data := make([]byte, payloadBytes)
	if _, err := rand.Read(data); err != nil {
		return nil, err
	}
	ids := make([]string, n)
	return ids, each(ctx, n, builders, func(ctx context.Context, i int) error {
		s, err := g.client.Create(ctx, data, client.CreateOptions{TTL: ttl})
		ids[i] = s.ID
		return err
	})
}

// cycles is a locked request of one of the sessions.
func (g *big) cycles(sessions []string, callers int) func(context.Context, int) error {
	data := newPayloads(callers)
	return func(ctx context.Context, caller int) error {
		// Each caller has its own part, so that nobody waits for another.
		share := len(sessions) / callers
		id := sessions[caller*share+mathrand.N(share)]
		return g.client.WithLock(ctx, id, client.AcquireOptions{}, func(context.Context, []byte) ([]byte, error) {
			return data.next(caller), nil
		})
	}
}

// size is what the data folder has on disk.
func (g *big) size() (int64, error) {
	var sum int64
	err := filepath.WalkDir(g.dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			var info fs.FileInfo
			if info, err = d.Info(); err == nil {
				sum += info.Size()
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // etcd replaces files
		}
		return err
	})
	return sum, err
}

// leases counts etcd's.
func (g *big) leases(ctx context.Context) (int, error) {
	resp, err := g.etcd.Leases(ctx)
	if err != nil {
		return 0, err
	}
	return len(resp.Leases), nil
}

// keys counts those of one kind.
func (g *big) keys(ctx context.Context, kind string) (int64, error) {
	resp, err := g.etcd.Get(ctx, sessiond.DefaultPrefix+kind, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return 0, err
	}
	return resp.Count, nil
}

// idle is what the node uses of a core while nobody asks for anything, in percent.
func (g *big) idle(ctx context.Context) (float64, error) {
	l := loop{meter: g.meter()}
	before, err := l.wait(ctx, time.Now().Add(time.Second))
	if err != nil {
		return 0, err
	}
	after, err := l.wait(ctx, time.Now().Add(4*time.Second))
	if err != nil {
		return 0, err
	}
	return 100 * (after.servers - before.servers).Seconds() / after.at.Sub(before.at).Seconds(), nil
}

// bystanders measures those who have nothing to do with it.
func (b *bench) bystanders(ctx context.Context, g *big) (round, error) {
	const callers = 16
	return loop{callers: callers, settle: b.settle, measure: 2 * b.measure, meter: g.meter(), do: g.cycles(g.others, callers)}.round(ctx)
}

// growth reports how a figure grows from a tenth of a number to all of it.
func growth(rep *figures, what string, n int, tenth, all float64, unit string) {
	rep.add(fmt.Sprintf("%s, at %d", what, n/10), tenth, unit)
	rep.add(fmt.Sprintf("%s, at %d", what, n), all, unit)
}

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }

// sized is a number, smaller in quick runs.
func (b *bench) sized(n, quick int) int {
	if b.quick {
		return quick
	}
	return n
}

func (b *bench) newFigures(format string, args ...any) *figures {
	rep := &figures{Title: fmt.Sprintf(format, args...)}
	b.say("%s", rep.Title)
	b.report.Figures = append(b.report.Figures, rep)
	return rep
}

// runScaleSessions compares a node with a thousand sessions and one with very many.
func (b *bench) runScaleSessions(ctx context.Context) error {
	if err := b.stop(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	const few = 1000
	n := b.sized(1_000_000, 50_000)
	rep := b.newFigures("%d stored sessions of 1 KiB", n)
	small, err := b.launchBig(ctx, "scale-few")
	if err != nil {
		return err
	}
	fewIDs, err := small.create(ctx, few, 24*time.Hour)
	if err != nil {
		return err
	}
	large, err := b.launchBig(ctx, "scale-many")
	if err != nil {
		return err
	}
	var manyIDs []string
	var memory, disk [2]int64
	for i, upTo := range []int{n / 10, n} {
		began, had := time.Now(), len(manyIDs)
		for len(manyIDs) < upTo {
			more, err := large.create(ctx, min(n/20, upTo-len(manyIDs)), 24*time.Hour)
			if err != nil {
				return err
			}
			manyIDs = append(manyIDs, more...)
			b.say("  %d made, %.0f a second", len(manyIDs), float64(len(manyIDs)-had)/time.Since(began).Seconds())
		}
		rep.add(fmt.Sprintf("sessions made a second, by %d callers, up to %d", builders, upTo), float64(upTo-had)/time.Since(began).Seconds(), "")
		memory[i] = large.meter().memory()
		if disk[i], err = large.size(); err != nil {
			return err
		}
	}
	per := func(bytes [2]int64) float64 { return float64(bytes[1]-bytes[0]) / float64(n-n/10) / (1 << 10) }
	growth(rep, "memory of the node", n, mib(memory[0]), mib(memory[1]), "MiB")
	rep.add("memory for one more session", per(memory), "KiB")
	growth(rep, "data folder", n, mib(disk[0]), mib(disk[1]), "MiB")
	rep.add("disk for one more session", per(disk), "KiB")
	leases, err := large.leases(ctx)
	if err != nil {
		return err
	}
	rep.add("leases per thousand sessions", 1000*float64(leases)/float64(n), "").Bound = new(10.0)

	smallName, largeName := fmt.Sprintf("a node with %d sessions", few), fmt.Sprintf("a node with %d sessions", n)
	var works []work
	for _, callers := range []int{1, 16, 128} {
		of := func(g *big, name string, ids []string) *contestant {
			do := g.cycles(ids, callers)
			return &contestant{name: name, meter: g.meter(), cycle: func(ctx context.Context, caller, _ int, _ func()) error { return do(ctx, caller) }}
		}
		w := work{
			name: fmt.Sprintf("sessions-%d", callers), callers: callers, unit: "cycles/s", base: smallName,
			title: fmt.Sprintf("cycle, %s, on any of the sessions", people(callers)),
			can:   func(*contestant) bool { return true },
			run: func(ctx context.Context, c *contestant, l loop) (round, error) {
				l.measure *= 2
				l.do = func(ctx context.Context, caller int) error { return c.cycle(ctx, caller, 0, nil) }
				return l.round(ctx)
			},
		}
		works = append(works, w)
		if err := b.takeTurns(ctx, []*contestant{of(small, smallName, fewIDs), of(large, largeName, manyIDs)}, w); err != nil {
			return err
		}
	}
	for _, w := range works {
		x := rep.add("cycle, "+people(w.callers)+": of that with 1000 sessions (p50)", ratio(b.report.find(w.name, largeName), b.report.find(w.name, smallName), p50), "times")
		if w.callers == 1 {
			x.Bound = new(1.2)
		}
	}

	if err := large.Terminate(ctx); err != nil {
		return err
	}
	began := time.Now()
	if err := large.Restart(ctx); err != nil {
		return err
	}
	rep.add("start of a node on them, until it serves", time.Since(began).Seconds(), "s").Bound = new(5.0)
	if _, err := large.client.Read(ctx, manyIDs[0]); err != nil {
		return err
	}
	return b.stop(context.WithoutCancel(ctx))
}

// runScaleLocks has very many locks held.
func (b *bench) runScaleLocks(ctx context.Context) error {
	if err := b.stop(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	n := b.sized(100_000, 10_000)
	rep := b.newFigures("%d held locks", n)
	g, err := b.launchBig(ctx, "scale-locks")
	if err != nil {
		return err
	}
	ids, err := g.create(ctx, n, time.Hour)
	if err != nil {
		return err
	}
	alone, err := b.bystanders(ctx, g)
	if err != nil {
		return err
	}
	grants := make([]client.Grant, n)
	var memory [2]int64
	had := 0
	empty := g.meter().memory()
	for i, upTo := range []int{n / 10, n} {
		began := time.Now()
		before, err := g.meter().read(ctx)
		if err != nil {
			return err
		}
		if err := each(ctx, upTo-had, builders, func(ctx context.Context, j int) error {
			got, err := g.client.TryAcquire(ctx, ids[had+j], client.AcquireOptions{TTL: time.Hour, OmitSession: true})
			grants[had+j] = got.Grant
			return err
		}); err != nil {
			return err
		}
		after, err := g.meter().read(ctx)
		if err != nil {
			return err
		}
		took := time.Since(began).Seconds()
		rep.add(fmt.Sprintf("locks taken a second, by %d callers, up to %d", builders, upTo), float64(upTo-had)/took, "")
		rep.add(fmt.Sprintf("commits a lock, up to %d", upTo), after.since(before, float64(upTo-had)).commits, "")
		memory[i], had = g.meter().memory(), upTo
		b.say("  %d held", upTo)
	}
	growth(rep, "more memory of the node", n, mib(memory[0]-empty), mib(memory[1]-empty), "MiB")
	rep.add("memory for one more lock", float64(memory[1]-memory[0])/float64(n-n/10)/(1<<10), "KiB")
	leases, err := g.leases(ctx)
	if err != nil {
		return err
	}
	rep.add("leases per lock", float64(leases)/float64(n), "")
	idle, err := g.idle(ctx)
	if err != nil {
		return err
	}
	rep.add("processor while they are held and nothing happens", idle, "% of a core")
	crowded, err := b.bystanders(ctx, g)
	if err != nil {
		return err
	}
	compareBystanders(rep, alone, crowded)
	began := time.Now()
	if err := each(ctx, n, builders, func(ctx context.Context, i int) error { return g.client.Release(ctx, grants[i]) }); err != nil {
		return err
	}
	rep.add("locks released a second", float64(n)/time.Since(began).Seconds(), "")
	return b.stop(context.WithoutCancel(ctx))
}

func compareBystanders(rep *figures, alone, crowded round) {
	rep.add("cycle of 16 others, p50 without", alone.P50/1e3, "ms")
	rep.add("cycle of 16 others, p50 meanwhile", crowded.P50/1e3, "ms")
	rep.add("cycle of 16 others, p99 without", alone.P99/1e3, "ms")
	rep.add("cycle of 16 others, p99 meanwhile", crowded.P99/1e3, "ms")
}

// runScaleExpiry has very many sessions end at the same time.
func (b *bench) runScaleExpiry(ctx context.Context) error {
	if err := b.stop(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	n := b.sized(100_000, 10_000)
	rep := b.newFigures("%d sessions that expire at the same time", n)
	g, err := b.launchBig(ctx, "scale-expiry")
	if err != nil {
		return err
	}
	data := make([]byte, payloadBytes)
	// All are due at the same moment, those made later with a shorter TTL. What makes them takes a part of that time.
	longest := time.Duration(b.sized(100, 25)) * time.Second
	due := time.Now().Add(longest)
	const shortest = 5 * time.Second
	if err := each(ctx, n, builders, func(ctx context.Context, _ int) error {
		left := time.Until(due).Truncate(time.Second)
		if left < shortest {
			return errors.New("this machine is too slow to make them in time")
		}
		_, err := g.client.Create(ctx, data, client.CreateOptions{TTL: left})
		return err
	}); err != nil {
		return err
	}
	b.say("  made; due in %.0f s", time.Until(due).Seconds())

	// A TTL is a lower bound; the upper one is a tenth more, for those that share leases, and a second.
	bound := due.Add(longest/10 + time.Second)
	watchCtx, stopWatch := context.WithCancel(ctx)
	defer stopWatch()
	watch := g.etcd.Watch(watchCtx, sessiond.DefaultPrefix+"s/", clientv3.WithPrefix(), clientv3.WithFilterPut())
	type sample struct {
		at   time.Time
		took time.Duration
	}
	const callers = 16
	do := g.cycles(g.others, callers)
	samples := make([][]sample, callers)
	work, stopWork := context.WithCancelCause(ctx)
	defer stopWork(nil)
	done := make(chan struct{})
	var wg sync.WaitGroup
	for caller := range callers {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				began := time.Now()
				if err := do(work, caller); err != nil {
					stopWork(err)
					return
				}
				samples[caller] = append(samples[caller], sample{began, time.Since(began)})
			}
		})
	}
	var gone []time.Time
	timeout := time.After(time.Until(bound) + time.Minute)
wait:
	for len(gone) < n {
		select {
		case w := <-watch:
			if err := w.Err(); err != nil {
				stopWork(err)
				break wait
			}
			for range w.Events {
				gone = append(gone, time.Now())
			}
		case <-timeout:
			stopWork(fmt.Errorf("a minute after the bound only %d of %d sessions are gone", len(gone), n))
		case <-work.Done():
			break wait
		}
	}
	close(done)
	wg.Wait()
	if err := context.Cause(work); err != nil {
		return err
	}
	last := gone[len(gone)-1]
	rep.add("first gone after the TTL", gone[0].Sub(due).Seconds(), "s")
	rep.add("half of them gone after the TTL", gone[len(gone)/2].Sub(due).Seconds(), "s")
	rep.add("last gone after the TTL", last.Sub(due).Seconds(), "s")
	rep.add("last gone after the upper bound of the TTL", max(last.Sub(bound).Seconds(), 0), "s").Bound = new(5.0)
	rep.add("from the first to the last", last.Sub(gone[0]).Seconds(), "s")
	var before, meanwhile []time.Duration
	for _, list := range samples {
		for _, s := range list {
			if s.at.Add(s.took).After(gone[0]) && s.at.Before(last) {
				meanwhile = append(meanwhile, s.took)
			} else if s.at.Before(due) {
				before = append(before, s.took)
			}
		}
	}
	slices.Sort(before)
	slices.Sort(meanwhile)
	quiet, busy := quantile(before, 0.99), quantile(meanwhile, 0.99)
	rep.add("cycle of 16 others, p99 before", micros(quiet)/1e3, "ms")
	rep.add("cycle of 16 others, p99 meanwhile", micros(busy)/1e3, "ms")
	rep.add("cycle of 16 others, longest meanwhile", micros(quantile(meanwhile, 1))/1e3, "ms")
	rep.add("cycle of 16 others, p99 meanwhile: of that before", float64(busy)/float64(max(quiet, 1)), "times").Bound = new(2.0)
	return b.stop(context.WithoutCancel(ctx))
}

// runScaleWaiters has very many callers wait, all for one lock, and for many.
func (b *bench) runScaleWaiters(ctx context.Context) error {
	if err := b.stop(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	const queue = sessiond.DefaultMaxWaiters
	n := b.sized(10_000, 2000)
	g, err := b.launchBig(ctx, "scale-waiters")
	if err != nil {
		return err
	}
	// One lock's queue is bounded, by default to this many.
	for _, c := range []struct{ waiters, sessions int }{{queue / 10, 1}, {queue, 1}, {n, n / 10}, {n, n / 100}} {
		rep := b.newFigures("%d waiters for %d sessions", c.waiters, c.sessions)
		if err := b.holdWaiters(ctx, g, rep, c.waiters, c.sessions); err != nil {
			return err
		}
	}
	return b.stop(context.WithoutCancel(ctx))
}

func (b *bench) holdWaiters(ctx context.Context, g *big, rep *figures, waiters, sessions int) error {
	ids, err := g.create(ctx, sessions, time.Hour)
	if err != nil {
		return err
	}
	alone, err := b.bystanders(ctx, g)
	if err != nil {
		return err
	}
	opts := client.AcquireOptions{TTL: time.Hour, Timeout: time.Hour, OmitSession: true}
	holders := make([]client.Grant, sessions)
	if err := each(ctx, sessions, builders, func(ctx context.Context, i int) (err error) {
		holders[i], err = g.client.Acquire(ctx, ids[i], opts)
		return err
	}); err != nil {
		return err
	}
	memory := g.meter().memory()
	before, err := g.meter().read(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	work, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var tokens []uint64 // in the order of the grants
	for i := range waiters {
		wg.Go(func() {
			grant, err := g.client.Acquire(work, ids[i%sessions], opts)
			if err == nil {
				mu.Lock()
				tokens = append(tokens, grant.FencingToken)
				mu.Unlock()
				err = g.client.Release(work, grant)
			}
			if err != nil {
				cancel(err)
			}
		})
	}
	defer wg.Wait()
	defer cancel(nil)
	err = sessiondtest.Poll(work, func(ctx context.Context) error {
		queued, err := g.keys(ctx, "l/")
		if err == nil && queued < int64(waiters+sessions) {
			err = fmt.Errorf("%d of %d callers are in the queue", queued-int64(sessions), waiters)
		}
		return err
	})
	if err != nil {
		return err
	}
	rep.add("callers queued a second", float64(waiters)/time.Since(began).Seconds(), "")
	after, err := g.meter().read(ctx)
	if err != nil {
		return err
	}
	rep.add("commits a caller to queue", after.since(before, float64(waiters)).commits, "")
	rep.add("memory of the node per waiter", float64(g.meter().memory()-memory)/float64(waiters)/(1<<10), "KiB")
	idle, err := g.idle(ctx)
	if err != nil {
		return err
	}
	rep.add("processor while they wait and nothing happens", idle, "% of a core")
	crowded, err := b.bystanders(ctx, g)
	if err != nil {
		return err
	}
	compareBystanders(rep, alone, crowded)

	if before, err = g.meter().read(ctx); err != nil {
		return err
	}
	began = time.Now()
	if err := each(ctx, sessions, builders, func(ctx context.Context, i int) error { return g.client.Release(ctx, holders[i]) }); err != nil {
		return err
	}
	wg.Wait()
	if err := context.Cause(work); err != nil {
		return err
	}
	took := time.Since(began)
	if after, err = g.meter().read(ctx); err != nil {
		return err
	}
	used := after.since(before, float64(waiters+sessions))
	rep.add("hand-overs a second until all are served", float64(waiters)/took.Seconds(), "")
	rep.add("commits a hand-over, the release among them", used.commits, "")
	rep.add("processor time of the node a hand-over", micros(used.servers), "µs")
	if sessions == 1 {
		ahead := 0 // grants seen before one with a lower token; the answers' ways to here can cross
		for i := 1; i < len(tokens); i++ {
			if tokens[i] < tokens[i-1] {
				ahead++
			}
		}
		rep.add("grants out of the order of arrival", float64(ahead), "")
	}
	return nil
}

// childAttached is this program as very many front-ends that are attached and hold a lock each.
const childAttached = "serve-attached"

// serveAttached is that process. It makes a file when all are attached and hold, and waits to be killed.
func serveAttached(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet(childAttached, flag.ContinueOnError)
	node := flags.String("sessiond", "", "`address`")
	n := flags.Int("n", 0, "`number`")
	ready := flags.String("ready", "", "`file` to make")
	if err := flags.Parse(args); err != nil {
		return err
	}
	raiseFileLimit()
	err := each(ctx, *n, atATime, func(ctx context.Context, _ int) error {
		// They are never closed: the process is killed.
		c, err := client.New([]string{*node}, client.Options{Attach: true, CallTimeout: patience})
		if err != nil {
			return err
		}
		if err := sessiondtest.Poll(ctx, func(context.Context) error {
			if !c.Attached() {
				return errors.New("not attached")
			}
			return nil
		}); err != nil {
			return err
		}
		s, err := c.Create(ctx, nil, client.CreateOptions{})
		if err == nil {
			_, err = c.Acquire(ctx, s.ID, client.AcquireOptions{TTL: time.Hour})
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := os.WriteFile(*ready, nil, 0o600); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// runScaleFrontEnds has very many front-ends attached, and then die together.
func (b *bench) runScaleFrontEnds(ctx context.Context) error {
	if err := b.stop(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	n := b.sized(10_000, 1000)
	rep := b.newFigures("%d attached front-ends that hold a lock each", n)
	g, err := b.launchBig(ctx, "scale-front-ends")
	if err != nil {
		return err
	}
	alone, err := b.bystanders(ctx, g)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var memory [2]int64
	for i, count := range []int{n / 10, n} {
		empty := g.meter().memory()
		began := time.Now()
		ready := filepath.Join(b.dir, fmt.Sprintf("attached-%d", count))
		p, err := b.launch(ctx, sessiondtest.Command{
			Name: fmt.Sprintf("attached-%d", count), Path: self,
			Args:         []string{childAttached, "--sessiond", g.Addr, "--n", fmt.Sprint(count), "--ready", ready},
			StartTimeout: 5 * time.Minute,
			Ready: func(context.Context) error {
				_, err := os.Stat(ready)
				return err
			},
		})
		if err != nil {
			return err
		}
		rep.add(fmt.Sprintf("attached a second, up to %d", count), float64(count)/time.Since(began).Seconds(), "")
		memory[i] = g.meter().memory() - empty
		idle, err := g.idle(ctx)
		if err != nil {
			return err
		}
		rep.add(fmt.Sprintf("processor of the node while %d are attached and nothing happens", count), idle, "% of a core")
		crowded, err := b.bystanders(ctx, g)
		if err != nil {
			return err
		}
		if count == n {
			rep.add("memory of the node per front-end", float64(memory[i])/float64(count)/(1<<10), "KiB")
			compareBystanders(rep, alone, crowded)
		}
		if err := p.Kill(); err != nil {
			return err
		}
		began = time.Now()
		if err := sessiondtest.Poll(ctx, func(ctx context.Context) error {
			held, err := g.keys(ctx, "l/")
			if err == nil && held > 0 {
				err = fmt.Errorf("%d locks are still held", held)
			}
			return err
		}); err != nil {
			return err
		}
		rep.add(fmt.Sprintf("from the death of %d to the release of their last lock", count), time.Since(began).Seconds(), "s")
	}
	return b.stop(context.WithoutCancel(ctx))
}
