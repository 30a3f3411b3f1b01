//go:build unix

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sessiond/sessiond/sessiond/e2e/balancer"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// A rawSession speaks HTTP itself, for what a client library hides: which response brought which answer, and when.
type rawSession struct {
	url, id string
}

// rawClient keeps the connections of many sessions.
var rawClient = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}

const initializeMessage = `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{"elicitation":{}},"clientInfo":{"name":"raw","version":"1"}}}`

func openRaw(t *testing.T, url string) rawSession {
	t.Helper()
	s := rawSession{url: url}
	resp := s.send(t.Context(), t, http.MethodPost, initializeMessage)
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	s.id = resp.Header.Get("Mcp-Session-Id")
	if resp.StatusCode != http.StatusOK || s.id == "" {
		t.Fatalf("initialize: %s %s", resp.Status, body)
	}
	if status, body := s.post(t, `{"jsonrpc":"2.0","method":"notifications/initialized"}`); status != http.StatusAccepted {
		t.Fatalf("initialized: %d %s", status, body)
	}
	return s
}

func (s rawSession) send(ctx context.Context, t *testing.T, method, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, s.url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	if s.id != "" {
		req.Header.Set("Mcp-Session-Id", s.id)
		req.Header.Set("Mcp-Protocol-Version", "2025-11-25")
	}
	resp, err := rawClient.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, body, err)
	}
	return resp
}

// post sends one message and gives what came back, whole.
func (s rawSession) post(t *testing.T, body string) (status int, answer string) {
	t.Helper()
	resp := s.send(within(t, patience), t, http.MethodPost, body)
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return resp.StatusCode, string(b)
}

func callMessage(id, tool, args string) string {
	return fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"method":"tools/call","params":{"name":%q,"arguments":%s}}`, id, tool, args)
}

type rpcMessage struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Error  json.RawMessage `json:"error"`
	Result struct {
		Content []struct{ Text string } `json:"content"`
		IsError bool                    `json:"isError"`
	} `json:"result"`
}

// call calls a tool and gives the text of its result. The answer must be the only one in the response, under the same id,
// byte for byte.
func (s rawSession) call(t *testing.T, id, tool, args string) string {
	t.Helper()
	status, body := s.post(t, callMessage(id, tool, args))
	if status != http.StatusOK {
		t.Errorf("%s %s: %d %s", tool, args, status, body)
		return ""
	}
	var answers []rpcMessage
	for _, m := range rpcMessages(t, body) {
		if m.Method == "" {
			answers = append(answers, m)
		}
	}
	if len(answers) != 1 || string(answers[0].ID) != id || len(answers[0].Result.Content) != 1 {
		t.Errorf("%s %s under id %s brought %s", tool, args, id, body)
		return ""
	}
	return answers[0].Result.Content[0].Text
}

// try calls a tool and gives the text of its result, or why there is none. A status other than 502 and 503, or an answer
// that is not that call's, fails the test.
func (s rawSession) try(t *testing.T, tool string, args map[string]any) (string, error) {
	t.Helper()
	arguments, err := json.Marshal(args)
	if err != nil {
		t.Fatal(err)
	}
	status, body := s.post(t, callMessage("1", tool, string(arguments)))
	switch status {
	case http.StatusBadGateway, http.StatusServiceUnavailable:
		return "", fmt.Errorf("%d %s", status, body)
	case http.StatusOK:
	default:
		t.Errorf("%s: %d %s", tool, status, body)
		return "", sessiondtest.Final(fmt.Errorf("status %d", status))
	}
	answers := rpcMessages(t, body)
	if len(answers) != 1 || len(answers[0].Result.Content) != 1 {
		return "", sessiondtest.Final(fmt.Errorf("%s brought %s", tool, body))
	}
	return answers[0].Result.Content[0].Text, nil
}

// rpcMessages takes the messages out of a response, be it JSON or a stream of events.
func rpcMessages(t *testing.T, body string) []rpcMessage {
	t.Helper()
	datas := []string{body}
	if !strings.HasPrefix(body, "{") {
		datas = nil
		for line := range strings.Lines(body) {
			if data, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "data:"); ok && strings.TrimSpace(data) != "" {
				datas = append(datas, data)
			}
		}
	}
	var out []rpcMessage
	for _, data := range datas {
		var m rpcMessage
		if err := json.Unmarshal([]byte(data), &m); err != nil {
			t.Errorf("%v: %s", err, data)
			continue
		}
		out = append(out, m)
	}
	return out
}

// testAnswers checks on the wire that answers go to the POST that asked, whatever its id is.
func testAnswers(t *testing.T, c *sessiondtest.Cluster) {
	s := openRaw(t, c.URL)

	// Two requests in flight under one id: each POST gets its own answer (F2, F10).
	t.Run("same id", func(t *testing.T) {
		var wg sync.WaitGroup
		for i := range 60 {
			wg.Go(func() {
				want := fmt.Sprint("text ", i)
				if got := s.call(t, "1", "echo", fmt.Sprintf(`{"text":%q}`, want)); got != want {
					t.Errorf("got %q, want %q", got, want)
				}
			})
		}
		wg.Wait()
	})

	// Ids come back byte for byte (F10).
	t.Run("ids", func(t *testing.T) {
		for _, id := range []string{`1`, `"1"`, `-7`, `9007199254740993`, `"ä \" \\"`, `""`} {
			if got := s.call(t, id, "echo", `{"text":"x"}`); got != "x" {
				t.Errorf("id %s: got %q", id, got)
			}
		}
	})

	// An answer is sent after its effect is durable: the next request sees it, on whichever front-end it lands (F15).
	t.Run("effect before answer", func(t *testing.T) {
		for i := 1; i <= 50; i++ {
			if got := s.call(t, "1", "counter_add", `{"by":1}`); got != fmt.Sprint(i) {
				t.Fatalf("call %d: total %s", i, got)
			}
		}
	})

	// What needs no answer is accepted anywhere, and a session that nobody knows is 404 (F18).
	t.Run("statuses", func(t *testing.T) {
		stranger := rawSession{url: c.URL, id: "no-such-session"}
		for range len(c.FrontEnds) {
			if status, body := s.post(t, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"none"}}`); status != http.StatusAccepted || body != "" {
				t.Errorf("notification: %d %q", status, body)
			}
			if status, body := s.post(t, `{"jsonrpc":"2.0","id":"none","result":{}}`); status != http.StatusAccepted || body != "" {
				t.Errorf("an answer that nobody waits for: %d %q", status, body)
			}
			if status, body := stranger.post(t, callMessage("1", "echo", `{"text":"x"}`)); status != http.StatusNotFound {
				t.Errorf("unknown session: %d %s", status, body)
			}
		}
	})
}

// testOrder checks that under the lock requests run one after the other, in the order in which they arrived, and that
// what takes no lock does not wait for those that do (F4).
func testOrder(t *testing.T, c *sessiondtest.Cluster) {
	s := openRaw(t, c.URL)
	const waiters = 12

	holder := s.send(within(t, patience), t, http.MethodPost,
		`{"jsonrpc":"2.0","id":"slow","method":"tools/call","params":{"name":"slow","arguments":{"seconds":4},"_meta":{"progressToken":"p"}}}`)
	defer func() { _ = holder.Body.Close() }()
	events := bufio.NewScanner(holder.Body)
	for events.Scan() && !strings.Contains(events.Text(), "notifications/progress") {
	}
	if events.Err() != nil {
		t.Fatal(events.Err())
	}

	// The handler runs and holds the lock. The others come at intervals that are long for a request on loopback.
	totals := make([]string, waiters)
	var wg sync.WaitGroup
	tick := time.NewTicker(60 * time.Millisecond)
	defer tick.Stop()
	for i := range waiters {
		wg.Go(func() { totals[i] = s.call(t, fmt.Sprint(i), "counter_add", `{"by":1}`) })
		<-tick.C
	}
	for range len(c.FrontEnds) {
		begin := time.Now()
		if status, body := s.post(t, `{"jsonrpc":"2.0","id":"ping","method":"ping"}`); status != http.StatusOK || !strings.Contains(body, `"ping"`) {
			t.Errorf("ping: %d %s", status, body)
		}
		if took := time.Since(begin); took > time.Second {
			t.Errorf("ping waited %s for the lock", took)
		}
	}
	var rest bytes.Buffer
	for events.Scan() {
		rest.Write(events.Bytes())
	}
	if !strings.Contains(rest.String(), `"slow"`) {
		t.Errorf("the holder's own answer: %q", rest.String())
	}
	wg.Wait()
	for i, total := range totals {
		if total != fmt.Sprint(i+1) {
			t.Errorf("not in the order of arrival: totals %v", totals)
			break
		}
	}
}

// testDeleteWhileRunning checks that DELETE waits for no handler, that what runs is cancelled and its response completes
// (F13).
func testDeleteWhileRunning(t *testing.T, c *sessiondtest.Cluster) {
	s := openRaw(t, c.URL)
	running := s.send(within(t, patience), t, http.MethodPost,
		`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","arguments":{"seconds":20},"_meta":{"progressToken":"p"}}}`)
	defer func() { _ = running.Body.Close() }()
	events := bufio.NewScanner(running.Body)
	for events.Scan() && !strings.Contains(events.Text(), "notifications/progress") {
	}
	stream := s.send(within(t, patience), t, http.MethodGet, "")
	defer func() { _ = stream.Body.Close() }()
	if stream.StatusCode != http.StatusOK || !strings.HasPrefix(stream.Header.Get("Content-Type"), "text/event-stream") {
		t.Errorf("GET: %s", stream.Status)
	}

	begin := time.Now()
	gone := s.send(within(t, patience), t, http.MethodDelete, "")
	_ = gone.Body.Close()
	if gone.StatusCode/100 != 2 {
		t.Errorf("DELETE: %s", gone.Status)
	}
	if took := time.Since(begin); took > time.Second {
		t.Errorf("DELETE took %s", took)
	}
	for events.Scan() { // to the end of the response
	}
	if err := events.Err(); err != nil {
		t.Errorf("the running call's response broke off: %v", err)
	}
	if _, err := io.Copy(io.Discard, stream.Body); err != nil {
		t.Errorf("the stream broke off: %v", err)
	}
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("call and stream ended %s after DELETE", took)
	}
	if status, body := s.post(t, callMessage("2", "echo", `{"text":"x"}`)); status != http.StatusNotFound {
		t.Errorf("after DELETE: %d %s", status, body)
	}
}

// testTurns checks the tests' own ground: one session's requests on one connection really go to all front-ends.
func testTurns(t *testing.T, c *sessiondtest.Cluster) {
	s := openRaw(t, c.URL)
	served := map[string]int{}
	for range 3 * len(c.FrontEnds) {
		resp := s.send(within(t, patience), t, http.MethodPost, callMessage("1", "echo", `{"text":"x"}`))
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Error(err)
		}
		_ = resp.Body.Close()
		served[resp.Header.Get(balancer.ServedBy)]++
	}
	for _, fe := range c.FrontEnds {
		if served[fe.Addr] != 3 {
			t.Errorf("served %v, want 3 each", served)
			break
		}
	}
}
