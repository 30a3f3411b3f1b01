//go:build unix

package chaos

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond"
)

// counts are what must not be more after the traffic than it was before.
type counts struct {
	// keys are those of sessions, locks and messages; all are also those of nodes and of front-ends.
	keys, all, leases int
	// watchers are counted by the members, goroutines by the nodes.
	watchers, goroutines int
	// each has them one by one, and some of the keys.
	each string
}

const (
	// What is left has so long to go: leases of locks, of messages and of ends of queues that nobody refreshes, keys of nodes that were killed, which
	// go with their leases, connections that are made anew.
	leftoverTimeout = 130 * time.Second
	// Leases that lie ready for the next locks, in each node.
	spareLeases = 60
	// Sessions and messages share leases, which live on when all that they had is on others. A node takes another after so many
	// writes, or a minute, and has the next one granted ahead.
	writesPerLease = 256
	// gRPC and the Go runtime keep some goroutines for a while.
	spareGoroutines = 60
)

func (c *cluster) count(ctx context.Context) (counts, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var n counts
	for _, kind := range []string{"s/", "l/", "m/"} {
		keys, err := c.admin.Get(ctx, sessiond.DefaultPrefix+kind, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(5))
		if err != nil {
			return n, err
		}
		n.keys += int(keys.Count)
		for _, kv := range keys.Kvs {
			n.each += string(kv.Key) + " "
		}
	}
	all, err := c.admin.Get(ctx, sessiond.DefaultPrefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return n, err
	}
	n.all = int(all.Count)
	leases, err := c.admin.Leases(ctx)
	if err != nil {
		return n, err
	}
	n.leases = len(leases.Leases)
	for _, m := range c.etcd.Members {
		watchers, err := metric(ctx, m.Addr, "etcd_debugging_mvcc_watcher_total")
		if err != nil {
			return n, err
		}
		n.watchers += watchers
		n.each += fmt.Sprintf("%d ", watchers)
	}
	for _, addr := range c.metrics {
		goroutines, err := metric(ctx, addr, "go_goroutines")
		if err != nil {
			return n, err
		}
		n.goroutines += goroutines
		n.each += fmt.Sprintf("%d ", goroutines)
	}
	return n, nil
}

// metric reads a number that a process serves.
func metric(ctx context.Context, addr, name string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", http.NoBody)
	if err != nil {
		return 0, err
	}
	t := &http.Transport{DisableKeepAlives: true}
	resp, err := t.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			f, err := strconv.ParseFloat(value, 64)
			return int(f), err
		}
	}
	return 0, fmt.Errorf("%s has no metric %s", addr, name)
}

// sharedLeases is how many leases the run's writes may have taken, at most, on so many nodes.
func (r *Report) sharedLeases(nodes int) int {
	writes := r.Published
	for _, kind := range []Kind{Create, Save, Touch} {
		writes += r.ByKind[kind][OK] + r.ByKind[kind][Unknown]
	}
	return writes/writesPerLease + 2*nodes*(int(r.Took.Minutes())+1)
}

// leftovers waits until what the traffic left has gone, and says what has not (O5, S12). Then it stops the nodes and does so again.
func (c *cluster) leftovers(ctx context.Context, before counts, sharedLeases int, logf func(string, ...any)) []Violation {
	running, v := c.await(ctx, "with idle nodes", logf, func(now counts) bool {
		return now.keys == 0 && now.leases <= before.leases+spareLeases+sharedLeases && now.goroutines <= before.goroutines+spareGoroutines
	})
	if v != nil {
		return v
	}
	for _, n := range c.nodes {
		if err := n.Terminate(ctx); err != nil {
			return []Violation{{Rule: "leftovers", Session: "all", Text: err.Error()}}
		}
	}
	c.metrics = nil
	stopped, v := c.await(ctx, "with the nodes stopped", logf, func(now counts) bool { return now.all == 0 })
	if v != nil {
		return v
	}
	// Members that were paused or killed may count a watcher whose stream has long gone: what nobody is there to have is etcd's.
	if running.watchers-stopped.watchers > before.watchers {
		return []Violation{{Rule: "leftovers", Session: "all", Text: fmt.Sprintf("watchers: before %+v, with idle nodes %+v, without nodes %+v", before, running, stopped)}}
	}
	return nil
}

// await waits until what is counted is as it should be.
func (c *cluster) await(ctx context.Context, when string, logf func(string, ...any), ok func(counts) bool) (counts, []Violation) {
	ctx, cancel := context.WithTimeout(ctx, leftoverTimeout)
	defer cancel()
	began := time.Now()
	for {
		now, err := c.count(ctx)
		if err == nil && ok(now) {
			logf("nothing left over %s, after %.0f s: %+v", when, time.Since(began).Seconds(), now)
			return now, nil
		}
		if !pause(ctx, time.Second) {
			return now, []Violation{{Rule: "leftovers", Session: "all", Text: fmt.Sprintf("%s: %+v (%v)", when, now, err)}}
		}
	}
}
