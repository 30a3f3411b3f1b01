//go:build unix

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/sessiond/e2e/balancer"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// The clients that people have, each through strict round robin over three front-ends: what each can do of a session's
// life works (F1, F8-F13, F19). What a client cannot do stands here as its exception, and the test fails once it can.
func TestClients(t *testing.T) {
	c := sessiondtest.StartCluster(t, sessiondtest.ClusterConfig{FrontEndArgs: []string{"--everything", "--history", "1m"}})
	typeScript := []string{"basics", "ask", "sampling", "roots", "progress", "logging", "subscribe", "stream", "resume", "cancel", "delete"}

	t.Run("typescript 1", func(t *testing.T) {
		tap := startTap(t, c)
		checkScenarios(t, scenarios(t, tap.url, append([]string{"--sdk=1"}, typeScript...)...))
		tap.check(t, nil)
	})
	t.Run("typescript 2", func(t *testing.T) {
		tap := startTap(t, c)
		checkScenarios(t, scenarios(t, tap.url, append([]string{"--sdk=2"}, typeScript...)...))
		tap.check(t, nil)
	})
	t.Run("typescript 2, modern era", func(t *testing.T) {
		tap := startTap(t, c)
		checkScenarios(t, scenarios(t, tap.url, "--sdk=2", "modern"))
		// That the client ends its subscription it says also with a notification, which lacks the header that this revision
		// demands (Mcp-Method). The end of the stream is what counts.
		tap.checkBackEnds(t, "POST notifications/cancelled: 400")
	})
	t.Run("go-sdk", func(t *testing.T) {
		tap := startTap(t, c)
		runFeatures(t, tap, func(t *testing.T) *goClient { return connect(t, tap.url, handshakeEra) })
		t.Run("delete", func(t *testing.T) {
			if err := connect(t, tap.url, handshakeEra).Close(); err != nil {
				t.Error(err)
			}
			tap.await(t, "DELETE", "delete")
		})
		tap.check(t, nil)
	})
	t.Run("mcp-remote", func(t *testing.T) {
		tap := startTap(t, c)
		runFeatures(t, tap, func(t *testing.T) *goClient {
			s := &goClient{}
			s.open(t, &mcp.CommandTransport{
				Command: node(t.Context(), t, "node_modules/mcp-remote/dist/proxy.js", tap.url, "--transport", "http-only"),
			}, handshakeEra)
			return s
		})
		tap.check(t, map[string]string{"delete": "it ends without a word when its own client leaves, and the session ends with its TTL"},
			"GET : 400") // it asks for a stream before it has a session, to see what it talks to
	})
	t.Run("mcp-go", func(t *testing.T) {
		tap := startTap(t, c)
		checkScenarios(t, runMCPGo(t, tap.url))
		tap.check(t, nil)
	})
	t.Run("sizes", func(t *testing.T) { testSizes(t, c) })
	t.Run("inspector", func(t *testing.T) {
		tap := startTap(t, c)
		inspect := func(want string, args ...string) {
			t.Helper()
			code, stdout, stderr := runCommand(t, inspector(within(t, 2*patience), t, tap.url, append([]string{"--protocol-era", "legacy"}, args...)...))
			if code != 0 || !strings.Contains(stdout, want) {
				t.Errorf("inspector %v: exit code %d\n%s%s", args, code, stdout, stderr)
			}
		}
		inspect(`"counter_add"`, "--method", "tools/list")
		inspect(`"7"`, "--method", "tools/call", "--tool-name", "counter_add", "--tool-arg", "by=7")
		inspect(`"took 1 s"`, "--method", "tools/call", "--tool-name", "slow", "--tool-arg", "seconds=1")
		inspect(`{}`, "--method", "logging/setLevel", "--log-level", "debug")
		const oneShot = "its command-line mode makes one request, prints the result and is gone; it declares no capability"
		tap.check(t, map[string]string{
			"elicit": oneShot, "sample": oneShot, "roots": oneShot, "subscribe": oneShot, "resume": oneShot, "cancel": oneShot,
			"delete": oneShot,
		})
	})
}

// testSizes sends what is larger than one request to etcd may be, where it has to go through etcd: an answer to another
// front-end, and the events of a stream that can be resumed (M4, F11; C91). What is too large is refused, and leaves nothing.
func testSizes(t *testing.T, c *sessiondtest.Cluster) {
	ctx := within(t, patience)
	s := openRaw(t, c.URL)
	large := strings.Repeat("0123456789abcdef", 3<<20/16)
	ask, err := s.at(c.FrontEnds[0]).begin(ctx, http.MethodPost, callMessage("1", "ask", `{"questions":1}`))
	if err != nil {
		t.Fatal(err)
	}
	defer ask.close()
	question, err := ask.until("elicitation/create")
	if err != nil {
		t.Fatal(err)
	}
	asked := ask.id
	if status, body := s.at(c.FrontEnds[1]).post(t, fmt.Sprintf(
		`{"jsonrpc":"2.0","id":%s,"result":{"action":"accept","content":{"answer":%q}}}`, question.ID, large)); status != http.StatusAccepted {
		t.Fatalf("the answer: %d %.200s", status, body)
	}
	check := func(r *reply, what string) {
		t.Helper()
		m, err := r.until("")
		if err != nil || len(m.Result.Content) != 1 || m.Result.Content[0].Text != fmt.Sprintf("[%q]", large) {
			t.Errorf("%s: %v, %.200v", what, err, m)
		}
	}
	check(ask, "the result")
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, mcpURL(c.FrontEnds[2].Addr), http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "text/event-stream")
	req.Header.Set("Mcp-Session-Id", s.id)
	req.Header.Set("Last-Event-Id", asked)
	resp, err := rawClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resumed := newReply(resp)
	defer resumed.close()
	check(resumed, "the resumed stream")

	at := rawSession{url: mcpURL(c.FrontEnds[0].Addr)}
	for what, body := range map[string]string{
		"a body over the limit":                  callMessage("1", "echo", fmt.Sprintf(`{"text":%q}`, strings.Repeat("x", 5<<20))),
		"initialize that does not fit a session": strings.Replace(initializeMessage, `"elicitation":{}`, fmt.Sprintf(`"elicitation":{},"experimental":{"x":{"y":%q}}`, strings.Repeat("x", 2<<20)), 1),
	} {
		resp := at.send(ctx, t, http.MethodPost, body)
		answer, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusRequestEntityTooLarge || resp.Header.Get("Mcp-Session-Id") != "" {
			t.Errorf("%s: %s %.300s, %v", what, resp.Status, answer, err)
		}
	}
	if got := s.call(t, "1", "echo", `{"text":"x"}`); got != "x" {
		t.Errorf("the session afterwards: %q", got)
	}
}

func checkScenarios(t *testing.T, reports []report) {
	t.Helper()
	for _, r := range reports {
		t.Run(r.Scenario, func(t *testing.T) {
			r.check(t)
			switch r.Scenario {
			case "subscribe", "stream":
				if r.RaisedOn != nil && len(r.RaisedOn) != 3 {
					t.Errorf("what changed was raised on %v only", r.RaisedOn)
				}
			case "resume", "cancel":
				for _, hops := range r.Hops {
					if hops[0] == hops[1] {
						t.Errorf("ran, and was resumed or cancelled, on %s", hops[0])
					}
				}
			}
		})
	}
}

// runMCPGo builds and runs the program in the folder mcpgo, which has a module of its own.
func runMCPGo(t *testing.T, url string) []report {
	t.Helper()
	program := filepath.Join(t.TempDir(), "mcpgo")
	build := exec.CommandContext(within(t, 5*time.Minute), "go", "build", "-o", program, ".")
	build.Dir = "mcpgo"
	if code, stdout, stderr := runCommand(t, build); code != 0 {
		t.Fatalf("go build in sessiond/e2e/mcpgo: exit code %d\n%s%s", code, stdout, stderr)
	}
	code, stdout, stderr := runCommand(t, exec.CommandContext(within(t, 5*time.Minute), program, "--url", url))
	var reports []report
	for line := range strings.Lines(stdout) {
		var r report
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%v\n%s%s", err, stdout, stderr)
		}
		reports = append(reports, r)
	}
	if len(reports) == 0 || stderr != "" {
		t.Errorf("exit code %d, %d reports\n%s", code, len(reports), stderr)
	}
	return reports
}

// runFeatures shows the features with a client of the go-sdk, or one that it talks through.
func runFeatures(t *testing.T, tap *tap, open func(*testing.T) *goClient) {
	const uri = "test://watched-resource"
	t.Run("elicit, sample, roots", func(t *testing.T) {
		s := open(t)
		for i := 1; i <= 10; i++ {
			if got := s.mustCall(t, "counter_add", map[string]any{"by": 2}); got != strconv.Itoa(2*i) {
				t.Fatalf("call %d: total %s, want %d", i, got, 2*i)
			}
		}
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
	t.Run("list, logging", func(t *testing.T) {
		s := open(t)
		tools, err := s.ListTools(within(t, patience), nil)
		if err != nil || !slices.ContainsFunc(tools.Tools, func(tool *mcp.Tool) bool { return tool.Name == "counter_add" }) {
			t.Errorf("tools/list: %+v, %v", tools, err)
		}
		for _, level := range []struct {
			name string
			want int
		}{{"debug", 3}, {"emergency", 3}, {"debug", 6}} {
			if err := s.SetLoggingLevel(within(t, patience), &mcp.SetLoggingLevelParams{Level: mcp.LoggingLevel(level.name)}); err != nil {
				t.Fatal(err)
			}
			s.mustCall(t, "say", map[string]any{"count": 3, "interval_ms": 1})
			s.await(t, fmt.Sprint(level.want, " log messages"), func() bool { return len(s.logs) == level.want })
		}
	})
	t.Run("subscribe, stream", func(t *testing.T) {
		s := open(t)
		if err := s.Subscribe(within(t, patience), &mcp.SubscribeParams{URI: uri}); err != nil {
			t.Fatal(err)
		}
		tap.await(t, "a standalone stream", "stream")
		// Each call is on another front-end.
		for i := 1; i <= 3; i++ {
			s.mustCall(t, "test_update_resource", map[string]any{"uri": uri})
			s.await(t, fmt.Sprint(i, " updates"), func() bool { return s.updated == i })
		}
		if err := s.Unsubscribe(within(t, patience), &mcp.UnsubscribeParams{URI: uri}); err != nil {
			t.Fatal(err)
		}
		s.mustCall(t, "test_update_resource", map[string]any{"uri": uri})
		for i := 1; i <= 3; i++ {
			before := s.counts(&s.changed)
			s.mustCall(t, "test_trigger_tool_change", nil)
			s.await(t, "told of a change", func() bool { return s.changed > before })
		}
		if n := s.counts(&s.updated); n != 3 {
			t.Errorf("told of %d updates, want 3", n)
		}
	})
	// All connections break in the middle of a call, after the first notification; the client resumes, on another front-end.
	t.Run("progress, resume", func(t *testing.T) {
		s := open(t)
		s.onProgress = func(progress float64) {
			if progress == 1 {
				tap.link.Cut()
				if err := tap.link.Restore(); err != nil {
					t.Error(err)
				}
			}
		}
		if got := s.mustCall(t, "slow", map[string]any{"seconds": 3}); got != "took 3 s" {
			t.Errorf("slow: %q", got)
		}
		s.await(t, "progress 1, 2, 3", func() bool { return slices.Equal(s.progress, []float64{1, 2, 3}) })
	})
	t.Run("cancel", func(t *testing.T) {
		s := open(t)
		ctx, cancel := context.WithCancel(within(t, patience))
		s.onProgress = func(float64) { cancel() }
		if got, err := s.call(ctx, "test_wait", map[string]any{"name": t.Name()}); err == nil {
			t.Errorf("the cancelled call brought %q", got)
		}
		// The front-end that ran the handler knows; each call meets another one.
		ends := map[string]struct{ Cause string }{}
		if err := sessiondtest.Poll(within(t, patience), func(context.Context) error {
			if err := json.Unmarshal([]byte(s.mustCall(t, "test_waits", nil)), &ends); err != nil {
				return err
			}
			if ends[t.Name()].Cause == "" {
				return errors.New("the handler has not ended")
			}
			return nil
		}); err != nil || ends[t.Name()].Cause != context.Canceled.Error() {
			t.Errorf("the handler ended because of %q, %v", ends[t.Name()].Cause, err)
		}
	})
}

// counts reads a counter of notifications.
func (c *goClient) counts(n *int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return *n
}

// await waits until what the client was told is as it should be.
func (c *goClient) await(t *testing.T, what string, is func() bool) {
	t.Helper()
	if err := sessiondtest.Poll(within(t, patience), func(context.Context) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !is() {
			return fmt.Errorf("%d updates, %d changes, %d log messages, progress %v", c.updated, c.changed, len(c.logs), c.progress)
		}
		return nil
	}); err != nil {
		t.Fatalf("in vain: %s: %v", what, err)
	}
}

// A tap is a balancer over a cluster's front-ends, for one client, that notes what passes. Its link can be cut.
type tap struct {
	url  string
	link *sessiondtest.Link

	mu   sync.Mutex
	seen []passed
}

// passed is an exchange. Its status is 0 until the answer begins.
type passed struct {
	method, rpcMethod string
	answer, resumes   bool
	status            int
	servedBy          string
}

func startTap(t *testing.T, c *sessiondtest.Cluster) *tap {
	t.Helper()
	var addrs []string
	for _, fe := range c.FrontEnds {
		addrs = append(addrs, fe.Addr)
	}
	b, err := balancer.New(addrs, balancer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	p := &tap{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the client has gone
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		var m rpcMessage
		_ = json.Unmarshal(body, &m) // whatever else it is has no method
		p.mu.Lock()
		n := len(p.seen)
		p.seen = append(p.seen, passed{
			method: r.Method, rpcMethod: m.Method, answer: m.Method == "" && len(m.ID) > 0, resumes: r.Header.Get("Last-Event-Id") != "",
		})
		p.mu.Unlock()
		b.ServeHTTP(&tapWriter{ResponseWriter: w, began: func(status int) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.seen[n].status, p.seen[n].servedBy = status, w.Header().Get(balancer.ServedBy)
		}}, r)
	}))
	t.Cleanup(s.Close)
	t.Cleanup(s.CloseClientConnections)
	p.link = sessiondtest.StartLink(t, s.Listener.Addr().String())
	p.url = mcpURL(p.link.Addr())
	return p
}

type tapWriter struct {
	http.ResponseWriter

	began func(status int)
}

func (w *tapWriter) WriteHeader(status int) {
	w.began(status)
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController, which flushes.
func (w *tapWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// features are what a client can do, with what shows on the wire that it did.
var features = map[string]func(passed) bool{
	"connect":   func(p passed) bool { return p.rpcMethod == "initialize" && p.status == http.StatusOK },
	"list":      func(p passed) bool { return p.rpcMethod == "tools/list" && p.status == http.StatusOK },
	"call":      func(p passed) bool { return p.rpcMethod == "tools/call" && p.status == http.StatusOK },
	"elicit":    func(p passed) bool { return p.answer && p.status == http.StatusAccepted },
	"sample":    func(p passed) bool { return p.answer && p.status == http.StatusAccepted },
	"roots":     func(p passed) bool { return p.answer && p.status == http.StatusAccepted },
	"logging":   func(p passed) bool { return p.rpcMethod == "logging/setLevel" && p.status == http.StatusOK },
	"subscribe": func(p passed) bool { return p.rpcMethod == "resources/subscribe" && p.status == http.StatusOK },
	"stream":    func(p passed) bool { return p.method == http.MethodGet && !p.resumes && p.status == http.StatusOK },
	"resume":    func(p passed) bool { return p.method == http.MethodGet && p.resumes && p.status == http.StatusOK },
	"cancel": func(p passed) bool {
		return p.rpcMethod == "notifications/cancelled" && p.status == http.StatusAccepted
	},
	"delete": func(p passed) bool { return p.method == http.MethodDelete && p.status/100 == 2 },
}

// shown tells whether a feature has shown.
func (p *tap) shown(feature string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.seen, features[feature])
}

func (p *tap) await(t *testing.T, what, feature string) {
	t.Helper()
	if err := sessiondtest.Poll(within(t, patience), func(context.Context) error {
		if !p.shown(feature) {
			return errors.New("not yet")
		}
		return nil
	}); err != nil {
		t.Errorf("in vain: %s", what)
	}
}

// check fails the test unless all features have shown, but those that the client does not have.
func (p *tap) check(t *testing.T, cannot map[string]string, known ...string) {
	t.Helper()
	for _, feature := range slices.Sorted(maps.Keys(features)) {
		why, not := cannot[feature]
		switch shown := p.shown(feature); {
		case not && shown:
			t.Errorf("%s: the client can do it after all; it was said that %s", feature, why)
		case not:
			t.Logf("%s: not shown, for %s", feature, why)
		case !shown:
			t.Errorf("%s: did not show on the wire", feature)
		}
	}
	p.checkBackEnds(t, known...)
}

// checkBackEnds fails the test unless all front-ends took part, and if anything was refused but what came after the end of a
// session, and what is known.
func (p *tap) checkBackEnds(t *testing.T, known ...string) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	served, refused := map[string]int{}, map[string]int{}
	for _, x := range p.seen {
		if x.servedBy != "" {
			served[x.servedBy]++
		}
		if x.status >= 400 {
			refused[fmt.Sprintf("%s %s: %d", x.method, x.rpcMethod, x.status)]++
		}
	}
	t.Logf("%d requests, served by %v, refused: %v", len(p.seen), served, refused)
	if len(served) != 3 {
		t.Errorf("served by %v, want three front-ends", served)
	}
	for what := range refused {
		if !strings.HasSuffix(what, ": 404") && !slices.Contains(known, what) {
			t.Errorf("refused: %s", what)
		}
	}
}
