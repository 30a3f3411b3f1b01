package mcpserver_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/modelcontextprotocol/go-sdk/auth"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/mcpserver"
)

// N4 (C32): browser clients of the configured origins see and may send the protocol's headers; off unless configured.
func TestN4CORS(t *testing.T) {
	const origin = "https://app.example.com"
	preflight := []string{"Origin", origin, "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "mcp-session-id"}
	r := newReplicas(t, 1, func(o *mcpserver.Options) { o.AllowedOrigins = []string{origin} })
	a := r.request(http.MethodOptions, "", "", preflight...).all()
	for _, name := range []string{"Mcp-Session-Id", "Mcp-Protocol-Version", "Last-Event-ID", "Mcp-Method", "Mcp-Name", "Content-Type", "Authorization"} {
		if !strings.Contains(a.header.Get("Access-Control-Allow-Headers"), name) {
			t.Errorf("%s is not allowed: %v", name, a.header)
		}
	}
	if a.status != 204 || !strings.Contains(a.header.Get("Access-Control-Allow-Methods"), "DELETE") || a.header.Get("Access-Control-Allow-Origin") != origin {
		t.Errorf("preflight: %d %v", a.status, a.header)
	}
	a = r.post("", initializeWith("2025-11-25", `{}`), "Origin", origin)
	if a.status != 200 || !strings.Contains(a.header.Get("Access-Control-Expose-Headers"), "Mcp-Session-Id") || a.header.Get("Vary") != "Origin" {
		t.Errorf("initialize: %d %v", a.status, a.header)
	}
	if a := r.request(http.MethodOptions, "", "", "Origin", "https://evil.example", "Access-Control-Request-Method", "POST").all(); a.status != 403 || a.header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("foreign preflight: %d %v", a.status, a.header)
	}
	off := newReplicas(t, 1, nil)
	if a := off.request(http.MethodOptions, "", "", preflight...).all(); a.status != 403 || a.header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("not configured: %d %v", a.status, a.header)
	}
}

// roundServer has a tool that takes two rounds.
func roundServer() *mcp.Server {
	server := mcp.NewServer(&mcp.Implementation{Name: "rounds", Version: "1"}, nil)
	for _, name := range []string{"rounds", "other"} {
		server.AddTool(&mcp.Tool{Name: name, InputSchema: map[string]any{"type": "object"}}, func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			if req.Params.RequestState == "" {
				return &mcp.CallToolResult{RequestState: "secret", InputRequests: mcp.InputRequestMap{"q": &mcp.ElicitParams{Message: "?"}}}, nil
			}
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: "state " + req.Params.RequestState}}}, nil
		})
	}
	return server
}

func modernCall(tool, arguments, state string) string {
	if state != "" {
		state = `"requestState":"` + state + `","inputResponses":{"q":{"action":"accept","content":{}}},`
	}
	return `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"` + tool + `","arguments":` + arguments + `,` + state +
		`"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{"elicitation":{}},"io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"}}}}`
}

// N3 (C96): what a modern client carries back is good on any replica, after a restart and a rotation; not for another user,
// tool or arguments, not when it is old or changed.
func TestN3RequestState(t *testing.T) {
	first, second := mcpserver.NewStateKey(), mcpserver.NewStateKey()
	keys := [][][]byte{{first}, {second, first}, {second}}
	n := 0
	r := newReplicas(t, 3, func(o *mcpserver.Options) { o.StateKeys = keys[n]; n++ })
	verify := func(_ context.Context, token string, _ *http.Request) (*auth.TokenInfo, error) {
		return &auth.TokenInfo{UserID: token}, nil
	}
	for i, s := range r.servers {
		server := roundServer()
		opts := &mcpserver.Options{StateKeys: keys[i]}
		handler, err := mcpserver.NewHandler(func(*http.Request) *mcp.Server { return server }, opts)
		if err != nil {
			t.Fatal(err)
		}
		s.Config.Handler = auth.RequireBearerToken(verify, &auth.RequireBearerTokenOptions{AllowMissingExpiration: true})(handler)
	}
	send := func(replica int, user, tool, arguments, state string) answer {
		return r.requestTo(replica, http.MethodPost, "", modernCall(tool, arguments, state), "Authorization", "Bearer "+user,
			"Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "tools/call", "Mcp-Name", tool).all()
	}
	stateOf := func(a answer) string {
		t.Helper()
		result, _ := a.messages[len(a.messages)-1]["result"].(map[string]any)
		state, _ := result["requestState"].(string)
		if state == "" || strings.Contains(state, "secret") {
			t.Fatalf("state %q: %s", state, a.body)
		}
		return state
	}
	state := stateOf(send(0, "alice", "rounds", `{"a":1,"b":2}`, ""))
	for replica, fine := range []bool{true, true, false} { // the third has forgotten the first key
		if a := send(replica, "alice", "rounds", `{"b":2, "a":1}`, state); strings.Contains(a.body, "state secret") != fine {
			t.Errorf("replica %d: %s", replica, a.body)
		}
	}
	for name, a := range map[string]answer{
		"another user":      send(0, "bob", "rounds", `{"a":1,"b":2}`, state),
		"another tool":      send(0, "alice", "other", `{"a":1,"b":2}`, state),
		"another argument":  send(0, "alice", "rounds", `{"a":1,"b":3}`, state),
		"a changed state":   send(0, "alice", "rounds", `{"a":1,"b":2}`, "A"+state[1:len(state)-1]+"A"),
		"a made-up state":   send(0, "alice", "rounds", `{"a":1,"b":2}`, "secret"),
		"the open state":    send(0, "alice", "rounds", `{"a":1,"b":2}`, "c2VjcmV0"),
		"a state truncated": send(0, "alice", "rounds", `{"a":1,"b":2}`, state[:8]),
	} {
		if !strings.Contains(a.body, "requestState is not one") || strings.Contains(a.body, "state secret") {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
}

// N3: a state ends after an hour.
func TestN3RequestStateExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seal, open := mcpserver.Sealer(t, mcpserver.NewStateKey())
		sealed := seal("s")
		time.Sleep(59 * time.Minute)
		if got, err := open(sealed); err != nil || got != "s" {
			t.Errorf("after 59 minutes: %q %v", got, err)
		}
		time.Sleep(2 * time.Minute)
		if _, err := open(sealed); err == nil {
			t.Error("still good after an hour")
		}
	})
}

func TestOptionsAreChecked(t *testing.T) {
	getServer := func(*http.Request) *mcp.Server { return nil }
	for name, o := range map[string]mcpserver.Options{
		"Store": {Locker: newMemory()}, "SessionTTL": {SessionTTL: time.Millisecond}, "LockTTL": {LockTTL: 2 * time.Hour},
		"LockTimeout": {LockTimeout: -1}, "AskTimeout": {AskTimeout: 48 * time.Hour}, "MaxBodyBytes": {MaxBodyBytes: -1},
		"AllowedOrigins": {AllowedOrigins: []string{"example.com"}}, "Topic": {Topic: "a b"}, "History": {History: time.Millisecond},
		"StateKeys": {StateKeys: [][]byte{{1}}},
	} {
		if _, err := mcpserver.NewHandler(getServer, &o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := mcpserver.NewHandler(nil, nil); err == nil {
		t.Error("no getServer")
	}
	if key, err := mcpserver.ParseStateKey("AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="); err != nil || len(key) != mcpserver.StateKeySize {
		t.Errorf("key: %v", err)
	}
	for _, text := range []string{"", "x", "AAEC"} {
		if _, err := mcpserver.ParseStateKey(text); err == nil {
			t.Errorf("key %q accepted", text)
		}
	}
}
