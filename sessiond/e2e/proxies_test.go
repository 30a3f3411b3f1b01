//go:build unix

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// proxies are the programs that people really put in front, with the template of their configuration in the folder
// proxies and the arguments before its path.
var proxies = []struct {
	name, template string
	args           []string
}{
	{"nginx", "nginx.conf", []string{"-c"}},
	{"haproxy", "haproxy.cfg", []string{"-db", "-f"}},
}

// Real proxies with their default buffering and idle time-outs of 15 s, each before two front-ends (F1, F19): what is
// sent arrives when it is sent, and what is silent for longer than the time-out is not cut, a call no more than the
// standalone stream, nor a modern client's subscription (C72). With the front-ends' answers as streams, and as JSON, where a long call has to become a stream.
func TestProxies(t *testing.T) {
	args := []string{"--everything", "--allowed-hosts", "front_ends"} // the host that nginx passes on
	c := sessiondtest.StartCluster(t, sessiondtest.ClusterConfig{Members: 1, Nodes: 2, FrontEnds: 2, FrontEndArgs: args})
	streaming := []string{c.FrontEnds[0].Addr, c.FrontEnds[1].Addr}
	args = append(args, "--json")
	json := []string{startFrontEnd(t, c, args...).Addr, startFrontEnd(t, c, args...).Addr}
	type run struct {
		name string
		url  string
		idle []func() []report
	}
	var runs []run
	for _, p := range proxies {
		runs = append(runs,
			run{name: p.name, url: startProxy(t, p.name, p.template, p.args, streaming)},
			run{name: p.name + " json", url: startProxy(t, p.name, p.template, p.args, json)})
	}
	// It waits for most of the time, so all of them do at once, and the rest goes on beside them.
	for i := range runs {
		runs[i].idle = []func() []report{
			startScenarios(t, runs[i].url, "idle"), startScenarios(t, runs[i].url, "--sdk=2", "idle-modern"),
		}
	}
	for _, r := range runs {
		t.Run(r.name, func(t *testing.T) {
			names := []string{"basics", "ask", "ask-while-busy", "ask-in-parallel", "sampling", "progress", "logging", "delete", "parallel-200"}
			if strings.HasSuffix(r.name, " json") {
				names = []string{"basics", "ask", "progress", "parallel-200"}
			}
			checkProxied(t, scenarios(t, r.url, names...))
		})
	}
	for _, r := range runs {
		t.Run(r.name+" in silence", func(t *testing.T) {
			for _, idle := range r.idle {
				checkProxied(t, idle())
			}
		})
	}
}

func checkProxied(t *testing.T, reports []report) {
	t.Helper()
	for _, r := range reports {
		t.Run(r.Scenario, func(t *testing.T) {
			r.check(t)
			// The idle scenarios have few requests, among those of others, which take turns too.
			if !strings.HasPrefix(r.Scenario, "idle") && len(r.Served) != 2 {
				t.Errorf("served by %v, want two front-ends", r.Served)
			}
			if r.Scenario == "ask" && !slices.ContainsFunc(r.Hops, func(hops []string) bool {
				return slices.ContainsFunc(hops[1:], func(by string) bool { return by != hops[0] })
			}) {
				t.Errorf("asked and answered on the same front-end only: %v", r.Hops)
			}
		})
	}
}

// startFrontEnd starts one more front-end of a cluster.
func startFrontEnd(t *testing.T, c *sessiondtest.Cluster, args ...string) *sessiondtest.Server {
	t.Helper()
	var nodes []string
	for _, n := range c.Nodes {
		nodes = append(nodes, n.Addr)
	}
	addr := freeAddr(t)
	p := sessiondtest.StartProcess(t, sessiondtest.Command{
		Name:  "mcpserver-more",
		Path:  binary(t, "mcpserver"),
		Args:  append([]string{"--listen", addr, "--sessiond", strings.Join(nodes, ",")}, args...),
		Log:   filepath.Join(t.TempDir(), "mcpserver.log"),
		Ready: sessiondtest.HTTPReady("http://" + addr + "/readyz"),
	})
	return &sessiondtest.Server{Process: p, Addr: addr}
}

// startProxy starts a proxy that balances over the back-ends and gives the URL for clients.
func startProxy(t *testing.T, name, configuration string, args, backEnds []string) string {
	t.Helper()
	program, err := lookProxy(name)
	if err != nil {
		t.Fatalf("%v (make e2e installs Debian's package)", err)
	}
	dir, addr := t.TempDir(), freeAddr(t)
	tmpl, err := template.ParseFiles(filepath.Join("proxies", configuration))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, configuration)
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := tmpl.Execute(f, map[string]any{"Dir": dir, "Listen": addr, "BackEnds": backEnds, "Root": os.Getuid() == 0}); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	sessiondtest.StartProcess(t, sessiondtest.Command{
		Name:      name,
		Path:      program,
		Args:      append(slices.Clone(args), path),
		Log:       filepath.Join(dir, name+".log"),
		Ready:     sessiondtest.HTTPReady("http://" + addr + "/readyz"),
		StopGrace: 20 * time.Second,
	})
	return mcpURL(addr)
}

// lookProxy looks where Debian puts its daemons too, which is in the PATH of root only.
func lookProxy(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		if debian, derr := exec.LookPath(filepath.Join("/usr/sbin", name)); derr == nil {
			return debian, nil
		}
	}
	return path, err
}
