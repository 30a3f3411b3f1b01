package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond"
)

// benchCommand is the subcommand that measures a running cluster.
const benchCommand = "bench"

const (
	benchEnvPrefix  = envPrefix + "BENCH_"
	benchIDPrefix   = "sessiond-bench-"
	maxBenchCallers = 1024
	maxBenchTime    = 10 * time.Minute
	// What is left behind if this is killed ends by itself soon; each save starts it anew.
	benchSessionTTL = time.Minute
	benchLockTTL    = 10 * time.Second
	// Callers do not run wild on a cluster that fails.
	benchAfterFailure = 100 * time.Millisecond
	benchCleanUp      = 10 * time.Second
)

// benchOptions is what to measure.
type benchOptions struct {
	addresses         []string
	callers, sessions int
	bytes             int
	duration          time.Duration
	usage             string
}

func parseBench(args []string, getenv func(string) string) (*benchOptions, error) {
	o := &benchOptions{}
	fs := flag.NewFlagSet("sessiond "+benchCommand, flag.ContinueOnError)
	fs.Usage = func() {}
	addresses := fs.String("sessiond", sessiond.DefaultListen, "`addresses` of the nodes, separated by commas: host:port or unix:/path")
	fs.IntVar(&o.callers, "callers", 16, "how `many` call at the same time, 1 to 1024")
	fs.IntVar(&o.sessions, "sessions", 0, "on how `many` sessions; fewer than callers make these wait for each other (default one for each caller)")
	fs.IntVar(&o.bytes, "bytes", 1<<10, "`size` of a session, 0 to 1048576")
	fs.DurationVar(&o.duration, "duration", 10*time.Second, "how `long` to measure, 1s to 10m")

	var text strings.Builder
	fmt.Fprintf(&text, `Usage: sessiond %s [flags]

Measures a running cluster: callers that acquire a session's lock, read, save and release, over and over. It is safe beside
real sessions: it makes its own, with ids that begin with %s, and destroys them at the end, also after Ctrl-C. Should it be
killed, they end by themselves after a minute or so. What it uses of the cluster, others do without meanwhile.

Each flag can be given in the environment as well: --callers as %sCALLERS.

`, benchCommand, benchIDPrefix, benchEnvPrefix)
	fs.SetOutput(&text)
	fs.PrintDefaults()
	fs.SetOutput(io.Discard)
	o.usage = text.String()

	if err := fs.Parse(args); err != nil {
		return o, flagError(fs, err)
	}
	if fs.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q: only flags are allowed, see --help", fs.Arg(0))
	}
	if err := fromEnvironment(fs, benchEnvPrefix, getenv); err != nil {
		return o, err
	}
	o.addresses = strings.Split(*addresses, ",")
	if o.sessions == 0 {
		o.sessions = o.callers
	}
	return o, o.check()
}

func (o *benchOptions) check() error {
	var errs []error
	for _, address := range o.addresses {
		if _, _, err := net.SplitHostPort(address); err != nil && !strings.HasPrefix(address, "unix:/") {
			errs = append(errs, fmt.Errorf("--sessiond: %q is not host:port or unix:/path", address))
		}
	}
	if o.callers < 1 || o.callers > maxBenchCallers {
		errs = append(errs, fmt.Errorf("--callers: must be 1 to %d", maxBenchCallers))
	}
	if o.sessions < 1 || o.sessions > o.callers {
		errs = append(errs, errors.New("--sessions: must be 1 to the number of callers"))
	}
	if o.bytes < 0 || o.bytes > sessiond.DefaultMaxSessionBytes {
		errs = append(errs, fmt.Errorf("--bytes: must be 0 to %d", sessiond.DefaultMaxSessionBytes))
	}
	if o.duration < time.Second || o.duration > maxBenchTime {
		errs = append(errs, fmt.Errorf("--duration: must be 1s to %s", maxBenchTime))
	}
	return errors.Join(errs...)
}

// bench is the subcommand. It returns the exit code: 1 if a cycle failed, or sessions could not be destroyed.
func bench(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	o, err := parseBench(args, getenv)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(stdout, o.usage)
		return exitOK
	case err != nil:
		fmt.Fprintf(stderr, "sessiond: %s\n", oneLine(err))
		return exitUsage
	}
	if err := o.run(ctx, stdout, stderr); err != nil {
		fmt.Fprintf(stderr, "sessiond: %s\n", oneLine(err))
		return exitError
	}
	return exitOK
}

func (o *benchOptions) run(ctx context.Context, stdout, stderr io.Writer) (err error) {
	c, err := client.New(o.addresses, client.Options{Attach: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	run := rand.Text()[:8]
	ids := make([]string, o.sessions)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s%s-%d", benchIDPrefix, run, i)
	}
	fmt.Fprintf(stderr, "%d callers, %d sessions of %d bytes, %s0 and so on; Ctrl-C stops\n", o.callers, o.sessions, o.bytes, benchIDPrefix+run+"-")
	defer func() { err = errors.Join(err, o.destroy(ctx, c, ids)) }()
	data := make([]byte, o.bytes)
	for _, id := range ids {
		if _, err := c.Create(ctx, data, client.CreateOptions{ID: id, TTL: benchSessionTTL}); err != nil {
			if ctx.Err() != nil {
				return nil // stopped before it began
			}
			return err
		}
	}

	m := &measurement{}
	// Not a deadline: that would end calls a little before the context itself, as if they had failed.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	end := time.AfterFunc(o.duration, cancel)
	defer end.Stop()
	began := time.Now()
	var wg sync.WaitGroup
	for caller := range o.callers {
		wg.Go(func() { o.call(ctx, c, ids[caller%len(ids)], m) })
	}
	m.showProgress(ctx, began, stderr)
	wg.Wait()
	m.write(stdout, time.Since(began))
	if first := m.failure.Load(); first != nil {
		return fmt.Errorf("%d cycles failed, the first one with: %w", m.failed.Load(), *first)
	}
	return nil
}

// call is one caller, until ctx ends.
func (o *benchOptions) call(ctx context.Context, c *client.Client, id string, m *measurement) {
	for ctx.Err() == nil {
		data := make([]byte, o.bytes)
		_, _ = rand.Read(data) // it never fails
		began := time.Now()
		err := c.WithLock(ctx, id, client.AcquireOptions{TTL: benchLockTTL}, func(context.Context, []byte) ([]byte, error) { return data, nil })
		if ctx.Err() != nil {
			return // what was cut short by the end is neither
		}
		if err == nil {
			m.add(time.Since(began))
			continue
		}
		m.failed.Add(1)
		m.failure.CompareAndSwap(nil, &err)
		pause := time.NewTimer(benchAfterFailure)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
		}
	}
}

// destroy removes the sessions, also after ctx has ended. Those that were not made are no error.
func (o *benchOptions) destroy(ctx context.Context, c *client.Client, ids []string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), benchCleanUp)
	defer cancel()
	for i, id := range ids {
		if _, err := c.Destroy(ctx, id); err != nil {
			return fmt.Errorf("%d sessions are left to their TTL of %s: %w", len(ids)-i, benchSessionTTL, err)
		}
	}
	return nil
}

// Latencies are counted in buckets, sixteen for each doubling, from a microsecond to hours.
const (
	perDoubling = 16
	doublings   = 34
)

// A measurement counts. Its methods may be called concurrently, but for write.
type measurement struct {
	buckets [perDoubling * doublings]atomic.Int64
	failed  atomic.Int64
	failure atomic.Pointer[error] // the first one
}

func (m *measurement) add(d time.Duration) {
	i := int(math.Ceil(perDoubling * math.Log2(float64(max(d, time.Microsecond))/float64(time.Microsecond))))
	m.buckets[min(i, len(m.buckets)-1)].Add(1)
}

// upTo is the upper edge of a bucket.
func upTo(bucket int) time.Duration {
	return time.Duration(float64(time.Microsecond) * math.Exp2(float64(bucket)/perDoubling))
}

type counts []int64

func (m *measurement) counts() counts {
	c := make(counts, len(m.buckets))
	for i := range m.buckets {
		c[i] = m.buckets[i].Load()
	}
	return c
}

func (c counts) sum() int64 {
	var n int64
	for _, k := range c {
		n += k
	}
	return n
}

// quantile is an upper bound, up to a twentieth too high.
func (c counts) quantile(q float64) time.Duration {
	rank := max(int64(math.Ceil(q*float64(c.sum()))), 1)
	for i, k := range c {
		if rank -= k; rank <= 0 {
			return upTo(i)
		}
	}
	return 0
}

// showProgress writes a line a second, until ctx ends.
func (m *measurement) showProgress(ctx context.Context, began time.Time, w io.Writer) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	before := make(counts, len(m.buckets))
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := m.counts()
		last := make(counts, len(now))
		for i := range now {
			last[i] = now[i] - before[i]
		}
		before = now
		fmt.Fprintf(w, "%4.0f s  %6d cycles/s  p50 %s  p99 %s", time.Since(began).Seconds(), last.sum(), millis(last.quantile(0.5)), millis(last.quantile(0.99)))
		if failed := m.failed.Load(); failed > 0 {
			fmt.Fprintf(w, "  failed so far: %d", failed)
		}
		fmt.Fprintln(w)
	}
}

func millis(d time.Duration) string {
	return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond))
}

// write writes the result and a histogram, four lines for each doubling.
func (m *measurement) write(w io.Writer, took time.Duration) {
	c := m.counts()
	n := c.sum()
	fmt.Fprintf(w, "%d cycles in %.1f s, %.0f a second; failed: %d\n", n, took.Seconds(), float64(n)/took.Seconds(), m.failed.Load())
	if n == 0 {
		return
	}
	fmt.Fprintf(w, "p50 %s  p90 %s  p99 %s  p99.9 %s  max %s\n\n", millis(c.quantile(0.5)), millis(c.quantile(0.9)), millis(c.quantile(0.99)),
		millis(c.quantile(0.999)), millis(c.quantile(1)))
	const each, width = perDoubling / 4, 50
	var lines counts
	for i := 0; i < len(c); i += each {
		// The first line ends with the first bucket's edge, for bucket 0 has all up to a microsecond.
		lines = append(lines, c[max(i-each+1, 0):i+1].sum())
	}
	first, last, most := len(lines), 0, int64(1)
	for i, k := range lines {
		if k > 0 {
			first, last, most = min(first, i), i, max(most, k)
		}
	}
	for i := first; i <= last; i++ {
		bar := strings.Repeat("#", int((lines[i]*width+most-1)/most))
		fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("  up to %11s %9d  %s", millis(upTo(i*each)), lines[i], bar), " "))
	}
}
