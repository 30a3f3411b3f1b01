package sessiond_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
)

// queue starts an acquire and returns what it ends with.
func queue(ctx context.Context, n *node, req *sessiondv1.AcquireRequest) <-chan result {
	done := make(chan result, 1)
	go func() {
		resp, err := n.locks.Acquire(ctx, req)
		done <- result{resp.GetGrant(), err}
	}()
	return done
}

type result struct {
	grant *sessiondv1.Grant
	err   error
}

// settled gives an acquire time to take its place in the queue, and checks that it waits there.
func (n *node) settled(t *testing.T, ch <-chan result) {
	t.Helper()
	select {
	case r := <-ch:
		t.Fatalf("ended already: %v, %v", r.grant, r.err)
	case <-time.After(100 * time.Millisecond):
	}
}

func take(t *testing.T, ch <-chan result) *sessiondv1.Grant {
	t.Helper()
	select {
	case r := <-ch:
		if r.err != nil {
			t.Fatal(r.err)
		}
		return r.grant
	case <-time.After(10 * time.Second):
		t.Fatal("no answer")
		return nil
	}
}

func failed(t *testing.T, ch <-chan result) error {
	t.Helper()
	select {
	case r := <-ch:
		if r.err == nil {
			t.Fatalf("granted: %v", r.grant)
		}
		return r.err
	case <-time.After(10 * time.Second):
		t.Fatal("no answer")
		return nil
	}
}

// L6: 30 waiters over three nodes are served in the order in which they came.
func TestFirstComeFirstServed(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 3)
		id := nodes[0].create(t, "")
		held := nodes[0].acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		const waiters = 30
		var mu sync.Mutex
		var order []int
		tokens := make([]uint64, waiters)
		var wg sync.WaitGroup
		for i := range waiters {
			wg.Go(func() {
				n := nodes[i%3]
				resp, err := n.locks.Acquire(t.Context(), &sessiondv1.AcquireRequest{SessionId: id, RequestId: fmt.Sprint("r", i)})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				order = append(order, i)
				tokens[i] = resp.GetGrant().GetFencingToken()
				mu.Unlock()
				n.release(t, resp.GetGrant())
			})
		}
		nodes[1].release(t, held)
		wg.Wait()
		// The tokens are the order of arrival: grants must follow it.
		if !slices.IsSortedFunc(order, func(a, b int) int { return int(tokens[a]) - int(tokens[b]) }) {
			t.Errorf("served %v with tokens %v", order, tokens)
		}
	})
}

// L2: a lock not had in time is an error of its own, and leaves no hole (L6).
func TestTimeoutInTheMiddle(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "")
		held := a.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		short := queue(t.Context(), b, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "short", Timeout: seconds(0.5)})
		b.settled(t, short)
		cctx, cancel := context.WithCancel(t.Context())
		gone := queue(cctx, a, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "gone"})
		a.settled(t, gone)
		last := queue(t.Context(), b, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "last"})
		b.settled(t, last)
		cancel()
		if err := failed(t, gone); reasonOf(err) != "Canceled" {
			t.Errorf("cancelled: %v", err)
		}
		wantReason(t, failed(t, short), codes.Aborted, "LOCK_TIMEOUT")
		began := time.Now()
		a.release(t, held)
		b.release(t, take(t, last))
		if waited := time.Since(began); waited > time.Second {
			t.Errorf("served after %v", waited)
		}
		// Nobody is left.
		resp, err := a.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id})
		if err != nil || !resp.GetAcquired() {
			t.Errorf("try: %v, %v", resp, err)
		}
	})
}

// L2: a timeout of zero is a try that is an error when refused.
func TestNoTimeout(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		g := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id, Timeout: seconds(0)})
		_, err := n.locks.Acquire(t.Context(), &sessiondv1.AcquireRequest{SessionId: id, Timeout: seconds(0)})
		wantReason(t, err, codes.Aborted, "LOCK_TIMEOUT")
		n.release(t, g)
	})
}

// L2, L3: a try answers at once, with the holder if refused, and can bring the session.
func TestTryAcquire(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "data")
		req := &sessiondv1.TryAcquireRequest{SessionId: id, RequestId: "r", Holder: "alice", ReadSession: true}
		got, err := a.locks.TryAcquire(t.Context(), req)
		if err != nil || !got.GetAcquired() || string(got.GetSession().GetData()) != "data" || got.GetPosition() == 0 {
			t.Fatalf("try: %v, %v", got, err)
		}
		if ttl := got.GetGrant().GetTtl().AsDuration(); ttl < 300*time.Second || ttl > 331*time.Second {
			t.Errorf("ttl: %v", ttl)
		}
		again, err := b.locks.TryAcquire(t.Context(), req)
		if err != nil || again.GetGrant().GetFencingToken() != got.GetGrant().GetFencingToken() {
			t.Errorf("retry: %v, %v", again, err)
		}
		refused, err := b.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id, Holder: "bob"})
		if err != nil || refused.GetAcquired() || refused.GetHolder() != "alice" {
			t.Errorf("refused: %v, %v", refused, err)
		}
		_, err = b.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id, Holder: "alice"})
		wantReason(t, err, codes.FailedPrecondition, "LOCK_ALREADY_HELD")
		_, err = b.locks.Acquire(t.Context(), &sessiondv1.AcquireRequest{SessionId: id, Holder: "alice"})
		wantReason(t, err, codes.FailedPrecondition, "LOCK_ALREADY_HELD")
		a.release(t, got.GetGrant())
		free, err := b.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id})
		if err != nil || !free.GetAcquired() {
			t.Errorf("after release: %v, %v", free, err)
		}
	})
}

// L8: a retry returns the same grant on any node, while the first call waits, after the grant, and after its answer was lost.
func TestRetry(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "")
		held := a.acquire(t, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "first"})
		for _, n := range nodes {
			if again := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "first"}); again.GetFencingToken() != held.GetFencingToken() {
				t.Errorf("retry of a grant: %v", again)
			} else if again.GetTtl().AsDuration() > held.GetTtl().AsDuration() {
				t.Errorf("a retry made the TTL longer: %v after %v", again.GetTtl(), held.GetTtl())
			}
		}

		req := &sessiondv1.AcquireRequest{SessionId: id, RequestId: "second"}
		cctx, cancel := context.WithCancel(t.Context())
		one := queue(cctx, a, req)
		a.settled(t, one)
		behind := queue(t.Context(), a, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "third"})
		a.settled(t, behind)
		two := queue(t.Context(), a, req)
		a.settled(t, two)
		three := queue(t.Context(), b, req)
		b.settled(t, three)
		// The oldest call gives up: the retries keep its place.
		cancel()
		if err := failed(t, one); reasonOf(err) != "Canceled" {
			t.Errorf("cancelled: %v", err)
		}
		b.settled(t, behind)
		a.release(t, held)
		g2, g3 := take(t, two), take(t, three)
		if g2.GetFencingToken() != g3.GetFencingToken() {
			t.Errorf("grants %v and %v", g2, g3)
		}
		b.settled(t, behind)
		b.release(t, g3)
		b.release(t, take(t, behind))
	})
}

// L7: a second release, one by another and one by a late holder are errors and free nothing.
func TestRelease(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "")
		first := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "r"})
		n.release(t, first)
		wantReason(t, n.tryRelease(t, first), codes.FailedPrecondition, "LOCK_NOT_HELD")
		second := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "r"})
		if second.GetFencingToken() <= first.GetFencingToken() {
			t.Errorf("token %d after %d", second.GetFencingToken(), first.GetFencingToken())
		}
		wantReason(t, n.tryRelease(t, first), codes.FailedPrecondition, "LOCK_NOT_HELD")
		wantReason(t, n.tryRelease(t, &sessiondv1.Grant{SessionId: id, FencingToken: first.GetFencingToken()}), codes.FailedPrecondition, "LOCK_NOT_HELD")
		n.release(t, &sessiondv1.Grant{SessionId: id, FencingToken: second.GetFencingToken()})
	})
}

// L4, L5, S6: a lock ends with its TTL although its node could refresh it; the next waiter gets it with a greater token, and the
// late holder can neither save nor release.
func TestLockExpiry(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "")
		began := time.Now()
		late := a.acquire(t, &sessiondv1.AcquireRequest{SessionId: id, Ttl: seconds(1)})
		next := take(t, queue(t.Context(), b, &sessiondv1.AcquireRequest{SessionId: id, Ttl: seconds(60)}))
		waited := time.Since(began)
		if waited < late.GetTtl().AsDuration() || waited < time.Second {
			t.Errorf("handed over after %v, before the TTL of %v ended", waited, late.GetTtl().AsDuration())
		}
		if waited > 7*time.Second {
			t.Errorf("handed over after %v", waited)
		}
		if next.GetFencingToken() <= late.GetFencingToken() || next.GetTtl().AsDuration() < 60*time.Second {
			t.Errorf("next grant: %v", next)
		}
		_, err := a.sessions.Save(t.Context(), &sessiondv1.SaveRequest{SessionId: id, FencingToken: late.GetFencingToken(), RequestId: late.GetRequestId()})
		wantReason(t, err, codes.Aborted, "LOCK_LOST")
		wantReason(t, a.tryRelease(t, late), codes.FailedPrecondition, "LOCK_NOT_HELD")
		b.release(t, next)
	})
}

// L4: a waiter whose TTL is shorter than its wait keeps its place, and has the whole TTL once it is granted.
func TestLongWait(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "")
		holder := a.acquire(t, &sessiondv1.AcquireRequest{SessionId: id, Ttl: seconds(4)})
		waiting := queue(t.Context(), b, &sessiondv1.AcquireRequest{SessionId: id, Ttl: seconds(1)})
		b.settled(t, waiting)
		behind := queue(t.Context(), a, &sessiondv1.AcquireRequest{SessionId: id, Ttl: seconds(1), RequestId: "behind"})
		got := take(t, waiting)
		if got.GetFencingToken() <= holder.GetFencingToken() || got.GetTtl().AsDuration() < time.Second {
			t.Errorf("grant: %v", got)
		}
		b.release(t, got)
		take(t, behind)
	})
}

// S8: waiters of a destroyed session are told at once, on every node.
func TestDestroyTellsWaiters(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		id := nodes[0].create(t, "")
		nodes[0].acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		var waiting []<-chan result
		for i := range 6 {
			ch := queue(t.Context(), nodes[i%2], &sessiondv1.AcquireRequest{SessionId: id, RequestId: fmt.Sprint("w", i)})
			waiting = append(waiting, ch)
		}
		nodes[0].settled(t, waiting[0])
		began := time.Now()
		if _, err := nodes[1].sessions.Destroy(t.Context(), &sessiondv1.DestroyRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
		for _, ch := range waiting {
			wantReason(t, failed(t, ch), codes.NotFound, "SESSION_NOT_FOUND")
		}
		if waited := time.Since(began); waited > time.Second {
			t.Errorf("told after %v", waited)
		}
	})
}

// S12: waiters of a session that expires are told as well, and its lock goes with it, so that nothing is left behind for a
// new one of the same id.
func TestExpiryTellsWaiters(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		resp, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{Ttl: seconds(1)})
		if err != nil {
			t.Fatal(err)
		}
		id := resp.GetSession().GetId()
		g := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		waiting := queue(t.Context(), n, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "w"})
		wantReason(t, failed(t, waiting), codes.NotFound, "SESSION_NOT_FOUND")
		// A grant may outlive its session, by no more than its own TTL.
		if err := n.tryRelease(t, g); err != nil {
			wantReason(t, err, codes.FailedPrecondition, "LOCK_NOT_HELD")
		}
		if _, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
		free, err := n.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id})
		if err != nil || !free.GetAcquired() {
			t.Errorf("try: %v, %v", free, err)
		}
	})
}

// L6: the queue is bounded by an error of its own.
func TestTooManyWaiters(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.startWith(t, 1, sessiond.Config{MaxWaiters: 2})[0]
		id := n.create(t, "")
		held := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		var waiting []<-chan result
		for i := range 2 {
			ch := queue(t.Context(), n, &sessiondv1.AcquireRequest{SessionId: id, RequestId: fmt.Sprint("w", i)})
			n.settled(t, ch)
			waiting = append(waiting, ch)
		}
		_, err := n.locks.Acquire(t.Context(), &sessiondv1.AcquireRequest{SessionId: id})
		wantReason(t, err, codes.ResourceExhausted, "TOO_MANY_WAITERS")
		n.release(t, held)
		for _, ch := range waiting {
			n.release(t, take(t, ch))
		}
	})
}

// L1: the lock of one session keeps nobody of another waiting.
func TestSessionsDoNotWaitForEachOther(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		n.acquire(t, &sessiondv1.AcquireRequest{SessionId: n.create(t, "")})
		began := time.Now()
		n.acquire(t, &sessiondv1.AcquireRequest{SessionId: n.create(t, "")})
		if time.Since(began) > time.Second {
			t.Error("waited")
		}
	})
}

// L8: a node that shuts down tells its waiters and takes them out of the queue.
func TestDrain(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "")
		held := a.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		waiting := queue(t.Context(), b, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "w"})
		b.settled(t, waiting)
		sub, err := b.messages.Subscribe(t.Context(), &sessiondv1.SubscribeRequest{SessionId: id, Streams: []string{"s"}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sub.Recv(); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := b.stop(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > 900*time.Millisecond {
			t.Errorf("shut down after %v, the whole grace period", took)
		}
		wantReason(t, failed(t, waiting), codes.Unavailable, "SHUTTING_DOWN")
		_, err = sub.Recv()
		wantReason(t, err, codes.Unavailable, "SHUTTING_DOWN")
		a.release(t, held)
		free, err := a.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id})
		if err != nil || !free.GetAcquired() {
			t.Errorf("try: %v, %v", free, err)
		}
	})
}

// L3: an acquire of a session that is not there leaves nothing behind, whatever its id.
func TestAcquireOfNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := "nothing"
		began := time.Now()
		_, err := n.locks.Acquire(t.Context(), &sessiondv1.AcquireRequest{SessionId: id, RequestId: "r"})
		wantReason(t, err, codes.NotFound, "SESSION_NOT_FOUND")
		_, err = n.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id, RequestId: "t"})
		wantReason(t, err, codes.NotFound, "SESSION_NOT_FOUND")
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("told after %v", took)
		}
		if _, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
		free, err := n.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id})
		if err != nil || !free.GetAcquired() {
			t.Errorf("try: %v, %v", free, err)
		}
	})
}

// L1, S7: a lock is there only for those who use one: without it saves go through, and while it is held reads, touches,
// messages and a destroy do.
func TestWhatNeedsNoLock(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "x")
		if _, err := b.sessions.Save(t.Context(), &sessiondv1.SaveRequest{SessionId: id, Data: []byte("y")}); err != nil {
			t.Errorf("save without a lock: %v", err)
		}
		a.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		began := time.Now()
		if s := b.read(t, id); string(s.GetData()) != "y" {
			t.Errorf("read: %v", s)
		}
		if _, err := b.sessions.Touch(t.Context(), &sessiondv1.TouchRequest{SessionId: id}); err != nil {
			t.Errorf("touch: %v", err)
		}
		b.publish(t, id, "s", "hello")
		if m := b.subscribe(t, id, 0, "s").next(t, 1)[0]; string(m.GetPayload()) != "hello" {
			t.Errorf("message: %v", m)
		}
		if resp, err := b.sessions.Destroy(t.Context(), &sessiondv1.DestroyRequest{SessionId: id}); err != nil || !resp.GetDestroyed() {
			t.Errorf("destroy: %v, %v", resp, err)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("took %v", took)
		}
	})
}
