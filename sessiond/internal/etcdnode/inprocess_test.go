package etcdnode

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	_ "unsafe" // for the link to etcd's table

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

func embedded(t *testing.T) *Node {
	t.Helper()
	n, err := Embed(t.Context(), EmbedConfig{DataDir: t.TempDir()})
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

func get(key string) *etcdserverpb.RequestOp {
	return &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestRange{
		RequestRange: &etcdserverpb.RangeRequest{Key: []byte(key)},
	}}
}

func remove(key string) *etcdserverpb.RequestOp {
	return &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestDeleteRange{
		RequestDeleteRange: &etcdserverpb.DeleteRangeRequest{Key: []byte(key)},
	}}
}

// mixed makes a transaction at random that etcd may refuse.
func mixed(r *rand.Rand, depth int) *etcdserverpb.TxnRequest {
	keys := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	key := func() []byte {
		if r.IntN(60) == 0 {
			return nil
		}
		return []byte(keys[r.IntN(len(keys))])
	}
	rarely := func() bool { return r.IntN(20) == 0 }
	ops := func() []*etcdserverpb.RequestOp {
		var ops []*etcdserverpb.RequestOp
		for range r.IntN(4) {
			op := &etcdserverpb.RequestOp{}
			switch kind := r.IntN(8); {
			case kind < 3:
				put := &etcdserverpb.PutRequest{Key: key(), Value: []byte("v")}
				switch r.IntN(40) {
				case 0:
					put.IgnoreValue = true
				case 1:
					put.IgnoreLease, put.Lease = true, 1
				}
				op.Request = &etcdserverpb.RequestOp_RequestPut{RequestPut: put}
			case kind < 4:
				del := &etcdserverpb.DeleteRangeRequest{Key: key()}
				if rarely() {
					del.RangeEnd = []byte("z")
				}
				op.Request = &etcdserverpb.RequestOp_RequestDeleteRange{RequestDeleteRange: del}
			case kind < 6 || depth == 0:
				get := &etcdserverpb.RangeRequest{Key: key()}
				if rarely() {
					get.SortOrder = etcdserverpb.RangeRequest_SortOrder(r.IntN(5))
				}
				if rarely() {
					get.SortTarget = etcdserverpb.RangeRequest_SortTarget(r.IntN(7))
				}
				op.Request = &etcdserverpb.RequestOp_RequestRange{RequestRange: get}
			case kind < 7 || !rarely():
				op.Request = &etcdserverpb.RequestOp_RequestTxn{RequestTxn: mixed(r, depth-1)}
			}
			ops = append(ops, op)
		}
		return ops
	}
	req := &etcdserverpb.TxnRequest{Success: ops(), Failure: ops()}
	if r.IntN(2) == 0 {
		req.Compare = []*etcdserverpb.Compare{{
			Key: key(), Target: etcdserverpb.Compare_CREATE, TargetUnion: &etcdserverpb.Compare_CreateRevision{},
		}}
	}
	return req
}

// asked counts the transactions that are left to what etcd serves.
type asked struct {
	etcdserverpb.KVClient

	txns int
}

func (a *asked) Txn(ctx context.Context, req *etcdserverpb.TxnRequest, opts ...grpc.CallOption) (*etcdserverpb.TxnResponse, error) {
	a.txns++
	return a.KVClient.Txn(ctx, req, opts...)
}

// L9: what goes past the checks that etcd has for what it serves is what they let through, and is answered in the same way.
func TestPlainTransactions(t *testing.T) {
	n := embedded(t)
	own := newInProcess(n.Member().Server)
	etcds := &asked{KVClient: own.KVClient}
	own.KVClient = etcds
	r := rand.New(rand.NewPCG(1, 2))
	past, left := 0, 0
	for range 4000 {
		req := mixed(r, 2)
		etcds.txns = 0
		got, err := own.Txn(t.Context(), req)
		if etcds.txns > 0 {
			left++
			continue
		}
		past++
		want, refused := etcds.Txn(t.Context(), req)
		if err != nil || refused != nil {
			t.Fatalf("%v, etcd's: %v, of %v", err, refused, req)
		}
		got.Header.Revision, want.Header.Revision = min(got.Header.Revision, 1), min(want.Header.Revision, 1)
		if !proto.Equal(got.Header, want.Header) {
			t.Fatalf("%v, etcd's: %v", got.Header, want.Header)
		}
	}
	if past < 500 || left < 500 {
		t.Errorf("%d transactions went past etcd's checks, %d did not", past, left)
	}
}

// What a node sends all the time goes past etcd's checks: steps of several sessions, each with its compares.
func TestSharedTransactionIsPlain(t *testing.T) {
	n := embedded(t)
	own := newInProcess(n.Member().Server)
	own.KVClient = nil
	req := &etcdserverpb.TxnRequest{}
	for i := range 64 {
		key := fmt.Sprint("k", i)
		req.Success = append(req.Success, &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestTxn{
			RequestTxn: &etcdserverpb.TxnRequest{
				Compare: []*etcdserverpb.Compare{{Key: []byte(key)}},
				Success: []*etcdserverpb.RequestOp{put(key, 1), remove(key + "/l"), get(key)},
				Failure: []*etcdserverpb.RequestOp{get(key)},
			},
		}})
	}
	if _, err := own.Txn(t.Context(), req); err != nil {
		t.Error(err)
	}
}

//go:linkname etcdsErrors go.etcd.io/etcd/server/v3/etcdserver/api/v3rpc.toGRPCErrorMap
var etcdsErrors map[error]error

// L9: errors of a member are told as etcd tells them, which has them in a table that it does not export.
func TestErrorsOfAMember(t *testing.T) {
	for err := range txnErrors {
		if got, want := served(err), etcdsErrors[err]; !errors.Is(got, want) {
			t.Errorf("%v: %v, etcd's: %v", err, got, want)
		}
	}
	for _, err := range []error{context.Canceled, context.DeadlineExceeded, errors.New("strange")} {
		if got := served(err); !errors.Is(got, err) {
			t.Errorf("%v becomes %v", err, got)
		}
	}
}
