package memstore

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The contract is tested in package sessiond, against this store and etcd alike.

// empty checks that a store holds nothing: no session, no deadline, nobody who waits.
func (s *Store) empty(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sessions)+len(s.ends)+len(s.places)+len(s.feeds)+len(s.entries) > 0 {
		t.Errorf("left: %d sessions, %d deadlines, %d places, %d feeds, entries of %d front-ends",
			len(s.sessions), len(s.ends), len(s.places), len(s.feeds), len(s.entries))
	}
}

// S12: everything ends by itself and leaves nothing, though nobody comes; idle sessions cost no goroutine.
func TestEndsByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := Open()
		defer s.Close(t.Context())
		locks := lock.NewService(s, 10, nil)
		before := runtime.NumGoroutine()
		const n = 1000
		for i := range n {
			id := fmt.Sprint(i)
			if _, _, err := s.CreateSession(t.Context(), id, nil, time.Duration(i%60+1)*time.Minute); err != nil {
				t.Fatal(err)
			}
			if i%2 == 0 {
				if _, err := locks.Acquire(t.Context(), lock.Request{Session: id, TTL: time.Hour, Timeout: time.Second}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := s.Publish(t.Context(), message.Publish{Session: id, Stream: "s", Request: "r", TTL: 24 * time.Hour}); err != nil {
				t.Fatal(err)
			}
		}
		if more := runtime.NumGoroutine() - before; more > 0 {
			t.Errorf("%d goroutines for idle sessions", more)
		}
		for minute := range 60 {
			s.mu.Lock()
			got, want := len(s.sessions), n-(minute*n+59)/60
			s.mu.Unlock()
			if got < want-20 || got > want+20 {
				t.Errorf("%d sessions after %d minutes, want about %d", got, minute, want)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		s.empty(t)
	})
}

// O5: 80,000 cycles, refused tries, waits that expire and sessions destroyed under those who wait leave nothing behind.
func TestNothingLeaks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := Open()
		defer s.Close(context.WithoutCancel(t.Context()))
		sessions := session.NewService(s, session.DefaultMaxBytes)
		locks := lock.NewService(s, lock.DefaultMaxWaiters, nil)
		messages := message.NewService(s, nil)
		before := runtime.NumGoroutine()
		const callers, rounds, perRound = 100, 160, 5
		ids := make([]string, callers/10)
		var wg sync.WaitGroup
		for i := range ids {
			if _, err := sessions.Create(t.Context(), fmt.Sprint("s", i), nil, time.Hour); err != nil {
				t.Fatal(err)
			}
			ids[i] = fmt.Sprint("s", i)
		}
		for c := range callers {
			wg.Go(func() {
				id := ids[c%len(ids)]
				for r := range rounds {
					g, err := locks.Acquire(t.Context(), lock.Request{Session: id, FrontEnd: fmt.Sprint("f", c%7), TTL: time.Minute, Timeout: time.Hour, Read: true})
					if err != nil {
						t.Error(err)
						return
					}
					// Held: a try is refused, a wait runs out.
					if _, holder, err := locks.TryAcquire(t.Context(), lock.Request{Session: id, TTL: time.Minute}); err != nil || holder == "" {
						t.Errorf("try: %q, %v", holder, err)
					}
					if _, err := locks.Acquire(t.Context(), lock.Request{Session: id, TTL: time.Minute, Timeout: time.Millisecond}); !errors.Is(err, lock.ErrTimeout) {
						t.Errorf("wait: %v", err)
					}
					if err := locks.Release(t.Context(), id, g.Request, g.Token); err != nil {
						t.Error(err)
					}
					// A session of its own, destroyed while somebody waits for it and somebody listens.
					own := fmt.Sprint("own", c, "-", r)
					if _, err := sessions.Create(t.Context(), own, nil, time.Hour); err != nil {
						t.Error(err)
					}
					if r%10 == 0 {
						destroyUnderWaiters(t, sessions, locks, messages, own)
					} else if ok, err := sessions.Destroy(t.Context(), own); err != nil || !ok {
						t.Errorf("destroy: %v, %v", ok, err)
					}
				}
			})
		}
		wg.Wait()
		t.Logf("%d operations", callers*rounds*perRound)
		synctest.Wait()
		if more := runtime.NumGoroutine() - before; more > 0 {
			t.Errorf("%d goroutines left", more)
		}
		for _, id := range ids {
			if _, err := sessions.Destroy(t.Context(), id); err != nil {
				t.Error(err)
			}
		}
		s.empty(t)
	})
}

func destroyUnderWaiters(t *testing.T, sessions *session.Service, locks *lock.Service, messages *message.Service, id string) {
	t.Helper()
	if _, err := locks.Acquire(t.Context(), lock.Request{Session: id, TTL: time.Minute, Timeout: time.Second}); err != nil {
		t.Error(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := locks.Acquire(t.Context(), lock.Request{Session: id, TTL: time.Minute, Timeout: time.Hour})
		if !errors.Is(err, session.ErrNotFound) {
			t.Errorf("waiter: %v", err)
		}
	})
	listening := make(chan struct{})
	wg.Go(func() {
		var once sync.Once
		err := messages.Subscribe(t.Context(), id, []string{"s"}, 0, func(message.Batch) error {
			once.Do(func() { close(listening) })
			return nil
		})
		if !errors.Is(err, session.ErrNotFound) {
			t.Errorf("subscriber: %v", err)
		}
	})
	<-listening
	time.Sleep(time.Millisecond) // of virtual time: the waiter has taken its place
	if ok, err := sessions.Destroy(t.Context(), id); err != nil || !ok {
		t.Errorf("destroy: %v, %v", ok, err)
	}
	wg.Wait()
}

// L8: an older call of a request that was taken over by a retry ends neither its place nor its grant.
func TestTakenOver(t *testing.T) {
	s := Open()
	defer s.Close(t.Context())
	if _, _, err := s.CreateSession(t.Context(), "s", nil, time.Hour); err != nil {
		t.Fatal(err)
	}
	r := lock.Request{Session: "s", ID: "r", Holder: "h", TTL: time.Minute}
	older, retry := s.Place(r), s.Place(r)
	defer older.Close()
	defer retry.Close()
	for _, p := range []lock.Place{older, retry} {
		if v, err := p.Join(t.Context(), false); err != nil || !v.Held() {
			t.Fatalf("join: %+v, %v", v, err)
		}
	}
	older.Leave(t.Context())
	if v, err := s.Look(t.Context(), r); err != nil || !v.Held() {
		t.Errorf("after the older call left: %+v, %v", v, err)
	}
	retry.Leave(t.Context())
	if v, err := s.Look(t.Context(), r); err != nil || v.First != nil {
		t.Errorf("after the retry left: %+v, %v", v, err)
	}
}
