package etcdnode

import (
	"context"
	"hash/maphash"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/server/v3/auth"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3rpc"
	etcderrors "go.etcd.io/etcd/server/v3/etcdserver/errors"
	"go.etcd.io/etcd/server/v3/lease"
	"go.etcd.io/etcd/server/v3/proxy/grpcproxy/adapter"
	"go.etcd.io/etcd/server/v3/storage"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
	"google.golang.org/grpc"
)

// inProcess calls an embedded member. What etcd serves over gRPC checks each request, for which it puts all keys of a transaction into
// interval trees. That takes as long as a good part of what the transaction itself does, and all callers whose parts are in it
// wait for it. A transaction that plainly has nothing to be refused for goes past it, to the member itself. All others, and
// all that is no transaction, are left to what etcd serves, so there is no second opinion on what is refused, and how.
type inProcess struct {
	etcdserverpb.KVClient

	member *etcdserver.EtcdServer
	quota  storage.Quota
	seed   maphash.Seed
}

func newInProcess(member *etcdserver.EtcdServer) *inProcess {
	return &inProcess{
		KVClient: adapter.KvServerToKvClient(v3rpc.NewQuotaKVServer(member)),
		member:   member,
		quota:    storage.NewBackendQuota(member.Logger(), member.Cfg.QuotaBackendBytes, member.Backend(), "kv"),
		seed:     maphash.MakeSeed(),
	}
}

// Txn implements etcdserverpb.KVClient.
func (p *inProcess) Txn(ctx context.Context, req *etcdserverpb.TxnRequest, opts ...grpc.CallOption) (*etcdserverpb.TxnResponse, error) {
	if !p.plain(req) || !p.quota.Available(req) {
		return p.KVClient.Txn(ctx, req, opts...)
	}
	resp, err := p.member.Txn(ctx, req)
	if err != nil {
		return nil, served(err)
	}
	// Its revision is always there.
	resp.Header.ClusterId, resp.Header.MemberId = uint64(p.member.Cluster().ID()), uint64(p.member.MemberID())
	resp.Header.RaftTerm = p.member.Term()
	return resp, nil
}

// plain says that etcd would certainly find nothing wrong with a transaction before it is proposed.
func (p *inProcess) plain(req *etcdserverpb.TxnRequest) bool {
	c := plainCheck{seed: p.seed}
	return c.txn(req, int(p.member.Cfg.MaxTxnOps)) && c.apart()
}

// plainCheck looks at a transaction, and at those within it.
type plainCheck struct {
	seed maphash.Seed
	keys []uint64 // hashes of what is written or removed, whether by then or by else
}

func (c *plainCheck) txn(req *etcdserverpb.TxnRequest, maxOps int) bool {
	if req == nil {
		return false
	}
	maxOps -= max(len(req.Compare), len(req.Success), len(req.Failure))
	if maxOps < 0 {
		return false
	}
	for _, cmp := range req.Compare {
		if len(cmp.Key) == 0 {
			return false
		}
	}
	return c.ops(req.Success, maxOps) && c.ops(req.Failure, maxOps)
}

func (c *plainCheck) ops(ops []*etcdserverpb.RequestOp, maxOps int) bool {
	for _, op := range ops {
		ok := false
		switch op := op.GetRequest().(type) {
		case *etcdserverpb.RequestOp_RequestRange:
			r := op.RequestRange
			ok = len(r.GetKey()) > 0 && known(etcdserverpb.RangeRequest_SortOrder_name, r.SortOrder) &&
				known(etcdserverpb.RangeRequest_SortTarget_name, r.SortTarget)
		case *etcdserverpb.RequestOp_RequestPut:
			r := op.RequestPut
			ok = len(r.GetKey()) > 0 && (!r.IgnoreValue || len(r.Value) == 0) && (!r.IgnoreLease || r.Lease == 0)
			c.changes(r.GetKey())
		case *etcdserverpb.RequestOp_RequestDeleteRange:
			// Whether a range has a key in it that is written is for etcd to find out.
			r := op.RequestDeleteRange
			ok = len(r.GetKey()) > 0 && len(r.RangeEnd) == 0
			c.changes(r.GetKey())
		case *etcdserverpb.RequestOp_RequestTxn:
			ok = c.txn(op.RequestTxn, maxOps)
		}
		if !ok {
			return false
		}
	}
	return true
}

func known[E ~int32](names map[int32]string, e E) bool {
	if e == 0 {
		return true // the first of each
	}
	_, ok := names[int32(e)]
	return ok
}

func (c *plainCheck) changes(key []byte) { c.keys = append(c.keys, maphash.Bytes(c.seed, key)) }

// apart says that no key is changed twice.
func (c *plainCheck) apart() bool {
	if len(c.keys) < 2 {
		return true
	}
	size := 4
	for size < 4*len(c.keys) {
		size *= 2
	}
	table := make([]uint64, size) // 0: free
	for _, h := range c.keys {
		h = max(h, 1)
		i := h & uint64(size-1)
		for ; table[i] != 0; i = (i + 1) & uint64(size-1) {
			if table[i] == h {
				return false
			}
		}
		table[i] = h
	}
	return true
}

// txnErrors has what a member's transaction may fail with, and what etcd answers over gRPC. Etcd keeps its own table to itself.
var txnErrors = map[error]error{
	mvcc.ErrCompacted:                        rpctypes.ErrGRPCCompacted,
	mvcc.ErrFutureRev:                        rpctypes.ErrGRPCFutureRev,
	lease.ErrLeaseNotFound:                   rpctypes.ErrGRPCLeaseNotFound,
	etcderrors.ErrKeyNotFound:                rpctypes.ErrGRPCKeyNotFound,
	etcderrors.ErrRequestTooLarge:            rpctypes.ErrGRPCRequestTooLarge,
	etcderrors.ErrNoSpace:                    rpctypes.ErrGRPCNoSpace,
	etcderrors.ErrCorrupt:                    rpctypes.ErrGRPCCorrupt,
	etcderrors.ErrTooManyRequests:            rpctypes.ErrTooManyRequests,
	etcderrors.ErrNoLeader:                   rpctypes.ErrGRPCNoLeader,
	etcderrors.ErrNotLeader:                  rpctypes.ErrGRPCNotLeader,
	etcderrors.ErrLeaderChanged:              rpctypes.ErrGRPCLeaderChanged,
	etcderrors.ErrCanceled:                   rpctypes.ErrGRPCCanceled,
	etcderrors.ErrStopped:                    rpctypes.ErrGRPCStopped,
	etcderrors.ErrTimeout:                    rpctypes.ErrGRPCTimeout,
	etcderrors.ErrTimeoutDueToLeaderFail:     rpctypes.ErrGRPCTimeoutDueToLeaderFail,
	etcderrors.ErrTimeoutDueToConnectionLost: rpctypes.ErrGRPCTimeoutDueToConnectionLost,
	etcderrors.ErrTimeoutWaitAppliedIndex:    rpctypes.ErrGRPCTimeoutWaitAppliedIndex,
	etcderrors.ErrUnhealthy:                  rpctypes.ErrGRPCUnhealthy,
	auth.ErrUserEmpty:                        rpctypes.ErrGRPCUserEmpty,
	auth.ErrUserNotFound:                     rpctypes.ErrGRPCUserNotFound,
	auth.ErrPermissionDenied:                 rpctypes.ErrGRPCPermissionDenied,
	auth.ErrInvalidAuthToken:                 rpctypes.ErrGRPCInvalidAuthToken,
	auth.ErrAuthOldRevision:                  rpctypes.ErrGRPCAuthOldRevision,
}

// served is the error that etcd answers over gRPC for one of a member. A context's stays as it is, and so does one that etcd has no answer for.
func served(err error) error {
	if known, ok := txnErrors[err]; ok {
		return known
	}
	return err
}
