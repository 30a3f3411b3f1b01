//go:build unix

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// testHolderKilled checks that a front-end that dies while its handler holds the lock blocks the session no longer than its
// lock's TTL, rounded up (F14, L4).
func testHolderKilled(t *testing.T, c *sessiondtest.Cluster) {
	const ttl = 4 * time.Second
	var nodes []string
	for _, n := range c.Nodes {
		nodes = append(nodes, n.Addr)
	}
	addr := freeAddr(t)
	holder := sessiondtest.StartProcess(t, sessiondtest.Command{
		Name:  "mcpserver-holder",
		Path:  binary(t, "mcpserver"),
		Args:  []string{"--listen", addr, "--sessiond", strings.Join(nodes, ","), "--lock", "--lock-ttl", ttl.String()},
		Log:   filepath.Join(t.TempDir(), "holder.log"),
		Ready: sessiondtest.HTTPReady("http://" + addr + "/readyz"),
	})
	s := openRaw(t, c.URL)
	if got := s.call(t, "1", "counter_add", `{"by":1}`); got != "1" {
		t.Fatalf("total %s", got)
	}
	there := rawSession{url: mcpURL(addr), id: s.id}
	running := there.send(within(t, patience), t, http.MethodPost,
		`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"slow","arguments":{"seconds":60},"_meta":{"progressToken":"p"}}}`)
	defer func() { _ = running.Body.Close() }()
	events := bufio.NewScanner(running.Body)
	for events.Scan() && !strings.Contains(events.Text(), "notifications/progress") {
	}
	if err := holder.Kill(); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if got := s.call(t, "3", "counter_add", `{"by":1}`); got != "2" {
		t.Errorf("total %s", got)
	}
	if took := time.Since(begin); took > 2*ttl {
		t.Errorf("the dead front-end's lock of %s was held for %s", ttl, took)
	}
}

// testRollingRestart stops and starts every process of a tier in turn while clients go on calling, through a balancer that does
// not ask /readyz, unlike that of TestRollingRestart: no session and no answer is lost (F20). A front-end that stops may refuse a request (503, and then it has not been run), and the connection that
// a request came in on may have been closed just before (502 from the balancer); a sessiond that stops costs its clients
// nothing, because the front-end has others.
func testRollingRestart(t *testing.T, c *sessiondtest.Cluster) {
	for name, tier := range map[string][]*sessiondtest.Server{"front-ends": c.FrontEnds, "sessiond": c.Nodes} {
		t.Run(name, func(t *testing.T) {
			tolerance := time.Duration(0)
			if name == "front-ends" {
				tolerance = patience
			}
			const sessions = 4
			done := make(chan struct{})
			var clients sync.WaitGroup
			var calls, refused atomic.Int64
			for range sessions {
				raw := openRaw(t, c.URL)
				cl := survivor{call: func(tool string, args map[string]any) (string, error) {
					text, err := raw.try(t, tool, args)
					if err != nil {
						refused.Add(1)
						t.Logf("refused: %v", err)
					}
					return text, err
				}}
				clients.Go(func() {
					for {
						select {
						case <-done:
							return
						default:
						}
						if err := cl.add(within(t, patience), tolerance); err != nil {
							t.Errorf("after %d calls: %v", cl.total, err)
							return
						}
						calls.Add(1)
					}
				})
			}
			for _, s := range tier {
				before := calls.Load()
				if err := s.Terminate(t.Context()); err != nil {
					t.Error(err)
				}
				if err := s.Restart(within(t, patience)); err != nil {
					t.Error(err)
					break
				}
				// The clients have to meet what has changed.
				if err := sessiondtest.Poll(within(t, patience), func(context.Context) error {
					if n := calls.Load() - before; n < 10*sessions {
						return fmt.Errorf("%d calls since %s was stopped", n, s.Name())
					}
					return nil
				}); err != nil {
					t.Error(err)
					break
				}
			}
			close(done)
			clients.Wait()
			t.Logf("%d calls, %d refused", calls.Load(), refused.Load())
		})
	}
}

// testOutages takes away all of a tier: everything is 503 and nothing 404, soon, and when it is back the session goes
// on (F6, L9).
func testOutages(t *testing.T, c *sessiondtest.Cluster) {
	quorum := func() []*sessiondtest.Server { return c.Etcd.Members[:len(c.Etcd.Members)/2+1] }
	for name, victims := range map[string][]*sessiondtest.Server{"all sessiond are away": c.Nodes, "etcd has no quorum": quorum()} {
		t.Run(name, func(t *testing.T) {
			s := openRaw(t, c.URL)
			if got := s.call(t, "1", "counter_add", `{"by":5}`); got != "5" {
				t.Fatalf("total %s", got)
			}
			for _, v := range victims {
				if err := v.Kill(); err != nil {
					t.Fatal(err)
				}
			}
			stranger := rawSession{url: c.URL, id: "no-such-session"}
			newcomer := rawSession{url: c.URL}
			for range len(c.FrontEnds) {
				for what, send := range map[string]func() *http.Response{
					"call": func() *http.Response {
						return s.send(within(t, patience), t, http.MethodPost, callMessage("7", "echo", `{"text":"x"}`))
					},
					"notification": func() *http.Response {
						return s.send(within(t, patience), t, http.MethodPost, `{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}`)
					},
					"GET":    func() *http.Response { return s.send(within(t, patience), t, http.MethodGet, "") },
					"DELETE": func() *http.Response { return s.send(within(t, patience), t, http.MethodDelete, "") },
					"unknown": func() *http.Response {
						return stranger.send(within(t, patience), t, http.MethodPost, callMessage("7", "echo", `{"text":"x"}`))
					},
					"initialize": func() *http.Response {
						return newcomer.send(within(t, patience), t, http.MethodPost, initializeMessage)
					},
				} {
					begin := time.Now()
					resp := send()
					body, err := io.ReadAll(resp.Body)
					_ = resp.Body.Close()
					if resp.StatusCode != http.StatusServiceUnavailable || err != nil {
						t.Errorf("%s: %s %s %v, want 503", what, resp.Status, body, err)
					}
					if took := time.Since(begin); took > 4*time.Second {
						t.Errorf("%s was told so after %s", what, took)
					}
					if what == "call" && !strings.Contains(string(body), `"id":7`) {
						t.Errorf("the error of call 7 does not carry its id: %s", body)
					}
				}
			}
			var restarts sync.WaitGroup
			for _, v := range victims {
				// Not one after the other: etcd is ready only with a quorum.
				restarts.Go(func() {
					if err := v.Restart(within(t, patience)); err != nil {
						t.Error(err)
					}
				})
			}
			restarts.Wait()
			err := sessiondtest.Poll(within(t, patience), func(ctx context.Context) error {
				for _, fe := range c.FrontEnds {
					if err := sessiondtest.HTTPReady("http://" + fe.Addr + "/readyz")(ctx); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatalf("not ready again: %v", err)
			}
			if got := s.call(t, "8", "counter_add", `{"by":1}`); got != "6" {
				t.Errorf("total %s, want 6", got)
			}
		})
	}

	// The answer to a question finds the handler that waits for it even if a process on its way dies just then (F9).
	t.Run("killed while a question is open", func(t *testing.T) {
		for _, victim := range append(slices.Clone(c.Nodes), c.Etcd.Members...) {
			var asked atomic.Int64
			client := mcp.NewClient(&mcp.Implementation{Name: "sessiond-e2e", Version: "1.0.0"}, &mcp.ClientOptions{
				ElicitationHandler: func(context.Context, *mcp.ElicitRequest) (*mcp.ElicitResult, error) {
					n := asked.Add(1)
					if n == 1 {
						if err := victim.Kill(); err != nil {
							t.Error(err)
						}
					}
					return &mcp.ElicitResult{Action: "accept", Content: map[string]any{"answer": fmt.Sprint(n)}}, nil
				},
			})
			s, err := client.Connect(within(t, patience), &mcp.StreamableClientTransport{Endpoint: c.URL}, &mcp.ClientSessionOptions{ProtocolVersion: handshakeEra})
			if err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			g := goClient{ClientSession: s}
			if got, err := g.call(within(t, patience), "ask", map[string]any{"questions": 2}); err != nil || got != `["1","2"]` {
				t.Errorf("%s killed: %s, %v", victim.Name(), got, err)
			}
			t.Logf("%s killed: %s", victim.Name(), time.Since(begin))
			if err := victim.Restart(within(t, patience)); err != nil {
				t.Fatal(err)
			}
			_ = s.Close()
		}
	})
}
