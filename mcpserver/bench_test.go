package mcpserver_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/mcpserver"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// BenchmarkCall is one tools/call over HTTP by one client, side by side: the SDK's own handler with the session in its memory,
// and this package's with the session in sessiond on an embedded etcd with fsync, without the lock and with it, for a tool that
// leaves the session alone and one that changes it.
func BenchmarkCall(b *testing.B) {
	server := testServer(&subscribers{relays: map[string]int{}})
	getServer := func(*http.Request) *mcp.Server { return server }
	sessions := sessiondtest.Start(b).Client()
	handler := func(opts mcpserver.Options) http.Handler {
		opts.Store = sessions
		h, err := mcpserver.NewHandler(getServer, &opts)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = h.Shutdown(context.WithoutCancel(b.Context())) })
		return h
	}
	for _, c := range []struct {
		name, tool string
		handler    http.Handler
	}{
		{"sdk-in-memory", "echo", mcp.NewStreamableHTTPHandler(getServer, nil)},
		{"sessions/unchanged", "echo", handler(mcpserver.Options{})},
		{"sessions/changed", "add", handler(mcpserver.Options{})},
		{"lock/unchanged", "echo", handler(mcpserver.Options{Locker: sessions})},
		{"lock/changed", "add", handler(mcpserver.Options{Locker: sessions})},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := httptest.NewServer(c.handler)
			defer s.Close()
			id := benchPost(b, s, "", initializeWith("2025-11-25", `{}`))
			benchPost(b, s, id, `{"jsonrpc":"2.0","method":"notifications/initialized"}`)
			body := call("1", c.tool, `{"by":1}`)
			b.ReportAllocs()
			for b.Loop() {
				benchPost(b, s, id, body)
			}
			// The SDK's session has goroutines until it ends.
			req, err := http.NewRequestWithContext(b.Context(), http.MethodDelete, s.URL, nil)
			if err != nil {
				b.Fatal(err)
			}
			req.Header.Set("Mcp-Session-Id", id)
			if resp, err := s.Client().Do(req); err != nil || resp.Body.Close() != nil {
				b.Fatal(err)
			}
		})
	}
}

func benchPost(b *testing.B, s *httptest.Server, session, body string) string {
	b.Helper()
	req, err := http.NewRequestWithContext(b.Context(), http.MethodPost, s.URL, strings.NewReader(body))
	if err != nil {
		b.Fatal(err)
	}
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("Content-Type", "application/json")
	if session != "" {
		req.Header.Set("Mcp-Session-Id", session)
	}
	resp, err := s.Client().Do(req)
	if err != nil {
		b.Fatal(err)
	}
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode >= 300 || strings.Contains(string(answer), `"error"`) {
		b.Fatalf("%d %s %v", resp.StatusCode, answer, err)
	}
	return resp.Header.Get("Mcp-Session-Id")
}

// BenchmarkAnswer is the way of a client's answer: from the POST that brings it, to one front-end, to the handler that waits on
// another, and back to the client as its result.
func BenchmarkAnswer(b *testing.B) {
	node := sessiondtest.Start(b)
	var servers []*httptest.Server
	for range 2 {
		sessions, err := client.New([]string{node.Addr()}, client.Options{})
		if err != nil {
			b.Fatal(err)
		}
		server := testServer(&subscribers{relays: map[string]int{}})
		h, err := mcpserver.NewHandler(func(*http.Request) *mcp.Server { return server }, &mcpserver.Options{Store: sessions})
		if err != nil {
			b.Fatal(err)
		}
		s := httptest.NewServer(h)
		b.Cleanup(func() {
			s.Close()
			_ = h.Shutdown(context.WithoutCancel(b.Context()))
			_ = sessions.Close()
		})
		servers = append(servers, s)
	}
	r := &replicas{t: b, servers: servers}
	id := r.open()
	for b.Loop() {
		b.StopTimer()
		s := r.requestTo(0, http.MethodPost, id, call("1", "ask", `{}`))
		question := s.event()["id"]
		b.StartTimer()
		r.requestTo(1, http.MethodPost, id, accept(question, "x")).all()
		if got := text(s.event()); got != `["x"]` {
			b.Fatal(got)
		}
	}
}
