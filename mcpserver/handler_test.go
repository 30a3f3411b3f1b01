package mcpserver_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/sessiond/sessiond/mcpserver"
)

// modes are the ways to serve a session that must not differ in what clients get.
var modes = map[string]func(*mcpserver.Options){
	"plain":     func(*mcpserver.Options) {},
	"json":      withJSON,
	"lock":      withLock,
	"lock+json": func(o *mcpserver.Options) { withLock(o); withJSON(o) },
}

func eachMode(t *testing.T, test func(t *testing.T, r *replicas)) {
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) { test(t, newReplicas(t, 3, mode)) })
	}
}

// F1, F2: any replica serves any request; the answer is written by the POST that carried the request.
func TestF1AnyReplicaServesAnyRequest(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		for i := range 9 {
			a := r.post(id, call(fmt.Sprint(i), "add", `{"by":1}`))
			if a.status != 200 || len(a.messages) != 1 || text(a.messages[0]) != fmt.Sprint(i+1) {
				t.Fatalf("call %d: %d %s", i, a.status, a.body)
			}
		}
	})
}

// F9: the answer to a question reaches the handler, whatever replica gets it; a handler that asks twice waits twice (F8).
func TestF9AnswerThroughAnotherReplica(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		s := r.requestTo(0, http.MethodPost, id, call("7", "ask", `{"by":3}`))
		for i := range 3 {
			question := s.event()
			if question["method"] != "elicitation/create" {
				t.Fatalf("question %d: %v", i, question)
			}
			a := r.requestTo(1, http.MethodPost, id, fmt.Sprintf(`{"jsonrpc":"2.0","id":%q,"result":{"action":"accept","content":{"answer":"a%d"}}}`, question["id"], i)).all()
			if a.status != 202 || a.body != "" {
				t.Fatalf("answer: %d %q", a.status, a.body)
			}
		}
		if got := text(s.event()); got != `["a0","a1","a2"]` {
			t.Fatalf("result %s", got)
		}
	})
}

// F3: changes of different keys at the same time are all kept, without the lock.
func TestF3DifferentKeysAllKept(t *testing.T) {
	r := newReplicas(t, 3, nil)
	id := r.open()
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			if a := r.requestTo(i%3, http.MethodPost, id, call("1", "set", fmt.Sprintf(`{"k%02d":1}`, i))).all(); a.status != 200 {
				t.Errorf("%d %s", a.status, a.body)
			}
		})
	}
	wg.Wait()
	a := r.post(id, call("1", "keys", `{}`))
	if n := strings.Count(text(a.messages[0]), `"k`); n != 50 {
		t.Fatalf("%d of 50 keys: %s", n, a.body)
	}
}

// F4: with the lock, handlers run one after the other.
func TestF4LockedAddsAreAllCounted(t *testing.T) {
	r := newReplicas(t, 3, withLock)
	id := r.open()
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() { r.requestTo(i%3, http.MethodPost, id, call("1", "add", `{"by":1}`)).all() })
	}
	wg.Wait()
	if a := r.post(id, call("1", "add", `{"by":0}`)); text(a.messages[0]) != "50" {
		t.Fatalf("total %s", a.body)
	}
}

// F13: DELETE through any replica ends the session: running handlers, and everything that comes later.
func TestF13DeleteEndsRunningRequests(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		s := r.requestTo(0, http.MethodPost, id, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"wait","arguments":{},"_meta":{"progressToken":"p"}}}`)
		if m := s.event(); m["method"] != "notifications/progress" {
			t.Fatalf("got %v", m)
		}
		if a := r.requestTo(1, http.MethodDelete, id, "").all(); a.status != 204 {
			t.Fatalf("DELETE: %d %s", a.status, a.body)
		}
		if m := s.event(); m["error"] == nil {
			t.Fatalf("the running call got %v, want an error", m)
		}
		for _, method := range []string{http.MethodPost, http.MethodGet, http.MethodDelete} {
			if a := r.requestTo(2, method, id, call("1", "echo", `{}`)).all(); a.status != 404 {
				t.Fatalf("%s after DELETE: %d %s", method, a.status, a.body)
			}
		}
	})
}

// F14: a panic is an error of its request alone.
func TestF14Panic(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		if a := r.post(id, call("1", "panic", `{}`)); a.status != 200 || a.messages[0]["error"] == nil {
			t.Fatalf("%d %s", a.status, a.body)
		}
		if a := r.post(id, call("1", "echo", `{}`)); a.status != 200 || a.messages[0]["result"] == nil {
			t.Fatalf("%d %s", a.status, a.body)
		}
	})
}
