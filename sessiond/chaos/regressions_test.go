package chaos

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sessiond/sessiond/client"
	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/memstore"
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
