//go:build unix

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// What a person gets from `make demo`: a TypeScript client does the main job through its one URL. How the demo
// itself starts and stops, with the lock and without, is tested beside it.
func TestDemo(t *testing.T) {
	demo := filepath.Join(t.TempDir(), "demo")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", demo, "./demo").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	addr := freeAddr(t)
	log := filepath.Join(t.TempDir(), "demo.log")
	p := sessiondtest.StartProcess(t, sessiondtest.Command{
		Name: "demo",
		Path: demo,
		Args: []string{
			"--listen", addr, "--etcd", binary(t, "etcd"), "--sessiond", binary(t, "sessiond"), "--mcpserver", binary(t, "mcpserver"),
		},
		Log:       log,
		Ready:     sessiondtest.HTTPReady("http://" + addr + "/readyz"),
		StopGrace: patience,
	})
	for _, r := range scenarios(t, mcpURL(addr), "basics", "counter", "ask", "ask-while-busy", "delete") {
		r.check(t)
		if len(r.Served) != 3 {
			t.Errorf("%s: served by %v, want three front-ends", r.Scenario, r.Served)
		}
	}
	if err := p.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := sessiondtest.Poll(within(t, patience), func(context.Context) error {
		if p.Running() {
			return fmt.Errorf("still running:%s", p.Tail(1<<10))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if state, _ := p.Exit(); state.ExitCode() != 0 {
		t.Errorf("after Ctrl-C: %s%s", state, p.Tail(1<<10))
	}
}
