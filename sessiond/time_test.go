package sessiond_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/memstore"
)

// inMemory runs a test against a store in memory, in virtual time.
func inMemory(t *testing.T, test func(t *testing.T, c cluster)) {
	synctest.Test(t, func(t *testing.T) {
		store := memstore.Open()
		t.Cleanup(func() { store.Close(context.WithoutCancel(t.Context())) })
		test(t, cluster{memory: store})
	})
}

// What takes hours on a clock is tested here in virtual time, to the nanosecond, on the store in memory.

// S1, S10: a session without a TTL of its own lives for an hour after its last save or touch, and reads do not count. Touches are
// written once per third of it.
func TestSessionTimes(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		touch := func() uint64 {
			t.Helper()
			if _, err := n.sessions.Touch(t.Context(), &sessiondv1.TouchRequest{SessionId: id}); err != nil {
				t.Fatal(err)
			}
			return n.read(t, id).GetRevision()
		}
		revision := touch()
		time.Sleep(20 * time.Minute)
		if touch() != revision {
			t.Error("written although two thirds of the TTL were left")
		}
		time.Sleep(time.Nanosecond)
		if touch() == revision {
			t.Error("not written although less than two thirds of the TTL were left")
		}
		if left := n.read(t, id).GetTtlRemaining().AsDuration(); left != time.Hour {
			t.Errorf("left: %v", left)
		}
		time.Sleep(50 * time.Minute)
		if _, err := n.sessions.Save(t.Context(), &sessiondv1.SaveRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour - time.Nanosecond)
		n.read(t, id)
		time.Sleep(time.Nanosecond)
		_, err := n.sessions.Read(t.Context(), &sessiondv1.ReadRequest{SessionId: id})
		wantReason(t, err, codes.NotFound, "SESSION_NOT_FOUND")
	})
}

// S1: a save may bring a TTL of its own, from a second to 30 days, and keeps the session's without one.
func TestSessionTTLOfASave(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		for _, ttl := range []time.Duration{30 * 24 * time.Hour, time.Second} {
			if _, err := n.sessions.Save(t.Context(), &sessiondv1.SaveRequest{SessionId: id, Ttl: seconds(ttl.Seconds())}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(ttl - time.Nanosecond)
			if s := n.read(t, id); s.GetTtl().AsDuration() != ttl || s.GetTtlRemaining().AsDuration() != time.Nanosecond {
				t.Fatalf("read: %v", s)
			}
		}
		time.Sleep(time.Nanosecond)
		_, err := n.sessions.Save(t.Context(), &sessiondv1.SaveRequest{SessionId: id})
		wantReason(t, err, codes.NotFound, "SESSION_NOT_FOUND")
	})
}

// L2, L4: without values of their own, a lock lasts for 300 s and a wait for 30 s. The next waiter has the lock when the TTL ends,
// for all of its own TTL, however long it has waited; and the one after that.
func TestLockTimes(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		began := time.Now()
		held := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		if ttl := held.GetTtl().AsDuration(); ttl != 300*time.Second {
			t.Errorf("TTL: %v", ttl)
		}
		wantReason(t, (<-queueLong(t, n, id, "short", nil)).err, codes.Aborted, "LOCK_TIMEOUT")
		if waited := time.Since(began); waited != 30*time.Second {
			t.Errorf("gave up after %v", waited)
		}
		var waiting []<-chan result
		for i := range 3 {
			waiting = append(waiting, queueLong(t, n, id, fmt.Sprint("w", i), new(time.Hour)))
			time.Sleep(time.Second)
		}
		for i, ch := range waiting {
			r := <-ch
			if r.err != nil {
				t.Fatal(r.err)
			}
			if passed, want := time.Since(began), time.Duration(i)*2*time.Second+300*time.Second; passed != want || r.grant.GetTtl().AsDuration() != 2*time.Second {
				t.Errorf("waiter %d: after %v for %v, want after %v", i, passed, r.grant.GetTtl().AsDuration(), want)
			}
		}
		n.settled(t, queueLong(t, n, id, "last", new(time.Minute)))
	})
}

// queueLong starts an acquire for 2 s of the lock.
func queueLong(t *testing.T, n *node, id, request string, timeout *time.Duration) <-chan result {
	t.Helper()
	req := &sessiondv1.AcquireRequest{SessionId: id, RequestId: request, Ttl: seconds(2)}
	if timeout != nil {
		req.Timeout = seconds(timeout.Seconds())
	}
	return queue(t.Context(), n, req)
}

// M3: a message without a TTL of its own is stored for 5 minutes, and never longer than its session.
func TestMessageTimes(t *testing.T) {
	inMemory(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		n.publish(t, id, "s", "x")
		stored := func() int {
			t.Helper()
			sub := n.subscribe(t, id, 0, "s")
			defer sub.cancel()
			resp, err := sub.Recv()
			if err != nil {
				t.Fatal(err)
			}
			return len(resp.GetMessages())
		}
		time.Sleep(5*time.Minute - time.Nanosecond)
		if stored() != 1 {
			t.Error("gone before its TTL")
		}
		time.Sleep(time.Nanosecond)
		if stored() != 0 {
			t.Error("there after its TTL")
		}
		_, err := n.messages.Publish(t.Context(), &sessiondv1.PublishRequest{SessionId: id, Stream: "s", Ttl: seconds(24 * 3600)})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if _, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
		if stored() != 0 {
			t.Error("outlived its session")
		}
	})
}
