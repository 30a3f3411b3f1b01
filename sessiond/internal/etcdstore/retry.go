package etcdstore

import (
	"context"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const maxAttempts = 3

// again runs f, which writes nothing, and runs it again if it gets no answer within its share of the time: the client takes
// its members in turn, and one that has died without a word is noticed by gRPC only after some 10 s. With one member
// there is no other to ask, and f has all the time.
func again[T any](ctx context.Context, members int, f func(context.Context) (T, error)) (T, error) {
	for left := min(members, maxAttempts); ; left-- {
		deadline, ok := ctx.Deadline()
		if !ok || left <= 1 {
			return f(ctx)
		}
		actx, cancel := context.WithTimeout(ctx, time.Until(deadline)/time.Duration(left))
		v, err := f(actx)
		silent := err != nil && actx.Err() != nil && ctx.Err() == nil
		cancel()
		if !silent {
			return v, err
		}
	}
}

// kv is etcd's, with reads that are tried again.
type kv struct {
	KV

	members int
}

func (k kv) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	return again(ctx, k.members, func(ctx context.Context) (*clientv3.GetResponse, error) {
		return k.KV.Get(ctx, key, opts...)
	})
}

// read runs several reads at one moment.
func (k kv) read(ctx context.Context, ops ...operation) (*etcdserverpb.TxnResponse, error) {
	req := &etcdserverpb.TxnRequest{Success: ops}
	return again(ctx, k.members, func(ctx context.Context) (*etcdserverpb.TxnResponse, error) {
		return k.Txn(ctx, req)
	})
}

// lease is etcd's, with what can be repeated tried again.
type lease struct {
	clientv3.Lease

	members int
}

func (l lease) KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	return again(ctx, l.members, func(ctx context.Context) (*clientv3.LeaseKeepAliveResponse, error) {
		return l.Lease.KeepAliveOnce(ctx, id)
	})
}

func (l lease) TimeToLive(ctx context.Context, id clientv3.LeaseID, opts ...clientv3.LeaseOption) (*clientv3.LeaseTimeToLiveResponse, error) {
	return again(ctx, l.members, func(ctx context.Context) (*clientv3.LeaseTimeToLiveResponse, error) {
		return l.Lease.TimeToLive(ctx, id, opts...)
	})
}
