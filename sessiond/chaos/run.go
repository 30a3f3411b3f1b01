//go:build unix

package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// MinSuccessRate is the part of the operations whose clients must learn what became of them, for a run to count. A cluster that
// answers nothing breaks no promise either.
const MinSuccessRate = 0.75

// Config says what to run.
type Config struct {
	// Seed decides which faults are made when, and what clients do.
	Seed uint64
	// Duration is how long faults are made.
	Duration time.Duration
	// Faults are the kinds of faults to make: see [Kinds]. None: all of them.
	Faults []string
	// FrontEnds adds front-ends, with the lock and without it, and MCP clients of them.
	FrontEnds bool
	// Dir takes logs, data, and the histories that are not as they should be.
	Dir string
	// Out takes what the run has to say.
	Out io.Writer
}

// A Report is what came of a run.
type Report struct {
	Totals
	// Faults is how often each kind of fault was made.
	Faults map[string]int
	// Took is how long the traffic ran.
	Took time.Duration
}

// Valid says whether the run counts: enough of its operations were answered.
func (r *Report) Valid() bool { return r.SuccessRate() >= MinSuccessRate }

// ofCluster are the bounds of a cluster: what is documented, and a second or two for a machine that is busy with all of this.
// A lock ends at most a tenth of its TTL, at least 2 s, late, and about a second that etcd takes.
var ofCluster = bounds{late: 5 * time.Second, handOver: 2500 * time.Millisecond}

const (
	// How long after a fault its consequences may be felt: connections are made anew, entries of the dead removed, leases end that a
	// change of leader started anew.
	recovery = 12 * time.Second
	// How long everything may take to end after the last fault.
	endTimeout = 2 * time.Minute
)

// ErrNoFault is the error of [Run] for a kind of fault that there is not.
var ErrNoFault = errors.New("no fault")

// Run starts a cluster, lets clients and faults loose on it, and judges what they saw. An error says that the run itself failed;
// what is wrong with the product is in the report.
func Run(ctx context.Context, cfg Config) (_ *Report, err error) {
	kinds := cfg.Faults
	if len(kinds) == 0 {
		kinds = Kinds(cfg.FrontEnds)
	}
	for _, kind := range kinds {
		if all := Kinds(cfg.FrontEnds); !slices.Contains(all, kind) {
			return nil, fmt.Errorf("%w %q, only %s", ErrNoFault, kind, strings.Join(all, ", "))
		}
	}
	var mu sync.Mutex
	logf := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(cfg.Out, format+"\n", args...)
	}
	logf("seed %d, %v, faults %s", cfg.Seed, cfg.Duration, strings.Join(kinds, ","))

	c, err := startCluster(ctx, cfg.Dir, sessiondtest.Binary)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.stop(context.WithoutCancel(ctx))) }()
	before, err := c.count(ctx)
	if err != nil {
		return nil, err
	}
	var tiers []*frontEndTier
	closeTiers := sync.OnceValue(func() error {
		var errs []error
		for _, tier := range tiers {
			errs = append(errs, tier.close(context.WithoutCancel(ctx)))
		}
		return errors.Join(errs...)
	})
	defer func() { err = errors.Join(err, closeTiers()) }()
	for _, locked := range []bool{true, false} {
		if !cfg.FrontEnds {
			break
		}
		tier, err := c.startFrontEnds(ctx, locked)
		if err != nil {
			return nil, err
		}
		tiers = append(tiers, tier)
	}
	logf("before: %+v", before)

	clk := clock{time.Now()}
	quiet := &calm{recovery: recovery}
	j := newJudge(quiet, ofCluster, func(ops []Op, vs []Violation) {
		name := filepath.Join(cfg.Dir, ops[0].Session+".jsonl")
		logf("VIOLATION, history in %s", name)
		for _, v := range vs {
			logf("%v", v)
		}
		if err := saveHistory(name, ops); err != nil {
			logf("%v", err)
		}
	})
	j.start()
	var clients []*client.Client
	var attached []bool
	closeClients := sync.OnceValue(func() error {
		var errs []error
		for _, cl := range clients {
			errs = append(errs, cl.Close())
		}
		return errors.Join(errs...)
	})
	defer func() { err = errors.Join(err, closeClients()) }()
	for i := range 3 * groups {
		// One in three is attached, as front-ends are.
		opts := client.Options{Attach: i%3 == 2, DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(countAttempts)}}
		cl, err := client.New(c.of(i%groups), opts)
		if err != nil {
			return nil, err
		}
		clients, attached = append(clients, cl), append(attached, opts.Attach)
	}
	w := &workload{
		load: load{slots: 100, actors: 5, operations: 100, doubts: 4, abandons: 3, lockTTL: 2 * time.Second, patience: 10 * time.Second, settled: 5 * time.Second},
		seed: cfg.Seed, clients: clients, attached: attached, clock: clk, judge: j.take,
	}
	t := &talks{
		seed: cfg.Seed, slots: 8, clients: clients, clock: clk, calm: quiet, patience: 15 * time.Second,
		judge: func(c *conversation) { j.takeMessages(c, logf) },
	}
	f := &faulter{cluster: c, calm: quiet, clock: clk, seed: cfg.Seed, kinds: kinds, logf: logf, made: map[string]int{}}
	var guests []*visits
	for _, tier := range tiers {
		f.frontEnds = append(f.frontEnds, tier.servers...)
		guests = append(guests, &visits{seed: cfg.Seed, tier: tier, slots: 6, clock: clk, calm: quiet, judge: func(v *visit) { j.takeVisit(v, logf) }})
	}

	stop, cancel := context.WithTimeout(ctx, cfg.Duration)
	defer cancel()
	// Everything ends by itself after stop, unless something hangs.
	all, cancelAll := context.WithTimeout(ctx, cfg.Duration+endTimeout)
	defer cancelAll()
	background, endBackground := context.WithCancel(ctx)
	defer endBackground()
	var wg sync.WaitGroup
	wg.Go(func() { c.compact(background) })
	var faultErr error
	wg.Go(func() {
		if faultErr = f.run(all, stop); faultErr != nil {
			cancel()
		}
		endBackground()
	})
	wg.Go(func() { w.run(all, stop) })
	wg.Go(func() { t.run(all, stop) })
	for _, g := range guests {
		wg.Go(func() { g.run(all, stop) })
	}
	wg.Wait()
	took := time.Since(clk.began)
	report := &Report{Totals: *j.finish(), Faults: f.made, Took: took}
	if faultErr != nil {
		return report, faultErr
	}
	if err := closeTiers(); err != nil {
		return report, err
	}
	if cfg.FrontEnds {
		w.destroy(ctx, frontEndSession)
	}
	if err := closeClients(); err != nil {
		return report, err
	}
	report.Violations = append(report.Violations, c.leftovers(ctx, before, report.sharedLeases(len(c.nodes)), logf)...)
	return report, nil
}

func saveHistory(name string, ops []Op) (err error) {
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return writeHistory(file, ops)
}

// Write writes the report for people.
func (r *Report) Write(w io.Writer) {
	fmt.Fprintf(w, "%d operations in %d sessions in %.0f s, %d checked, %d histories undecided, %.1f%% answered\n",
		r.Operations, r.Sessions, r.Took.Seconds(), r.Checked, r.Undecided, 100*r.SuccessRate())
	fmt.Fprintf(w, "%d messages in %d sessions, %d acknowledged, %d delivered\n", r.Published, r.Talks, r.Acknowledged, r.Delivered)
	if r.Visits > 0 {
		fmt.Fprintf(w, "%d MCP requests in %d sessions, %d answered\n", r.Requests, r.Visits, r.RequestsAnswered)
	}
	total := 0
	var kinds []string
	for kind, n := range r.Faults {
		total += n
		kinds = append(kinds, fmt.Sprintf("%s %d", kind, n))
	}
	slices.Sort(kinds)
	fmt.Fprintf(w, "%d faults of %d kinds: %s\n", total, len(r.Faults), strings.Join(kinds, ", "))
	for _, kind := range []Kind{Create, Read, Save, Touch, Destroy, Acquire, TryAcquire, Release} {
		var outcomes []string
		for o, n := range r.ByKind[kind] {
			outcomes = append(outcomes, fmt.Sprintf("%s %d", o, n))
		}
		slices.Sort(outcomes)
		fmt.Fprintf(w, "  %s: %s\n", kind, strings.Join(outcomes, ", "))
	}
	for _, v := range r.Violations {
		fmt.Fprintln(w, v)
	}
	switch {
	case len(r.Violations) > 0:
		fmt.Fprintf(w, "%d VIOLATIONS\n", len(r.Violations))
	case !r.Valid():
		fmt.Fprintf(w, "no violation, but less than %.0f%% answered: this run does not count\n", 100*MinSuccessRate)
	default:
		fmt.Fprintln(w, "no violation")
	}
}
