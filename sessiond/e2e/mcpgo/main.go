// Command mcpgo drives an MCP server with the client of github.com/mark3labs/mcp-go and reports each feature as one line of
// JSON, in the form of the TypeScript driver's reports. The exit code is 1 if a feature failed.
//
//	mcpgo --url http://127.0.0.1:8080/mcp
//
// It is a program in a module of its own because a test-only requirement of the main module would still be part of what its
// importers resolve.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mark3labs/mcp-go/client"
	"github.com/mark3labs/mcp-go/client/transport"
	"github.com/mark3labs/mcp-go/mcp"
)

const patience = 30 * time.Second

func main() {
	url := flag.String("url", "", "the server's `URL`")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	defer cancel()
	os.Exit(run(ctx, *url, os.Stdout))
}

// A report is a line of output.
type report struct {
	Scenario string `json:"scenario"`
	OK       bool   `json:"ok"`
	Error    string `json:"error,omitempty"`
	TookMS   int64  `json:"took_ms"`
	// Served says how many requests each back-end served.
	Served map[string]int `json:"served"`
}

func run(ctx context.Context, url string, out io.Writer) int {
	code := 0
	for _, f := range []struct {
		name string
		run  func(context.Context, *session) error
	}{
		{"connect", connected}, {"list", list}, {"call", call}, {"elicit", elicit}, {"sample", sample}, {"roots", roots},
		{"progress", progress}, {"logging", logging}, {"subscribe", subscribe}, {"stream", stream}, {"resume", resume},
		{"cancel", cancelled}, {"delete", deleted},
	} {
		r := report{Scenario: f.name}
		begin := time.Now()
		s, err := open(ctx, url)
		if err == nil {
			err = errors.Join(f.run(ctx, s), s.Close())
			r.Served = s.wire.counts()
		}
		if r.OK = err == nil; !r.OK {
			r.Error, code = err.Error(), 1
		}
		r.TookMS = time.Since(begin).Milliseconds()
		line, err := json.Marshal(r)
		if err != nil {
			r.Error = err.Error()
		}
		fmt.Fprintf(out, "%s\n", line)
	}
	return code
}

// session is a connected client, and what it was told.
type session struct {
	*client.Client

	wire  *wire
	url   string
	asked int

	mu    sync.Mutex
	notes []mcp.JSONRPCNotification
}

// wire looks at what goes over HTTP.
type wire struct {
	mu     sync.Mutex
	served map[string]int
	// calls are the JSON-RPC ids of tools/call, in order.
	calls   []json.RawMessage
	resumed int
	gets    int // standalone streams that were opened
}

func (w *wire) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body != nil {
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return nil, err
		}
		req.Body = io.NopCloser(bytes.NewReader(body))
		var m struct {
			ID     json.RawMessage
			Method string
		}
		if json.Unmarshal(body, &m) == nil && m.Method == "tools/call" {
			w.mu.Lock()
			w.calls = append(w.calls, m.ID)
			w.mu.Unlock()
		}
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.served[resp.Header.Get("X-Served-By")]++
	switch {
	case req.Method != http.MethodGet || resp.StatusCode != http.StatusOK:
	case req.Header.Get("Last-Event-Id") != "":
		w.resumed++
	default:
		w.gets++
	}
	return resp, nil
}

func (w *wire) counts() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.served)
}

// Elicit answers the server's question.
func (s *session) Elicit(context.Context, mcp.ElicitationRequest) (*mcp.ElicitationResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	return &mcp.ElicitationResult{ElicitationResponse: mcp.ElicitationResponse{
		Action: mcp.ElicitationResponseActionAccept, Content: map[string]any{"answer": fmt.Sprint("answer ", s.asked)},
	}}, nil
}

// CreateMessage answers in the model's place.
func (s *session) CreateMessage(_ context.Context, req mcp.CreateMessageRequest) (*mcp.CreateMessageResult, error) {
	prompt := fmt.Sprint(req.Messages[0].Content)
	if content, ok := req.Messages[0].Content.(mcp.TextContent); ok {
		prompt = content.Text
	} else if content, ok := req.Messages[0].Content.(map[string]any); ok {
		prompt = fmt.Sprint(content["text"])
	}
	return &mcp.CreateMessageResult{Model: "e2e", SamplingMessage: mcp.SamplingMessage{
		Role: mcp.RoleAssistant, Content: mcp.TextContent{Type: "text", Text: "sampled: " + prompt},
	}}, nil
}

// ListRoots answers the client's roots.
func (s *session) ListRoots(context.Context, mcp.ListRootsRequest) (*mcp.ListRootsResult, error) {
	return &mcp.ListRootsResult{Roots: []mcp.Root{{URI: "file:///e2e/root", Name: "e2e"}}}, nil
}

// open opens a session with a standalone stream.
func open(ctx context.Context, url string) (*session, error) {
	s := &session{wire: &wire{served: map[string]int{}}, url: url}
	t, err := transport.NewStreamableHTTP(url,
		transport.WithContinuousListening(), transport.WithHTTPBasicClient(&http.Client{Transport: s.wire}),
		transport.WithHTTPLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return nil, err
	}
	s.Client = client.NewClient(t, client.WithElicitationHandler(s), client.WithSamplingHandler(s), client.WithRootsHandler(s),
		client.WithLegacyProtocolOnly())
	s.OnNotification(func(n mcp.JSONRPCNotification) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.notes = append(s.notes, n)
	})
	if err := s.Start(ctx); err != nil {
		return nil, err
	}
	req := mcp.InitializeRequest{}
	req.Params.ProtocolVersion = "2025-11-25"
	req.Params.ClientInfo = mcp.Implementation{Name: "sessiond-e2e-mcp-go", Version: "1"}
	if _, err := s.Initialize(ctx, req); err != nil {
		return nil, err
	}
	return s, s.until(ctx, "a standalone stream", func() bool {
		s.wire.mu.Lock()
		defer s.wire.mu.Unlock()
		return s.wire.gets > 0
	})
}

// until waits until something is so.
func (s *session) until(ctx context.Context, what string, is func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("in vain: %s; notifications: %+v", what, s.told(""))
		}
	}
	return nil
}

// told are the notifications of a method so far ("": all).
func (s *session) told(method string) []mcp.JSONRPCNotification {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []mcp.JSONRPCNotification
	for _, n := range s.notes {
		if method == "" || n.Method == method {
			out = append(out, n)
		}
	}
	return out
}

// tool calls a tool, with a progress token, and gives the text of its result.
func (s *session) tool(ctx context.Context, name string, args map[string]any) (string, error) {
	req := mcp.CallToolRequest{}
	req.Params.Name, req.Params.Arguments = name, args
	req.Params.Meta = &mcp.Meta{ProgressToken: name}
	res, err := s.CallTool(ctx, req)
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	if len(res.Content) != 1 {
		return "", fmt.Errorf("%s: %d contents", name, len(res.Content))
	}
	text, ok := res.Content[0].(mcp.TextContent)
	if !ok || res.IsError {
		return "", fmt.Errorf("%s: %+v", name, res.Content[0])
	}
	return text.Text, nil
}

// expect calls a tool that is to answer a text.
func (s *session) expect(ctx context.Context, want, name string, args map[string]any) error {
	got, err := s.tool(ctx, name, args)
	if err == nil && got != want {
		err = fmt.Errorf("%s answered %q, want %q", name, got, want)
	}
	return err
}

func connected(ctx context.Context, s *session) error {
	if s.GetSessionId() == "" {
		return errors.New("no session id")
	}
	return s.Ping(ctx)
}

func list(ctx context.Context, s *session) error {
	tools, err := s.ListTools(ctx, mcp.ListToolsRequest{})
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(tools.Tools, func(t mcp.Tool) bool { return t.Name == "counter_add" }) {
		return errors.New("tools/list lacks counter_add")
	}
	resources, err := s.ListResources(ctx, mcp.ListResourcesRequest{})
	if err == nil && len(resources.Resources) == 0 {
		err = errors.New("resources/list is empty")
	}
	return err
}

func call(ctx context.Context, s *session) error {
	for i := 1; i <= 20; i++ {
		if err := s.expect(ctx, strconv.Itoa(2*i), "counter_add", map[string]any{"by": 2}); err != nil {
			return err
		}
	}
	return nil
}

func elicit(ctx context.Context, s *session) error {
	return s.expect(ctx, `["answer 1","answer 2","answer 3"]`, "ask", map[string]any{"questions": 3})
}

func sample(ctx context.Context, s *session) error {
	return s.expect(ctx, "sampled: x", "sample", map[string]any{"prompt": "x"})
}

func roots(ctx context.Context, s *session) error {
	return s.expect(ctx, `["file:///e2e/root"]`, "roots", nil)
}

func progress(ctx context.Context, s *session) error {
	if err := s.expect(ctx, "took 2 s", "slow", map[string]any{"seconds": 2}); err != nil {
		return err
	}
	// Notifications are handed on beside the result.
	return s.until(ctx, "two notifications of progress", func() bool { return len(s.told("notifications/progress")) == 2 })
}

func logging(ctx context.Context, s *session) error {
	for _, level := range []struct {
		level mcp.LoggingLevel
		count int
	}{{mcp.LoggingLevelDebug, 3}, {mcp.LoggingLevelEmergency, 3}, {mcp.LoggingLevelDebug, 6}} {
		req := mcp.SetLevelRequest{}
		req.Params.Level = level.level
		if err := s.SetLevel(ctx, req); err != nil {
			return err
		}
		if _, err := s.tool(ctx, "say", map[string]any{"count": 3, "interval_ms": 1}); err != nil {
			return err
		}
		if err := s.until(ctx, fmt.Sprint(level.count, " log messages"), func() bool { return len(s.told("notifications/message")) == level.count }); err != nil {
			return err
		}
	}
	return nil
}

const uri = "test://watched-resource"

func subscribe(ctx context.Context, s *session) error {
	req := mcp.SubscribeRequest{}
	req.Params.URI = uri
	if err := s.Subscribe(ctx, req); err != nil {
		return err
	}
	// Each call meets another front-end.
	for i := 1; i <= 3; i++ {
		if err := s.expect(ctx, "updated", "test_update_resource", map[string]any{"uri": uri}); err != nil {
			return err
		}
		if err := s.until(ctx, fmt.Sprint(i, " updates"), func() bool { return len(s.told("notifications/resources/updated")) == i }); err != nil {
			return err
		}
	}
	stop := mcp.UnsubscribeRequest{}
	stop.Params.URI = uri
	if err := s.Unsubscribe(ctx, stop); err != nil {
		return err
	}
	if err := s.expect(ctx, "updated", "test_update_resource", map[string]any{"uri": uri}); err != nil {
		return err
	}
	if err := stream(ctx, s); err != nil { // told later than the update would have been
		return err
	}
	if n := len(s.told("notifications/resources/updated")); n != 3 {
		return fmt.Errorf("%d updates, want 3", n)
	}
	return nil
}

func stream(ctx context.Context, s *session) error {
	const changed = "notifications/tools/list_changed"
	for range 3 {
		before := len(s.told(changed))
		if err := s.expect(ctx, "changed", "test_trigger_tool_change", nil); err != nil {
			return err
		}
		if err := s.until(ctx, "told of the change", func() bool { return len(s.told(changed)) > before }); err != nil {
			return err
		}
	}
	return nil
}

// resume: this client resumes a stream that the server ends before the answer, not one that breaks off.
func resume(ctx context.Context, s *session) error {
	if err := s.expect(ctx, "answered after the stream was closed", "test_reconnection", nil); err != nil {
		return err
	}
	if s.wire.resumed == 0 {
		return errors.New("the stream was not resumed")
	}
	return nil
}

// cancelled: over HTTP this client does not tell the server by itself that a call's context has ended. Its transport sends
// what the application says.
func cancelled(ctx context.Context, s *session) error {
	name := "mcp-go " + s.GetSessionId()
	waiting, giveUp := context.WithCancel(ctx)
	defer giveUp()
	ended := make(chan error, 1)
	go func() {
		_, err := s.tool(waiting, "test_wait", map[string]any{"name": name})
		ended <- err
	}()
	if err := s.until(ctx, "the call runs", func() bool { return len(s.told("notifications/progress")) > 0 }); err != nil {
		return err
	}
	s.wire.mu.Lock()
	id := s.wire.calls[len(s.wire.calls)-1]
	s.wire.mu.Unlock()
	err := s.GetTransport().SendNotification(ctx, mcp.JSONRPCNotification{JSONRPC: mcp.JSONRPC_VERSION, Notification: mcp.Notification{
		Method: "notifications/cancelled", Params: mcp.NotificationParams{AdditionalFields: map[string]any{"requestId": id}},
	}})
	if err != nil {
		return err
	}
	// Each call meets another front-end; the one that ran the handler knows.
	var ends map[string]struct{ Cause string }
	err = s.until(ctx, "the handler's end", func() bool {
		text, err := s.tool(ctx, "test_waits", nil)
		return err == nil && json.Unmarshal([]byte(text), &ends) == nil && ends[name].Cause != ""
	})
	if err == nil && ends[name].Cause != "context canceled" {
		err = fmt.Errorf("the handler ended because of %q", ends[name].Cause)
	}
	giveUp()
	if cerr := <-ended; cerr == nil {
		err = errors.Join(err, errors.New("the cancelled call has a result"))
	}
	return err
}

// deleted: Close sends DELETE. Afterwards the session is gone on every front-end.
func deleted(ctx context.Context, s *session) error {
	id := s.GetSessionId()
	if err := s.Close(); err != nil {
		return err
	}
	for range 3 {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "application/json, text/event-stream")
		req.Header.Set("Mcp-Session-Id", id)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusNotFound {
			return fmt.Errorf("after DELETE: %s", resp.Status)
		}
	}
	return nil
}
