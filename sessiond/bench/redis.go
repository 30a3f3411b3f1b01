//go:build unix

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"iter"
	mathrand "math/rand/v2"
	"net"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

const (
	redisConnections = 2 * sessionCount
	sessionTTL       = time.Hour
	// The polling lock of a common PHP library tries again after 100 ms, more or less a tenth.
	pollEvery  = 100 * time.Millisecond
	pollJitter = 10 * time.Millisecond
	// redsync gives up after 32 tries unless told otherwise, which starved callers reach.
	redsyncTries = 10_000
)

// compareAndDelete frees a polling lock if it is still the caller's.
var compareAndDelete = redis.NewScript(`if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("DEL", KEYS[1]) end return 0`)

// startRedis starts two: one that syncs to disk before it answers, and one that keeps nothing.
func (b *bench) startRedis(ctx context.Context) ([]*contestant, error) {
	durable, err := b.launchRedis(ctx, nameRedis, "redis-fsync", "--appendonly", "yes", "--appendfsync", "always")
	if err != nil {
		return nil, err
	}
	cache, err := b.launchRedis(ctx, nameRedisCach, "redis-cache", "--appendonly", "no")
	if err != nil {
		return nil, err
	}
	rs := redsync.New(goredis.NewPool(durable.client))
	recipe := &contestant{name: nameRedsync, meter: durable.meter, locks: true}
	recipe.cycle = func(ctx context.Context, caller, session int, under func()) error {
		mu := rs.NewMutex("redsync/"+sessionKey(session), redsync.WithExpiry(lockTTL), redsync.WithTries(redsyncTries))
		if err := mu.LockContext(ctx); err != nil {
			return err
		}
		err := durable.update(ctx, caller, session, under)
		_, uerr := mu.UnlockContext(ctx)
		return errors.Join(err, uerr)
	}
	return []*contestant{durable.contestant, recipe, cache.contestant}, nil
}

type redisServer struct {
	*contestant
	client *redis.Client
	data   payloads
}

func (b *bench) launchRedis(ctx context.Context, name, process string, args ...string) (*redisServer, error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, fmt.Errorf("%w (on Debian: apt-get install redis-server; make bench does)", err)
	}
	addrs, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(addrs[0])
	if err != nil {
		return nil, err
	}
	s := &redisServer{
		client: redis.NewClient(&redis.Options{Addr: addrs[0], PoolSize: redisConnections}),
		data:   newPayloads(sessionCount),
	}
	p, err := b.launch(ctx, sessiondtest.Command{
		Name: process, Path: path,
		Args:  append([]string{"--bind", "127.0.0.1", "--port", port, "--dir", filepath.Clean(b.dir), "--appenddirname", process, "--save", ""}, args...),
		Ready: func(ctx context.Context) error { return s.client.Ping(ctx).Err() },
	})
	if err != nil {
		return nil, errors.Join(err, s.client.Close())
	}
	for i := range sessionCount {
		if err := s.client.Set(ctx, sessionKey(i), s.data.next(i), sessionTTL).Err(); err != nil {
			return nil, errors.Join(err, s.client.Close())
		}
	}
	s.contestant = &contestant{
		name: name, meter: meter{processes: []*sessiondtest.Process{p}}, locks: true,
		cycle: s.pollingCycle,
		read: func(ctx context.Context, _, session int) error {
			return s.client.Get(ctx, sessionKey(session)).Err()
		},
		messages: s.channel(),
		refused: func(ctx context.Context) (func(context.Context, int) error, func(context.Context) error, error) {
			const key = "lock/refused"
			return func(ctx context.Context, _ int) error {
				got, err := s.client.SetNX(ctx, key, "other", lockTTL).Result()
				if got {
					err = errNotRefused
				}
				return err
			}, func(ctx context.Context) error { return s.client.Del(ctx, key).Err() }, s.client.Set(ctx, key, "holder", lockTTL).Err()
		},
		clean: s.client.Close,
	}
	return s, nil
}

// update is what every recipe does under its lock.
func (s *redisServer) update(ctx context.Context, caller, session int, under func()) error {
	if err := s.client.Get(ctx, sessionKey(session)).Err(); err != nil {
		return err
	}
	under()
	return s.client.Set(ctx, sessionKey(session), s.data.next(caller), sessionTTL).Err()
}

func (s *redisServer) pollingCycle(ctx context.Context, caller, session int, under func()) error {
	lock, token := "lock/"+sessionKey(session), rand.Text()
	for {
		got, err := s.client.SetNX(ctx, lock, token, lockTTL).Result()
		if err != nil {
			return err
		}
		if got {
			break
		}
		select {
		case <-time.After(pollEvery - pollJitter + mathrand.N(2*pollJitter)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	err := s.update(ctx, caller, session, under)
	return errors.Join(err, compareAndDelete.Run(ctx, s.client, []string{lock}, token).Err())
}

// channel is an entry of a stream, and a reader that blocks until there is one.
func (s *redisServer) channel() *channel {
	const stream = "messages"
	return &channel{
		subscribe: func(ctx context.Context) (iter.Seq[error], error) {
			last := "0"
			if latest, err := s.client.XRevRangeN(ctx, stream, "+", "-", 1).Result(); err != nil {
				return nil, err
			} else if len(latest) > 0 {
				last = latest[0].ID
			}
			return endless(func() error {
				for ctx.Err() == nil {
					got, err := s.client.XRead(ctx, &redis.XReadArgs{Streams: []string{stream, last}, Count: 1, Block: time.Second}).Result()
					if err == nil {
						last = got[0].Messages[0].ID
					}
					if !errors.Is(err, redis.Nil) {
						return err
					}
				}
				return ctx.Err()
			}), nil
		},
		publish: func(ctx context.Context) error {
			return s.client.XAdd(ctx, &redis.XAddArgs{Stream: stream, MaxLen: 1000, Approx: true, Values: []any{"payload", s.data.next(0)}}).Err()
		},
	}
}
