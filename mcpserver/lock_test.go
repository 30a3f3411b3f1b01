package mcpserver_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sessiond/sessiond/mcpserver"
)

// F4: what must work while a long handler holds the lock takes no lock: ping, cancellations, answers, DELETE, streams.
func TestF4LockFreeRequests(t *testing.T) {
	r := newReplicas(t, 3, func(o *mcpserver.Options) { withLock(o); o.LockTimeout = time.Minute })
	id := r.open()
	holding := r.request(http.MethodPost, id, waitBody("1", "p"))
	holding.event()
	locks := r.store.lockCount()
	if a := r.post(id, `{"jsonrpc":"2.0","id":2,"method":"ping"}`); a.status != 200 || !strings.Contains(a.body, `"result":{}`) {
		t.Errorf("ping: %d %s", a.status, a.body)
	}
	if a := r.post(id, `{"jsonrpc":"2.0","id":"x","result":{}}`); a.status != 202 {
		t.Errorf("answer: %d %s", a.status, a.body)
	}
	if s := r.request(http.MethodGet, id, ""); s.resp.StatusCode != 200 {
		t.Errorf("GET: %d", s.resp.StatusCode)
	}
	if a := r.post(id, cancelBody("99")); a.status != 202 {
		t.Errorf("cancellation: %d %s", a.status, a.body)
	}
	if a := r.request(http.MethodDelete, id, "").all(); a.status != 204 {
		t.Errorf("DELETE: %d %s", a.status, a.body)
	}
	if m := holding.event(); m["error"] == nil {
		t.Errorf("the holder got %v", m)
	}
	if n := r.store.lockCount(); n != locks {
		t.Errorf("%d locks taken", n-locks)
	}
	r.post("", initializeWith("2025-11-25", `{}`))
	if n := r.store.lockCount(); n != locks {
		t.Error("initialize took a lock")
	}
}

// F3: without the option nothing takes a lock.
func TestF3NoLockUnlessAskedFor(t *testing.T) {
	r := newReplicas(t, 1, nil)
	id := r.open()
	r.post(id, call("1", "add", `{"by":1}`))
	if n := r.store.lockCount(); n != 0 {
		t.Errorf("%d locks taken", n)
	}
}

// F5: a request that cannot get the lock in time is answered 503 under its own id, logged as a warning; the session is
// neither read nor written.
func TestF5LockTimeout(t *testing.T) {
	r := newReplicas(t, 2, func(o *mcpserver.Options) { withLock(o); o.LockTimeout = 20 * time.Millisecond })
	id := r.open()
	holding := r.requestTo(0, http.MethodPost, id, waitBody("1", "p"))
	holding.event()
	saves := r.store.saveCount()
	a := r.requestTo(1, http.MethodPost, id, call(`"late"`, "add", `{"by":1}`)).all()
	if a.status != 503 || !strings.Contains(a.body, `"id":"late"`) || !strings.Contains(a.body, "-32000") ||
		!strings.Contains(a.body, "another request of this session is still being processed") || a.header.Get("Retry-After") == "" {
		t.Errorf("%d %s", a.status, a.body)
	}
	if n := r.store.saveCount(); n != saves {
		t.Error("the session was written")
	}
	if !strings.Contains(r.logs.String(), "level=WARN") || strings.Contains(r.logs.String(), id) {
		t.Errorf("log: %s", r.logs)
	}
	r.post(id, cancelBody("1"))
	holding.all()
}

// F14: the handler's context ends before the lock's TTL does, and the lock is free then.
func TestF14ContextEndsBeforeTheLock(t *testing.T) {
	r := newReplicas(t, 2, func(o *mcpserver.Options) { withLock(o); o.LockTTL = time.Second })
	id := r.open()
	began := time.Now()
	a := r.post(id, call("1", "wait", `{}`))
	if !strings.HasPrefix(text(a.messages[0]), "EXPIRES") {
		t.Errorf("%d %s", a.status, a.body)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("the handler was stopped after %s", took)
	}
	if a := r.post(id, call("2", "add", `{"by":1}`)); text(a.messages[0]) != "1" {
		t.Errorf("next: %d %s", a.status, a.body)
	}
}

// F14: a save that is refused because the lock was lost turns the result into an error that says so, and changes nothing.
func TestF14LockLost(t *testing.T) {
	r := newReplicas(t, 2, withLock)
	id := r.open()
	s := r.request(http.MethodPost, id, call("1", "set_then_wait", `{}`))
	s.event()
	r.store.expireLock(id)
	goOn <- struct{}{}
	a := r.post(id, call("2", "keys", `{}`))
	if text(a.messages[0]) != "[]" && text(a.messages[0]) != "null" {
		t.Errorf("keys: %s", a.body)
	}
	m := s.event()
	if e, _ := m["error"].(map[string]any); e["code"] != -32000.0 || !strings.Contains(fmt.Sprint(e["message"]), "lock was lost") {
		t.Errorf("got %v", m)
	}
}

// goOn lets set_then_wait go on.
var goOn = make(chan struct{}, 1)

// F3, S7: a replica without the lock cannot overwrite what one with it is working on.
func TestS7UnlockedReplicaIsRefused(t *testing.T) {
	n := 0
	r := newReplicas(t, 2, func(o *mcpserver.Options) {
		if n == 0 {
			withLock(o)
		}
		n++
	})
	id := r.open()
	holding := r.requestTo(0, http.MethodPost, id, waitBody("1", "p"))
	holding.event()
	if a := r.requestTo(1, http.MethodPost, id, call("2", "add", `{"by":1}`)).all(); a.status != 503 || !strings.Contains(a.body, "locked") {
		t.Errorf("%d %s", a.status, a.body)
	}
	r.requestTo(1, http.MethodPost, id, cancelBody("1")).all()
	holding.all()
}

// S10: a session that did not change is not written.
func TestS10UnchangedIsNotWritten(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		saves := r.store.saveCount()
		for range 5 {
			r.post(id, call("1", "echo", `{}`))
		}
		if n := r.store.saveCount(); n != saves {
			t.Errorf("%d saves", n-saves)
		}
	})
}

// L11: a release that fails is tried again: the lock is not left to its TTL for a backend that was away for a moment.
func TestL11FailedReleaseIsTriedAgain(t *testing.T) {
	r := newReplicas(t, 2, func(o *mcpserver.Options) { withLock(o); o.LockTimeout = 10 * time.Second })
	id := r.open()
	s := r.requestTo(0, http.MethodPost, id, call("1", "set_then_wait", `{}`))
	s.event()
	r.store.setDown(true)
	goOn <- struct{}{}
	if m := s.event(); m["error"] == nil {
		t.Errorf("a result that was not saved: %v", m)
	}
	r.store.setDown(false)
	if a := r.post(id, call("2", "add", `{"by":1}`)); text(a.messages[0]) != "1" {
		t.Errorf("%d %s", a.status, a.body)
	}
}
