package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

func noEnv(string) string { return "" }

// A value that cannot be is refused in one line that says what is allowed, before anything is started.
func TestUsage(t *testing.T) {
	for args, says := range map[string]string{
		"--nonsense":                          "allowed: --allowed-hosts",
		"stray":                               "unexpected argument",
		"--lock-ttl -1s":                      "--lock-ttl -1s: want 1s to 1h0m0s",
		"--lock-ttl 0s":                       "--lock-ttl 0s: want",
		"--session-ttl 1ms":                   "--session-ttl 1ms: want",
		"--lock-timeout x":                    "lock-timeout",
		"--listen 127.0.0.1:99999":            "--listen",
		"--listen 127.0.0.1":                  "want host:port",
		"--sessiond nowhere":                  "want embedded, memory, none, or host:port",
		"--sessiond none --lock":              "--lock needs sessions",
		"--log-format xml":                    "want text or json",
		"--log-level loud":                    "log-level",
		"--history 1ms":                       "--history 1ms: want 0 or",
		"--state-keys x":                      "--state-keys: a state key",
		"--allowed-origins example.com":       "--allowed-origins: \"example.com\"",
		"--grace 0s --log-format xml --lock ": "--grace 0s: want 1ms to 1h0m0s; --log-format",
	} {
		var stdout, stderr bytes.Buffer
		if !strings.Contains(args, "--listen") {
			args = "--listen 127.0.0.1:0 --data-dir " + t.TempDir() + " " + args
		}
		code := run(t.Context(), strings.Fields(args), noEnv, &stdout, &stderr)
		if code != exitUsage || strings.Count(stderr.String(), "\n") != 1 || !strings.Contains(stderr.String(), says) {
			t.Errorf("%s: exit code %d, %q, want %q", args, code, stderr.String(), says)
		}
	}
}

func TestEnvironment(t *testing.T) {
	env := map[string]string{"MCPSERVER_LOCK_TTL": "7s", "MCPSERVER_SESSIOND": "a:1,b:2", "MCPSERVER_LOCK": "true"}
	c, err := parseConfig([]string{"--lock-ttl", "8s"}, func(name string) string { return env[name] }, io.Discard)
	if err != nil || c.lockTTL != 8*time.Second || !c.lock || len(c.addresses()) != 2 {
		t.Errorf("%+v %v", c, err)
	}
	env["MCPSERVER_LOCK_TTL"] = "soon"
	if _, err := parseConfig(nil, func(name string) string { return env[name] }, io.Discard); err == nil || !strings.Contains(err.Error(), "MCPSERVER_LOCK_TTL") {
		t.Errorf("%v", err)
	}
}

func TestHelpAndVersion(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if code := run(t.Context(), []string{"--help"}, noEnv, &stdout, &stderr); code != exitOK || !strings.Contains(stdout.String(), "MCPSERVER_LOCK_TTL") || stderr.Len() > 0 {
		t.Errorf("help: %d %s", code, stderr.String())
	}
	stdout.Reset()
	if code := run(t.Context(), []string{"--version"}, noEnv, &stdout, &stderr); code != exitOK || !strings.HasPrefix(stdout.String(), "mcpserver ") {
		t.Errorf("version: %d %s", code, stdout.String())
	}
}

// logBuffer is a log that a test reads while it is written.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// start runs the program until the test's end and returns its address.
func start(t *testing.T, args ...string) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var log logBuffer
	done := make(chan int, 1)
	go func() {
		done <- run(ctx, append([]string{"--listen", address, "--drain-delay", "0s"}, args...), noEnv, io.Discard, &log)
	}()
	t.Cleanup(func() {
		cancel()
		if code := <-done; code != exitOK {
			t.Errorf("exit code %d\n%s", code, log.String())
		}
	})
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if resp := get(t, address, "/readyz"); resp == http.StatusOK {
			return address
		}
		select {
		case <-tick.C:
		case code := <-done:
			done <- code
			t.Fatalf("ended with %d\n%s", code, log.String())
		}
	}
}

func get(t *testing.T, address, path string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0
	}
	if err := resp.Body.Close(); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode
}

func post(t *testing.T, address, session, body string) (status int, id, answer string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+"/mcp", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if session != "" {
		req.Header.Set("Mcp-Session-Id", session)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header.Get("Mcp-Session-Id"), string(data)
}

// The main job in one process: a session whose values add up, in memory and on an embedded etcd; there it survives a
// restart of the program (O1).
func TestServe(t *testing.T) {
	dir := t.TempDir()
	var id string
	for _, mode := range []string{"memory", "embedded", "embedded"} {
		t.Run(mode, func(t *testing.T) {
			address := start(t, "--sessiond", mode, "--data-dir", dir, "--lock", "--json")
			if mode == "memory" || id == "" {
				_, id, _ = post(t, address, "", `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`)
			}
			_, _, before := post(t, address, id, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"counter_add","arguments":{"by":0}}}`)
			status, _, after := post(t, address, id, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"counter_add","arguments":{"by":3}}}`)
			if status != http.StatusOK || total(t, after) != total(t, before)+3 {
				t.Errorf("%d %s after %s", status, after, before)
			}
			if status := get(t, address, "/healthz"); status != http.StatusOK {
				t.Errorf("healthz: %d", status)
			}
			if mode == "memory" {
				id = ""
			} else if status, _, answer := post(t, address, id, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"note_set","arguments":{"key":"k","value":"v"}}}`); status != http.StatusOK {
				t.Errorf("note: %d %s", status, answer)
			}
		})
	}
}

func total(t *testing.T, answer string) int {
	t.Helper()
	var m struct {
		Result struct {
			Content []struct {
				Text string `json:"text"`
			} `json:"content"`
		} `json:"result"`
	}
	if err := json.Unmarshal([]byte(answer), &m); err != nil || len(m.Result.Content) != 1 {
		t.Fatalf("answer %s: %v", answer, err)
	}
	var n int
	if _, err := fmt.Sscan(m.Result.Content[0].Text, &n); err != nil {
		t.Fatalf("answer %s: %v", answer, err)
	}
	return n
}

func TestPortInUse(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	var stderr bytes.Buffer
	code := run(t.Context(), []string{"--listen", l.Addr().String(), "--sessiond", "none"}, noEnv, io.Discard, &stderr)
	if code != exitFailure || strings.Count(stderr.String(), "\n") != 1 || !strings.Contains(stderr.String(), "in use") {
		t.Errorf("exit code %d, %q", code, stderr.String())
	}
}
