package sessiond_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
)

// S2, S3: ids are made when none is given; an id in use is an error of its own and nothing is overwritten.
func TestCreate(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		first, second := n.create(t, "a"), n.create(t, "b")
		if first == second || len(first) < 22 {
			t.Errorf("made ids %q and %q", first, second)
		}
		_, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{SessionId: first, Data: []byte("x")})
		wantReason(t, err, codes.AlreadyExists, "SESSION_EXISTS")
		if s := n.read(t, first); string(s.GetData()) != "a" {
			t.Errorf("data: %q", s.GetData())
		}
		odd := "a/b%2F~!"
		if _, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{SessionId: odd}); err != nil {
			t.Fatal(err)
		}
		if s := n.read(t, odd); s.GetId() != odd || s.GetTtl().AsDuration() != time.Hour {
			t.Errorf("read: %v", s)
		}
	})
}

// S4, S5, S8: what is destroyed is NOT_FOUND for every method, does not come back, and may be destroyed again.
func TestDestroyed(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "x")
		g := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		for i, want := range []bool{true, false} {
			resp, err := n.sessions.Destroy(t.Context(), &sessiondv1.DestroyRequest{SessionId: id})
			if err != nil || resp.GetDestroyed() != want {
				t.Errorf("destroy %d: %v, %v", i+1, resp, err)
			}
		}
		calls := map[string]func(context.Context) error{
			"read": func(ctx context.Context) error {
				_, err := n.sessions.Read(ctx, &sessiondv1.ReadRequest{SessionId: id})
				return err
			},
			"save": func(ctx context.Context) error {
				_, err := n.sessions.Save(ctx, &sessiondv1.SaveRequest{SessionId: id, Ttl: seconds(60)})
				return err
			},
			"save, keeping the TTL": func(ctx context.Context) error {
				_, err := n.sessions.Save(ctx, &sessiondv1.SaveRequest{SessionId: id})
				return err
			},
			"save with token": func(ctx context.Context) error {
				_, err := n.sessions.Save(ctx, &sessiondv1.SaveRequest{SessionId: id, Ttl: seconds(60), FencingToken: g.GetFencingToken(), RequestId: g.GetRequestId()})
				return err
			},
			"touch": func(ctx context.Context) error {
				_, err := n.sessions.Touch(ctx, &sessiondv1.TouchRequest{SessionId: id})
				return err
			},
			"acquire": func(ctx context.Context) error {
				_, err := n.locks.Acquire(ctx, &sessiondv1.AcquireRequest{SessionId: id})
				return err
			},
			"try": func(ctx context.Context) error {
				_, err := n.locks.TryAcquire(ctx, &sessiondv1.TryAcquireRequest{SessionId: id})
				return err
			},
			"publish": func(ctx context.Context) error {
				_, err := n.messages.Publish(ctx, &sessiondv1.PublishRequest{SessionId: id, Stream: "s"})
				return err
			},
			"trim": func(ctx context.Context) error {
				_, err := n.messages.Trim(ctx, &sessiondv1.TrimRequest{SessionId: id, Stream: "s"})
				return err
			},
			"retain": func(ctx context.Context) error {
				_, err := n.messages.Retain(ctx, &sessiondv1.RetainRequest{SessionId: id, Stream: "s"})
				return err
			},
			"subscribe": func(ctx context.Context) error {
				sub, err := n.messages.Subscribe(ctx, &sessiondv1.SubscribeRequest{SessionId: id, Streams: []string{"s"}})
				if err == nil {
					_, err = sub.Recv()
				}
				return err
			},
		}
		for name, call := range calls {
			if err := call(t.Context()); status.Code(err) != codes.NotFound || reasonOf(err) != "SESSION_NOT_FOUND" {
				t.Errorf("%s: %v", name, err)
			}
		}
		wantReason(t, n.tryRelease(t, g), codes.FailedPrecondition, "LOCK_NOT_HELD")
	})
}

// S6: of saves with the same expected revision one wins, on whatever node.
func TestCompareAndSwap(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		id := nodes[0].create(t, "")
		revision := nodes[0].read(t, id).GetRevision()
		const n = 10
		results := make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				_, results[i] = nodes[i%2].sessions.Save(t.Context(), &sessiondv1.SaveRequest{SessionId: id, Data: fmt.Append(nil, i), ExpectedRevision: &revision})
			})
		}
		wg.Wait()
		won := 0
		for i, err := range results {
			if err == nil {
				won++
				if s := nodes[1].read(t, id); string(s.GetData()) != fmt.Sprint(i) || s.GetRevision() <= revision {
					t.Errorf("read after save %d: %v", i, s)
				}
				continue
			}
			wantReason(t, err, codes.Aborted, "REVISION_MISMATCH")
		}
		if won != 1 {
			t.Errorf("%d saves won", won)
		}
	})
}

// S5, S6: a save that expects a revision that no session has, or that another one has, changes nothing and makes none, with a lock
// and without.
func TestUnexpectedRevision(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id, other := n.create(t, "kept"), n.create(t, "")
		gone := n.create(t, "")
		if _, err := n.sessions.Destroy(t.Context(), &sessiondv1.DestroyRequest{SessionId: gone}); err != nil {
			t.Fatal(err)
		}
		for _, expected := range []uint64{0, n.read(t, id).GetRevision() - 1, n.read(t, other).GetRevision()} {
			save := func(id string, g *sessiondv1.Grant) error {
				req := &sessiondv1.SaveRequest{SessionId: id, Data: []byte("changed"), ExpectedRevision: &expected}
				if g != nil {
					req.FencingToken = g.FencingToken
				}
				_, err := n.sessions.Save(t.Context(), req)
				return err
			}
			wantReason(t, save(id, nil), codes.Aborted, "REVISION_MISMATCH")
			wantReason(t, save(gone, nil), codes.NotFound, "SESSION_NOT_FOUND")
			g := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
			wantReason(t, save(id, g), codes.Aborted, "REVISION_MISMATCH")
			n.release(t, g)
		}
		if got := n.read(t, id).GetData(); string(got) != "kept" {
			t.Errorf("read %q", got)
		}
	})
}

// S6, S7: under a lock only the holder's token saves; afterwards it no longer does.
func TestSaveUnderLock(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "x")
		g := a.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		save := func(n *node, data string, token uint64, request string, release bool) error {
			_, err := n.sessions.Save(t.Context(), &sessiondv1.SaveRequest{
				SessionId: id, Data: []byte(data), FencingToken: token, RequestId: request, Release: release,
			})
			return err
		}
		wantReason(t, save(b, "no", 0, "", false), codes.Aborted, "SESSION_LOCKED")
		wantReason(t, save(b, "no", g.GetFencingToken()+1, g.GetRequestId(), false), codes.Aborted, "LOCK_LOST")
		wantReason(t, save(b, "no", g.GetFencingToken(), "another", false), codes.Aborted, "LOCK_LOST")
		wantReason(t, save(b, "no", g.GetFencingToken()-1, "", false), codes.Aborted, "LOCK_LOST")
		if err := save(b, "yes", g.GetFencingToken(), "", false); err != nil {
			t.Fatal(err)
		}
		if err := save(b, "last", g.GetFencingToken(), g.GetRequestId(), true); err != nil {
			t.Fatal(err)
		}
		wantReason(t, save(a, "no", g.GetFencingToken(), g.GetRequestId(), false), codes.Aborted, "LOCK_LOST")
		wantReason(t, save(a, "no", g.GetFencingToken(), "", true), codes.Aborted, "LOCK_LOST")
		wantReason(t, a.tryRelease(t, g), codes.FailedPrecondition, "LOCK_NOT_HELD")
		if s := a.read(t, id); string(s.GetData()) != "last" {
			t.Errorf("data: %q", s.GetData())
		}
		if err := save(a, "free", 0, "", false); err != nil {
			t.Errorf("save of a free session: %v", err)
		}
	})
}

// S6: a token from before the session was destroyed and made anew is no token of the new one.
func TestTokenOfEarlierSession(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		id := n.create(t, "x")
		g := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		if _, err := n.sessions.Destroy(t.Context(), &sessiondv1.DestroyRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
		if _, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
		next := n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id, RequestId: g.GetRequestId()})
		if next.GetFencingToken() <= g.GetFencingToken() {
			t.Errorf("token %d after %d", next.GetFencingToken(), g.GetFencingToken())
		}
		_, err := n.sessions.Save(t.Context(), &sessiondv1.SaveRequest{SessionId: id, FencingToken: g.GetFencingToken(), RequestId: g.GetRequestId()})
		wantReason(t, err, codes.Aborted, "LOCK_LOST")
		wantReason(t, n.tryRelease(t, g), codes.FailedPrecondition, "LOCK_NOT_HELD")
		n.release(t, next)
	})
}

// S11: data over the limit is refused with the limit named, and what was stored stays.
func TestSessionLimit(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		full := bytes.Repeat([]byte{'x'}, 1<<20)
		resp, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{Data: full})
		if err != nil {
			t.Fatal(err)
		}
		id := resp.GetSession().GetId()
		_, err = n.sessions.Save(t.Context(), &sessiondv1.SaveRequest{SessionId: id, Data: append(full, 'y')})
		wantReason(t, err, codes.ResourceExhausted, "SESSION_TOO_LARGE")
		info, ok := status.Convert(err).Details()[0].(*errdetails.ErrorInfo)
		if !ok || info.GetMetadata()["limit_bytes"] != "1048576" || info.GetMetadata()["size_bytes"] != "1048577" {
			t.Errorf("metadata: %v", info.GetMetadata())
		}
		if s := n.read(t, id); !bytes.Equal(s.GetData(), full) {
			t.Error("the stored data changed")
		}
	})
}

// S1, S12: a session is there until its TTL has passed since the last save or touch, and goes by itself afterwards,
// with its messages.
func TestExpiry(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		resp, err := a.sessions.Create(t.Context(), &sessiondv1.CreateRequest{Ttl: seconds(3)})
		if err != nil {
			t.Fatal(err)
		}
		id := resp.GetSession().GetId()
		sub, err := b.messages.Subscribe(t.Context(), &sessiondv1.SubscribeRequest{SessionId: id, Streams: []string{"s"}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sub.Recv(); err != nil {
			t.Fatal(err)
		}
		// Touched by one node and then another, it outlives its TTL twice over.
		began := time.Now()
		var touched time.Time
		eventually(t, 10*time.Second, "6 s of touches", func() bool {
			sent := time.Now()
			left, err := nodes[int(time.Since(began).Seconds())%2].sessions.Touch(t.Context(), &sessiondv1.TouchRequest{SessionId: id})
			if err != nil {
				t.Fatal(err)
			}
			touched = sent
			if left := left.GetTtlRemaining().AsDuration(); left < 2*time.Second-50*time.Millisecond || left > 3*time.Second {
				t.Fatalf("left after a touch: %v", left)
			}
			return time.Since(began) > 6*time.Second
		})
		_, err = sub.Recv() // ends when the session does
		lived := time.Since(touched)
		wantReason(t, err, codes.NotFound, "SESSION_NOT_FOUND")
		if lived < 2*time.Second {
			t.Errorf("lived for %v after a touch that left at least 2 s", lived)
		}
		if lived > 8*time.Second {
			t.Errorf("lived for %v after its last touch", lived)
		}
		_, err = a.sessions.Read(t.Context(), &sessiondv1.ReadRequest{SessionId: id})
		wantReason(t, err, codes.NotFound, "SESSION_NOT_FOUND")
	})
}

// S10: a touch writes only when more than a third of the TTL has passed, whoever wrote last.
func TestTouchIsCoalesced(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		resp, err := nodes[0].sessions.Create(t.Context(), &sessiondv1.CreateRequest{Ttl: seconds(6)})
		if err != nil {
			t.Fatal(err)
		}
		id, made := resp.GetSession().GetId(), time.Now()
		revision := resp.GetSession().GetRevision()
		writes := 0
		eventually(t, 10*time.Second, "a touch that writes", func() bool {
			if _, err := nodes[1].sessions.Touch(t.Context(), &sessiondv1.TouchRequest{SessionId: id}); err != nil {
				t.Fatal(err)
			}
			if r := nodes[1].read(t, id).GetRevision(); r != revision {
				writes, revision = writes+1, r
			}
			return writes > 0
		})
		if passed := time.Since(made); passed < 900*time.Millisecond {
			t.Errorf("written after %v of 6 s", passed)
		}
		for range 5 {
			if _, err := nodes[0].sessions.Touch(t.Context(), &sessiondv1.TouchRequest{SessionId: id}); err != nil {
				t.Fatal(err)
			}
		}
		if r := nodes[0].read(t, id).GetRevision(); r != revision {
			t.Error("touched twice in a row")
		}
	})
}

// A node reports faults of a request together, one violation a field.
func TestInvalidArguments(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		n := c.start(t, 1)[0]
		_, err := n.locks.Acquire(t.Context(), &sessiondv1.AcquireRequest{SessionId: strings.Repeat("x", 129), Holder: "a b", Ttl: seconds(0.5)})
		wantReason(t, err, codes.InvalidArgument, "INVALID_ARGUMENT")
		var fields []string
		for _, d := range status.Convert(err).Details() {
			if bad, ok := d.(*errdetails.BadRequest); ok {
				for _, v := range bad.GetFieldViolations() {
					fields = append(fields, v.GetField())
				}
			}
		}
		if strings.Join(fields, " ") != "session_id holder ttl" {
			t.Errorf("fields: %v", fields)
		}
	})
}

// O1: what is stored survives a restart on the same data folder.
func TestRestart(t *testing.T) {
	cfg := sessiond.Config{DataDir: t.TempDir()}
	first := start(t, cfg)
	id := first.create(t, "kept")
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	second := start(t, cfg)
	if s := second.read(t, id); string(s.GetData()) != "kept" || s.GetTtlRemaining().AsDuration() < 59*time.Minute {
		t.Errorf("read: %v", s)
	}
}

// S4: what one node has saved, every other one reads from then on.
func TestReadSeesEverySave(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		id := nodes[0].create(t, "")
		for i := range 50 {
			data := fmt.Sprint(i)
			if _, err := nodes[i%2].sessions.Save(t.Context(), &sessiondv1.SaveRequest{SessionId: id, Data: []byte(data), Ttl: seconds(60)}); err != nil {
				t.Fatal(err)
			}
			if s := nodes[(i+1)%2].read(t, id); string(s.GetData()) != data {
				t.Fatalf("read %q after %q was saved", s.GetData(), data)
			}
		}
	})
}

// S8, S12: what belonged to a destroyed session is gone with it, its messages and its lock, and nothing of it meets the next
// session of the same id.
func TestDestroyLeavesNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, c cluster) {
		nodes := c.start(t, 2)
		a, b := nodes[0], nodes[1]
		id := a.create(t, "old")
		a.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
		a.publish(t, id, "s", "old")
		a.publish(t, id, "s", string(make([]byte, 2<<20)))
		if _, err := b.sessions.Destroy(t.Context(), &sessiondv1.DestroyRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
		if _, err := b.sessions.Create(t.Context(), &sessiondv1.CreateRequest{SessionId: id, Data: []byte("new")}); err != nil {
			t.Fatal(err)
		}
		if s := a.read(t, id); string(s.GetData()) != "new" {
			t.Errorf("read: %v", s)
		}
		if first, err := a.subscribe(t, id, 0, "s").Recv(); err != nil || len(first.GetMessages()) != 0 {
			t.Errorf("messages: %v, %v", first, err)
		}
		free, err := a.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id})
		if err != nil || !free.GetAcquired() {
			t.Errorf("try: %v, %v", free, err)
		}
	})
}
