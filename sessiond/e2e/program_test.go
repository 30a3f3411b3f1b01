//go:build unix

package e2e

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// oneLine fails the test unless the program said one line, on standard error, that has all of the words.
func oneLine(t *testing.T, stdout, stderr string, words ...string) {
	t.Helper()
	if stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.HasSuffix(stderr, "\n") {
		t.Errorf("want one line on standard error, got\nstdout: %q\nstderr: %q", stdout, stderr)
	}
	// A setting is found by its flag's name and by the same words written otherwise.
	plain := strings.NewReplacer("-", "", " ", "", "_", "")
	for _, w := range words {
		if !strings.Contains(strings.ToLower(plain.Replace(stderr)), strings.ToLower(plain.Replace(w))) {
			t.Errorf("%q does not say %q", stderr, w)
		}
	}
}

// Flags that cannot be meant are refused in one line that names them, with exit code 2, before anything is touched.
func TestBadFlags(t *testing.T) {
	tests := []struct {
		program string
		args    []string
		names   string
	}{
		{"sessiond", []string{"--no-such-flag"}, "no-such-flag"},
		{"sessiond", []string{"--listen", "nonsense"}, "listen"},
		{"sessiond", []string{"--listen", "127.0.0.1:99999"}, "listen"},
		{"sessiond", []string{"--etcd-endpoints", ","}, "etcd-endpoints"},
		{"sessiond", []string{"--etcd-endpoints", "127.0.0.1:1", "--data-dir", "x"}, "etcd-endpoints"},
		{"sessiond", []string{"argument"}, "argument"},
		{"mcpserver", []string{"--no-such-flag"}, "no-such-flag"},
		{"mcpserver", []string{"--listen", "nonsense"}, "listen"},
		{"mcpserver", []string{"--sessiond", "nonsense"}, "sessiond"},
		{"mcpserver", []string{"--sessiond", ""}, "sessiond"},
		{"mcpserver", []string{"--lock", "--lock-timeout", "soon"}, "lock-timeout"},
		{"mcpserver", []string{"--lock", "--lock-timeout", "-1s"}, "lock-timeout"},
		{"mcpserver", []string{"--lock", "--lock-ttl", "0s"}, "lock-ttl"},
		{"mcpserver", []string{"--session-ttl", "-1h"}, "session-ttl"},
		{"mcpserver", []string{"argument"}, "argument"},
	}
	for _, tt := range tests {
		t.Run(tt.program+" "+strings.Join(tt.args, " "), func(t *testing.T) {
			code, stdout, stderr := runProgram(t, binary(t, tt.program), tt.args...)
			if code != 2 {
				t.Errorf("exit code %d, want 2", code)
			}
			oneLine(t, stdout, stderr, tt.names)
		})
	}
}

func TestHelpIsNoFailure(t *testing.T) {
	for _, program := range []string{"sessiond", "mcpserver"} {
		code, stdout, stderr := runProgram(t, binary(t, program), "--help")
		if code != 0 || !strings.Contains(stdout+stderr, "listen") {
			t.Errorf("%s --help: exit code %d\n%s%s", program, code, stdout, stderr)
		}
	}
}

// A port that is taken is said in one line, and the program ends.
func TestPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	for _, program := range []string{"sessiond", "mcpserver"} {
		t.Run(program, func(t *testing.T) {
			code, stdout, stderr := runProgram(t, binary(t, program), "--listen", l.Addr().String(), "--data-dir", filepath.Join(t.TempDir(), "data"))
			if code == 0 || code == 2 {
				t.Errorf("exit code %d", code)
			}
			oneLine(t, stdout, stderr, l.Addr().String(), "in use")
		})
	}
}

// A data folder that another process works on is not touched by a second one; that it ends soon with one line matters
// more than anything, because a second etcd on the same files would wait for them for ever.
func TestDataFolderInUse(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	addr := freeAddr(t)
	sessiondtest.StartProcess(t, sessiondtest.Command{
		Name:  "sessiond",
		Path:  binary(t, "sessiond"),
		Args:  []string{"--listen", addr, "--data-dir", dir},
		Log:   filepath.Join(t.TempDir(), "sessiond.log"),
		Ready: sessiondtest.GRPCReady(addr),
	})
	for _, program := range []string{"sessiond", "mcpserver"} {
		t.Run(program, func(t *testing.T) {
			code, stdout, stderr := runProgram(t, binary(t, program), "--listen", freeAddr(t), "--data-dir", dir)
			if code == 0 || code == 2 {
				t.Errorf("exit code %d", code)
			}
			oneLine(t, stdout, stderr, dir)
		})
	}
	if err := sessiondtest.GRPCReady(addr)(within(t, patience)); err != nil {
		t.Errorf("the first one: %v", err)
	}
}

// A folder is a folder, whatever characters its name has.
func TestDataFolderWithOddName(t *testing.T) {
	for _, program := range []string{"sessiond", "mcpserver"} {
		t.Run(program, func(t *testing.T) {
			addr := freeAddr(t)
			ready := sessiondtest.GRPCReady(addr)
			if program == "mcpserver" {
				ready = sessiondtest.HTTPReady("http://" + addr + "/readyz")
			}
			sessiondtest.StartProcess(t, sessiondtest.Command{
				Name:  program,
				Path:  binary(t, program),
				Args:  []string{"--listen", addr, "--data-dir", filepath.Join(t.TempDir(), `a b#c?d%41&"ü`)},
				Log:   filepath.Join(t.TempDir(), program+".log"),
				Ready: ready,
			})
		})
	}
}

// A data folder that cannot be written is said in one line.
func TestDataFolderUnusable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"sessiond", "mcpserver"} {
		code, stdout, stderr := runProgram(t, binary(t, program), "--listen", freeAddr(t), "--data-dir", file)
		if code == 0 {
			t.Errorf("%s: exit code 0", program)
		}
		oneLine(t, stdout, stderr, file)
	}
}

// A node whose etcd is away, and a front-end whose nodes are away, run, say that they are not ready, and become ready
// by themselves.
func TestStartsBeforeWhatItNeeds(t *testing.T) {
	etcd := sessiondtest.StartEtcd(t, 1)
	if err := etcd.Stop(); err != nil {
		t.Fatal(err)
	}
	nodeAddr, frontEndAddr := freeAddr(t), freeAddr(t)
	node := sessiondtest.StartProcess(t, sessiondtest.Command{
		Name: "sessiond",
		Path: binary(t, "sessiond"),
		Args: []string{"--listen", nodeAddr, "--etcd-endpoints", etcd.Endpoints()[0]},
		Log:  filepath.Join(t.TempDir(), "sessiond.log"),
	})
	frontEnd := sessiondtest.StartProcess(t, sessiondtest.Command{
		Name:  "mcpserver",
		Path:  binary(t, "mcpserver"),
		Args:  []string{"--listen", frontEndAddr, "--sessiond", nodeAddr},
		Log:   filepath.Join(t.TempDir(), "mcpserver.log"),
		Ready: sessiondtest.HTTPReady("http://" + frontEndAddr + "/healthz"),
	})
	ready := func(ctx context.Context) error {
		return errors.Join(
			sessiondtest.GRPCReady(nodeAddr)(ctx),
			sessiondtest.HTTPReady("http://"+frontEndAddr+"/readyz")(ctx),
		)
	}
	// Long enough to have given up, had they wanted to.
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for range 15 {
		<-tick.C
		if err := sessiondtest.GRPCReady(nodeAddr)(t.Context()); err == nil {
			t.Fatal("sessiond is ready without etcd")
		}
		if err := sessiondtest.HTTPReady("http://" + frontEndAddr + "/readyz")(t.Context()); err == nil {
			t.Fatal("mcpserver is ready without sessiond")
		}
	}
	if !node.Running() || !frontEnd.Running() {
		t.Fatal("gave up waiting for what it needs")
	}
	if node.Tail(1<<20) == "" {
		t.Error("sessiond waits for etcd and does not say so")
	}
	if err := etcd.Members[0].Restart(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	if err := sessiondtest.Poll(within(t, patience), ready); err != nil {
		t.Fatalf("not ready although etcd is there: %v", err)
	}
	c := connect(t, mcpURL(frontEndAddr), handshakeEra)
	if got := c.mustCall(t, "counter_add", map[string]any{"by": 3}); got != "3" {
		t.Errorf("total %s", got)
	}
}
