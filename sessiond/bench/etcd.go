//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"iter"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
)

// etcdSessionTTL is the TTL of etcd's own sessions and leases, in seconds.
const etcdSessionTTL = 60

// startEtcd starts one etcd, for plain writes and for the recipes that come with etcd.
func (b *bench) startEtcd(ctx context.Context) ([]*contestant, error) {
	e, err := b.launchEtcd(ctx, "plain", 1)
	if err != nil {
		return nil, err
	}
	c, err := b.dialEtcd(e.Endpoints()...)
	if err != nil {
		return nil, err
	}
	m := meter{processes: processes(e.Members...), etcd: c}
	data := newPayloads(sessionCount)
	if err := putAll(ctx, c, data); err != nil {
		return nil, err
	}
	var sessions []*concurrency.Session
	for range sessionCount {
		s, err := concurrency.NewSession(c, concurrency.WithTTL(etcdSessionTTL))
		if err != nil {
			return nil, err
		}
		sessions = append(sessions, s)
	}
	locks := v3lockpb.NewLockClient(c.ActiveConnection())

	// update is what every recipe does under its lock.
	update := func(ctx context.Context, caller, session int, under func()) error {
		if err := etcdGet(ctx, c, session); err != nil {
			return err
		}
		under()
		_, err := c.Put(ctx, sessionKey(session), string(data.next(caller)))
		return err
	}
	locked := func(ctx context.Context, s *concurrency.Session, caller, session int, under func()) error {
		mu := concurrency.NewMutex(s, "lock/"+sessionKey(session))
		if err := mu.Lock(ctx); err != nil {
			return err
		}
		return errors.Join(update(ctx, caller, session, under), mu.Unlock(ctx))
	}
	return []*contestant{
		{
			name: namePut, meter: m, cycle: putCycle(c, data),
			read:     func(ctx context.Context, _, session int) error { return etcdGet(ctx, c, session) },
			messages: etcdChannel(c),
		},
		{name: nameEtcdNew, meter: m, locks: true, cycle: func(ctx context.Context, caller, session int, under func()) error {
			s, err := concurrency.NewSession(c, concurrency.WithTTL(etcdSessionTTL))
			if err != nil {
				return err
			}
			return errors.Join(locked(ctx, s, caller, session, under), s.Close())
		}},
		{name: nameEtcdLong, meter: m, locks: true, cycle: func(ctx context.Context, caller, session int, under func()) error {
			return locked(ctx, sessions[caller], caller, session, under)
		}, refused: func(ctx context.Context) (func(context.Context, int) error, func(context.Context) error, error) {
			const key = "lock/refused"
			held := concurrency.NewMutex(sessions[sessionCount-1], key)
			return func(ctx context.Context, caller int) error {
				err := concurrency.NewMutex(sessions[caller], key).TryLock(ctx)
				if errors.Is(err, concurrency.ErrLocked) {
					return nil
				}
				return errors.Join(errNotRefused, err)
			}, held.Unlock, held.Lock(ctx)
		}},
		{name: nameV3Lock, meter: m, locks: true, cycle: func(ctx context.Context, caller, session int, under func()) error {
			held, err := locks.Lock(ctx, &v3lockpb.LockRequest{
				Name: []byte("v3lock/" + sessionKey(session)), Lease: int64(sessions[caller].Lease()),
			})
			if err != nil {
				return err
			}
			err = update(ctx, caller, session, under)
			_, uerr := locks.Unlock(ctx, &v3lockpb.UnlockRequest{Key: held.GetKey()})
			return errors.Join(err, uerr)
		}},
	}, nil
}

func putAll(ctx context.Context, c *clientv3.Client, data payloads) error {
	for i := range sessionCount {
		if _, err := c.Put(ctx, sessionKey(i), string(data.next(i))); err != nil {
			return err
		}
	}
	return nil
}

func putCycle(c *clientv3.Client, data payloads) func(context.Context, int, int, func()) error {
	return func(ctx context.Context, caller, session int, _ func()) error {
		_, err := c.Put(ctx, sessionKey(session), string(data.next(caller)))
		return err
	}
}

func etcdGet(ctx context.Context, c *clientv3.Client, session int) error {
	resp, err := c.Get(ctx, sessionKey(session))
	if err == nil && len(resp.Kvs) != 1 {
		err = fmt.Errorf("%s is not there", sessionKey(session))
	}
	return err
}

// etcdChannel is a Put and a watch that sees it.
func etcdChannel(c *clientv3.Client) *channel {
	const key = "message"
	data := newPayloads(1)
	return &channel{
		subscribe: func(ctx context.Context) (iter.Seq[error], error) {
			watch := c.Watch(clientv3.WithRequireLeader(ctx), key, clientv3.WithCreatedNotify())
			if first := <-watch; first.Err() != nil {
				return nil, first.Err()
			}
			return endless(func() error {
				seen, ok := <-watch
				if !ok {
					return ctx.Err()
				}
				return seen.Err()
			}), nil
		},
		publish: func(ctx context.Context) error {
			_, err := c.Put(ctx, key, string(data.next(0)))
			return err
		},
	}
}
