package mcpserver_test

import (
	"net/http"
	"strings"
	"testing"
)

// F11: what is due on the standalone stream is kept while none is open, and delivered once when one opens, anywhere.
func TestF11KeptUntilAStreamOpens(t *testing.T) {
	r := newReplicas(t, 3, nil)
	id := r.open()
	r.post(id, `{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":"debug"}}`)
	if a := r.requestTo(0, http.MethodPost, id, call("2", "log_later", `{}`)).all(); a.status != 200 || len(a.messages) != 1 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	first := r.requestTo(1, http.MethodGet, id, "")
	if m := first.event(); m["method"] != "notifications/message" {
		t.Fatalf("got %v", m)
	}
	r.requestTo(2, http.MethodPost, id, call("3", "log_later", `{}`)).all()
	if m := first.event(); m["method"] != "notifications/message" {
		t.Fatalf("got %v", m)
	}
	r.store.untilTrimmed(t, id)
	// A newer stream takes over; it gets nothing a second time.
	second := r.requestTo(0, http.MethodGet, id, "")
	if m := first.event(); m != nil {
		t.Fatalf("the older stream got %v", m)
	}
	r.requestTo(2, http.MethodPost, id, call("4", "log_later", `{}`)).all()
	if m := second.event(); m["method"] != "notifications/message" {
		t.Fatalf("got %v", m)
	}
	r.store.untilTrimmed(t, id)
}

// F12: the log level set through one replica holds on the others, for log messages on the request's own stream.
func TestF12LogLevel(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		if a := r.requestTo(0, http.MethodPost, id, call("1", "log", `{}`)).all(); len(a.messages) != 1 {
			t.Fatalf("before any level: %s", a.body)
		}
		for _, step := range []struct {
			level string
			count int
		}{{"debug", 2}, {"error", 1}, {"info", 2}} {
			if a := r.requestTo(1, http.MethodPost, id, `{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":"`+step.level+`"}}`).all(); a.status != 200 {
				t.Fatalf("setLevel: %d %s", a.status, a.body)
			}
			a := r.requestTo(2, http.MethodPost, id, call("1", "log", `{}`)).all()
			if len(a.messages) != step.count {
				t.Fatalf("level %s: %s", step.level, a.body)
			}
		}
	})
}

// F13: DELETE ends the standalone stream, on whatever replica it is.
func TestF13DeleteEndsTheStandaloneStream(t *testing.T) {
	r := newReplicas(t, 2, nil)
	id := r.open()
	s := r.requestTo(0, http.MethodGet, id, "")
	r.requestTo(1, http.MethodDelete, id, "").all()
	if m := s.event(); m != nil {
		t.Fatalf("got %v", m)
	}
}

// F20: at a shutdown, standalone streams end.
func TestF20ShutdownEndsStreams(t *testing.T) {
	r := newReplicas(t, 1, nil)
	id := r.open()
	s := r.request(http.MethodGet, id, "")
	if err := r.handlers[0].Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if m := s.event(); m != nil {
		t.Fatalf("got %v", m)
	}
	if a := r.post(id, call(`"x"`, "echo", `{}`)); a.status != 503 || a.header.Get("Retry-After") == "" || !strings.Contains(a.body, `"id":"x"`) {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if err := r.handlers[0].Ready(t.Context()); err == nil {
		t.Fatal("ready after the shutdown")
	}
}

// F20: a request that runs finishes during the shutdown; one that outlives the grace period is cut short with an error.
func TestF20ShutdownLetsRequestsFinish(t *testing.T) {
	r := newReplicas(t, 2, nil)
	id := r.open()
	asking := r.requestTo(0, http.MethodPost, id, call("1", "ask", `{}`))
	question := asking.event()
	done := make(chan error)
	go func() { done <- r.handlers[0].Shutdown(t.Context()) }()
	r.requestTo(1, http.MethodPost, id, accept(question["id"], "x")).all()
	if got := text(asking.event()); got != `["x"]` {
		t.Fatalf("got %s", got)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
