package etcdstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// countedKV counts transactions, which all reads of sessions and messages beside a single Get are too.
type countedKV struct {
	KV

	txns atomic.Int64
}

func (c *countedKV) Txn(ctx context.Context, req *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	c.txns.Add(1)
	return c.KV.Txn(ctx, req)
}

// M1, M2: a publish on a node that has published for the session before, or has a subscriber that has read all of it, is one
// transaction, without a read before it, and what is published is delivered without one.
func TestPublishReadsNothing(t *testing.T) {
	prefix := rand.Text() + "/"
	kv, kvThere := &countedKV{KV: etcd.KV()}, &countedKV{KV: etcd.KV()}
	here, there := openOn(t, prefix, kv), openOn(t, prefix, kvThere)
	if _, _, err := here.CreateSession(t.Context(), "one", nil, time.Hour); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	delivered := make(chan message.Message)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		_ = message.NewService(there, nil).Subscribe(ctx, "one", []string{"s"}, 0, func(b message.Batch) error {
			for _, m := range b.Messages {
				select {
				case delivered <- m:
				case <-ctx.Done():
				}
			}
			return nil
		})
	})
	publish := func() uint64 {
		t.Helper()
		position, err := here.Publish(t.Context(), message.Publish{Session: "one", Stream: "s", Payload: []byte("x"), TTL: time.Minute, Request: rand.Text()})
		if err != nil {
			t.Fatal(err)
		}
		return position
	}
	next := func(position uint64) {
		t.Helper()
		select {
		case m := <-delivered:
			if m.Position != position {
				t.Fatalf("delivered %d, published %d", m.Position, position)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("not delivered")
		}
	}
	next(publish())
	before, beforeThere := kv.txns.Load(), kvThere.txns.Load()
	const n = 50
	for range n {
		next(publish())
	}
	if got := kv.txns.Load() - before; got != n {
		t.Errorf("%d transactions for %d messages", got, n)
	}
	if got := kvThere.txns.Load() - beforeThere; got != 0 {
		t.Errorf("%d transactions to deliver them", got)
	}
	position, err := there.Publish(t.Context(), message.Publish{Session: "one", Stream: "s", TTL: time.Minute, Request: rand.Text()})
	if err != nil {
		t.Fatal(err)
	}
	next(position)
	if got := kvThere.txns.Load() - beforeThere; got != 1 {
		t.Errorf("%d transactions for a message to a subscriber's node", got)
	}
}

// stored is what a session stores of messages.
func (s *services) stored(t *testing.T, id string) (count, bytes int) {
	t.Helper()
	resp, err := s.store.kv.Get(t.Context(), s.store.keys.messages(id), clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range s.store.parts(resp.Kvs) {
		bytes += p.bytes
		if p.last {
			count++
		}
	}
	return count, bytes
}

// M4: what nodes know of what sessions store is right in the end, whoever publishes, publishes again and trims, while sessions go and
// come back.
func TestRoomIsRight(t *testing.T) {
	prefix := rand.Text() + "/"
	nodes := []*services{newServices(t, prefix), newServices(t, prefix), newServices(t, prefix)}
	ids := []string{"a", "b/c", "d%"}
	for _, id := range ids {
		if _, err := nodes[0].sessions.Create(t.Context(), id, nil, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for caller := range 12 {
		wg.Go(func() {
			for i := range 60 {
				node, id, stream := nodes[mathrand.N(len(nodes))], ids[mathrand.N(len(ids))], fmt.Sprint("s", mathrand.N(3))
				var err error
				switch mathrand.N(20) {
				case 0:
					_, err = node.messages.Trim(t.Context(), id, stream, 1<<60, mathrand.N(4))
				case 1:
					if caller == 0 {
						_, err = node.sessions.Destroy(t.Context(), id)
						if err == nil {
							_, err = node.sessions.Create(t.Context(), id, nil, time.Hour)
						}
					}
				case 2:
					err = node.messages.Retain(t.Context(), id, stream, time.Hour)
				case 3:
					_, err = node.messages.Publish(t.Context(), message.Publish{Session: id, Stream: stream, Payload: make([]byte, chunkBytes+9), TTL: time.Hour})
				default:
					p := message.Publish{
						Session: id, Stream: stream, Payload: make([]byte, mathrand.N(100)), TTL: time.Hour,
						Request: fmt.Sprint(caller, "-", i-i%2), LowPriority: mathrand.N(2) == 0,
					}
					_, err = node.messages.Publish(t.Context(), p)
				}
				// Of one that the store does not answer in time, nobody knows what has become; that is for the watches to tell.
				if err != nil && !full(err) && !errors.Is(err, session.ErrNotFound) && !errors.Is(err, session.ErrUnavailable) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, id := range ids {
		count, bytes := nodes[0].stored(t, id)
		for _, node := range nodes {
			h := node.store.hub
			waitFor(t, 5*time.Second, "rooms that are right", func() bool {
				h.mu.Lock()
				defer h.mu.Unlock()
				r := h.rooms[escaper.Replace(id)]
				return r == nil || len(r.ahead) == 0 && r.count == count && r.bytes == bytes
			})
		}
		// And a publish makes it known.
		_, err := nodes[1].messages.Publish(t.Context(), message.Publish{Session: id, Stream: "s", TTL: time.Hour})
		if err != nil && !full(err) {
			t.Fatal(err)
		}
		h := nodes[1].store.hub
		waitFor(t, 5*time.Second, "a room that is known", func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			r := h.rooms[escaper.Replace(id)]
			return r != nil && r.asOf != 0 && r.bytes == bytes && (full(err) || r.count == count+1)
		})
	}
}

func full(err error) bool {
	_, ok := errors.AsType[*message.TooManyError](err)
	return ok
}

// M4: the limit is exact for publishers one after the other, on whichever nodes, also when what is stored ends or is trimmed in between.
func TestRoomOverNodes(t *testing.T) {
	prefix := rand.Text() + "/"
	nodes := []*services{newServices(t, prefix), newServices(t, prefix)}
	id := nodes[0].create(t)
	publish := func(i int, ttl time.Duration, low bool) error {
		_, err := nodes[i%2].messages.Publish(t.Context(), message.Publish{Session: id, Stream: "s", Payload: []byte("x"), TTL: ttl, LowPriority: low})
		return err
	}
	for i := range message.MaxStored / 2 {
		if err := publish(i, time.Hour, true); err != nil {
			t.Fatal(i, err)
		}
	}
	for i := range 2 {
		if err := publish(i, time.Hour, true); !full(err) {
			t.Errorf("beyond half of the room: %v", err)
		}
	}
	for i := range message.MaxStored / 2 {
		if err := publish(i, time.Hour, false); err != nil {
			t.Fatal(i, err)
		}
	}
	for i := range 2 {
		if err := publish(i, time.Hour, false); !full(err) {
			t.Errorf("beyond the room: %v", err)
		}
	}
	if removed, err := nodes[1].messages.Trim(t.Context(), id, "s", 1<<60, message.MaxStored-1); err != nil || removed != 1 {
		t.Fatal(removed, err)
	}
	for i, want := range []bool{false, true, true} {
		if err := publish(i, time.Hour, false); full(err) != want || !want && err != nil {
			t.Errorf("after a trim: %v", err)
		}
	}
}

// M4: what a node knows goes with its session, and with the watches that it comes from; of more sessions than it may know, it forgets
// some.
func TestRoomIsForgotten(t *testing.T) {
	s := newServices(t, "")
	h := s.store.hub
	known := func(id string) bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		r := h.rooms[id]
		return r != nil && r.asOf != 0
	}
	publish := func(id string) {
		t.Helper()
		if _, err := s.messages.Publish(t.Context(), message.Publish{Session: id, Stream: "s", TTL: time.Hour}); err != nil {
			t.Fatal(err)
		}
	}
	id := s.create(t)
	publish(id)
	if !known(id) {
		t.Fatal("not known")
	}
	if _, err := s.sessions.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	waitFor(t, 5*time.Second, "a destroyed session is forgotten", func() bool { return !known(id) })
	if _, err := s.messages.Publish(t.Context(), message.Publish{Session: id, Stream: "s", TTL: time.Hour}); !errors.Is(err, session.ErrNotFound) {
		t.Errorf("publish to a destroyed session: %v", err)
	}
	if h.mu.Lock(); h.rooms[id] != nil {
		t.Error("a session that is not there is kept in mind")
	}
	h.mu.Unlock()

	id = s.create(t)
	publish(id)
	h.closed()
	if known(id) {
		t.Error("known without watches")
	}
	publish(id)
	if known(id) {
		t.Error("learned without watches")
	}
	h.opened()
	publish(id)
	if !known(id) {
		t.Error("not known again")
	}
	for i := range maxRooms + 10 {
		h.learnedNothing(h.learn(fmt.Sprint(i)))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.rooms) != maxRooms {
		t.Errorf("%d sessions are known", len(h.rooms))
	}
}

// learnedNothing is learned for a session without messages.
func (h *hub) learnedNothing(r *room) { h.learned(r, 1, 1, nil) }
