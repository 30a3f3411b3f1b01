//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/mcpserver"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// The kinds of front-ends.
const (
	kindSDK      = "sdk"      // the SDK's own handler, sessions in its memory
	kindSessions = "sessions" // mcpserver on sessiond
	kindLock     = "lock"     // with the lock
)

const (
	nameSDK             = "go-sdk's handler in memory"
	nameSDKChanged      = "go-sdk's handler, state changed"
	nameSessions        = "mcpserver"
	nameSessionsChanged = "mcpserver, session changed"
	nameLock            = "mcpserver with the lock"
	nameLockChanged     = "mcpserver with the lock, session changed"
)

const mcpRevision = "2025-11-25"

// childFrontEnd is this program as a front-end.
const childFrontEnd = "serve-front-end"

// serveFrontEnd is that front-end: the same MCP server, behind one handler or the other.
func serveFrontEnd(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet(childFrontEnd, flag.ContinueOnError)
	listen := flags.String("listen", "", "`host:port`")
	kind := flags.String("kind", "", "`kind` of front-end")
	nodes := flags.String("sessiond", "", "`address` of sessiond")
	if err := flags.Parse(args); err != nil {
		return err
	}
	raiseFileLimit()
	server := toolServer(*kind == kindSDK)
	getServer := func(*http.Request) *mcp.Server { return server }
	mux := http.NewServeMux()
	if *kind == kindSDK {
		mux.Handle("/mcp", mcp.NewStreamableHTTPHandler(getServer, nil))
	} else {
		sessions, err := client.New([]string{*nodes}, client.Options{Attach: *kind == kindLock})
		if err != nil {
			return err
		}
		defer func() { _ = sessions.Close() }()
		opts := &mcpserver.Options{Store: sessions}
		if *kind == kindLock {
			opts.Locker = sessions
		}
		handler, err := mcpserver.NewHandler(getServer, opts)
		if err != nil {
			return err
		}
		// The process is about to end: what is still open is cut short.
		gone, cancel := context.WithCancel(context.WithoutCancel(ctx))
		cancel()
		defer func() { _ = handler.Shutdown(gone) }()
		mux.Handle("/mcp", handler)
	}
	mux.HandleFunc("GET /memory", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(memoryNow()) })
	s := &http.Server{Addr: *listen, Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// inUse is what a process holds after it has collected its garbage.
type inUse struct {
	Heap, Stacks int64
	Goroutines   int
}

func memoryNow() inUse {
	runtime.GC()
	debug.FreeOSMemory() // collects once more, what the first pass let go of
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return inUse{Heap: int64(m.HeapAlloc), Stacks: int64(m.StackInuse), Goroutines: runtime.NumGoroutine()}
}

type echoInput struct {
	Text string `json:"text"`
}

type addInput struct {
	By int `json:"by"`
}

// toolServer has a tool that leaves the session alone, and one that changes it: with the SDK's own handler there is nowhere to
// keep that but in memory.
func toolServer(inMemory bool) *mcp.Server {
	server := mcp.NewServer(&mcp.Implementation{Name: "bench", Version: "1"}, nil)
	answer := func(text string) *mcp.CallToolResult {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: text}}}
	}
	mcp.AddTool(server, &mcp.Tool{Name: "echo"}, func(_ context.Context, _ *mcp.CallToolRequest, in echoInput) (*mcp.CallToolResult, any, error) {
		return answer(in.Text), nil, nil
	})
	var mu sync.Mutex
	totals := map[string]int{}
	mcp.AddTool(server, &mcp.Tool{Name: "add"}, func(ctx context.Context, req *mcp.CallToolRequest, in addInput) (*mcp.CallToolResult, any, error) {
		if inMemory {
			mu.Lock()
			defer mu.Unlock()
			totals[req.Session.ID()] += in.By
			return answer(fmt.Sprint(totals[req.Session.ID()])), nil, nil
		}
		total, _, err := mcpserver.Get[int](ctx, "total")
		if err == nil {
			err = mcpserver.Set(ctx, "total", total+in.By)
		}
		if err != nil {
			return nil, nil, err
		}
		return answer(fmt.Sprint(total + in.By)), nil, nil
	})
	return server
}

// A frontEnd is such a process, and the sessiond behind it, if there is one.
type frontEnd struct {
	*sessiondtest.Server
	node *embedded // nil with the SDK's own handler
	http *http.Client
}

func (b *bench) launchFrontEnd(ctx context.Context, kind string) (*frontEnd, error) {
	f := &frontEnd{http: &http.Client{
		Timeout:   patience,
		Transport: &http.Transport{MaxIdleConns: 2 * sessionCount, MaxIdleConnsPerHost: 2 * sessionCount},
	}}
	args := []string{childFrontEnd, "--kind", kind}
	if kind != kindSDK {
		var err error
		if f.node, err = b.launchEmbedded(ctx, "front-end-"+kind+"-sessiond"); err != nil {
			return nil, err
		}
		args = append(args, "--sessiond", f.node.Addr)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	addrs, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		return nil, err
	}
	p, err := b.launch(ctx, sessiondtest.Command{
		Name: "front-end-" + kind, Path: self, Args: append(args, "--listen", addrs[0]), Ready: sessiondtest.HTTPReady("http://" + addrs[0] + "/memory"),
	})
	if err != nil {
		return nil, err
	}
	f.Server = &sessiondtest.Server{Process: p, Addr: addrs[0]}
	return f, nil
}

func (f *frontEnd) meter() meter {
	m := meter{processes: []*sessiondtest.Process{f.Process}}
	if f.node != nil {
		m.processes, m.etcd = append(m.processes, f.node.Process), f.node.etcd
	}
	return m
}

// post sends one message and returns the session's id, if the answer has one.
func (f *frontEnd) post(ctx context.Context, session, body string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+f.Addr+"/mcp", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("Content-Type", "application/json")
	if session != "" {
		req.Header.Set("Mcp-Session-Id", session)
		req.Header.Set("Mcp-Protocol-Version", mcpRevision)
	}
	resp, err := f.http.Do(req)
	if err != nil {
		return "", err
	}
	answer, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err == nil && (resp.StatusCode >= http.StatusMultipleChoices || strings.Contains(string(answer), `"error"`)) {
		err = fmt.Errorf("%s: %s", resp.Status, answer)
	}
	return resp.Header.Get("Mcp-Session-Id"), err
}

// open opens a session as a client does.
func (f *frontEnd) open(ctx context.Context) (string, error) {
	id, err := f.post(ctx, "", `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"`+mcpRevision+
		`","capabilities":{},"clientInfo":{"name":"bench","version":"1"}}}`)
	if err != nil {
		return "", err
	}
	_, err = f.post(ctx, id, `{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	return id, err
}

// openMany opens sessions, several at a time.
func (f *frontEnd) openMany(ctx context.Context, n int) ([]string, error) {
	ids := make([]string, n)
	err := each(ctx, n, atATime, func(ctx context.Context, i int) (err error) {
		ids[i], err = f.open(ctx)
		return err
	})
	return ids, err
}

const atATime = 64

// each calls f for 0 to n-1, several at a time, until one fails.
func each(ctx context.Context, n, atATime int, f func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(n, atATime) {
		wg.Go(func() {
			for i := range next {
				if err := f(ctx, i); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
feed:
	for i := range n {
		select {
		case next <- i:
		case <-ctx.Done():
			break feed
		}
	}
	close(next)
	wg.Wait()
	return context.Cause(ctx)
}

// stream opens a session's standalone stream and leaves it open. It does so by hand, for it is to cost this process little.
func (f *frontEnd) stream(ctx context.Context, session string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", f.Addr)
	if err != nil {
		return nil, err
	}
	if _, err = fmt.Fprintf(conn, "GET /mcp HTTP/1.1\r\nHost: %s\r\nAccept: text/event-stream\r\nMcp-Session-Id: %s\r\nMcp-Protocol-Version: %s\r\n\r\n",
		f.Addr, session, mcpRevision); err == nil {
		err = conn.SetReadDeadline(time.Now().Add(patience))
	}
	if err == nil {
		var resp *http.Response
		if resp, err = http.ReadResponse(bufio.NewReaderSize(conn, 1<<10), nil); err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("GET: %s", resp.Status)
		}
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// memory asks the front-end what it holds.
func (f *frontEnd) memory(ctx context.Context) (m inUse, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+f.Addr+"/memory", http.NoBody)
	if err != nil {
		return m, err
	}
	resp, err := f.http.Do(req)
	if err != nil {
		return m, err
	}
	defer func() { _ = resp.Body.Close() }()
	return m, json.NewDecoder(resp.Body).Decode(&m)
}

// runFrontEnds measures the same tool call through all kinds of front-ends, and what they hold while nothing happens.
func (b *bench) runFrontEnds(ctx context.Context) error {
	if err := b.stop(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	b.say("starting front-ends")
	var field []*contestant
	fronts := map[string]*frontEnd{}
	for _, k := range []struct{ kind, same, changed string }{
		{kindSDK, nameSDK, nameSDKChanged}, {kindSessions, nameSessions, nameSessionsChanged}, {kindLock, nameLock, nameLockChanged},
	} {
		f, err := b.launchFrontEnd(ctx, k.kind)
		if err != nil {
			return err
		}
		fronts[k.kind] = f
		ids, err := f.openMany(ctx, sessionCount)
		if err != nil {
			return err
		}
		for _, tool := range []struct{ name, call string }{
			{k.same, `"echo","arguments":{"text":"` + strings.Repeat("x", 100) + `"}`}, {k.changed, `"add","arguments":{"by":1}`},
		} {
			body := `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":` + tool.call + `}}`
			field = append(field, &contestant{
				name: tool.name, meter: f.meter(),
				cycle: func(ctx context.Context, caller, _ int, _ func()) error {
					_, err := f.post(ctx, ids[caller], body)
					return err
				},
			})
		}
	}
	var works []work
	for _, callers := range []int{1, 16, 128} {
		works = append(works, work{
			name: fmt.Sprintf("tool-call-%d", callers), callers: callers, unit: "calls/s", base: nameSDK,
			title: fmt.Sprintf("tools/call over HTTP, %s, each on its own session", people(callers)),
			can:   func(*contestant) bool { return true },
			run: func(ctx context.Context, c *contestant, l loop) (round, error) {
				l.do = func(ctx context.Context, caller int) error { return c.cycle(ctx, caller, caller, func() {}) }
				return l.round(ctx)
			},
		})
	}
	if err := b.takeTurns(ctx, field, works...); err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		*frontEnd
	}{{nameSDK, fronts[kindSDK]}, {nameSessions, fronts[kindSessions]}} {
		if err := b.holdStreams(ctx, f.name, f.frontEnd); err != nil {
			return err
		}
	}
	return nil
}

// holdStreams measures what sessions that nobody uses, and open streams on which nothing happens, cost a front-end.
func (b *bench) holdStreams(ctx context.Context, name string, f *frontEnd) error {
	n := 10_000
	if b.quick {
		n = 2000
	}
	b.say("%s: %d idle sessions, and as many open streams", name, n)
	rep := &figures{Title: fmt.Sprintf("%s: %d idle sessions, and as many open streams", name, n)}
	b.report.Figures = append(b.report.Figures, rep)
	alone, err := b.callLatency(ctx, f)
	if err != nil {
		return err
	}
	empty, err := f.memory(ctx)
	if err != nil {
		return err
	}
	emptyNode := f.nodeMemory()
	ids, err := f.openMany(ctx, n)
	if err != nil {
		return err
	}
	f.http.CloseIdleConnections()
	idle, err := f.memory(ctx)
	if err != nil {
		return err
	}
	idleNode := f.nodeMemory()
	each1 := func(after, before int64) float64 { return float64(after-before) / float64(n) / (1 << 10) }
	ours := f.node != nil
	perSession := rep.add("memory of the front-end per idle session", max(each1(idle.Heap+idle.Stacks, empty.Heap+empty.Stacks), 0), "KiB")
	if ours {
		perSession.Bound = new(0.1) // what remains is the noise of its pools and caches
		rep.add("memory of sessiond and etcd per idle session", each1(idleNode, emptyNode), "KiB")
	}

	conns := make([]net.Conn, n)
	defer func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close()
			}
		}
	}()
	began := time.Now()
	if err := each(ctx, n, atATime, func(ctx context.Context, i int) (err error) {
		conns[i], err = f.stream(ctx, ids[i])
		return err
	}); err != nil {
		return err
	}
	rep.add("streams opened a second", float64(n)/time.Since(began).Seconds(), "")
	f.http.CloseIdleConnections()
	open, err := f.memory(ctx)
	if err != nil {
		return err
	}
	perStream := rep.add("memory of the front-end per open stream", each1(open.Heap+open.Stacks, idle.Heap+idle.Stacks), "KiB")
	rep.add("of that, stacks", each1(open.Stacks, idle.Stacks), "KiB")
	rep.add("goroutines of the front-end per open stream", float64(open.Goroutines-idle.Goroutines)/float64(n), "")
	if ours {
		perStream.Bound = new(32.0)
		rep.add("memory of sessiond and etcd per open stream", each1(f.nodeMemory(), idleNode), "KiB")
	}
	const watch = 3 * time.Second
	l := loop{meter: f.meter()}
	before, err := l.wait(ctx, time.Now())
	if err != nil {
		return err
	}
	after, err := l.wait(ctx, time.Now().Add(watch))
	if err != nil {
		return err
	}
	rep.add("processor while all streams are open and nothing happens", 100*(after.servers-before.servers).Seconds()/after.at.Sub(before.at).Seconds(), "% of a core")
	crowded, err := b.callLatency(ctx, f)
	if err != nil {
		return err
	}
	rep.add("tools/call, 16 callers, p50 without the streams", alone.P50/1e3, "ms")
	rep.add("tools/call, 16 callers, p50 with them", crowded.P50/1e3, "ms")
	rep.add("tools/call, 16 callers, p99 without the streams", alone.P99/1e3, "ms")
	rep.add("tools/call, 16 callers, p99 with them", crowded.P99/1e3, "ms")
	return nil
}

// nodeMemory is what the sessiond behind has in memory.
func (f *frontEnd) nodeMemory() int64 {
	if f.node == nil {
		return 0
	}
	return f.node.meter().memory()
}

// callLatency is that of a tool that leaves the session alone.
func (b *bench) callLatency(ctx context.Context, f *frontEnd) (round, error) {
	const callers = 16
	ids, err := f.openMany(ctx, callers)
	if err != nil {
		return round{}, err
	}
	return loop{
		callers: callers, settle: b.settle, measure: b.measure, meter: f.meter(),
		do: func(ctx context.Context, caller int) error {
			_, err := f.post(ctx, ids[caller], `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"text":"x"}}}`)
			return err
		},
	}.round(ctx)
}
