package mcpserver_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"go.uber.org/goleak"

	"github.com/sessiond/sessiond/mcpserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// replicas are front-ends of one store, each with a server of its own, as separate processes would be.
type replicas struct {
	t        testing.TB
	store    *memory
	servers  []*httptest.Server
	handlers []*mcpserver.Handler
	mcp      []*mcp.Server
	heard    []*subscribers
	logs     *logs
	next     int
}

// logs is what the front-ends logged.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

type numberInput struct {
	By int `json:"by,omitempty"`
}

// subscribers counts who is subscribed to what on one replica, the replica itself included.
type subscribers struct {
	mu     sync.Mutex
	relays map[string]int
}

func (s *subscribers) add(ctx context.Context, uri string, n int) {
	if mcpserver.IsRelay(ctx) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.relays[uri] += n
	}
}

// subscribers is how many subscriptions a replica has of its own.
func (r *replicas) subscribers(replica int, uri string) int {
	s := r.heard[replica]
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.relays[uri]
}

// eventually waits for what another goroutine is about to do.
func (r *replicas) eventually(done func() bool) {
	r.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.NewTimer(10 * time.Second)
	defer limit.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-limit.C:
			r.t.Fatal("it does not happen")
		}
	}
}

// testServer has the tools that tests of the transport need.
func testServer(heard *subscribers) *mcp.Server {
	server := mcp.NewServer(&mcp.Implementation{Name: "test", Version: "1"}, &mcp.ServerOptions{
		SubscribeHandler: func(ctx context.Context, req *mcp.SubscribeRequest) error {
			heard.add(ctx, req.Params.URI, 1)
			return nil
		},
		RootsListChangedHandler: func(ctx context.Context, req *mcp.RootsListChangedRequest) {
			result := "none"
			if res, err := req.Session.ListRoots(ctx, nil); err != nil {
				result = kindOf(err).Error()
			} else if len(res.Roots) > 0 {
				result = res.Roots[0].URI
			}
			_ = mcpserver.Set(ctx, "roots", result)
		},
		UnsubscribeHandler: func(ctx context.Context, req *mcp.UnsubscribeRequest) error {
			heard.add(ctx, req.Params.URI, -1)
			return nil
		},
	})
	answer := func(v any) (*mcp.CallToolResult, any, error) {
		data, err := json.Marshal(v)
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: string(data)}}}, nil, err
	}
	mcp.AddTool(server, &mcp.Tool{Name: "echo"}, func(_ context.Context, _ *mcp.CallToolRequest, in map[string]any) (*mcp.CallToolResult, any, error) {
		return answer(in)
	})
	mcp.AddTool(server, &mcp.Tool{Name: "add"}, func(ctx context.Context, _ *mcp.CallToolRequest, in numberInput) (*mcp.CallToolResult, any, error) {
		total, _, err := mcpserver.Get[int](ctx, "total")
		if err != nil {
			return nil, nil, err
		}
		if err := mcpserver.Set(ctx, "total", total+in.By); err != nil {
			return nil, nil, err
		}
		return answer(total + in.By)
	})
	mcp.AddTool(server, &mcp.Tool{Name: "set"}, func(ctx context.Context, _ *mcp.CallToolRequest, in map[string]any) (*mcp.CallToolResult, any, error) {
		for key, value := range in {
			if err := mcpserver.Set(ctx, key, value); err != nil {
				return nil, nil, err
			}
		}
		return answer("ok")
	})
	mcp.AddTool(server, &mcp.Tool{Name: "keys"}, func(ctx context.Context, _ *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
		keys, err := mcpserver.Keys(ctx)
		if err != nil {
			return nil, nil, err
		}
		return answer(keys)
	})
	mcp.AddTool(server, &mcp.Tool{Name: "known_roots"}, func(ctx context.Context, _ *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
		v, _, err := mcpserver.Get[string](ctx, "roots")
		if err != nil {
			return nil, nil, err
		}
		return answer(v)
	})
	mcp.AddTool(server, &mcp.Tool{Name: "ask"}, func(ctx context.Context, req *mcp.CallToolRequest, in numberInput) (*mcp.CallToolResult, any, error) {
		var answers []any
		for range max(in.By, 1) {
			res, err := req.Session.Elicit(ctx, &mcp.ElicitParams{Message: "?", RequestedSchema: map[string]any{"type": "object", "properties": map[string]any{"answer": map[string]any{"type": "string"}}}})
			if err != nil {
				return nil, nil, kindOf(err)
			}
			answers = append(answers, res.Content["answer"])
		}
		return answer(answers)
	})
	mcp.AddTool(server, &mcp.Tool{Name: "roots"}, func(ctx context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
		res, err := req.Session.ListRoots(ctx, nil)
		if err != nil {
			return nil, nil, kindOf(err)
		}
		return answer(len(res.Roots))
	})
	mcp.AddTool(server, &mcp.Tool{Name: "log"}, func(ctx context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
		return &mcp.CallToolResult{}, nil, req.Session.Log(ctx, &mcp.LoggingMessageParams{Level: "info", Data: "hello"})
	})
	mcp.AddTool(server, &mcp.Tool{Name: "log_later"}, func(_ context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
		return &mcp.CallToolResult{}, nil, req.Session.Log(context.Background(), &mcp.LoggingMessageParams{Level: "info", Data: "later"})
	})
	mcp.AddTool(server, &mcp.Tool{Name: "wait"}, func(ctx context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
		if token := req.Params.GetProgressToken(); token != nil {
			_ = req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: 1})
		}
		<-ctx.Done()
		return nil, nil, kindOf(context.Cause(ctx))
	})
	mcp.AddTool(server, &mcp.Tool{Name: "take"}, func(ctx context.Context, _ *mcp.CallToolRequest, in numberInput) (*mcp.CallToolResult, any, error) {
		done := time.NewTimer(time.Duration(in.By) * time.Second)
		defer done.Stop()
		select {
		case <-done.C:
			return answer("taken")
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	})
	mcp.AddTool(server, &mcp.Tool{Name: "set_then_wait"}, func(ctx context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
		if err := mcpserver.Set(ctx, "late", true); err != nil {
			return nil, nil, err
		}
		_ = req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: "p", Progress: 1})
		<-goOn
		return answer("done")
	})
	mcp.AddTool(server, &mcp.Tool{Name: "close_stream"}, func(_ context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
		req.Extra.CloseSSEStream(mcp.CloseSSEStreamArgs{RetryAfter: 10 * time.Millisecond})
		<-goOn
		return answer("done")
	})
	mcp.AddTool(server, &mcp.Tool{Name: "panic"}, func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
		panic("on purpose")
	})
	server.AddResource(&mcp.Resource{URI: "test://a", Name: "a"}, func(context.Context, *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
		return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: "test://a", Text: "a"}}}, nil
	})
	return server
}

// kindOf puts the kind of an error where a test can see it on the wire.
func kindOf(err error) error {
	for name, kind := range map[string]error{
		"NO_SESSION": mcpserver.ErrNoSession, "NO_STREAM": mcpserver.ErrNoStream, "NO_CAPABILITY": mcpserver.ErrNoCapability,
		"ASK_TIMEOUT": mcpserver.ErrAskTimeout, "NOT_REGAINED": mcpserver.ErrLockNotRegained, "EXPIRES": mcpserver.ErrLockExpires,
		"ENDED": mcpserver.ErrSessionEnded, "CANCELLED": mcpserver.ErrCancelled, "CONTEXT": context.Canceled,
	} {
		if errors.Is(err, kind) {
			return errors.New(name + ": " + err.Error())
		}
	}
	return err
}

func newReplicas(t *testing.T, n int, edit func(*mcpserver.Options)) *replicas {
	t.Helper()
	r := &replicas{t: t, store: newMemory(), logs: &logs{}}
	for range n {
		r.join(t, edit)
	}
	return r
}

// join starts one more replica.
func (r *replicas) join(t *testing.T, edit func(*mcpserver.Options)) {
	t.Helper()
	opts := &mcpserver.Options{Store: r.store, Logger: slog.New(slog.NewTextHandler(r.logs, nil))}
	if edit != nil {
		edit(opts)
	}
	heard := &subscribers{relays: map[string]int{}}
	server := testServer(heard)
	handler, err := mcpserver.NewHandler(func(*http.Request) *mcp.Server { return server }, opts)
	if err != nil {
		t.Fatal(err)
	}
	handler.Relay(server)
	r.mcp, r.heard = append(r.mcp, server), append(r.heard, heard)
	s := httptest.NewServer(handler)
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = handler.Shutdown(ctx)
		s.CloseClientConnections()
		s.Close()
	})
	r.servers, r.handlers = append(r.servers, s), append(r.handlers, handler)
}

func withLock(o *mcpserver.Options) { o.Locker, _ = o.Store.(mcpserver.Locker) }
func withJSON(o *mcpserver.Options) { o.JSON = true }

// answer is an HTTP answer, read to its end.
type answer struct {
	status   int
	header   http.Header
	body     string
	messages []map[string]any // the events' data, or the JSON body
}

// stream is an HTTP answer while it goes on.
type stream struct {
	t      testing.TB
	resp   *http.Response
	reader *bufio.Reader
}

// request sends to the next replica in turn.
func (r *replicas) request(method, session, body string, header ...string) *stream {
	r.t.Helper()
	r.next++
	return r.requestTo(r.next%len(r.servers), method, session, body, header...)
}

func (r *replicas) requestTo(replica int, method, session, body string, header ...string) *stream {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, r.servers[replica].URL, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Accept", "application/json, text/event-stream")
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
	}
	if session != "" {
		req.Header.Set("Mcp-Session-Id", session)
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		} else if header[i+1] == "" {
			req.Header.Del(header[i])
		} else {
			req.Header.Add(header[i], header[i+1])
		}
	}
	resp, err := r.servers[replica].Client().Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = resp.Body.Close() })
	return &stream{t: r.t, resp: resp, reader: bufio.NewReader(resp.Body)}
}

func (r *replicas) post(session, body string, header ...string) answer {
	r.t.Helper()
	return r.request(http.MethodPost, session, body, header...).all()
}

// event reads the next message of a stream, comments left out; nil at the end.
func (s *stream) event() map[string]any {
	s.t.Helper()
	for {
		line, err := s.reader.ReadString('\n')
		if err != nil {
			return nil
		}
		if data, ok := strings.CutPrefix(line, "data: "); ok && strings.TrimSpace(data) != "" {
			var m map[string]any
			if err := json.Unmarshal([]byte(data), &m); err != nil {
				s.t.Fatalf("event %q: %v", data, err)
			}
			return m
		}
	}
}

func (s *stream) all() answer {
	s.t.Helper()
	defer func() { _ = s.resp.Body.Close() }()
	a := answer{status: s.resp.StatusCode, header: s.resp.Header}
	body, err := io.ReadAll(s.reader)
	if err != nil {
		s.t.Fatal(err)
	}
	a.body = string(body)
	if strings.HasPrefix(a.header.Get("Content-Type"), "text/event-stream") {
		s.reader = bufio.NewReader(bytes.NewReader(body))
		for m := s.event(); m != nil; m = s.event() {
			a.messages = append(a.messages, m)
		}
	} else if strings.HasPrefix(a.body, "[") {
		_ = json.Unmarshal(body, &a.messages)
	} else if len(body) > 0 {
		var m map[string]any
		_ = json.Unmarshal(body, &m)
		a.messages = append(a.messages, m)
	}
	return a
}

// text is what a tool answered.
func text(m map[string]any) string {
	result, _ := m["result"].(map[string]any)
	content, _ := result["content"].([]any)
	if len(content) == 0 {
		data, _ := json.Marshal(m)
		return string(data)
	}
	first, _ := content[0].(map[string]any)
	s, _ := first["text"].(string)
	return s
}

const initializeBody = `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"REVISION","capabilities":CAPABILITIES,"clientInfo":{"name":"test","version":"1"}}}`

func initializeWith(revision, capabilities string) string {
	return strings.NewReplacer("REVISION", revision, "CAPABILITIES", capabilities).Replace(initializeBody)
}

// open opens a session of a client that can be asked anything.
func (r *replicas) open() string {
	r.t.Helper()
	return r.openWith("2025-11-25", `{"elicitation":{},"sampling":{},"roots":{"listChanged":true}}`)
}

func (r *replicas) openWith(revision, capabilities string, header ...string) string {
	r.t.Helper()
	a := r.post("", initializeWith(revision, capabilities), header...)
	if a.status != 200 || a.header.Get("Mcp-Session-Id") == "" {
		r.t.Fatalf("initialize: %d %s", a.status, a.body)
	}
	id := a.header.Get("Mcp-Session-Id")
	if a := r.post(id, `{"jsonrpc":"2.0","method":"notifications/initialized"}`, header...); a.status != 202 || a.body != "" {
		r.t.Fatalf("initialized: %d %q", a.status, a.body)
	}
	return id
}

func call(id, tool, arguments string) string {
	return `{"jsonrpc":"2.0","id":` + id + `,"method":"tools/call","params":{"name":"` + tool + `","arguments":` + arguments + `}}`
}

// proxyOver is a balancer over the replicas, in turn.
func proxyOver(t *testing.T, r *replicas, turn *int) string {
	t.Helper()
	var mu sync.Mutex
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		*turn++
		handler := r.handlers[*turn%len(r.handlers)]
		mu.Unlock()
		handler.ServeHTTP(w, req)
	}))
	t.Cleanup(s.Close)
	return s.URL
}
