//go:build unix

// Command bench measures sessiond side by side with what people would use instead, and with the limits: a durable write of
// etcd, and an empty gRPC call.
//
// It is not a set of testing.B benchmarks (those are in the packages, for single paths), because figures of different runs
// on a machine cannot be compared: a disk is slower at one time than at another. This program starts every contestant itself, as a
// process of its own on loopback with data on a real disk, lets them take turns (A B A B), and computes ratios within each round.
//
// `make bench` builds what it needs and starts it; README.md says how to read what it prints.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Exit codes.
const (
	exitFailed = 1
	exitUsage  = 2
)

// What can be run, in this order. What begins with scale takes long and much memory, and is not run by default.
const (
	sectionCycle      = "cycle"
	sectionContention = "contention"
	sectionMessages   = "messages"
	sectionFrontEnds  = "front-ends"

	scale          = "scale"
	scaleSessions  = "scale-sessions"
	scaleLocks     = "scale-locks"
	scaleExpiry    = "scale-expiry"
	scaleWaiters   = "scale-waiters"
	scaleFrontEnds = "scale-front-ends"
)

var (
	comparison = []string{sectionCycle, sectionContention, sectionMessages, sectionFrontEnds}
	scales     = []string{scaleSessions, scaleLocks, scaleExpiry, scaleWaiters, scaleFrontEnds}
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// After the first signal the next one ends the program at once (and on Linux its children with it).
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var err error
	switch {
	case len(args) > 0 && args[0] == childEmpty:
		err = serveEmpty(ctx, args[1:])
	case len(args) > 0 && args[0] == childFrontEnd:
		err = serveFrontEnd(ctx, args[1:])
	case len(args) > 0 && args[0] == childAttached:
		err = serveAttached(ctx, args[1:])
	default:
		var c config
		if c, err = parse(args, stderr); err != nil {
			if errors.Is(err, flag.ErrHelp) {
				return 0
			}
			fmt.Fprintln(stderr, "bench:", err)
			return exitUsage
		}
		err = c.run(ctx, stdout, stderr)
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return exitFailed
	}
	return 0
}

// config says what to measure, and how long.
type config struct {
	quick    bool
	sections []string
	out, dir string
	rounds   int
	settle   time.Duration // callers run that long before it counts
	measure  time.Duration // and then that long
	bursts   int           // in each round
}

func parse(args []string, stderr io.Writer) (config, error) {
	c := config{rounds: 3, settle: 500 * time.Millisecond, measure: 1500 * time.Millisecond, bursts: 10}
	all := slices.Concat(comparison, scales)
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.BoolVar(&c.quick, "quick", false, "shorter runs and smaller numbers: less than five minutes")
	only := flags.String("only", strings.Join(comparison, ","), "`sections` to run, of "+strings.Join(all, ", ")+"; "+scale+" is all of those")
	flags.StringVar(&c.out, "out", "bench-results", "`folder` for results.txt, results.json and the plots; made if missing")
	flags.StringVar(&c.dir, "dir", "", "`folder` on a real disk for what contestants store (default: a temporary one beside --out, removed at the end)")
	if err := flags.Parse(args); err != nil {
		return c, err
	}
	if flags.NArg() > 0 {
		return c, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	for s := range strings.SplitSeq(*only, ",") {
		switch {
		case s == scale:
			c.sections = append(c.sections, scales...)
		case slices.Contains(all, s):
			c.sections = append(c.sections, s)
		default:
			return c, fmt.Errorf("--only: no section %q; there are %s", s, strings.Join(all, ", "))
		}
	}
	if c.quick {
		c.settle, c.measure, c.bursts = 150*time.Millisecond, 500*time.Millisecond, 3
	}
	return c, nil
}

// run measures the sections and writes the report.
func (c *config) run(ctx context.Context, stdout, stderr io.Writer) (err error) {
	began := time.Now()
	allBefore, oursBefore := busy()
	if err := os.MkdirAll(c.out, 0o750); err != nil {
		return err
	}
	if c.dir == "" {
		if c.dir, err = os.MkdirTemp(c.out, "data-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(c.dir)) }()
	}
	if c.dir, err = filepath.Abs(c.dir); err != nil {
		return err
	}
	raiseFileLimit()
	r := newReport(c)
	b := &bench{config: c, report: r, progress: stderr}
	for _, s := range []struct {
		name string
		run  func(context.Context) error
	}{
		{sectionCycle, b.on(single, b.runCycle)},
		{sectionContention, b.on(single, b.runContention)},
		{sectionMessages, b.on(single, b.runMessages)},
		{sectionCycle, b.on(cluster, b.runCycle)},
		{sectionContention, b.on(cluster, b.runContention)},
		{sectionMessages, b.on(cluster, b.runMessages)},
		{sectionFrontEnds, b.runFrontEnds},
		{scaleSessions, b.runScaleSessions},
		{scaleLocks, b.runScaleLocks},
		{scaleExpiry, b.runScaleExpiry},
		{scaleWaiters, b.runScaleWaiters},
		{scaleFrontEnds, b.runScaleFrontEnds},
	} {
		if !slices.Contains(c.sections, s.name) {
			continue
		}
		// What one section cannot do is no reason to lose the others.
		if serr := s.run(ctx); serr != nil {
			serr = fmt.Errorf("%s: %w", s.name, serr)
			b.say("FAILED: %v", serr)
			r.Failures = append(r.Failures, serr.Error())
			err = errors.Join(err, serr, b.stop(context.WithoutCancel(ctx)))
		}
		if ctx.Err() != nil {
			break
		}
	}
	err = errors.Join(err, b.stop(context.WithoutCancel(ctx)))
	r.Seconds = time.Since(began).Seconds()
	all, ours := busy()
	r.OthersCores = max((all-allBefore)-(ours-oursBefore), 0).Seconds() / r.Seconds
	return errors.Join(err, r.write(c.out, stdout))
}

// on runs a section with the contestants of a field.
func (b *bench) on(f *field, section func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := b.start(ctx, f); err != nil {
			return err
		}
		return section(ctx)
	}
}

// raiseFileLimit allows as many open files as the system lets this process have; children inherit it.
func raiseFileLimit() {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err == nil {
		limit.Cur = limit.Max
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit) // what needs more says so when it gets there
	}
}
