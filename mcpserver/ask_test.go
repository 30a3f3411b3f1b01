package mcpserver_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sessiond/sessiond/mcpserver"
)

func accept(id any, answer string) string {
	return fmt.Sprintf(`{"jsonrpc":"2.0","id":%q,"result":{"action":"accept","content":{"answer":%q}}}`, id, answer)
}

// F8: while a handler waits for the client, its changes are saved and the lock is free for other requests.
func TestF8LockIsReleasedDuringTheWait(t *testing.T) {
	r := newReplicas(t, 3, withLock)
	id := r.open()
	s := r.requestTo(0, http.MethodPost, id, call("1", "ask", `{}`))
	question := s.event()
	if a := r.requestTo(1, http.MethodPost, id, call("2", "add", `{"by":2}`)).all(); text(a.messages[0]) != "2" {
		t.Fatalf("another request during the wait: %s", a.body)
	}
	r.requestTo(2, http.MethodPost, id, accept(question["id"], "x")).all()
	if got := text(s.event()); got != `["x"]` {
		t.Fatalf("result %s", got)
	}
}

// F8: if the lock cannot be had again, the call in the handler returns an error that says so.
func TestF8LockNotRegained(t *testing.T) {
	r := newReplicas(t, 3, func(o *mcpserver.Options) { withLock(o); o.LockTimeout = 50 * time.Millisecond })
	id := r.open()
	asking := r.requestTo(0, http.MethodPost, id, call("1", "ask", `{}`))
	question := asking.event()
	holding := r.requestTo(1, http.MethodPost, id, waitBody("2", "p"))
	holding.event() // its progress: it holds the lock
	r.requestTo(2, http.MethodPost, id, accept(question["id"], "x")).all()
	if got := text(asking.event()); !strings.HasPrefix(got, "NOT_REGAINED") {
		t.Fatalf("result %s", got)
	}
	r.requestTo(2, http.MethodPost, id, cancelBody("2")).all()
	holding.all()
}

func waitBody(id, token string) string {
	return `{"jsonrpc":"2.0","id":` + id + `,"method":"tools/call","params":{"name":"wait","arguments":{},"_meta":{"progressToken":"` + token + `"}}}`
}

func cancelBody(id string) string {
	return `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":` + id + `}}`
}

// F9: a client that cannot be asked is not: the call in the handler fails at once, with a typed error.
func TestF9CannotBeAsked(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		bare := r.openWith("2025-11-25", `{}`)
		if a := r.post(bare, call("1", "roots", `{}`)); !strings.HasPrefix(text(a.messages[0]), "NO_CAPABILITY") || len(a.messages) != 1 {
			t.Errorf("without the capability: %s", a.body)
		}
		if a := r.post(bare, call("1", "ask", `{}`)); !strings.Contains(a.body, "does not support elicitation") || len(a.messages) != 1 {
			t.Errorf("without the capability: %s", a.body)
		}
		able := r.open()
		if a := r.post(able, call("1", "ask", `{}`), "Accept", "", "Accept", "application/json"); !strings.HasPrefix(text(a.messages[0]), "NO_STREAM") {
			t.Errorf("a client that accepts no stream: %s", a.body)
		}
	})
}

// F9: a question that is not answered in time fails in the handler; a late answer is accepted and dropped.
func TestF9AskTimeout(t *testing.T) {
	r := newReplicas(t, 2, func(o *mcpserver.Options) { o.AskTimeout = 30 * time.Millisecond })
	id := r.open()
	s := r.request(http.MethodPost, id, call("1", "ask", `{}`))
	question := s.event()
	if got := text(s.event()); !strings.HasPrefix(got, "ASK_TIMEOUT") {
		t.Fatalf("result %s", got)
	}
	if a := r.post(id, accept(question["id"], "late")); a.status != 202 {
		t.Fatalf("late answer: %d %s", a.status, a.body)
	}
}

// F9 (C50): the first answer wins; repeated, made-up and foreign ones are accepted and dropped.
func TestF9OtherAnswersAreDropped(t *testing.T) {
	r := newReplicas(t, 3, nil)
	id, other := r.open(), r.open()
	s := r.requestTo(0, http.MethodPost, id, call("1", "ask", `{"by":2}`))
	first := s.event()["id"]
	for _, send := range []struct{ session, body string }{
		{other, accept(first, "foreign")},
		{id, accept("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "made up")},
		{id, `{"jsonrpc":"2.0","id":12,"result":{}}`},
		{id, accept(first, "right")},
		{id, accept(first, "again")},
	} {
		if a := r.post(send.session, send.body); a.status != 202 || a.body != "" {
			t.Fatalf("%s: %d %q", send.body, a.status, a.body)
		}
	}
	second := s.event()["id"]
	r.post(id, accept(first, "again"))
	r.post(id, accept(second, "second"))
	if got := text(s.event()); got != `["right","second"]` {
		t.Fatalf("result %s", got)
	}
}

// F9: the client's error reaches the handler.
func TestF9ClientError(t *testing.T) {
	r := newReplicas(t, 2, nil)
	id := r.open()
	s := r.request(http.MethodPost, id, call("1", "ask", `{}`))
	r.post(id, fmt.Sprintf(`{"jsonrpc":"2.0","id":%q,"error":{"code":-1,"message":"User rejected"}}`, s.event()["id"]))
	if got := s.event(); !strings.Contains(text(got), "User rejected") {
		t.Fatalf("result %v", got)
	}
}

// F10: a cancellation through any replica cancels the handler where it runs, also under the lock; no result is sent.
func TestF10Cancel(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		s := r.requestTo(0, http.MethodPost, id, waitBody(`"one"`, "p"))
		s.event()
		if a := r.requestTo(1, http.MethodPost, id, cancelBody(`"one"`)).all(); a.status != 202 {
			t.Fatalf("cancel: %d %s", a.status, a.body)
		}
		if m := s.event(); m != nil {
			t.Fatalf("after the cancellation: %v", m)
		}
		if a := r.post(id, call("1", "echo", `{}`)); a.status != 200 {
			t.Fatalf("next request: %d %s", a.status, a.body)
		}
	})
}

// F10 (C55): a cancellation that matches nothing is accepted and ignored.
func TestF10CancelOfNothing(t *testing.T) {
	r := newReplicas(t, 2, nil)
	id := r.open()
	for _, requestID := range []string{`99`, `"x"`, `null`, `{}`, `[1]`, `1.5`} {
		if a := r.post(id, cancelBody(requestID)); a.status != 202 || a.body != "" {
			t.Errorf("cancel %s: %d %s", requestID, a.status, a.body)
		}
	}
	if a := r.post(id, `{"jsonrpc":"2.0","method":"notifications/cancelled"}`); a.status != 202 {
		t.Errorf("cancel without params: %d %s", a.status, a.body)
	}
}

// F10: ids go back byte for byte, and two requests in flight with one id each get their own answer.
func TestF10IDs(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		for _, callID := range []string{`1`, `"1"`, `0`, `-5`, `1.5`, `9007199254740993`, `1e3`, `"é\u00e9"`, `""`} {
			if a := r.post(id, call(callID, "echo", `{}`)); a.status != 200 || !strings.Contains(a.body, `"id":`+callID+`,`) {
				t.Errorf("id %s: %d %s", callID, a.status, a.body)
			}
		}
	})
}

func TestF10EqualIDsInFlight(t *testing.T) {
	r := newReplicas(t, 2, nil)
	id := r.open()
	first := r.requestTo(0, http.MethodPost, id, call("1", "ask", `{}`))
	second := r.requestTo(0, http.MethodPost, id, call("1", "ask", `{}`))
	q1, q2 := first.event()["id"], second.event()["id"]
	r.requestTo(1, http.MethodPost, id, accept(q2, "two")).all()
	r.requestTo(1, http.MethodPost, id, accept(q1, "one")).all()
	if a, b := text(first.event()), text(second.event()); a != `["one"]` || b != `["two"]` {
		t.Fatalf("answers %s and %s", a, b)
	}
}

// F10 (C34): a cancellation that names several requests in flight cancels none of them, on whatever replicas they run; once one
// is left, it does.
func TestF10AmbiguousCancel(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		for _, other := range []int{0, 1} {
			before := strings.Count(r.logs.String(), "cancellation ignored")
			first := r.requestTo(0, http.MethodPost, id, call("1", "ask", `{}`))
			q1 := first.event()["id"]
			second := r.requestTo(other, http.MethodPost, id, call("1", "ask", `{}`))
			q2 := second.event()["id"]
			r.requestTo(2, http.MethodPost, id, cancelBody("1")).all()
			r.eventually(func() bool { return strings.Count(r.logs.String(), "cancellation ignored") == before+2 })
			r.post(id, accept(q2, "two"))
			if got := text(second.event()); got != `["two"]` {
				t.Fatalf("second on replica %d: %s", other, got)
			}
			r.requestTo(2, http.MethodPost, id, cancelBody("1")).all()
			for m := first.event(); m != nil; m = first.event() {
				if m["method"] != "notifications/cancelled" { // the question may be withdrawn, too
					t.Fatalf("the one that is left goes on: %v", m)
				}
			}
			r.post(id, accept(q1, "late"))
		}
	})
}

// F9, N1: what asks without a session learns that one is needed.
func TestN1AskNeedsASession(t *testing.T) {
	r := newReplicas(t, 1, func(o *mcpserver.Options) { o.Store = nil })
	if a := r.post("", call("1", "roots", `{}`)); !strings.HasPrefix(text(a.messages[0]), "NO_SESSION") {
		t.Fatalf("%d %s", a.status, a.body)
	}
}

// F9 (C52): what a notification sets off asks on the standalone stream, wherever that is; without one it fails at once.
func TestF9AskFromANotification(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		knows := func(want string) func() bool {
			return func() bool {
				return strings.Contains(text(r.post(id, call("1", "known_roots", `{}`)).messages[0]), want)
			}
		}
		if a := r.post(id, `{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}`); a.status != 202 {
			t.Fatalf("%d %s", a.status, a.body)
		}
		r.eventually(knows("NO_STREAM"))

		s := r.requestTo(1, http.MethodGet, id, "")
		r.requestTo(0, http.MethodPost, id, `{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}`).all()
		question := s.event()
		if question["method"] != "roots/list" {
			t.Fatalf("got %v", question)
		}
		r.requestTo(2, http.MethodPost, id, fmt.Sprintf(`{"jsonrpc":"2.0","id":%q,"result":{"roots":[{"uri":"file:///here"}]}}`, question["id"])).all()
		r.eventually(knows("file:///here"))
		s.cut()
	})
}
