package mcpserver_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/mcpserver"
)

// FuzzRequest sends whatever it likes as a client that knows a session: there is no panic and no 500, what is refused says
// why, and the session lives on (unless it is deleted).
func FuzzRequest(f *testing.F) {
	store := newMemory()
	server := mcp.NewServer(&mcp.Implementation{Name: "fuzz", Version: "1"}, nil)
	mcp.AddTool(server, &mcp.Tool{Name: "echo"}, func(_ context.Context, _ *mcp.CallToolRequest, in map[string]any) (*mcp.CallToolResult, any, error) {
		return nil, in, nil
	})
	handler, err := mcpserver.NewHandler(func(*http.Request) *mcp.Server { return server }, &mcpserver.Options{Store: store, Locker: store, History: time.Minute})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = handler.Shutdown(context.WithoutCancel(f.Context())) })
	open := httptest.NewRecorder()
	first := httptest.NewRequestWithContext(f.Context(), http.MethodPost, "/mcp", strings.NewReader(initializeWith("2025-03-26", `{"roots":{}}`)))
	first.Header.Set("Content-Type", "application/json")
	handler.ServeHTTP(open, first)
	session := open.Header().Get("Mcp-Session-Id")

	const live = "LIVE" // stands for the session's id, which is another in each process
	for _, seed := range []struct{ method, session, revision, accept, eventID, body string }{
		{"POST", live, "", "*/*", "", call("1", "echo", `{"a":1}`)},
		{"POST", live, "2025-03-26", "application/json", "", "[" + call("1", "echo", `{}`) + "," + cancelBody("1") + "]"},
		{"POST", live, "", "*/*", "", `{"jsonrpc":"2.0","id":"x","result":{}}`},
		{"POST", live, "2026-07-28", "application/json, text/event-stream", "", `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{` + modernMeta + `}}`},
		{"POST", "", "", "*/*", "", initializeWith("2025-11-25", `{}`)},
		{"POST", "a b", "banana", "", "", `{`},
		{"POST", live, "", "*/*", "", `{"jsonrpc":"2.0","id":1e400,"method":"ping","params":[]}`},
		{"POST", live, "", "*/*", "", `{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":7}}`},
		{"POST", live, "", "*/*", "", `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":{"a":[]}}}`},
		{"GET", live, "", "text/event-stream", "standalone-1-2", ""},
		{"GET", live, "", "text/event-stream", "ABC-zz", ""},
		{"DELETE", "other", "", "", "", ""},
		{"PATCH", live, "", "", "", "x"},
	} {
		f.Add(seed.method, seed.session, seed.revision, seed.accept, seed.eventID, []byte(seed.body))
	}
	f.Fuzz(func(t *testing.T, method, id, revision, accept, eventID string, body []byte) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if method != http.MethodPost {
			cancel() // a stream would stay open
		}
		if id == live {
			id = session
		}
		if method == http.MethodDelete && id == session || method == "" || strings.ContainsAny(method, " \t\r\n") {
			return
		}
		req := (&http.Request{Method: method, URL: first.URL, Header: http.Header{}, Body: http.NoBody, Host: "localhost"}).WithContext(ctx)
		if len(body) > 0 {
			req.Body = httptest.NewRequestWithContext(ctx, http.MethodPost, "/mcp", strings.NewReader(string(body))).Body
		}
		req.Header.Set("Content-Type", "application/json")
		for name, value := range map[string]string{"Mcp-Session-Id": id, "Mcp-Protocol-Version": revision, "Accept": accept, "Last-Event-ID": eventID} {
			if value != "" {
				req.Header.Set(name, value)
			}
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, req)
		if w.Code == http.StatusInternalServerError {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		if w.Code >= 400 && w.Code != http.StatusNotFound && w.Body.Len() == 0 {
			t.Errorf("%d without a word", w.Code)
		}
		if _, err := store.Read(t.Context(), session); err != nil {
			t.Errorf("the session: %v", err)
		}
	})
}
