//go:build unix

package chaos

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

const (
	members = 3
	nodes   = 3
	// groups is how many groups of clients there are, each with links of its own to every node.
	groups = 2

	// quota is small, so that using it up does not take long. The traffic alone does not reach it, because history is compacted.
	quota        = 192 << 20
	compactEvery = 5 * time.Second
)

// A cluster is etcd members and nodes as processes, with a link between each pair that talks to each other: from every group of
// clients and from the front-ends to every node, and from every node to every member. Members reach a member by one link that
// they share, so that to cut it off is one fault.
type cluster struct {
	dir  string
	bin  func(string) (string, error)
	etcd *sessiondtest.Etcd
	// nodes are the sessiond processes; metrics are where they serve these.
	nodes   []*sessiondtest.Server
	metrics []string
	// byClients are the links to each node of each group, and of the front-ends after them; byNodes those to each member of each
	// node; byPeers those to each member of the others.
	byClients, byNodes [][]*sessiondtest.Link
	byPeers            []*sessiondtest.Link
	// admin is a client of etcd that no fault comes near, and one of each member.
	admin  *clientv3.Client
	member []*clientv3.Client
}

func startCluster(ctx context.Context, dir string, bin func(string) (string, error)) (_ *cluster, err error) {
	c := &cluster{dir: dir, bin: bin}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.stop(context.WithoutCancel(ctx)))
		}
	}()
	etcdPath, err := bin("etcd")
	if err != nil {
		return nil, err
	}
	nodePath, err := bin("sessiond")
	if err != nil {
		return nil, err
	}
	c.etcd, err = sessiondtest.LaunchEtcd(ctx, sessiondtest.EtcdConfig{
		Path: etcdPath, Dir: filepath.Join(dir, "etcd"), Members: members, Heartbeat: 100 * time.Millisecond,
		Args: []string{"--quota-backend-bytes", fmt.Sprint(quota)},
		PeerAddr: func(peer string) (string, error) {
			k, err := sessiondtest.LaunchLink(peer)
			if err != nil {
				return "", err
			}
			c.byPeers = append(c.byPeers, k)
			return k.Addr(), nil
		},
	})
	if err != nil {
		return nil, err
	}
	if c.admin, err = connectEtcd(c.etcd.Endpoints()...); err != nil {
		return nil, err
	}
	for _, endpoint := range c.etcd.Endpoints() {
		m, err := connectEtcd(endpoint)
		if err != nil {
			return nil, err
		}
		c.member = append(c.member, m)
	}

	listen, err := sessiondtest.FreeAddrs(2 * nodes)
	if err != nil {
		return nil, err
	}
	for i := range nodes {
		links, err := launchLinks(c.etcd.Endpoints())
		c.byNodes = append(c.byNodes, links)
		if err != nil {
			return nil, err
		}
		name, addr, metrics := fmt.Sprintf("sessiond-%d", i+1), listen[i], listen[nodes+i]
		p, err := sessiondtest.Launch(ctx, sessiondtest.Command{
			Name: name, Path: nodePath, Log: filepath.Join(dir, name+".log"), Ready: sessiondtest.GRPCReady(addr),
			Args: []string{
				"--listen", addr, "--metrics-listen", metrics, "--etcd-endpoints", strings.Join(addrs(links), ","), "--grace", "3s",
				"--log-level", "warn",
			},
		})
		if err != nil {
			return nil, err
		}
		c.nodes = append(c.nodes, &sessiondtest.Server{Process: p, Addr: addr})
		c.metrics = append(c.metrics, metrics)
	}
	for range groups + 1 {
		links, err := launchLinks(listen[:nodes])
		c.byClients = append(c.byClients, links)
		if err != nil {
			return nil, err
		}
	}
	return c, nil
}

func connectEtcd(endpoints ...string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop(), DialTimeout: 5 * time.Second})
}

func launchLinks(targets []string) ([]*sessiondtest.Link, error) {
	var links []*sessiondtest.Link
	for _, target := range targets {
		k, err := sessiondtest.LaunchLink(target)
		if err != nil {
			return links, err
		}
		links = append(links, k)
	}
	return links, nil
}

func addrs(links []*sessiondtest.Link) []string {
	var out []string
	for _, k := range links {
		out = append(out, k.Addr())
	}
	return out
}

// of gives the addresses of the nodes for a group of clients; the last group is the front-ends.
func (c *cluster) of(group int) []string { return addrs(c.byClients[group]) }

// compact forgets the history that is older than some seconds, as an operator's etcd would, until ctx ends.
func (c *cluster) compact(ctx context.Context) {
	var last int64
	for pause(ctx, compactEvery) {
		get, cancel := context.WithTimeout(ctx, compactEvery)
		resp, err := c.admin.Get(get, "none")
		if err == nil {
			if last > 0 {
				_, _ = c.admin.Compact(get, last) // a fault may have compacted more
			}
			last = resp.Header.Revision
		}
		cancel()
	}
}

// stop ends all processes and links.
func (c *cluster) stop(ctx context.Context) error {
	var errs []error
	for _, n := range c.nodes {
		errs = append(errs, n.Terminate(ctx))
	}
	if c.admin != nil {
		errs = append(errs, c.admin.Close())
	}
	for _, m := range c.member {
		errs = append(errs, m.Close())
	}
	if c.etcd != nil {
		errs = append(errs, c.etcd.Stop())
	}
	for _, k := range slices.Concat(slices.Concat(c.byClients...), slices.Concat(c.byNodes...), c.byPeers) {
		k.Close()
	}
	return errors.Join(errs...)
}
