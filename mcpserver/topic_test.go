package mcpserver_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

func (r *replicas) updated(replica int, uri string) {
	r.t.Helper()
	if err := r.mcp[replica].ResourceUpdated(context.Background(), &mcp.ResourceUpdatedNotificationParams{URI: uri}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *replicas) subscribe(replica int, id, method, uri string) {
	r.t.Helper()
	a := r.requestTo(replica, http.MethodPost, id, `{"jsonrpc":"2.0","id":1,"method":"resources/`+method+`","params":{"uri":"`+uri+`"}}`).all()
	if a.status != 200 || !strings.Contains(a.body, `"result":{}`) {
		r.t.Fatalf("%s: %d %s", method, a.status, a.body)
	}
}

// mark makes a stream show where it is: an event that comes after all that were due before it.
func (r *replicas) mark(id string) {
	r.t.Helper()
	r.post(id, `{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":"debug"}}`)
	r.post(id, call("1", "log_later", `{}`))
}

// F12 (C69, C78): what the client subscribed to on one replica, and what changes on another, reaches its stream on a third,
// once.
func TestF12ChangesReachEachSessionOnce(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id, other := r.open(), r.open()
		r.subscribe(0, id, "subscribe", "test://a")
		s := r.requestTo(1, http.MethodGet, id, "")
		idle := r.requestTo(0, http.MethodGet, other, "")
		r.eventually(func() bool { return r.subscribers(2, "test://a") == 1 })

		r.updated(2, "test://b")
		r.updated(2, "test://a")
		m := s.event()
		if m["method"] != "notifications/resources/updated" || !strings.Contains(fmt.Sprint(m["params"]), "test://a") {
			t.Fatalf("got %v", m)
		}
		r.mcp[2].AddResource(&mcp.Resource{URI: "test://new", Name: "new"}, nil)
		for _, stream := range []*stream{s, idle} {
			if m := stream.event(); m["method"] != "notifications/resources/list_changed" {
				t.Fatalf("got %v", m)
			}
		}

		// A second subscription while the stream is open, and the end of the first.
		r.subscribe(2, id, "subscribe", "test://c")
		r.subscribe(2, id, "unsubscribe", "test://a")
		r.mark(id) // the stream has heard of that
		if m := s.event(); m["method"] != "notifications/message" {
			t.Fatalf("got %v", m)
		}
		r.eventually(func() bool { return r.subscribers(0, "test://c") == 1 })
		r.updated(0, "test://a")
		r.updated(0, "test://c")
		if m := s.event(); !strings.Contains(fmt.Sprint(m["params"]), "test://c") {
			t.Fatalf("got %v", m)
		}

		// Taken over by a stream elsewhere: nothing twice.
		second := r.requestTo(2, http.MethodGet, id, "")
		if m := s.event(); m != nil {
			t.Fatalf("the older stream got %v", m)
		}
		r.mark(id)
		if m := second.event(); m["method"] != "notifications/message" {
			t.Fatalf("the newer stream got %v", m)
		}
		if a := r.request(http.MethodDelete, id, "").all(); a.status != 204 {
			t.Fatalf("DELETE: %d", a.status)
		}
	})
}

// F11, F12: what changes while no stream is open is told when one opens, each list once.
func TestF12ChangesAreKeptWhileNoStreamIsOpen(t *testing.T) {
	r := newReplicas(t, 3, nil)
	id := r.open()
	r.subscribe(0, id, "subscribe", "test://a")
	r.eventually(func() bool { return r.subscribers(1, "test://a") == 1 && r.subscribers(2, "test://a") == 1 })
	r.updated(1, "test://a")
	r.updated(2, "test://a")
	// The replicas hear of both before the stream opens.
	before := r.requestTo(0, http.MethodGet, id, "")
	if m := before.event(); !strings.Contains(fmt.Sprint(m["params"]), "test://a") {
		t.Fatalf("got %v", m)
	}
}

const listenHeaders = "Mcp-Protocol-Version|2026-07-28|Mcp-Method|subscriptions/listen"

// F12 (C79): a modern client's subscription hears of changes on any replica, once, tagged with its id, and only of what it
// asked for; at a shutdown it ends with a result (C61).
func TestF12ModernSubscription(t *testing.T) {
	r := newReplicas(t, 3, nil)
	body := `{"jsonrpc":"2.0","id":"sub","method":"subscriptions/listen","params":{"notifications":{"toolsListChanged":true,"resourceSubscriptions":["test://a"]},` + modernMeta + `}}`
	var streams []*stream
	for replica := range 2 {
		s := r.requestTo(replica, http.MethodPost, "", body, strings.Split(listenHeaders, "|")...)
		if m := s.event(); m["method"] != "notifications/subscriptions/acknowledged" {
			t.Fatalf("got %v", m)
		}
		streams = append(streams, s)
	}
	r.eventually(func() bool { return r.subscribers(2, "test://a") == 1 })
	r.mcp[2].AddResource(&mcp.Resource{URI: "test://new", Name: "new"}, nil)
	r.updated(2, "test://b")
	r.updated(2, "test://a")
	for _, s := range streams {
		m := s.event()
		if m["method"] != "notifications/resources/updated" || !strings.Contains(fmt.Sprint(m["params"]), "io.modelcontextprotocol/subscriptionId:sub") {
			t.Fatalf("got %v", m)
		}
	}
	r.updated(0, "test://a") // on the replica of the first stream
	for _, s := range streams {
		if m := s.event(); m["method"] != "notifications/resources/updated" {
			t.Fatalf("got %v", m)
		}
	}
	mcp.AddTool(r.mcp[2], &mcp.Tool{Name: "new"}, func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
		return nil, nil, nil
	})
	for _, s := range streams {
		if m := s.event(); m["method"] != "notifications/tools/list_changed" {
			t.Fatalf("got %v", m)
		}
	}
	for _, h := range r.handlers {
		if err := h.Shutdown(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range streams {
		if m := s.event(); m["id"] != "sub" || m["result"] == nil {
			t.Fatalf("at the end: %v", m)
		}
		if m := s.event(); m != nil {
			t.Fatalf("after the end: %v", m)
		}
	}
}

// The topic's session is no client's, whatever the method.
func TestF18TopicIsNoSession(t *testing.T) {
	r := newReplicas(t, 1, withLock)
	r.open()
	r.eventually(func() bool { _, err := r.store.Read(t.Context(), "mcpserver.topic"); return err == nil })
	for _, c := range []struct{ method, body string }{{"POST", call("1", "echo", `{}`)}, {"POST", cancelBody("1")}, {"GET", ""}, {"DELETE", ""}} {
		if a := r.request(c.method, "mcpserver.topic", c.body).all(); a.status != 404 {
			t.Errorf("%s: %d %s", c.method, a.status, a.body)
		}
	}
	if _, err := r.store.Read(t.Context(), "mcpserver.topic"); err != nil {
		t.Error(err)
	}
}

// F12: more resources and more changes than a session may store messages: all are told, and a replica that joins late hears of
// all subscriptions.
func TestF12MoreThanIsStored(t *testing.T) {
	const n = maxStored + 200
	r := newReplicas(t, 2, nil)
	id := r.openWith("2025-03-26", `{}`)
	var batch []string
	for i := range n {
		batch = append(batch, fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"resources/subscribe","params":{"uri":"test://%d"}}`, i, i))
	}
	if a := r.post(id, "["+strings.Join(batch, ",")+"]"); a.status != 200 || strings.Count(a.body, `"result":{}`) != n {
		t.Fatalf("subscribe: %d %.200s", a.status, a.body)
	}
	s := r.requestTo(0, http.MethodGet, id, "")
	r.join(t, nil)
	r.eventually(func() bool {
		return r.subscribers(2, "test://0") == 1 && r.subscribers(2, fmt.Sprintf("test://%d", n-1)) == 1
	})

	told := map[string]int{}
	for i := range n {
		r.updated(2, fmt.Sprintf("test://%d", i))
		params, _ := s.event()["params"].(map[string]any)
		told[fmt.Sprint(params["uri"])]++
	}
	if len(told) != n {
		t.Errorf("%d of %d changes were told", len(told), n)
	}
}
