package sessiond_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

type subscription struct {
	grpc.ServerStreamingClient[sessiondv1.SubscribeResponse]

	cancel   context.CancelFunc
	position uint64
}

func (n *node) subscribe(t *testing.T, id string, after uint64, streams ...string) *subscription {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	sub, err := n.messages.Subscribe(ctx, &sessiondv1.SubscribeRequest{SessionId: id, Streams: streams, AfterPosition: after})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cancel)
	return &subscription{ServerStreamingClient: sub, cancel: cancel, position: after}
}

// next receives until there are so many messages, and checks that positions only grow.
func (s *subscription) next(t *testing.T, count int) []*sessiondv1.Message {
	t.Helper()
	var got []*sessiondv1.Message
	for len(got) < count {
		resp, err := s.Recv()
		if err != nil {
			t.Fatalf("after %d of %d messages: %v", len(got), count, err)
		}
		for _, m := range resp.GetMessages() {
			if m.GetPosition() <= s.position {
				t.Fatalf("position %d after %d", m.GetPosition(), s.position)
			}
			s.position = m.GetPosition()
			got = append(got, m)
		}
		if resp.GetPosition() < s.position {
			t.Fatalf("answer's position %d is before its last message's, %d", resp.GetPosition(), s.position)
		}
		s.position = resp.GetPosition()
	}
	if len(got) > count {
		t.Fatalf("%d messages, want %d", len(got), count)
	}
	return got
}

func (n *node) publish(t *testing.T, id, stream, payload string) uint64 {
	t.Helper()
	resp, err := n.messages.Publish(t.Context(), &sessiondv1.PublishRequest{SessionId: id, Stream: stream, Payload: []byte(payload)})
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetPosition()
}

// M1, M2: what is published on two nodes at once arrives once and in one order, however often a subscriber goes away and
// comes back on another node, stored or pushed.
func TestExactlyOnce(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		id := nodes[0].create(t, "")
		const each, publishers = 40, 4
		whole := nodes[1].subscribe(t, id, 0, "a", "b")
		var wg sync.WaitGroup
		for p := range publishers {
			wg.Go(func() {
				for i := range each {
					nodes[p%2].publish(t, id, []string{"a", "b"}[p/2], fmt.Sprintf("%d:%d", p, i))
				}
			})
		}
		var pieces []*sessiondv1.Message
		var after uint64
		for i := 0; len(pieces) < each*publishers; i++ {
			sub := nodes[i%2].subscribe(t, id, after, "b", "a")
			pieces = append(pieces, sub.next1(t)...)
			after = sub.position
			sub.cancel()
		}
		wg.Wait()
		all := whole.next(t, each*publishers)
		if len(pieces) != len(all) {
			t.Fatalf("%d messages in pieces, %d at a stretch", len(pieces), len(all))
		}
		last := map[string]int{}
		for i, m := range all {
			if m.GetPosition() != pieces[i].GetPosition() || !bytes.Equal(m.GetPayload(), pieces[i].GetPayload()) || m.GetStream() != pieces[i].GetStream() {
				t.Fatalf("message %d: %v and %v", i, m, pieces[i])
			}
			var publisher string
			var number int
			if _, err := fmt.Sscanf(string(m.GetPayload()), "%1s:%d", &publisher, &number); err != nil {
				t.Fatal(err)
			}
			if number != last[publisher] {
				t.Fatalf("publisher %s: %d, want %d", publisher, number, last[publisher])
			}
			last[publisher]++
		}
	})
}

// next1 receives answers until one brings something.
func (s *subscription) next1(t *testing.T) []*sessiondv1.Message {
	t.Helper()
	for {
		resp, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		s.position = resp.GetPosition()
		if len(resp.GetMessages()) > 0 {
			return resp.GetMessages()
		}
	}
}

// M1: a retry of a publish does not append again.
func TestPublishIsIdempotent(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		id := nodes[0].create(t, "")
		req := &sessiondv1.PublishRequest{SessionId: id, Stream: "s", Payload: bytes.Repeat([]byte{1}, 1<<20+1), RequestId: "r"}
		var positions []uint64
		for _, n := range append(nodes, nodes...) {
			resp, err := n.messages.Publish(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			positions = append(positions, resp.GetPosition())
		}
		if len(slices.Compact(positions)) != 1 {
			t.Errorf("positions: %v", positions)
		}
		nodes[0].subscribe(t, id, 0, "s").next(t, 1)
	})
}

// M4: messages of up to 4 MiB arrive whole, pushed and stored; larger ones are refused.
func TestLargeMessages(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		id := nodes[0].create(t, "")
		sub := nodes[1].subscribe(t, id, 0, "s")
		if _, err := sub.Recv(); err != nil {
			t.Fatal(err)
		}
		sizes := []int{0, 1, 1 << 20, 1<<20 + 1, 3 << 20, 4 << 20}
		payload := func(size int) []byte { return bytes.Repeat([]byte{byte(size), byte(size >> 20), 3}, size/3+1)[:size] }
		for _, size := range sizes {
			nodes[0].publish(t, id, "s", string(payload(size)))
		}
		for name, got := range map[string][]*sessiondv1.Message{
			"pushed": sub.next(t, len(sizes)),
			"stored": nodes[0].subscribe(t, id, 0, "s").next(t, len(sizes)),
		} {
			for i, size := range sizes {
				if !bytes.Equal(got[i].GetPayload(), payload(size)) {
					t.Errorf("%s: message of %d bytes arrived with %d", name, size, len(got[i].GetPayload()))
				}
			}
		}
		_, err := nodes[0].messages.Publish(t.Context(), &sessiondv1.PublishRequest{SessionId: id, Stream: "s", Payload: payload(4<<20 + 1)})
		wantReason(t, err, codes.ResourceExhausted, "MESSAGE_TOO_LARGE")
	})
}

// M4: a session stores a bounded amount; a trim makes room.
func TestStoredLimits(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		four := string(make([]byte, 4<<20))
		for range 4 {
			n.publish(t, id, "s", four)
		}
		_, err := n.messages.Publish(t.Context(), &sessiondv1.PublishRequest{SessionId: id, Stream: "s", Payload: []byte("x")})
		wantReason(t, err, codes.ResourceExhausted, "TOO_MANY_MESSAGES")
		trimmed, err := n.messages.Trim(t.Context(), &sessiondv1.TrimRequest{SessionId: id, Stream: "s", ThroughPosition: 1 << 62})
		if err != nil || trimmed.GetRemoved() != 4 {
			t.Errorf("trim: %v, %v", trimmed, err)
		}
		n.publish(t, id, "s", four)
	})
}

// M4: messages of low priority leave half of the room to others, by number and by size.
func TestLowPriority(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		low := func(id, payload string) error {
			_, err := n.messages.Publish(t.Context(), &sessiondv1.PublishRequest{SessionId: id, Stream: "s", Payload: []byte(payload), LowPriority: true})
			return err
		}
		id := n.create(t, "")
		for range 500 {
			if err := low(id, "x"); err != nil {
				t.Fatal(err)
			}
		}
		wantReason(t, low(id, "x"), codes.ResourceExhausted, "TOO_MANY_MESSAGES")
		n.publish(t, id, "s", "x")

		large, four := n.create(t, ""), string(make([]byte, 4<<20))
		for range 2 {
			if err := low(large, four); err != nil {
				t.Fatal(err)
			}
		}
		wantReason(t, low(large, "x"), codes.ResourceExhausted, "TOO_MANY_MESSAGES")
		n.publish(t, large, "s", four)
	})
}

// M3: retained messages live for the new TTL, those of that stream only, and none is delivered again.
func TestRetain(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		running := n.subscribe(t, id, 0, "s")
		publish := func(stream, payload string, ttl float64) {
			if _, err := n.messages.Publish(t.Context(), &sessiondv1.PublishRequest{SessionId: id, Stream: stream, Payload: []byte(payload), Ttl: seconds(ttl)}); err != nil {
				t.Fatal(err)
			}
		}
		retain := func(stream string, ttl float64) {
			if _, err := n.messages.Retain(t.Context(), &sessiondv1.RetainRequest{SessionId: id, Stream: stream, Ttl: seconds(ttl)}); err != nil {
				t.Fatal(err)
			}
		}
		publish("s", "short", 1)
		publish("s", string(make([]byte, 2<<20)), 1)
		publish("s", "long", 3600)
		running.next(t, 3)
		retain("s", 60)
		publish("other", "1", 3600)
		retain("other", 1)
		publish("s", "new", 60)
		if again := running.next(t, 1); string(again[0].GetPayload()) != "new" {
			t.Errorf("delivered after the retain: %v", again)
		}
		eventually(t, 8*time.Second, "the other stream's message is gone", func() bool {
			sub := n.subscribe(t, id, 0, "other")
			defer sub.cancel()
			resp, err := sub.Recv()
			return err == nil && len(resp.GetMessages()) == 0
		})
		if left := n.subscribe(t, id, 0, "s").next(t, 4); string(left[0].GetPayload()) != "short" || len(left[1].GetPayload()) != 2<<20 {
			t.Errorf("left: %.100v", left)
		}
	})
}

// Trim removes one stream's messages up to a position, those only, and counts them.
func TestTrim(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		n.publish(t, id, "s", "1")
		n.publish(t, id, "other", "1")
		second := n.publish(t, id, "s", string(make([]byte, 2<<20)))
		n.publish(t, id, "s", "3")
		for _, step := range []struct{ keep, want uint32 }{{2, 0}, {1, 1}, {0, 1}, {0, 0}} {
			resp, err := n.messages.Trim(t.Context(), &sessiondv1.TrimRequest{SessionId: id, Stream: "s", ThroughPosition: second, Keep: step.keep})
			if err != nil || resp.GetRemoved() != step.want {
				t.Errorf("trim but for %d: %v, %v", step.keep, resp, err)
			}
		}
		left := n.subscribe(t, id, 0, "s", "other").next(t, 2)
		if left[0].GetStream() != "other" || string(left[1].GetPayload()) != "3" {
			t.Errorf("left: %v", left)
		}
	})
}

// M3: a message goes after its TTL, and not before.
func TestMessageExpiry(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		sent := time.Now()
		_, err := n.messages.Publish(t.Context(), &sessiondv1.PublishRequest{SessionId: id, Stream: "s", Payload: []byte("x"), Ttl: seconds(1)})
		if err != nil {
			t.Fatal(err)
		}
		var lived time.Duration
		eventually(t, 8*time.Second, "the message is gone", func() bool {
			sub := n.subscribe(t, id, 0, "s")
			defer sub.cancel()
			resp, err := sub.Recv()
			if err != nil {
				t.Fatal(err)
			}
			lived = time.Since(sent)
			return len(resp.GetMessages()) == 0
		})
		if lived < time.Second {
			t.Errorf("lived for %v", lived)
		}
	})
}

// M3: messages of a session never reach a later one of the same id.
func TestMessagesOfEarlierSession(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		resp, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{Ttl: seconds(1)})
		if err != nil {
			t.Fatal(err)
		}
		id := resp.GetSession().GetId()
		req := &sessiondv1.PublishRequest{SessionId: id, Stream: "s", Payload: []byte("old"), RequestId: "r"}
		old, err := n.messages.Publish(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, 8*time.Second, "the session is gone", func() bool {
			_, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{SessionId: id})
			return err == nil
		})
		sub := n.subscribe(t, id, 0, "s")
		if first, err := sub.Recv(); err != nil || len(first.GetMessages()) != 0 {
			t.Fatalf("first answer: %v, %v", first, err)
		}
		req.Payload = []byte("new")
		again, err := n.messages.Publish(t.Context(), req)
		if err != nil || again.GetPosition() <= old.GetPosition() {
			t.Fatalf("publish: %v, %v", again, err)
		}
		if m := sub.next(t, 1)[0]; string(m.GetPayload()) != "new" {
			t.Errorf("message: %v", m)
		}
	})
}

// A subscriber that does not read neither holds up others nor loses anything.
func TestSlowSubscriber(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		slow, fast := n.subscribe(t, id, 0, "s"), n.subscribe(t, id, 0, "s")
		const count = 8
		payload := string(make([]byte, 1<<20))
		for range count {
			n.publish(t, id, "s", payload)
			fast.next(t, 1)
		}
		if got := slow.next(t, count); len(got[count-1].GetPayload()) != len(payload) {
			t.Error("cut short")
		}
	})
}

// ReadResponse.position: a subscription after it brings what is published later, and only that.
func TestPositionOfRead(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		n.publish(t, id, "s", "before")
		resp, err := n.sessions.Read(t.Context(), &sessiondv1.ReadRequest{SessionId: id})
		if err != nil {
			t.Fatal(err)
		}
		n.publish(t, id, "s", "after")
		if m := n.subscribe(t, id, resp.GetPosition(), "s").next(t, 1)[0]; string(m.GetPayload()) != "after" {
			t.Errorf("message: %v", m)
		}
	})
}

// M2: a subscriber whose node is gone goes on with another one after its position: what came meanwhile first, nothing twice.
func TestSubscribeAcrossARestart(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		first := c.start(t, 1)[0]
		id := first.create(t, "")
		sub := first.subscribe(t, id, 0, "s")
		first.publish(t, id, "s", "1")
		sub.next(t, 1)
		first.publish(t, id, "s", "2")
		if err := first.stop(); err != nil {
			t.Fatal(err)
		}
		second := c.start(t, 1)[0]
		second.publish(t, id, "s", "3")
		again := second.subscribe(t, id, sub.position, "s")
		second.publish(t, id, "s", "4")
		for i, m := range again.next(t, 3) {
			if want := fmt.Sprint(i + 2); string(m.GetPayload()) != want {
				t.Errorf("message %d: %q", i+2, m.GetPayload())
			}
		}
	})
}

// M3: a message is pushed: it arrives when it is published, not when somebody looks.
func TestPushed(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		id := nodes[0].create(t, "")
		sub := nodes[1].subscribe(t, id, 0, "s")
		if _, err := sub.Recv(); err != nil {
			t.Fatal(err)
		}
		var slowest time.Duration
		for i := range 20 {
			began := time.Now()
			nodes[0].publish(t, id, "s", fmt.Sprint(i))
			sub.next(t, 1)
			slowest = max(slowest, time.Since(began))
		}
		// In memory time stands still while anything runs; etcd may be busy.
		if limit := time.Second; slowest > limit || c.memory != nil && slowest > 0 {
			t.Errorf("arrived after %v", slowest)
		}
	})
}
