// Package backendtest checks that a store, a lock and messages keep the contract that mcpserver relies on (F21): for anyone
// who brings their own in place of sessiond. Call [Run] from a test.
package backendtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/mcpserver"
)

// Backend is what is checked. Locker and Messages may be nil; then they are not.
type Backend struct {
	Store    mcpserver.Store
	Locker   mcpserver.Locker
	Messages mcpserver.Messages
}

// patience is how long something may take that is to happen at once.
const patience = 10 * time.Second

// Run checks a backend. open is called for each subtest; the backend that it returns need not be a fresh one, since all
// sessions get ids of their own.
func Run(t *testing.T, open func(t *testing.T) Backend) {
	t.Helper()
	for name, check := range map[string]func(*testing.T, Backend){
		"Create": checkCreate, "Save": checkSave, "Destroy": checkDestroy, "Touch": checkTouch,
		"Lock": checkLock, "LockOrder": checkLockOrder, "LockExpires": checkLockExpires, "LockLeaves": checkLockLeaves,
		"Messages": checkMessages, "MessagesTogether": checkMessagesTogether, "MessagesEnd": checkMessagesEnd,
	} {
		t.Run(name, func(t *testing.T) {
			b := open(t)
			if b.Locker == nil && len(name) > 3 && name[:4] == "Lock" || b.Messages == nil && len(name) > 7 && name[:8] == "Messages" {
				return
			}
			check(t, b)
		})
	}
}

func create(t *testing.T, b Backend) string {
	t.Helper()
	id := rand.Text()
	if _, err := b.Store.Create(t.Context(), []byte("data"), client.CreateOptions{ID: id, TTL: time.Hour}); err != nil {
		t.Fatalf("create: %v", err)
	}
	return id
}

func want(t *testing.T, what string, err, kind error) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("%s: %v, want %v", what, err, kind)
	}
}

func checkCreate(t *testing.T, b Backend) {
	ctx := t.Context()
	id := create(t, b)
	_, err := b.Store.Create(ctx, nil, client.CreateOptions{ID: id, TTL: time.Hour})
	want(t, "create with an id in use", err, client.ErrSessionExists)
	s, err := b.Store.Read(ctx, id)
	if err != nil || string(s.Data) != "data" || s.Revision == 0 || s.TTL != time.Hour || s.TTLRemaining < 59*time.Minute {
		t.Errorf("read: %+v %v", s, err)
	}
	_, err = b.Store.Read(ctx, rand.Text())
	want(t, "read what is not there", err, client.ErrSessionNotFound)
	want(t, "ready", b.Store.Ready(ctx), nil)
}

func checkSave(t *testing.T, b Backend) {
	ctx := t.Context()
	id := create(t, b)
	s, err := b.Store.Read(ctx, id)
	want(t, "read", err, nil)
	revision, err := b.Store.Save(ctx, id, []byte("new"), client.SaveOptions{TTL: time.Hour, ExpectedRevision: s.Revision})
	want(t, "save on the revision read", err, nil)
	if revision <= s.Revision {
		t.Errorf("revision %d after %d", revision, s.Revision)
	}
	_, err = b.Store.Save(ctx, id, []byte("old"), client.SaveOptions{TTL: time.Hour, ExpectedRevision: s.Revision})
	want(t, "save on an older revision", err, client.ErrRevisionMismatch)
	if s, err := b.Store.Read(ctx, id); err != nil || string(s.Data) != "new" || s.Revision != revision {
		t.Errorf("after a refused save: %+v %v", s, err)
	}
	_, err = b.Store.Save(ctx, rand.Text(), nil, client.SaveOptions{TTL: time.Hour})
	want(t, "save what is not there", err, client.ErrSessionNotFound)
}

func checkDestroy(t *testing.T, b Backend) {
	ctx := t.Context()
	id := create(t, b)
	s, err := b.Store.Read(ctx, id)
	want(t, "read", err, nil)
	if destroyed, err := b.Store.Destroy(ctx, id); err != nil || !destroyed {
		t.Errorf("destroy: %v %v", destroyed, err)
	}
	if destroyed, err := b.Store.Destroy(ctx, id); err != nil || destroyed {
		t.Errorf("destroy again: %v %v", destroyed, err)
	}
	_, err = b.Store.Save(ctx, id, []byte("back"), client.SaveOptions{TTL: time.Hour, ExpectedRevision: s.Revision})
	want(t, "a save does not bring a session back", err, client.ErrSessionNotFound)
	_, err = b.Store.Read(ctx, id)
	want(t, "read after destroy", err, client.ErrSessionNotFound)
}

func checkTouch(t *testing.T, b Backend) {
	id := create(t, b)
	if left, err := b.Store.Touch(t.Context(), id); err != nil || left < 59*time.Minute {
		t.Errorf("touch: %s %v", left, err)
	}
	_, err := b.Store.Touch(t.Context(), rand.Text())
	want(t, "touch what is not there", err, client.ErrSessionNotFound)
}

func acquire(t *testing.T, b Backend, id string, ttl time.Duration) client.Grant {
	t.Helper()
	g, err := b.Locker.Acquire(t.Context(), id, client.AcquireOptions{TTL: ttl, Timeout: patience})
	if err != nil {
		t.Fatalf("acquire: %v", err)
	}
	return g
}

func checkLock(t *testing.T, b Backend) {
	ctx := t.Context()
	id := create(t, b)
	g := acquire(t, b, id, time.Minute)
	if string(g.Session.Data) != "data" || g.FencingToken == 0 || time.Until(g.Deadline) < 50*time.Second {
		t.Errorf("grant: %+v", g)
	}
	_, err := b.Locker.Acquire(ctx, id, client.AcquireOptions{TTL: time.Minute, Timeout: 20 * time.Millisecond})
	want(t, "acquire what is held", err, client.ErrLockTimeout)
	_, err = b.Store.Save(ctx, id, nil, client.SaveOptions{TTL: time.Hour})
	want(t, "save without the grant", err, client.ErrSessionLocked)
	_, err = b.Store.Save(ctx, id, []byte("held"), client.SaveOptions{TTL: time.Hour, Grant: &g})
	want(t, "save under the grant", err, nil)
	_, err = b.Store.Save(ctx, id, []byte("last"), client.SaveOptions{TTL: time.Hour, Grant: &g, Release: true})
	want(t, "save and release", err, nil)
	_, err = b.Store.Save(ctx, id, []byte("late"), client.SaveOptions{TTL: time.Hour, Grant: &g})
	want(t, "save after the release", err, client.ErrLockLost)
	want(t, "second release", b.Locker.Release(ctx, g), client.ErrLockNotHeld)
	next := acquire(t, b, id, time.Minute)
	if string(next.Session.Data) != "last" || next.FencingToken <= g.FencingToken {
		t.Errorf("next grant: %+v after token %d", next, g.FencingToken)
	}
	want(t, "release of an older grant", b.Locker.Release(ctx, g), client.ErrLockNotHeld)
	want(t, "release", b.Locker.Release(ctx, next), nil)
	_, err = b.Locker.Acquire(ctx, rand.Text(), client.AcquireOptions{TTL: time.Minute, Timeout: patience})
	want(t, "acquire what is not there", err, client.ErrSessionNotFound)
}

func checkLockOrder(t *testing.T, b Backend) {
	id := create(t, b)
	const callers = 8
	held := acquire(t, b, id, time.Minute)
	var mu sync.Mutex
	var order []uint64
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			g, err := b.Locker.Acquire(t.Context(), id, client.AcquireOptions{TTL: time.Minute, Timeout: patience})
			if err != nil {
				t.Errorf("acquire: %v", err)
				return
			}
			mu.Lock()
			order = append(order, g.FencingToken)
			mu.Unlock()
			want(t, "release", b.Locker.Release(t.Context(), g), nil)
		})
	}
	want(t, "release", b.Locker.Release(t.Context(), held), nil)
	wg.Wait()
	if len(order) != callers || !slices.IsSorted(order) {
		t.Errorf("fencing tokens in the order of grants: %d", order)
	}
}

func checkLockExpires(t *testing.T, b Backend) {
	id := create(t, b)
	first := acquire(t, b, id, time.Second)
	second := acquire(t, b, id, time.Minute) // after the first one's TTL
	if time.Now().Before(first.Deadline) {
		t.Error("granted again before the TTL was over")
	}
	_, err := b.Store.Save(t.Context(), id, []byte("late"), client.SaveOptions{TTL: time.Hour, Grant: &first})
	want(t, "late save", err, client.ErrLockLost)
	want(t, "release", b.Locker.Release(t.Context(), second), nil)
}

func checkLockLeaves(t *testing.T, b Backend) {
	id := create(t, b)
	held := acquire(t, b, id, time.Minute)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Locker.Acquire(gone, id, client.AcquireOptions{TTL: time.Minute, Timeout: patience}); err == nil {
		t.Error("acquired for a caller that is gone")
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := b.Locker.Acquire(t.Context(), id, client.AcquireOptions{TTL: time.Minute, Timeout: patience})
		waiting <- err
	}()
	if _, err := b.Store.Destroy(t.Context(), id); err != nil {
		t.Errorf("destroy: %v", err)
	}
	select {
	case err := <-waiting:
		want(t, "a waiter whose session was destroyed", err, client.ErrSessionNotFound)
	case <-time.After(patience / 2):
		t.Error("a waiter whose session was destroyed waits on")
	}
	_, err := b.Store.Save(t.Context(), id, nil, client.SaveOptions{TTL: time.Hour, Grant: &held})
	if !errors.Is(err, client.ErrSessionNotFound) && !errors.Is(err, client.ErrLockLost) {
		t.Errorf("save by the holder after destroy: %v", err)
	}
}

func publish(t *testing.T, b Backend, id, stream, payload string) uint64 {
	t.Helper()
	position, err := b.Messages.Publish(t.Context(), id, stream, []byte(payload), client.PublishOptions{TTL: time.Minute})
	if err != nil {
		t.Fatalf("publish: %v", err)
	}
	return position
}

// take reads n messages after a position.
func take(t *testing.T, b Backend, id string, after uint64, n int, streams ...string) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	messages, err := b.Messages.Subscribe(ctx, id, after, streams...)
	if err != nil {
		t.Fatalf("subscribe: %v", err)
	}
	var got []string
	for m, err := range messages {
		if err != nil {
			t.Fatalf("after %v: %v", got, err)
		}
		if m.Position <= after {
			t.Errorf("position %d after %d", m.Position, after)
		}
		after = m.Position
		if got = append(got, m.Stream+"="+string(m.Payload)); len(got) == n {
			break
		}
	}
	return got
}

func checkMessages(t *testing.T, b Backend) {
	id := create(t, b)
	before, err := b.Store.Read(t.Context(), id)
	want(t, "read", err, nil)
	publish(t, b, id, "a", "1")
	publish(t, b, id, "b", "2")
	second := publish(t, b, id, "a", "3")
	publish(t, b, id, "c", "4")
	for after, expected := range map[uint64][]string{0: {"a=1", "b=2", "a=3"}, before.Position: {"a=1", "b=2", "a=3"}} {
		if got := take(t, b, id, after, 3, "a", "b"); !slices.Equal(got, expected) {
			t.Errorf("after %d: %v, want %v", after, got, expected)
		}
	}
	if got := take(t, b, id, second, 1, "c", "a"); !slices.Equal(got, []string{"c=4"}) {
		t.Errorf("after %d: %v", second, got)
	}
	want(t, "trim", b.Messages.Trim(t.Context(), id, "a", second, 0), nil)
	if got := take(t, b, id, 0, 2, "a", "b", "c"); !slices.Equal(got, []string{"b=2", "c=4"}) {
		t.Errorf("after the trim: %v", got)
	}
	for range 3 {
		publish(t, b, id, "kept", "x")
	}
	newest := publish(t, b, id, "kept", "y")
	want(t, "retain", b.Messages.Retain(t.Context(), id, "kept", 2*time.Minute), nil)
	want(t, "trim of all but two", b.Messages.Trim(t.Context(), id, "kept", newest, 2), nil)
	if got := take(t, b, id, 0, 2, "kept"); !slices.Equal(got, []string{"kept=x", "kept=y"}) {
		t.Errorf("after the trim of all but two: %v", got)
	}
	want(t, "retain of what is not there", b.Messages.Retain(t.Context(), rand.Text(), "a", time.Minute), client.ErrSessionNotFound)
	large := bytes.Repeat([]byte("x"), 4<<20)
	if _, err := b.Messages.Publish(t.Context(), id, "d", large, client.PublishOptions{TTL: time.Minute}); err != nil {
		t.Errorf("publish 4 MiB: %v", err)
	}
	if got := take(t, b, id, 0, 1, "d"); len(got[0]) != len(large)+2 {
		t.Errorf("%d of %d bytes", len(got[0])-2, len(large))
	}
	_, err = b.Messages.Publish(t.Context(), rand.Text(), "a", nil, client.PublishOptions{TTL: time.Minute})
	want(t, "publish to what is not there", err, client.ErrSessionNotFound)
}

// checkMessagesTogether: each subscriber gets each message once, in one order, while they are published.
func checkMessagesTogether(t *testing.T, b Backend) {
	id := create(t, b)
	const n = 30
	var publishers, subscribers sync.WaitGroup
	got := make([][]string, 3)
	for i := range got {
		subscribers.Go(func() { got[i] = take(t, b, id, 0, 2*n, "s") })
	}
	for p := range 2 {
		publishers.Go(func() {
			for i := range n {
				publish(t, b, id, "s", fmt.Sprintf("%d/%02d", p, i))
			}
		})
	}
	publishers.Wait()
	subscribers.Wait()
	for i := range got {
		if !slices.Equal(got[i], got[0]) {
			t.Errorf("subscribers differ: %v and %v", got[i], got[0])
		}
		sorted := slices.Sorted(slices.Values(got[i]))
		if len(slices.Compact(sorted)) != 2*n {
			t.Errorf("%d different messages of %d", len(slices.Compact(sorted)), 2*n)
		}
	}
}

func checkMessagesEnd(t *testing.T, b Backend) {
	id := create(t, b)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	messages, err := b.Messages.Subscribe(ctx, id, 0, "s")
	want(t, "subscribe", err, nil)
	ended := make(chan error, 1)
	go func() {
		for _, err := range messages {
			if err != nil {
				ended <- err
				return
			}
		}
		ended <- nil
	}()
	if _, err := b.Store.Destroy(t.Context(), id); err != nil {
		t.Errorf("destroy: %v", err)
	}
	want(t, "a subscription whose session was destroyed", <-ended, client.ErrSessionNotFound)
	_, err = b.Messages.Subscribe(ctx, id, 0, "s")
	want(t, "subscribe to what is not there", err, client.ErrSessionNotFound)
}
