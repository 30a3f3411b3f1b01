package sessiond_test

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sessiond/sessiond/client"
	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
)

// frontEnd is a front-end's stream, spoken by hand.
type frontEnd struct {
	t      *testing.T
	id     string
	number uint64
	stream sessiondv1.LockService_AttachClient
	hangUp context.CancelFunc
}

// attach attaches a front-end for the first time.
func (n *node) attach(t *testing.T) *frontEnd {
	t.Helper()
	f := &frontEnd{t: t, id: rand.Text()}
	f.attach(n)
	return f
}

// attach attaches the front-end anew.
func (f *frontEnd) attach(n *node) {
	f.t.Helper()
	f.number++
	f.open(n, f.number)
	if m := f.hear(); m.GetAttached().GetGrace().AsDuration() <= 0 || m.GetAttached().GetPingInterval().AsDuration() <= 0 {
		f.t.Fatalf("instead of attached: %v", m)
	}
}

func (f *frontEnd) open(n *node, number uint64) {
	f.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(f.t.Context()))
	f.t.Cleanup(cancel)
	stream, err := n.locks.Attach(ctx)
	if err != nil {
		f.t.Fatal(err)
	}
	f.stream, f.hangUp = stream, cancel
	f.say(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Hello{Hello: &sessiondv1.AttachHello{FrontEnd: f.id, Number: number}}})
}

func (f *frontEnd) say(m *sessiondv1.AttachRequest) {
	f.t.Helper()
	if err := f.stream.Send(m); err != nil {
		f.t.Fatal(err)
	}
}

// hear waits for what is no ping.
func (f *frontEnd) hear() *sessiondv1.AttachResponse {
	f.t.Helper()
	for {
		m, err := f.stream.Recv()
		if err != nil {
			f.t.Fatal(err)
		}
		if m.GetPing() == nil {
			return m
		}
	}
}

// end waits for the end of the stream.
func (f *frontEnd) end() error {
	for {
		if _, err := f.stream.Recv(); err != nil {
			return err
		}
	}
}

func (f *frontEnd) claim(position uint64, grants ...*sessiondv1.Grant) {
	f.t.Helper()
	claims := &sessiondv1.AttachClaims{Position: position}
	for _, g := range grants {
		claims.Requests = append(claims.Requests, &sessiondv1.LockRequest{SessionId: g.GetSessionId(), RequestId: g.GetRequestId()})
	}
	f.say(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Claims{Claims: claims}})
}

func (f *frontEnd) acquire(n *node, session string) *sessiondv1.Grant {
	f.t.Helper()
	return n.acquire(f.t, &sessiondv1.AcquireRequest{SessionId: session, FrontEnd: f.id})
}

// holds says whether a grant still is the holder's, from any node's view.
func (n *node) holds(t *testing.T, g *sessiondv1.Grant) bool {
	t.Helper()
	resp, err := n.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: g.GetSessionId(), RequestId: g.GetRequestId()})
	if err != nil {
		t.Fatal(err)
	}
	if resp.GetAcquired() && resp.GetGrant().GetFencingToken() != g.GetFencingToken() {
		n.release(t, resp.GetGrant())
		return false
	}
	return resp.GetAcquired()
}

// L10: the locks of a front-end that has gone, whatever nodes they were acquired through, are released after the grace period,
// and not before; its places in queues go as well (L6).
func TestFrontEndGone(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, on cluster) {
		nodes := on.startWith(t, 3, sessiond.Config{})
		a, b, c := nodes[0], nodes[1], nodes[2]
		one, two := a.create(t, ""), a.create(t, "")
		f := a.attach(t)
		f.acquire(b, one)
		other := c.acquire(t, &sessiondv1.AcquireRequest{SessionId: two})
		dead := queue(t.Context(), c, &sessiondv1.AcquireRequest{SessionId: two, FrontEnd: f.id, RequestId: "dead"})
		c.settled(t, dead)
		next := queue(t.Context(), c, &sessiondv1.AcquireRequest{SessionId: one})
		behind := queue(t.Context(), a, &sessiondv1.AcquireRequest{SessionId: two})
		c.settled(t, next)
		began := time.Now()
		f.hangUp()
		take(t, next)
		if waited := time.Since(began); waited < sessiond.DefaultAttachGrace || waited > sessiond.DefaultAttachGrace+time.Second {
			t.Errorf("released after %v", waited)
		}
		c.release(t, other)
		// The call of the front-end that is not so dead after all has taken its place anew, at the end.
		take(t, behind)
	})
}

// L10, L4: a front-end that never attached keeps its locks; that its node hears nothing of it means nothing.
func TestNeverAttached(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, on cluster) {
		nodes := on.startWith(t, 2, sessiond.Config{AttachGrace: 100 * time.Millisecond})
		a, b := nodes[0], nodes[1]
		stranger := a.acquire(t, &sessiondv1.AcquireRequest{SessionId: a.create(t, ""), FrontEnd: "stranger"})
		f := a.attach(t)
		g := f.acquire(b, a.create(t, ""))
		f.hangUp()
		eventually(t, 5*time.Second, "the lock of the other is released", func() bool { return !b.holds(t, g) })
		if err := b.stop(); err != nil {
			t.Fatal(err)
		}
		a.release(t, stranger)
	})
}

// L11: goodbye releases at once what was acquired through any node.
func TestGoodbye(t *testing.T) {
	onBoth(t, func(t *testing.T, on cluster) {
		nodes := on.startWith(t, 2, sessiond.Config{})
		a, b := nodes[0], nodes[1]
		f := a.attach(t)
		grants := []*sessiondv1.Grant{f.acquire(a, a.create(t, "")), f.acquire(b, a.create(t, ""))}
		for range 100 {
			grants = append(grants, f.acquire(b, a.create(t, "")))
		}
		began := time.Now()
		f.say(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Goodbye{Goodbye: &sessiondv1.AttachGoodbye{}}})
		if err := f.end(); !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("took %v", took)
		}
		for _, g := range grants {
			wantReason(t, b.tryRelease(t, g), codes.FailedPrecondition, "LOCK_NOT_HELD")
		}
	})
}

// L10: a front-end that attaches anew in time keeps its locks, on the same node and on another; what it does not claim,
// because the answer was lost and nobody retries, is released (L8), and what it acquires meanwhile is not.
func TestAttachAnew(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, on cluster) {
		nodes := on.startWith(t, 2, sessiond.Config{})
		a, b := nodes[0], nodes[1]
		f := a.attach(t)
		kept, lost := f.acquire(b, a.create(t, "")), f.acquire(b, a.create(t, ""))
		for _, n := range []*node{b, a, a} {
			f.hangUp()
			f.attach(n)
			ask := f.hear().GetAsk()
			if ask.GetPosition() == 0 {
				t.Fatalf("ask: %v", ask)
			}
			young := f.acquire(a, a.create(t, ""))
			f.claim(ask.GetPosition(), kept)
			eventually(t, 5*time.Second, "what is not claimed is released", func() bool { return !a.holds(t, lost) })
			for _, g := range []*sessiondv1.Grant{young, kept} {
				if !a.holds(t, g) {
					t.Errorf("released: %v", g)
				}
			}
			a.release(t, young)
			lost = f.acquire(b, lost.GetSessionId())
		}
		timer := time.NewTimer(sessiond.DefaultAttachGrace + time.Second)
		<-timer.C
		if !a.holds(t, kept) {
			t.Error("the node that the front-end left released its lock")
		}
	})
}

// L10: an attach that is late does not replace a newer one, and what it replaces ends without harm.
func TestLateAttach(t *testing.T) {
	onBoth(t, func(t *testing.T, on cluster) {
		nodes := on.startWith(t, 2, sessiond.Config{AttachGrace: 100 * time.Millisecond})
		a, b := nodes[0], nodes[1]
		f := a.attach(t)
		g := f.acquire(a, a.create(t, ""))
		old := *f
		f.number = 5
		f.attach(b)
		if err := old.end(); !errors.Is(err, io.EOF) {
			t.Errorf("the older stream ends with %v", err)
		}
		late := *f
		late.open(a, 4)
		if err := late.end(); !errors.Is(err, io.EOF) {
			t.Errorf("the late stream ends with %v", err)
		}
		late.hangUp()
		ask := f.hear().GetAsk()
		f.claim(ask.GetPosition(), g)
		timer := time.NewTimer(500 * time.Millisecond)
		<-timer.C
		if !b.holds(t, g) {
			t.Error("released")
		}
	})
}

// L8: a request that the front-end has given up leaves no lock held, although it was granted; that of another front-end
// stays.
func TestAbandon(t *testing.T) {
	onBoth(t, func(t *testing.T, on cluster) {
		nodes := on.startWith(t, 2, sessiond.Config{})
		a, b := nodes[0], nodes[1]
		f := a.attach(t)
		mine, other := f.acquire(b, a.create(t, "")), b.acquire(t, &sessiondv1.AcquireRequest{SessionId: a.create(t, ""), FrontEnd: "other"})
		abandon := &sessiondv1.AttachAbandon{Requests: []*sessiondv1.LockRequest{{SessionId: "none", RequestId: "none"}}}
		for _, g := range []*sessiondv1.Grant{mine, other} {
			abandon.Requests = append(abandon.Requests, &sessiondv1.LockRequest{SessionId: g.GetSessionId(), RequestId: g.GetRequestId()})
		}
		f.say(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Abandon{Abandon: abandon}})
		eventually(t, 5*time.Second, "it is released", func() bool { return !b.holds(t, mine) })
		b.release(t, other)
	})
}

// What a front-end says is checked.
func TestAttachChecks(t *testing.T) {
	onBoth(t, func(t *testing.T, on cluster) {
		n := on.startWith(t, 1, sessiond.Config{})[0]
		many := make([]*sessiondv1.LockRequest, 10_001)
		for i := range many {
			many[i] = &sessiondv1.LockRequest{SessionId: "s", RequestId: "r"}
		}
		for name, m := range map[string]*sessiondv1.AttachRequest{
			"nothing":        {},
			"a second hello": {Message: &sessiondv1.AttachRequest_Hello{Hello: &sessiondv1.AttachHello{FrontEnd: "f", Number: 1}}},
			"no id":          {Message: &sessiondv1.AttachRequest_Claims{Claims: &sessiondv1.AttachClaims{Requests: []*sessiondv1.LockRequest{{}}}}},
			"too many":       {Message: &sessiondv1.AttachRequest_Claims{Claims: &sessiondv1.AttachClaims{Requests: many}}},
		} {
			f := n.attach(t)
			f.say(m)
			if err := f.end(); reasonOf(err) != "INVALID_ARGUMENT" {
				t.Errorf("%s: %v", name, err)
			}
		}
		f := &frontEnd{t: t, id: " "}
		f.open(n, 0)
		wantReason(t, f.end(), codes.InvalidArgument, "INVALID_ARGUMENT")
	})
}

// L10: a node that shuts down sends its front-ends to another, which keeps their locks.
func TestAttachedToADrainingNode(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, on cluster) {
		nodes := on.startWith(t, 2, sessiond.Config{})
		a, b := nodes[0], nodes[1]
		f := b.attach(t)
		g := f.acquire(b, a.create(t, ""))
		stopped := make(chan error, 1)
		go func() { stopped <- b.stop() }()
		wantReason(t, f.end(), codes.Unavailable, "SHUTTING_DOWN")
		f.attach(a)
		f.claim(f.hear().GetAsk().GetPosition(), g)
		if err := <-stopped; err != nil {
			t.Fatal(err)
		}
		timer := time.NewTimer(sessiond.DefaultAttachGrace + time.Second)
		<-timer.C
		if !a.holds(t, g) {
			t.Error("released")
		}
	})
}

// attachedClient is a client of nodes that is attached.
func attachedClient(t *testing.T, nodes ...*node) *client.Client {
	t.Helper()
	return attachedClientWith(t, nil, nodes...)
}

func attachedClientWith(t *testing.T, opts []grpc.DialOption, nodes ...*node) *client.Client {
	t.Helper()
	var addresses []string
	for _, n := range nodes {
		addresses = append(addresses, n.Addr().String())
	}
	c, err := client.New(addresses, client.Options{Attach: true, DialOptions: opts})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // by some tests already
	eventually(t, 5*time.Second, "the client is attached", c.Attached)
	return c
}

// L10, L11: the Go client attaches by an option, attaches anew when its node goes, claims what it has, and says goodbye.
func TestClientAttaches(t *testing.T) {
	t.Parallel()
	nodes := startWith(t, 3, sessiond.Config{})
	c := attachedClient(t, nodes...)
	grants := map[string]client.Grant{}
	for range 6 {
		id := nodes[0].create(t, "")
		g, err := c.Acquire(t.Context(), id, client.AcquireOptions{})
		if err != nil {
			t.Fatal(err)
		}
		grants[id] = g
	}
	for _, n := range nodes[:2] {
		if err := n.stop(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, 5*time.Second, "the client is attached to the node that is left", c.Attached)
	timer := time.NewTimer(sessiond.DefaultAttachGrace + time.Second)
	<-timer.C
	last := nodes[2]
	var one client.Grant
	for id, g := range grants {
		if !last.holds(t, &sessiondv1.Grant{SessionId: id, RequestId: g.RequestID, FencingToken: g.FencingToken}) {
			t.Errorf("released: %+v", g)
		}
		one = g
	}
	if err := c.Release(t.Context(), one); err != nil {
		t.Error(err)
	}
	began := time.Now()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for id := range grants {
		resp, err := last.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id})
		if err != nil || !resp.GetAcquired() {
			t.Errorf("after the goodbye: %v, %v", resp, err)
		}
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("took %v", took)
	}
}

// L8: a client whose caller goes away just as the lock is granted leaves no lock held, whenever that moment is.
func TestClientGoneAtTheGrant(t *testing.T) {
	nodes := startWith(t, 2, sessiond.Config{})
	c := attachedClient(t, nodes...)
	id := nodes[0].create(t, "")
	for i := range 100 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*50*time.Microsecond)
		g, err := c.Acquire(ctx, id, client.AcquireOptions{})
		cancel()
		if err == nil {
			if err := c.Release(t.Context(), g); err != nil {
				t.Fatal(err)
			}
		}
		began := time.Now()
		g, err = c.Acquire(t.Context(), id, client.AcquireOptions{Timeout: 5 * time.Second})
		if err != nil || time.Since(began) > time.Second {
			t.Fatalf("round %d: %v after %v", i, err, time.Since(began))
		}
		if err := c.Release(t.Context(), g); err != nil {
			t.Fatal(err)
		}
	}
}

// L8: a grant whose answer is lost, and a release that does not arrive, are made good by the attached client: no lock stays held. A
// request that the caller named is kept for the caller to try again.
func TestClientLosesAnswers(t *testing.T) {
	var loseAnswer, loseRelease atomic.Bool
	lost := status.Error(codes.Unavailable, "lost")
	opts := []grpc.DialOption{grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if loseRelease.Load() && method == sessiondv1.LockService_Release_FullMethodName {
			return lost
		}
		err := invoker(ctx, method, req, reply, cc, opts...)
		if err == nil && loseAnswer.Load() && method == sessiondv1.LockService_Acquire_FullMethodName {
			return lost
		}
		return err
	})}
	nodes := startWith(t, 2, sessiond.Config{})
	a := nodes[0]
	c := attachedClientWith(t, opts, nodes...)
	free := func(id string) bool {
		resp, err := a.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id})
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetAcquired()
	}

	id := a.create(t, "")
	loseAnswer.Store(true)
	if _, err := c.Acquire(t.Context(), id, client.AcquireOptions{}); !errors.Is(err, client.ErrUnavailable) {
		t.Fatal(err)
	}
	eventually(t, time.Second, "a grant whose answer was lost is released", func() bool { return free(id) })

	named := client.AcquireOptions{RequestID: "named"}
	id = a.create(t, "")
	if _, err := c.Acquire(t.Context(), id, named); !errors.Is(err, client.ErrUnavailable) {
		t.Fatal(err)
	}
	loseAnswer.Store(false)
	g, err := c.Acquire(t.Context(), id, named)
	if err != nil || free(id) {
		t.Fatalf("again: %v", err)
	}
	loseRelease.Store(true)
	if err := c.Release(t.Context(), g); !errors.Is(err, client.ErrUnavailable) {
		t.Error(err)
	}
	eventually(t, time.Second, "a grant whose release was lost is released", func() bool { return free(id) })
}
