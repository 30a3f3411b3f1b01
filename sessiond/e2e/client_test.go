//go:build unix

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// The handshake era's newest revision, and the one without sessions.
const (
	handshakeEra = "2025-11-25"
	modernEra    = "2026-07-28"
)

// A goClient is a client of the go-sdk that can be asked everything.
type goClient struct {
	*mcp.ClientSession
	wire recorder
	logs chan string // data of log messages

	onProgress func(progress float64) // set before the call

	mu               sync.Mutex
	progress         []float64
	updated, changed int // notifications of resources and of the list of tools
}

// connect opens a session with the go-sdk's own client.
func connect(t *testing.T, url, revision string) *goClient {
	t.Helper()
	c := &goClient{}
	c.open(t, &mcp.StreamableClientTransport{Endpoint: url, HTTPClient: &http.Client{Transport: &c.wire}}, revision)
	return c
}

func (c *goClient) open(t *testing.T, transport mcp.Transport, revision string) {
	t.Helper()
	c.logs = make(chan string, 100)
	var asked atomic.Int64
	client := mcp.NewClient(&mcp.Implementation{Name: "sessiond-e2e", Version: "1.0.0"}, &mcp.ClientOptions{
		Capabilities: &mcp.ClientCapabilities{RootsV2: &mcp.RootCapabilities{ListChanged: true}},
		ElicitationHandler: func(context.Context, *mcp.ElicitRequest) (*mcp.ElicitResult, error) {
			answer := fmt.Sprintf("answer %d", asked.Add(1))
			return &mcp.ElicitResult{Action: "accept", Content: map[string]any{"answer": answer}}, nil
		},
		CreateMessageHandler: func(_ context.Context, r *mcp.CreateMessageRequest) (*mcp.CreateMessageResult, error) {
			prompt, ok := r.Params.Messages[0].Content.(*mcp.TextContent)
			if !ok {
				return nil, errors.New("the prompt is not text")
			}
			return &mcp.CreateMessageResult{Model: "e2e", Role: "assistant", Content: &mcp.TextContent{Text: "sampled: " + prompt.Text}}, nil
		},
		LoggingMessageHandler: func(_ context.Context, r *mcp.LoggingMessageRequest) { c.logs <- fmt.Sprint(r.Params.Data) },
		ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
			if c.onProgress != nil {
				c.onProgress(r.Params.Progress)
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			c.progress = append(c.progress, r.Params.Progress)
		},
		ResourceUpdatedHandler: func(context.Context, *mcp.ResourceUpdatedNotificationRequest) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.updated++
		},
		ToolListChangedHandler: func(context.Context, *mcp.ToolListChangedRequest) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.changed++
		},
	})
	client.AddRoots(&mcp.Root{URI: "file:///e2e/root", Name: "e2e"})
	s, err := client.Connect(within(t, patience), transport, &mcp.ClientSessionOptions{ProtocolVersion: revision})
	if err != nil {
		t.Fatal(err)
	}
	c.ClientSession = s
	t.Cleanup(func() { _ = s.Close() }) // closed by some tests already
}

func (c *goClient) call(ctx context.Context, tool string, args map[string]any) (string, error) {
	params := &mcp.CallToolParams{Name: tool, Arguments: args}
	params.SetProgressToken(tool)
	result, err := c.CallTool(ctx, params)
	if err != nil {
		return "", err
	}
	if len(result.Content) != 1 {
		return "", fmt.Errorf("%s: %d contents", tool, len(result.Content))
	}
	text, ok := result.Content[0].(*mcp.TextContent)
	if !ok {
		return "", fmt.Errorf("%s: the result is not text", tool)
	}
	if result.IsError {
		return "", fmt.Errorf("%s: %s", tool, text.Text)
	}
	return text.Text, nil
}

func (c *goClient) mustCall(t *testing.T, tool string, args map[string]any) string {
	t.Helper()
	text, err := c.call(within(t, patience), tool, args)
	if err != nil {
		t.Fatalf("%s: %v", tool, err)
	}
	return text
}

// testGoClient runs the main scenarios with the client of the SDK that the front-end itself is built on.
func testGoClient(t *testing.T, c *sessiondtest.Cluster) {
	t.Run("session", func(t *testing.T) {
		s := connect(t, c.URL, handshakeEra)
		if s.ID() == "" || s.InitializeResult().ProtocolVersion != handshakeEra {
			t.Fatalf("session %q, revision %s", s.ID(), s.InitializeResult().ProtocolVersion)
		}
		tools, err := s.ListTools(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(tools.Tools, func(tool *mcp.Tool) bool { return tool.Name == "counter_add" }) {
			t.Error("tools/list lacks counter_add")
		}
		for i := 1; i <= 30; i++ {
			if got := s.mustCall(t, "counter_add", map[string]any{"by": 2}); got != strconv.Itoa(2*i) {
				t.Fatalf("call %d: total %s, want %d", i, got, 2*i)
			}
		}
		if n := s.wire.backends(); n != len(c.FrontEnds) {
			t.Errorf("served by %d back-ends, want %d: %v", n, len(c.FrontEnds), s.wire.served)
		}
	})

	t.Run("ask", func(t *testing.T) {
		s := connect(t, c.URL, handshakeEra)
		if got, want := s.mustCall(t, "ask", map[string]any{"questions": 3}), `["answer 1","answer 2","answer 3"]`; compact(t, got) != want {
			t.Errorf("ask: %s, want %s", got, want)
		}
		if got := s.mustCall(t, "sample", map[string]any{"prompt": "x"}); got != "sampled: x" {
			t.Errorf("sample: %s", got)
		}
		if got := s.mustCall(t, "roots", nil); !strings.Contains(got, "file:///e2e/root") {
			t.Errorf("roots: %s", got)
		}
	})

	t.Run("notifications", func(t *testing.T) {
		s := connect(t, c.URL, handshakeEra)
		s.mustCall(t, "slow", map[string]any{"seconds": 2})
		// This SDK hands on notifications beside the result.
		if err := sessiondtest.Poll(within(t, patience), func(context.Context) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if !slices.Equal(s.progress, []float64{1, 2}) {
				return fmt.Errorf("progress %v, want 1 and 2", s.progress)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		if err := s.SetLoggingLevel(t.Context(), &mcp.SetLoggingLevelParams{Level: "debug"}); err != nil {
			t.Fatal(err)
		}
		s.mustCall(t, "say", map[string]any{"count": 3, "interval_ms": 1})
		for range 3 {
			select {
			case <-s.logs:
			case <-within(t, patience).Done():
				t.Fatal("a log message is missing")
			}
		}
	})

	// Values that are set at the same time all stay, with the lock and without it (F3).
	t.Run("parallel", func(t *testing.T) {
		s := connect(t, c.URL, handshakeEra)
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				if _, err := s.call(within(t, patience), "note_set", map[string]any{"key": strconv.Itoa(i), "value": "set"}); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		var notes map[string]string
		if err := json.Unmarshal([]byte(s.mustCall(t, "notes_list", nil)), &notes); err != nil || len(notes) != 50 {
			t.Errorf("%d notes, %v; want 50", len(notes), err)
		}
	})

	// Close sends DELETE; afterwards the session is gone on every front-end (F13).
	t.Run("delete", func(t *testing.T) {
		s := connect(t, c.URL, handshakeEra)
		s.mustCall(t, "echo", map[string]any{"text": "x"})
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		gone := rawSession{url: c.URL, id: s.ID()}
		for range len(c.FrontEnds) {
			if status, body := gone.post(t, `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`); status != http.StatusNotFound {
				t.Errorf("after DELETE: %d %s", status, body)
			}
		}
	})

	// One URL serves clients of all revisions (N2, F18).
	for _, revision := range []string{modernEra, "2025-06-18", "2025-03-26", "2024-11-05"} {
		t.Run("revision "+revision, func(t *testing.T) {
			s := connect(t, c.URL, revision)
			if got := s.InitializeResult().ProtocolVersion; got != revision {
				t.Errorf("revision %s, want %s", got, revision)
			}
			if modern := revision == modernEra; (s.ID() == "") != modern {
				t.Errorf("session id %q", s.ID())
			}
			for i := range 4 {
				if got := s.mustCall(t, "echo", map[string]any{"text": strconv.Itoa(i)}); got != strconv.Itoa(i) {
					t.Errorf("echo: %s", got)
				}
			}
		})
	}
}

func compact(t *testing.T, text string) string {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
