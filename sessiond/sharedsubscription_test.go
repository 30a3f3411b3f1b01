package sessiond_test

import (
	"bytes"
	"errors"
	"io"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
)

const subscribeMethod = "/sessiond.v1.MessageService/Subscribe"

func encoded(t *testing.T, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// subscribe sends a call of Subscribe.
func (s *sharing) subscribe(id, credit uint64, session string, streams ...string) {
	s.t.Helper()
	request := encoded(s.t, &sessiondv1.SubscribeRequest{SessionId: session, Streams: streams})
	s.send(&sessiondv1.MultiplexRequest{Calls: []*sessiondv1.MultiplexCall{{Id: id, Method: subscribeMethod, Request: request, Credit: credit}}})
}

func (s *sharing) grant(id, bytes uint64) {
	s.t.Helper()
	s.send(&sessiondv1.MultiplexRequest{Credits: []*sessiondv1.MultiplexCredit{{Id: id, Bytes: bytes}}})
}

// response takes the next answer, which must be to this subscription; io.EOF if that has ended without an error.
func (s *sharing) response(id uint64) (*sessiondv1.SubscribeResponse, error) {
	s.t.Helper()
	a, err := s.next()
	if err != nil || a.GetId() != id {
		s.t.Fatalf("answer to %d, %v; want one to %d", a.GetId(), err, id)
	}
	switch {
	case a.GetContinues():
	case len(a.GetStatus()) > 0:
		return nil, statusOf(s.t, a)
	default:
		return nil, io.EOF
	}
	r := &sessiondv1.SubscribeResponse{}
	if err := proto.Unmarshal(a.GetResponse(), r); err != nil {
		s.t.Fatal(err)
	}
	return r, nil
}

// payloads takes responses until they have brought so many messages.
func (s *sharing) payloads(id uint64, count int) (got []string) {
	s.t.Helper()
	for len(got) < count {
		r, err := s.response(id)
		if err != nil {
			s.t.Fatalf("after %d of %d messages: %v", len(got), count, err)
		}
		for _, m := range r.GetMessages() {
			got = append(got, string(m.GetPayload()))
		}
	}
	return got
}

// quiet checks that nothing has been sent: a call that is made now is answered first.
func (s *sharing) quiet(id uint64, session string) {
	s.t.Helper()
	synctest.Wait()
	s.begin(id, readMethod, &sessiondv1.ReadRequest{SessionId: session}, time.Minute)
	if err := s.want(id, &sessiondv1.ReadResponse{}); err != nil {
		s.t.Fatal(err)
	}
}

// M2, M3: a subscription on a shared stream is confirmed at once, brings what is stored and then what comes, once and in order, and ends
// with its session; what is wrong with it is told as on a stream of its own.
func TestSharedSubscription(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		n.publish(t, id, "a", "stored")
		s := n.share(t)
		s.subscribe(1, 1<<20, id, "a")
		if got := s.payloads(1, 1); got[0] != "stored" {
			t.Errorf("stored: %q", got)
		}
		s.subscribe(2, 1<<20, id, "b")
		if r, err := s.response(2); err != nil || len(r.GetMessages()) != 0 {
			t.Errorf("confirmation: %v, %v", r, err)
		}
		for _, payload := range []string{"1", "2", "3"} {
			n.publish(t, id, "a", payload)
			if got := s.payloads(1, 1); got[0] != payload {
				t.Errorf("published %s: %q", payload, got)
			}
		}
		s.send(&sessiondv1.MultiplexRequest{Cancelled: []uint64{2}})
		s.quiet(3, id)
		if _, err := n.sessions.Destroy(t.Context(), &sessiondv1.DestroyRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
		_, err := s.response(1)
		wantReason(t, err, codes.NotFound, "SESSION_NOT_FOUND")
		for i, r := range []*sessiondv1.SubscribeRequest{
			{SessionId: id, Streams: []string{"a"}}, {SessionId: "a b", Streams: []string{"a"}}, {SessionId: id}, {SessionId: id, Streams: make([]string, 17)},
		} {
			sub, err := n.messages.Subscribe(t.Context(), r)
			if err == nil {
				_, err = sub.Recv()
			}
			call := &sessiondv1.MultiplexCall{Id: uint64(10 + i), Method: subscribeMethod, Request: encoded(t, r), Credit: 1}
			s.send(&sessiondv1.MultiplexRequest{Calls: []*sessiondv1.MultiplexCall{call}})
			if _, got := s.response(call.GetId()); !sameStatus(got, err) {
				t.Errorf("%v: %v; on a stream of its own: %v", r, got, err)
			}
		}
	})
}

// No more is sent of a subscription than the client has granted, but for the end of a response. Grants for what is no subscription mean
// nothing, and those of more than there can be mean all that there can be.
func TestSharedSubscriptionCredit(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		locked := n.create(t, "")
		n.acquire(t, &sessiondv1.AcquireRequest{SessionId: locked})
		s := n.share(t)
		s.begin(1, acquireMethod, &sessiondv1.AcquireRequest{SessionId: locked}, 0)
		s.grant(1, math.MaxUint64)
		s.grant(77, 1)
		s.subscribe(2, 0, id, "s")
		s.quiet(3, id)
		s.grant(2, 0)
		s.quiet(4, id)
		s.grant(2, 1)
		if r, err := s.response(2); err != nil || len(r.GetMessages()) != 0 || r.GetPosition() == 0 {
			t.Errorf("confirmation: %v, %v", r, err)
		}
		n.publish(t, id, "s", string(make([]byte, 1000)))
		n.publish(t, id, "s", "second")
		s.quiet(5, id)
		s.grant(2, 100) // more than the confirmation took
		if got := s.payloads(2, 1); len(got) != 1 || len(got[0]) != 1000 {
			t.Errorf("with credit for one: %d messages", len(got))
		}
		s.grant(2, 100) // less than the first message took
		s.quiet(6, id)
		s.grant(2, 1000)
		if got := s.payloads(2, 1); got[0] != "second" {
			t.Errorf("granted what the first one took: %q", got)
		}
		for range 2 {
			s.grant(2, math.MaxUint64)
			s.grant(2, math.MaxInt64)
		}
		n.publish(t, id, "s", "third")
		if got := s.payloads(2, 1); got[0] != "third" {
			t.Errorf("with all credit: %q", got)
		}
	})
}

// M3: a subscription that is granted nothing holds up neither others nor calls, and large responses hold up no small answer.
func TestSharedSubscriptionsHoldUpNobody(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id, small := n.create(t, ""), n.create(t, "x")
		s := n.share(t)
		s.subscribe(1, 1, id, "s") // the slow one
		s.subscribe(2, 1<<30, id, "s")
		for range 2 {
			if a, err := s.next(); err != nil || !a.GetContinues() {
				t.Fatalf("confirmation: %v, %v", a, err)
			}
		}
		payload := string(bytes.Repeat([]byte("0123456789abcdef"), 4<<20/16))
		for range 3 {
			n.publish(t, id, "s", payload)
			if got := s.payloads(2, 1); got[0] != payload {
				t.Errorf("%d bytes", len(got[0]))
			}
		}
		s.quiet(3, small)
		for i := range uint64(5) {
			s.subscribe(10+i, 1, id, "s")
		}
		synctest.Wait() // all have 4 MiB to send
		s.begin(4, readMethod, &sessiondv1.ReadRequest{SessionId: small}, time.Minute)
		if err := s.want(4, &sessiondv1.ReadResponse{}); err != nil {
			t.Errorf("beside responses of 4 MiB: %v", err)
		}
		for range 5 {
			if a, err := s.next(); err != nil || a.GetId() < 10 || !a.GetContinues() || len(a.GetResponse()) < len(payload) {
				t.Errorf("answer to %d: %d bytes, %v", a.GetId(), len(a.GetResponse()), err)
			}
		}
		s.grant(1, 1<<30)
		for i, got := range s.payloads(1, 3) {
			if got != payload {
				t.Errorf("the slow one, message %d: %d bytes", i, len(got))
			}
		}
	})
}

// A subscription that is given up, or whose stream breaks, ends: while it waits for messages, and while it waits for credit. It is not
// answered, and its deadline is.
func TestSharedSubscriptionsGivenUp(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		s, broken := n.share(t), n.share(t)
		for _, s := range []*sharing{s, broken} {
			s.subscribe(1, 1<<10, id, "s")
			s.subscribe(2, 0, id, "s")
			if _, err := s.response(1); err != nil {
				t.Fatal(err)
			}
		}
		request := encoded(t, &sessiondv1.SubscribeRequest{SessionId: id, Streams: []string{"s"}})
		s.send(&sessiondv1.MultiplexRequest{Calls: []*sessiondv1.MultiplexCall{
			{Id: 3, Method: subscribeMethod, Request: request, Credit: 1, TimeoutUs: 1e6}, {Id: 4, Method: subscribeMethod, Request: request, TimeoutUs: 1e6},
		}})
		if _, err := s.response(3); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if a, err := s.next(); err != nil || a.GetContinues() || status.Code(statusOf(t, a)) != codes.DeadlineExceeded {
				t.Errorf("at the deadline: %v, %v", a, err)
			}
		}
		s.send(&sessiondv1.MultiplexRequest{Cancelled: []uint64{1, 2, 77}})
		broken.leave()
		synctest.Wait()
		n.publish(t, id, "s", "nobody hears it")
		s.quiet(5, id)
		if err := s.stream.CloseSend(); err != nil {
			t.Fatal(err)
		}
		// The node ends the stream when all calls have ended.
		if a, err := s.next(); !errors.Is(err, io.EOF) {
			t.Errorf("at the end: %v, %v", a, err)
		}
	})
}

// A node that shuts down ends its subscriptions with that reason, also those that wait for credit.
func TestSharedSubscriptionsDrain(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "")
		s := b.share(t)
		s.subscribe(1, 1<<10, id, "s")
		if _, err := s.response(1); err != nil {
			t.Fatal(err)
		}
		s.subscribe(2, 0, id, "s")
		synctest.Wait()
		stopped := make(chan error, 1)
		began := time.Now()
		go func() { stopped <- b.stop() }()
		for range 2 {
			answer, err := s.next()
			if err != nil {
				t.Fatal(err)
			}
			wantReason(t, statusOf(t, answer), codes.Unavailable, "SHUTTING_DOWN")
		}
		s.subscribe(3, 1, id, "s")
		_, err := s.response(3)
		wantReason(t, err, codes.Unavailable, "SHUTTING_DOWN")
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

// A shared stream bears as many subscriptions as a front-end has open streams, and calls beside them.
func TestManySharedSubscriptions(t *testing.T) {
	const count = 10_000
	n := start(t, sessiond.Config{Store: sessiond.StoreMemory})
	id := n.create(t, "")
	s := n.share(t)
	request := encoded(t, &sessiondv1.SubscribeRequest{SessionId: id, Streams: []string{"s"}})
	all := &sessiondv1.MultiplexRequest{}
	for i := range uint64(count) {
		all.Calls = append(all.Calls, &sessiondv1.MultiplexCall{Id: i, Method: subscribeMethod, Request: request, Credit: 1 << 10})
		all.Cancelled = append(all.Cancelled, i)
	}
	began := time.Now()
	s.send(&sessiondv1.MultiplexRequest{Calls: all.GetCalls()})
	heard := func(want string) {
		t.Helper()
		of := map[uint64]bool{}
		for range count {
			a, err := s.next()
			if err != nil {
				t.Fatal(err)
			}
			r := &sessiondv1.SubscribeResponse{}
			if err := proto.Unmarshal(a.GetResponse(), r); err != nil || !a.GetContinues() {
				t.Fatalf("answer to %d: %v, %v", a.GetId(), a, err)
			}
			var got []byte
			for _, m := range r.GetMessages() {
				got = append(got, m.GetPayload()...)
			}
			if string(got) != want {
				t.Fatalf("subscription %d: %q, want %q", a.GetId(), got, want)
			}
			of[a.GetId()] = true
		}
		if len(of) != count {
			t.Errorf("%d subscriptions", len(of))
		}
	}
	heard("")
	n.publish(t, id, "s", "for all")
	heard("for all")
	s.send(&sessiondv1.MultiplexRequest{Cancelled: all.GetCancelled()})
	s.begin(count, readMethod, &sessiondv1.ReadRequest{SessionId: id}, time.Minute)
	if err := s.want(count, &sessiondv1.ReadResponse{}); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("%v", took)
	}
}
