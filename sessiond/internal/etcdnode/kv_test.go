package etcdnode

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

func put(key string, size int) *etcdserverpb.RequestOp {
	return &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestPut{
		RequestPut: &etcdserverpb.PutRequest{Key: []byte(key), Value: bytes.Repeat([]byte("x"), size)},
	}}
}

// connected makes a node that is a client of others.
func connected(t *testing.T, endpoints ...string) *Node {
	t.Helper()
	n, err := Connect(ConnectConfig{Endpoints: endpoints, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// txns sends transactions by way of clientv3, which a KV's are to equal.
func txns(kv clientv3.KV, cmps []clientv3.Cmp, then ...clientv3.Op) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := kv.Txn(ctx).If(cmps...).Then(then...).Commit()
		return err
	}
}

// L9: errors of a transaction are those of clientv3, in the process of the member and over a connection, so that what they are compared with
// finds them.
func TestTxnErrors(t *testing.T) {
	n, err := Embed(t.Context(), EmbedConfig{DataDir: t.TempDir(), QuotaBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	remote := connected(t, n.Endpoints()...)
	inProcess := v3client.New(n.Member().Server)
	defer inProcess.Close()

	tests := []struct {
		name string
		then []clientv3.Op
		want error // nil: any, but the same
	}{
		{name: "dead lease", then: []clientv3.Op{clientv3.OpPut("k", "v", clientv3.WithLease(7))}, want: rpctypes.ErrLeaseNotFound},
		{name: "duplicate key", then: []clientv3.Op{clientv3.OpPut("k", "v"), clientv3.OpPut("k", "w")}, want: rpctypes.ErrDuplicateKey},
		{name: "written and deleted", then: []clientv3.Op{clientv3.OpPut("k", "v"), clientv3.OpDelete("k")}, want: rpctypes.ErrDuplicateKey},
		{name: "too many operations", then: make([]clientv3.Op, 600), want: rpctypes.ErrTooManyOps},
		{name: "too large", then: []clientv3.Op{clientv3.OpPut("k", string(make([]byte, 1800<<10)))}, want: rpctypes.ErrRequestTooLarge},
		{name: "too large to be sent", then: []clientv3.Op{clientv3.OpPut("k", string(make([]byte, 3<<20)))}},
		{name: "no key", then: []clientv3.Op{clientv3.OpPut("", "v")}, want: rpctypes.ErrEmptyKey},
		{name: "no such key", then: []clientv3.Op{clientv3.OpPut("missing", "", clientv3.WithIgnoreValue())}, want: rpctypes.ErrKeyNotFound},
		{name: "future revision", then: []clientv3.Op{clientv3.OpGet("k", clientv3.WithRev(1000))}, want: rpctypes.ErrFutureRev},
		{name: "none", then: []clientv3.Op{clientv3.OpPut("k", "v"), clientv3.OpGet("k")}},
	}
	for i := range tests[3].then {
		tests[3].then[i] = clientv3.OpGet("k")
	}
	check := func(t *testing.T, ctx context.Context, then []clientv3.Op, want error) {
		t.Helper()
		for _, tt := range []struct {
			where string
			own   *KV
			their clientv3.KV
		}{{"in process", n.KV(), inProcess.KV}, {"remote", remote.KV(), remote.Client().KV}} {
			got, other := request(ctx, t, tt.own, then), txns(tt.their, nil, then...)(ctx)
			if fmt.Sprintf("%T %v", got, got) != fmt.Sprintf("%T %v", other, other) {
				t.Errorf("%s: %T %v, clientv3's: %T %v", tt.where, got, got, other, other)
			}
			if want != nil && !errors.Is(got, want) {
				t.Errorf("%s: %v, want %v", tt.where, got, want)
			}
		}
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { check(t, t.Context(), tt.then, tt.want) })
	}
	write := []clientv3.Op{clientv3.OpPut("k", "v")}
	t.Run("canceled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		check(t, ctx, write, context.Canceled)
	})
	t.Run("too late", func(t *testing.T) {
		ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
		defer cancel()
		check(t, ctx, write, context.DeadlineExceeded)
	})
	t.Run("no space", func(t *testing.T) {
		for i := range 10 {
			if _, err := n.KV().Put(t.Context(), fmt.Sprint("k", i), string(make([]byte, 1<<20))); err != nil {
				break
			}
		}
		check(t, t.Context(), write, rpctypes.ErrNoSpace)
	})
}

// request sends a transaction of operations as clientv3 makes them, by the node's own way.
func request(ctx context.Context, t *testing.T, kv *KV, then []clientv3.Op) error {
	t.Helper()
	var c captured
	if err := txns(clientv3.NewKVFromKVClient(&c, nil), nil, then...)(ctx); err != nil {
		t.Fatal(err)
	}
	before := proto.Clone(c.req)
	_, err := kv.Txn(ctx, c.req)
	if !proto.Equal(before, c.req) {
		t.Error("the request has been changed")
	}
	return err
}

// captured keeps the transaction that a client of etcd makes.
type captured struct {
	etcdserverpb.KVClient

	req *etcdserverpb.TxnRequest
}

func (c *captured) Txn(_ context.Context, req *etcdserverpb.TxnRequest, _ ...grpc.CallOption) (*etcdserverpb.TxnResponse, error) {
	c.req = req
	return &etcdserverpb.TxnResponse{}, nil
}

// answering is an etcd that answers every transaction with an error.
type answering struct {
	etcdserverpb.UnimplementedKVServer

	mu    sync.Mutex
	err   error
	calls int
	meta  metadata.MD
}

func (a *answering) Txn(ctx context.Context, _ *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls++
	a.meta, _ = metadata.FromIncomingContext(ctx)
	return nil, a.err
}

// L9: a transaction over a connection is sent once, as clientv3 sends it, with the same metadata; and errors that are hard to come by are the same too.
func TestTxnIsSentOnce(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	var lc net.ListenConfig
	listener, err := lc.Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	etcd := &answering{}
	server := grpc.NewServer()
	etcdserverpb.RegisterKVServer(server, etcd)
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(listener) })
	defer wg.Wait()
	defer server.Stop()
	n := connected(t, "unix://"+socket)

	ask := func(err error, send func(context.Context) error) (calls int, meta, text string) {
		etcd.mu.Lock()
		etcd.err, etcd.calls = err, 0
		etcd.mu.Unlock()
		ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(t.Context()), 5*time.Second)
		defer cancel()
		got := send(ctx)
		etcd.mu.Lock()
		defer etcd.mu.Unlock()
		return etcd.calls, fmt.Sprint(etcd.meta), fmt.Sprintf("%T %v", got, got)
	}
	for _, answer := range []error{
		rpctypes.ErrGRPCNoLeader, rpctypes.ErrGRPCLeaderChanged, rpctypes.ErrGRPCNotLeader, rpctypes.ErrGRPCStopped,
		rpctypes.ErrGRPCTimeout, rpctypes.ErrGRPCTimeoutDueToLeaderFail, rpctypes.ErrGRPCTimeoutDueToConnectionLost,
		rpctypes.ErrGRPCUnhealthy, rpctypes.ErrGRPCNoSpace, rpctypes.ErrGRPCLeaseNotFound, rpctypes.ErrGRPCDuplicateKey,
		rpctypes.ErrGRPCUserEmpty, rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrGRPCCorrupt,
		status.Error(codes.Unavailable, "transport is closing"), status.Error(codes.Unavailable, "error reading from server: EOF"),
		status.Error(codes.Internal, "stream terminated"), status.Error(codes.Unknown, "unknown"),
	} {
		calls, meta, text := ask(answer, func(ctx context.Context) error {
			_, err := n.KV().Txn(ctx, &etcdserverpb.TxnRequest{Success: []*etcdserverpb.RequestOp{put("k", 1)}})
			return err
		})
		wantCalls, wantMeta, wantText := ask(answer, txns(n.Client().KV, nil, clientv3.OpPut("k", "x")))
		if text != wantText || meta != wantMeta {
			t.Errorf("%v: %s with %s, clientv3's: %s with %s", answer, text, meta, wantText, wantMeta)
		}
		if calls != 1 || wantCalls != 1 {
			t.Errorf("%v: sent %d times, by clientv3 %d times", answer, calls, wantCalls)
		}
	}
}

// One request may be under way several times at once, as parts of a transaction are that is sent again.
func TestTxnsShareRequests(t *testing.T) {
	n, err := Embed(t.Context(), EmbedConfig{DataDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	remote := connected(t, n.Endpoints()...)
	shared := put("k", 1000)
	var done atomic.Int64
	var wg sync.WaitGroup
	for _, kv := range []*KV{n.KV(), remote.KV()} {
		for range 8 {
			wg.Go(func() {
				for range 10 {
					resp, err := kv.Txn(t.Context(), &etcdserverpb.TxnRequest{Success: []*etcdserverpb.RequestOp{shared}})
					if err != nil || !resp.Succeeded {
						t.Errorf("%v, %v", resp, err)
						return
					}
					done.Add(1)
				}
			})
		}
	}
	wg.Wait()
	resp, err := remote.KV().Get(t.Context(), "k")
	if err != nil || len(resp.Kvs) != 1 || resp.Kvs[0].Version != done.Load() {
		t.Errorf("after %d transactions: %v, %v", done.Load(), resp, err)
	}
}
