package sessiond_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
)

const (
	createMethod     = "/sessiond.v1.SessionService/Create"
	readMethod       = "/sessiond.v1.SessionService/Read"
	saveMethod       = "/sessiond.v1.SessionService/Save"
	acquireMethod    = "/sessiond.v1.LockService/Acquire"
	tryAcquireMethod = "/sessiond.v1.LockService/TryAcquire"
	releaseMethod    = "/sessiond.v1.LockService/Release"
)

// sharing is a stream that carries calls.
type sharing struct {
	t      *testing.T
	leave  context.CancelFunc
	stream grpc.BidiStreamingClient[sessiondv1.MultiplexRequest, sessiondv1.MultiplexResponse]
	queue  []*sessiondv1.MultiplexAnswer
	parts  map[uint64][]byte
	drains bool
}

// share opens a stream.
func (n *node) share(t *testing.T) *sharing {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	stream, err := sessiondv1.NewMultiplexServiceClient(n.conn).Multiplex(ctx)
	if err != nil {
		t.Fatal(err)
	}
	hello, err := stream.Recv()
	if err != nil || proto.Size(hello) != 0 {
		t.Fatalf("first response: %v %v", hello, err)
	}
	return &sharing{t: t, leave: cancel, stream: stream, parts: map[uint64][]byte{}}
}

// begin sends a call.
func (s *sharing) begin(id uint64, method string, request proto.Message, timeout time.Duration) {
	s.t.Helper()
	encoded, err := proto.Marshal(request)
	if err != nil {
		s.t.Fatal(err)
	}
	s.send(&sessiondv1.MultiplexRequest{Calls: []*sessiondv1.MultiplexCall{
		{Id: id, Method: method, Request: encoded, TimeoutUs: uint64(timeout.Microseconds())},
	}})
}

func (s *sharing) send(r *sessiondv1.MultiplexRequest) {
	s.t.Helper()
	if err := s.stream.Send(r); err != nil {
		s.t.Fatal(err)
	}
}

// next returns the next answer, or the error that the stream ends with.
func (s *sharing) next() (*sessiondv1.MultiplexAnswer, error) {
	for {
		for len(s.queue) > 0 {
			a := s.queue[0]
			s.queue = s.queue[1:]
			s.parts[a.GetId()] = append(s.parts[a.GetId()], a.GetResponse()...)
			if !a.GetMore() {
				a.Response = s.parts[a.GetId()]
				delete(s.parts, a.GetId())
				return a, nil
			}
		}
		r, err := s.stream.Recv()
		if err != nil {
			return nil, err
		}
		s.drains = s.drains || r.GetDraining()
		s.queue = r.GetAnswers()
	}
}

// want takes the next answer, which must be to this call, and decodes it.
func (s *sharing) want(id uint64, into proto.Message) error {
	s.t.Helper()
	a, err := s.next()
	if err != nil || a.GetId() != id {
		s.t.Fatalf("answer to %d, %v; want one to %d", a.GetId(), err, id)
	}
	if len(a.GetStatus()) > 0 {
		return statusOf(s.t, a)
	}
	if err := proto.Unmarshal(a.GetResponse(), into); err != nil {
		s.t.Fatal(err)
	}
	return nil
}

// statusOf is how a call ended that failed.
func statusOf(t *testing.T, a *sessiondv1.MultiplexAnswer) error {
	t.Helper()
	var st spb.Status
	if err := proto.Unmarshal(a.GetStatus(), &st); err != nil {
		t.Fatal(err)
	}
	return status.ErrorProto(&st)
}

// A call on a shared stream ends as a unary one does: with the same answer, or the same status and details.
func TestSharedCallsAreLikeUnaryOnes(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.startWith(t, 1, sessiond.Config{MaxSessionBytes: 1000})[0]
		id := n.create(t, "data")
		held := n.create(t, "")
		n.acquire(t, &sessiondv1.AcquireRequest{SessionId: held, Holder: "me"})
		s := n.share(t)
		for i, c := range []struct {
			method            string
			request, response proto.Message
		}{
			{readMethod, &sessiondv1.ReadRequest{SessionId: id}, &sessiondv1.ReadResponse{}},
			{readMethod, &sessiondv1.ReadRequest{SessionId: "none"}, &sessiondv1.ReadResponse{}},
			{readMethod, &sessiondv1.ReadRequest{SessionId: "a b"}, &sessiondv1.ReadResponse{}},
			{createMethod, &sessiondv1.CreateRequest{SessionId: id}, &sessiondv1.CreateResponse{}},
			{saveMethod, &sessiondv1.SaveRequest{SessionId: id, Data: make([]byte, 2000)}, &sessiondv1.SaveResponse{}},
			{saveMethod, &sessiondv1.SaveRequest{SessionId: held}, &sessiondv1.SaveResponse{}},
			{saveMethod, &sessiondv1.SaveRequest{SessionId: id, ExpectedRevision: new(uint64(99))}, &sessiondv1.SaveResponse{}},
			{acquireMethod, &sessiondv1.AcquireRequest{SessionId: held, Timeout: seconds(0)}, &sessiondv1.AcquireResponse{}},
			{acquireMethod, &sessiondv1.AcquireRequest{SessionId: held, Holder: "me"}, &sessiondv1.AcquireResponse{}},
			{tryAcquireMethod, &sessiondv1.TryAcquireRequest{SessionId: held}, &sessiondv1.TryAcquireResponse{}},
			{releaseMethod, &sessiondv1.ReleaseRequest{SessionId: id, FencingToken: 1}, &sessiondv1.ReleaseResponse{}},
			{"/sessiond.v1.SessionService/None", &sessiondv1.ReadRequest{}, &sessiondv1.ReadResponse{}},
			{"/sessiond.v1.MultiplexService/Multiplex", &sessiondv1.ReadRequest{}, &sessiondv1.ReadResponse{}},
			{"/sessiond.v1.LockService/Attach", &sessiondv1.AttachRequest{}, &sessiondv1.AttachResponse{}},
		} {
			want := proto.Clone(c.response)
			var wantErr error
			if strings.HasSuffix(c.method, "/Multiplex") || strings.HasSuffix(c.method, "/Attach") {
				wantErr = status.Error(codes.Unimplemented, "takes a stream of requests")
			} else {
				wantErr = n.conn.Invoke(t.Context(), c.method, c.request, want)
			}
			s.begin(uint64(i), c.method, c.request, time.Minute)
			err := s.want(uint64(i), c.response)
			if status.Code(wantErr) == codes.Unimplemented && status.Code(err) == codes.Unimplemented && strings.Contains(err.Error(), c.method) {
				continue // gRPC's own text
			}
			if !proto.Equal(c.response, want) || !sameStatus(err, wantErr) {
				t.Errorf("%s(%v): %v, %v; as a unary call: %v, %v", c.method, c.request, c.response, err, want, wantErr)
			}
		}
	})
}

// sameStatus compares details decoded: maps in them are encoded in any order.
func sameStatus(err, want error) bool {
	a, b := status.Convert(err), status.Convert(want)
	return a.Code() == b.Code() && a.Message() == b.Message() && slices.EqualFunc(a.Details(), b.Details(), func(x, y any) bool {
		m, isMessage := x.(proto.Message)
		n, other := y.(proto.Message)
		return isMessage && other && proto.Equal(m, n)
	})
}

// L6, L8: who waits on a shared stream holds up nobody, and gives up its place by its deadline, by cancelling, and with the stream.
func TestSharedCallsThatWait(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "data")
		grant := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		s, broken := n.share(t), n.share(t)
		acquire := &sessiondv1.AcquireRequest{SessionId: id, Timeout: seconds(600)}
		s.begin(1, acquireMethod, acquire, 10*time.Second)
		s.begin(2, acquireMethod, acquire, 0)
		broken.begin(3, acquireMethod, acquire, time.Minute)
		s.begin(4, acquireMethod, acquire, time.Minute)
		s.begin(5, readMethod, &sessiondv1.ReadRequest{SessionId: id}, time.Minute)
		if err := s.want(5, &sessiondv1.ReadResponse{}); err != nil {
			t.Errorf("read beside calls that wait: %v", err)
		}
		began := time.Now()
		if err := s.want(1, nil); status.Code(err) != codes.DeadlineExceeded || time.Since(began) > 11*time.Second {
			t.Errorf("at its deadline: %v after %v", err, time.Since(began))
		}
		s.send(&sessiondv1.MultiplexRequest{Cancelled: []uint64{2, 77}})
		broken.leave()
		synctest.Wait()
		n.release(t, grant)
		var granted sessiondv1.AcquireResponse
		if err := s.want(4, &granted); err != nil || string(granted.GetSession().GetData()) != "" {
			t.Errorf("the one that still waits: %v, %v", &granted, err)
		}
		n.release(t, granted.GetGrant())
		if free, err := n.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id}); err != nil || !free.GetAcquired() {
			t.Errorf("try: %v, %v", free, err)
		}
	})
}

// A node that shuts down says so on its shared streams, answers what it has read, and ends them when the client sends no more.
func TestSharedStreamDrains(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "")
		a.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		s := b.share(t)
		s.begin(1, acquireMethod, &sessiondv1.AcquireRequest{SessionId: id}, time.Minute)
		synctest.Wait()
		stopped := make(chan error, 1)
		began := time.Now()
		go func() { stopped <- b.stop() }()
		wantReason(t, s.want(1, nil), codes.Unavailable, "SHUTTING_DOWN")
		s.begin(2, readMethod, &sessiondv1.ReadRequest{SessionId: id}, time.Minute)
		wantReason(t, s.want(2, nil), codes.Unavailable, "SHUTTING_DOWN")
		if !s.drains {
			t.Error("the node did not say that it shuts down")
		}
		if err := s.stream.CloseSend(); err != nil {
			t.Fatal(err)
		}
		if a, err := s.next(); !errors.Is(err, io.EOF) {
			t.Errorf("at the end: %v, %v", a, err)
		}
		if err := <-stopped; err != nil || time.Since(began) > 900*time.Millisecond {
			t.Errorf("stop: %v after %v", err, time.Since(began))
		}
	})
}

// A large answer comes in parts and holds up no small one for long. A client that does not read is not read from either.
func TestSharedStreamLargeAnswers(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.startWith(t, 1, sessiond.Config{MaxSessionBytes: 4 << 20})[0]
		data := bytes.Repeat([]byte("0123456789abcdef"), 4<<20/16)
		large, small := n.create(t, string(data)), n.create(t, "x")
		s := n.share(t)
		for _, many := range []uint64{3, 20} { // 80 MiB are more than a node keeps for a stream
			for i := range many {
				s.begin(i, readMethod, &sessiondv1.ReadRequest{SessionId: large}, time.Minute)
			}
			synctest.Wait() // all wait to be sent
			s.begin(many, readMethod, &sessiondv1.ReadRequest{SessionId: small}, time.Minute)
			before := uint64(0)
			for i := range many + 1 {
				a, err := s.next()
				if err != nil {
					t.Fatal(err)
				}
				if a.GetId() == many {
					before = i
					continue
				}
				got := &sessiondv1.ReadResponse{}
				if err := proto.Unmarshal(a.GetResponse(), got); err != nil || !bytes.Equal(got.GetSession().GetData(), data) {
					t.Fatalf("answer to %d: %d bytes, %v", a.GetId(), len(got.GetSession().GetData()), err)
				}
			}
			if many == 3 && before != 0 {
				t.Errorf("%d answers of 4 MiB came before a small one", before)
			}
		}
	})
}

// A call id that is in use ends the stream.
func TestSharedStreamIdsInUse(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		waits := func(s *sharing) { s.begin(1, acquireMethod, &sessiondv1.AcquireRequest{SessionId: id}, time.Minute) }
		reads := func(s *sharing) { s.begin(1, readMethod, &sessiondv1.ReadRequest{SessionId: id}, time.Minute) }
		subscribes := func(s *sharing) { s.subscribe(1, 0, id, "s") }
		for i, use := range [][]func(s *sharing){{waits, reads}, {waits, subscribes}, {subscribes, reads}, {subscribes, subscribes}} {
			s := n.share(t)
			for _, call := range use {
				call(s)
			}
			a, err := s.next()
			if a != nil {
				t.Errorf("%d: answer %v", i, a)
			}
			wantReason(t, err, codes.InvalidArgument, "INVALID_ARGUMENT")
		}
	})
}
