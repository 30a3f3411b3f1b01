//go:build unix

package e2e

import (
	"context"
	"io"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// One process with everything inside, stopped and started again: the same session goes on, with the same client. Also
// when it did not get to say goodbye (O1).
func TestSingleProcessComesBack(t *testing.T) {
	for _, lock := range []bool{false, true} {
		t.Run("lock "+strconv.FormatBool(lock), func(t *testing.T) {
			s := startSingle(t, "--lock="+strconv.FormatBool(lock))
			ts := startSteps(t, mcpURL(s.Addr))
			raw := openRaw(t, mcpURL(s.Addr))
			total := 0
			add := func() {
				t.Helper()
				total++
				if got, err := ts.call("counter_add", map[string]any{"by": 1}); err != nil || got != strconv.Itoa(total) {
					t.Fatalf("TypeScript client: total %s, %v; want %d", got, err, total)
				}
				if got := raw.call(t, "1", "counter_add", `{"by":1}`); got != strconv.Itoa(total) {
					t.Fatalf("raw client: total %s, want %d", got, total)
				}
			}
			add()
			if err := s.Terminate(t.Context()); err != nil {
				t.Fatal(err)
			}
			if state, _ := s.Exit(); state.ExitCode() != 0 {
				t.Errorf("after SIGTERM: %s", state)
			}
			for _, how := range []string{"stopped", "killed"} {
				if err := s.Restart(t.Context()); err != nil {
					t.Fatalf("%s, and not started again: %v", how, err)
				}
				add()
				add()
				if err := s.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// SIGTERM ends each program with exit code 0 (F20).
func TestTerminatedProgramsEndWell(t *testing.T) {
	c := sessiondtest.StartCluster(t, sessiondtest.ClusterConfig{Members: 1, Nodes: 2, FrontEnds: 2})
	connect(t, c.URL, handshakeEra) // with a standalone stream, which must not hold them up
	for _, s := range []*sessiondtest.Server{c.FrontEnds[0], c.FrontEnds[1], c.Nodes[0], c.Nodes[1]} {
		if err := s.Terminate(t.Context()); err != nil {
			t.Error(err)
		}
		if state, _ := s.Exit(); state.ExitCode() != 0 {
			t.Errorf("%s after SIGTERM: %s", s.Name(), state)
		}
	}
}

// A front-end that is told to stop lets a running call finish, and its answer arrives (F20).
func TestTerminatedFrontEndAnswersWhatRuns(t *testing.T) {
	for _, args := range [][]string{{"--lock=false"}, {"--lock"}, {"--json"}} {
		t.Run(args[0], func(t *testing.T) {
			s := startSingle(t, args...)
			raw := openRaw(t, mcpURL(s.Addr))
			running := raw.send(within(t, patience), t, http.MethodPost,
				`{"jsonrpc":"2.0","id":"slow","method":"tools/call","params":{"name":"slow","arguments":{"seconds":2.5},"_meta":{"progressToken":"p"}}}`)
			defer func() { _ = running.Body.Close() }()
			first := make([]byte, 1)
			if _, err := running.Body.Read(first); err != nil {
				t.Fatal(err)
			}
			stopped := make(chan error, 1)
			go func() { stopped <- s.Terminate(context.WithoutCancel(t.Context())) }()
			rest, err := io.ReadAll(running.Body)
			if err != nil || !strings.Contains(string(rest), `"took`) {
				t.Errorf("the running call brought %s, %v", rest, err)
			}
			if err := <-stopped; err != nil {
				t.Error(err)
			}
			if state, _ := s.Exit(); state.ExitCode() != 0 {
				t.Errorf("after SIGTERM: %s", state)
			}
		})
	}
}

// The inspector's command-line mode, as a person would try a server.
func TestInspector(t *testing.T) {
	s := startSingle(t)
	inspect := func(args ...string) string {
		t.Helper()
		code, stdout, stderr := runCommand(t, inspector(within(t, 2*patience), t, mcpURL(s.Addr), args...))
		if code != 0 {
			t.Fatalf("inspector %v: exit code %d\n%s%s", args, code, stdout, stderr)
		}
		return stdout
	}
	for _, era := range []string{"auto", "legacy"} {
		if out := inspect("--protocol-era", era, "--method", "tools/list"); !strings.Contains(out, `"counter_add"`) {
			t.Errorf("%s: tools/list: %s", era, out)
		}
		if out := inspect("--protocol-era", era, "--method", "tools/call", "--tool-name", "echo", "--tool-arg", "text=hello there"); !strings.Contains(out, `"hello there"`) {
			t.Errorf("%s: tools/call: %s", era, out)
		}
		if out := inspect("--protocol-era", era, "--method", "resources/list"); !strings.Contains(out, `"uri"`) {
			t.Errorf("%s: resources/list: %s", era, out)
		}
	}
}

// inspector makes a command that runs the inspector without its web page.
func inspector(ctx context.Context, t *testing.T, url string, args ...string) *exec.Cmd {
	t.Helper()
	return node(ctx, t, append([]string{
		"node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js", "--cli", url, "--transport", "http",
	}, args...)...)
}

// Without a store there are no sessions, and calls work all the same (N1).
func TestWithoutStore(t *testing.T) {
	s := startSingle(t, "--sessiond", "none")
	c := connect(t, mcpURL(s.Addr), handshakeEra)
	if c.ID() != "" {
		t.Errorf("session id %q", c.ID())
	}
	if got := c.mustCall(t, "echo", map[string]any{"text": "x"}); got != "x" {
		t.Errorf("echo: %q", got)
	}
	if _, err := c.call(within(t, patience), "ask", map[string]any{"questions": 1}); err == nil {
		t.Error("ask works without a session")
	}
	ignored := rawSession{url: mcpURL(s.Addr), id: "ignored"}
	if got := ignored.call(t, "1", "echo", `{"text":"x"}`); got != "x" {
		t.Errorf("with an id sent anyway: %q", got)
	}
	for _, method := range []string{http.MethodGet, http.MethodDelete} {
		resp := ignored.send(within(t, patience), t, method, "")
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("%s: %s, want 405", method, resp.Status)
		}
	}
}
