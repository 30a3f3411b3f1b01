package mcpserver_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/mcpserver"
)

// F18: every malformed request gets the status that says what is wrong, and leaves nothing behind.
func TestF18BadInput(t *testing.T) {
	r := newReplicas(t, 2, func(o *mcpserver.Options) { o.MaxBodyBytes = 10_000 })
	id := r.open()
	sessions := r.store.count()
	good := call("1", "echo", `{}`)
	for name, c := range map[string]struct {
		method, session, body string
		header                []string
		status                int
		says                  string
	}{
		"no session":                {"POST", "", good, nil, 400, "Mcp-Session-Id is missing"},
		"notification, no session":  {"POST", "", `{"jsonrpc":"2.0","method":"notifications/initialized"}`, nil, 400, "missing"},
		"unknown session":           {"POST", "UNKNOWN", good, nil, 404, "session not found"},
		"unknown session, upper":    {"POST", strings.ToLower(id), good, nil, 404, "session not found"},
		"session twice":             {"POST", id, good, []string{"Mcp-Session-Id", id}, 400, "2 times"},
		"session empty":             {"POST", "", good, []string{"Mcp-Session-Id", " "}, 400, "0 characters"},
		"session too long":          {"POST", strings.Repeat("x", 129), good, nil, 400, "129 characters"},
		"session with a space":      {"POST", "a b", good, nil, 400, "visible ASCII"},
		"session with é":            {"POST", "caf\u00e9", good, nil, 400, "visible ASCII"},
		"session of a path":         {"POST", "../../etc", good, nil, 404, "not found"},
		"session escaped":           {"POST", "%2f", good, nil, 404, "not found"},
		"GET without session":       {"GET", "", "", nil, 400, "missing"},
		"DELETE without session":    {"DELETE", "", "", nil, 400, "missing"},
		"GET unknown":               {"GET", "UNKNOWN", "", nil, 404, "not found"},
		"DELETE unknown":            {"DELETE", "UNKNOWN", "", nil, 404, "not found"},
		"PUT":                       {"PUT", id, good, nil, 405, "GET, POST, DELETE"},
		"empty body":                {"POST", id, "", nil, 400, "empty"},
		"not JSON":                  {"POST", id, "{", nil, 400, "JSON"},
		"not JSON-RPC":              {"POST", id, `{"id":1,"method":"x"}`, nil, 400, `\"jsonrpc\" must be \"2.0\"`},
		"Method in upper case":      {"POST", id, `{"jsonrpc":"2.0","id":1,"Method":"ping"}`, nil, 400, "response"},
		"null id":                   {"POST", id, `{"jsonrpc":"2.0","id":null,"method":"ping"}`, nil, 400, "string or a number"},
		"object id":                 {"POST", id, `{"jsonrpc":"2.0","id":{},"method":"ping"}`, nil, 400, "string or a number"},
		"neither method nor id":     {"POST", id, `{"jsonrpc":"2.0"}`, nil, 400, "neither"},
		"result and error":          {"POST", id, `{"jsonrpc":"2.0","id":1,"result":{},"error":{}}`, nil, 400, "either"},
		"params a number":           {"POST", id, `{"jsonrpc":"2.0","id":1,"method":"ping","params":3}`, nil, 400, "object"},
		"too large":                 {"POST", id, call("1", "echo", `{"x":"`+strings.Repeat("x", 10_000)+`"}`), nil, 413, "10000 bytes"},
		"content type":              {"POST", id, good, []string{"Content-Type", "", "Content-Type", "text/plain"}, 415, "application/json"},
		"accept":                    {"POST", id, good, []string{"Accept", "", "Accept", "text/html"}, 406, "application/json"},
		"GET accept":                {"GET", id, "", []string{"Accept", "", "Accept", "application/json"}, 406, "text/event-stream"},
		"revision unknown":          {"POST", id, good, []string{"Mcp-Protocol-Version", "2024-01-01"}, 400, "2025-11-25"},
		"revision garbage":          {"GET", id, "", []string{"Mcp-Protocol-Version", "banana"}, 400, "not supported"},
		"foreign host":              {"POST", id, good, []string{"Host", "evil.example"}, 403, "not allowed"},
		"foreign origin":            {"POST", id, good, []string{"Origin", "https://evil.example"}, 403, "not allowed"},
		"null origin":               {"POST", id, good, []string{"Origin", "null"}, 403, "not allowed"},
		"foreign origin GET":        {"GET", id, "", []string{"Origin", "https://evil.example"}, 403, "not allowed"},
		"foreign origin DELETE":     {"DELETE", id, "", []string{"Origin", "https://evil.example"}, 403, "not allowed"},
		"initialize live":           {"POST", id, initializeWith("2025-11-25", `{}`), nil, 400, "live session"},
		"initialize in a batch":     {"POST", "", "[" + initializeWith("2025-03-26", `{}`) + "]", nil, 400, "batch"},
		"initialize without id":     {"POST", "", `{"jsonrpc":"2.0","method":"initialize","params":{}}`, nil, 400, "id"},
		"batch of another revision": {"POST", id, "[" + good + "]", nil, 400, "2025-03-26"},
		"resume without event ids":  {"GET", id, "", []string{"Last-Event-ID", "1"}, 400, "no event ids"},
		"empty batch":               {"POST", id, "[]", nil, 400, "empty"},
		"same id twice in a batch":  {"POST", id, "[" + good + "," + good + "]", []string{"Mcp-Protocol-Version", "2025-03-26"}, 400, "two requests"},
	} {
		t.Run(name, func(t *testing.T) {
			a := r.request(c.method, c.session, c.body, c.header...).all()
			if a.status != c.status || !strings.Contains(a.body, c.says) {
				t.Errorf("%d %s, want %d with %q", a.status, a.body, c.status, c.says)
			}
			if c.status == 405 && a.header.Get("Allow") == "" {
				t.Error("405 without Allow")
			}
		})
	}
	if n := r.store.count(); n != sessions {
		t.Errorf("%d sessions after the refusals, %d before", n, sessions)
	}
	if a := r.post(id, good); a.status != 200 {
		t.Errorf("the session after the refusals: %d %s", a.status, a.body)
	}
}

// F18 (C28): initialize with an id that is not alive opens a fresh session, never under the offered id.
func TestF18InitializeWithStaleID(t *testing.T) {
	r := newReplicas(t, 2, nil)
	ended := r.open()
	r.request(http.MethodDelete, ended, "").all()
	for _, offered := range []string{"UNKNOWN", ended} {
		a := r.post(offered, initializeWith("2025-11-25", `{}`))
		if got := a.header.Get("Mcp-Session-Id"); a.status != 200 || got == "" || got == offered {
			t.Errorf("%d, session %q", a.status, got)
		}
	}
}

// F18: initialize negotiates from its body; a failed one leaves no session behind.
func TestF18Negotiation(t *testing.T) {
	r := newReplicas(t, 2, nil)
	for offered, want := range map[string]string{
		"2025-03-26": "2025-03-26", "2025-06-18": "2025-06-18", "2025-11-25": "2025-11-25", "1999-01-01": "2025-11-25", "2026-07-28": "2025-11-25",
	} {
		a := r.post("", initializeWith(offered, `{}`), "Mcp-Protocol-Version", offered)
		if !strings.Contains(a.body, `"protocolVersion":"`+want+`"`) {
			t.Errorf("%s: %d %s", offered, a.status, a.body)
		}
	}
	before := r.store.count()
	if a := r.post("", `{"jsonrpc":"2.0","id":1,"method":"initialize"}`); a.header.Get("Mcp-Session-Id") != "" || !strings.Contains(a.body, "error") {
		t.Errorf("initialize without params: %d %s", a.status, a.body)
	}
	if r.store.count() != before {
		t.Error("a failed initialize left a session behind")
	}
}

// F18 (C90): Accept is read leniently.
func TestF18LenientAccept(t *testing.T) {
	r := newReplicas(t, 1, nil)
	id := r.open()
	for accept, contentType := range map[string]string{
		"*/*": "text/event-stream", "application/*, text/*": "text/event-stream", "application/json": "application/json",
		"text/event-stream;q=0.5, application/json;q=0.9": "text/event-stream", "text/event-stream": "text/event-stream", "": "text/event-stream",
	} {
		header := []string{"Accept", ""}
		if accept != "" {
			header = append(header, "Accept", accept)
		}
		if a := r.post(id, call("1", "echo", `{}`), header...); a.status != 200 || a.header.Get("Content-Type") != contentType {
			t.Errorf("Accept %q: %d %s", accept, a.status, a.header.Get("Content-Type"))
		}
	}
}

// F7: an error goes out under the ids of requests, and under none for what has no method.
func TestF7IDsOfRefusals(t *testing.T) {
	r := newReplicas(t, 1, nil)
	id := r.openWith("2025-03-26", `{}`)
	r.store.setDown(true)
	for body, want := range map[string]string{
		call("7", "echo", `{}`):                  `"id":7`,
		`{"jsonrpc":"2.0","id":7,"result":{}}`:   "",
		cancelBody("7"):                          "",
		"[" + cancelBody("7") + "]":              "",
		"[" + call(`"a"`, "echo", `{}`) + "]":    `[{"jsonrpc":"2.0","id":"a"`,
		`[{"jsonrpc":"2.0","id":7,"result":{}}]`: "",
	} {
		a := r.post(id, body)
		if a.status != 503 || a.header.Get("Retry-After") == "" {
			t.Errorf("%s: %d", body, a.status)
		}
		if want == "" && strings.Contains(a.body, `"id"`) || !strings.Contains(a.body, want) {
			t.Errorf("%s: %s, want %q", body, a.body, want)
		}
	}
}

// F6: a failing backend is 503 at once, never 404, logged as an error; the session goes on after it.
func TestF6BackendDown(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		r.store.setDown(true)
		for _, c := range []struct{ method, session, body string }{
			{"POST", id, call("1", "echo", `{}`)},
			{"POST", "UNKNOWN", call("1", "echo", `{}`)},
			{"POST", "", initializeWith("2025-11-25", `{}`)},
			{"POST", id, initializeWith("2025-11-25", `{}`)},
			{"POST", id, `{"jsonrpc":"2.0","method":"notifications/initialized"}`},
			{"GET", id, ""},
			{"DELETE", id, ""},
		} {
			if a := r.request(c.method, c.session, c.body).all(); a.status != 503 || !strings.Contains(a.body, "unavailable") || a.header.Get("Mcp-Session-Id") != "" {
				t.Errorf("%s %s: %d %s", c.method, c.body, a.status, a.body)
			}
		}
		if !strings.Contains(r.logs.String(), "level=ERROR") {
			t.Errorf("log: %s", r.logs)
		}
		r.store.setDown(false)
		if a := r.post(id, call("1", "echo", `{}`)); a.status != 200 {
			t.Errorf("afterwards: %d %s", a.status, a.body)
		}
	})
}

// F2: a batch of revision 2025-03-26 gets one array, in JSON, or its answers on a stream.
func TestF2Batch(t *testing.T) {
	r := newReplicas(t, 2, withJSON)
	id := r.openWith("2025-03-26", `{"elicitation":{}}`)
	body := "[" + call("1", "echo", `{"n":1}`) + `,{"jsonrpc":"2.0","method":"notifications/roots/list_changed"},` + call(`"2"`, "echo", `{"n":2}`) + "]"
	a := r.post(id, body)
	if a.status != 200 || len(a.messages) != 2 || !strings.HasPrefix(a.body, "[") {
		t.Fatalf("%d %s", a.status, a.body)
	}
	// One of the requests asks: the others' answers are on the stream before the end.
	s := r.request(http.MethodPost, id, "["+call("1", "echo", `{"n":1}`)+","+call("2", "ask", `{}`)+"]")
	var question any
	seen := map[string]bool{}
	for m := s.event(); m != nil; m = s.event() {
		if m["method"] != nil {
			question = m["id"]
			r.post(id, accept(question, "x"))
			continue
		}
		seen[text(m)] = true
	}
	if !seen[`{"n":1}`] || !seen[`["x"]`] || len(seen) != 2 {
		t.Fatalf("answers %v", seen)
	}
	if a := r.post(id, "["+cancelBody("1")+","+cancelBody("2")+"]"); a.status != 202 || a.body != "" {
		t.Fatalf("batch of notifications: %d %s", a.status, a.body)
	}
}

// C89: notifications and answers get 202 with an empty body and no content type.
func TestF15Accepted(t *testing.T) {
	r := newReplicas(t, 2, nil)
	id := r.open()
	for _, body := range []string{
		`{"jsonrpc":"2.0","method":"notifications/initialized"}`,
		`{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}`,
		`{"jsonrpc":"2.0","method":"notifications/unheard_of"}`,
		`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":1}}`,
		`{"jsonrpc":"2.0","id":"x","result":{}}`,
	} {
		if a := r.post(id, body); a.status != 202 || a.body != "" || a.header.Get("Content-Type") != "" {
			t.Errorf("%s: %d %q %q", body, a.status, a.body, a.header.Get("Content-Type"))
		}
	}
}

// F18: a proxy on the same machine passes on a name that is configured.
func TestF18AllowedHosts(t *testing.T) {
	r := newReplicas(t, 1, func(o *mcpserver.Options) { o.AllowedHosts = []string{"mcp.example.com"} })
	for host, status := range map[string]int{"mcp.example.com": 200, "mcp.example.com:443": 200, "localhost:1": 200, "example.com": 403} {
		if a := r.post("", initializeWith("2025-11-25", `{}`), "Host", host); a.status != status {
			t.Errorf("%s: %d %s", host, a.status, a.body)
		}
	}
}

// cutOff is a store whose node dies over the first Create, after storing the session or before.
type cutOff struct {
	*memory

	stores bool
	died   atomic.Bool
}

func (c *cutOff) Create(ctx context.Context, data []byte, opts client.CreateOptions) (client.Session, error) {
	if opts.ID == mcpserver.DefaultTopic || c.died.Swap(true) {
		return c.memory.Create(ctx, data, opts)
	}
	if c.stores {
		if _, err := c.memory.Create(ctx, data, opts); err != nil {
			return client.Session{}, err
		}
	}
	return client.Session{}, errors.Join(client.ErrUnavailable, client.ErrOutcomeUnknown)
}

// F6: a node that dies over a new session fails no initialize while another one serves.
func TestF6NodeDiesOverInitialize(t *testing.T) {
	for _, stores := range []bool{false, true} {
		r := newReplicas(t, 1, func(o *mcpserver.Options) {
			if store, ok := o.Store.(*memory); ok {
				o.Store = &cutOff{memory: store, stores: stores}
			}
		})
		if a := r.post(r.open(), call("1", "echo", `{"a":1}`)); a.status != 200 {
			t.Errorf("stored %t: %d %s", stores, a.status, a.body)
		}
	}
}
