// Command sessiond serves sessions, locks and messages of MCP front-ends over gRPC.
//
// On its own it keeps them in an etcd member that it embeds, in a data folder; with --etcd-endpoints it is a stateless
// node of a cluster; with --store memory it keeps them in memory, and they end with it. Every flag has a twin in the
// environment: --data-dir is SESSIOND_DATA_DIR.
//
// sessiond bench measures a running cluster, beside real sessions.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/sessiond/sessiond/sessiond"
)

const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2

	defaultDataDir = "sessiond-data"
	envPrefix      = "SESSIOND_"

	// What a node keeps on its heap is little, what goes through it is not: the collector, which runs each time as much has
	// been allocated as is kept, would run tens of times a second under load, for a sixth of the processor time. This
	// much more counts as kept. It is never touched, so it takes addresses and no memory.
	heapFloor = 64 << 20
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program. It ends when ctx does, and returns the exit code: 0 after a shutdown that was asked for, 1 if the
// node failed, 2 if the command line is wrong.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == benchCommand {
		return bench(ctx, args[1:], getenv, stdout, stderr)
	}
	opts, err := parse(args, getenv)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(stdout, opts.usage)
		return exitOK
	case err != nil:
		fmt.Fprintf(stderr, "sessiond: %s\n", oneLine(err))
		return exitUsage
	case opts.version:
		fmt.Fprintln(stdout, "sessiond", version())
		return exitOK
	}
	opts.cfg.Logger = opts.logger(stderr)
	if getenv("GOGC") == "" && getenv("GOMEMLIMIT") == "" {
		floor := make([]byte, heapFloor)
		defer runtime.KeepAlive(floor)
	}

	srv, err := sessiond.New(ctx, opts.cfg)
	if err == nil {
		err = srv.Run(ctx)
	} else if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))) {
		err = nil // told to stop while it started
	}
	if err != nil {
		fmt.Fprintf(stderr, "sessiond: %s\n", oneLine(err))
		return exitError
	}
	return exitOK
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

type options struct {
	cfg      sessiond.Config
	level    slog.Level
	format   string
	version  bool
	usage    string
	endpoint string
}

// parse reads flags, and the environment for those that are not given.
func parse(args []string, getenv func(string) string) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("sessiond", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	fs.StringVar(&o.cfg.Listen, "listen", sessiond.DefaultListen, "`address` to serve gRPC on: host:port or unix:/path")
	fs.StringVar(&o.cfg.Store, "store", sessiond.StoreEtcd, "`store` of sessions: etcd, or memory (they end with the process)")
	fs.StringVar(&o.cfg.DataDir, "data-dir", "", "`folder` of the embedded etcd (default \""+defaultDataDir+"\" without --etcd-endpoints)")
	fs.StringVar(&o.endpoint, "etcd-endpoints", "", "`addresses` of an etcd cluster, separated by commas, instead of an embedded etcd")
	fs.StringVar(&o.cfg.Prefix, "prefix", sessiond.DefaultPrefix, "`prefix` of all keys in etcd, ends with a slash")
	fs.IntVar(&o.cfg.MaxSessionBytes, "max-session-bytes", sessiond.DefaultMaxSessionBytes, "limit of a session's data in `bytes`")
	fs.IntVar(&o.cfg.MaxWaiters, "max-waiters", sessiond.DefaultMaxWaiters, "limit of the `callers` that wait for one lock")
	fs.DurationVar(&o.cfg.AttachGrace, "attach-grace", sessiond.DefaultAttachGrace, "how `long` an attached front-end may be away until its locks are released")
	fs.DurationVar(&o.cfg.Grace, "grace", sessiond.DefaultGrace, "how `long` running calls may take at shutdown")
	fs.StringVar(&o.cfg.MetricsListen, "metrics-listen", "", "`address` to serve /metrics, /healthz and /readyz on: host:port (default off)")
	fs.TextVar(&o.level, "log-level", slog.LevelInfo, "least `level` to log: debug, info, warn or error")
	fs.StringVar(&o.format, "log-format", "text", "`format` of the log: text or json")
	fs.BoolVar(&o.version, "version", false, "print the version and exit")

	var text strings.Builder
	fmt.Fprintf(&text, "Usage: sessiond [flags]\n       sessiond %s [flags]: measure a running cluster, see sessiond %[1]s --help\n\nEach flag can be given in the environment as well: --data-dir as %[2]sDATA_DIR.\n\n", benchCommand, envPrefix)
	fs.SetOutput(&text)
	fs.PrintDefaults()
	fs.SetOutput(io.Discard)
	o.usage = text.String()

	if err := fs.Parse(args); err != nil {
		return o, flagError(fs, err)
	}
	if fs.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q: only flags are allowed, or %s first, see --help", fs.Arg(0), benchCommand)
	}
	if err := fromEnvironment(fs, envPrefix, getenv); err != nil {
		return o, err
	}

	if o.endpoint != "" {
		o.cfg.Endpoints = strings.Split(o.endpoint, ",")
	} else if o.cfg.DataDir == "" && o.cfg.Store == sessiond.StoreEtcd {
		o.cfg.DataDir = defaultDataDir
	}
	// What is zero or empty would stand for the default.
	if o.cfg.MaxSessionBytes == 0 || o.cfg.MaxWaiters == 0 {
		return o, errors.New("limits must be at least 1")
	}
	if o.cfg.Grace == 0 {
		return o, errors.New("--grace: must be more than 0")
	}
	if o.cfg.AttachGrace == 0 {
		return o, errors.New("--attach-grace: must be more than 0")
	}
	if o.cfg.Listen == "" || o.cfg.Prefix == "" || o.cfg.Store == "" {
		return o, errors.New("--listen, --prefix and --store: must not be empty")
	}
	if o.format != "text" && o.format != "json" {
		return o, fmt.Errorf("--log-format %q: must be text or json", o.format)
	}
	return o, o.cfg.Validate()
}

// fromEnvironment sets the flags that are not given from their twins in the environment.
func fromEnvironment(fs *flag.FlagSet, prefix string, getenv func(string) string) error {
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	var errs []error
	fs.VisitAll(func(f *flag.Flag) {
		env := prefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		if value := getenv(env); value != "" && !given[f.Name] {
			if err := fs.Set(f.Name, value); err != nil {
				errs = append(errs, fmt.Errorf("%s: invalid value %q: must be %s", env, value, allowed(f)))
			}
		}
	})
	return errors.Join(errs...)
}

// flagError adds what is allowed to what the flag package says.
func flagError(fs *flag.FlagSet, err error) error {
	if errors.Is(err, flag.ErrHelp) {
		return err
	}
	text := err.Error()
	if strings.HasPrefix(text, "invalid value") || strings.HasPrefix(text, "invalid boolean value") {
		if _, rest, ok := strings.Cut(text, " for flag -"); ok {
			name, _, _ := strings.Cut(rest, ":")
			if f := fs.Lookup(name); f != nil {
				return fmt.Errorf("--%s: must be %s", name, allowed(f))
			}
		}
	}
	if name, ok := strings.CutPrefix(text, "flag provided but not defined: -"); ok {
		var names []string
		fs.VisitAll(func(f *flag.Flag) { names = append(names, "--"+f.Name) })
		return fmt.Errorf("unknown flag --%s: allowed are %s", name, strings.Join(names, ", "))
	}
	return err
}

// allowed says what a flag takes.
func allowed(f *flag.Flag) string {
	switch f.Name {
	case "log-level":
		return "debug, info, warn or error"
	case "grace", "attach-grace", "duration":
		return "a duration, like 10s"
	case "max-session-bytes", "max-waiters", "callers", "sessions", "bytes":
		return "a whole number"
	case "version":
		return "true or false"
	}
	return "text"
}

func (o *options) logger(w io.Writer) *slog.Logger {
	ho := &slog.HandlerOptions{Level: o.level}
	if o.format == "json" {
		return slog.New(slog.NewJSONHandler(w, ho))
	}
	return slog.New(slog.NewTextHandler(w, ho))
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(unknown)"
}
