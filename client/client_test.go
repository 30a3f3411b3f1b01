package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sessiond/sessiond/client"
	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// startNode runs a sessiond on embedded etcd and returns a client of it.
func startNode(t *testing.T) *client.Client {
	t.Helper()
	return startNodeWith(t, sessiond.Config{DataDir: t.TempDir()})
}

func startNodeWith(t *testing.T, cfg sessiond.Config) *client.Client {
	t.Helper()
	cfg.Listen, cfg.Logger = "127.0.0.1:0", slog.New(slog.DiscardHandler)
	node, err := sessiond.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- node.Run(ctx) }()
	c, err := client.New([]string{node.Addr().String()}, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	for c.Ready(t.Context()) != nil {
		if t.Context().Err() != nil {
			t.Fatal("node not ready")
		}
	}
	return c
}

// C1: the whole life of a session, a lock and a message through the client, on a real node.
func TestC1AgainstANode(t *testing.T) {
	c, ctx := startNode(t), t.Context()

	s, err := c.Create(ctx, []byte("a"), client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Create(ctx, nil, client.CreateOptions{ID: s.ID}); !errors.Is(err, client.ErrSessionExists) {
		t.Errorf("create again: %v", err)
	}
	if got, err := c.Read(ctx, s.ID); err != nil || string(got.Data) != "a" || got.TTL != time.Hour || got.TTLRemaining < 59*time.Minute {
		t.Errorf("read: %+v %v", got, err)
	}
	if _, err := c.Save(ctx, s.ID, []byte("b"), client.SaveOptions{ExpectedRevision: s.Revision - 1}); !errors.Is(err, client.ErrRevisionMismatch) {
		t.Errorf("save on an old revision: %v", err)
	}
	if _, err := c.Save(ctx, s.ID, make([]byte, 2<<20), client.SaveOptions{}); !errors.Is(err, client.ErrSessionTooLarge) {
		t.Errorf("save 2 MiB: %v", err)
	}
	if _, err := c.Read(ctx, "a b"); !errors.Is(err, client.ErrInvalidArgument) {
		t.Errorf("malformed id: %v", err)
	}

	g, err := c.Acquire(ctx, s.ID, client.AcquireOptions{Holder: "me", TTL: time.Minute})
	if err != nil || string(g.Session.Data) != "a" || g.TTL < time.Minute || time.Until(g.Deadline) > g.TTL {
		t.Fatalf("acquire: %+v %v", g, err)
	}
	if again, err := c.Acquire(ctx, s.ID, client.AcquireOptions{RequestID: g.RequestID, Holder: "me"}); err != nil || again.FencingToken != g.FencingToken {
		t.Errorf("the same request again: %+v %v", again, err)
	}
	if _, err := c.Acquire(ctx, s.ID, client.AcquireOptions{Holder: "me"}); !errors.Is(err, client.ErrLockAlreadyHeld) {
		t.Errorf("the same holder again: %v", err)
	}
	if try, err := c.TryAcquire(ctx, s.ID, client.AcquireOptions{}); err != nil || try.Acquired || try.Holder != "me" {
		t.Errorf("try: %+v %v", try, err)
	}
	if _, err := c.Acquire(ctx, s.ID, client.AcquireOptions{Timeout: time.Millisecond}); !errors.Is(err, client.ErrLockTimeout) {
		t.Errorf("acquire what is held: %v", err)
	}
	if _, err := c.Save(ctx, s.ID, []byte("c"), client.SaveOptions{}); !errors.Is(err, client.ErrSessionLocked) {
		t.Errorf("save without the grant: %v", err)
	}
	if _, err := c.Save(ctx, s.ID, []byte("d"), client.SaveOptions{Grant: &g, Release: true}); err != nil {
		t.Errorf("save and release: %v", err)
	}
	if _, err := c.Save(ctx, s.ID, []byte("e"), client.SaveOptions{Grant: &g}); !errors.Is(err, client.ErrLockLost) {
		t.Errorf("save after the release: %v", err)
	}
	if err := c.Release(ctx, g); !errors.Is(err, client.ErrLockNotHeld) {
		t.Errorf("second release: %v", err)
	}

	// L4: a waiter's clock starts with its grant, not with its request.
	first, err := c.Acquire(ctx, s.ID, client.AcquireOptions{TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	second, err := c.Acquire(ctx, s.ID, client.AcquireOptions{TTL: time.Second}) // after the first one's TTL
	if err != nil || second.FencingToken <= first.FencingToken || time.Until(second.Deadline) < 900*time.Millisecond {
		t.Errorf("after the first holder's TTL: %+v %v", second, err)
	}
	if err := c.Release(ctx, second); err != nil {
		t.Error(err)
	}

	err = c.WithLock(ctx, s.ID, client.AcquireOptions{}, func(_ context.Context, data []byte) ([]byte, error) { return append(data, 'f'), nil })
	if err != nil {
		t.Errorf("with lock: %v", err)
	}
	failure := errors.New("mine")
	if err := c.WithLock(ctx, s.ID, client.AcquireOptions{}, func(context.Context, []byte) ([]byte, error) { return []byte("x"), failure }); !errors.Is(err, failure) {
		t.Errorf("with lock, failing: %v", err)
	}
	got, err := c.Read(ctx, s.ID)
	if err != nil || string(got.Data) != "df" {
		t.Fatalf("read: %+v %v", got, err)
	}

	watch, stop := context.WithCancel(ctx)
	defer stop()
	messages, err := c.Subscribe(watch, s.ID, got.Position, "one", "two")
	if err != nil {
		t.Fatal(err)
	}
	large := bytes.Repeat([]byte("x"), 3<<20)
	for _, m := range []struct {
		stream  string
		payload []byte
	}{{"one", []byte("1")}, {"three", nil}, {"two", large}, {"one", []byte("3")}} {
		if _, err := c.Publish(ctx, s.ID, m.stream, m.payload, client.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	var received []string
	for m, err := range messages {
		if err != nil {
			if !errors.Is(err, client.ErrSessionNotFound) {
				t.Error(err)
			}
			break
		}
		received = append(received, fmt.Sprint(m.Stream, len(m.Payload)))
		if len(received) == 3 {
			if destroyed, err := c.Destroy(ctx, s.ID); err != nil || !destroyed {
				t.Errorf("destroy: %v %v", destroyed, err)
			}
		}
	}
	if want := []string{"one1", fmt.Sprint("two", len(large)), "one1"}; !slices.Equal(received, want) {
		t.Errorf("received %v, want %v", received, want)
	}
	if _, err := c.Touch(ctx, s.ID); !errors.Is(err, client.ErrSessionNotFound) {
		t.Errorf("touch after destroy: %v", err)
	}
	if destroyed, err := c.Destroy(ctx, s.ID); err != nil || destroyed {
		t.Errorf("destroy again: %v %v", destroyed, err)
	}
}

// fake is a node that does as a test says.
type fake struct {
	sessiondv1.UnimplementedSessionServiceServer
	sessiondv1.UnimplementedLockServiceServer
	sessiondv1.UnimplementedMessageServiceServer

	calls     atomic.Int64
	saves     atomic.Int64
	stored    []byte
	read      func(call int64) error
	save      func(call int64) error
	release   func(call int64) error
	subscribe func(call int64, after uint64, send func(uint64)) error
	confirms  atomic.Int64
	confirm   func(call int64) error // nil: every subscription is confirmed
	attaches  atomic.Int64
	attach    func(call int64, hello *sessiondv1.AttachHello, stream sessiondv1.LockService_AttachServer) error
}

func (f *fake) Attach(stream sessiondv1.LockService_AttachServer) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	return f.attach(f.attaches.Add(1), m.GetHello(), stream)
}

func (f *fake) Read(context.Context, *sessiondv1.ReadRequest) (*sessiondv1.ReadResponse, error) {
	return &sessiondv1.ReadResponse{Session: &sessiondv1.Session{Data: f.stored, Revision: 9}}, f.read(f.calls.Add(1))
}

func (f *fake) Save(context.Context, *sessiondv1.SaveRequest) (*sessiondv1.SaveResponse, error) {
	return &sessiondv1.SaveResponse{Revision: 7}, f.save(f.saves.Add(1))
}

func (f *fake) Release(context.Context, *sessiondv1.ReleaseRequest) (*sessiondv1.ReleaseResponse, error) {
	return &sessiondv1.ReleaseResponse{}, f.release(f.calls.Add(1))
}

func (f *fake) Acquire(context.Context, *sessiondv1.AcquireRequest) (*sessiondv1.AcquireResponse, error) {
	return &sessiondv1.AcquireResponse{Grant: &sessiondv1.Grant{
		Ttl: durationpb.New(time.Minute), Waited: durationpb.New(time.Hour),
	}}, nil
}

func (f *fake) Subscribe(req *sessiondv1.SubscribeRequest, stream grpc.ServerStreamingServer[sessiondv1.SubscribeResponse]) error {
	if f.confirm != nil {
		if err := f.confirm(f.confirms.Add(1)); err != nil {
			return err
		}
	}
	if err := stream.Send(&sessiondv1.SubscribeResponse{Position: req.GetAfterPosition()}); err != nil {
		return err
	}
	return f.subscribe(f.calls.Add(1), req.GetAfterPosition(), func(position uint64) {
		_ = stream.Send(&sessiondv1.SubscribeResponse{Position: position, Messages: []*sessiondv1.Message{{Position: position}}})
	})
}

func (f *fake) start(t *testing.T, serving grpc_health_v1.HealthCheckResponse_ServingStatus) string {
	t.Helper()
	return f.startWith(t, serving, func(*grpc.Server) {})
}

func (f *fake) startWith(t *testing.T, serving grpc_health_v1.HealthCheckResponse_ServingStatus, register func(*grpc.Server)) string {
	t.Helper()
	return f.startOn(t, "127.0.0.1:0", serving, register)
}

func (f *fake) startOn(t *testing.T, address string, serving grpc_health_v1.HealthCheckResponse_ServingStatus, register func(*grpc.Server)) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	sessiondv1.RegisterSessionServiceServer(srv, f)
	sessiondv1.RegisterLockServiceServer(srv, f)
	sessiondv1.RegisterMessageServiceServer(srv, f)
	register(srv)
	hs := health.NewServer()
	hs.SetServingStatus("", serving)
	grpc_health_v1.RegisterHealthServer(srv, hs)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	t.Cleanup(func() {
		srv.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

func newClient(t *testing.T, addresses ...string) *client.Client {
	t.Helper()
	c, err := client.New(addresses, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func failure(code codes.Code, reason string) error {
	st, err := status.New(code, "what went wrong").WithDetails(
		&errdetails.ErrorInfo{Domain: "sessiond", Reason: reason, Metadata: map[string]string{"limit": "7"}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Second)})
	if err != nil {
		panic(err)
	}
	return st.Err()
}

// C1: every reason has an error of its own, with the facts that came with it.
func TestC1EveryReasonHasItsError(t *testing.T) {
	f := &fake{}
	c := newClient(t, f.start(t, grpc_health_v1.HealthCheckResponse_SERVING))
	seen := map[error]string{}
	for value, name := range sessiondv1.ErrorReason_name {
		if value == 0 {
			continue
		}
		reason := name[len("ERROR_REASON_"):]
		f.read = func(int64) error { return failure(codes.Aborted, reason) }
		_, err := c.Read(t.Context(), "x")
		e, ok := errors.AsType[*client.Error](err)
		if !ok || int32(e.Reason) != value || e.Metadata["limit"] != "7" || e.RetryAfter != time.Second || e.Message != "what went wrong" {
			t.Errorf("%s: %#v", reason, err)
			continue
		}
		kind := errors.Unwrap(e)
		if other, ok := seen[kind]; ok && !errors.Is(kind, client.ErrUnavailable) {
			t.Errorf("%s and %s are both %v", reason, other, kind)
		}
		if errors.Is(kind, client.ErrInternal) != (reason == "INTERNAL") {
			t.Errorf("%s has no error of its own", reason)
		}
		seen[kind] = reason
	}
}

// C1: what another node may do better is retried, and what says that the backend failed is not (L9).
func TestC1Retries(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		calls int64
		want  error
	}{
		"no node":          {status.Error(codes.Unavailable, "gone"), 3, nil},
		"shutting down":    {failure(codes.Unavailable, "SHUTTING_DOWN"), 3, nil},
		"backend":          {failure(codes.Unavailable, "BACKEND_UNAVAILABLE"), 1, client.ErrUnavailable},
		"missing":          {failure(codes.NotFound, "SESSION_NOT_FOUND"), 1, client.ErrSessionNotFound},
		"without a reason": {status.Error(codes.Unknown, "?"), 1, client.ErrInternal},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fake{read: func(call int64) error {
				if call < 3 {
					return c.err
				}
				return nil
			}}
			_, err := newClient(t, f.start(t, grpc_health_v1.HealthCheckResponse_SERVING)).Read(t.Context(), "x")
			if !errors.Is(err, c.want) || f.calls.Load() != c.calls {
				t.Errorf("%v after %d calls, want %v after %d", err, f.calls.Load(), c.want, c.calls)
			}
		})
	}
}

// C1: what becomes of a save that was cut off: with a condition it is found out, without one it is said to be unknown.
func TestC1SaveCutOff(t *testing.T) {
	lost := status.Error(codes.Unavailable, "connection lost")
	grant := client.SaveOptions{Grant: &client.Grant{FencingToken: 1, RequestID: "r"}, Release: true}
	for name, c := range map[string]struct {
		opts     client.SaveOptions
		second   error
		stored   string
		saves    int64
		revision uint64
		want     error
	}{
		"no condition":                    {client.SaveOptions{}, nil, "", 1, 0, client.ErrOutcomeUnknown},
		"not carried out":                 {grant, nil, "", 2, 7, nil},
		"carried out, released":           {grant, failure(codes.Aborted, "LOCK_LOST"), "new", 2, 9, nil},
		"lock lost, or saved over since":  {grant, failure(codes.Aborted, "LOCK_LOST"), "other", 2, 0, client.ErrOutcomeUnknown},
		"carried out, revision":           {client.SaveOptions{ExpectedRevision: 3}, failure(codes.Aborted, "REVISION_MISMATCH"), "new", 2, 9, nil},
		"locked since, carried out":       {client.SaveOptions{ExpectedRevision: 3}, failure(codes.Aborted, "SESSION_LOCKED"), "new", 2, 9, nil},
		"locked since":                    {client.SaveOptions{ExpectedRevision: 3}, failure(codes.Aborted, "SESSION_LOCKED"), "other", 2, 0, client.ErrOutcomeUnknown},
		"session gone":                    {grant, failure(codes.NotFound, "SESSION_NOT_FOUND"), "", 2, 0, client.ErrSessionNotFound},
		"session gone since, unknown":     {grant, failure(codes.NotFound, "SESSION_NOT_FOUND"), "", 2, 0, client.ErrOutcomeUnknown},
		"etcd gone meanwhile":             {grant, failure(codes.Unavailable, "BACKEND_UNAVAILABLE"), "", 2, 0, client.ErrOutcomeUnknown},
		"shutting down, with a condition": {grant, failure(codes.Unavailable, "SHUTTING_DOWN"), "", 2, 7, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fake{stored: []byte(c.stored), read: func(int64) error { return nil }}
			f.save = func(call int64) error {
				switch call {
				case 1:
					return lost
				case 2:
					return c.second
				default:
					return nil
				}
			}
			if name == "shutting down, with a condition" {
				f.save = func(call int64) error {
					if call == 1 {
						return c.second
					}
					return nil
				}
			}
			revision, err := newClient(t, f.start(t, grpc_health_v1.HealthCheckResponse_SERVING)).Save(t.Context(), "x", []byte("new"), c.opts)
			if !errors.Is(err, c.want) || revision != c.revision || f.saves.Load() != c.saves {
				t.Errorf("revision %d, %v after %d saves; want %d, %v after %d", revision, err, f.saves.Load(), c.revision, c.want, c.saves)
			}
		})
	}
}

// C1: a node that shuts down has not begun with what it refuses: another one does it, a create too.
func TestC1RefusedUnseenIsRetried(t *testing.T) {
	f := &fake{save: func(call int64) error {
		if call < 3 {
			return failure(codes.Unavailable, "SHUTTING_DOWN")
		}
		return nil
	}}
	if _, err := newClient(t, f.start(t, grpc_health_v1.HealthCheckResponse_SERVING)).Save(t.Context(), "x", nil, client.SaveOptions{}); err != nil {
		t.Error(err)
	}
}

// unused returns an address at which nobody listens.
func unused(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return l.Addr().String()
}

// C1: what no node has seen has no unknown outcome, and is tried again, a create too.
func TestC1UnsentIsKnown(t *testing.T) {
	address := unused(t)
	for _, unary := range []bool{false, true} {
		tries := 0
		count := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, next grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			tries++
			return next(ctx, method, req, reply, cc, opts...)
		}
		c, err := client.New([]string{address}, client.Options{Unary: unary, DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(count)}})
		if err != nil {
			t.Fatal(err)
		}
		for name, do := range map[string]func() error{
			"create": func() error { _, err := c.Create(t.Context(), nil, client.CreateOptions{}); return err },
			"save":   func() error { _, err := c.Save(t.Context(), "x", nil, client.SaveOptions{}); return err },
		} {
			tries = 0
			if err := do(); !errors.Is(err, client.ErrUnavailable) || errors.Is(err, client.ErrOutcomeUnknown) || tries != 4 {
				t.Errorf("%s with no node, unary %v: %v, %d tries", name, unary, err, tries)
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// C1: a save that no node has seen is carried out by the first that is there, and once.
func TestC1UnsentIsTriedAgain(t *testing.T) {
	address := unused(t)
	f := &fake{save: func(int64) error { return nil }}
	tries := 0
	meet := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, next grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if tries++; tries == 2 {
			f.startOn(t, address, grpc_health_v1.HealthCheckResponse_SERVING, func(*grpc.Server) {})
			for state := cc.GetState(); state != connectivity.Ready && cc.WaitForStateChange(ctx, state); state = cc.GetState() {
			}
		}
		return next(ctx, method, req, reply, cc, opts...)
	}
	c, err := client.New([]string{address}, client.Options{DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(meet)}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Save(t.Context(), "x", nil, client.SaveOptions{}); err != nil || tries != 2 || f.saves.Load() != 1 {
		t.Errorf("%v after %d tries, %d saves", err, tries, f.saves.Load())
	}
}

// L7: a release whose answer was lost, found not held by the next try, has succeeded.
func TestL7ReleaseAfterALostAnswer(t *testing.T) {
	f := &fake{release: func(call int64) error {
		if call == 1 {
			return status.Error(codes.Unavailable, "connection lost")
		}
		return failure(codes.FailedPrecondition, "LOCK_NOT_HELD")
	}}
	c := newClient(t, f.start(t, grpc_health_v1.HealthCheckResponse_SERVING))
	if err := c.Release(t.Context(), client.Grant{}); err != nil {
		t.Error(err)
	}
	if err := c.Release(t.Context(), client.Grant{}); !errors.Is(err, client.ErrLockNotHeld) {
		t.Errorf("a release of what is not held: %v", err)
	}
}

// L4: the holder's clock starts when the node answered, not when the request was sent: a long wait does not eat the TTL.
func TestL4DeadlineAfterAWait(t *testing.T) {
	f := &fake{}
	g, err := newClient(t, f.start(t, grpc_health_v1.HealthCheckResponse_SERVING)).Acquire(t.Context(), "x", client.AcquireOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if left := time.Until(g.Deadline); left < time.Hour || left > time.Hour+time.Minute {
		t.Errorf("%s left of the TTL", left)
	}
}

// C1: a dead node and one that is not healthy get no calls.
func TestC1Failover(t *testing.T) {
	dead, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	ok := func(int64) error { return nil }
	good, sick := &fake{read: ok}, &fake{read: ok}
	c := newClient(t, dead.Addr().String(), sick.start(t, grpc_health_v1.HealthCheckResponse_NOT_SERVING),
		good.start(t, grpc_health_v1.HealthCheckResponse_SERVING))
	for range 50 {
		if _, err := c.Read(t.Context(), "x"); err != nil {
			t.Fatal(err)
		}
	}
	if sick.calls.Load() != 0 || good.calls.Load() != 50 {
		t.Errorf("%d calls to the sick node, %d to the good one", sick.calls.Load(), good.calls.Load())
	}
	if err := c.Ready(t.Context()); err != nil {
		t.Errorf("ready: %v", err)
	}
}

func TestC1NobodyThere(t *testing.T) {
	f := &fake{}
	c := newClient(t, f.start(t, grpc_health_v1.HealthCheckResponse_NOT_SERVING))
	if err := c.Ready(t.Context()); !errors.Is(err, client.ErrUnavailable) {
		t.Errorf("ready: %v", err)
	}
	if _, err := c.Read(t.Context(), "x"); !errors.Is(err, client.ErrUnavailable) {
		t.Errorf("read: %v", err)
	}
}

// M2: a subscription whose connection breaks goes on after the last position, each message once.
func TestM2SubscriptionGoesOnAfterABreak(t *testing.T) {
	f := &fake{subscribe: func(call int64, after uint64, send func(uint64)) error {
		if call == 4 {
			return failure(codes.NotFound, "SESSION_NOT_FOUND")
		}
		for position := max(after, 1); position <= after+2; position++ { // the first is one that came before
			send(position)
		}
		if call%2 == 0 {
			return nil
		}
		return status.Error(codes.Unavailable, "connection lost")
	}}
	messages, err := newClient(t, f.start(t, grpc_health_v1.HealthCheckResponse_SERVING)).Subscribe(t.Context(), "x", 0, "s")
	if err != nil {
		t.Fatal(err)
	}
	var positions []uint64
	for m, err := range messages {
		if err != nil {
			if !errors.Is(err, client.ErrSessionNotFound) {
				t.Error(err)
			}
			break
		}
		positions = append(positions, m.Position)
	}
	if want := []uint64{1, 2, 3, 4, 5, 6}; !slices.Equal(positions, want) {
		t.Errorf("positions %v, want %v", positions, want)
	}
}

// C1: a node that dies over a new subscription is not the caller's concern while another one serves; one that cannot reach
// its backend is heard at once.
func TestC1SubscribeIsTriedAgain(t *testing.T) {
	for reason, want := range map[string]struct {
		calls int64
		err   error
	}{"": {2, nil}, "BACKEND_UNAVAILABLE": {1, client.ErrUnavailable}} {
		f := &fake{}
		f.confirm = func(call int64) error {
			switch {
			case call > 1:
				return nil
			case reason == "":
				return status.Error(codes.Unavailable, "connection lost")
			default:
				return failure(codes.Unavailable, reason)
			}
		}
		f.subscribe = func(int64, uint64, func(uint64)) error { return nil }
		ctx, cancel := context.WithCancel(t.Context())
		_, err := newClient(t, f.start(t, grpc_health_v1.HealthCheckResponse_SERVING)).Subscribe(ctx, "x", 0, "s")
		cancel()
		if calls := f.confirms.Load(); !errors.Is(err, want.err) || calls != want.calls {
			t.Errorf("%s: %d calls, %v; want %d calls, %v", reason, calls, err, want.calls, want.err)
		}
	}
}

func TestNewRefusesBadAddresses(t *testing.T) {
	for _, addresses := range [][]string{nil, {""}, {"localhost"}, {"127.0.0.1:1", "x"}} {
		if c, err := client.New(addresses, client.Options{}); err == nil {
			_ = c.Close()
			t.Errorf("%q accepted", addresses)
		}
	}
}

// L9: a client that waits for a lock learns within seconds that its nodes fell silent without a word, long before the lock's
// timeout and gRPC's own keep-alive; when they are heard again, so is it.
func TestL9NodesFallSilent(t *testing.T) {
	node := sessiondtest.Start(t, func(c *sessiond.Config) { c.Store = sessiond.StoreMemory })
	link := sessiondtest.StartLink(t, node.Addr())
	c, err := client.New([]string{link.Addr()}, client.Options{Attach: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	attached := func(want bool) {
		t.Helper()
		if err := sessiondtest.Poll(ctx, func(context.Context) error {
			if c.Attached() != want {
				return fmt.Errorf("attached: %t, want %t", c.Attached(), want)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	attached(true)
	s, err := node.Client().Create(ctx, []byte("x"), client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	grant, err := node.Client().Acquire(ctx, s.ID, client.AcquireOptions{})
	if err != nil {
		t.Fatal(err)
	}
	link.Freeze()
	began := time.Now()
	if _, err := c.Acquire(ctx, s.ID, client.AcquireOptions{}); !errors.Is(err, client.ErrUnavailable) {
		t.Errorf("the nodes are silent: %v", err)
	}
	// The node's sign of life is due every second; then the nodes are asked for one.
	if took := time.Since(began); took > 6*time.Second {
		t.Errorf("found out after %s", took)
	}
	link.Thaw()
	attached(true)
	if err := node.Client().Release(ctx, grant); err != nil {
		t.Fatal(err)
	}
	again, err := c.Acquire(ctx, s.ID, client.AcquireOptions{})
	if err != nil {
		t.Fatalf("the nodes are back: %v", err)
	}
	if err := c.Release(ctx, again); err != nil {
		t.Error(err)
	}
}

// L10: a node that is late with its sign of life, or with its answer to a hello, is not hung up on before the client is attached anew. It
// would count the client as gone and, as slow as it is, release its locks.
func TestL10SlowNode(t *testing.T) {
	attached := func(stream sessiondv1.LockService_AttachServer, every time.Duration) error {
		return stream.Send(&sessiondv1.AttachResponse{Message: &sessiondv1.AttachResponse_Attached{
			Attached: &sessiondv1.AttachAttached{Grace: durationpb.New(time.Second), PingInterval: durationpb.New(every)},
		}})
	}
	silent := make(chan context.Context, 2)
	anew := make(chan []context.Context, 1) // those that are not hung up before
	f := &fake{attach: func(call int64, hello *sessiondv1.AttachHello, stream sessiondv1.LockService_AttachServer) error {
		ctx := stream.Context()
		if call > 3 || hello.GetNumber() != uint64(call) {
			t.Errorf("attach %d has the number %d", call, hello.GetNumber())
			return nil
		}
		switch call {
		case 1: // no sign of life
			silent <- ctx
			if err := attached(stream, time.Millisecond); err != nil {
				t.Error(err)
			}
		case 2: // no answer
			silent <- ctx
		case 3:
			earlier := []context.Context{<-silent, <-silent}
			for i, ctx := range earlier {
				if ctx.Err() != nil {
					t.Errorf("stream %d was hung up", i+1)
				}
			}
			if err := attached(stream, time.Hour); err != nil {
				t.Error(err)
			}
			anew <- earlier
		}
		<-ctx.Done()
		return ctx.Err()
	}}
	c, err := client.New([]string{f.start(t, grpc_health_v1.HealthCheckResponse_SERVING)}, client.Options{Attach: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	for _, ctx := range <-anew {
		<-ctx.Done()
	}
	if !c.Attached() {
		t.Error("the client is not attached")
	}
}
