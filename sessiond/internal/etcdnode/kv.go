package etcdnode

import (
	"context"
	"math"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"google.golang.org/grpc"
)

// KV serves reads and transactions. With an embedded member they are calls within the process, which spares most of what a
// transaction costs in processor time. Its methods may be called concurrently.
type KV struct {
	clientv3.KV

	remote   etcdserverpb.KVClient
	callOpts []grpc.CallOption
}

// newInProcessKV calls an embedded member, with the checks of requests and of the space quota that it has over gRPC. A write is encoded
// before it is proposed, so nothing keeps a request.
func newInProcessKV(member *etcdserver.EtcdServer) *KV {
	remote := newInProcess(member)
	return &KV{KV: clientv3.NewKVFromKVClient(remote, nil), remote: remote}
}

// newRemoteKV uses a client's connection, with its interceptors, which know what may be sent again: of a transaction only what has never
// been sent. The options are those that the client gives its own calls.
func newRemoteKV(client *clientv3.Client, sendBytes int) *KV {
	return &KV{
		KV: client.KV, remote: clientv3.RetryKVClient(client),
		callOpts: []grpc.CallOption{
			grpc.WaitForReady(true), grpc.MaxCallSendMsgSize(sendBytes), grpc.MaxCallRecvMsgSize(math.MaxInt32),
		},
	}
}

// Txn sends a transaction as it is, once. It only reads the request, and nothing of it is used any more when Txn returns. Errors are
// those of a transaction of clientv3: rpctypes', or the context's.
func (k *KV) Txn(ctx context.Context, req *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	resp, err := k.remote.Txn(ctx, req, k.callOpts...)
	if err != nil {
		return nil, clientv3.ContextError(ctx, err)
	}
	return resp, nil
}
