package mcpserver_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/auth"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/mcpserver"
)

// N1: without a store, handshake-era clients are served without sessions.
func TestN1WithoutStore(t *testing.T) {
	r := newReplicas(t, 2, func(o *mcpserver.Options) { o.Store = nil })
	a := r.post("", initializeWith("2025-11-25", `{}`))
	if a.status != 200 || a.header.Get("Mcp-Session-Id") != "" {
		t.Fatalf("initialize: %d %s", a.status, a.body)
	}
	if strings.Contains(a.body, `"logging"`) || strings.Contains(a.body, `"subscribe"`) || !strings.Contains(a.body, `"tools"`) {
		t.Errorf("capabilities: %s", a.body)
	}
	if a := r.post("ignored", `{"jsonrpc":"2.0","method":"notifications/initialized"}`); a.status != 202 {
		t.Errorf("initialized: %d %s", a.status, a.body)
	}
	if a := r.post("ignored", call("1", "echo", `{"a":1}`)); a.status != 200 || text(a.messages[0]) != `{"a":1}` {
		t.Errorf("call: %d %s", a.status, a.body)
	}
	if a := r.post("", call("1", "add", `{"by":1}`)); !strings.Contains(a.body, "no session") {
		t.Errorf("values: %d %s", a.status, a.body)
	}
	for _, method := range []string{`logging/setLevel","params":{"level":"info"}`, `resources/subscribe","params":{"uri":"test://a"}`} {
		if a := r.post("", `{"jsonrpc":"2.0","id":1,"method":"`+method+`}`); !strings.Contains(a.body, "-32601") {
			t.Errorf("%s: %s", method, a.body)
		}
	}
	for _, method := range []string{http.MethodGet, http.MethodDelete} {
		if a := r.request(method, "x", "").all(); a.status != 405 || a.header.Get("Allow") != "POST" {
			t.Errorf("%s: %d %s", method, a.status, a.header.Get("Allow"))
		}
	}
}

const modernMeta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"}}`

// N2 (C92, C94): the modern era is served on the same URL, without sessions; stray session headers change nothing.
func TestN2ModernEra(t *testing.T) {
	r := newReplicas(t, 2, withLock)
	id := r.open()
	before := r.store.count()
	for _, session := range []string{"", "UNKNOWN", id} {
		for _, c := range []struct{ method, params, name, want string }{
			{"server/discover", "", "", "supportedVersions"},
			{"tools/list", "", "", `"echo"`},
			{"tools/call", `"name":"echo","arguments":{"a":1},`, "echo", `{\"a\":1}`},
		} {
			header := []string{"Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", c.method, "Last-Event-ID", ""}
			if c.name != "" {
				header = append(header, "Mcp-Name", c.name)
			}
			a := r.post(session, `{"jsonrpc":"2.0","id":1,"method":"`+c.method+`","params":{`+c.params+modernMeta+`}}`, header...)
			if a.status != 200 || !strings.Contains(a.body, c.want) || a.header.Get("Mcp-Session-Id") != "" {
				t.Errorf("%s with session %q: %d %s", c.method, session, a.status, a.body)
			}
		}
	}
	if r.store.count() != before {
		t.Error("modern requests made sessions")
	}
	// N3: no such method is 404 in this era, and its client does not take that for a session's end.
	a := r.post("", `{"jsonrpc":"2.0","id":1,"method":"nothing/here","params":{`+modernMeta+`}}`, "Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "nothing/here")
	if a.status != 404 || !strings.Contains(a.body, "-32601") {
		t.Errorf("unknown method: %d %s", a.status, a.body)
	}
	if a := r.post(id, `{"jsonrpc":"2.0","id":1,"method":"nothing/here"}`); a.status != 200 || !strings.Contains(a.body, "-32601") {
		t.Errorf("unknown method, handshake era: %d %s", a.status, a.body)
	}
}

// The SDK's own client, over sessions on several replicas.
func TestF1SDKClient(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		ctx := t.Context()
		turn := 0
		proxy := proxyOver(t, r, &turn)
		c := mcp.NewClient(&mcp.Implementation{Name: "c", Version: "1"}, &mcp.ClientOptions{
			ElicitationHandler: func(context.Context, *mcp.ElicitRequest) (*mcp.ElicitResult, error) {
				return &mcp.ElicitResult{Action: "accept", Content: map[string]any{"answer": "yes"}}, nil
			},
		})
		session, err := c.Connect(ctx, &mcp.StreamableClientTransport{Endpoint: proxy, DisableStandaloneSSE: true}, &mcp.ClientSessionOptions{ProtocolVersion: "2025-11-25"})
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []string{"1", "2", "3"} {
			res, err := session.CallTool(ctx, &mcp.CallToolParams{Name: "add", Arguments: map[string]any{"by": 1}})
			if err != nil {
				t.Fatal(err)
			}
			if content, ok := res.Content[0].(*mcp.TextContent); !ok || content.Text != want {
				t.Fatalf("call %d: %+v", i, res.Content[0])
			}
		}
		if err := session.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// N2: the SDK's client takes the modern era where it is offered, which has no sessions. A server whose tools need them
// narrows what it supports, with the SDK's own option, and the client falls back.
func TestN2ServerOfTheHandshakeEraOnly(t *testing.T) {
	store := newMemory()
	server := mcp.NewServer(&mcp.Implementation{Name: "s", Version: "1"}, &mcp.ServerOptions{SupportedProtocolVersions: []string{"2025-11-25", "2025-06-18"}})
	handler, err := mcpserver.NewHandler(func(*http.Request) *mcp.Server { return server }, &mcpserver.Options{Store: store})
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(handler)
	defer s.Close()
	defer func() {
		if err := handler.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	c := mcp.NewClient(&mcp.Implementation{Name: "c", Version: "1"}, nil)
	session, err := c.Connect(t.Context(), &mcp.StreamableClientTransport{Endpoint: s.URL, DisableStandaloneSSE: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := session.InitializeResult().ProtocolVersion; got != "2025-11-25" || store.count() != 1 {
		t.Errorf("revision %s, %d sessions", got, store.count())
	}
	if err := session.Close(); err != nil {
		t.Fatal(err)
	}
}

// F17: a session belongs to the user that opened it; for anyone else it does not exist, whatever the method.
func TestF17SessionOfAUser(t *testing.T) {
	r := newReplicas(t, 2, withLock)
	verify := func(_ context.Context, token string, _ *http.Request) (*auth.TokenInfo, error) {
		user, _, _ := strings.Cut(token, "-")
		return &auth.TokenInfo{UserID: user, Extra: map[string]any{"iss": "https://issuer"}}, nil
	}
	wrap := auth.RequireBearerToken(verify, &auth.RequireBearerTokenOptions{AllowMissingExpiration: true})
	for i, s := range r.servers {
		s.Config.Handler = wrap(r.handlers[i])
	}
	id := r.openWith("2025-11-25", `{}`, "Authorization", "Bearer alice-1")
	if a := r.post(id, call("1", "echo", `{}`), "Authorization", "Bearer alice-2"); a.status != 200 {
		t.Errorf("the same user with a new token: %d %s", a.status, a.body)
	}
	for _, c := range []struct{ method, body string }{
		{"POST", call("1", "echo", `{}`)}, {"POST", `{"jsonrpc":"2.0","id":"x","result":{}}`}, {"POST", cancelBody("1")},
		{"GET", ""}, {"DELETE", ""},
	} {
		if a := r.request(c.method, id, c.body, "Authorization", "Bearer bob-1").all(); a.status != 404 {
			t.Errorf("%s %s by another: %d %s", c.method, c.body, a.status, a.body)
		}
	}
	if a := r.post(id, call("1", "echo", `{}`), "Authorization", "Bearer alice-3"); a.status != 200 {
		t.Errorf("after all that: %d %s", a.status, a.body)
	}
}
