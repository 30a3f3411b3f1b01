package etcdstore

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// refusing runs something right after a transaction has been refused, and sees all of them.
type refusing struct {
	KV

	sent  func(*etcdserverpb.TxnRequest)
	after atomic.Pointer[func()]
}

func (k *refusing) Txn(ctx context.Context, req *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	if k.sent != nil {
		k.sent(req)
	}
	resp, err := k.KV.Txn(ctx, req)
	if err == nil && !resp.Succeeded {
		if f := k.after.Swap(nil); f != nil {
			(*f)()
		}
	}
	return resp, err
}

// L2, L3, L8, S6: why an acquire or a holder's save is refused is looked up afterwards. What is found then is a reason still, or none.
func TestRefusedThenChanged(t *testing.T) {
	prefix := rand.Text() + "/"
	kv := &refusing{KV: etcd.KV()}
	store, other := openOn(t, prefix, kv), newServices(t, prefix)
	here := &services{
		store: store, sessions: session.NewService(store, session.DefaultMaxBytes),
		locks: lock.NewService(store, lock.DefaultMaxWaiters, nil),
	}
	then := func(f func()) { kv.after.Store(&f) }
	ok := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		if kv.after.Load() != nil {
			t.Fatal("nothing was refused")
		}
	}
	join := func(t *testing.T, id, request string, ifFree bool) (lock.View, error) {
		t.Helper()
		p := store.Place(lock.Request{Session: id, ID: request, Holder: request, TTL: time.Minute, Read: true})
		defer p.Close()
		return p.Join(t.Context(), ifFree)
	}

	t.Run("the session was made", func(t *testing.T) {
		id := rand.Text()
		then(func() {
			if _, err := other.sessions.Create(t.Context(), id, []byte("new"), time.Hour); err != nil {
				t.Error(err)
			}
		})
		v, err := join(t, id, "r", false)
		ok(t, err)
		if !v.Held() || v.Session == nil || string(v.Session.Data) != "new" {
			t.Errorf("%+v, session %+v", v, v.Session)
		}
	})
	t.Run("the lock became free", func(t *testing.T) {
		id := other.create(t)
		g := other.acquire(t, id)
		then(func() {
			if err := other.locks.Release(t.Context(), id, g.Request, g.Token); err != nil {
				t.Error(err)
			}
		})
		v, err := join(t, id, "r", true)
		ok(t, err)
		if !v.Held() {
			t.Errorf("%+v", v)
		}
	})
	t.Run("the earlier grant of the request was released", func(t *testing.T) {
		id := other.create(t)
		g := other.acquire(t, id)
		then(func() {
			if err := other.locks.Release(t.Context(), id, g.Request, g.Token); err != nil {
				t.Error(err)
			}
		})
		v, err := join(t, id, g.Request, false)
		ok(t, err)
		if !v.Held() || v.Own.Token <= g.Token {
			t.Errorf("%+v after %d", v, g.Token)
		}
	})
	t.Run("the session was destroyed", func(t *testing.T) {
		id := other.create(t)
		g := other.acquire(t, id)
		destroy := func() {
			if _, err := other.sessions.Destroy(t.Context(), id); err != nil {
				t.Error(err)
			}
		}
		then(destroy)
		v, err := join(t, id, "r", true)
		ok(t, err)
		if v.Exists || v.Own != nil {
			t.Errorf("%+v", v)
		}
		id = other.create(t)
		then(destroy)
		_, err = here.sessions.Save(t.Context(), session.Save{ID: id, TTL: time.Hour, Token: g.Token, Request: g.Request})
		if !errors.Is(err, session.ErrNotFound) {
			t.Error(err)
		}
	})
	t.Run("the session was saved", func(t *testing.T) {
		id := other.create(t)
		g := other.acquire(t, id)
		expected := g.Data.Revision + 1
		then(func() {
			if _, err := other.sessions.Save(t.Context(), session.Save{ID: id, TTL: time.Hour, Token: g.Token, Request: g.Request}); err != nil {
				t.Error(err)
			}
		})
		_, err := here.sessions.Save(t.Context(), session.Save{ID: id, TTL: time.Hour, Token: g.Token, Request: g.Request, Expected: &expected})
		if !errors.Is(err, session.ErrRevisionMismatch) {
			t.Error(err)
		}
	})
}

// What a cycle sends has no part in it that only one that is refused needs: everybody would wait for it.
func TestCyclesCarryNoReasons(t *testing.T) {
	kv := &refusing{KV: etcd.KV(), sent: func(req *etcdserverpb.TxnRequest) {
		for _, op := range req.Success {
			if own := op.GetRequestTxn(); own != nil {
				req = own
			}
		}
		if len(req.Compare) > 0 && strings.Contains(string(req.Compare[0].Key), "/s/") && len(req.Failure) > 0 {
			t.Errorf("carries %v", req.Failure)
		}
	}}
	store := openOn(t, rand.Text()+"/", kv)
	s := &services{
		store: store, sessions: session.NewService(store, session.DefaultMaxBytes),
		locks: lock.NewService(store, lock.DefaultMaxWaiters, nil),
	}
	id := s.create(t)
	for range 2 {
		g := s.acquire(t, id)
		save := session.Save{ID: id, TTL: time.Hour, Token: g.Token, Request: g.Request, Release: true}
		if _, err := s.sessions.Save(t.Context(), save); err != nil {
			t.Fatal(err)
		}
	}
}
