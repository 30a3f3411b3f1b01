// Package client is the Go client of sessiond: sessions, their locks, and messages between front-ends.
//
// A [Client] is given the addresses of one or several nodes and balances its calls over those that are healthy: sessions are
// spread over the nodes, and what is about one session goes to one node, the same one from all clients with the same addresses. Its
// methods are safe for concurrent use, take their deadline from the context (and are bounded by [Options].CallTimeout),
// and return errors to be told apart with errors.Is and the Err variables of this package.
//
// # What is retried
//
// A call that no node has seen, since none could be reached, or that one refused because it is shutting down is retried on another
// node, with back-off and jitter. So is one that was cut off, if it is idempotent, carries a request id, or names a grant or
// a revision that tells whether it was carried out: everything but [Client.Create] and an unconditional [Client.Save]. Those
// two, cut off after they were sent, return [ErrOutcomeUnknown]. A backend that fails ([ErrUnavailable] from a node whose
// etcd cannot be reached) is reported at once and never retried here: the caller knows better than the client whether to wait.
//
// # How calls travel
//
// Calls to a node share one stream (MultiplexService), which takes less than half of the processor time of a gRPC call each; calls that
// are made at the same time travel together, and none waits for another. Errors, deadlines and cancellations are those
// of unary calls. Unary calls are made where there is no such stream: to older nodes, while a connection is new, and with requests over
// 64 KiB.
//
// Any node serves any session. That all ask the same one about a session saves time: locks are handed over within the node, without a
// read, and what its callers do at the same time shares commits. When a node is unhealthy its sessions are spread over the others, and
// come back afterwards. A node that has answered nothing for a second when a call's deadline comes, or that says that it is
// unavailable, is passed over for 5 seconds, and a retry goes to another node at once.
//
// Subscriptions are on that stream as well, up to 65,536 of them. One takes 2 KiB of memory while nothing comes, and no goroutine but the
// one that ranges over it. What a node may send of it is bounded until that takes it (64 KiB and a response), so a slow one
// holds up nothing else.
//
// # When the process dies
//
// With [Options].Attach the client attaches to the service as a front-end, and its locks go with it: they are released
// within seconds of the process's end, and at [Client.Close] at once. Without it they end with their TTLs.
package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/attributes"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // client-side health checks: a node that cannot reach etcd gets no calls
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

// DefaultCallTimeout bounds a call that does not wait for a lock. It is a little more than the 3 s within which a node
// reports a failing backend.
const DefaultCallTimeout = 4 * time.Second

// readyTimeout bounds a health check: probes that ask for one give up about then.
const readyTimeout = time.Second

// How much may be on the way to the client that it has not read, of one call and of all.
const streamWindow, connWindow = 1 << 20, 4 << 20

// maxMessageBytes is what one answer may hold: a message of 4 MiB and what surrounds it.
const maxMessageBytes = 8 << 20

// Options are the settings of a [Client]. The zero value works.
type Options struct {
	// Credentials secure the connections. Default: none (plain text), for loopback and private networks.
	Credentials credentials.TransportCredentials
	// CallTimeout bounds each call, retries included; for Acquire it comes on top of the lock's timeout. Default:
	// [DefaultCallTimeout].
	CallTimeout time.Duration
	// Attach keeps the client attached to the service as a front-end, in the background, from [New] to [Client.Close]: if
	// the process dies, its locks are released within seconds instead of at the end of their TTLs. It costs one stream
	// for the process. A client that gets its locks only by Acquire and releases them in time needs nothing else; one whose
	// grants are to outlive it (released by another process) must not set it. Calls do not depend on it. Default: false.
	Attach bool
	// DialOptions are added to the client's own: interceptors, for one.
	DialOptions []grpc.DialOption
	// Unary makes each call, and each subscription, a gRPC call of its own, to the nodes in turns; otherwise those to a node share one
	// stream, and a session's go to one node. Interceptors
	// and metadata work in both ways, but for what gRPC does by itself for each call it has to be set: statistics handlers
	// and per-call credentials among DialOptions, and proxies that spread calls over nodes. Default: false.
	Unary bool
}

// Client talks to sessiond. Create one with [New] and keep it for the life of the process; it is safe for concurrent
// use.
type Client struct {
	conn        *grpc.ClientConn
	sessions    sessiondv1.SessionServiceClient
	locks       sessiondv1.LockServiceClient
	messages    sessiondv1.MessageServiceClient
	health      grpc_health_v1.HealthClient
	callTimeout time.Duration
	attached    *attachment // nil without Options.Attach
	multiplexed *multiplexer
}

// serviceConfig spreads calls over all nodes whose health service says SERVING.
var serviceConfig = `{"loadBalancingConfig":[{"` + balancerName + `":{}}],"healthCheckConfig":{"serviceName":""}}`

// New returns a client of the nodes at the given addresses, each "host:port" or "unix:/path". It connects in the
// background: a node that cannot be reached is not an error here, but calls fail with [ErrUnavailable] while none can.
func New(addresses []string, opts Options) (*Client, error) {
	if len(addresses) == 0 {
		return nil, errors.New("sessiond client: no address given, want at least one host:port")
	}
	endpoints := make([]resolver.Endpoint, 0, len(addresses))
	for _, address := range addresses {
		if !strings.HasPrefix(address, "unix:") {
			if _, _, err := net.SplitHostPort(address); err != nil {
				return nil, fmt.Errorf("sessiond client: address %q: want host:port or unix:/path", address)
			}
		}
		endpoints = append(endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: address}}})
	}
	creds := opts.Credentials
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	nodes := manual.NewBuilderWithScheme("sessiond")
	multiplexed := newMultiplexer()
	nodes.InitialState(resolver.State{Endpoints: endpoints, Attributes: attributes.New(multiplexerKey{}, multiplexed)})
	dialOptions := append([]grpc.DialOption{
		grpc.WithResolvers(nodes),
		grpc.WithTransportCredentials(creds),
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithContextDialer(dial),
		// A node that comes back must be found within a second or two, not after gRPC's default of up to two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
		// A node that is cut off without a FIN is noticed by this ping alone.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 2 * time.Second, PermitWithoutStream: true}),
		// Fixed windows spare the pings by which gRPC would find out.
		grpc.WithStaticStreamWindowSize(streamWindow), grpc.WithStaticConnWindowSize(connWindow),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
		grpc.WithChainUnaryInterceptor(retry.UnaryClientInterceptor(
			retry.WithMax(0),
			retry.WithRetriable(retriable),
			retry.WithBackoff(retry.BackoffExponentialWithJitterBounded(25*time.Millisecond, 0.5, 500*time.Millisecond)),
		)),
	}, opts.DialOptions...)
	if !opts.Unary {
		dialOptions = append(dialOptions,
			grpc.WithChainUnaryInterceptor(multiplexed.intercept), grpc.WithChainStreamInterceptor(multiplexed.interceptStream))
	}
	dialOptions = append(dialOptions, grpc.WithChainUnaryInterceptor(markUnsent))
	conn, err := grpc.NewClient("sessiond:///"+strings.Join(addresses, ","), dialOptions...)
	if err != nil {
		multiplexed.close()
		return nil, fmt.Errorf("sessiond client: %w", err)
	}
	multiplexed.service = sessiondv1.NewMultiplexServiceClient(conn)
	conn.Connect()
	timeout := opts.CallTimeout
	if timeout <= 0 {
		timeout = DefaultCallTimeout
	}
	c := &Client{
		conn:        conn,
		sessions:    sessiondv1.NewSessionServiceClient(conn),
		locks:       sessiondv1.NewLockServiceClient(conn),
		messages:    sessiondv1.NewMessageServiceClient(conn),
		health:      grpc_health_v1.NewHealthClient(conn),
		callTimeout: timeout,
		multiplexed: multiplexed,
	}
	if opts.Attach {
		c.attached = attach(c.locks, c.Ready)
	}
	return c, nil
}

func dial(ctx context.Context, address string) (net.Conn, error) {
	var d net.Dialer
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return d.DialContext(ctx, "unix", path)
	}
	return d.DialContext(ctx, "tcp", address)
}

// Close releases the locks that an attached client still has, as far as that is quickly done, and ends all connections.
// Calls under way fail with [ErrUnavailable].
func (c *Client) Close() error {
	c.attached.close()
	err := c.conn.Close()
	c.multiplexed.close()
	return err
}

// Attached reports whether the client is attached to a node at this moment (see [Options].Attach). It is not for a moment
// after [New], and between a node's end and the attach to another.
func (c *Client) Attached() bool { return c.attached.stands() }

// Ready reports whether sessions can be served now: nil if a node answers that it is healthy, else [ErrUnavailable].
func (c *Client) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, min(c.callTimeout, readyTimeout))
	defer cancel()
	resp, err := c.health.Check(ctx, &grpc_health_v1.HealthCheckRequest{}, attempts)
	if err != nil {
		return fromStatus("health check", err)
	}
	if resp.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("health check: node is %s: %w", resp.GetStatus(), ErrUnavailable)
	}
	return nil
}

// attempts is the call option of what may be carried out twice.
var attempts = retry.WithMax(maxAttempts)

const maxAttempts = 4

// onceOnly are the call options of what must not be carried out twice: only what certainly was not is retried.
func onceOnly() []grpc.CallOption {
	return []grpc.CallOption{retry.WithMax(maxAttempts), retry.WithRetriable(refusedUnseen)}
}

// newRequestID returns a name for a request, unique without asking anyone (128 bits).
func newRequestID() string { return rand.Text() }

// call runs one unary call within the client's time limit.
func call[Req, Resp any](ctx context.Context, limit time.Duration, op string,
	method func(context.Context, Req, ...grpc.CallOption) (Resp, error), req Req, opts ...grpc.CallOption,
) (Resp, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	resp, err := method(ctx, req, opts...)
	if err != nil {
		var none Resp
		return none, fromStatus(op, err)
	}
	return resp, nil
}
