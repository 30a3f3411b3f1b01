package sessiond

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/etcdnode"
	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// Defaults of Config.
const (
	DefaultListen = "127.0.0.1:7400"
	DefaultPrefix = "sessiond/"
	DefaultGrace  = 10 * time.Second
	// DefaultAttachGrace is the default of the time that a front-end may be away.
	DefaultAttachGrace = lock.DefaultAttachGrace
	// DefaultMaxSessionBytes is the default limit of a session's data.
	DefaultMaxSessionBytes = session.DefaultMaxBytes
	// DefaultMaxWaiters is the default limit of callers that wait for one lock.
	DefaultMaxWaiters = lock.DefaultMaxWaiters
)

// What Config.Store can be.
const (
	StoreEtcd   = "etcd"
	StoreMemory = "memory"
)

// What a limit can be set to at most: a session has to fit into one request of etcd and of gRPC.
const (
	maxSessionBytes = 4 << 20
	maxWaiters      = 10_000
	maxPrefix       = 256
)

// Config describes a node. The zero value of a field stands for its default.
type Config struct {
	// Listen is where the gRPC services are served: host:port (port 0 picks one) or unix:/path. Default DefaultListen.
	Listen string
	// Store is where sessions are kept: StoreEtcd or StoreMemory. In memory they end with the process, and no other node
	// shares them. Default StoreEtcd.
	Store string
	// DataDir is the data folder of an embedded etcd member. With StoreEtcd exactly one of DataDir and Endpoints must be
	// set, with StoreMemory none.
	DataDir string
	// Endpoints are the members of an etcd cluster: host:port, http(s)://host:port or unix:///path.
	Endpoints []string
	// Prefix is put before every key in etcd; nodes with the same one share sessions. Default DefaultPrefix.
	Prefix string
	// MaxSessionBytes limits a session's data. More than the default needs an etcd that accepts requests of that size;
	// an embedded one does. Default DefaultMaxSessionBytes, at most 4 MiB.
	MaxSessionBytes int
	// MaxWaiters limits the callers that wait for one lock. Default DefaultMaxWaiters, at most 10,000.
	MaxWaiters int
	// AttachGrace is how long a front-end that was attached may be away from all nodes until its locks are released, 100 ms
	// to 1 minute. The same on all nodes. Default DefaultAttachGrace.
	AttachGrace time.Duration
	// Grace is how long running calls may take when the node shuts down. Default DefaultGrace.
	Grace time.Duration
	// MetricsListen is where /metrics, /healthz and /readyz are served over HTTP: host:port. Default: nowhere.
	MetricsListen string
	// Logger takes the node's log. Default: slog.Default().
	Logger *slog.Logger
}

// Validate reports all that is wrong with a Config.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	if err := checkListen(c.Listen); err != nil {
		errs = append(errs, fmt.Errorf("listen: %w", err))
	}
	if c.MetricsListen != "" {
		if err := checkHostPort(c.MetricsListen, "host:port"); err != nil {
			errs = append(errs, fmt.Errorf("metrics listen: %w", err))
		}
	}
	switch c.Store {
	case StoreEtcd:
		if (c.DataDir == "") == (len(c.Endpoints) == 0) {
			errs = append(errs, errors.New("exactly one of data folder and etcd endpoints must be given"))
		}
	case StoreMemory:
		if c.DataDir != "" || len(c.Endpoints) > 0 {
			errs = append(errs, errors.New("store memory: takes neither a data folder nor etcd endpoints"))
		}
	default:
		errs = append(errs, fmt.Errorf("store %q: must be %s or %s", c.Store, StoreEtcd, StoreMemory))
	}
	for _, endpoint := range c.Endpoints {
		if err := etcdnode.CheckEndpoint(endpoint); err != nil {
			errs = append(errs, fmt.Errorf("etcd endpoints: %w", err))
			break // the same is wrong with the others, mostly
		}
	}
	if len(c.Prefix) > maxPrefix || !strings.HasSuffix(c.Prefix, "/") || c.Prefix == "/" {
		errs = append(errs, fmt.Errorf("prefix: must be 2 to %d bytes and end with a slash", maxPrefix))
	}
	if c.MaxSessionBytes < 1 || c.MaxSessionBytes > maxSessionBytes {
		errs = append(errs, fmt.Errorf("max session bytes: must be 1 to %d", maxSessionBytes))
	}
	if c.MaxWaiters < 1 || c.MaxWaiters > maxWaiters {
		errs = append(errs, fmt.Errorf("max waiters: must be 1 to %d", maxWaiters))
	}
	if c.AttachGrace < lock.MinAttachGrace || c.AttachGrace > lock.MaxAttachGrace {
		errs = append(errs, fmt.Errorf("attach grace: must be %v to %v", lock.MinAttachGrace, lock.MaxAttachGrace))
	}
	if c.Grace < 0 {
		errs = append(errs, errors.New("grace: must not be negative"))
	}
	return errors.Join(errs...)
}

func checkListen(listen string) error {
	if path, ok := strings.CutPrefix(listen, "unix:"); ok {
		if path == "" {
			return errors.New("unix: needs a path")
		}
		return nil
	}
	return checkHostPort(listen, "host:port or unix:/path")
}

// checkHostPort finds what a listener would fail on only later, with a message that names no flag.
func checkHostPort(address, want string) error {
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return fmt.Errorf("%q is not %s with a port of 0 to 65535", address, want)
	}
	return nil
}

func (c Config) withDefaults() Config {
	if c.Listen == "" {
		c.Listen = DefaultListen
	}
	if c.Store == "" {
		c.Store = StoreEtcd
	}
	if c.Prefix == "" {
		c.Prefix = DefaultPrefix
	}
	if c.MaxSessionBytes == 0 {
		c.MaxSessionBytes = DefaultMaxSessionBytes
	}
	if c.MaxWaiters == 0 {
		c.MaxWaiters = DefaultMaxWaiters
	}
	if c.AttachGrace == 0 {
		c.AttachGrace = DefaultAttachGrace
	}
	if c.Grace == 0 {
		c.Grace = DefaultGrace
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}
