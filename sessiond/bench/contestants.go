//go:build unix

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// A contestant does the same work in its own way. What it cannot do is nil.
type contestant struct {
	name string
	meter

	// cycle is a whole locked request: acquire, read, under, save, release. Without a lock it is what stands for it: one write,
	// or one call.
	cycle func(ctx context.Context, caller, session int, under func()) error
	locks bool
	// read is of what is certainly the newest.
	read     func(ctx context.Context, caller, session int) error
	messages *channel
	// refused holds a lock. Each call of try is refused it.
	refused func(ctx context.Context) (try func(ctx context.Context, caller int) error, release func(context.Context) error, err error)
	// clean, if set, ends the connections.
	clean func() error
}

// The names by which targets refer to contestants.
const (
	namePut       = "etcd Put (the limit)"
	nameEmpty     = "empty gRPC call (the limit)"
	namePut3      = "etcd Put, 3 members"
	nameEtcdNew   = "etcd Mutex, new session"
	nameEtcdLong  = "etcd Mutex, long-lived session"
	nameV3Lock    = "etcd v3lock service"
	nameRedis     = "Redis fsync, polling lock"
	nameRedisCach = "Redis as a cache, polling lock"
	nameRedsync   = "Redis fsync, redsync"
	nameEmbedded  = "sessiond, embedded etcd"
	nameSeparate  = "sessiond, 1 node on 1 etcd"
	nameCluster   = "sessiond, 3 nodes on 3 etcd"
)

const (
	sessionCount = 128 // each of as many callers has its own
	payloadBytes = 1 << 10
	lockTTL      = 300 * time.Second
)

// A field is contestants that run at the same time. What one costs while it waits for its turn, with timers and signs of life, the
// others notice, most of all one that needs many processes. So the cluster has a field of its own.
type field struct {
	name  string
	start []func(*bench, context.Context) ([]*contestant, error)
}

var (
	single = &field{"what needs one member of etcd, or none", []func(*bench, context.Context) ([]*contestant, error){
		(*bench).startEmpty, (*bench).startEtcd, (*bench).startRedis, (*bench).startEmbedded, (*bench).startSeparate,
	}}
	cluster = &field{"what needs three members of etcd", []func(*bench, context.Context) ([]*contestant, error){(*bench).startCluster}}
)

// start starts the contestants of a field, if they do not run already, and stops others.
func (b *bench) start(ctx context.Context, f *field) error {
	if b.field == f {
		return nil
	}
	if err := b.stop(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	b.field = f
	b.say("starting %s", f.name)
	for _, start := range f.start {
		list, err := start(b, ctx)
		for _, c := range list {
			if c.clean != nil {
				b.onStop(func(context.Context) error { return c.clean() })
			}
			b.contestants = append(b.contestants, c)
		}
		if err != nil {
			return err
		}
	}
	return b.measureIdle(ctx)
}

// measureIdle says what the processes use while nobody asks for anything: it is what each contestant's neighbours cost it.
func (b *bench) measureIdle(ctx context.Context) error {
	all := map[int]*sessiondtest.Process{}
	for _, c := range b.contestants {
		for _, p := range c.processes {
			all[p.Pid()] = p
		}
	}
	m := meter{}
	for _, p := range all {
		m.processes = append(m.processes, p)
	}
	l := loop{meter: m}
	before, err := l.wait(ctx, time.Now().Add(time.Second))
	if err != nil {
		return err
	}
	after, err := l.wait(ctx, time.Now().Add(2*time.Second))
	if err != nil {
		return err
	}
	cores := (after.servers - before.servers).Seconds() / after.at.Sub(before.at).Seconds()
	b.report.IdleCores = max(b.report.IdleCores, cores)
	b.say("%d processes run; idle, they use %.1f %% of a core", len(all), 100*cores)
	return nil
}

// launch starts a process that is stopped at the end.
func (b *bench) launch(ctx context.Context, cmd sessiondtest.Command) (*sessiondtest.Process, error) {
	cmd.Log = filepath.Join(b.dir, cmd.Name+".log")
	p, err := sessiondtest.Launch(ctx, cmd)
	if err == nil {
		b.onStop(p.Terminate)
	}
	return p, err
}

// launchEtcd starts an etcd with the settings that sessiond gives the one that it embeds, as far as they matter here.
func (b *bench) launchEtcd(ctx context.Context, name string, members int) (*sessiondtest.Etcd, error) {
	e, err := sessiondtest.LaunchEtcd(ctx, sessiondtest.EtcdConfig{
		Dir: filepath.Join(b.dir, name), Members: members, Heartbeat: 100 * time.Millisecond,
		Args: []string{
			"--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1m",
			"--quota-backend-bytes", fmt.Sprint(8 << 30),
		},
	})
	if err == nil {
		b.onStop(func(context.Context) error { return e.Stop() })
	}
	return e, err
}

func processes(servers ...*sessiondtest.Server) []*sessiondtest.Process {
	var list []*sessiondtest.Process
	for _, s := range servers {
		list = append(list, s.Process)
	}
	return list
}

// dialEtcd makes a client that is closed at the end.
func (b *bench) dialEtcd(endpoints ...string) (*clientv3.Client, error) {
	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 10 * time.Second})
	if err != nil {
		return nil, fmt.Errorf("connect to etcd at %s: %w", strings.Join(endpoints, ","), err)
	}
	b.onStop(func(context.Context) error {
		if err := c.Close(); !errors.Is(err, context.Canceled) {
			return err
		}
		return nil
	})
	return c, nil
}

// payloads are the callers' data: as large as a session, different for each save.
type payloads [][]byte

func newPayloads(callers int) payloads {
	p := make(payloads, callers)
	for i := range p {
		p[i] = make([]byte, payloadBytes)
		for j := range p[i] {
			p[i][j] = byte(rand.N(256))
		}
	}
	return p
}

// next is the caller's next data, in a memory of its own: a client library may still have the former in its hands.
func (p payloads) next(caller int) []byte {
	data := append([]byte(nil), p[caller]...)
	binary.LittleEndian.PutUint64(data, binary.LittleEndian.Uint64(data)+1)
	p[caller] = data
	return data
}

var errNotRefused = errors.New("got a lock that another holds")

func sessionKey(i int) string { return fmt.Sprintf("session/%03d", i) }
