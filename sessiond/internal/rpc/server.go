// Package rpc has the gRPC services: checks of requests, translation, and the one map from errors to statuses. It holds
// no rules; those are in the packages session, lock and message.
package rpc

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

const (
	// A message of 4 MiB or a session of as much, and what is around it.
	maxRequestBytes = 8 << 20
	// Clients may ping this often; ours do every 10 s.
	minPing = 5 * time.Second
	// A client that does not answer pings has gone, and with it its places in queues, and its attachment if it does not
	// come back. A ping is 17 bytes each way, and sent only on connections that are silent. It costs as much as a sign of life, so
	// with very many connections both are sent rarely.
	pingTimeout = 2 * time.Second
	// Goroutines that serve calls one after the other. A new one for each call would grow its stack each time, on the way
	// down into etcd: a fifth of a call's processor time. What comes while all are taken, by calls that wait for a lock say,
	// gets a goroutine of its own.
	streamWorkers = 256
	// How much may be on the way to a node that it has not read. Fixed ones spare the pings by which gRPC would find out.
	streamWindow, connWindow = 1 << 20, 4 << 20
)

// Options is what a Server serves.
type Options struct {
	Sessions *session.Service
	Locks    *lock.Service
	// FrontEnds may be nil: then none can attach.
	FrontEnds *lock.FrontEnds
	Messages  *message.Service
	Logger    *slog.Logger
	// Metrics takes the server's metrics.
	Metrics prometheus.Registerer
	// Drain is closed when the node shuts down; new calls are then refused.
	Drain <-chan struct{}
}

// Server is a gRPC server with all services on it. In fact it is two: how often a connection is pinged is a setting of a
// whole server of gRPC's, so the connections beyond the first [maxOften] that are open are another one's.
type Server struct {
	*grpc.Server

	rare    *grpc.Server
	often   *openConns
	health  *health.Server
	workers *workers
}

// Serve serves the connections of a listener until that fails or the server is stopped.
func (s *Server) Serve(l net.Listener) error {
	first, others := split(l, s.often.many)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.rare.Serve(others) // it ends with the other one, whose error says why
	}()
	err := s.Server.Serve(first)
	_ = others.Close()
	<-ended
	return err
}

// GracefulStop takes no connections and no calls any more, and waits until what is served has ended.
func (s *Server) GracefulStop() {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(s.rare.GracefulStop)
	s.Server.GracefulStop()
}

// Stop ends what is served at once. It must be called, after a GracefulStop as well.
func (s *Server) Stop() {
	s.Server.Stop()
	s.rare.Stop()
	s.workers.stop()
}

// chain makes one interceptor of several; the first one is the outermost.
func chain(interceptors []grpc.UnaryServerInterceptor) grpc.UnaryServerInterceptor {
	var all grpc.UnaryServerInterceptor
	for _, outer := range slices.Backward(interceptors) {
		inner := all
		if inner == nil {
			all = outer
			continue
		}
		all = func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			return outer(ctx, req, info, func(ctx context.Context, req any) (any, error) { return inner(ctx, req, info, handler) })
		}
	}
	return all
}

// chainStream is chain for calls that answer with a stream.
func chainStream(interceptors []grpc.StreamServerInterceptor) grpc.StreamServerInterceptor {
	var all grpc.StreamServerInterceptor
	for _, outer := range slices.Backward(interceptors) {
		inner := all
		if inner == nil {
			all = outer
			continue
		}
		all = func(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			return outer(service, stream, info, func(service any, stream grpc.ServerStream) error { return inner(service, stream, info, handler) })
		}
	}
	return all
}

// NewServer makes a Server. It reports itself as not serving until told otherwise.
func NewServer(o Options) *Server {
	metrics := grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram())
	o.Metrics.MustRegister(metrics)
	logs := logging.LoggerFunc(func(ctx context.Context, level logging.Level, msg string, fields ...any) {
		o.Logger.Log(ctx, slog.Level(level), msg, fields...) //nolint:sloglint // the text is the interceptor's, and constant
	})
	logOptions := []logging.Option{logging.WithLogOnEvents(logging.FinishCall), logging.WithLevels(logLevel)}
	recovered := recovery.WithRecoveryHandlerContext(func(_ context.Context, p any) error {
		return fmt.Errorf("panic: %v\n%s", p, debug.Stack())
	})
	i := &interceptor{logger: o.Logger, drain: o.Drain}
	unary := []grpc.UnaryServerInterceptor{
		metrics.UnaryServerInterceptor(),
		unaryLog(o.Logger, logging.UnaryServerInterceptor(logs, logOptions...)),
		i.unary,
		recovery.UnaryServerInterceptor(recovered),
	}
	streams := []grpc.StreamServerInterceptor{
		metrics.StreamServerInterceptor(),
		streamLog(o.Logger, logging.StreamServerInterceptor(logs, logOptions...)),
		i.stream,
		recovery.StreamServerInterceptor(recovered),
	}

	serverFor := func(pingEvery time.Duration, more ...grpc.ServerOption) *grpc.Server {
		return grpc.NewServer(append([]grpc.ServerOption{
			grpc.MaxRecvMsgSize(maxRequestBytes),
			grpc.NumStreamWorkers(streamWorkers),
			grpc.StaticStreamWindowSize(streamWindow),
			grpc.StaticConnWindowSize(connWindow),
			grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minPing, PermitWithoutStream: true}),
			// Of a front-end that is cut off, the node must not find that out much sooner than the front-end does, which still can
			// attach elsewhere.
			grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingEvery, Timeout: pingTimeout + lock.Lateness(pingEvery)}),
			grpc.ChainUnaryInterceptor(unary...),
			grpc.ChainStreamInterceptor(streams...),
		}, more...)...)
	}
	often := &openConns{most: maxOften}
	s := &Server{
		health: health.NewServer(),
		often:  often,
		Server: serverFor(lock.PingEvery, grpc.StatsHandler(often)),
		rare:   serverFor(lock.RarePingEvery),
	}
	// Its methods are those of the others.
	m := &multiplexService{
		methods: map[string]multiplexMethod{}, intercept: chain(unary), interceptStream: chainStream(streams),
		drain: o.Drain, workers: newWorkers(streamWorkers),
	}
	s.workers = m.workers
	for _, to := range []struct {
		grpc.ServiceRegistrar
		pingEvery time.Duration
	}{{s.Server, lock.PingEvery}, {s.rare, lock.RarePingEvery}, {m, lock.PingEvery}} {
		sessiondv1.RegisterSessionServiceServer(to, &sessionService{rules: o.Sessions})
		sessiondv1.RegisterLockServiceServer(to, &lockService{rules: o.Locks, frontEnds: o.FrontEnds, pingEvery: to.pingEvery})
		sessiondv1.RegisterMessageServiceServer(to, &messageService{rules: o.Messages})
	}
	for _, to := range []*grpc.Server{s.Server, s.rare} {
		sessiondv1.RegisterMultiplexServiceServer(to, m)
		healthpb.RegisterHealthServer(to, s.health)
		reflection.Register(to)
	}
	metrics.InitializeMetrics(s)
	s.SetServing(false)
	return s
}

// SetServing says what the health service reports, for the server and for each of its services.
func (s *Server) SetServing(serving bool) {
	state := healthpb.HealthCheckResponse_NOT_SERVING
	if serving {
		state = healthpb.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", state)
	for name := range s.GetServiceInfo() {
		if isOurs("/" + name) {
			s.health.SetServingStatus(name, state)
		}
	}
}

// Shutdown makes the health service report that nothing is served, for good.
func (s *Server) Shutdown() { s.health.Shutdown() }

func isOurs(method string) bool { return strings.HasPrefix(method, "/sessiond.") }

// interceptor refuses calls while the node shuts down, and turns errors into statuses.
type interceptor struct {
	logger *slog.Logger
	drain  <-chan struct{}
}

func (i *interceptor) admit(method string) error {
	select {
	case <-i.drain:
		if isOurs(method) {
			return session.ErrDraining
		}
	default:
	}
	return nil
}

func (i *interceptor) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := i.admit(info.FullMethod); err != nil {
		return nil, toStatus(ctx, i.logger, err)
	}
	resp, err := handler(ctx, req)
	return resp, toStatus(ctx, i.logger, err)
}

func (i *interceptor) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := i.admit(info.FullMethod); err != nil {
		return toStatus(ss.Context(), i.logger, err)
	}
	return toStatus(ss.Context(), i.logger, handler(srv, ss))
}
