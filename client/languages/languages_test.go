//go:build unix

// Package languages runs the programs of client/typescript and client/python against live nodes: the proof that stubs made
// from the same files work in other languages, errors and all.
//
// The programs need npm and Debian packages, so these tests belong to `make e2e`, which installs those, makes the stubs and
// sets E2E_BIN_DIR.
package languages

import (
	"bufio"
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// patience is how long a program may take; they take seconds.
const patience = 2 * time.Minute

// steps are what each program has to do besides meeting every error.
var steps = []string{
	"create", "acquire", "tryAcquire", "save and release", "read", "release", "publish", "subscribe", "destroy",
}

// unprovoked are the reasons that no call of a client can bring about.
var unprovoked = []sessiondv1.ErrorReason{
	sessiondv1.ErrorReason_ERROR_REASON_UNSPECIFIED,
	sessiondv1.ErrorReason_ERROR_REASON_INTERNAL,
}

// C2: stubs for TypeScript work against a live node, through Connect's gRPC transport, and tell every error by its reason.
func TestC2TypeScript(t *testing.T) {
	testLanguage(t, program{dir: "../typescript", made: "dist/main.js", command: []string{"node", "dist/main.js"}})
}

// C2: stubs for Python work against a live node, through grpcio, and tell every error by its reason.
func TestC2Python(t *testing.T) {
	// Debian's packages belong to Debian's Python, whatever else the PATH has.
	python := os.Getenv("PYTHON")
	if python == "" {
		python = "/usr/bin/python3"
	}
	testLanguage(t, program{dir: "../python", made: "gen/sessiond/v1", command: []string{python, "main.py"}})
}

// A program is an example in another language.
type program struct {
	dir     string
	made    string // what its set-up leaves behind
	command []string
}

func testLanguage(t *testing.T, p program) {
	if _, err := os.Stat(filepath.Join(p.dir, p.made)); err != nil {
		t.Fatalf("%s is not set up: run make e2e: %v", p.dir, err)
	}
	live := startNode(t, "sessiond", sessiondtest.GRPCReady, "--data-dir", filepath.Join(t.TempDir(), "data"), "--max-waiters", "1")
	// Nobody listens on port 1, so this node never gets healthy; it serves all the same.
	withoutEtcd := startNode(t, "sessiond-without-etcd", accepts, "--etcd-endpoints", "127.0.0.1:1")

	lines, err := p.run(t, nil, withoutEtcd.Addr)
	if err == nil {
		t.Errorf("ended with success on a node that can do nothing; its output:\n%s", strings.Join(lines, "\n"))
	}

	lines, err = p.run(t, func(line string) {
		if strings.HasSuffix(line, " until the node shuts down") {
			if err := live.Terminate(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}, live.Addr, "--without-etcd", withoutEtcd.Addr, "--until-shutdown")
	if err != nil {
		t.Fatalf("%v; its output:\n%s", err, strings.Join(lines, "\n"))
	}
	want := slices.Clone(steps)
	for number, name := range sessiondv1.ErrorReason_name {
		if !slices.Contains(unprovoked, sessiondv1.ErrorReason(number)) {
			want = append(want, strings.TrimPrefix(name, "ERROR_REASON_"))
		}
	}
	t.Logf("its output:\n%s", strings.Join(lines, "\n"))
	for _, name := range want {
		if !slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, name+"  ") }) {
			t.Errorf("no step %q in the output", name)
		}
	}
}

// run runs the program to its end, shows each line to see, and returns the lines; if it failed, with its standard error.
func (p program) run(t *testing.T, see func(line string), args ...string) ([]string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.command[0], slices.Concat(p.command[1:], args)...)
	cmd.Dir = p.dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var lines []string
	scanner := bufio.NewScanner(stdout)
	for scanner.Scan() {
		lines = append(lines, scanner.Text())
		if see != nil {
			see(scanner.Text())
		}
	}
	if err := scanner.Err(); err != nil {
		t.Error(err)
	}
	err = cmd.Wait()
	if err != nil {
		lines = append(lines, stderr.String())
	}
	return lines, err
}

func startNode(t *testing.T, name string, ready func(addr string) func(context.Context) error, args ...string) *sessiondtest.Server {
	t.Helper()
	path, err := sessiondtest.Binary("sessiond")
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		t.Fatal(err)
	}
	return &sessiondtest.Server{Addr: addrs[0], Process: sessiondtest.StartProcess(t, sessiondtest.Command{
		Name:  name,
		Path:  path,
		Args:  append([]string{"--listen", addrs[0]}, args...),
		Log:   filepath.Join(t.TempDir(), name+".log"),
		Ready: ready(addrs[0]),
	})}
}

// accepts is a [sessiondtest.Command]'s Ready: somebody listens at addr.
func accepts(addr string) func(context.Context) error {
	return func(ctx context.Context) error {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", addr)
		if err != nil {
			return err
		}
		return conn.Close()
	}
}
