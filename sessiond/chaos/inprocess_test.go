package chaos

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/memstore"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/rpc"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// store is what a node needs of one.
type store interface {
	session.Store
	lock.Store
	message.Store
}

// serve serves the true services over a store within the process, through the true client, and returns what makes clients.
func serve(t *testing.T, s store, opts ...grpc.ServerOption) func(...grpc.DialOption) *client.Client {
	t.Helper()
	drain := make(chan struct{})
	server := rpc.NewServer(rpc.Options{
		Sessions: session.NewService(s, session.DefaultMaxBytes),
		Locks:    lock.NewService(s, lock.DefaultMaxWaiters, drain),
		Messages: message.NewService(s, drain),
		Logger:   slog.New(slog.DiscardHandler),
		Metrics:  prometheus.NewRegistry(),
		Drain:    drain,
	})
	server.SetServing(true)
	l := bufconn.Listen(1 << 20)
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(l) })
	t.Cleanup(func() {
		server.Stop()
		wg.Wait()
	})
	return func(more ...grpc.DialOption) *client.Client {
		t.Helper()
		c, err := client.New([]string{"in-process:1"}, client.Options{DialOptions: append([]grpc.DialOption{
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
			grpc.WithChainUnaryInterceptor(countAttempts),
		}, more...)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
}

// answersLost is an interceptor that loses one answer in so many, after what was asked for has been done.
func answersLost(seed uint64, oneIn int) grpc.UnaryClientInterceptor {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(seed, 1))
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		err := invoke(ctx, method, req, reply, cc, opts...)
		mu.Lock()
		defer mu.Unlock()
		if err == nil && rng.IntN(oneIn) == 0 {
			return status.Error(codes.Unavailable, "the answer was lost")
		}
		return err
	}
}

// exact are the bounds of a store in memory, whose TTLs end in time, with what a busy machine adds.
var exact = bounds{late: 700 * time.Millisecond, handOver: 700 * time.Millisecond}

// tryStore lets a workload loose on a store until something is wrong or the time is over.
func tryStore(t *testing.T, seed uint64, d time.Duration, s store, more ...grpc.DialOption) *Totals {
	t.Helper()
	clk := clock{time.Now()}
	j := newJudge(&calm{}, exact, func(ops []Op, vs []Violation) {
		for _, v := range vs {
			t.Log(v)
		}
	})
	j.start()
	connect := serve(t, s)
	clients := []*client.Client{connect(more...), connect(append(more, grpc.WithChainUnaryInterceptor(answersLost(seed, 50)))...)}
	w := &workload{
		load: load{slots: 16, actors: 5, operations: 60, doubts: 4, abandons: 1, lockTTL: time.Second, patience: 3 * time.Second},
		seed: seed, clients: clients, attached: make([]bool, len(clients)), clock: clk, judge: j.take,
	}
	talk := &talks{
		seed: seed, slots: 2, clients: clients, clock: clk, calm: j.calm, patience: 2 * time.Second,
		judge: func(c *conversation) { j.takeMessages(c, t.Logf) },
	}
	stop, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	stop, end := j.untilViolated(stop)
	defer end()
	var wg sync.WaitGroup
	wg.Go(func() { talk.run(t.Context(), stop) })
	w.run(t.Context(), stop)
	wg.Wait()
	return j.finish()
}

// What is right is not accused: the store in memory, with answers lost on the way, keeps every promise.
func TestSoundStore(t *testing.T) {
	s := memstore.Open()
	t.Cleanup(func() { s.Close(context.WithoutCancel(t.Context())) })
	totals := tryStore(t, 1, 2*time.Second, s)
	t.Logf("%d operations in %d sessions, %.1f%% answered, %d undecided: %v; %d messages, %d delivered",
		totals.Operations, totals.Sessions, 100*totals.SuccessRate(), totals.Undecided, totals.ByKind, totals.Published, totals.Delivered)
	if len(totals.Violations) > 0 || totals.Undecided > 0 || totals.Checked < 500 || totals.Delivered == 0 {
		t.Errorf("%d violations, %d undecided, %d checked", len(totals.Violations), totals.Undecided, totals.Checked)
	}
}
