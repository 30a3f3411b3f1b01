// Package sessiond is the sessiond server as a library: sessions, locks and messages of MCP front-ends over gRPC, kept
// in an etcd member that it embeds, in a cluster, or in memory.
//
// New opens a node (listener, etcd, services), Run serves until its context ends and then shuts down in order:
//
//	srv, err := sessiond.New(ctx, sessiond.Config{DataDir: dir, Listen: "127.0.0.1:0"})
//	if err != nil { ... }
//	go func() { done <- srv.Run(ctx) }()
//	conn, err := srv.Dial()
//
// A node keeps nothing but connections, waiters and subscribers in memory. Any number of nodes may run on one cluster.
package sessiond

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/sessiond/sessiond/sessiond/internal/etcdnode"
	"github.com/sessiond/sessiond/sessiond/internal/etcdstore"
	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/memstore"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/rpc"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

const (
	maxClientMessage = 8 << 20
	httpTimeout      = 5 * time.Second
	closeTimeout     = 3 * time.Second
)

// ErrDataDirInUse says that another process runs on the data folder.
var ErrDataDirInUse = etcdnode.ErrDataDirInUse

// Server is a node. Its methods may be called concurrently.
type Server struct {
	cfg      Config
	logger   *slog.Logger
	listener net.Listener
	node     *etcdnode.Node // nil without etcd
	store    store
	rpc      *rpc.Server
	drain    chan struct{}

	metricsListener net.Listener
	metricsServer   *http.Server

	closers   []func() error // closed in reverse
	closeOnce sync.Once
	closeErr  error
}

// store keeps what a node serves.
type store interface {
	session.Store
	lock.Store
	message.Store
	// Up is closed while the store can be reached.
	Up() <-chan struct{}
	Close(ctx context.Context)
}

// New opens a node. With an embedded member it returns when that is ready; with a cluster it does not wait for it. It undoes
// what it did if it fails or ctx ends. A Server that is not Run must be closed with Close.
func New(ctx context.Context, cfg Config) (_ *Server, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	listener, err := listen(ctx, cfg.Listen)
	if err != nil {
		return nil, err
	}
	return open(ctx, cfg, listener, nil)
}

// open opens a node on a listener, which it closes, and on a store, which it does not, unless that is nil.
func open(ctx context.Context, cfg Config, listener net.Listener, shared store) (_ *Server, err error) {
	s := &Server{cfg: cfg, logger: cfg.Logger, listener: listener, store: shared, drain: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()

	s.onClose(closed(s.listener.Close))
	if cfg.MetricsListen != "" {
		if s.metricsListener, err = listen(ctx, cfg.MetricsListen); err != nil {
			return nil, err
		}
		s.onClose(closed(s.metricsListener.Close))
	}

	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if s.store == nil {
		if err := s.openStore(ctx, registry); err != nil {
			return nil, err
		}
	}
	if s.node != nil {
		err := s.node.Inspect(etcdnode.InspectConfig{
			MaxValueBytes: cfg.MaxSessionBytes, Key: cfg.Prefix + "probe", Logger: s.logger, Metrics: registry,
		})
		if err != nil {
			return nil, err
		}
	}
	var frontEnds *lock.FrontEnds
	if known, ok := s.store.(lock.FrontEndStore); ok {
		frontEnds = lock.NewFrontEnds(known, cfg.AttachGrace, s.drain, s.logger)
		s.onClose(func() error {
			frontEnds.Close()
			return nil
		})
	}
	s.rpc = rpc.NewServer(rpc.Options{
		Sessions:  session.NewService(s.store, cfg.MaxSessionBytes),
		Locks:     lock.NewService(s.store, cfg.MaxWaiters, s.drain),
		FrontEnds: frontEnds,
		Messages:  message.NewService(s.store, s.drain),
		Logger:    s.logger,
		Metrics:   registry,
		Drain:     s.drain,
	})
	if s.metricsListener != nil {
		s.metricsServer = &http.Server{Handler: s.metricsHandler(registry), ReadHeaderTimeout: httpTimeout}
	}
	return s, nil
}

// openStore opens the store that the configuration names.
func (s *Server) openStore(ctx context.Context, metrics prometheus.Registerer) (err error) {
	switch {
	case s.cfg.Store == StoreMemory:
		s.logger.WarnContext(ctx, "sessions are kept in memory: they end with this process, and no other node shares them")
		s.store = memstore.Open()
		s.onClose(s.closeStore)
		return nil
	case s.cfg.DataDir != "":
		s.node, err = etcdnode.Embed(ctx, etcdnode.EmbedConfig{DataDir: s.cfg.DataDir, MaxValueBytes: s.cfg.MaxSessionBytes, Logger: s.logger})
	default:
		s.node, err = etcdnode.Connect(etcdnode.ConnectConfig{Endpoints: s.cfg.Endpoints, MaxValueBytes: s.cfg.MaxSessionBytes, Logger: s.logger})
	}
	if err != nil {
		return err
	}
	s.onClose(s.node.Close)
	s.store = etcdstore.Open(etcdstore.Config{
		KV: s.node.KV(), Lease: s.node.Client(), Watcher: s.node.Watcher(), Members: len(s.node.Endpoints()),
		Metrics: metrics, Prefix: s.cfg.Prefix, AttachGrace: s.cfg.AttachGrace, Logger: s.logger,
	})
	s.onClose(s.closeStore)
	return nil
}

func (s *Server) closeStore() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	s.store.Close(ctx)
	return nil
}

func listen(ctx context.Context, address string) (net.Listener, error) {
	var lc net.ListenConfig
	network := "tcp"
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, address = "unix", path
		removeStale(ctx, path)
	}
	l, err := lc.Listen(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return l, nil
}

// removeStale removes a socket that a killed process left behind. One that somebody answers on stays.
func removeStale(ctx context.Context, path string) {
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != os.ModeSocket {
		return
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		_ = conn.Close()
		return
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		_ = os.Remove(path) // or listening says why not
	}
}

func (s *Server) onClose(f func() error) { s.closers = append(s.closers, f) }

// closed makes a closer that may come second.
func closed(f func() error) func() error {
	return func() error {
		if err := f(); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	}
}

// Addr is where the node listens.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// MetricsAddr is where the node serves metrics, or nil.
func (s *Server) MetricsAddr() net.Addr {
	if s.metricsListener == nil {
		return nil
	}
	return s.metricsListener.Addr()
}

// Ready returns a channel that is closed when the store can be reached, or already is if it can. Ask again after a loss.
func (s *Server) Ready() <-chan struct{} { return s.store.Up() }

// EtcdEndpoints are the addresses of the etcd that the node uses. Those of an embedded member are reachable from this
// machine, by this user. There are none with a store in memory.
func (s *Server) EtcdEndpoints() []string {
	if s.node == nil {
		return nil
	}
	return s.node.Endpoints()
}

// Dial makes a connection to this node. The caller closes it.
func (s *Server) Dial(opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	target := s.listener.Addr().String()
	if s.listener.Addr().Network() == "unix" {
		target = "unix:" + target
	} else {
		target = "passthrough:///" + target
	}
	return grpc.NewClient(target, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxClientMessage)),
	}, opts...)...)
}

// Run serves until ctx ends or something breaks, then shuts down: health reports NOT_SERVING, new calls, waiters and
// subscribers are told SHUTTING_DOWN, running calls may end within the grace period, and everything is closed. It
// returns nil if it was ctx that ended. It is called once.
func (s *Server) Run(ctx context.Context) error {
	watch, stopWatch := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.watchHealth(watch) })

	served := make(chan error, 2)
	wg.Go(func() { served <- s.rpc.Serve(s.listener) })
	if s.metricsServer != nil {
		wg.Go(func() {
			if err := s.metricsServer.Serve(s.metricsListener); !errors.Is(err, http.ErrServerClosed) {
				served <- err
			}
		})
	}

	var failure error
	select {
	case <-ctx.Done():
		s.logger.InfoContext(ctx, "shutting down")
	case failure = <-served:
	case <-s.failed():
		failure = errors.New("embedded etcd stopped")
	}
	stopWatch()
	s.shutdown()
	wg.Wait()
	return errors.Join(failure, s.Close())
}

// troubles says what is wrong with etcd although it can be reached, one line each.
func (s *Server) troubles() []string {
	if s.node == nil {
		return nil
	}
	return s.node.Troubles()
}

// failed is closed when the embedded member has stopped. It is nil without one.
func (s *Server) failed() <-chan struct{} {
	if s.node == nil {
		return nil
	}
	return s.node.Failed()
}

// shutdown ends what is served.
func (s *Server) shutdown() {
	s.rpc.Shutdown()
	close(s.drain)
	stopped := make(chan struct{})
	go func() {
		s.rpc.GracefulStop()
		close(stopped)
	}()
	grace := time.NewTimer(s.cfg.Grace)
	defer grace.Stop()
	select {
	case <-stopped:
	case <-grace.C:
		s.logger.Warn("calls still run at the end of the grace period")
		s.rpc.Stop()
		<-stopped
	}
	if s.metricsServer != nil {
		// It serves nothing that is worth waiting for.
		_ = s.metricsServer.Close()
	}
}

// Close closes a Server that was not Run; after Run it does nothing more.
func (s *Server) Close() error {
	s.closeOnce.Do(func() {
		if s.rpc != nil {
			s.rpc.Stop()
		}
		var errs []error
		for _, closer := range slices.Backward(s.closers) {
			errs = append(errs, closer())
		}
		s.closeErr = errors.Join(errs...)
	})
	return s.closeErr
}

// watchHealth makes the health service follow the store's state.
func (s *Server) watchHealth(ctx context.Context) {
	first := true
	for {
		select {
		case <-s.store.Up():
			s.rpc.SetServing(true)
			if first {
				s.logger.InfoContext(ctx, "ready", "address", s.Addr().String())
				first = false
			}
		case <-ctx.Done():
			return
		}
		select {
		case <-s.store.Down():
			s.rpc.SetServing(false)
		case <-ctx.Done():
			return
		}
	}
}

func (s *Server) metricsHandler(registry *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
		// An etcd that takes no writes is for an operator to mend: no other node would do better, and what frees space, a
		// destroy, still works. So it is told here and does not take the node out of service.
		for _, trouble := range s.troubles() {
			fmt.Fprintln(w, trouble)
		}
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		select {
		case <-s.drain:
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		default:
		}
		select {
		case <-s.store.Up():
			w.WriteHeader(http.StatusOK)
		default:
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	return mux
}
