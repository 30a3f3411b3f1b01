//go:build unix

package sessiondtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sessiond/sessiond/sessiond/e2e/balancer"
)

// ClusterConfig says what cluster to start. The zero value, with a Dir, is three of each.
type ClusterConfig struct {
	// EtcdPath, NodePath and FrontEndPath are the programs. Empty: etcd, sessiond and mcpserver in the folder that
	// E2E_BIN_DIR names.
	EtcdPath, NodePath, FrontEndPath string
	// Dir takes data and logs.
	Dir string
	// Members, Nodes and FrontEnds are how many of each to start. Zero: 3.
	Members, Nodes, FrontEnds int
	// NodeArgs and FrontEndArgs are further arguments for every sessiond and every front-end.
	NodeArgs, FrontEndArgs []string
	// EtcdHeartbeat is [EtcdConfig].Heartbeat.
	EtcdHeartbeat time.Duration
	// Listen is where the balancer listens. Empty: at a free port.
	Listen string
	// Balancer makes a command for a process that balances over the back-ends. Nil: the balancer runs in this process.
	Balancer func(listen string, backends []string) Command
}

// A Cluster is an etcd cluster, sessiond nodes on it, front-ends on those, and a balancer before the front-ends.
type Cluster struct {
	Etcd      *Etcd
	Nodes     []*Server
	FrontEnds []*Server
	// Balancer is the balancer's process; nil if it runs in this one.
	Balancer *Server
	// URL is the one address that clients need.
	URL string

	stopBalancer func()
}

// LaunchCluster starts a cluster and waits until it serves. On an error nothing is left running.
func LaunchCluster(ctx context.Context, c ClusterConfig) (_ *Cluster, err error) {
	for _, program := range []struct {
		path *string
		name string
	}{{&c.EtcdPath, "etcd"}, {&c.NodePath, "sessiond"}, {&c.FrontEndPath, "mcpserver"}} {
		if *program.path == "" {
			if *program.path, err = Binary(program.name); err != nil {
				return nil, err
			}
		}
	}
	for _, n := range []*int{&c.Members, &c.Nodes, &c.FrontEnds} {
		if *n == 0 {
			*n = 3
		}
	}
	cl := &Cluster{stopBalancer: func() {}}
	defer func() {
		if err != nil {
			err = errors.Join(err, cl.Stop(context.WithoutCancel(ctx)))
		}
	}()

	cl.Etcd, err = LaunchEtcd(ctx, EtcdConfig{
		Path: c.EtcdPath, Dir: filepath.Join(c.Dir, "etcd"), Members: c.Members, Heartbeat: c.EtcdHeartbeat,
	})
	if err != nil {
		return nil, err
	}
	endpoints := strings.Join(cl.Etcd.Endpoints(), ",")
	cl.Nodes, err = launchTier(ctx, c.Nodes, func(i int, addr string) Command {
		name := fmt.Sprintf("sessiond-%d", i+1)
		return Command{
			Name:  name,
			Path:  c.NodePath,
			Args:  append([]string{"--listen", addr, "--etcd-endpoints", endpoints}, c.NodeArgs...),
			Log:   filepath.Join(c.Dir, name+".log"),
			Ready: GRPCReady(addr),
		}
	})
	if err != nil {
		return nil, err
	}
	nodes := strings.Join(addrs(cl.Nodes), ",")
	cl.FrontEnds, err = launchTier(ctx, c.FrontEnds, func(i int, addr string) Command {
		name := fmt.Sprintf("mcpserver-%d", i+1)
		return Command{
			Name:  name,
			Path:  c.FrontEndPath,
			Args:  append([]string{"--listen", addr, "--sessiond", nodes}, c.FrontEndArgs...),
			Log:   filepath.Join(c.Dir, name+".log"),
			Ready: HTTPReady("http://" + addr + "/readyz"),
		}
	})
	if err != nil {
		return nil, err
	}
	if err := cl.balance(ctx, c); err != nil {
		return nil, err
	}
	return cl, nil
}

func launchTier(ctx context.Context, n int, command func(i int, addr string) Command) ([]*Server, error) {
	listen, err := FreeAddrs(n)
	if err != nil {
		return nil, err
	}
	var commands []Command
	for i, addr := range listen {
		commands = append(commands, command(i, addr))
	}
	return launchAll(ctx, commands, listen)
}

func (cl *Cluster) balance(ctx context.Context, c ClusterConfig) error {
	if c.Listen == "" {
		free, err := FreeAddrs(1)
		if err != nil {
			return err
		}
		c.Listen = free[0]
	}
	cl.URL = "http://" + c.Listen + "/mcp"
	if c.Balancer != nil {
		p, err := Launch(ctx, c.Balancer(c.Listen, addrs(cl.FrontEnds)))
		if err != nil {
			return err
		}
		cl.Balancer = &Server{Process: p, Addr: c.Listen}
		return nil
	}
	b, err := balancer.New(addrs(cl.FrontEnds), balancer.Options{})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { _ = b.Serve(ctx, l) }) // Serve fails only if the listener does, and then every request tells
	cl.stopBalancer = func() { cancel(); wg.Wait() }
	return nil
}

// Processes are all processes of the cluster, in the order in which they were started.
func (cl *Cluster) Processes() []*Server {
	var all []*Server
	if cl.Etcd != nil {
		all = append(all, cl.Etcd.Members...)
	}
	all = slices.Concat(all, cl.Nodes, cl.FrontEnds)
	if cl.Balancer != nil {
		all = append(all, cl.Balancer)
	}
	return all
}

// Stop stops everything, clients' side first, so that each tier still has what it needs while it finishes. What has
// ended already is not an error; what had to be killed is.
func (cl *Cluster) Stop(ctx context.Context) error {
	cl.stopBalancer()
	var errs []error
	if cl.Balancer != nil {
		errs = append(errs, cl.Balancer.Terminate(ctx))
	}
	errs = append(errs, terminateAll(ctx, cl.FrontEnds), terminateAll(ctx, cl.Nodes))
	if cl.Etcd != nil {
		errs = append(errs, cl.Etcd.Stop())
	}
	return errors.Join(errs...)
}

func addrs(servers []*Server) []string {
	var out []string
	for _, s := range servers {
		out = append(out, s.Addr)
	}
	return out
}
