//go:build unix

package sessiondtest

import (
	"context"
	"testing"
)

const failureTail = 4 << 10

// StartProcess starts a process for a test, which fails if the process does not get ready or ends without being told to.
// When the test ends the process is stopped; the end of its output is logged if the test failed.
func StartProcess(t testing.TB, cmd Command) *Process {
	t.Helper()
	p, err := Launch(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Terminate(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		report(t, p)
	})
	return p
}

// StartEtcd starts an etcd cluster of n members for a test and stops it when the test ends.
func StartEtcd(t testing.TB, n int) *Etcd {
	t.Helper()
	e, err := LaunchEtcd(t.Context(), EtcdConfig{Dir: t.TempDir(), Members: n})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Stop(); err != nil {
			t.Error(err)
		}
		for _, m := range e.Members {
			report(t, m.Process)
		}
	})
	return e
}

// StartCluster starts a cluster for a test and stops it when the test ends. Dir may be left empty.
func StartCluster(t testing.TB, c ClusterConfig) *Cluster {
	t.Helper()
	if c.Dir == "" {
		c.Dir = t.TempDir()
	}
	cl, err := LaunchCluster(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cl.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		for _, s := range cl.Processes() {
			report(t, s.Process)
		}
	})
	return cl
}

// report fails the test if the process ended by itself, and shows its output if the test has failed.
func report(t testing.TB, p *Process) {
	t.Helper()
	if state, asked := p.Exit(); state != nil && !asked {
		t.Errorf("%s ended by itself: %s", p.Name(), state)
	}
	if t.Failed() {
		t.Logf("the last output of %s:%s", p.Name(), p.Tail(failureTail))
	}
}
