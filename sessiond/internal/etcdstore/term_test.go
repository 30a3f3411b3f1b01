package etcdstore

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// deposed renews leases as a member does that goes on after a pause in which another has been elected: it says that it has, in
// its old term, and the one that leads knows nothing of it.
type deposed struct {
	clientv3.Lease

	term  uint64
	lies  atomic.Int64 // how many renewals are still to be answered so
	truly atomic.Int64 // how many were made
}

func (d *deposed) KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	if d.lies.Add(-1) >= 0 {
		return &clientv3.LeaseKeepAliveResponse{ResponseHeader: &pb.ResponseHeader{RaftTerm: d.term}, ID: id, TTL: 7200}, nil
	}
	d.truly.Add(1)
	return d.Lease.KeepAliveOnce(ctx, id)
}

// openDeposed opens a store whose renewals may be answered by who leads no more.
func openDeposed(t *testing.T) (*services, *deposed) {
	t.Helper()
	resp, err := etcd.KV().Get(t.Context(), "none")
	if err != nil {
		t.Fatal(err)
	}
	d := &deposed{Lease: etcd.Client(), term: resp.Header.RaftTerm - 1}
	s := Open(Config{
		KV: etcd.KV(), Lease: d, Watcher: etcd.Client(), Members: 1, Prefix: t.Name() + "/",
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	t.Cleanup(func() { s.Close(context.WithoutCancel(t.Context())) })
	waitFor(t, 10*time.Second, "it is up", func() bool { return s.hub.watching() && s.live.isKnown() })
	return &services{store: s, sessions: session.NewService(s, session.DefaultMaxBytes), locks: lock.NewService(s, lock.DefaultMaxWaiters, nil)}, d
}

// L4: a lock is not granted on a lease whose renewal was answered by a leader of an earlier term: it is renewed again first.
func TestRenewedByADeposedLeader(t *testing.T) {
	s, d := openDeposed(t)
	id := s.create(t)
	// In its long TTL the pool renews nothing by itself meanwhile.
	request := func(name string) lock.Request {
		return lock.Request{Session: id, ID: name, Holder: name, TTL: time.Hour, Timeout: 10 * time.Second}
	}
	first, err := s.locks.Acquire(t.Context(), request("first"))
	if err != nil {
		t.Fatal(err)
	}
	p, ok := s.store.Place(request("waiter")).(*place)
	if !ok {
		t.Fatal("another kind of place")
	}
	defer p.Close()
	if v, err := p.Join(t.Context(), false); err != nil || v.Held() {
		t.Fatalf("%+v, %v", v, err)
	}
	defer p.Leave(t.Context())
	before := d.truly.Load()
	p.until = time.Now()
	d.lies.Store(1)
	if v, err := p.Check(t.Context()); err != nil || v.Held() || d.truly.Load() != before {
		t.Fatalf("while another holds: %+v, %v", v, err)
	}
	s.store.hub.mu.Lock()
	p.waiter.standing.term = d.term
	s.store.hub.mu.Unlock()
	if err := s.locks.Release(t.Context(), id, first.Request, first.Token); err != nil {
		t.Fatal(err)
	}
	v, err := p.Check(t.Context())
	if err != nil || !v.Held() || d.truly.Load() == before {
		t.Fatalf("granted after %d renewals: %+v, %v", d.truly.Load()-before, v, err)
	}
	if left := time.Until(v.Until); left > lockLeaseTTL(time.Hour) {
		t.Errorf("%v left of a lease of %v", left, lockLeaseTTL(time.Hour))
	}

	// The same for a lease out of the pool.
	if err := s.locks.Release(t.Context(), id, "waiter", v.Own.Token); err != nil {
		t.Fatal(err)
	}
	s.store.pool.mu.Lock()
	for _, list := range s.store.pool.idle {
		for i := range list {
			list[i].until, list[i].term = time.Now().Add(2*time.Hour), d.term
		}
	}
	s.store.pool.mu.Unlock()
	before = d.truly.Load()
	g, err := s.locks.Acquire(t.Context(), request("pooled"))
	if err != nil || d.truly.Load() == before {
		t.Fatalf("granted after %d renewals: %+v, %v", d.truly.Load()-before, g, err)
	}
	if left := time.Until(g.Until); left > lockLeaseTTL(time.Hour) {
		t.Errorf("%v left of a lease of %v", left, lockLeaseTTL(time.Hour))
	}
}
