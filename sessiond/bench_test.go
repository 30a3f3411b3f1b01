package sessiond_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

// BenchmarkPut is the limit, in the same run: plain durable writes of the same size to the same kind of etcd, over gRPC.
func BenchmarkPut(b *testing.B) {
	srv, err := sessiond.New(b.Context(), sessiond.Config{DataDir: b.TempDir(), Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = srv.Close() }()
	etcd, err := clientv3.New(clientv3.Config{Endpoints: srv.EtcdEndpoints()})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = etcd.Close() }()
	value := string(make([]byte, 4<<10))
	for _, callers := range []int{1, 32, 128} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			var wg sync.WaitGroup
			for i := range callers {
				wg.Go(func() {
					for n := i; n < b.N; n += callers {
						if _, err := etcd.Put(b.Context(), fmt.Sprintf("bench/%d", i), value); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "puts/s")
		})
	}
}

// BenchmarkCycle is a whole locked request of a front-end: acquire with read, save with release.
func BenchmarkCycle(b *testing.B) {
	srv, err := sessiond.New(b.Context(), sessiond.Config{DataDir: b.TempDir(), Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan error, 1)
	ctx, stop := context.WithCancel(b.Context())
	go func() { done <- srv.Run(ctx) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			b.Error(err)
		}
	}()
	<-srv.Ready()
	conn, err := srv.Dial()
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	sessions, locks := sessiondv1.NewSessionServiceClient(conn), sessiondv1.NewLockServiceClient(conn)
	data := make([]byte, 4<<10)
	cycle := func(id, request string) error {
		got, err := locks.Acquire(ctx, &sessiondv1.AcquireRequest{SessionId: id, RequestId: request, ReadSession: true})
		if err != nil {
			return err
		}
		_, err = sessions.Save(ctx, &sessiondv1.SaveRequest{
			SessionId: id, Data: data, Ttl: got.GetSession().GetTtl(),
			FencingToken: got.GetGrant().GetFencingToken(), RequestId: request, Release: true,
		})
		return err
	}
	for _, callers := range []int{1, 32, 128} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			ids := make([]string, callers)
			for i := range ids {
				resp, err := sessions.Create(ctx, &sessiondv1.CreateRequest{Data: data})
				if err != nil {
					b.Fatal(err)
				}
				ids[i] = resp.GetSession().GetId()
			}
			b.ResetTimer()
			var wg sync.WaitGroup
			for i, id := range ids {
				wg.Go(func() {
					for n := i; n < b.N; n += callers {
						if err := cycle(id, fmt.Sprintf("r%d-%d", b.N, n)); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "cycles/s")
		})
	}
}
