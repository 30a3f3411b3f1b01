//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

const patience = 30 * time.Second

// The test binary is the demo too, so that what is tested is what runs (also as the balancer's process).
func TestMain(m *testing.M) {
	if os.Getenv("DEMO_TEST_RUN") != "" {
		main()
	}
	for _, program := range []string{"etcd", "sessiond", "mcpserver"} {
		if _, err := sessiondtest.Binary(program); err != nil {
			fmt.Fprintln(os.Stderr, "demo:", err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// A running demo, with its output so far.
type running struct {
	*exec.Cmd
	url string
	tmp string // what it has for a temporary folder

	mu     sync.Mutex
	output bytes.Buffer
	ended  chan error
}

func (r *running) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.output.Write(b)
}

func (r *running) said() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.output.String()
}

func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "DEMO_TEST_RUN=1")
	return cmd
}

func start(t *testing.T, args ...string) *running {
	t.Helper()
	addrs, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"etcd", "sessiond", "mcpserver"} {
		path, err := sessiondtest.Binary(program)
		if err != nil {
			t.Fatal(err)
		}
		args = append(args, "--"+program, path)
	}
	r := &running{
		Cmd:   command(t, append(args, "--listen", addrs[0])...),
		url:   "http://" + addrs[0] + "/mcp",
		tmp:   t.TempDir(),
		ended: make(chan error, 1),
	}
	r.Env = append(r.Env, "TMPDIR="+r.tmp)
	r.Stdout, r.Stderr = r, r
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.Process.Kill()
		if t.Failed() {
			t.Logf("the demo said:\n%s", r.said())
		}
	})
	go func() { r.ended <- r.Wait() }()
	r.await(t, "Ctrl-C")
	return r
}

// await waits until the demo has said something.
func (r *running) await(t *testing.T, words string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	err := sessiondtest.Poll(ctx, func(context.Context) error {
		if strings.Contains(r.said(), words) {
			return nil
		}
		select {
		case err := <-r.ended:
			r.ended <- err
			return sessiondtest.Final(fmt.Errorf("ended: %w", err))
		default:
			return fmt.Errorf("has not said %q", words)
		}
	})
	if err != nil {
		t.Fatalf("the demo %v:\n%s", err, r.said())
	}
}

var pidLine = regexp.MustCompile(`(?m)^ +([a-z]+-?\d*) +127\.0\.0\.1:\d+ +pid (\d+)$`)

// pids are the processes that the demo says it has started.
func (r *running) pids(t *testing.T) map[string]int {
	t.Helper()
	out := map[string]int{}
	for _, m := range pidLine.FindAllStringSubmatch(r.said(), -1) {
		pid, err := strconv.Atoi(m[2])
		if err != nil {
			t.Fatal(err)
		}
		out[m[1]] = pid
	}
	if len(out) != 10 {
		t.Fatalf("%d processes are listed, want 10:\n%s", len(out), r.said())
	}
	return out
}

// gone fails the test if any of the processes still runs.
func gone(t *testing.T, pids map[string]int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := sessiondtest.Poll(ctx, func(context.Context) error {
		var errs []error
		for name, pid := range pids {
			if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && !strings.Contains(string(stat), ") Z ") {
				errs = append(errs, fmt.Errorf("%s (pid %d) still runs", name, pid))
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		t.Error(err)
	}
}

func (r *running) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.ended:
		return err
	case <-time.After(2 * patience):
		t.Fatal("the demo does not end")
		return nil
	}
}

// Started, used, one of each killed, stopped with Ctrl-C: its clients notice nothing and nothing is left behind.
func TestDemo(t *testing.T) {
	for sig, arg := range map[syscall.Signal]string{syscall.SIGINT: "--lock", syscall.SIGTERM: "--lock=false"} {
		t.Run(sig.String(), func(t *testing.T) {
			r := start(t, arg)
			pids := r.pids(t)
			if !strings.Contains(r.said(), r.url) {
				t.Errorf("does not name the URL %s", r.url)
			}
			add := counter(t, r.url)
			add()
			for _, victim := range []string{"mcpserver-2", "sessiond-3"} {
				if err := syscall.Kill(pids[victim], syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				r.await(t, fmt.Sprintf("%s (pid %d) has ended: signal: killed", victim, pids[victim]))
				for range 3 {
					add()
				}
			}
			if err := r.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if err := r.wait(t); err != nil {
				t.Errorf("after %s: %v", sig, err)
			}
			gone(t, pids)
			if left, err := os.ReadDir(r.tmp); err != nil || len(left) != 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// Killed itself, it takes its processes along.
func TestKilledDemoLeavesNoProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kept")
	r := start(t, "--json", "--dir", dir)
	pids := r.pids(t)
	if err := r.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = r.wait(t)
	gone(t, pids)
	if left, err := os.ReadDir(dir); err != nil || len(left) == 0 {
		t.Errorf("--dir was not kept: %v, %v", left, err)
	}
}

// counter opens a session and gives a function that adds to its counter and checks the total.
func counter(t *testing.T, url string) func() {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	s, err := mcp.NewClient(&mcp.Implementation{Name: "demo-test", Version: "1"}, nil).
		Connect(ctx, &mcp.StreamableClientTransport{Endpoint: url}, &mcp.ClientSessionOptions{ProtocolVersion: "2025-11-25"})
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	return func() {
		t.Helper()
		total++
		result, err := s.CallTool(ctx, &mcp.CallToolParams{Name: "counter_add", Arguments: map[string]any{"by": 1}})
		if err != nil {
			t.Fatal(err)
		}
		if text, ok := result.Content[0].(*mcp.TextContent); !ok || text.Text != strconv.Itoa(total) {
			t.Fatalf("result %+v, want %d", result.Content[0], total)
		}
	}
}

// What is wrong is said in one line before anything is started.
func TestBadInput(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// All three are programs, though not the right ones: none of them is started.
	programs := []string{"--etcd", os.Args[0], "--sessiond", os.Args[0], "--mcpserver", os.Args[0]}
	tests := []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--no-such-flag"}, exitUsage, "no-such-flag"},
		{[]string{"argument"}, exitUsage, "argument"},
		{[]string{"--listen", "nonsense"}, exitUsage, "nonsense"},
		{[]string{"--dir", full}, exitUsage, full},
		{[]string{"--listen", l.Addr().String()}, exitFailed, l.Addr().String()},
		{[]string{"--etcd", "/no/such/etcd"}, exitUsage, "--etcd"},
		{[]string{"balancer", "--backends", ""}, exitUsage, "back-end"},
		{[]string{"balancer", "--backends", "127.0.0.1:1", "--listen", l.Addr().String()}, exitFailed, l.Addr().String()},
	}
	for _, tt := range tests {
		t.Run(strings.Join(tt.args, " "), func(t *testing.T) {
			args := tt.args
			if args[0] != "balancer" {
				args = append(slices.Clone(programs), args...)
			}
			cmd := command(t, args...)
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			_ = cmd.Run()
			if code := cmd.ProcessState.ExitCode(); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if out := stderr.String(); strings.Count(out, "\n") != 1 || !strings.Contains(out, tt.says) {
				t.Errorf("want one line that says %q, got %q", tt.says, out)
			}
		})
	}
}
