// Command mcpserver serves MCP over Streamable HTTP with sessions kept in sessiond: in one inside itself, which is the
// default, or in a cluster. Its tools show what sessions are for.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/mcpserver"
)

// The program's exit codes.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// run is the program. It returns its exit code when ctx has ended and everything is shut down, or when it cannot start.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	c, err := parseConfig(args, getenv, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return exitOK
	case err != nil:
		return complain(stderr, err, exitUsage)
	case c.version:
		fmt.Fprintln(stdout, "mcpserver", version())
		return exitOK
	}
	if err := serve(ctx, c, newLogger(stderr, c)); err != nil {
		code := exitFailure
		if errors.Is(err, errUsage) {
			code = exitUsage
		}
		return complain(stderr, err, code)
	}
	return exitOK
}

// errUsage marks what is wrong with the flags but found only on use.
var errUsage = errors.New("impossible settings")

// complain says what is wrong in one line.
func complain(stderr io.Writer, err error, code int) int {
	fmt.Fprintln(stderr, "mcpserver:", strings.ReplaceAll(err.Error(), "\n", "; "))
	return code
}

func newLogger(w io.Writer, c config) *slog.Logger {
	opts := &slog.HandlerOptions{Level: c.logLevel}
	if c.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

// serve runs until ctx ends, then drains.
func serve(ctx context.Context, c config, logger *slog.Logger) (err error) {
	// The port first: it is the quickest thing to be wrong, and nothing has been started yet.
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", c.listen)
	if err != nil {
		return fmt.Errorf("cannot listen on %s: %w", c.listen, err)
	}
	defer func() {
		if cerr := listener.Close(); !errors.Is(cerr, net.ErrClosed) {
			err = errors.Join(err, cerr)
		}
	}()

	keys, err := c.keys()
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	opts := &mcpserver.Options{
		StateKeys:  keys,
		SessionTTL: c.sessionTTL, LockTimeout: c.lockTimeout, LockTTL: c.lockTTL, AskTimeout: c.askTimeout,
		History: c.history, JSON: c.json, AllowedHosts: list(c.hosts), AllowedOrigins: c.allowedOrigins(), Logger: logger,
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	sessions, closeSessions, err := openSessions(ctx, c, logger, fail)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeSessions()) }()
	if sessions != nil {
		opts.Store = sessions
		if c.lock {
			opts.Locker = sessions
		}
	}
	server := newServer(version(), c.everything)
	handler, err := mcpserver.NewHandler(func(*http.Request) *mcp.Server { return server }, opts)
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	handler.Relay(server)
	return listenAndDrain(ctx, c, logger, listener, handler)
}

// openSessions connects to where sessions are kept. nil: nowhere.
func openSessions(ctx context.Context, c config, logger *slog.Logger, failed func(error)) (*client.Client, func() error, error) {
	nothing := func() error { return nil }
	switch c.sessiond {
	case sessiondNone:
		return nil, nothing, nil
	case sessiondEmbedded, sessiondMemory:
		return startEmbedded(ctx, c, logger, failed)
	default:
		sessions, err := client.New(c.addresses(), client.Options{Attach: c.lock})
		if err != nil {
			return nil, nothing, fmt.Errorf("%w: %w", errUsage, err)
		}
		return sessions, sessions.Close, nil
	}
}

func listenAndDrain(ctx context.Context, c config, logger *slog.Logger, listener net.Listener, handler *mcpserver.Handler) error {
	var draining atomic.Bool
	srv := &http.Server{
		Handler:           routes(handler, &draining),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(listener) }()
	logger.InfoContext(ctx, "serving", slog.String("url", "http://"+listener.Addr().String()+"/mcp"), slog.String("sessiond", c.sessiond), slog.Bool("lock", c.lock))
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s: %w", c.listen, err)
	case <-ctx.Done():
	}
	// What stopped of itself is why the program ends; a signal is not an error.
	var failure error
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		failure = cause
	}
	ctx = context.WithoutCancel(ctx)
	logger.InfoContext(ctx, "draining", slog.Duration("delay", c.drainDelay), slog.Duration("grace", c.grace))
	draining.Store(true)
	if failure == nil {
		// The balancer takes a moment to notice, and sends requests meanwhile.
		delay := time.NewTimer(c.drainDelay)
		<-delay.C
	}
	grace, cancel := context.WithTimeout(ctx, c.grace)
	defer cancel()
	// Both at once: the one closes the port and waits for requests, the other ends streams, which are requests too.
	closed := make(chan error, 1)
	go func() { closed <- srv.Shutdown(grace) }()
	if err := handler.Shutdown(grace); err != nil {
		logger.WarnContext(ctx, "requests cut short at the end of the grace period")
	}
	// What was cut short has been told so; it takes a moment to be written.
	written := time.AfterFunc(time.Second, cancel)
	defer written.Stop()
	err := <-closed
	if err != nil {
		err = srv.Close()
	}
	if serr := <-failed; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	logger.InfoContext(ctx, "stopped")
	return errors.Join(failure, err)
}

// routes serves the program's paths. While it drains, it asks clients to leave their kept connections, which are closed
// under them otherwise.
func routes(handler *mcpserver.Handler, draining *atomic.Bool) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/mcp", handler)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		err := handler.Ready(r.Context())
		if draining.Load() {
			err = errors.New("draining")
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if draining.Load() {
			w.Header().Set("Connection", "close")
		}
		mux.ServeHTTP(w, r)
	})
}
