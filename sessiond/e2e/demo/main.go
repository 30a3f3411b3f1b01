//go:build unix

// Command demo shows a cluster on one machine: three etcd members, three sessiond, three front-ends and a balancer
// without affinity, each a process of its own on loopback, with one URL for clients.
//
// It is not a container set-up, because then it would need more than Go to try, and the processes here can be killed
// one by one with plain kill: that is what it is for. `make demo` builds what it needs and starts it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
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

// probe is often enough to notice a front-end that drains, which takes a second.
const probe = 250 * time.Millisecond

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// After the first signal the next one ends the demo at once (and on Linux its children with it).
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == "balancer" {
		return balance(ctx, args[1:], stderr)
	}
	return demo(ctx, args, stdout, stderr)
}

type config struct {
	etcd, sessiond, mcpserver string
	listen, dir               string
	lock, json                bool
}

func demo(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var c config
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.StringVar(&c.etcd, "etcd", "etcd", "the etcd `program`")
	flags.StringVar(&c.sessiond, "sessiond", "sessiond", "the sessiond `program`")
	flags.StringVar(&c.mcpserver, "mcpserver", "mcpserver", "the front-end `program`")
	flags.StringVar(&c.listen, "listen", "127.0.0.1:8080", "`host:port` of the balancer, where clients connect")
	flags.StringVar(&c.dir, "dir", "", "a new or empty `folder` for data and logs, kept at the end (default: a temporary one, removed at the end)")
	flags.BoolVar(&c.lock, "lock", false, "front-ends run the requests of a session one after the other")
	flags.BoolVar(&c.json, "json", false, "front-ends prefer JSON answers to streams")
	if code, ok := parse(flags, args, stderr); !ok {
		return code
	}
	if err := c.check(); err != nil {
		fmt.Fprintln(stderr, "demo:", err)
		return exitUsage
	}
	if err := c.run(ctx, stdout); err != nil {
		fmt.Fprintln(stderr, "demo:", err)
		return exitFailed
	}
	return 0
}

// parse answers bad flags in one line. A request for help is no failure.
func parse(flags *flag.FlagSet, args []string, stderr io.Writer) (code int, ok bool) {
	flags.SetOutput(io.Discard)
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		flags.SetOutput(stderr)
		flags.Usage()
		return 0, false
	case err == nil && flags.NArg() > 0:
		err = fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v (see --help)\n", flags.Name(), err)
		return exitUsage, false
	}
	return 0, true
}

func (c *config) check() error {
	if _, _, err := net.SplitHostPort(c.listen); err != nil {
		return fmt.Errorf("--listen %q is not host:port", c.listen)
	}
	for name, program := range map[string]string{"etcd": c.etcd, "sessiond": c.sessiond, "mcpserver": c.mcpserver} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("--%s: %w", name, err)
		}
	}
	if c.dir == "" {
		return nil
	}
	entries, err := os.ReadDir(c.dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("--dir: %w", err)
	}
	if len(entries) > 0 {
		return fmt.Errorf("--dir %s is not empty; every demo starts afresh", c.dir)
	}
	return nil
}

func (c *config) run(ctx context.Context, stdout io.Writer) (err error) {
	// Known now rather than after all the rest has been started.
	l, err := net.Listen("tcp", c.listen)
	if err != nil {
		return fmt.Errorf("%w (choose another address with --listen)", err)
	}
	if err := l.Close(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir, keep := c.dir, c.dir != ""
	if !keep {
		if dir, err = os.MkdirTemp("", "sessiond-demo-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	}
	var frontEndArgs []string
	if c.lock {
		frontEndArgs = append(frontEndArgs, "--lock")
	}
	if c.json {
		frontEndArgs = append(frontEndArgs, "--json")
	}

	fmt.Fprintln(stdout, "starting etcd, sessiond, front-ends and balancer")
	cluster, err := sessiondtest.LaunchCluster(ctx, sessiondtest.ClusterConfig{
		EtcdPath: c.etcd, NodePath: c.sessiond, FrontEndPath: c.mcpserver,
		Dir:          dir,
		FrontEndArgs: frontEndArgs,
		// etcd's own default: a laptop that is busy otherwise must not make it elect leaders all the time.
		EtcdHeartbeat: 100 * time.Millisecond,
		Listen:        c.listen,
		Balancer: func(listen string, backends []string) sessiondtest.Command {
			return sessiondtest.Command{
				Name:  "balancer",
				Path:  self,
				Args:  []string{"balancer", "--listen", listen, "--backends", strings.Join(backends, ",")},
				Log:   filepath.Join(dir, "balancer.log"),
				Ready: sessiondtest.HTTPReady("http://" + listen + "/readyz"),
			}
		},
	})
	if err != nil {
		if ctx.Err() != nil {
			return errors.New("stopped while starting")
		}
		return err
	}
	fmt.Fprint(stdout, describe(cluster, dir, keep))

	out := &lineWriter{w: stdout}
	var watchers sync.WaitGroup
	for _, p := range cluster.Processes() {
		watchers.Go(func() {
			select {
			case <-p.Done():
				state, _ := p.Exit()
				out.printf("%s (pid %d) has ended: %s; the others go on\n", p.Name(), p.Pid(), state)
			case <-ctx.Done():
			}
		})
	}
	<-ctx.Done()
	watchers.Wait()
	out.printf("stopping all\n")
	return cluster.Stop(context.WithoutCancel(ctx))
}

func describe(c *sessiondtest.Cluster, dir string, keep bool) string {
	var b strings.Builder
	b.WriteByte('\n')
	for _, p := range c.Processes() {
		fmt.Fprintf(&b, "  %-12s %-16s pid %d\n", p.Name(), p.Addr, p.Pid())
	}
	fmt.Fprintf(&b, `
Clients need one URL, and any request may be served by any front-end:

  %[1]s

Try it:

  npx @modelcontextprotocol/inspector --cli %[1]s --transport http --method tools/list
  npx @modelcontextprotocol/inspector --cli %[1]s --transport http --method tools/call --tool-name echo --tool-arg text=hello

Kill one of them while a client is connected; its session goes on:

  kill -9 %[2]d   # %[3]s
  kill -9 %[4]d   # %[5]s
  kill -9 %[6]d   # %[7]s

`, c.URL, c.FrontEnds[0].Pid(), c.FrontEnds[0].Name(), c.Nodes[0].Pid(), c.Nodes[0].Name(), c.Etcd.Members[0].Pid(), c.Etcd.Members[0].Name())
	what := "stops all and removes them"
	if keep {
		what = "stops all and keeps them"
	}
	fmt.Fprintf(&b, "Data and logs are in %s; Ctrl-C %s.\n", dir, what)
	return b.String()
}

// A lineWriter keeps lines of concurrent writers whole.
type lineWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lineWriter) printf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.w, format, args...)
}

// balance is the balancer's process.
func balance(ctx context.Context, args []string, stderr io.Writer) int {
	flags := flag.NewFlagSet("demo balancer", flag.ContinueOnError)
	listen := flags.String("listen", "127.0.0.1:8080", "`host:port` to listen on")
	backends := flags.String("backends", "", "the back-ends as `host:port,...`")
	if code, ok := parse(flags, args, stderr); !ok {
		return code
	}
	b, err := balancer.New(strings.Split(*backends, ","), balancer.Options{Probe: probe, Logger: slog.New(slog.NewTextHandler(stderr, nil))})
	if err != nil {
		fmt.Fprintln(stderr, "demo balancer:", err)
		return exitUsage
	}
	l, err := net.Listen("tcp", *listen)
	if err == nil {
		err = b.Serve(ctx, l)
	}
	if err != nil {
		fmt.Fprintln(stderr, "demo balancer:", err)
		return exitFailed
	}
	return 0
}
