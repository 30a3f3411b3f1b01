package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sessiond/sessiond/client"
	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
)

// sharer is a node whose shared streams do as a test says.
type sharer struct {
	fake
	sessiondv1.UnimplementedMultiplexServiceServer

	streams atomic.Int64
	shared  atomic.Int64
	// serve gets each call of a stream; it returns false to break the stream.
	serve func(s *sharerStream, call *sessiondv1.MultiplexCall) bool
	// told gets what comes beside calls, with io.EOF at the end of it.
	told func(s *sharerStream, r *sessiondv1.MultiplexRequest, err error)
}

type sharerStream struct {
	grpc.BidiStreamingServer[sessiondv1.MultiplexRequest, sessiondv1.MultiplexResponse]

	mu sync.Mutex
}

func (s *sharerStream) send(r *sessiondv1.MultiplexResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.Send(r)
}

func (s *sharerStream) answer(id uint64, m proto.Message, err error) {
	a := &sessiondv1.MultiplexAnswer{Id: id}
	if err != nil {
		a.Status, _ = proto.Marshal(status.Convert(err).Proto())
	} else {
		a.Response, _ = proto.Marshal(m)
	}
	s.send(&sessiondv1.MultiplexResponse{Answers: []*sessiondv1.MultiplexAnswer{a}})
}

func (f *sharer) Multiplex(stream grpc.BidiStreamingServer[sessiondv1.MultiplexRequest, sessiondv1.MultiplexResponse]) error {
	f.streams.Add(1)
	s := &sharerStream{BidiStreamingServer: stream}
	s.send(&sessiondv1.MultiplexResponse{})
	for {
		r, err := stream.Recv()
		if f.told != nil {
			f.told(s, r, err)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, call := range r.GetCalls() {
			f.shared.Add(1)
			if !f.serve(s, call) {
				return status.Error(codes.Unavailable, "broken")
			}
		}
	}
}

func startSharer(t *testing.T, f *sharer) string {
	t.Helper()
	if f.read == nil {
		f.read = func(int64) error { return nil }
	}
	if f.serve == nil {
		f.serve = func(s *sharerStream, call *sessiondv1.MultiplexCall) bool {
			s.answer(call.GetId(), &sessiondv1.ReadResponse{}, nil)
			return true
		}
	}
	return f.startWith(t, grpc_health_v1.HealthCheckResponse_SERVING, func(srv *grpc.Server) {
		sessiondv1.RegisterMultiplexServiceServer(srv, f)
	})
}

// share makes calls until they go over a shared stream.
func share(t *testing.T, c *client.Client, nodes ...*sharer) {
	t.Helper()
	for _, f := range nodes {
		before := f.shared.Load()
		for n := 0; f.shared.Load() == before; n++ { // of as many sessions as it takes until one is this node's
			if _, err := c.Read(t.Context(), fmt.Sprint("x", n)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// C1: calls share one stream to each node, with deadline and metadata; an error arrives as from a unary call.
func TestC1CallsShareAStream(t *testing.T) {
	calls := make(chan *sessiondv1.MultiplexCall, 1)
	a, b := &sharer{}, &sharer{}
	addresses := []string{startSharer(t, a), startSharer(t, b)}
	withToken := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, next grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		return next(metadata.AppendToOutgoingContext(ctx, "token", "1", "token", "2"), method, req, reply, cc, opts...)
	}
	c, err := client.New(addresses, client.Options{DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(withToken)}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	share(t, c, a, b)
	ofA, ofB := a.shared.Load(), b.shared.Load()
	plain := a.calls.Load() + b.calls.Load()
	var callers sync.WaitGroup
	for range 10 {
		callers.Go(func() {
			for n := range 10 {
				if _, err := c.Read(t.Context(), fmt.Sprint("x", n)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	callers.Wait()
	ofA, ofB = a.shared.Load()-ofA, b.shared.Load()-ofB
	if ofA == 0 || ofB == 0 || ofA+ofB != 100 || a.calls.Load()+b.calls.Load() != plain {
		t.Errorf("%d and %d of 100 calls on shared streams", ofA, ofB)
	}
	if a.streams.Load() != 1 || b.streams.Load() != 1 {
		t.Errorf("%d and %d streams", a.streams.Load(), b.streams.Load())
	}
	a.serve = func(s *sharerStream, call *sessiondv1.MultiplexCall) bool {
		s.answer(call.GetId(), nil, failure(codes.NotFound, "SESSION_NOT_FOUND"))
		calls <- call
		return true
	}
	b.serve = a.serve
	_, err = c.Read(t.Context(), "x")
	e, ok := errors.AsType[*client.Error](err)
	if !ok || !errors.Is(err, client.ErrSessionNotFound) || e.Metadata["limit"] != "7" || e.RetryAfter != time.Second || e.Message != "what went wrong" {
		t.Errorf("an error: %#v", err)
	}
	call := <-calls
	limit := uint64(client.DefaultCallTimeout.Microseconds())
	if got := call.GetTimeoutUs(); got > limit || got < limit/2 {
		t.Errorf("%d µs until the deadline, want %d", got, limit)
	}
	if md := call.GetMetadata(); len(md) != 2 || md[0].GetKey() != "token" || string(md[1].GetValue()) != "2" {
		t.Errorf("metadata %v", md)
	}
}

// C1: a node that does not know of shared streams, a client that wants none, and a large request get unary calls.
func TestC1UnaryCalls(t *testing.T) {
	ok := func(int64) error { return nil }
	old := &fake{read: ok}
	c := newClient(t, old.start(t, grpc_health_v1.HealthCheckResponse_SERVING))
	for range 50 {
		if _, err := c.Read(t.Context(), "x"); err != nil {
			t.Fatal(err)
		}
	}
	if old.calls.Load() != 50 {
		t.Errorf("%d calls to an old node", old.calls.Load())
	}

	f := &sharer{fake: fake{save: ok}}
	address := startSharer(t, f)
	c = newClient(t, address)
	share(t, c, f)
	before := f.shared.Load()
	if _, err := c.Save(t.Context(), "x", make([]byte, 1<<20), client.SaveOptions{}); err != nil || f.saves.Load() != 1 || f.shared.Load() != before {
		t.Errorf("save 1 MiB: %v, %d unary calls", err, f.saves.Load())
	}

	unary, err := client.New([]string{address}, client.Options{Unary: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unary.Close() }()
	for range 50 {
		if _, err := unary.Read(t.Context(), "x"); err != nil {
			t.Fatal(err)
		}
	}
	if f.streams.Load() != 1 || f.shared.Load() != before {
		t.Errorf("a client that wants unary calls opened a stream")
	}
}

// C1: a call that was on a stream when that broke is retried if it may be, and has an unknown outcome if not, as on a connection of its own.
func TestC1SharedStreamBreaks(t *testing.T) {
	f := &sharer{fake: fake{save: func(int64) error { return nil }}}
	c := newClient(t, startSharer(t, f))
	share(t, c, f)
	served := f.serve
	f.serve = func(*sharerStream, *sessiondv1.MultiplexCall) bool { return false }
	before := f.calls.Load()
	if _, err := c.Read(t.Context(), "x"); err != nil || f.calls.Load() != before+1 {
		t.Errorf("read: %v, %d unary calls", err, f.calls.Load()-before)
	}
	f.serve = served
	share(t, c, f)
	if f.streams.Load() != 2 {
		t.Errorf("%d streams", f.streams.Load())
	}
	f.serve = func(*sharerStream, *sessiondv1.MultiplexCall) bool { return false }
	if _, err := c.Save(t.Context(), "x", nil, client.SaveOptions{}); !errors.Is(err, client.ErrOutcomeUnknown) || f.saves.Load() != 0 {
		t.Errorf("save without a condition: %v, %d unary calls", err, f.saves.Load())
	}
	f.serve = served
	share(t, c, f)
	f.serve = func(*sharerStream, *sessiondv1.MultiplexCall) bool { return false }
	if _, err := c.Save(t.Context(), "x", nil, client.SaveOptions{ExpectedRevision: 1}); err != nil || f.saves.Load() != 1 {
		t.Errorf("save with a condition: %v, %d unary calls", err, f.saves.Load())
	}
}

// C1: calls end with their contexts, and the node is told; others on the stream go on.
func TestC1SharedCallsEndWithTheirContexts(t *testing.T) {
	given := make(chan uint64, 10)
	begun := make(chan uint64, 10)
	f := &sharer{told: func(_ *sharerStream, r *sessiondv1.MultiplexRequest, _ error) {
		for _, id := range r.GetCancelled() {
			given <- id
		}
	}}
	c := newClient(t, startSharer(t, f))
	share(t, c, f)
	f.serve = func(_ *sharerStream, call *sessiondv1.MultiplexCall) bool {
		begun <- call.GetId()
		return true
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Read(ctx, "x"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("at the deadline: %v", err)
	}
	if first, told := <-begun, <-given; first != told {
		t.Errorf("call %d, cancelled %d", first, told)
	}
	ctx, cancel = context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := c.Read(ctx, "x")
		ended <- err
	}()
	second := <-begun
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if told := <-given; told != second {
		t.Errorf("call %d, cancelled %d", second, told)
	}
	f.serve = func(s *sharerStream, call *sessiondv1.MultiplexCall) bool {
		s.answer(second, &sessiondv1.ReadResponse{}, nil) // too late
		s.answer(call.GetId(), &sessiondv1.ReadResponse{}, nil)
		return true
	}
	if _, err := c.Read(t.Context(), "x"); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// C1: a node that shuts down gets no more calls on its stream, and answers those that it has.
func TestC1SharedStreamDrains(t *testing.T) {
	begun, ended := make(chan *sharerStream, 1), make(chan error, 1)
	var waiting uint64
	f := &sharer{told: func(s *sharerStream, _ *sessiondv1.MultiplexRequest, err error) {
		if errors.Is(err, io.EOF) {
			s.answer(waiting, &sessiondv1.ReadResponse{Position: 7}, nil)
		}
	}}
	c := newClient(t, startSharer(t, f))
	share(t, c, f)
	f.serve = func(s *sharerStream, call *sessiondv1.MultiplexCall) bool {
		waiting = call.GetId()
		begun <- s
		return true
	}
	go func() {
		s, err := c.Read(t.Context(), "x")
		if err == nil && s.Position != 7 {
			err = errors.New("another answer")
		}
		ended <- err
	}()
	s := <-begun
	s.send(&sessiondv1.MultiplexResponse{Draining: true})
	if err := <-ended; err != nil {
		t.Errorf("the call that the node had: %v", err)
	}
	before, plain := f.shared.Load(), f.calls.Load()
	if _, err := c.Read(t.Context(), "x"); err != nil || f.shared.Load() != before || f.calls.Load() != plain+1 {
		t.Errorf("the next one: %v, %d unary calls", err, f.calls.Load()-plain)
	}
}

// C1: Close ends calls under way.
func TestC1CloseEndsSharedCalls(t *testing.T) {
	f := &sharer{}
	c := newClient(t, startSharer(t, f))
	share(t, c, f)
	begun, ended := make(chan bool, 1), make(chan error, 1)
	f.serve = func(*sharerStream, *sessiondv1.MultiplexCall) bool {
		begun <- true
		return true
	}
	go func() {
		_, err := c.Save(t.Context(), "x", nil, client.SaveOptions{})
		ended <- err
	}()
	<-begun
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, client.ErrUnavailable) || !errors.Is(err, client.ErrOutcomeUnknown) {
		t.Errorf("save when the client was closed: %v", err)
	}
}

// C1: many callers at once, on a real node: large answers and small ones, each to whom it belongs.
func TestC1ManySharedCalls(t *testing.T) {
	c := startNodeWith(t, sessiond.Config{Store: sessiond.StoreMemory})
	var callers sync.WaitGroup
	for i := range 32 {
		callers.Go(func() {
			data := bytes.Repeat([]byte{byte(i)}, 1+i*10_000)
			s, err := c.Create(t.Context(), data, client.CreateOptions{})
			if err != nil {
				t.Error(err)
				return
			}
			for range 10 {
				err := c.WithLock(t.Context(), s.ID, client.AcquireOptions{}, func(_ context.Context, got []byte) ([]byte, error) {
					if !bytes.Equal(got, data) {
						t.Errorf("caller %d read %d bytes, want %d", i, len(got), len(data))
					}
					return data, nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	callers.Wait()
}
