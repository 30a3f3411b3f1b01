//go:build unix

package chaos

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sessiond/sessiond/sessiond/e2e/balancer"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// frontEnds is how many front-ends there are with the lock, and as many without.
const frontEnds = 2

// frontEndSession is the session through which front-ends tell each other of resources. It outlives them, and belongs to no client.
const frontEndSession = "mcpserver.topic"

// frontEndTier is front-ends that are set up alike, behind a balancer without affinity.
type frontEndTier struct {
	locked  bool
	servers []*sessiondtest.Server
	url     string
	stop    func()
}

// startFrontEnds starts the front-ends of a cluster, whose links to the nodes are their own.
func (c *cluster) startFrontEnds(ctx context.Context, locked bool) (_ *frontEndTier, err error) {
	t := &frontEndTier{locked: locked, stop: func() {}}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close(context.WithoutCancel(ctx)))
		}
	}()
	path, err := c.bin("mcpserver")
	if err != nil {
		return nil, err
	}
	free, err := sessiondtest.FreeAddrs(frontEnds + 1)
	if err != nil {
		return nil, err
	}
	for i, addr := range free[:frontEnds] {
		name := fmt.Sprintf("mcpserver-%d", i+1)
		args := []string{
			"--listen", addr, "--sessiond", strings.Join(c.of(groups), ","), "--log-level", "error", "--ask-timeout", "20s",
			"--drain-delay", "200ms", "--grace", "3s",
			// A session whose id never arrived is destroyed by nobody: it has to end by itself, before what is left over is counted.
			"--session-ttl", "1m",
		}
		if locked {
			name += "-locked"
			args = append(args, "--lock", "--lock-ttl", "2s", "--lock-timeout", "10s")
		}
		p, err := sessiondtest.Launch(ctx, sessiondtest.Command{
			Name: name, Path: path, Args: args, Log: filepath.Join(c.dir, name+".log"), Ready: sessiondtest.HTTPReady("http://" + addr + "/readyz"),
		})
		if err != nil {
			return nil, err
		}
		t.servers = append(t.servers, &sessiondtest.Server{Process: p, Addr: addr})
	}
	b, err := balancer.New(free[:frontEnds], balancer.Options{})
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", free[frontEnds])
	if err != nil {
		return nil, err
	}
	serving, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { _ = b.Serve(serving, l) }) // it fails only if the listener does, and then every request tells
	t.stop = func() {
		cancel()
		wg.Wait()
	}
	t.url = "http://" + free[frontEnds] + "/mcp"
	return t, nil
}

func (t *frontEndTier) close(ctx context.Context) error {
	t.stop()
	var errs []error
	for _, s := range t.servers {
		errs = append(errs, s.Terminate(ctx))
	}
	return errors.Join(errs...)
}

// visits is MCP clients at work on front-ends, on one session after the other in each slot.
type visits struct {
	seed  uint64
	tier  *frontEndTier
	slots int
	clock clock
	calm  *calm
	judge func(*visit)
}

const (
	visitors = 3
	perVisit = 25
	// How long a request may take, with all that may break under it.
	requestTimeout = 40 * time.Second
	// How soon a cancelled request must be over, in calm times.
	cancelled = 6 * time.Second
)

// A visit is what the clients of one MCP session saw.
type visit struct {
	session string
	locked  bool
	// calls are those that change something; last is what was there in the end.
	calls []mcpCall
	total int64
	notes map[string]string
	// done is how many requests there were, answered how many brought a result.
	done, answered int
	violations     []Violation
}

// An mcpCall changed the session, or may have.
type mcpCall struct {
	call, ret int64
	key       string // of a note; empty for the counter
	value     string // that was set, or the total that was answered
	ok        bool
	total     int64
}

// checkVisit: under the lock no update is lost, each total is answered once, and they grow in real time (F4). Without it what was set
// last under a key is there in the end (F3). What was not answered may have happened or not.
func checkVisit(v *visit) []Violation {
	violations := v.violations
	fail := func(format string, args ...any) {
		violations = append(violations, Violation{Rule: "front-ends", Session: v.session, Text: fmt.Sprintf(format, args...)})
	}
	var adds []mcpCall
	unknown := int64(0)
	last := map[string]mcpCall{} // the last acknowledged note of each key
	for _, c := range v.calls {
		switch {
		case c.key == "" && c.ok:
			adds = append(adds, c)
		case c.key == "":
			unknown++
		case c.ok && c.call > last[c.key].call:
			last[c.key] = c
		}
	}
	if v.locked {
		if n := int64(len(adds)); v.total < n || v.total > n+unknown {
			fail("the total is %d after %d acknowledged additions and %d unknown ones", v.total, n, unknown)
		}
		slices.SortFunc(adds, func(a, b mcpCall) int { return cmp.Compare(a.total, b.total) })
		first := int64(never)
		for i, a := range slices.Backward(adds) {
			if i > 0 && adds[i-1].total == a.total {
				fail("two additions were answered %d", a.total)
			}
			if first < a.call {
				fail("total %d was answered to an addition that began after a later total had been answered", a.total)
			}
			first = min(first, a.ret)
		}
	}
	for key, c := range last {
		got := v.notes[key]
		legal := got == c.value
		for _, other := range v.calls {
			legal = legal || other.key == key && !other.ok && other.value == got && other.call > c.call
		}
		if !legal {
			fail("note %s is %q, but %q was acknowledged last", key, got, c.value)
		}
	}
	return violations
}

func (w *visits) run(ctx, stop context.Context) {
	var slots sync.WaitGroup
	for slot := range w.slots {
		slots.Go(func() {
			for n := 0; stop.Err() == nil && ctx.Err() == nil; n++ {
				w.visit(ctx, stop, slot, n)
			}
		})
	}
	slots.Wait()
}

// visit is the life of one MCP session.
func (w *visits) visit(ctx, stop context.Context, slot, n int) {
	kind := uint64(0x40)
	v := &visit{session: fmt.Sprintf("mcp-%d-%d", slot, n), locked: w.tier.locked}
	if v.locked {
		v.session, kind = "locked-"+v.session, 0x41
	}
	s := &mcpSession{visits: w, visit: v}
	for !s.open(ctx) {
		if !pause(stop, 200*time.Millisecond) {
			return
		}
	}
	var clients sync.WaitGroup
	for i := range visitors {
		r := random(w.seed, kind, uint64(slot), uint64(n), uint64(i))
		clients.Go(func() {
			for k := 0; k < perVisit && stop.Err() == nil && ctx.Err() == nil; k++ {
				if !s.act(ctx, r, i, k) {
					pause(stop, time.Duration(100+r.IntN(300))*time.Millisecond)
				}
			}
		})
	}
	clients.Wait()
	for ctx.Err() == nil && !s.close(ctx) {
		pause(ctx, 200*time.Millisecond)
	}
	if ctx.Err() == nil {
		w.judge(v)
	}
}

// mcpSession speaks HTTP itself, to see every answer as it is.
type mcpSession struct {
	*visits
	visit *visit
	id    string

	mu   sync.Mutex
	gone bool
}

type rpcMessage struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Error  json.RawMessage `json:"error"`
	Result struct {
		Content []struct{ Text string } `json:"content"`
		IsError bool                    `json:"isError"`
	} `json:"result"`
}

func (s *mcpSession) fail(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.visit.violations = append(s.visit.violations, Violation{Rule: "front-ends", Session: s.visit.session, Text: fmt.Sprintf(format, args...)})
}

func (s *mcpSession) note(c mcpCall) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.visit.calls = append(s.visit.calls, c)
}

// send makes a request. Only what a server that breaks may answer is an error; whatever else is wrong is a violation.
func (s *mcpSession) send(ctx context.Context, method, body string, each func(rpcMessage)) (int, http.Header, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, s.tier.url, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	if s.id != "" {
		req.Header.Set("Mcp-Session-Id", s.id)
		req.Header.Set("Mcp-Protocol-Version", "2025-11-25")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	switch resp.StatusCode {
	case http.StatusOK, http.StatusAccepted, http.StatusNoContent, http.StatusBadGateway, http.StatusServiceUnavailable:
	case http.StatusNotFound:
		s.mu.Lock()
		gone := s.gone
		s.mu.Unlock()
		if !gone {
			s.fail("404 to %s %s although the session lives (F6)", method, body)
		}
	default:
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		s.fail("%s to %s %s: %s", resp.Status, method, body, text)
	}
	if resp.StatusCode != http.StatusOK || each == nil {
		_, err := io.Copy(io.Discard, resp.Body)
		return resp.StatusCode, resp.Header, err
	}
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		var m rpcMessage
		if err := json.NewDecoder(resp.Body).Decode(&m); err != nil {
			return 0, nil, err
		}
		each(m)
		return resp.StatusCode, resp.Header, nil
	}
	lines := bufio.NewReader(resp.Body)
	for {
		line, err := lines.ReadBytes('\n')
		if data, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data:")); ok && len(bytes.TrimSpace(data)) > 0 {
			var m rpcMessage
			if json.Unmarshal(data, &m) == nil {
				each(m)
			}
		}
		if errors.Is(err, io.EOF) {
			return resp.StatusCode, resp.Header, nil
		}
		if err != nil {
			return 0, nil, err
		}
	}
}

const (
	mcpInitialize  = `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{"elicitation":{}},"clientInfo":{"name":"chaos","version":"1"}}}`
	mcpInitialized = `{"jsonrpc":"2.0","method":"notifications/initialized"}`
	mcpSetLevel    = `{"jsonrpc":"2.0","id":"level","method":"logging/setLevel","params":{"level":"info"}}`
)

// open makes the session.
func (s *mcpSession) open(ctx context.Context) bool {
	s.id = ""
	status, header, err := s.send(ctx, http.MethodPost, mcpInitialize, func(rpcMessage) {})
	if err != nil || status != http.StatusOK || header.Get("Mcp-Session-Id") == "" {
		return false
	}
	s.id = header.Get("Mcp-Session-Id")
	status, _, err = s.send(ctx, http.MethodPost, mcpInitialized, nil)
	if err != nil || status != http.StatusAccepted {
		return false
	}
	ok := false
	_, _, err = s.send(ctx, http.MethodPost, mcpSetLevel, func(m rpcMessage) { ok = m.Error == nil })
	return err == nil && ok
}

// call calls a tool. ok says that it brought a result; each sees what else comes on the stream.
func (s *mcpSession) call(ctx context.Context, id, tool string, arguments any, each func(rpcMessage)) (text string, ok bool) {
	args, err := json.Marshal(arguments)
	if err != nil {
		return "", false
	}
	answers := 0
	status, _, err := s.send(ctx, http.MethodPost,
		fmt.Sprintf(`{"jsonrpc":"2.0","id":%q,"method":"tools/call","params":{"name":%q,"arguments":%s}}`, id, tool, args),
		func(m rpcMessage) {
			if m.Method != "" {
				if each != nil {
					each(m)
				}
				return
			}
			answers++
			if string(m.ID) != fmt.Sprintf("%q", id) {
				s.fail("the answer to %s came under %s (F2)", id, m.ID)
			}
			if m.Error == nil && !m.Result.IsError && len(m.Result.Content) == 1 {
				text, ok = m.Result.Content[0].Text, true
			}
		})
	if answers > 1 {
		s.fail("%d answers to %s (F2)", answers, id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.visit.done++
	if ok = ok && err == nil && status == http.StatusOK; ok {
		s.visit.answered++
	}
	return text, ok
}

// act makes a request, and says whether it was answered.
func (s *mcpSession) act(ctx context.Context, r *rand.Rand, client, n int) bool {
	id := fmt.Sprintf("%d-%d", client, n)
	kind := r.IntN(100)
	switch {
	case kind < 60 && s.visit.locked:
		return s.add(ctx, id)
	case kind < 75:
		c := mcpCall{call: s.clock.now(), key: fmt.Sprint("client-", client), value: id}
		_, c.ok = s.call(ctx, id, "note_set", map[string]string{"key": c.key, "value": c.value}, nil)
		c.ret = s.clock.now()
		s.note(c)
		return c.ok
	case kind < 85:
		return s.say(ctx, id, 1+r.IntN(5))
	case kind < 95:
		return s.ask(ctx, id, 1+r.IntN(3))
	case s.visit.locked:
		return s.add(ctx, id)
	default:
		return s.cancel(ctx, id, between(r, 20, 300))
	}
}

func (s *mcpSession) add(ctx context.Context, id string) bool {
	c := mcpCall{call: s.clock.now()}
	var text string
	text, c.ok = s.call(ctx, id, "counter_add", map[string]int{"by": 1}, nil)
	c.ret = s.clock.now()
	if c.ok {
		if _, err := fmt.Sscan(text, &c.total); err != nil {
			s.fail("counter_add answered %q", text)
		}
	}
	s.note(c)
	return c.ok
}

// say has the server send messages on the stream of the request, which come in order before the answer, if that comes (F19).
func (s *mcpSession) say(ctx context.Context, id string, count int) bool {
	came := 0
	text, ok := s.call(ctx, id, "say", map[string]int{"count": count, "interval_ms": 5}, func(m rpcMessage) {
		if m.Method == "notifications/message" {
			came++
		}
	})
	if ok && (came != count || text != fmt.Sprint("said ", count)) {
		s.fail("%d of %d messages came before %q", came, count, text)
	}
	return ok
}

// ask has the server ask questions, which are answered on other requests, on whatever front-end they land (F8, F9).
func (s *mcpSession) ask(ctx context.Context, id string, questions int) bool {
	var answering sync.WaitGroup
	asked := 0
	want := make([]string, 0, questions)
	text, ok := s.call(ctx, id, "ask", map[string]int{"questions": questions}, func(m rpcMessage) {
		if m.Method != "elicitation/create" {
			return
		}
		answer := fmt.Sprintf("%s.%d", id, asked)
		asked++
		want = append(want, answer)
		body := fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"action":"accept","content":{"answer":%q}}}`, m.ID, answer)
		answering.Go(func() {
			for range 20 {
				if status, _, err := s.send(ctx, http.MethodPost, body, nil); err == nil && status == http.StatusAccepted {
					return
				}
				pause(ctx, 200*time.Millisecond)
			}
		})
	})
	answering.Wait()
	if !ok {
		return false
	}
	expected, err := json.Marshal(want)
	if err != nil || text != string(expected) {
		s.fail("%d questions were answered %s, and the tool got %s", questions, expected, text)
	}
	return true
}

// cancel ends a request that would take long (F10).
func (s *mcpSession) cancel(ctx context.Context, id string, after time.Duration) bool {
	over := make(chan struct{})
	var sent int64
	var accepted bool
	go func() {
		defer close(over)
		if !pause(ctx, after) {
			return
		}
		body := fmt.Sprintf(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%q}}`, id)
		status, _, err := s.send(ctx, http.MethodPost, body, nil)
		sent, accepted = s.clock.now(), err == nil && status == http.StatusAccepted
	}()
	began := s.clock.now()
	const seconds = 15
	s.call(ctx, id, "slow", map[string]float64{"seconds": seconds}, nil)
	ended := s.clock.now()
	<-over
	// If a fault was at work, it may have come before the request, and matched nothing.
	quiet := s.calm.disturbed().calm(began, ended) == time.Duration(ended-began)
	if accepted && quiet && time.Duration(ended-sent) > cancelled {
		s.fail("a request that was cancelled after %v was over %v later", time.Duration(sent-began), time.Duration(ended-sent))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if accepted {
		s.visit.answered++ // that there is no result is the answer
	}
	return accepted
}

// close notes what there is in the end and ends the session (F13). It is done again until it succeeds.
func (s *mcpSession) close(ctx context.Context) bool {
	s.mu.Lock()
	gone := s.gone
	s.mu.Unlock()
	if !gone {
		total, ok := s.call(ctx, "total", "counter_add", map[string]int{"by": 0}, nil)
		notes, ok2 := s.call(ctx, "notes", "notes_list", struct{}{}, nil)
		if !ok || !ok2 {
			return false
		}
		if _, err := fmt.Sscan(total, &s.visit.total); err != nil {
			s.fail("counter_add answered %q", total)
		}
		if err := json.Unmarshal([]byte(notes), &s.visit.notes); err != nil {
			s.fail("notes_list answered %q", notes)
		}
	}
	s.mu.Lock()
	s.gone = true // from now on it may be
	s.mu.Unlock()
	status, _, err := s.send(ctx, http.MethodDelete, "", nil)
	if err != nil || status == http.StatusBadGateway || status == http.StatusServiceUnavailable {
		return false
	}
	status, _, err = s.send(ctx, http.MethodPost, mcpSetLevel, nil)
	if err == nil && (status == http.StatusOK || status == http.StatusAccepted) {
		s.fail("%d after DELETE", status)
	}
	return true
}

// takeVisit judges a visit.
func (j *judge) takeVisit(v *visit, logf func(string, ...any)) {
	violations := checkVisit(v)
	for _, violation := range violations {
		logf("VIOLATION %v", violation)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	t := &j.totals
	t.Visits++
	t.Requests += v.done
	t.RequestsAnswered += v.answered
	t.Violations = append(t.Violations, violations...)
}
