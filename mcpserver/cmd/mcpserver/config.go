package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/sessiond/sessiond/mcpserver"
)

// The words that --sessiond takes beside addresses.
const (
	sessiondEmbedded = "embedded"
	sessiondMemory   = "memory"
	sessiondNone     = "none"
)

// config is what flags and environment say.
type config struct {
	listen      string
	sessiond    string
	dataDir     string
	lock        bool
	lockTimeout time.Duration
	lockTTL     time.Duration
	sessionTTL  time.Duration
	askTimeout  time.Duration
	history     time.Duration
	json        bool
	everything  bool
	hosts       string
	origins     string
	stateKeys   string
	drainDelay  time.Duration
	grace       time.Duration
	logLevel    slog.Level
	logFormat   string
	version     bool
}

// envPrefix makes a flag's environment twin: --lock-ttl is MCPSERVER_LOCK_TTL. A flag goes before its twin.
const envPrefix = "MCPSERVER_"

func envName(name string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
}

// parseConfig reads flags and environment. flag.ErrHelp: usage was asked for and written.
func parseConfig(args []string, getenv func(string) string, stdout io.Writer) (config, error) {
	var c config
	flags := flag.NewFlagSet("mcpserver", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&c.listen, "listen", "127.0.0.1:8080", "`address` to serve /mcp, /healthz and /readyz on")
	flags.StringVar(&c.sessiond, "sessiond", sessiondEmbedded, "where sessions are kept: `embedded`, memory, host:port[,host:port...], or none")
	flags.StringVar(&c.dataDir, "data-dir", "data", "`folder` of the embedded sessiond")
	flags.BoolVar(&c.lock, "lock", false, "run the requests of one session one after the other")
	flags.DurationVar(&c.lockTimeout, "lock-timeout", mcpserver.DefaultLockTimeout, "how long a request waits for the lock")
	flags.DurationVar(&c.lockTTL, "lock-ttl", mcpserver.DefaultLockTTL, "how long one request may hold the lock")
	flags.DurationVar(&c.sessionTTL, "session-ttl", mcpserver.DefaultSessionTTL, "how long a session lives after its last use")
	flags.DurationVar(&c.askTimeout, "ask-timeout", mcpserver.DefaultAskTimeout, "how long a tool waits for the client's answer")
	flags.DurationVar(&c.history, "history", 0, "how long a stream's events are kept for resumption after its last one; 0 switches it off, a commit per event otherwise")
	flags.BoolVar(&c.json, "json", false, "prefer JSON answers to streams")
	flags.BoolVar(&c.everything, "everything", false, "add what the official conformance suite expects")
	flags.StringVar(&c.hosts, "allowed-hosts", "", "names that a proxy on this machine may pass on in Host: `host[,...]`")
	flags.StringVar(&c.origins, "allowed-origins", "", "Origin headers to serve beside the server's own: `scheme://host[,...]`")
	flags.StringVar(&c.stateKeys, "state-keys", "", "seal what modern clients carry back: `base64[,...]` of 32 bytes each, the same on all replicas; better given in the environment")
	flags.DurationVar(&c.drainDelay, "drain-delay", time.Second, "how long to serve on after /readyz says no, for the balancer to notice")
	flags.DurationVar(&c.grace, "grace", 20*time.Second, "how long running requests may take to finish at shutdown")
	flags.TextVar(&c.logLevel, "log-level", slog.LevelInfo, "`level`: debug, info, warn or error")
	flags.StringVar(&c.logFormat, "log-format", "text", "`format`: text or json")
	flags.BoolVar(&c.version, "version", false, "print the version and exit")

	var fromEnv error
	flags.VisitAll(func(f *flag.Flag) {
		if value := getenv(envName(f.Name)); value != "" {
			if err := flags.Set(f.Name, value); err != nil {
				fromEnv = errors.Join(fromEnv, fmt.Errorf("%s: invalid value %q: %w", envName(f.Name), value, err))
			}
		}
	})
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		writeUsage(stdout, flags)
		return c, err
	case err != nil && strings.HasPrefix(err.Error(), "flag provided but not defined"):
		return c, fmt.Errorf("%w; allowed: %s", err, flagNames(flags))
	case err != nil:
		return c, err
	case fromEnv != nil:
		return c, fromEnv
	case flags.NArg() > 0:
		return c, fmt.Errorf("unexpected argument %q; allowed: %s", flags.Arg(0), flagNames(flags))
	}
	return c, c.validate()
}

func flagNames(flags *flag.FlagSet) string {
	var names []string
	flags.VisitAll(func(f *flag.Flag) { names = append(names, "--"+f.Name) })
	return strings.Join(names, " ")
}

func writeUsage(w io.Writer, flags *flag.FlagSet) {
	fmt.Fprintf(w, "mcpserver serves MCP over Streamable HTTP, with sessions kept in sessiond.\n\nFlags (each with an environment twin):\n")
	flags.VisitAll(func(f *flag.Flag) {
		name, usage := flag.UnquoteUsage(f)
		fmt.Fprintf(w, "  --%s %s\n        %s (%s, default %q)\n", f.Name, name, usage, envName(f.Name), f.DefValue)
	})
}

// validate reports all that is wrong at once. Limits that are mcpserver's own it leaves to that.
func (c config) validate() error {
	var errs []error
	if err := checkAddress(c.listen); err != nil {
		errs = append(errs, fmt.Errorf("--listen %q: %w", c.listen, err))
	}
	for _, d := range []struct {
		flag               string
		value, least, most time.Duration
	}{
		{"session-ttl", c.sessionTTL, mcpserver.MinTTL, mcpserver.MaxSessionTTL},
		{"lock-timeout", c.lockTimeout, mcpserver.MinTimeout, mcpserver.MaxLockTimeout},
		{"lock-ttl", c.lockTTL, mcpserver.MinTTL, mcpserver.MaxLockTTL},
		{"ask-timeout", c.askTimeout, mcpserver.MinTimeout, mcpserver.MaxAskTimeout},
		{"drain-delay", c.drainDelay, 0, time.Hour},
		{"grace", c.grace, time.Millisecond, time.Hour},
	} {
		if d.value < d.least || d.value > d.most {
			errs = append(errs, fmt.Errorf("--%s %s: want %s to %s", d.flag, d.value, d.least, d.most))
		}
	}
	if c.sessiond != sessiondEmbedded && c.sessiond != sessiondMemory && c.sessiond != sessiondNone {
		for _, address := range c.addresses() {
			if err := checkAddress(address); err != nil {
				errs = append(errs, fmt.Errorf("--sessiond %q: want embedded, memory, none, or host:port[,host:port...]", c.sessiond))
				break
			}
		}
	}
	if c.history != 0 && (c.history < mcpserver.MinTTL || c.history > mcpserver.MaxHistory) {
		errs = append(errs, fmt.Errorf("--history %s: want 0 or %s to %s", c.history, mcpserver.MinTTL, mcpserver.MaxHistory))
	}
	if c.sessiond == sessiondEmbedded && c.dataDir == "" {
		errs = append(errs, errors.New("--data-dir is empty: want a folder for the embedded sessiond"))
	}
	if c.lock && c.sessiond == sessiondNone {
		errs = append(errs, errors.New("--lock needs sessions: want --sessiond embedded, memory, or host:port[,host:port...]"))
	}
	for _, origin := range c.allowedOrigins() {
		if err := mcpserver.CheckOrigin(origin); err != nil {
			errs = append(errs, fmt.Errorf("--allowed-origins: %w", err))
		}
	}
	if _, err := c.keys(); err != nil {
		errs = append(errs, fmt.Errorf("--state-keys: %w", err))
	}
	if c.logFormat != "text" && c.logFormat != "json" {
		errs = append(errs, fmt.Errorf("--log-format %q: want text or json", c.logFormat))
	}
	return errors.Join(errs...)
}

func checkAddress(address string) error {
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return errors.New("want host:port, with a port of 0 to 65535")
	}
	return nil
}

func (c config) addresses() []string { return strings.Split(c.sessiond, ",") }

func (c config) keys() ([][]byte, error) {
	if c.stateKeys == "" {
		return nil, nil
	}
	var keys [][]byte
	for text := range strings.SplitSeq(c.stateKeys, ",") {
		key, err := mcpserver.ParseStateKey(text)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

func (c config) allowedOrigins() []string { return list(c.origins) }

func list(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}
