//go:build unix

package sessiondtest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// The test binary is its own child: what it does then stands in this variable.
const role = "SESSIONDTEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "":
		goleak.VerifyTestMain(m)
	case "serve": // serves at the address given, stops on SIGTERM
		serve(os.Args[1], true)
	case "deaf": // the same, but takes no notice of SIGTERM
		serve(os.Args[1], false)
	case "fail":
		fmt.Fprintln(os.Stderr, "first line\nthe reason")
		os.Exit(3)
	case "parent": // starts a child of its own, writes its pid to a file, and waits
		p, err := sessiondtest.Launch(context.Background(), command("serve", os.Args[1]))
		if err == nil {
			err = os.WriteFile(os.Args[2], []byte(strconv.Itoa(p.Pid())), 0o600)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		select {}
	}
}

func serve(addr string, stops bool) {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	l, err := net.Listen("tcp", addr)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("serving")
	s := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), ReadHeaderTimeout: time.Second}
	go func() { _ = s.Serve(l) }()
	for range term {
		if stops {
			fmt.Println("stopping")
			os.Exit(0)
		}
	}
}

func command(what, addr string, args ...string) sessiondtest.Command {
	return sessiondtest.Command{
		Name:  what,
		Path:  os.Args[0],
		Args:  append([]string{addr}, args...),
		Env:   []string{role + "=" + what},
		Ready: sessiondtest.HTTPReady("http://" + addr),
	}
}

func freeAddr(t *testing.T) string {
	t.Helper()
	a, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		t.Fatal(err)
	}
	return a[0]
}

func launch(t *testing.T, cmd sessiondtest.Command) *sessiondtest.Process {
	t.Helper()
	cmd.Log = filepath.Join(t.TempDir(), "out.log")
	p, err := sessiondtest.Launch(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

func answers(t *testing.T, addr string, within time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	return sessiondtest.HTTPReady("http://" + addr)(ctx)
}

func TestKillAndRestartOnTheSamePort(t *testing.T) {
	addr := freeAddr(t)
	p := launch(t, command("serve", addr))
	for range 3 {
		pid := p.Pid()
		if err := p.Restart(t.Context()); err == nil {
			t.Fatal("restarted while it runs")
		}
		if err := p.Kill(); err != nil {
			t.Fatal(err)
		}
		if p.Running() || alive(pid) {
			t.Fatal("still there after Kill")
		}
		if state, asked := p.Exit(); !asked || state.String() != "signal: killed" {
			t.Fatalf("exit: %s, asked: %v", state, asked)
		}
		if err := p.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := answers(t, addr, 5*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(p.Tail(1<<20), "serving"); n != 4 {
		t.Errorf("the log has %d of 4 runs:\n%s", n, p.Tail(1<<20))
	}
}

func TestTerminate(t *testing.T) {
	p := launch(t, command("serve", freeAddr(t)))
	for range 2 { // the second time it has ended already
		if err := p.Terminate(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if state, asked := p.Exit(); !asked || state.ExitCode() != 0 {
		t.Errorf("exit: %s, asked: %v", state, asked)
	}
	if !strings.Contains(p.Tail(100), "stopping") {
		t.Errorf("output: %q", p.Tail(100))
	}
}

func TestTerminateKillsWhatDoesNotStop(t *testing.T) {
	cmd := command("deaf", freeAddr(t))
	cmd.StopGrace = 50 * time.Millisecond
	p := launch(t, cmd)
	if err := p.Terminate(t.Context()); err == nil {
		t.Error("no error although it had to be killed")
	}
	if p.Running() {
		t.Error("still running")
	}
}

// A paused process keeps its port open and answers nothing; it can be continued, terminated or killed.
func TestPauseAndContinue(t *testing.T) {
	addr := freeAddr(t)
	p := launch(t, command("serve", addr))
	if err := p.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := answers(t, addr, 200*time.Millisecond); err == nil {
		t.Error("answers while it is paused")
	}
	if !p.Running() {
		t.Error("paused is not ended")
	}
	if err := p.Continue(); err != nil {
		t.Fatal(err)
	}
	if err := answers(t, addr, 5*time.Second); err != nil {
		t.Error(err)
	}
	if err := errors.Join(p.Pause(), p.Terminate(t.Context())); err != nil {
		t.Error(err)
	}
}

func TestExitByItselfIsTold(t *testing.T) {
	p := launch(t, command("serve", freeAddr(t)))
	if err := syscall.Kill(p.Pid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if err := p.Terminate(t.Context()); err != nil {
		t.Error(err)
	}
	if state, asked := p.Exit(); asked || state == nil {
		t.Errorf("exit: %v, asked: %v", state, asked)
	}
}

// What failed and why is in the error: nobody should have to look for a log file.
func TestFailedStartSaysWhy(t *testing.T) {
	addr := freeAddr(t)
	cmd := command("fail", addr)
	cmd.Log = filepath.Join(t.TempDir(), "sub", "out.log")
	begin := time.Now()
	_, err := sessiondtest.Launch(t.Context(), cmd)
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "the reason") {
		t.Errorf("error: %v", err)
	}
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("took %s although the process had ended", took)
	}

	cmd = command("serve", addr)
	cmd.StartTimeout = 300 * time.Millisecond
	cmd.Ready = func(context.Context) error { return errors.New("not yet") }
	if _, err = sessiondtest.Launch(t.Context(), cmd); err == nil || !strings.Contains(err.Error(), "not yet") {
		t.Errorf("error: %v", err)
	}
	if err := answers(t, addr, time.Second); err == nil {
		t.Error("left running after a failed start")
	}

	if _, err = sessiondtest.Launch(t.Context(), sessiondtest.Command{Name: "none", Path: "/does/not/exist"}); err == nil {
		t.Error("no error for a program that does not exist")
	}
}

// Nothing outlives the process that started it, even if that is killed.
func TestChildrenDieWithTheirParent(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux")
	}
	file := filepath.Join(t.TempDir(), "pid")
	cmd := command("parent", freeAddr(t), file)
	var child int
	cmd.Ready = func(context.Context) error {
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		child, err = strconv.Atoi(string(b))
		return err
	}
	parent := launch(t, cmd)
	if !alive(child) {
		t.Fatal("the child does not run")
	}
	if err := parent.Kill(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := sessiondtest.Poll(ctx, func(context.Context) error {
		if alive(child) && !zombie(child) {
			return errors.New("the child outlives its parent")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// zombie tells whether a process has ended and only waits for whoever is to fetch its state (in a container that may
// be nobody).
func zombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(b), ") Z ")
}

func TestFreeAddrsAreNeverGivenTwice(t *testing.T) {
	var all []string
	for range 4 {
		a, err := sessiondtest.FreeAddrs(30)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, a...)
	}
	slices.Sort(all)
	if n := len(slices.Compact(all)); n != 120 {
		t.Errorf("%d different addresses, want 120", n)
	}
}

func TestBinarySaysHowToGetIt(t *testing.T) {
	t.Setenv(sessiondtest.BinDir, "")
	if _, err := sessiondtest.Binary("etcd"); err == nil || !strings.Contains(err.Error(), "make e2e") {
		t.Errorf("without the variable: %v", err)
	}
	dir := t.TempDir()
	t.Setenv(sessiondtest.BinDir, dir)
	if _, err := sessiondtest.Binary("etcd"); err == nil || !strings.Contains(err.Error(), "make e2e") {
		t.Errorf("without the program: %v", err)
	}
	want := filepath.Join(dir, "etcd")
	if err := os.WriteFile(want, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	if got, err := sessiondtest.Binary("etcd"); err != nil || got != want {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}

func TestPoll(t *testing.T) {
	tries := 0
	if err := sessiondtest.Poll(t.Context(), func(context.Context) error {
		if tries++; tries < 3 {
			return errors.New("not yet")
		}
		return nil
	}); err != nil || tries != 3 {
		t.Errorf("%v after %d tries", err, tries)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	why := errors.New("why")
	err := sessiondtest.Poll(ctx, func(context.Context) error { return why })
	if !errors.Is(err, why) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want both the deadline and the last error", err)
	}
	tries = 0
	if err := sessiondtest.Poll(t.Context(), func(context.Context) error {
		tries++
		return sessiondtest.Final(why)
	}); !errors.Is(err, why) || tries != 1 {
		t.Errorf("%v after %d tries", err, tries)
	}
}
