package etcdnode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	inspectEvery   = 30 * time.Second
	inspectTimeout = 3 * time.Second
	// How often a node says the same again.
	remindFull   = 5 * time.Minute
	remindSpace  = time.Hour
	remindAdvice = 24 * time.Hour
	// From which part of the quota on a node warns, in percent.
	warnPercent = 80
	// A file that is smaller is not worth the trouble of defragmenting it.
	worthDefrag = 256 << 20
	// The oldest version whose members say what their quota is, and with which everything here is tested.
	oldestMajor, oldestMinor = 3, 6
	// History that is never compacted shows when so much of it has come together, or in so long a time.
	muchHistory  = 100_000
	longHistory  = 24 * time.Hour
	historyEvery = time.Hour

	alarmNoSpace = "NOSPACE"
	alarmCorrupt = "CORRUPT"
)

// InspectConfig describes what an inspection looks at.
type InspectConfig struct {
	// MaxValueBytes is the largest value that has to fit into one request.
	MaxValueBytes int
	// Key is one that nobody writes, under the keys that the node may read and write.
	Key string
	// Logger takes what an operator should know.
	Logger *slog.Logger
	// Metrics takes the sizes of the members' databases, or is nil.
	Metrics prometheus.Registerer
}

// Inspect looks at etcd now and every 30 s until the node is closed, and says in plain words, before anything breaks, what an
// operator should do about it: space that runs out, a file that is mostly free space, and, of a cluster, members that are too old,
// history that nobody compacts, and a limit of requests that is too small. It is called once.
func (n *Node) Inspect(cfg InspectConfig) error {
	i := &inspector{
		client: n.client, endpoints: n.endpoints, embedded: n.member != nil, cfg: cfg,
		said: map[string]time.Time{}, much: muchHistory, members: map[string]memberState{},
	}
	if cfg.Metrics != nil {
		if err := cfg.Metrics.Register(i); err != nil {
			return fmt.Errorf("metrics of etcd: %w", err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	n.inspector, n.stopInspect = i, cancel
	n.wg.Go(func() { i.run(ctx) })
	return nil
}

// Troubles says what keeps etcd from serving as it should, one line each; none if nothing does, or nothing is known.
func (n *Node) Troubles() []string {
	if n.inspector == nil {
		return nil
	}
	return n.inspector.troubles()
}

type memberState struct {
	size, inUse, quota int64
	alarms             string
}

type inspector struct {
	client    *clientv3.Client
	endpoints []string
	embedded  bool
	cfg       InspectConfig

	// Of the goroutine that inspects.
	said         map[string]time.Time // when what was said last
	asked        bool                 // whether the limit of requests is known
	marked       int64                // a revision of the past, to see whether it gets compacted
	markedAt     time.Time
	much         int64 // revisions
	historyAt    time.Time
	historyBegun bool

	mu      sync.Mutex
	members map[string]memberState
}

func (i *inspector) run(ctx context.Context) {
	tick := time.NewTicker(inspectEvery)
	defer tick.Stop()
	for {
		i.inspect(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (i *inspector) inspect(ctx context.Context) {
	for _, endpoint := range i.endpoints {
		sctx, cancel := context.WithTimeout(ctx, inspectTimeout)
		status, err := i.client.Status(sctx, endpoint)
		cancel()
		if err != nil {
			continue // whoever needs it finds out and says so
		}
		state := memberState{size: status.DbSize, inUse: status.DbSizeInUse, quota: status.DbSizeQuota, alarms: strings.Join(status.Errors, " ")}
		i.mu.Lock()
		i.members[endpoint] = state
		i.mu.Unlock()
		i.checkVersion(ctx, endpoint, status.Version)
		i.checkSpace(ctx, endpoint, state)
	}
	if !i.embedded {
		i.checkRequestSize(ctx)
		i.checkHistory(ctx)
	}
}

// say says something unless it was said not long ago.
func (i *inspector) say(every time.Duration, key string, say func()) {
	if last, ok := i.said[key]; ok && time.Since(last) < every {
		return
	}
	i.said[key] = time.Now()
	say()
}

func (i *inspector) checkVersion(ctx context.Context, member, version string) {
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil || major > oldestMajor || major == oldestMajor && minor >= oldestMinor {
		return
	}
	i.say(remindAdvice, "version "+member, func() {
		i.cfg.Logger.WarnContext(ctx, "a member of etcd is older than 3.6: it may lose what watches should bring, and does not say how much space is left; upgrade it",
			"member", member, "version", version)
	})
}

func (i *inspector) checkSpace(ctx context.Context, member string, s memberState) {
	attrs := []any{"member", member, "size_bytes", s.size, "in_use_bytes", s.inUse, "quota_bytes", s.quota}
	// A file that has become smaller (defragmented) or a larger quota ends it; then it is news when it comes again.
	full, near := "full "+member, "near "+member
	switch {
	case strings.Contains(s.alarms, alarmNoSpace):
		i.say(remindFull, full, func() {
			i.cfg.Logger.ErrorContext(ctx, "etcd takes no writes: its space quota is used up (alarm NOSPACE); sessions can be read and destroyed, not saved",
				append(attrs, "what_to_do", i.cureFull())...)
		})
		return
	case s.quota > 0 && s.size >= s.quota/100*warnPercent:
		i.say(remindSpace, near, func() {
			i.cfg.Logger.WarnContext(ctx, "etcd's space runs out: at its quota it takes no more writes",
				append(attrs, "what_to_do", i.cureNear())...)
		})
	default:
		delete(i.said, near)
	}
	if _, was := i.said[full]; was {
		delete(i.said, full)
		i.cfg.Logger.InfoContext(ctx, "etcd takes writes again", attrs...)
	}
	if s.size >= max(worthDefrag, s.quota/4) && s.inUse < s.size/2 {
		i.say(remindAdvice, "defrag "+member, func() {
			i.cfg.Logger.WarnContext(ctx, "most of etcd's file is free space, which counts against its quota until it is defragmented",
				append(attrs, "what_to_do", i.cureFragmented())...)
		})
	}
}

func (i *inspector) cureFull() string {
	if i.embedded {
		return "restart sessiond: it gives free space back and goes on; if it stays full, end sessions or give them shorter TTLs first"
	}
	return "compact (etcdctl compact REVISION), defragment each member (etcdctl defrag), then etcdctl alarm disarm; if the data needs it, raise --quota-backend-bytes first"
}

func (i *inspector) cureNear() string {
	if i.embedded {
		return "restart sessiond, which gives free space back; if it is in use, end sessions or give them shorter TTLs"
	}
	return "set --auto-compaction-retention (1h will do), defragment one member after the other (etcdctl defrag); if the data needs it, raise --quota-backend-bytes"
}

func (i *inspector) cureFragmented() string {
	if i.embedded {
		return "restart sessiond when it suits: it gives free space back while it starts"
	}
	return "etcdctl defrag, one member after the other: each stands still for it, about 10 s per GiB"
}

// checkRequestSize finds out once whether a session of the largest size fits into a request of the cluster. The limit is
// not to be asked for, so this makes such a request: a write under a condition that never holds, which changes nothing.
func (i *inspector) checkRequestSize(ctx context.Context) {
	if i.asked {
		return
	}
	ask := func(size int) error {
		ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
		defer cancel()
		_, err := i.client.Txn(ctx).
			If(clientv3.Compare(clientv3.Version(i.cfg.Key), "<", 0)).
			Then(clientv3.OpPut(i.cfg.Key, string(make([]byte, size)))).
			Commit()
		return err
	}
	size := max(i.cfg.MaxValueBytes, 1<<20) + valueOverhead
	err := ask(size)
	if err != nil && !errors.Is(err, rpctypes.ErrRequestTooLarge) {
		// gRPC has limits too, and errors of its own for them. A small request tells whether it was for the size.
		if ask(0) != nil {
			return // asked again next time
		}
		if err = ask(size); errors.Is(err, context.DeadlineExceeded) {
			return
		}
	}
	i.asked = true
	if err != nil {
		i.cfg.Logger.WarnContext(ctx, "etcd refuses requests as large as sessions may be: give its members a larger --max-request-bytes, or this node a smaller --max-session-bytes",
			"needed_bytes", size, "error", err)
	}
}

// checkHistory finds out whether the cluster compacts its history. How it is set is not to be asked for: but a revision
// that is long gone can still be read if nobody compacts.
func (i *inspector) checkHistory(ctx context.Context) {
	if time.Since(i.historyAt) < historyEvery {
		return
	}
	now, err := i.revision(ctx, 0)
	if err != nil {
		return
	}
	i.historyAt = time.Now()
	mark := func() { i.marked, i.markedAt = now, time.Now() }
	if !i.historyBegun {
		i.historyBegun = true
		i.marked, i.markedAt = 1, time.Now().Add(-longHistory)
		defer mark()
	}
	_, err = i.revision(ctx, i.marked)
	switch {
	case errors.Is(err, rpctypes.ErrCompacted):
		mark()
		delete(i.said, "history")
	case err != nil:
	case now-i.marked >= i.much && time.Since(i.markedAt) >= longHistory:
		i.say(remindAdvice, "history", func() {
			i.cfg.Logger.WarnContext(ctx, "etcd keeps all its history, which fills its quota: start its members with --auto-compaction-retention=1h",
				"revisions", now-i.marked)
		})
	}
}

// revision reads at a revision, or at the present one, and returns the present one.
func (i *inspector) revision(ctx context.Context, at int64) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	resp, err := i.client.Get(ctx, i.cfg.Key, clientv3.WithCountOnly(), clientv3.WithRev(at))
	if err != nil {
		return 0, err
	}
	return resp.Header.Revision, nil
}

func (i *inspector) troubles() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	var troubles []string
	for _, endpoint := range i.endpoints {
		switch alarms := i.members[endpoint].alarms; {
		case strings.Contains(alarms, alarmNoSpace):
			troubles = append(troubles, "etcd takes no writes, its space quota is used up (alarm NOSPACE): "+i.cureFull())
		case strings.Contains(alarms, alarmCorrupt):
			troubles = append(troubles, "etcd found its data corrupt (alarm CORRUPT): replace the member that differs from the others")
		}
	}
	slices.Sort(troubles)
	return slices.Compact(troubles) // an alarm is the whole cluster's
}

var (
	sizeDesc  = prometheus.NewDesc("sessiond_etcd_db_size_bytes", "Size of the member's database file.", []string{"member"}, nil)
	inUseDesc = prometheus.NewDesc("sessiond_etcd_db_in_use_bytes", "Part of the member's database file that is in use; the rest is free space.", []string{"member"}, nil)
	quotaDesc = prometheus.NewDesc("sessiond_etcd_db_quota_bytes", "Size of the database file at which the member takes no more writes.", []string{"member"}, nil)
	alarmDesc = prometheus.NewDesc("sessiond_etcd_alarm", "Whether etcd has raised the alarm.", []string{"alarm"}, nil)
)

// Describe implements prometheus.Collector.
func (i *inspector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{sizeDesc, inUseDesc, quotaDesc, alarmDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector with what the last inspection found.
func (i *inspector) Collect(ch chan<- prometheus.Metric) {
	i.mu.Lock()
	defer i.mu.Unlock()
	raised := map[string]float64{alarmNoSpace: 0, alarmCorrupt: 0}
	for endpoint, s := range i.members {
		member := endpoint
		if i.embedded {
			member = "embedded"
		}
		for desc, v := range map[*prometheus.Desc]int64{sizeDesc: s.size, inUseDesc: s.inUse, quotaDesc: s.quota} {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(v), member)
		}
		for alarm := range raised {
			if strings.Contains(s.alarms, alarm) {
				raised[alarm] = 1
			}
		}
	}
	for alarm, v := range raised {
		ch <- prometheus.MustNewConstMetric(alarmDesc, prometheus.GaugeValue, v, alarm)
	}
}
