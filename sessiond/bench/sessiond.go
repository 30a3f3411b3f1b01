//go:build unix

package main

import (
	"context"
	"fmt"
	"iter"
	"path/filepath"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// launchNode starts a sessiond that is stopped at the end.
func (b *bench) launchNode(ctx context.Context, name string, args ...string) (*sessiondtest.Server, error) {
	path, err := sessiondtest.Binary("sessiond")
	if err != nil {
		return nil, err
	}
	addrs, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		return nil, err
	}
	p, err := b.launch(ctx, sessiondtest.Command{
		Name: name, Path: path,
		Args:  append([]string{"--listen", addrs[0], "--log-level", "warn"}, args...),
		Ready: sessiondtest.GRPCReady(addrs[0]),
		// One with very many sessions may take longer than usual.
		StartTimeout: 2 * time.Minute, StopGrace: time.Minute,
	})
	return &sessiondtest.Server{Process: p, Addr: addrs[0]}, err
}

// maxSocketPath is the longest path at which a node has its etcd listen.
const maxSocketPath = 100

// An embedded is a sessiond with etcd inside, and a client of that etcd.
type embedded struct {
	*sessiondtest.Server
	etcd *clientv3.Client
	dir  string
}

func (b *bench) launchEmbedded(ctx context.Context, name string, args ...string) (*embedded, error) {
	dir := filepath.Join(b.dir, name)
	// The member listens there for clients of the same machine, unless that is too long for a socket's address.
	socket := filepath.Join(dir, "etcd.sock")
	if len(socket) > maxSocketPath {
		return nil, fmt.Errorf("%s is too long for a socket: choose a shorter --dir", socket)
	}
	node, err := b.launchNode(ctx, name, append([]string{"--data-dir", dir}, args...)...)
	if err != nil {
		return nil, err
	}
	etcd, err := b.dialEtcd("unix://" + socket)
	return &embedded{node, etcd, dir}, err
}

func (e *embedded) meter() meter { return meter{processes: processes(e.Server), etcd: e.etcd} }

func (b *bench) startEmbedded(ctx context.Context) ([]*contestant, error) {
	node, err := b.launchEmbedded(ctx, "embedded")
	if err != nil {
		return nil, err
	}
	return b.sessiond(ctx, nameEmbedded, node.meter(), node.Server)
}

func (b *bench) startSeparate(ctx context.Context) ([]*contestant, error) {
	e, err := b.launchEtcd(ctx, "separate", 1)
	if err != nil {
		return nil, err
	}
	etcd, err := b.dialEtcd(e.Endpoints()...)
	if err != nil {
		return nil, err
	}
	node, err := b.launchNode(ctx, "separate-sessiond", "--etcd-endpoints", strings.Join(e.Endpoints(), ","))
	if err != nil {
		return nil, err
	}
	return b.sessiond(ctx, nameSeparate, meter{processes: processes(append(e.Members, node)...), etcd: etcd}, node)
}

// startCluster starts three etcd members, for plain writes, and three nodes on them.
func (b *bench) startCluster(ctx context.Context) ([]*contestant, error) {
	e, err := b.launchEtcd(ctx, "cluster", 3)
	if err != nil {
		return nil, err
	}
	etcd, err := b.dialEtcd(e.Endpoints()...)
	if err != nil {
		return nil, err
	}
	data := newPayloads(sessionCount)
	if err := putAll(ctx, etcd, data); err != nil {
		return nil, err
	}
	list := []*contestant{{
		name: namePut3, meter: meter{processes: processes(e.Members...), etcd: etcd}, cycle: putCycle(etcd, data),
		read:     func(ctx context.Context, _, session int) error { return etcdGet(ctx, etcd, session) },
		messages: etcdChannel(etcd),
	}}
	var nodes []*sessiondtest.Server
	for _, name := range []string{"cluster-sessiond-1", "cluster-sessiond-2", "cluster-sessiond-3"} {
		node, err := b.launchNode(ctx, name, "--etcd-endpoints", strings.Join(e.Endpoints(), ","))
		if err != nil {
			return list, err
		}
		nodes = append(nodes, node)
	}
	ours, err := b.sessiond(ctx, nameCluster, meter{processes: processes(append(e.Members, nodes...)...), etcd: etcd}, nodes...)
	return append(list, ours...), err
}

// sessiond makes a contestant of nodes. Its client is attached, as that of a front-end with the lock is.
func (b *bench) sessiond(ctx context.Context, name string, m meter, nodes ...*sessiondtest.Server) ([]*contestant, error) {
	var addrs []string
	for _, n := range nodes {
		addrs = append(addrs, n.Addr)
	}
	c, err := client.New(addrs, client.Options{Attach: true})
	if err != nil {
		return nil, err
	}
	us := &contestant{name: name, meter: m, locks: true, clean: c.Close}
	list := []*contestant{us}
	if err := sessiondtest.Poll(ctx, c.Ready); err != nil {
		return list, err
	}
	data := newPayloads(sessionCount)
	ids := make([]string, sessionCount)
	for i := range ids {
		s, err := c.Create(ctx, data.next(i), client.CreateOptions{})
		if err != nil {
			return list, err
		}
		ids[i] = s.ID
	}
	us.cycle = func(ctx context.Context, caller, session int, under func()) error {
		return c.WithLock(ctx, ids[session], client.AcquireOptions{TTL: lockTTL}, func(context.Context, []byte) ([]byte, error) {
			under()
			return data.next(caller), nil
		})
	}
	us.read = func(ctx context.Context, _, session int) error {
		_, err := c.Read(ctx, ids[session])
		return err
	}
	us.refused = func(ctx context.Context) (func(context.Context, int) error, func(context.Context) error, error) {
		grant, err := c.Acquire(ctx, ids[0], client.AcquireOptions{TTL: lockTTL})
		return func(ctx context.Context, _ int) error {
			got, err := c.TryAcquire(ctx, ids[0], client.AcquireOptions{TTL: lockTTL})
			if got.Acquired {
				err = errNotRefused
			}
			return err
		}, func(ctx context.Context) error { return c.Release(ctx, grant) }, err
	}
	us.messages, err = b.sessiondChannel(ids[0], addrs)
	return list, err
}

// sessiondChannel publishes at one node what is subscribed to at another, if there is another.
func (b *bench) sessiondChannel(id string, addrs []string) (*channel, error) {
	const (
		stream    = "messages"
		trimAfter = 100 // what is stored of a session's messages is bounded
	)
	var clients []*client.Client
	for _, addr := range []string{addrs[0], addrs[len(addrs)-1]} {
		c, err := client.New([]string{addr}, client.Options{})
		if err != nil {
			return nil, err
		}
		b.onStop(func(context.Context) error { return c.Close() })
		clients = append(clients, c)
	}
	from, to := clients[0], clients[1]
	data := newPayloads(1)
	var last uint64
	sent := 0
	return &channel{
		subscribe: func(ctx context.Context) (iter.Seq[error], error) {
			s, err := to.Read(ctx, id)
			if err != nil {
				return nil, err
			}
			messages, err := to.Subscribe(ctx, id, s.Position, stream)
			if err != nil {
				return nil, err
			}
			return func(yield func(error) bool) {
				for _, err := range messages {
					if !yield(err) {
						return
					}
				}
			}, nil
		},
		publish: func(ctx context.Context) (err error) {
			last, err = from.Publish(ctx, id, stream, data.next(0), client.PublishOptions{TTL: time.Minute})
			return err
		},
		tidy: func(ctx context.Context) error {
			if sent++; sent%trimAfter != 0 {
				return nil
			}
			return from.Trim(ctx, id, stream, last, 0)
		},
	}, nil
}
