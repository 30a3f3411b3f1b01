package chaos

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sessiond/sessiond/client"
	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/memstore"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// Faults that chaos found in the product, each as the shortest way to it. The seed is that of the run that found it.

// afterSave loses the answer to the first save, and does something before the client sends it again.
func afterSave(then func()) grpc.UnaryClientInterceptor {
	var done atomic.Bool
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		err := invoke(ctx, method, req, reply, cc, opts...)
		if method != sessiondv1.SessionService_Save_FullMethodName || done.Swap(true) {
			return err
		}
		then()
		return status.Error(codes.Unavailable, "the answer was lost")
	}
}

// Seed 2, lose-answers-to-nodes (S6, C1): a compare-and-swap was carried out, its answer lost, and the session locked by another before
// the client tried again, which was told that the session is locked: the client said that nothing was saved.
func TestSaveThatWasLockedBeforeItsRetry(t *testing.T) {
	s := memstore.Open()
	t.Cleanup(func() { s.Close(context.WithoutCancel(t.Context())) })
	connect := serve(t, s)
	other := connect()
	made, err := other.Create(t.Context(), []byte("old"), client.CreateOptions{ID: "s"})
	if err != nil {
		t.Fatal(err)
	}
	one := connect(grpc.WithChainUnaryInterceptor(afterSave(func() {
		if _, err := other.Acquire(t.Context(), "s", client.AcquireOptions{}); err != nil {
			t.Error(err)
		}
	})))
	revision, err := one.Save(t.Context(), "s", []byte("new"), client.SaveOptions{ExpectedRevision: made.Revision})
	if err != nil || revision <= made.Revision {
		t.Errorf("revision %d, %v: want the one that it was saved at", revision, err)
	}
}

// The same with a session that was destroyed before the retry: others may have read what was saved.
func TestSaveThatWasDestroyedBeforeItsRetry(t *testing.T) {
	s := memstore.Open()
	t.Cleanup(func() { s.Close(context.WithoutCancel(t.Context())) })
	connect := serve(t, s)
	other := connect()
	made, err := other.Create(t.Context(), []byte("old"), client.CreateOptions{ID: "s"})
	if err != nil {
		t.Fatal(err)
	}
	one := connect(grpc.WithChainUnaryInterceptor(afterSave(func() {
		if _, err := other.Destroy(t.Context(), "s"); err != nil {
			t.Error(err)
		}
	})))
	_, err = one.Save(t.Context(), "s", []byte("new"), client.SaveOptions{ExpectedRevision: made.Revision})
	if !errors.Is(err, client.ErrSessionNotFound) || !errors.Is(err, client.ErrOutcomeUnknown) {
		t.Errorf("%v: want that it has gone, and that nobody knows whether it was saved before", err)
	}
}

// Seed 4, pause-node (L4), is TestGrantEndsNoLater in sessiond/internal/rpc: a node was stopped with an acquire that it had granted, and
// answered when the TTL had passed; what the client added up was that it had held the lock until then, while another held it.

// Seed 101, pause-node (S6, C1): a holder's save was carried out, its answer lost; the client's second try met the revision that the first had
// made, but before the client looked at what is stored, the lock had ended and the next holder had saved. The client said that the lock
// was lost, and with it that nothing was saved.
func TestSaveThatWasOverwrittenBeforeItsRetry(t *testing.T) {
	for name, then := range map[string]func(t *testing.T, c *client.Client){
		"saved by the next holder": func(t *testing.T, c *client.Client) {
			t.Helper()
			if _, err := c.Save(t.Context(), "s", []byte("other"), client.SaveOptions{}); err != nil {
				t.Error(err)
			}
		},
		"destroyed": func(t *testing.T, c *client.Client) {
			t.Helper()
			if _, err := c.Destroy(t.Context(), "s"); err != nil {
				t.Error(err)
			}
		},
		"destroyed, and made anew": func(t *testing.T, c *client.Client) {
			t.Helper()
			if _, err := c.Destroy(t.Context(), "s"); err != nil {
				t.Error(err)
			}
			if _, err := c.Create(t.Context(), []byte("anew"), client.CreateOptions{ID: "s"}); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := memstore.Open()
			t.Cleanup(func() { s.Close(context.WithoutCancel(t.Context())) })
			connect := serve(t, s)
			other := connect()
			if _, err := other.Create(t.Context(), []byte("old"), client.CreateOptions{ID: "s"}); err != nil {
				t.Fatal(err)
			}
			var grant client.Grant
			var saves atomic.Int64
			holder := connect(grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				err := invoke(ctx, method, req, reply, cc, opts...)
				if method != sessiondv1.SessionService_Save_FullMethodName {
					return err
				}
				switch saves.Add(1) {
				case 1:
					return status.Error(codes.Unavailable, "the answer was lost")
				case 2:
					if err := other.Release(t.Context(), grant); err != nil {
						t.Error(err)
					}
					then(t, other)
				}
				return err
			}))
			var err error
			if grant, err = holder.Acquire(t.Context(), "s", client.AcquireOptions{}); err != nil {
				t.Fatal(err)
			}
			if _, err := holder.Save(t.Context(), "s", []byte("new"), client.SaveOptions{Grant: &grant}); !errors.Is(err, client.ErrOutcomeUnknown) {
				t.Errorf("%v: want that nobody knows whether it was saved", err)
			}
		})
	}
}

// Seed 7, cut-nodes (S6, L5): a save that a holder's client had lost was carried out after a later save of the same holder, which was
// acknowledged and then gone: both named the same token. Here the first save of all is delivered last.
func TestLateSaveOfTheHolder(t *testing.T) {
	for name, c := range map[string]struct {
		omit  bool // the client does not know the revision
		all   bool // all attempts are cut off, not just the first
		touch bool // the session is written once more before the second save
	}{
		"tried again":                           {false, false, false},
		"of unknown outcome":                    {false, true, false},
		"tried again, revision not known":       {true, false, false},
		"of unknown outcome, not known":         {true, true, false},
		"tried again, and touched":              {false, false, true},
		"of unknown outcome, and touched since": {false, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := memstore.Open()
			t.Cleanup(func() { s.Close(context.WithoutCancel(t.Context())) })
			connect := serve(t, s)
			if _, err := connect().Create(t.Context(), []byte("old"), client.CreateOptions{ID: "s"}); err != nil {
				t.Fatal(err)
			}
			var whole atomic.Bool
			var late func() error
			holder := connect(grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				if method != sessiondv1.SessionService_Save_FullMethodName || whole.Load() {
					return invoke(ctx, method, req, reply, cc, opts...)
				}
				whole.Store(!c.all)
				if late == nil {
					again := proto.CloneOf(as[*sessiondv1.SaveRequest](req))
					late = func() error { return invoke(t.Context(), method, again, new(sessiondv1.SaveResponse), cc) }
				}
				return status.Error(codes.Unavailable, "cut off")
			}))
			grant, err := holder.Acquire(t.Context(), "s", client.AcquireOptions{OmitSession: c.omit})
			if err != nil {
				t.Fatal(err)
			}
			_, err = holder.Save(t.Context(), "s", []byte("first"), client.SaveOptions{Grant: &grant})
			if errors.Is(err, client.ErrOutcomeUnknown) != c.all || !c.all && err != nil {
				t.Fatal(err)
			}
			whole.Store(true)
			if c.touch {
				// As a touch does: the data stays as it is.
				found, _, err := s.ReadSession(t.Context(), "s")
				if err != nil {
					t.Fatal(err)
				}
				if _, err := s.SaveSession(t.Context(), session.Save{
					ID: "s", Data: found.Data, TTL: found.TTL, Token: grant.FencingToken, Request: grant.RequestID,
				}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := holder.Save(t.Context(), "s", []byte("second"), client.SaveOptions{Grant: &grant}); err != nil {
				t.Fatal(err)
			}
			if err := late(); err == nil {
				t.Error("the late save was carried out")
			}
			if got, err := holder.Read(t.Context(), "s"); err != nil || string(got.Data) != "second" {
				t.Errorf("%q, %v", got.Data, err)
			}
		})
	}
}
