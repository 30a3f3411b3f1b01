package etcdstore

import (
	"context"
	"math"
	"reflect"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// captured keeps the transaction that a client of etcd makes.
type captured struct {
	etcdserverpb.KVClient

	req *etcdserverpb.TxnRequest
}

func (c *captured) Txn(_ context.Context, req *etcdserverpb.TxnRequest, _ ...grpc.CallOption) (*etcdserverpb.TxnResponse, error) {
	c.req = req
	return &etcdserverpb.TxnResponse{}, nil
}

// clients is a transaction as etcd's client makes it.
func clients(t *testing.T, cmps []clientv3.Cmp, then, els []clientv3.Op) *etcdserverpb.TxnRequest {
	t.Helper()
	var c captured
	if _, err := clientv3.NewKVFromKVClient(&c, nil).Txn(t.Context()).If(cmps...).Then(then...).Else(els...).Commit(); err != nil {
		t.Fatal(err)
	}
	return c.req
}

// What a transaction consists of is what etcd's client makes of it, and takes no more than is counted.
func TestOps(t *testing.T) {
	const key, most, lease = "sessions/a%2Fb/", math.MaxInt64, clientv3.LeaseID(math.MaxInt64)
	oldest := clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend)
	youngest := clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortDescend)
	all, keysOnly, one := clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(1)
	for _, tt := range []struct {
		name string
		got  operation
		want clientv3.Op
	}{
		{"get", opGet(key), clientv3.OpGet(key)},
		{"get key", opGetKey(key), clientv3.OpGet(key, keysOnly)},
		{"get all", opGetAll(key), clientv3.OpGet(key, all)},
		{"get keys", opGetKeys(key), clientv3.OpGet(key, all, keysOnly)},
		{
			"get keys made", opGetKeysMade(key, most-1, most),
			clientv3.OpGet(key, all, keysOnly, clientv3.WithMinCreateRev(most-1), clientv3.WithMaxCreateRev(most)),
		},
		{"get keys made from", opGetKeysMade(key, 7, 0), clientv3.OpGet(key, all, keysOnly, clientv3.WithMinCreateRev(7))},
		{"get oldest", opGetOldest(key), clientv3.OpGet(key, all, one, oldest)},
		{"get youngest key", opGetYoungestKey(key, most), clientv3.OpGet(key, all, one, keysOnly, clientv3.WithMaxCreateRev(most), youngest)},
		{"get any key", opGetAnyKey(key), clientv3.OpGet(key, all, one, keysOnly)},
		{"count", opCount(key), clientv3.OpGet(key, all, clientv3.WithCountOnly())},
		{"put", opPut(key, []byte("v"), lease), clientv3.OpPut(key, "v", clientv3.WithLease(lease))},
		{"put without a lease", opPut(key, []byte("v"), clientv3.NoLease), clientv3.OpPut(key, "v")},
		{"exchange", opExchange(key, []byte("v"), lease), clientv3.OpPut(key, "v", clientv3.WithLease(lease), clientv3.WithPrevKV())},
		{"put value", opPutValue(key, []byte("v")), clientv3.OpPut(key, "v", clientv3.WithIgnoreLease())},
		{"put lease", opPutLease(key, lease), clientv3.OpPut(key, "", clientv3.WithIgnoreValue(), clientv3.WithLease(lease))},
		{"delete", opDelete(key), clientv3.OpDelete(key)},
		{"delete all", opDeleteAll(key), clientv3.OpDelete(key, all)},
		{
			"transaction", new(txnOp).fill([]compare{exists(key)}, []operation{opDelete(key)}, []operation{opGet(key)}),
			clientv3.OpTxn(
				[]clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(key), ">", 0)},
				[]clientv3.Op{clientv3.OpDelete(key)}, []clientv3.Op{clientv3.OpGet(key)},
			),
		},
	} {
		got := &etcdserverpb.TxnRequest{Success: []operation{tt.got}}
		if want := clients(t, nil, []clientv3.Op{tt.want}, nil); !proto.Equal(got, want) {
			t.Errorf("%s: made %v, want %v", tt.name, got, want)
		}
		if isPut(tt.got) != tt.want.IsPut() {
			t.Errorf("%s: counts as a put: %v", tt.name, isPut(tt.got))
		}
		if size := proto.Size(got); tt.got.GetRequestTxn() == nil && size > opBytes(tt.got) {
			t.Errorf("%s: takes %d bytes, counted %d", tt.name, size, opBytes(tt.got))
		}
	}
	for _, tt := range []struct {
		name string
		got  compare
		want clientv3.Cmp
	}{
		{"exists", exists(key), clientv3.Compare(clientv3.CreateRevision(key), ">", 0)},
		{"missing", missing(key), clientv3.Compare(clientv3.CreateRevision(key), "=", 0)},
		{"created at", createdAt(key, most), clientv3.Compare(clientv3.CreateRevision(key), "=", most)},
		{"created before", created(key, etcdserverpb.Compare_LESS, most), clientv3.Compare(clientv3.CreateRevision(key), "<", most)},
		{"all created before", allOf(created(key, etcdserverpb.Compare_LESS, most)), clientv3.Compare(clientv3.CreateRevision(key), "<", most).WithPrefix()},
		{"empty", empty(key), clientv3.Compare(clientv3.CreateRevision(key), "=", 0).WithPrefix()},
		{"written at", writtenAt(key, most), clientv3.Compare(clientv3.ModRevision(key), "=", most)},
		{"has value", hasValue(key, "v"), clientv3.Compare(clientv3.Value(key), "=", "v")},
	} {
		got := &etcdserverpb.TxnRequest{Compare: []compare{tt.got}}
		if want := clients(t, []clientv3.Cmp{tt.want}, nil, nil); !proto.Equal(got, want) {
			t.Errorf("%s: made %v, want %v", tt.name, got, want)
		}
		if size := proto.Size(got); size > cmpBytes(tt.got) {
			t.Errorf("%s: takes %d bytes, counted %d", tt.name, size, cmpBytes(tt.got))
		}
	}
}

// An operation's calls are for a member that has a leader, as etcd's client asks for it, whatever else they carry.
func TestOperationsRequireALeader(t *testing.T) {
	s := &Store{}
	for _, ctx := range []context.Context{t.Context(), metadata.AppendToOutgoingContext(t.Context(), "a", "b")} {
		for range 2 {
			octx, cancel := s.op(ctx)
			got, _ := metadata.FromOutgoingContext(octx)
			want, _ := metadata.FromOutgoingContext(clientv3.WithRequireLeader(ctx))
			if cancel(); !reflect.DeepEqual(got, want) {
				t.Errorf("%v, etcd's: %v", got, want)
			}
		}
	}
}
