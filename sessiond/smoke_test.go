package sessiond_test

import (
	"testing"

	"google.golang.org/grpc/codes"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

// A whole cycle on two nodes: create, acquire with read, save with release, publish, subscribe, destroy.
func TestCycle(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "one")

		got, err := b.locks.Acquire(t.Context(), &sessiondv1.AcquireRequest{SessionId: id, RequestId: "r1", ReadSession: true})
		if err != nil {
			t.Fatal(err)
		}
		if string(got.GetSession().GetData()) != "one" {
			t.Fatalf("session under the lock: %v", got.GetSession())
		}
		_, err = a.sessions.Save(t.Context(), &sessiondv1.SaveRequest{
			SessionId: id, Data: []byte("two"), FencingToken: got.GetGrant().GetFencingToken(), RequestId: "r1", Release: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		if s := b.read(t, id); string(s.GetData()) != "two" {
			t.Fatalf("read: %v", s)
		}

		sub, err := b.messages.Subscribe(t.Context(), &sessiondv1.SubscribeRequest{SessionId: id, Streams: []string{"s"}})
		if err != nil {
			t.Fatal(err)
		}
		first, err := sub.Recv()
		if err != nil || len(first.GetMessages()) != 0 {
			t.Fatalf("first answer: %v, %v", first, err)
		}
		pub, err := a.messages.Publish(t.Context(), &sessiondv1.PublishRequest{SessionId: id, Stream: "s", Payload: []byte("hello")})
		if err != nil {
			t.Fatal(err)
		}
		next, err := sub.Recv()
		if err != nil || len(next.GetMessages()) != 1 || next.GetMessages()[0].GetPosition() != pub.GetPosition() {
			t.Fatalf("pushed: %v, %v", next, err)
		}

		gone, err := a.sessions.Destroy(t.Context(), &sessiondv1.DestroyRequest{SessionId: id})
		if err != nil || !gone.GetDestroyed() {
			t.Fatalf("destroy: %v, %v", gone, err)
		}
		_, err = sub.Recv()
		wantReason(t, err, codes.NotFound, "SESSION_NOT_FOUND")
	})
}
