package rpc

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/memstore"
)

// L10: front-ends attach with a sign of life a second, and by connections beyond the first so many that are open, rarely: a node does not
// spend itself on them. When connections end, others are among the first.
func TestManyConnections(t *testing.T) {
	defer goleak.VerifyNone(t)
	store := memstore.Open()
	defer store.Close(t.Context())
	drain := make(chan struct{})
	frontEnds := lock.NewFrontEnds(store, lock.MinAttachGrace, drain, slog.New(slog.DiscardHandler))
	defer frontEnds.Close()
	srv := NewServer(Options{FrontEnds: frontEnds, Logger: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(), Drain: drain})
	const most = 2
	srv.often.most = most
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	defer srv.Stop()

	attach := func() (every time.Duration, hangUp func()) {
		t.Helper()
		conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		stream, err := sessiondv1.NewLockServiceClient(conn).Attach(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Hello{
			Hello: &sessiondv1.AttachHello{FrontEnd: rand.Text(), Number: 1},
		}}); err != nil {
			t.Fatal(err)
		}
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return m.GetAttached().GetPingInterval().AsDuration(), func() { _ = conn.Close() }
	}
	var hangUps []func()
	defer func() {
		for _, hangUp := range hangUps {
			hangUp()
		}
	}()
	for i := range most + 2 {
		every, hangUp := attach()
		hangUps = append(hangUps, hangUp)
		want := lock.PingEvery
		if i >= most {
			want = lock.RarePingEvery
		}
		if every != want {
			t.Errorf("front-end %d is given a sign of life every %v, want %v", i, every, want)
		}
	}
	hangUps[0]()
	for ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second); ; {
		defer cancel()
		every, hangUp := attach()
		if every == lock.PingEvery {
			hangUps = append(hangUps, hangUp)
			break
		}
		hangUp()
		if ctx.Err() != nil {
			t.Fatal("no other took the place of the one that has gone")
		}
	}

	// It stops with front-ends on both servers.
	close(drain)
	srv.GracefulStop()
	if err := <-served; err != nil {
		t.Error(err)
	}
	if _, err := new(net.Dialer).DialContext(t.Context(), "tcp", l.Addr().String()); err == nil {
		t.Error("it still listens")
	}
}

type failing struct {
	net.Listener
	err error
}

func (f failing) Accept() (net.Conn, error) { return nil, f.err }

// A listener that fails ends the server, with its error.
func TestListenerFails(t *testing.T) {
	defer goleak.VerifyNone(t)
	drain := make(chan struct{})
	srv := NewServer(Options{Logger: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(), Drain: drain})
	defer srv.Stop()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	want := errors.New("no more")
	if err := srv.Serve(failing{l, want}); !errors.Is(err, want) {
		t.Error(err)
	}
}
