package client_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"iter"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sessiond/sessiond/client"
	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
)

// subscribed is a subscription on a shared stream, as a node sees it.
type subscribed struct {
	*sharerStream

	call    *sessiondv1.MultiplexCall
	request *sessiondv1.SubscribeRequest
}

// respond sends messages at these positions, or a confirmation.
func (s *subscribed) respond(payload []byte, positions ...uint64) {
	r := &sessiondv1.SubscribeResponse{Position: s.request.GetAfterPosition()}
	for _, p := range positions {
		r.Position = p
		r.Messages = append(r.Messages, &sessiondv1.Message{Stream: "s", Position: p, Payload: payload})
	}
	response, _ := proto.Marshal(r)
	s.send(&sessiondv1.MultiplexResponse{Answers: []*sessiondv1.MultiplexAnswer{{Id: s.call.GetId(), Response: response, Continues: true}}})
}

// subscriber makes a sharer that hands out the subscriptions that it gets, and answers all else.
func subscriber(f *sharer) <-chan *subscribed {
	got := make(chan *subscribed, 10_000)
	f.subscribe = func(int64, uint64, func(uint64)) error { return errors.New("a stream of its own") }
	f.serve = func(s *sharerStream, call *sessiondv1.MultiplexCall) bool {
		if call.GetMethod() != sessiondv1.MessageService_Subscribe_FullMethodName {
			s.answer(call.GetId(), &sessiondv1.ReadResponse{}, nil)
			return true
		}
		r := &sessiondv1.SubscribeRequest{}
		if err := proto.Unmarshal(call.GetRequest(), r); err != nil {
			return false
		}
		got <- &subscribed{s, call, r}
		return true
	}
	return got
}

// subscribe subscribes, with a node that confirms it.
func subscribe(ctx context.Context, t *testing.T, c *client.Client, got <-chan *subscribed) (iter.Seq2[client.Message, error], *subscribed) {
	t.Helper()
	confirmed := make(chan *subscribed, 1)
	go func() {
		select {
		case s := <-got:
			s.respond(nil)
			confirmed <- s
		case <-ctx.Done():
		}
	}()
	messages, err := c.Subscribe(ctx, "x", 0, "s")
	if err != nil {
		t.Fatal(err)
	}
	return messages, <-confirmed
}

// C1: subscriptions share the stream of the calls, and pass interceptors; each costs no goroutine, and the node is told when its context
// ends, whether it is ranged over or not. An error arrives as from a stream of its own.
func TestC1SubscriptionsShareAStream(t *testing.T) {
	given := make(chan uint64, 1000)
	f := &sharer{told: func(_ *sharerStream, r *sessiondv1.MultiplexRequest, _ error) {
		for _, id := range r.GetCancelled() {
			given <- id
		}
	}}
	got := subscriber(f)
	withToken := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, next grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		return next(metadata.AppendToOutgoingContext(ctx, "token", "1"), desc, cc, method, opts...)
	}
	c, err := client.New([]string{startSharer(t, f)}, client.Options{DialOptions: []grpc.DialOption{grpc.WithChainStreamInterceptor(withToken)}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	messages, sub := subscribe(ctx, t, c, got)
	if md := sub.call.GetMetadata(); len(md) != 1 || md[0].GetKey() != "token" || sub.call.GetTimeoutUs() != 0 || sub.call.GetCredit() == 0 {
		t.Errorf("call %v", sub.call)
	}
	goroutines := runtime.NumGoroutine()
	const idle = 200
	ids := map[uint64]bool{}
	for range idle {
		_, s := subscribe(ctx, t, c, got)
		ids[s.call.GetId()] = true
	}
	if now := runtime.NumGoroutine(); now > goroutines+idle/10 {
		t.Errorf("%d goroutines with %d subscriptions, %d without", now, idle, goroutines)
	}
	if f.streams.Load() != 1 || f.confirms.Load()+f.calls.Load() != 0 || len(ids) != idle {
		t.Errorf("%d shared streams, %d ids", f.streams.Load(), len(ids))
	}

	sub.respond([]byte("payload"), 1, 2)
	sub.respond(nil, 2, 3)
	sub.answer(sub.call.GetId(), nil, failure(codes.NotFound, "SESSION_NOT_FOUND"))
	var positions []uint64
	for m, e := range messages {
		if err = e; err == nil {
			positions = append(positions, m.Position)
		}
	}
	e, ok := errors.AsType[*client.Error](err)
	if !ok || !errors.Is(err, client.ErrSessionNotFound) || e.Op != "subscribe" || e.Metadata["limit"] != "7" || !slices.Equal(positions, []uint64{1, 2, 3}) {
		t.Errorf("positions %v, then %#v", positions, err)
	}
	cancel()
	for range idle {
		delete(ids, <-given)
	}
	if len(ids) != 0 {
		t.Errorf("the node was not told of the end of %d", len(ids))
	}
}

// C1: a subscription ends with its context: while it waits for the node's word, and while it is ranged over.
func TestC1SharedSubscriptionsEndWithTheirContexts(t *testing.T) {
	f := &sharer{}
	got := subscriber(f)
	c := newClient(t, startSharer(t, f))
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-got
		cancel()
	}()
	if _, err := c.Subscribe(ctx, "x", 0, "s"); !errors.Is(err, context.Canceled) {
		t.Errorf("before it was confirmed: %v", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	messages, sub := subscribe(ctx, t, c, got)
	sub.respond(nil, 1)
	for m, err := range messages {
		if m.Position == 1 {
			cancel()
		} else if !errors.Is(err, context.Canceled) {
			t.Errorf("after a message: %v", err)
		}
	}
	refused := &sharer{}
	refusals := subscriber(refused)
	go func() {
		s := <-refusals
		s.answer(s.call.GetId(), nil, failure(codes.InvalidArgument, "INVALID_ARGUMENT"))
		<-refusals // is never answered
	}()
	c, err := client.New([]string{startSharer(t, refused)}, client.Options{CallTimeout: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Subscribe(t.Context(), "x", 0, "s"); !errors.Is(err, client.ErrInvalidArgument) {
		t.Errorf("refused: %v", err)
	}
	if _, err := c.Subscribe(t.Context(), "x", 0, "s"); !errors.Is(err, client.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
}

// M2: subscriptions whose shared stream breaks go on where it broke off, on a shared stream again, however many they are.
func TestM2SharedSubscriptionsGoOnAfterABreak(t *testing.T) {
	const count = 300
	f := &sharer{}
	got := subscriber(f)
	serve := f.serve
	var breaks atomic.Bool
	f.serve = func(s *sharerStream, call *sessiondv1.MultiplexCall) bool {
		return !breaks.CompareAndSwap(true, false) && serve(s, call)
	}
	c := newClient(t, startSharer(t, f))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var rangers sync.WaitGroup
	for range count {
		messages, sub := subscribe(ctx, t, c, got)
		sub.respond(nil, 7)
		rangers.Go(func() {
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
			if !slices.Equal(positions, []uint64{7, 8}) {
				t.Errorf("positions %v", positions)
			}
		})
	}
	breaks.Store(true)
	_, _ = c.Read(t.Context(), "x")
	for range count {
		s := <-got
		if after := s.request.GetAfterPosition(); after != 7 {
			t.Errorf("goes on after %d", after)
		}
		s.respond(nil, 7, 8)
		s.answer(s.call.GetId(), nil, failure(codes.NotFound, "SESSION_NOT_FOUND"))
	}
	rangers.Wait()
	if f.streams.Load() != 2 || f.confirms.Load() != 0 {
		t.Errorf("%d shared streams", f.streams.Load())
	}
}

// C1: a node that does not know of subscriptions on a shared stream, and a client that wants none, have streams of their own for them.
func TestC1SubscriptionsOnStreamsOfTheirOwn(t *testing.T) {
	f := &sharer{fake: fake{subscribe: func(_ int64, _ uint64, send func(uint64)) error {
		send(1)
		return failure(codes.NotFound, "SESSION_NOT_FOUND")
	}}}
	f.serve = func(s *sharerStream, call *sessiondv1.MultiplexCall) bool {
		s.answer(call.GetId(), nil, status.Error(codes.Unimplemented, "no such method"))
		return true
	}
	address := startSharer(t, f)
	for shared, opts := range []client.Options{{Unary: true}, {}} {
		c, err := client.New([]string{address}, opts)
		if err != nil {
			t.Fatal(err)
		}
		messages, err := c.Subscribe(t.Context(), "x", 0, "s")
		if err != nil {
			t.Fatal(err)
		}
		count := 0
		for m, err := range messages {
			if err == nil && m.Position == 1 {
				count++
			} else if !errors.Is(err, client.ErrSessionNotFound) {
				t.Errorf("%v, %v", m, err)
			}
		}
		if count != 1 || f.shared.Load() != int64(shared) {
			t.Errorf("%+v: %d messages, %d calls on shared streams", opts, count, f.shared.Load())
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// M2: a node that shuts down ends its subscriptions; they go on with another node.
func TestM2SharedSubscriptionLeavesADrainingNode(t *testing.T) {
	a, b := &sharer{}, &sharer{}
	onA, onB := subscriber(a), subscriber(b)
	refuse := func(int64) error { return failure(codes.Unavailable, "SHUTTING_DOWN") }
	a.confirm, b.confirm = refuse, refuse
	c := newClient(t, startSharer(t, a), startSharer(t, b))
	share(t, c, a, b)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	there := make(chan *subscribed, 1)
	go func() {
		select {
		case s := <-onA:
			there <- s
		case s := <-onB:
			there <- s
		}
	}()
	begun := make(chan iter.Seq2[client.Message, error], 1)
	go func() {
		messages, err := c.Subscribe(ctx, "x", 0, "s")
		if err != nil {
			t.Error(err)
		}
		begun <- messages
	}()
	s := <-there
	s.respond(nil)
	messages := <-begun
	s.respond(nil, 5)
	s.send(&sessiondv1.MultiplexResponse{Draining: true})
	s.answer(s.call.GetId(), nil, failure(codes.Unavailable, "SHUTTING_DOWN"))
	go func() {
		select {
		case s := <-onA:
			there <- s
		case s := <-onB:
			there <- s
		}
	}()
	var positions []uint64
	for m, err := range messages {
		if err != nil {
			t.Fatal(err)
		}
		positions = append(positions, m.Position)
		if len(positions) == 2 {
			break
		}
		go func() {
			other := <-there
			if other.sharerStream == s.sharerStream || other.request.GetAfterPosition() != 5 {
				t.Errorf("it goes on after %d", other.request.GetAfterPosition())
			}
			other.respond(nil)
			other.respond(nil, 6)
		}()
	}
	if !slices.Equal(positions, []uint64{5, 6}) {
		t.Errorf("positions %v", positions)
	}
}

// C1: what a node may send of a subscription is granted anew when it has been taken, not before.
func TestC1SubscriptionsGrantWhatIsTaken(t *testing.T) {
	grants := make(chan *sessiondv1.MultiplexCredit, 100)
	ended := make(chan uint64, 1)
	f := &sharer{told: func(_ *sharerStream, r *sessiondv1.MultiplexRequest, _ error) {
		for _, g := range r.GetCredits() {
			grants <- g
		}
		for _, id := range r.GetCancelled() {
			ended <- id
		}
	}}
	got := subscriber(f)
	c := newClient(t, startSharer(t, f))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	messages, sub := subscribe(ctx, t, c, got)
	next, stop := iter.Pull2(messages)
	defer stop()
	granted, sent := sub.call.GetCredit(), uint64(0)
	size := int(granted / 8)
	position := uint64(0)
	for sent < granted {
		position++
		sub.respond(make([]byte, size), position)
		sent += uint64(size)
	}
	sub.respond(make([]byte, 4<<20), position+1) // the end of a response may be more
	if _, err := c.Read(t.Context(), "x"); err != nil {
		t.Errorf("beside one that is not taken: %v", err)
	}
	if len(grants) != 0 {
		t.Errorf("granted before anything was taken: %v", <-grants)
	}
	for want := range position + 1 {
		if m, err, ok := next(); m.Position != want+1 || err != nil || !ok {
			t.Fatalf("position %d, %v", m.Position, err)
		}
	}
	again := uint64(0)
	for again < 4<<20 {
		g := <-grants
		if g.GetId() != sub.call.GetId() {
			t.Errorf("grant %v", g)
		}
		again += g.GetBytes()
	}
	if again > sent+4<<20+1000 {
		t.Errorf("granted %d bytes again of %d", again, sent+4<<20)
	}
	// More than one response may have.
	part := &sessiondv1.MultiplexAnswer{Id: sub.call.GetId(), Response: make([]byte, 3<<20), More: true, Continues: true}
	for range 3 {
		sub.send(&sessiondv1.MultiplexResponse{Answers: []*sessiondv1.MultiplexAnswer{part}})
	}
	if _, err, _ := next(); !errors.Is(err, client.ErrInternal) {
		t.Errorf("a response of 9 MiB: %v", err)
	}
	if id := <-ended; id != sub.call.GetId() {
		t.Errorf("cancelled %d", id)
	}
}

// C1: Close ends subscriptions.
func TestC1CloseEndsSharedSubscriptions(t *testing.T) {
	f := &sharer{}
	got := subscriber(f)
	c := newClient(t, startSharer(t, f))
	messages, _ := subscribe(t.Context(), t, c, got)
	ended := make(chan error, 1)
	go func() {
		for _, err := range messages {
			ended <- err
		}
	}()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err == nil || errors.Is(err, io.EOF) {
		t.Errorf("after Close: %v", err)
	}
}

// M2, M3: on a real node, one that does not take what is published holds up neither other subscriptions nor calls, and loses nothing.
func TestM2SlowSharedSubscription(t *testing.T) {
	c := startNodeWith(t, sessiond.Config{Store: sessiond.StoreMemory})
	s, err := c.Create(t.Context(), nil, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	slow, err := c.Subscribe(ctx, s.ID, 0, "s")
	if err != nil {
		t.Fatal(err)
	}
	fast, err := c.Subscribe(ctx, s.ID, 0, "s")
	if err != nil {
		t.Fatal(err)
	}
	next, stop := iter.Pull2(fast)
	defer stop()
	const count = 12
	payload := func(i int) []byte { return bytes.Repeat([]byte{byte(i)}, 1<<20) }
	for i := range count {
		if _, err := c.Publish(ctx, s.ID, "s", payload(i), client.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
		if m, err, _ := next(); err != nil || !bytes.Equal(m.Payload, payload(i)) {
			t.Fatalf("message %d: %d bytes, %v", i, len(m.Payload), err)
		}
		if _, err := c.Read(ctx, s.ID); err != nil {
			t.Fatal(err)
		}
	}
	i := 0
	for m, err := range slow {
		if err != nil || !bytes.Equal(m.Payload, payload(i)) {
			t.Fatalf("the slow one, message %d: %d bytes, %v", i, len(m.Payload), err)
		}
		if i++; i == count {
			break
		}
	}
}

// C1, M2: 10,000 subscriptions of one client on a real node: each gets each message once, and calls go on beside them.
func TestC1ManySharedSubscriptions(t *testing.T) {
	const count = 10_000
	c := startNodeWith(t, sessiond.Config{Store: sessiond.StoreMemory})
	s, err := c.Create(t.Context(), nil, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	all := make([]iter.Seq2[client.Message, error], count)
	var callers sync.WaitGroup
	for caller := range 16 {
		callers.Go(func() {
			for i := caller; i < count; i += 16 {
				var err error
				if all[i], err = c.Subscribe(ctx, s.ID, 0, "s"); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	callers.Wait()
	if t.Failed() {
		return
	}
	for i := range 3 {
		if _, err := c.Publish(ctx, s.ID, "s", []byte{byte(i)}, client.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Read(ctx, s.ID); err != nil {
		t.Error(err)
	}
	for i, messages := range all {
		var got []byte
		for m, err := range messages {
			if err != nil {
				t.Fatalf("subscription %d: %v", i, err)
			}
			if got = append(got, m.Payload...); len(got) == 3 {
				break
			}
		}
		if !bytes.Equal(got, []byte{0, 1, 2}) {
			t.Fatalf("subscription %d: %v", i, got)
		}
	}
	if _, err := c.Read(ctx, s.ID); err != nil {
		t.Error(err)
	}
}
