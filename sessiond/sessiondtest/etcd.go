//go:build unix

package sessiondtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Server is a process that serves at an address.
type Server struct {
	*Process
	// Addr is where it serves, as host:port.
	Addr string
}

// EtcdConfig says what etcd cluster to start.
type EtcdConfig struct {
	// Path is the etcd program. Empty: etcd in the folder that E2E_BIN_DIR names.
	Path string
	// Dir takes the data and the logs.
	Dir string
	// Members is the size of the cluster: 1, 3 or 5. Zero: 3.
	Members int
	// Heartbeat is how often the leader shows that it is there; followers that miss it for ten times as long elect
	// another. It also bounds leases from below: etcd grants none shorter than 1.5 times that. Zero: 50 ms, which
	// makes fail-over fast and is right for loopback only.
	Heartbeat time.Duration
	// Args are further arguments for every member.
	Args []string
	// PeerAddr gives the address at which the other members are to reach a member's peer address, such as that of a [Link] to
	// it. Nil: the address itself.
	PeerAddr func(peer string) (string, error)
}

// Etcd is a cluster of etcd processes.
type Etcd struct {
	Members []*Server
}

// LaunchEtcd starts a new etcd cluster and waits until it has a leader. On an error nothing is left running.
func LaunchEtcd(ctx context.Context, c EtcdConfig) (*Etcd, error) {
	if c.Path == "" {
		var err error
		if c.Path, err = Binary("etcd"); err != nil {
			return nil, err
		}
	}
	if c.Members == 0 {
		c.Members = 3
	}
	heartbeat := or(c.Heartbeat, 50*time.Millisecond)
	addrs, err := FreeAddrs(2 * c.Members)
	if err != nil {
		return nil, err
	}
	clients, peers := addrs[:c.Members], addrs[c.Members:]
	reached := slices.Clone(peers)
	var initial []string
	for i, peer := range peers {
		if c.PeerAddr != nil {
			if reached[i], err = c.PeerAddr(peer); err != nil {
				return nil, err
			}
		}
		initial = append(initial, fmt.Sprintf("etcd-%d=http://%s", i+1, reached[i]))
	}
	var commands []Command
	for i := range c.Members {
		name := fmt.Sprintf("etcd-%d", i+1)
		args := []string{
			"--name", name,
			"--data-dir", filepath.Join(c.Dir, name),
			"--listen-client-urls", "http://" + clients[i],
			"--advertise-client-urls", "http://" + clients[i],
			"--listen-peer-urls", "http://" + peers[i],
			"--initial-advertise-peer-urls", "http://" + reached[i],
			"--initial-cluster", strings.Join(initial, ","),
			"--initial-cluster-state", "new",
			"--initial-cluster-token", "sessiondtest-" + peers[0],
			"--heartbeat-interval", fmt.Sprint(heartbeat.Milliseconds()),
			"--election-timeout", fmt.Sprint(10 * heartbeat.Milliseconds()),
			"--log-level", "warn",
		}
		commands = append(commands, Command{
			Name: name,
			Path: c.Path,
			Args: append(args, c.Args...),
			Log:  filepath.Join(c.Dir, name+".log"),
			// It answers 200 only while the member knows a leader.
			Ready: HTTPReady("http://" + clients[i] + "/health"),
		})
	}
	members, err := launchAll(ctx, commands, clients)
	if err != nil {
		return nil, err
	}
	return &Etcd{Members: members}, nil
}

// Endpoints are the members' client addresses, as host:port.
func (e *Etcd) Endpoints() []string {
	var out []string
	for _, m := range e.Members {
		out = append(out, m.Addr)
	}
	return out
}

// Leader gives the index of the member that leads, as a member that runs sees it.
func (e *Etcd) Leader(ctx context.Context) (int, error) {
	ids := map[string]int{}
	leader := ""
	var errs []error
	for i, m := range e.Members {
		if !m.Running() {
			continue
		}
		one, cancel := context.WithTimeout(ctx, probeTimeout) // a paused member does not answer
		id, leads, err := status(one, m.Addr)
		cancel()
		if err != nil {
			errs = append(errs, err)
			continue
		}
		ids[id] = i
		if leads != "" && leads != "0" {
			leader = leads
		}
	}
	if i, ok := ids[leader]; ok {
		return i, nil
	}
	return 0, errors.Join(append(errs, errors.New("etcd has no leader"))...)
}

// status asks a member, over its JSON gateway, who it is and whom it follows.
func status(ctx context.Context, addr string) (id, leader string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v3/maintenance/status", strings.NewReader("{}"))
	if err != nil {
		return "", "", err
	}
	t := &http.Transport{DisableKeepAlives: true}
	resp, err := t.RoundTrip(req)
	if err != nil {
		return "", "", err
	}
	defer func() { _ = resp.Body.Close() }()
	var body bytes.Buffer
	if _, err := body.ReadFrom(resp.Body); err != nil {
		return "", "", err
	}
	var out struct {
		Header struct {
			MemberID string `json:"member_id"`
		} `json:"header"`
		Leader string `json:"leader"`
	}
	if err := json.Unmarshal(body.Bytes(), &out); err != nil {
		return "", "", fmt.Errorf("status of etcd at %s: %w: %s", addr, err, body.Bytes())
	}
	return out.Header.MemberID, out.Leader, nil
}

// launchAll starts processes at the same time and waits until all are ready. On an error none of them is left running.
func launchAll(ctx context.Context, commands []Command, addrs []string) ([]*Server, error) {
	servers := make([]*Server, len(commands))
	errs := make([]error, len(commands))
	var wg sync.WaitGroup
	for i := range commands {
		wg.Go(func() {
			p, err := Launch(ctx, commands[i])
			if err != nil {
				errs[i] = err
				return
			}
			servers[i] = &Server{Process: p, Addr: addrs[i]}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		for _, s := range servers {
			if s != nil {
				err = errors.Join(err, s.Kill())
			}
		}
		return nil, err
	}
	return servers, nil
}

// terminateAll stops processes at the same time.
func terminateAll(ctx context.Context, servers []*Server) error {
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, s := range servers {
		wg.Go(func() { errs[i] = s.Terminate(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Stop ends all members, with SIGKILL: asked to leave, a leader hands over first, and looks for somebody to take over for
// seven seconds when all leave at once. What etcd has acknowledged is on disk at any moment, so nothing is lost.
func (e *Etcd) Stop() error {
	var errs []error
	for _, m := range e.Members {
		errs = append(errs, m.Kill())
	}
	return errors.Join(errs...)
}
