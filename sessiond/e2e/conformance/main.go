//go:build unix

// Command conformance runs the official MCP conformance suite against front-ends that are real processes, behind one URL,
// and prints a line for each configuration and revision of MCP.
//
// It is not a test, because its output is the result and it takes minutes; `make conformance` starts it. It is strict:
// what the suite calls a warning fails too, and so does a scenario that did not run.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sessiond/sessiond/sessiond/e2e/balancer"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// Exit codes.
const (
	exitFailed = 1
	exitUsage  = 2
)

// The revisions, with the number of scenarios that the suite has for each at the version that package-lock.json pins: a run
// with fewer of them would look like success.
var revisions = []struct {
	name      string
	scenarios int
}{{"2025-06-18", 27}, {"2025-11-25", 33}, {"2026-07-28", 40}}

// A configuration is a way to run front-ends.
type configuration struct {
	name   string
	only   bool // a single front-end with sessiond inside, instead of a cluster
	lock   bool
	policy balancer.Policy
	kill   bool // a front-end that serves no request is killed and started again, time after time
	rounds int  // how often the suite runs for each revision; zero is once
}

// quick is the configuration that is left when there is little time.
const quick = "round-robin"

var configurations = []configuration{
	{name: "one-front-end", only: true},
	{name: quick},
	{name: "random-choice", policy: balancer.AtRandom},
	{name: "killed", kill: true, rounds: 3}, // one round is over after a kill or two
	{name: "lock", lock: true},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("conformance", flag.ContinueOnError)
	flags.SetOutput(stderr)
	var names, revs []string
	for _, c := range configurations {
		names = append(names, c.name)
	}
	for _, r := range revisions {
		revs = append(revs, r.name)
	}
	listed := func(name, what string, list *[]string) {
		all := slices.Clone(*list)
		usage := fmt.Sprintf("`%s` to run, of %s; more than one with commas (default all)", what, strings.Join(all, ", "))
		flags.Func(name, usage, func(value string) error {
			*list = strings.Split(value, ",")
			for _, item := range *list {
				if !slices.Contains(all, item) {
					return fmt.Errorf("no %s; there are %s", item, strings.Join(all, ", "))
				}
			}
			return nil
		})
	}
	listed("configurations", "configurations", &names)
	listed("revisions", "revisions", &revs)
	flags.BoolFunc("quick", "run "+quick+" only", func(string) error {
		names = []string{quick}
		return nil
	})
	dir := flags.String("dir", "", "a `folder` for results and logs, kept (default: a temporary one, kept if something failed)")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err == nil && flags.NArg() > 0:
		fmt.Fprintf(stderr, "conformance: unexpected argument %q\n", flags.Arg(0))
		return exitUsage
	case err != nil:
		return exitUsage
	}
	ok, err := conform(ctx, names, revs, *dir, stdout)
	if err != nil {
		fmt.Fprintln(stderr, "conformance:", err)
	}
	if !ok || err != nil {
		return exitFailed
	}
	return 0
}

// conform runs the suite and tells whether all is in order.
func conform(ctx context.Context, names, revs []string, dir string, stdout io.Writer) (ok bool, err error) {
	s, err := newSuite(ctx, stdout)
	if err != nil {
		return false, err
	}
	if dir == "" {
		if dir, err = os.MkdirTemp("", "conformance-"); err != nil {
			return false, err
		}
		defer func() {
			if ok && err == nil {
				err = os.RemoveAll(dir)
			} else {
				fmt.Fprintln(stdout, "results and logs are in", dir)
			}
		}()
	}
	ok = true
	for _, c := range configurations {
		if !slices.Contains(names, c.name) {
			continue
		}
		good, err := c.run(ctx, s, revs, filepath.Join(dir, c.name), stdout)
		if err != nil {
			return false, fmt.Errorf("%s: %w", c.name, err)
		}
		ok = ok && good
	}
	return ok, nil
}

// run starts the front-ends and runs the suite against them, once for each revision.
func (c configuration) run(ctx context.Context, s *suite, revs []string, dir string, stdout io.Writer) (ok bool, err error) {
	frontEnds, stop, err := c.start(ctx, dir)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	url, b, closeBalancer, err := c.balance(ctx, frontEnds)
	if err != nil {
		return false, err
	}
	defer closeBalancer()
	ok = true
	for _, r := range revisions {
		if !slices.Contains(revs, r.name) {
			continue
		}
		begin := time.Now()
		stopKilling := func() (int, error) { return 0, nil }
		if c.kill {
			stopKilling = killing(ctx, b, frontEnds)
		}
		var res result
		var err error
		want, rounds := 0, max(1, c.rounds)
		for i := 0; i < rounds && err == nil; i++ {
			var one result
			one, err = s.run(ctx, url, r.name, filepath.Join(dir, fmt.Sprintf("%s-%d", r.name, i+1)))
			res.add(one)
			want += r.scenarios
		}
		kills, kerr := stopKilling()
		if err := errors.Join(err, kerr); err != nil {
			return false, fmt.Errorf("%s: %w", r.name, err)
		}
		if c.kill && kills == 0 {
			res.faults = append(res.faults, "no front-end was killed, so this proves nothing")
		}
		if n := res.scenarios; n != want {
			res.faults = append(res.faults, fmt.Sprintf("%d scenarios ran, want %d", n, want))
		}
		line := fmt.Sprintf("%-13s %s: %d/%d scenarios, %d/%d checks, %d warnings, %.0f s",
			c.name, r.name, res.passed, want, res.succeeded, res.checks, res.warnings, time.Since(begin).Seconds())
		if c.kill {
			line += fmt.Sprintf(", %d rounds, %d kills", rounds, kills)
		}
		fmt.Fprintln(stdout, line)
		for _, fault := range res.faults {
			fmt.Fprintln(stdout, "   ", fault)
		}
		ok = ok && len(res.faults) == 0
	}
	return ok, nil
}

// start starts the front-ends with all that they need.
func (c configuration) start(ctx context.Context, dir string) (frontEnds []*sessiondtest.Server, stop func() error, err error) {
	args := []string{"--everything", "--history", "5m"}
	if c.lock {
		args = append(args, "--lock")
	}
	if !c.only {
		cluster, err := sessiondtest.LaunchCluster(ctx, sessiondtest.ClusterConfig{Dir: dir, FrontEndArgs: args})
		if err != nil {
			return nil, nil, err
		}
		return cluster.FrontEnds, func() error { return cluster.Stop(context.WithoutCancel(ctx)) }, nil
	}
	path, err := sessiondtest.Binary("mcpserver")
	if err != nil {
		return nil, nil, err
	}
	addrs, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		return nil, nil, err
	}
	p, err := sessiondtest.Launch(ctx, sessiondtest.Command{
		Name:  "mcpserver",
		Path:  path,
		Args:  append(args, "--listen", addrs[0], "--data-dir", filepath.Join(dir, "data")),
		Log:   filepath.Join(dir, "mcpserver.log"),
		Ready: sessiondtest.HTTPReady("http://" + addrs[0] + "/readyz"),
	})
	if err != nil {
		return nil, nil, err
	}
	return []*sessiondtest.Server{{Process: p, Addr: addrs[0]}}, func() error { return p.Terminate(context.WithoutCancel(ctx)) }, nil
}

// balance puts a balancer before the front-ends; a single one needs none.
func (c configuration) balance(ctx context.Context, frontEnds []*sessiondtest.Server) (url string, _ *balancer.Balancer, stop func(), err error) {
	if c.only {
		return "http://" + frontEnds[0].Addr + "/mcp", nil, func() {}, nil
	}
	var addrs []string
	for _, fe := range frontEnds {
		addrs = append(addrs, fe.Addr)
	}
	b, err := balancer.New(addrs, balancer.Options{Policy: c.policy})
	if err != nil {
		return "", nil, nil, err
	}
	free, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		return "", nil, nil, err
	}
	l, err := net.Listen("tcp", free[0])
	if err != nil {
		return "", nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { _ = b.Serve(ctx, l) }) // it fails only if the listener does, and then every request tells
	return "http://" + l.Addr().String() + "/mcp", b, func() { cancel(); wg.Wait() }, nil
}

const (
	killEvery = 5 * time.Second
	// A server may end the stream of a request early, for its client to resume it, and to the balancer the request has then
	// been served. So long is given to the handler, which still runs; the suite has none that takes longer.
	settle = 2 * time.Second
)

// killing kills a front-end that serves no request every five seconds, beginning now, and starts it again. stop ends it and
// gives the number of front-ends killed.
func killing(ctx context.Context, b *balancer.Balancer, frontEnds []*sessiondtest.Server) (stop func() (int, error)) {
	until, cancel := context.WithCancel(ctx)
	var kills int
	var failure error
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(killEvery)
		defer tick.Stop()
		for until.Err() == nil && failure == nil {
			var killed bool
			killed, failure = killOne(ctx, until, b, frontEnds)
			if killed {
				kills++
			}
			select {
			case <-tick.C:
			case <-until.Done():
			}
		}
	})
	return func() (int, error) {
		cancel()
		wg.Wait()
		return kills, failure
	}
}

func killOne(ctx, until context.Context, b *balancer.Balancer, frontEnds []*sessiondtest.Server) (killed bool, err error) {
	addr, err := b.TakeOut(until)
	if err != nil {
		return false, nil //nolint:nilerr // the run has ended
	}
	defer b.PutBack(addr)
	handlers := time.NewTimer(settle)
	defer handlers.Stop()
	select {
	case <-handlers.C:
	case <-until.Done():
		return false, nil
	}
	fe := frontEnds[slices.IndexFunc(frontEnds, func(s *sessiondtest.Server) bool { return s.Addr == addr })]
	if err := fe.Kill(); err != nil {
		return false, err
	}
	return true, fe.Restart(ctx)
}
