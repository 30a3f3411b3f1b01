//go:build unix

// Package e2e has the end-to-end tests: the real programs on loopback, driven by clients that nobody here wrote, through
// a balancer without affinity. It holds what no cheaper test can show: that the product does its main job.
//
// Run them with `make e2e`, which builds the programs and sets E2E_BIN_DIR to their folder.
package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sessiond/sessiond/sessiond/e2e/balancer"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

func TestMain(m *testing.M) {
	for _, program := range []string{"etcd", "sessiond", "mcpserver", "demo"} {
		if _, err := sessiondtest.Binary(program); err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// patience is how long a test waits for what must happen; it never passes while all is well.
const patience = 30 * time.Second

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func binary(t *testing.T, name string) string {
	t.Helper()
	path, err := sessiondtest.Binary(name)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func freeAddr(t *testing.T) string {
	t.Helper()
	addrs, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		t.Fatal(err)
	}
	return addrs[0]
}

// startSingle starts one front-end with sessiond and etcd inside.
func startSingle(t *testing.T, args ...string) *sessiondtest.Server {
	t.Helper()
	addr, dir := freeAddr(t), t.TempDir()
	p := sessiondtest.StartProcess(t, sessiondtest.Command{
		Name:  "mcpserver",
		Path:  binary(t, "mcpserver"),
		Args:  append([]string{"--listen", addr, "--data-dir", filepath.Join(dir, "data")}, args...),
		Log:   filepath.Join(dir, "mcpserver.log"),
		Ready: sessiondtest.HTTPReady("http://" + addr + "/readyz"),
	})
	return &sessiondtest.Server{Process: p, Addr: addr}
}

func mcpURL(addr string) string { return "http://" + addr + "/mcp" }

// runProgram runs a program that is expected to end by itself.
func runProgram(t *testing.T, path string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx := within(t, patience)
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = t.TempDir() // where a data folder may appear by default
	return runCommand(t, cmd)
}

func runCommand(t *testing.T, cmd *exec.Cmd) (code int, stdout, stderr string) {
	t.Helper()
	return startCommand(t, cmd)()
}

// startCommand starts a command and gives a function that waits for its end.
func startCommand(t *testing.T, cmd *exec.Cmd) (wait func() (code int, stdout, stderr string)) {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return func() (int, string, string) {
		t.Helper()
		err := cmd.Wait()
		if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() >= 0 {
			return exit.ExitCode(), out.String(), errOut.String()
		}
		if err != nil {
			t.Fatalf("%s: %v\n%s%s", strings.Join(cmd.Args, " "), err, out.String(), errOut.String())
		}
		return 0, out.String(), errOut.String()
	}
}

// npm installs the packages of the TypeScript folder, once, if they are not there yet.
var npm = sync.OnceValue(func() error {
	lock, err := os.Stat("typescript/package-lock.json")
	if err != nil {
		return err
	}
	// npm writes this file last.
	if done, err := os.Stat("typescript/node_modules/.package-lock.json"); err == nil && !done.ModTime().Before(lock.ModTime()) {
		return nil
	}
	fmt.Fprintln(os.Stderr, "e2e: npm ci in sessiond/e2e/typescript (once; it may take a minute)")
	cmd := exec.Command("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
	cmd.Dir = "typescript"
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("npm ci in sessiond/e2e/typescript (it needs Node 20 or newer with npm): %w\n%s", err, out)
	}
	return nil
})

// node makes a command that runs a script of the TypeScript folder.
func node(ctx context.Context, t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	if err := npm(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, "node", args...)
	cmd.Dir = "typescript"
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir(), "NO_UPDATE_NOTIFIER=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	return cmd
}

// A report is what the driver says about a scenario. What a scenario found out is in Facts, as JSON.
type report struct {
	Scenario string         `json:"scenario"`
	OK       bool           `json:"ok"`
	Error    string         `json:"error"`
	TookMS   int            `json:"took_ms"`
	Served   map[string]int `json:"served"`
	Hops     [][]string     `json:"hops"`
	Right    int            `json:"right"`
	RaisedOn []string       `json:"raisedOn"`
}

// check fails the test if the scenario failed.
func (r report) check(t *testing.T) {
	t.Helper()
	if !r.OK {
		t.Fatal(r.Error)
	}
	t.Logf("%d ms, served by %v", r.TookMS, r.Served)
}

// scenarios runs scenarios of the TypeScript driver, one after the other in one process, and gives a report of each.
// They may follow an argument: "--rounds=20".
func scenarios(t *testing.T, url string, args ...string) []report {
	t.Helper()
	return startScenarios(t, url, args...)()
}

// startScenarios starts them and gives a function that waits for the reports.
func startScenarios(t *testing.T, url string, args ...string) (wait func() []report) {
	t.Helper()
	names := slices.DeleteFunc(slices.Clone(args), func(arg string) bool { return strings.HasPrefix(arg, "--") })
	end := startCommand(t, node(within(t, 5*time.Minute), t, append([]string{"driver.mjs", "--url", url}, args...)...))
	return func() []report {
		t.Helper()
		code, stdout, stderr := end()
		var reports []report
		failed := false
		for line := range strings.Lines(stdout) {
			var r report
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				t.Fatalf("exit code %d, %v\n%s%s", code, err, stdout, stderr)
			}
			failed = failed || !r.OK
			reports = append(reports, r)
		}
		if len(reports) != len(names) || failed != (code != 0) {
			t.Fatalf("exit code %d and %d reports, want %d\n%s%s", code, len(reports), len(names), stdout, stderr)
		}
		return reports
	}
}

// A steps client is the TypeScript client in a process of its own, told what to call line by line.
type steps struct {
	t   *testing.T
	in  io.WriteCloser
	out *bufio.Scanner
}

type step struct {
	Text      *string `json:"text"`
	Error     string  `json:"error"`
	Status    int     `json:"status"`
	ServedBy  string  `json:"servedBy"`
	SessionID string  `json:"sessionId"`
}

func startSteps(t *testing.T, url string) *steps {
	t.Helper()
	cmd := node(t.Context(), t, "driver.mjs", "--url", url, "steps")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := &steps{t: t, in: in, out: bufio.NewScanner(out)}
	t.Cleanup(func() {
		_ = in.Close()
		if !t.Failed() && s.out.Scan() {
			var r report
			if err := json.Unmarshal(s.out.Bytes(), &r); err != nil || !r.OK {
				t.Errorf("the TypeScript client ended with %s", s.out.Bytes())
			}
		}
		_ = cmd.Cancel()
		_ = cmd.Wait()
	})
	if first := s.next(); first.SessionID == "" {
		t.Fatalf("no session: %+v", first)
	}
	return s
}

func (s *steps) next() step {
	s.t.Helper()
	var st step
	if !s.out.Scan() {
		s.t.Fatalf("the TypeScript client has ended: %v", s.out.Err())
	}
	if err := json.Unmarshal(s.out.Bytes(), &st); err != nil {
		s.t.Fatalf("%v: %s", err, s.out.Bytes())
	}
	return st
}

// call calls a tool and gives the text of its result.
func (s *steps) call(tool string, args map[string]any) (string, error) {
	s.t.Helper()
	line, err := json.Marshal(map[string]any{"tool": tool, "args": args})
	if err != nil {
		s.t.Fatal(err)
	}
	if _, err := s.in.Write(append(line, '\n')); err != nil {
		s.t.Fatal(err)
	}
	st := s.next()
	if st.Text == nil {
		return "", fmt.Errorf("status %d by %s: %s", st.Status, st.ServedBy, st.Error)
	}
	return *st.Text, nil
}

// A recorder is a transport that counts which back-end served how many requests.
type recorder struct {
	mu     sync.Mutex
	served map[string]int
}

func (r *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err == nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.served == nil {
			r.served = map[string]int{}
		}
		r.served[resp.Header.Get(balancer.ServedBy)]++
	}
	return resp, err
}

func (r *recorder) backends() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.served)
}
