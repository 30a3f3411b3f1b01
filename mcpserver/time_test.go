package mcpserver_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/mcpserver"
)

// pipes is a network in memory, which a synctest bubble can wait on.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

func (p *pipes) dial(context.Context, string, string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case p.conns <- theirs:
		return ours, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

// bubble is a front-end whose time the test turns.
type bubble struct {
	t      *testing.T
	store  *memory
	client *http.Client
	stop   func()
}

func newBubble(t *testing.T, edit func(*mcpserver.Options)) *bubble {
	t.Helper()
	return newBubbleOf(t, testServer(&subscribers{relays: map[string]int{}}), edit)
}

func newBubbleOf(t *testing.T, server *mcp.Server, edit func(*mcpserver.Options)) *bubble {
	t.Helper()
	b := &bubble{t: t, store: newMemory()}
	opts := &mcpserver.Options{Store: b.store}
	edit(opts)
	handler, err := mcpserver.NewHandler(func(*http.Request) *mcp.Server { return server }, opts)
	if err != nil {
		t.Fatal(err)
	}
	p := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
	srv := &http.Server{Handler: handler, ReadHeaderTimeout: time.Hour}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(p) }()
	transport := &http.Transport{DialContext: p.dial}
	b.client = &http.Client{Transport: transport}
	b.stop = func() {
		transport.CloseIdleConnections()
		if err := handler.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}
	return b
}

func (b *bubble) send(method, session, body string, header ...string) *http.Response {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), method, "http://front-end/mcp", strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("Content-Type", "application/json")
	if session != "" {
		req.Header.Set("Mcp-Session-Id", session)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := b.client.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	return resp
}

func (b *bubble) open() string {
	b.t.Helper()
	resp := b.send(http.MethodPost, "", initializeWith("2025-11-25", `{"elicitation":{}}`))
	if err := resp.Body.Close(); err != nil {
		b.t.Error(err)
	}
	return resp.Header.Get("Mcp-Session-Id")
}

// comments counts the comments of a stream until it ends.
func comments(t *testing.T, resp *http.Response) (n int, rest string) {
	t.Helper()
	scanner := bufio.NewScanner(resp.Body)
	for scanner.Scan() {
		if strings.HasPrefix(scanner.Text(), ":") {
			n++
		} else {
			rest += scanner.Text()
		}
	}
	if err := resp.Body.Close(); err != nil {
		t.Error(err)
	}
	return n, rest
}

// F19: a silent call becomes a stream with a comment every 12 s, also where JSON is preferred; S1: its session lives on,
// though it is longer than the TTL; L4: the handler of a lock's TTL of 300 s is stopped before it ends, no sooner than needed.
func TestF19S1LongCall(t *testing.T) {
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBubble(t, func(o *mcpserver.Options) { mode(o); o.SessionTTL = time.Minute; o.LockTTL = 310 * time.Second })
				id := b.open()
				began := time.Now()
				var cancelled sync.WaitGroup
				cancelled.Go(func() {
					time.Sleep(300 * time.Second)
					_ = b.send(http.MethodPost, id, cancelBody("1")).Body.Close()
				})
				n, rest := comments(t, b.send(http.MethodPost, id, call("1", "wait", `{}`)))
				cancelled.Wait()
				if took := time.Since(began).Round(time.Second); took != 300*time.Second {
					t.Errorf("took %s: %s", took, rest)
				}
				if n != 24 && n != 25 {
					t.Errorf("%d comments in 300 s", n)
				}
				if _, err := b.store.Read(t.Context(), id); err != nil {
					t.Errorf("the session of a running call: %v", err)
				}
				time.Sleep(90 * time.Second)
				if _, err := b.store.Read(t.Context(), id); !errors.Is(err, client.ErrSessionNotFound) {
					t.Errorf("an idle session after its TTL: %v", err)
				}
				b.stop()
			})
		})
	}
}

// S1 (C17): an open standalone stream keeps its session alive, with at most one write a third of the TTL.
func TestS1OpenStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t, func(o *mcpserver.Options) { o.SessionTTL = 30 * time.Second })
		id := b.open()
		resp := b.send(http.MethodGet, id, "")
		position := b.store.now()
		var deleted sync.WaitGroup
		deleted.Go(func() {
			time.Sleep(300 * time.Second)
			if writes := b.store.now() - position; writes > 31 {
				t.Errorf("%d writes in 300 s", writes)
			}
			_ = b.send(http.MethodDelete, id, "").Body.Close()
		})
		if n, _ := comments(t, resp); n < 25 {
			t.Errorf("%d comments in 300 s", n)
		}
		deleted.Wait()
		b.stop()
	})
}

// S1 (C16): requests of any kind move the end of a session.
func TestS1UseMovesTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t, func(o *mcpserver.Options) { o.SessionTTL = 30 * time.Second })
		id := b.open()
		for i := range 30 {
			time.Sleep(10 * time.Second)
			body := `{"jsonrpc":"2.0","id":1,"method":"ping"}`
			switch i % 3 {
			case 1:
				body = call("1", "echo", `{}`)
			case 2:
				body = `{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":1}}`
			}
			resp := b.send(http.MethodPost, id, body)
			_ = resp.Body.Close()
			if resp.StatusCode >= 300 {
				t.Fatalf("request %d: %d", i, resp.StatusCode)
			}
		}
		b.stop()
	})
}

// F14: under the lock, the handler's context ends before the TTL does; not much before.
func TestF14LongTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t, func(o *mcpserver.Options) { withLock(o) })
		id := b.open()
		began := time.Now()
		_, rest := comments(t, b.send(http.MethodPost, id, call("1", "wait", `{}`)))
		if took := time.Since(began); took < 290*time.Second || took >= 300*time.Second || !strings.Contains(rest, "EXPIRES") {
			t.Errorf("after %s: %s", took, rest)
		}
		b.stop()
	})
}

// F11: the events of a stream are kept for Options.History after the final response, however long the call took, and are gone
// some time later.
func TestF11HistoryCountsFromTheFinalResponse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t, func(o *mcpserver.Options) { o.History = time.Minute; o.AskTimeout = time.Hour })
		id := b.open()
		s := &stream{t: t, resp: b.send(http.MethodPost, id, call("1", "ask", `{}`))}
		s.reader = bufio.NewReader(s.resp.Body)
		first, _ := s.eventWithID()
		_, data := s.eventWithID()
		var question struct{ ID string }
		if err := json.Unmarshal([]byte(data), &question); err != nil {
			t.Fatalf("question %q: %v", data, err)
		}
		var answering sync.WaitGroup
		answering.Go(func() {
			time.Sleep(10*time.Minute + 30*time.Second)
			_ = b.send(http.MethodPost, id, accept(question.ID, "late")).Body.Close()
		})
		last, _ := s.eventWithID()
		answering.Wait()
		s.cut()

		time.Sleep(59 * time.Second)
		again := &stream{t: t, resp: b.send(http.MethodGet, id, "", "Last-Event-ID", first)}
		again.reader = bufio.NewReader(again.resp.Body)
		if _, got := again.eventWithID(); got != data {
			t.Errorf("%q after the final response, want the question", got)
		}
		if got, _ := again.eventWithID(); got != last {
			t.Errorf("event %q, want the final one %q", got, last)
		}
		again.cut()
		time.Sleep(2 * time.Minute)
		if resp := b.send(http.MethodGet, id, "", "Last-Event-ID", first); resp.StatusCode != http.StatusBadRequest || resp.Body.Close() != nil {
			t.Errorf("status %d when nothing is kept any more", resp.StatusCode)
		}
		b.stop()
	})
}

// F19 (C72): a silent call of the modern era, too, is a stream with a comment every 12 s, also where JSON is preferred; a quick one
// is answered as ever, and all streams tell nginx not to buffer them.
func TestF19SilentModernCall(t *testing.T) {
	for _, preferJSON := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBubble(t, func(o *mcpserver.Options) { o.JSON = preferJSON })
			modern := []string{"Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "tools/call", "Mcp-Name", "take"}
			for seconds, want := range map[int]int{0: 0, 40: 3} {
				body := fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"take","arguments":{"by":%d},%s}}`, seconds, modernMeta)
				resp := b.send(http.MethodPost, "", body, modern...)
				stream := resp.Header.Get("Content-Type") == "text/event-stream"
				if stream == (preferJSON && seconds == 0) || stream != (resp.Header.Get("X-Accel-Buffering") == "no") || resp.StatusCode != http.StatusOK {
					t.Errorf("JSON preferred %t, %d s: %d %v", preferJSON, seconds, resp.StatusCode, resp.Header)
				}
				n, rest := comments(t, resp)
				if n != want || strings.Count(rest, "taken") != 1 || stream != strings.Contains(rest, "data: {") {
					t.Errorf("JSON preferred %t, %d s: %d comments, %s", preferJSON, seconds, n, rest)
				}
			}
			b.stop()
		})
	}
}
