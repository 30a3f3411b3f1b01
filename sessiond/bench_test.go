package sessiond_test

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond"
)

// The benchmarks of the hot paths go through the Go client over loopback to a node with an embedded etcd, all in this process.
// Each reports what one caller after the other, or all callers together, get done in a second; BenchmarkPut and BenchmarkGet are
// the limits: plain writes and reads of the same size, to the same kind of etcd.

const benchBytes = 1 << 10

type bench struct {
	*testing.B

	sessions *client.Client
	etcd     *clientv3.Client
	data     []byte
}

func newBench(b *testing.B) *bench {
	b.Helper()
	return newBenchOn(b, sessiond.Config{DataDir: b.TempDir()}, client.Options{})
}

// newBenchOn runs a node with the store that a Config names.
func newBenchOn(b *testing.B, cfg sessiond.Config, opts client.Options) *bench {
	b.Helper()
	cfg.Listen, cfg.Logger = "127.0.0.1:0", slog.New(slog.DiscardHandler)
	srv, err := sessiond.New(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan error, 1)
	ctx, stop := context.WithCancel(context.WithoutCancel(b.Context()))
	go func() { done <- srv.Run(ctx) }()
	b.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			b.Error(err)
		}
	})
	<-srv.Ready()
	var etcd *clientv3.Client
	if endpoints := srv.EtcdEndpoints(); len(endpoints) > 0 {
		if etcd, err = clientv3.New(clientv3.Config{Endpoints: endpoints}); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = etcd.Close() })
	}
	sessions, err := client.New([]string{srv.Addr().String()}, opts)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = sessions.Close() })
	return &bench{B: b, sessions: sessions, etcd: etcd, data: make([]byte, benchBytes)}
}

// create makes sessions and returns their ids.
func (b *bench) create(count int) []string {
	b.Helper()
	ids := make([]string, count)
	for i := range ids {
		s, err := b.sessions.Create(b.Context(), b.data, client.CreateOptions{})
		if err != nil {
			b.Fatal(err)
		}
		ids[i] = s.ID
	}
	return ids
}

// callers has each of so many callers do something again and again, b.N times in all.
func (b *bench) callers(count int, unit string, do func(caller int) error) {
	b.Run(fmt.Sprintf("callers=%d", count), func(b *testing.B) {
		b.ReportAllocs()
		before := processorTime(b)
		var wg sync.WaitGroup
		for caller := range count {
			wg.Go(func() {
				for n := caller; n < b.N; n += count {
					if err := do(caller); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), unit+"/s")
		b.ReportMetric(float64((processorTime(b)-before).Microseconds())/float64(b.N), "cpu-µs/op")
	})
}

// processorTime is what this process has used so far. A rate suffers from what else the machine does, this hardly.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// cycle is a whole locked request of a front-end: acquire with read, save with release.
func (b *bench) cycle(id string) error {
	return b.sessions.WithLock(b.Context(), id, client.AcquireOptions{}, func(_ context.Context, data []byte) ([]byte, error) { return data, nil })
}

func benchKey(caller int) string { return fmt.Sprintf("bench/%d", caller) }

// BenchmarkPut is the limit of what commits: durable writes to etcd, over gRPC.
func BenchmarkPut(b *testing.B) {
	bench := newBench(b)
	value := string(bench.data)
	for _, count := range []int{1, 16, 128} {
		bench.callers(count, "puts", func(caller int) error {
			_, err := bench.etcd.Put(b.Context(), benchKey(caller), value)
			return err
		})
	}
}

// BenchmarkGet is the limit of what reads: linearizable reads of etcd, over gRPC.
func BenchmarkGet(b *testing.B) {
	bench := newBench(b)
	for caller := range 128 {
		if _, err := bench.etcd.Put(b.Context(), benchKey(caller), string(bench.data)); err != nil {
			b.Fatal(err)
		}
	}
	for _, count := range []int{1, 128} {
		bench.callers(count, "gets", func(caller int) error {
			_, err := bench.etcd.Get(b.Context(), benchKey(caller))
			return err
		})
	}
}

// BenchmarkCycle has callers with a session each.
func BenchmarkCycle(b *testing.B) {
	bench := newBench(b)
	ids := bench.create(128)
	for _, count := range []int{1, 16, 128} {
		bench.callers(count, "cycles", func(caller int) error { return bench.cycle(ids[caller]) })
	}
}

// BenchmarkContended has callers that share one session.
func BenchmarkContended(b *testing.B) {
	bench := newBench(b)
	id := bench.create(1)[0]
	for _, count := range []int{16, 64} {
		bench.callers(count, "hand-overs", func(int) error { return bench.cycle(id) })
	}
}

// BenchmarkBurst is 16 requests of one session at once, whose handlers take 5 ms: 80 ms are the limit.
func BenchmarkBurst(b *testing.B) {
	bench := newBench(b)
	id := bench.create(1)[0]
	for b.Loop() {
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				err := bench.sessions.WithLock(b.Context(), id, client.AcquireOptions{}, func(_ context.Context, data []byte) ([]byte, error) {
					<-time.After(5 * time.Millisecond)
					return data, nil
				})
				if err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
	}
}

// BenchmarkRead reads sessions.
func BenchmarkRead(b *testing.B) {
	bench := newBench(b)
	ids := bench.create(128)
	for _, count := range []int{1, 128} {
		bench.callers(count, "reads", func(caller int) error {
			_, err := bench.sessions.Read(b.Context(), ids[caller])
			return err
		})
	}
}

// BenchmarkDeliver is from the call of Publish until a subscriber has the message.
func BenchmarkDeliver(b *testing.B) {
	bench := newBench(b)
	id := bench.create(1)[0]
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	messages, err := bench.sessions.Subscribe(ctx, id, 0, "bench")
	if err != nil {
		b.Fatal(err)
	}
	next, stop := iter.Pull2(messages)
	defer stop()
	for n := 1; b.Loop(); n++ {
		if _, err := bench.sessions.Publish(ctx, id, "bench", bench.data, client.PublishOptions{TTL: time.Minute}); err != nil {
			b.Fatal(err)
		}
		if _, err, ok := next(); err != nil || !ok {
			b.Fatal(err)
		}
		if n%500 == 0 { // there is a limit on what a session stores
			if err := bench.sessions.Trim(ctx, id, "bench", 1<<62, 0); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// BenchmarkTransport has callers read sessions that are kept in memory: what is left is the cost of a call, of client and node
// together, for calls that share a stream and for unary ones.
func BenchmarkTransport(b *testing.B) {
	for name, opts := range map[string]client.Options{"shared": {}, "unary": {Unary: true}} {
		b.Run(name, func(b *testing.B) {
			bench := newBenchOn(b, sessiond.Config{Store: sessiond.StoreMemory}, opts)
			ids := bench.create(128)
			for _, count := range []int{1, 16, 128} {
				bench.callers(count, "reads", func(caller int) error {
					_, err := bench.sessions.Read(b.Context(), ids[caller])
					return err
				})
			}
		})
	}
}
