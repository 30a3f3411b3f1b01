//go:build unix

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// count is how often to repeat what must never fail. E2E_COUNT asks for more than the default, which is quick.
func count(t *testing.T) int {
	t.Helper()
	const quick = 200
	text := os.Getenv("E2E_COUNT")
	if text == "" {
		return quick
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("E2E_COUNT=%q: want a number, 1 or more", text)
	}
	return n
}

// What one front-end runs and another is told: answers, cancellations, changes. All requests go to a front-end of the test's
// choice, never to one that happens to be the right one. First while all is well, then while sessiond nodes are killed.
func TestAcrossFrontEnds(t *testing.T) {
	c := sessiondtest.StartCluster(t, sessiondtest.ClusterConfig{Members: 1, FrontEndArgs: []string{"--everything"}})
	locked := []*sessiondtest.Server{}
	for range 3 {
		locked = append(locked, startFrontEnd(t, c, "--everything", "--lock", "--drain-delay", "0s"))
	}
	for _, tt := range []struct {
		name      string
		frontEnds []*sessiondtest.Server
	}{{"", c.FrontEnds}, {" with lock", locked}} {
		t.Run("answers"+tt.name, func(t *testing.T) { testAnswersAcross(t, tt.frontEnds, nil) })
		t.Run("answers while nodes are killed"+tt.name, func(t *testing.T) { testAnswersAcross(t, tt.frontEnds, c.Nodes) })
		t.Run("cancellations"+tt.name, func(t *testing.T) { testCancellationsAcross(t, tt.frontEnds, nil) })
		t.Run("cancellations while nodes are killed"+tt.name, func(t *testing.T) { testCancellationsAcross(t, tt.frontEnds, c.Nodes) })
	}
	t.Run("asker killed", func(t *testing.T) { testAskerKilled(t, c) })
	t.Run("stream on a dead front-end", func(t *testing.T) { testStreamOnTheDead(t, c) })
}

// A reply is a response that is read message by message, as they come.
type reply struct {
	*http.Response

	lines *bufio.Scanner
	id    string // of the last event
}

// begin sends a request and gives its response as soon as that begins.
func (s rawSession) begin(ctx context.Context, method, body string) (*reply, error) {
	req, err := http.NewRequestWithContext(ctx, method, s.url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("Mcp-Session-Id", s.id)
	req.Header.Set("Mcp-Protocol-Version", handshakeEra)
	resp, err := rawClient.Do(req)
	if err != nil {
		return nil, err
	}
	return newReply(resp), nil
}

func newReply(resp *http.Response) *reply {
	r := &reply{Response: resp, lines: bufio.NewScanner(resp.Body)}
	r.lines.Buffer(nil, 16<<20)
	return r
}

// next gives the next message. io.EOF: the response has ended in order.
func (r *reply) next() (rpcMessage, error) {
	var m rpcMessage
	for r.lines.Scan() {
		line := strings.TrimSpace(r.lines.Text())
		if id, ok := strings.CutPrefix(line, "id:"); ok {
			r.id = strings.TrimSpace(id)
		}
		data, ok := strings.CutPrefix(line, "data:")
		if !ok && !strings.HasPrefix(line, "{") || strings.TrimSpace(data) == "" && ok {
			continue
		}
		if !ok {
			data = line
		}
		err := json.Unmarshal([]byte(data), &m)
		return m, err
	}
	if err := r.lines.Err(); err != nil {
		return m, err
	}
	return m, io.EOF
}

// until reads up to a message of the method ("": an answer).
func (r *reply) until(method string) (rpcMessage, error) {
	for {
		m, err := r.next()
		if err != nil || m.Method == method {
			return m, err
		}
	}
}

func (r *reply) close() { _ = r.Body.Close() }

// at is the same session, by way of a certain front-end.
func (s rawSession) at(fe *sessiondtest.Server) rawSession {
	return rawSession{url: mcpURL(fe.Addr), id: s.id}
}

// accepted posts what needs no answer, again for as long as it is refused with 503, and counts that.
func (s rawSession) accepted(ctx context.Context, body string, refused *atomic.Int64) error {
	return sessiondtest.Poll(ctx, func(ctx context.Context) error {
		resp, err := s.begin(ctx, http.MethodPost, body)
		if err != nil {
			return err
		}
		defer resp.close()
		text, err := io.ReadAll(resp.Body)
		switch {
		case resp.StatusCode == http.StatusServiceUnavailable:
			refused.Add(1)
			return fmt.Errorf("%s %s", resp.Status, text)
		case resp.StatusCode != http.StatusAccepted || len(text) > 0 || err != nil:
			return sessiondtest.Final(fmt.Errorf("%s %s %w", resp.Status, text, err))
		}
		return nil
	})
}

// calling begins a call, again for as long as it is refused with 503, and counts that.
func (s rawSession) calling(ctx context.Context, message string, refused *atomic.Int64) (*reply, error) {
	var r *reply
	err := sessiondtest.Poll(ctx, func(ctx context.Context) error {
		var err error
		r, err = s.begin(ctx, http.MethodPost, message)
		switch {
		case err != nil:
			return err
		case r.StatusCode == http.StatusServiceUnavailable:
			refused.Add(1)
			r.close()
			return errors.New(r.Status)
		case r.StatusCode != http.StatusOK:
			r.close()
			return sessiondtest.Final(errors.New(r.Status))
		}
		return nil
	})
	return r, err
}

// durations are times that were measured concurrently.
type durations struct {
	mu  sync.Mutex
	all []time.Duration
}

func (d *durations) add(took time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = append(d.all, took)
}

func (d *durations) reset() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = nil
}

func (d *durations) String() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.all) == 0 {
		return "none"
	}
	slices.Sort(d.all)
	at := func(q float64) time.Duration {
		return d.all[int(q*float64(len(d.all)-1))].Round(100 * time.Microsecond)
	}
	return fmt.Sprintf("%d, median %s, 99 %% %s, longest %s", len(d.all), at(0.5), at(0.99), at(1))
}

func (d *durations) median() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.all) == 0 {
		return 0
	}
	slices.Sort(d.all)
	return d.all[len(d.all)/2]
}

// killInTurn kills the servers one after the other, each for as long as it takes progress to grow a little, until done is
// closed. It returns how many it killed. At the end all run.
func killInTurn(t *testing.T, victims []*sessiondtest.Server, progress *atomic.Int64, done <-chan struct{}) int {
	t.Helper()
	grow := func() {
		from := progress.Load()
		_ = sessiondtest.Poll(within(t, patience), func(context.Context) error {
			select {
			case <-done:
				return nil
			default:
			}
			if progress.Load() < from+10 {
				return errors.New("not yet")
			}
			return nil
		})
	}
	killed := 0
	for {
		select {
		case <-done:
			return killed
		default:
		}
		victim := victims[killed%len(victims)]
		if err := victim.Kill(); err != nil {
			t.Error(err)
			return killed
		}
		killed++
		grow()
		if err := victim.Restart(within(t, patience)); err != nil {
			t.Error(err)
			return killed
		}
		grow()
	}
}

// runWhileKilling runs workers, and kills victims meanwhile, if there are any.
func runWhileKilling(t *testing.T, workers int, victims []*sessiondtest.Server, progress *atomic.Int64, work func(worker int)) (killed int) {
	t.Helper()
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() { work(w) })
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	if len(victims) > 0 {
		killed = killInTurn(t, victims, progress, done)
	}
	<-done
	return killed
}

// testAnswersAcross asks a client on one front-end and answers through another. No answer may be lost, none may come to
// another call, and the handler goes on soon (F8, F9; C42). Each call asks twice. What is measured is the time from sending
// the answer until what the handler does next arrives here, so it is an upper bound.
func testAnswersAcross(t *testing.T, frontEnds, victims []*sessiondtest.Server) {
	// Few at a time: what is measured is how long one takes, not how many this machine can do.
	const workers, questions = 2, 2
	calls := count(t) / questions
	var next, progress, refused atomic.Int64
	var took durations
	killed := runWhileKilling(t, workers, victims, &progress, func(w int) {
		ctx := within(t, 4*time.Minute)
		s := openRaw(t, mcpURL(frontEnds[w%len(frontEnds)].Addr))
		for n := next.Add(1); n <= int64(calls); n = next.Add(1) {
			asker := int(n) % len(frontEnds)
			r, err := s.at(frontEnds[asker]).calling(ctx, callMessage("1", "ask", fmt.Sprintf(`{"questions":%d}`, questions)), &refused)
			if err != nil {
				t.Errorf("call %d: %v", n, err)
				return
			}
			var want []string
			m, err := r.next()
			for q := 0; q < questions && err == nil && m.Method == "elicitation/create"; q++ {
				answer := fmt.Sprintf("answer %d of call %d", q, n)
				want = append(want, answer)
				begin := time.Now()
				err = s.at(frontEnds[(asker+1+q)%len(frontEnds)]).accepted(ctx,
					fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"action":"accept","content":{"answer":%q}}}`, m.ID, answer), &refused)
				if err == nil {
					m, err = r.next()
					took.add(time.Since(begin))
				}
				progress.Add(1)
			}
			r.close()
			var got []string
			if err == nil && len(m.Result.Content) == 1 {
				err = json.Unmarshal([]byte(m.Result.Content[0].Text), &got)
			}
			if err != nil || len(want) != questions || !slices.Equal(got, want) {
				t.Errorf("call %d: answered %q, the handler got %q: %+v, %v", n, want, got, m, err)
				return
			}
		}
	})
	t.Logf("from answer to the handler's next step: %s; %d nodes killed, %d POSTs refused (503)", &took, killed, refused.Load())
	// A wait that polled or timed out somewhere would be far beyond this, on the slowest machine.
	if m := took.median(); m == 0 || m > time.Second {
		t.Errorf("a handler goes on %s after the answer", m)
	}
}

// testCancellationsAcross runs a call on one front-end and cancels it through another: each handler's context ends within a
// second, and the call has no result (F10; C54). Some are cancelled at once, some when the call has run for a while,
// which are two paths: only calls that are not over soon subscribe to what others tell them.
func testCancellationsAcross(t *testing.T, frontEnds, victims []*sessiondtest.Server) {
	const workers = 16
	calls := count(t)
	var next, progress, refused atomic.Int64
	var mu sync.Mutex
	sent := map[string]time.Time{}
	killed := runWhileKilling(t, workers, victims, &progress, func(w int) {
		ctx := within(t, 4*time.Minute)
		s := openRaw(t, mcpURL(frontEnds[w%len(frontEnds)].Addr))
		for n := next.Add(1); n <= int64(calls); n = next.Add(1) {
			name, runner := fmt.Sprint(t.Name(), " ", n), int(n)%len(frontEnds)
			r, err := s.at(frontEnds[runner]).calling(ctx, fmt.Sprintf(
				`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"test_wait","arguments":{"name":%q},"_meta":{"progressToken":1}}}`, n, name), &refused)
			if err == nil {
				_, err = r.until("notifications/progress")
			}
			if err != nil {
				t.Errorf("call %d: %v", n, err)
				return
			}
			if n%2 == 0 {
				<-time.After(150 * time.Millisecond)
			}
			begin := time.Now()
			err = s.at(frontEnds[(runner+1+int(n/2)%2)%len(frontEnds)]).accepted(ctx,
				fmt.Sprintf(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%d}}`, n), &refused)
			mu.Lock()
			sent[name] = begin
			mu.Unlock()
			if err != nil {
				t.Errorf("cancellation %d: %v", n, err)
				return
			}
			if m, err := r.next(); !errors.Is(err, io.EOF) {
				t.Errorf("the cancelled call %d brought %+v, %v", n, m, err)
				return
			}
			r.close()
			progress.Add(1)
		}
	})
	var took durations
	ends := map[string]struct {
		At    time.Time
		Cause string
	}{}
	for _, fe := range frontEnds {
		text := openRaw(t, mcpURL(fe.Addr)).call(t, "1", "test_waits", `{}`)
		if err := json.Unmarshal([]byte(text), &ends); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	// A front-end whose node was killed has to find another one first.
	limit, late := time.Second, 0
	if len(victims) > 0 {
		limit = 2 * time.Second
	}
	for name, begin := range sent {
		end, ok := ends[name]
		if !ok || end.Cause != context.Canceled.Error() {
			t.Errorf("the handler of %s was not cancelled: %+v", name, end)
			continue
		}
		after := end.At.Sub(begin)
		took.add(after)
		if after > limit {
			late++
		}
	}
	t.Logf("from cancellation to the end of the handler's context: %s; %d nodes killed, %d POSTs refused (503)", &took, killed, refused.Load())
	if late > 0 {
		t.Errorf("%d of %d handlers were cancelled after more than %s", late, len(sent), limit)
	}
}

// testAskerKilled kills a front-end whose handler waits for the client. The answer is accepted all the same, and the next call
// is served, both at once: nothing waits for the dead (F9, F14; C47).
func testAskerKilled(t *testing.T, c *sessiondtest.Cluster) {
	for _, args := range [][]string{{"--everything"}, {"--everything", "--lock"}} {
		dies, other := startFrontEnd(t, c, args...), startFrontEnd(t, c, append(args, "--drain-delay", "0s")...)
		ctx := within(t, patience)
		s := openRaw(t, mcpURL(other.Addr))
		ask, err := s.at(dies).begin(ctx, http.MethodPost, callMessage("1", "ask", `{"questions":1}`))
		if err != nil {
			t.Fatal(err)
		}
		defer ask.close()
		question, err := ask.until("elicitation/create")
		if err != nil {
			t.Fatal(err)
		}
		if err := dies.Kill(); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		var refused atomic.Int64
		err = s.at(other).accepted(ctx, fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"action":"accept","content":{"answer":"x"}}}`, question.ID), &refused)
		if err != nil || refused.Load() > 0 {
			t.Errorf("the answer was refused %d times: %v", refused.Load(), err)
		}
		if got := s.at(other).call(t, "2", "counter_add", `{"by":1}`); got != "1" {
			t.Errorf("the next call: %q", got)
		}
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("%v: answer and call took %s", args, took)
		}
	}
}

// testStreamOnTheDead opens a standalone stream while an older one is on a front-end that is dead or does not answer: it opens
// at once, and carries what is due (F11; C67).
func testStreamOnTheDead(t *testing.T, c *sessiondtest.Cluster) {
	const uri = "test://watched-resource"
	for name, end := range map[string]func(*sessiondtest.Process) error{
		"killed": (*sessiondtest.Process).Kill, "frozen": (*sessiondtest.Process).Pause,
	} {
		dead := startFrontEnd(t, c, "--everything", "--drain-delay", "0s")
		ctx := within(t, patience)
		s := openRaw(t, mcpURL(dead.Addr))
		if status, body := s.post(t, fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":"resources/subscribe","params":{"uri":%q}}`, uri)); status != http.StatusOK {
			t.Fatalf("subscribe: %d %s", status, body)
		}
		old, err := s.begin(ctx, http.MethodGet, "")
		if err != nil || old.StatusCode != http.StatusOK {
			t.Fatalf("GET: %+v, %v", old, err)
		}
		defer old.close()
		if err := end(dead.Process); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		stream, err := s.at(c.FrontEnds[0]).begin(ctx, http.MethodGet, "")
		if err != nil || stream.StatusCode != http.StatusOK {
			t.Fatalf("%s: GET elsewhere: %+v, %v", name, stream, err)
		}
		defer stream.close()
		if took := time.Since(begin); took > time.Second {
			t.Errorf("%s: the new stream opened after %s", name, took)
		}
		if got := s.at(c.FrontEnds[1]).call(t, "1", "test_update_resource", fmt.Sprintf(`{"uri":%q}`, uri)); got != "updated" {
			t.Fatalf("update: %s", got)
		}
		if m, err := stream.next(); err != nil || m.Method != "notifications/resources/updated" {
			t.Errorf("%s: the new stream brought %+v, %v", name, m, err)
		}
		t.Logf("%s: told on the new stream %s after it was asked for", name, time.Since(begin).Round(time.Millisecond))
		if err := dead.Continue(); err != nil {
			t.Error(err)
		}
	}
}

// A front-end that is cut off from sessiond is not ready and answers 503 at once, never 404; what happens elsewhere meanwhile
// reaches it when it is back: answers, cancellations, what is due on streams of both eras (F6, F9, F10, F11, F12; C54, C79).
// Its connections may break, or just fall silent.
func TestCutOffFrontEnd(t *testing.T) {
	c := sessiondtest.StartCluster(t, sessiondtest.ClusterConfig{Members: 1, Nodes: 2, FrontEnds: 1, FrontEndArgs: []string{"--everything"}})
	for _, lock := range []bool{false, true} {
		args := []string{"--everything", "--lock=" + strconv.FormatBool(lock), "--drain-delay", "0s"}
		t.Run("cut "+args[1], func(t *testing.T) {
			t.Parallel() // it waits for most of the time
			testCutOff(t, c, args, time.Second, (*sessiondtest.Link).Cut, (*sessiondtest.Link).Restore)
		})
		t.Run("frozen "+args[1], func(t *testing.T) {
			t.Parallel()
			// The time limit of a call passes; one that waits for a lock ends when the nodes are asked for a sign of life.
			testCutOff(t, c, args, 6*time.Second, (*sessiondtest.Link).Freeze, func(k *sessiondtest.Link) error { k.Thaw(); return nil })
		})
	}
}

func testCutOff(t *testing.T, c *sessiondtest.Cluster, args []string, limit time.Duration, cut func(*sessiondtest.Link), mend func(*sessiondtest.Link) error) {
	var links []*sessiondtest.Link
	var addrs []string
	for _, n := range c.Nodes {
		k := sessiondtest.StartLink(t, n.Addr)
		links, addrs = append(links, k), append(addrs, k.Addr())
	}
	addr := freeAddr(t)
	sessiondtest.StartProcess(t, sessiondtest.Command{
		Name:  "mcpserver-cut-off",
		Path:  binary(t, "mcpserver"),
		Args:  append([]string{"--listen", addr, "--sessiond", strings.Join(addrs, ",")}, args...),
		Log:   filepath.Join(t.TempDir(), "mcpserver.log"),
		Ready: sessiondtest.HTTPReady("http://" + addr + "/readyz"),
	})
	// The other one has the same settings.
	other := startFrontEnd(t, c, args...)
	ctx := within(t, 2*time.Minute)
	var refused atomic.Int64
	begin := func(s rawSession, method, message, until string) (*reply, rpcMessage) {
		t.Helper()
		r, err := s.begin(ctx, method, message)
		if err != nil || r.StatusCode != http.StatusOK {
			t.Fatalf("%s: %+v, %v", message, r, err)
		}
		t.Cleanup(r.close)
		var m rpcMessage
		if until != "" {
			if m, err = r.until(until); err != nil {
				t.Fatalf("%s: %v", message, err)
			}
		}
		return r, m
	}

	// Three calls that wait, each in a session of its own so that the lock parts them, and streams of both eras.
	const uri = "test://watched-resource"
	asked, waiting, listening := openRaw(t, mcpURL(addr)), openRaw(t, mcpURL(addr)), openRaw(t, mcpURL(addr))
	ask, question := begin(asked, http.MethodPost, callMessage("1", "ask", `{"questions":2}`), "elicitation/create")
	wait, _ := begin(waiting, http.MethodPost, fmt.Sprintf(
		`{"jsonrpc":"2.0","id":"w","method":"tools/call","params":{"name":"test_wait","arguments":{"name":%q},"_meta":{"progressToken":1}}}`, t.Name()), "notifications/progress")
	if status, body := listening.post(t, fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":"resources/subscribe","params":{"uri":%q}}`, uri)); status != http.StatusOK {
		t.Fatalf("subscribe: %d %s", status, body)
	}
	stream, _ := begin(listening, http.MethodGet, "", "")
	modern := startListening(t, mcpURL(addr), uri)
	// All of it works, before anything breaks.
	update := func() {
		t.Helper()
		s := openRaw(t, mcpURL(other.Addr))
		if got := s.call(t, "1", "test_update_resource", fmt.Sprintf(`{"uri":%q}`, uri)); got != "updated" {
			t.Fatalf("update: %s", got)
		}
	}
	told := func(r *reply, what string) {
		t.Helper()
		m, err := r.until("notifications/resources/updated")
		if err != nil || !strings.Contains(string(m.Params), uri) {
			t.Fatalf("%s was not told of the update: %+v, %v", what, m, err)
		}
	}
	update()
	told(stream, "the standalone stream")
	told(modern, "the listener")

	for _, k := range links {
		cut(k)
	}
	cutAt := time.Now()
	if err := sessiondtest.Poll(within(t, patience), func(ctx context.Context) error {
		if sessiondtest.HTTPReady("http://"+addr+"/readyz")(ctx) == nil {
			return errors.New("still ready")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("not ready %s after it was cut off", time.Since(cutAt).Round(time.Millisecond))
	stranger, newcomer := rawSession{url: mcpURL(addr), id: "no-such-session"}, rawSession{url: mcpURL(addr)}
	for _, tt := range []struct {
		name, id string
		s        rawSession
		method   string
		body     string
	}{
		{"call", `7`, listening, http.MethodPost, callMessage("7", "echo", `{"text":"x"}`)},
		{"ping", `8`, listening, http.MethodPost, `{"jsonrpc":"2.0","id":8,"method":"ping"}`},
		{"answer", ``, asked, http.MethodPost, fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"action":"decline"}}`, question.ID)},
		{"cancellation", ``, waiting, http.MethodPost, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"w"}}`},
		{"GET", ``, listening, http.MethodGet, ""},
		{"DELETE", ``, listening, http.MethodDelete, ""},
		{"initialize", `0`, newcomer, http.MethodPost, initializeMessage},
		{"unknown session", `9`, stranger, http.MethodPost, callMessage("9", "echo", `{"text":"x"}`)},
	} {
		begin := time.Now()
		resp := tt.s.send(ctx, t, tt.method, tt.body)
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		took := time.Since(begin)
		var m rpcMessage
		if err == nil {
			err = json.Unmarshal(body, &m)
		}
		if err != nil || resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || len(m.Error) == 0 ||
			strings.TrimPrefix(string(m.ID), "null") != tt.id {
			t.Errorf("%s: %s %v %s, %v; want 503 with Retry-After and an error under id %q", tt.name, resp.Status, resp.Header, body, err, tt.id)
		}
		if took > limit {
			t.Errorf("%s was refused after %s", tt.name, took)
		}
	}

	// Meanwhile, elsewhere.
	if err := asked.at(other).accepted(ctx, fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"action":"accept","content":{"answer":"first"}}}`, question.ID), &refused); err != nil {
		t.Errorf("answer elsewhere: %v", err)
	}
	if err := waiting.at(other).accepted(ctx, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"w"}}`, &refused); err != nil {
		t.Errorf("cancellation elsewhere: %v", err)
	}
	update()

	for _, k := range links {
		if err := mend(k); err != nil {
			t.Fatal(err)
		}
	}
	mended := time.Now()
	if err := sessiondtest.Poll(within(t, patience), sessiondtest.HTTPReady("http://"+addr+"/readyz")); err != nil {
		t.Fatalf("not ready again: %v", err)
	}
	if m, err := wait.next(); !errors.Is(err, io.EOF) {
		t.Errorf("the cancelled call brought %+v, %v", m, err)
	}
	t.Logf("the cancelled call ended %s after the connection was back", time.Since(mended).Round(time.Millisecond))
	// The handler goes on with the answer and asks once more.
	second, err := ask.until("elicitation/create")
	if err != nil {
		t.Fatalf("the answer that was given elsewhere is lost: %v", err)
	}
	t.Logf("the handler went on %s after the connection was back", time.Since(mended).Round(time.Millisecond))
	if err := asked.at(other).accepted(ctx, fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"action":"accept","content":{"answer":"second"}}}`, second.ID), &refused); err != nil {
		t.Errorf("second answer: %v", err)
	}
	if m, err := ask.until(""); err != nil || len(m.Result.Content) != 1 || m.Result.Content[0].Text != `["first","second"]` {
		t.Errorf("ask brought %+v, %v", m, err)
	}
	told(stream, "the standalone stream")
	told(modern, "the listener")
	// Once each: the next thing that is told is the next thing that happens.
	update()
	told(stream, "the standalone stream")
	told(modern, "the listener")
	if status, body := listening.at(other).post(t, `{"jsonrpc":"2.0","id":1,"method":"ping"}`); status != http.StatusOK {
		t.Errorf("the session is gone: %d %s", status, body)
	}
	if n := refused.Load(); n > 0 {
		t.Errorf("the other front-end refused %d POSTs", n)
	}
}

// startListening opens a modern client's subscription to a resource and returns it once it is acknowledged.
func startListening(t *testing.T, url, uri string) *reply {
	t.Helper()
	const meta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"` + modernEra + `","io.modelcontextprotocol/clientInfo":{"name":"raw","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`
	req, err := http.NewRequestWithContext(within(t, 2*time.Minute), http.MethodPost, url, strings.NewReader(fmt.Sprintf(
		`{"jsonrpc":"2.0","id":"l","method":"subscriptions/listen","params":{"notifications":{"resourceSubscriptions":[%q]},%s}}`, uri, meta)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("Mcp-Protocol-Version", modernEra)
	req.Header.Set("Mcp-Method", "subscriptions/listen")
	resp, err := rawClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	r := newReply(resp)
	t.Cleanup(r.close)
	if m, err := r.until("notifications/subscriptions/acknowledged"); err != nil {
		t.Fatalf("listen: %s %+v %v", resp.Status, m, err)
	}
	return r
}
