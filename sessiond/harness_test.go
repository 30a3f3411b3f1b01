package sessiond_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
	"github.com/sessiond/sessiond/sessiond/internal/memstore"
)

// node is a running server with a client of each service.
type node struct {
	*sessiond.Server

	sessions sessiondv1.SessionServiceClient
	locks    sessiondv1.LockServiceClient
	messages sessiondv1.MessageServiceClient
	conn     *grpc.ClientConn
	stop     func() error
}

// logTo sends a node's log to the test's.
func logTo(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
}

func start(t *testing.T, cfg sessiond.Config) *node {
	t.Helper()
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	if cfg.Grace == 0 {
		cfg.Grace = time.Second
	}
	cfg.Logger = logTo(t)
	srv, err := sessiond.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, srv)
}

func serve(t *testing.T, srv *sessiond.Server, opts ...grpc.DialOption) *node {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- srv.Run(ctx) }()
	conn, err := srv.Dial(opts...)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{
		Server:   srv,
		sessions: sessiondv1.NewSessionServiceClient(conn),
		locks:    sessiondv1.NewLockServiceClient(conn),
		messages: sessiondv1.NewMessageServiceClient(conn),
		conn:     conn,
	}
	n.stop = sync.OnceValue(func() error {
		cancel()
		err := <-done
		return err
	})
	t.Cleanup(func() {
		if err := n.stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	select {
	case <-srv.Ready():
	case <-time.After(20 * time.Second):
		t.Fatal("node is not ready")
	}
	return n
}

// etcd is a node that lends its embedded member to those of the tests.
var etcd *sessiond.Server

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "sessiond-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	quiet := slog.New(slog.DiscardHandler)
	etcd, err = sessiond.New(context.Background(), sessiond.Config{DataDir: dir, Listen: "127.0.0.1:0", Logger: quiet})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := etcd.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// cluster is what nodes of a test share: a store that nobody else uses.
type cluster struct {
	memory *memstore.Store // or nil: etcd
	prefix string          // of the keys in etcd
}

// onBoth runs a test of the contract against a store in etcd and one in memory. In memory it runs in virtual time: what takes
// the test hours ends at once, and to the nanosecond.
func onBoth(t *testing.T, test func(t *testing.T, c cluster)) {
	t.Run("memory", func(t *testing.T) { inMemory(t, test) })
	t.Run("etcd", func(t *testing.T) { test(t, cluster{prefix: rand.Text() + "/"}) })
}

// start starts nodes that share sessions.
func (c cluster) start(t *testing.T, count int) []*node {
	t.Helper()
	return c.startWith(t, count, sessiond.Config{})
}

func (c cluster) startWith(t *testing.T, count int, cfg sessiond.Config) []*node {
	t.Helper()
	var nodes []*node
	for range count {
		if c.memory == nil {
			cfg.Endpoints, cfg.Prefix = etcd.EtcdEndpoints(), c.prefix
			nodes = append(nodes, start(t, cfg))
			continue
		}
		cfg.Grace, cfg.Logger = time.Second, logTo(t)
		l := bufconn.Listen(1 << 20)
		srv, err := sessiond.OpenShared(t.Context(), cfg, l, c.memory)
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, serve(t, srv, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return l.DialContext(ctx)
		})))
	}
	return nodes
}

// startWith starts nodes on etcd that share sessions with each other and with nobody else.
func startWith(t *testing.T, count int, cfg sessiond.Config) []*node {
	t.Helper()
	return cluster{prefix: rand.Text() + "/"}.startWith(t, count, cfg)
}

func seconds(s float64) *durationpb.Duration {
	return durationpb.New(time.Duration(s * float64(time.Second)))
}

// create makes a session with data and returns its id.
func (n *node) create(t *testing.T, data string) string {
	t.Helper()
	resp, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{Data: []byte(data)})
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetSession().GetId()
}

func (n *node) read(t *testing.T, id string) *sessiondv1.Session {
	t.Helper()
	resp, err := n.sessions.Read(t.Context(), &sessiondv1.ReadRequest{SessionId: id})
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetSession()
}

func (n *node) acquire(t *testing.T, req *sessiondv1.AcquireRequest) *sessiondv1.Grant {
	t.Helper()
	if req.GetRequestId() == "" {
		req.RequestId = rand.Text()
	}
	resp, err := n.locks.Acquire(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetGrant()
}

func (n *node) release(t *testing.T, g *sessiondv1.Grant) {
	t.Helper()
	if err := n.tryRelease(t, g); err != nil {
		t.Fatal(err)
	}
}

func (n *node) tryRelease(t *testing.T, g *sessiondv1.Grant) error {
	t.Helper()
	_, err := n.locks.Release(t.Context(), &sessiondv1.ReleaseRequest{
		SessionId: g.GetSessionId(), RequestId: g.GetRequestId(), FencingToken: g.GetFencingToken(),
	})
	return err
}

// reasonOf is the reason of an error, or its code if it has none.
func reasonOf(err error) string {
	if err == nil {
		return "OK"
	}
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == "sessiond" {
			return info.GetReason()
		}
	}
	return status.Code(err).String()
}

func wantReason(t *testing.T, err error, code codes.Code, reason string) {
	t.Helper()
	if reasonOf(err) != reason || status.Code(err) != code {
		t.Fatalf("got %v, want %v with reason %s", err, code, reason)
	}
}

// eventually waits until ok holds; what it waits for is bounded by etcd, not by this test.
func eventually(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	end := time.After(within)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}
