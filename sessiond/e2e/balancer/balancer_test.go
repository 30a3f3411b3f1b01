package balancer_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sessiond/sessiond/sessiond/e2e/balancer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const deadline = 10 * time.Second

// start serves b's back-ends behind a balancer on a loopback port and gives its URL.
func start(t *testing.T, o balancer.Options, backends ...string) string {
	t.Helper()
	b, err := balancer.New(backends, o)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context())) // serves until the clean-up
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := b.Serve(ctx, l); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	t.Cleanup(wg.Wait)
	t.Cleanup(cancel)
	return "http://" + l.Addr().String()
}

func backEnd(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// deadPort is an address that refuses connections.
func deadPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func client(t *testing.T) *http.Client {
	t.Helper()
	tr := &http.Transport{MaxIdleConnsPerHost: 128, DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 2 * deadline}
}

func post(t *testing.T, c *http.Client, url, body string) (status int, servedBy, answer string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header.Get(balancer.ServedBy), string(b)
}

func echo(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	_, _ = w.Write(b)
}

// flush sends what has been written. That the client has gone shows elsewhere.
func flush(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }

// A fast back-end answers before the proxy has let go of the request's body: no answer may be cut or swapped.
func TestManyQuickPostsAreAllAnsweredRightly(t *testing.T) {
	// Enough for a fault that hits one answer in a thousand.
	const callers, each = 50, 160
	hasty := func(w http.ResponseWriter, r *http.Request) {
		// The answer goes out before the body is read, as from a server that has all it needs in the headers.
		_, _ = io.WriteString(w, r.Header.Get("X-Want"))
	}
	url := start(t, balancer.Options{}, backEnd(t, echo), backEnd(t, hasty), backEnd(t, echo))
	c := client(t)
	var wg sync.WaitGroup
	var wrong atomic.Int64
	for i := range callers {
		wg.Go(func() {
			for j := range each {
				want := fmt.Sprintf("%d-%d", i, j)
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(want))
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("X-Want", want)
				resp, err := c.Do(req)
				if err != nil {
					t.Error(err)
					wrong.Add(1)
					continue
				}
				got, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if err != nil || string(got) != want {
					wrong.Add(1)
					t.Errorf("%d %q, %v; want %q", resp.StatusCode, got, err, want)
				}
			}
		})
	}
	wg.Wait()
	if n := wrong.Load(); n != 0 {
		t.Errorf("%d of %d answers wrong", n, callers*each)
	}
}

// Strictly in turn: also on one connection, also for one session.
func TestBackEndsTakeTurns(t *testing.T) {
	addrs := []string{backEnd(t, echo), backEnd(t, echo), backEnd(t, echo)}
	url := start(t, balancer.Options{}, addrs...)
	c := client(t)
	for i := range 30 {
		if _, by, _ := post(t, c, url, "x"); by != addrs[i%3] {
			t.Fatalf("request %d was served by %s, want %s", i, by, addrs[i%3])
		}
	}
}

// At random: all take part, and not in turn.
func TestBackEndsAtRandom(t *testing.T) {
	addrs := []string{backEnd(t, echo), backEnd(t, echo), backEnd(t, echo)}
	url := start(t, balancer.Options{Policy: balancer.AtRandom}, addrs...)
	c := client(t)
	served, inTurn, last := map[string]int{}, 0, ""
	const requests = 300
	for range requests {
		_, by, _ := post(t, c, url, "x")
		served[by]++
		if slices.Index(addrs, by) == (slices.Index(addrs, last)+1)%len(addrs) {
			inTurn++
		}
		last = by
	}
	for _, addr := range addrs {
		if n := served[addr]; n < requests/6 {
			t.Errorf("served by %v", served)
		}
	}
	if inTurn > requests/2 {
		t.Errorf("%d of %d requests went to the next in turn", inTurn, requests)
	}
}

// A back-end that is taken out serves nothing at that moment and nothing afterwards, until it is put back.
func TestTakeOut(t *testing.T) {
	release := make(chan struct{})
	waits := func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-release
		_, _ = io.WriteString(w, "released")
	}
	busy, other := backEnd(t, waits), backEnd(t, echo)
	b, err := balancer.New([]string{busy, other}, balancer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	s := httptest.NewServer(b)
	t.Cleanup(s.Close)
	c := client(t)
	stream, err := c.Post(s.URL, "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Body.Close() }()

	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	if addr, err := b.TakeOut(ctx); err != nil || addr != other {
		t.Fatalf("took out %s, %v; want %s", addr, err, other)
	}
	b.PutBack(other)
	close(release)
	if answer, err := io.ReadAll(stream.Body); err != nil || string(answer) != "released" {
		t.Fatalf("%q, %v", answer, err)
	}
	out, err := b.TakeOut(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if _, by, _ := post(t, c, s.URL, "x"); by == out {
			t.Fatalf("%s serves although it is out", out)
		}
	}
	// The last one that is left is never taken.
	soon, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if addr, err := b.TakeOut(soon); err == nil {
		t.Errorf("took out %s, the last one", addr)
	}
}

func TestConnectionsAreKept(t *testing.T) {
	var conns atomic.Int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(echo))
	s.Config.ConnState = func(_ net.Conn, st http.ConnState) {
		if st == http.StateNew {
			conns.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	url := start(t, balancer.Options{}, s.Listener.Addr().String())
	c := client(t)
	for range 20 {
		post(t, c, url, "x")
	}
	if n := conns.Load(); n != 1 {
		t.Errorf("20 requests in a row used %d connections to the back-end, want 1", n)
	}
}

// Each event of a stream reaches the client before the next one is made.
func TestStreamsAreFlushedAtOnce(t *testing.T) {
	step := make(chan struct{})
	url := start(t, balancer.Options{}, backEnd(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		flush(w)
		for i := range 5 {
			<-step
			_, _ = fmt.Fprintf(w, "data: %d\n\n", i)
			flush(w)
		}
	}))
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		req, err := http.NewRequestWithContext(t.Context(), method, url, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client(t).Do(req) // returns: the headers have been flushed with no event yet
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(resp.Body)
		for i := range 5 {
			step <- struct{}{}
			if !lines.Scan() || lines.Text() != fmt.Sprintf("data: %d", i) || !lines.Scan() {
				t.Fatalf("%s: event %d: got %q, %v", method, i, lines.Text(), lines.Err())
			}
		}
		if lines.Scan() {
			t.Errorf("%s: %q after the end", method, lines.Text())
		}
		_ = resp.Body.Close()
	}
}

func TestClientThatLeavesCancelsTheBackEnd(t *testing.T) {
	started, gone := make(chan struct{}), make(chan struct{})
	url := start(t, balancer.Options{}, backEnd(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		flush(w)
		started <- struct{}{}
		<-r.Context().Done()
		gone <- struct{}{}
	}))
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client(t).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		<-started
		cancel()
		_ = resp.Body.Close()
		select {
		case <-gone:
		case <-time.After(deadline):
			t.Fatalf("%s: the back-end was not told that the client left", method)
		}
	}
}

// A back-end that refuses connections costs no answer, and is asked again only after a while.
func TestDeadBackEndIsSkipped(t *testing.T) {
	alive := []string{backEnd(t, echo), backEnd(t, echo)}
	url := start(t, balancer.Options{DeadTime: time.Hour}, alive[0], deadPort(t), alive[1])
	c := client(t)
	for i := range 20 {
		for _, method := range []string{http.MethodPost, http.MethodGet, http.MethodDelete} {
			req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader("whole"))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusOK || string(b) != "whole" || !slices.Contains(alive, resp.Header.Get(balancer.ServedBy)) {
				t.Fatalf("%s %d: %d %q by %s", method, i, resp.StatusCode, b, resp.Header.Get(balancer.ServedBy))
			}
		}
	}
}

func TestDeadBackEndComesBack(t *testing.T) {
	addr := deadPort(t)
	alive := backEnd(t, echo)
	url := start(t, balancer.Options{DeadTime: 10 * time.Millisecond}, addr, alive)
	c := client(t)
	if _, by, _ := post(t, c, url, "x"); by != alive {
		t.Fatalf("served by %s", by)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(echo))
	_ = s.Listener.Close()
	s.Listener = l
	s.Start()
	t.Cleanup(s.Close)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(deadline); ; <-tick.C {
		if _, by, _ := post(t, c, url, "x"); by == addr {
			return
		}
		if time.Now().After(end) {
			t.Fatal("the back-end that came back gets no requests")
		}
	}
}

// A back-end that says on /readyz that it is not ready gets no requests while another one is, and gets them again afterwards.
func TestUnreadyBackEndIsLeftOut(t *testing.T) {
	var draining atomic.Bool
	drains := backEnd(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" && draining.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		echo(w, r)
	})
	url := start(t, balancer.Options{Probe: time.Millisecond}, drains, backEnd(t, echo))
	c := client(t)
	// takesPart waits until of so many requests in a row some go there, or none.
	takesPart := func(want bool) {
		t.Helper()
		for end := time.Now().Add(deadline); ; {
			got := false
			for range 10 {
				_, servedBy, _ := post(t, c, url, "x")
				got = got || servedBy == drains
			}
			if got == want {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("takes part: %t, want %t", got, want)
			}
		}
	}
	takesPart(true)
	draining.Store(true)
	takesPart(false)
	draining.Store(false)
	takesPart(true)
}

func TestNoBackEndAtAllIs502(t *testing.T) {
	url := start(t, balancer.Options{}, deadPort(t), deadPort(t))
	for range 3 { // also when all are known to be dead
		if status, _, _ := post(t, client(t), url, "x"); status != http.StatusBadGateway {
			t.Errorf("status %d, want 502", status)
		}
	}
}

// A back-end that takes a request and then breaks the connection may have acted on it: 502, and nobody else sees it.
func TestRequestThatWasSentIsNeverSentAgain(t *testing.T) {
	var seen atomic.Int64
	hangUp := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.Header.Get("X-Warm") != "" {
			return
		}
		seen.Add(1)
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = conn.Close()
		}
	}
	url := start(t, balancer.Options{}, backEnd(t, hangUp), backEnd(t, hangUp))
	c := client(t)
	for _, method := range []string{http.MethodPost, http.MethodGet, http.MethodDelete} {
		for _, key := range []string{"", "some-key"} {
			for _, warm := range []bool{true, true, false} { // kept connections are what tempts a transport to repeat
				req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader("x"))
				if err != nil {
					t.Fatal(err)
				}
				if warm {
					req.Header.Set("X-Warm", "1")
				}
				if key != "" {
					req.Header.Set("Idempotency-Key", key)
				}
				seen.Store(0)
				resp, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				_ = resp.Body.Close()
				if warm {
					continue
				}
				if resp.StatusCode != http.StatusBadGateway || seen.Load() != 1 {
					t.Errorf("%s key %q: status %d, seen %d times; want 502, once", method, key, resp.StatusCode, seen.Load())
				}
			}
		}
	}
}

// An answer that breaks off in the middle breaks off for the client too; it must not look whole.
func TestBrokenAnswerIsNotMadeWhole(t *testing.T) {
	url := start(t, balancer.Options{}, backEnd(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "half of ")
		flush(w)
		panic(http.ErrAbortHandler)
	}))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client(t).Do(req)
	if err != nil {
		return // broken before the headers got here: fine too
	}
	defer func() { _ = resp.Body.Close() }()
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("got %q as if it were whole", b)
	}
}

func TestBodyIsBounded(t *testing.T) {
	var most atomic.Int64
	url := start(t, balancer.Options{MaxBody: 1000}, backEnd(t, func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		most.Store(n)
		_, _ = fmt.Fprint(w, n)
	}))
	c := client(t)
	if status, _, got := post(t, c, url, strings.Repeat("x", 1000)); status != http.StatusOK || got != "1000" {
		t.Errorf("at the limit: %d %s", status, got)
	}
	if status, _, _ := post(t, c, url, strings.Repeat("x", 1001)); status != http.StatusRequestEntityTooLarge {
		t.Errorf("over the limit: %d, want 413", status)
	}
	if most.Load() != 1000 {
		t.Errorf("the back-end saw %d bytes", most.Load())
	}
}

// What the front-end decides by (Host, session headers, encodings) arrives as the client sent it.
func TestRequestAndAnswerPassUnchanged(t *testing.T) {
	url := start(t, balancer.Options{}, backEnd(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Mcp-Session-Id", r.Header.Get("Mcp-Session-Id"))
		w.WriteHeader(http.StatusTeapot)
		_, _ = fmt.Fprintf(w, "%s %s %s %q", r.Method, r.Host, r.URL, r.Header.Get("Accept-Encoding"))
	}))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodDelete, url+"/mcp?a=b%20c", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Mcp-Session-Id", "abc")
	resp, err := client(t).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, _ := io.ReadAll(resp.Body)
	want := fmt.Sprintf("DELETE %s /mcp?a=b%%20c %q", strings.TrimPrefix(url, "http://"), "")
	if resp.StatusCode != http.StatusTeapot || string(b) != want || resp.Header.Get("Mcp-Session-Id") != "abc" {
		t.Errorf("%d %s, want %s", resp.StatusCode, b, want)
	}
}

func TestBadBackEndsAreRefused(t *testing.T) {
	for _, bad := range [][]string{nil, {"localhost"}, {"127.0.0.1:1", ""}} {
		if _, err := balancer.New(bad, balancer.Options{}); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}
