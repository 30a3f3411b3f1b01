package etcdnode

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

// logs is a log that is read while it is written.
type logs struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// count says how many lines have all the words.
func (l *logs) count(words ...string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	count := 0
	for line := range strings.Lines(l.text.String()) {
		all := true
		for _, word := range words {
			all = all && strings.Contains(line, word)
		}
		if all {
			count++
		}
	}
	return count
}

func (l *logs) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// gauges are the values of a registry's metrics, by name and labels.
func gauges(t *testing.T, registry *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var name strings.Builder
			name.WriteString(f.GetName())
			for _, l := range m.GetLabel() {
				name.WriteString(" " + l.GetValue())
			}
			values[name.String()] = m.GetGauge().GetValue()
		}
	}
	return values
}

// newInspector makes one that inspects only when told to.
func newInspector(n *Node, log *logs, maxValueBytes int) *inspector {
	n.inspector = &inspector{
		client: n.client, endpoints: n.endpoints, embedded: n.member != nil,
		cfg:  InspectConfig{MaxValueBytes: maxValueBytes, Key: "sessiond/probe", Logger: log.logger()},
		said: map[string]time.Time{}, much: muchHistory, members: map[string]memberState{},
	}
	return n.inspector
}

// O5: an embedded member compacts its history and bounds its space.
func TestEmbeddedSettings(t *testing.T) {
	n, err := Embed(t.Context(), EmbedConfig{DataDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	ec := n.Member().Config()
	if ec.AutoCompactionMode != embed.CompactorModePeriodic || ec.AutoCompactionRetention != "1m" {
		t.Errorf("compaction: %s, %s", ec.AutoCompactionMode, ec.AutoCompactionRetention)
	}
	if ec.BootstrapDefragThresholdMegabytes != 512 || ec.MaxRequestBytes != 3<<19 || ec.UnsafeNoFsync {
		t.Errorf("config: %d MiB, %d bytes, %v", ec.BootstrapDefragThresholdMegabytes, ec.MaxRequestBytes, ec.UnsafeNoFsync)
	}
	registry := prometheus.NewRegistry()
	if err := n.Inspect(InspectConfig{Key: "sessiond/probe", Logger: slog.New(slog.DiscardHandler), Metrics: registry}); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); ; {
		got := gauges(t, registry)
		if got["sessiond_etcd_db_quota_bytes embedded"] == 8<<30 && got["sessiond_etcd_db_size_bytes embedded"] > 0 && got["sessiond_etcd_db_in_use_bytes embedded"] > 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("metrics: %v", got)
		}
	}
}

// O5: the space quota is spoken of before it bites and when it does, with what to do; and doing that helps.
func TestSpaceRunsOut(t *testing.T) {
	const quota = 16 << 20
	dir, log := t.TempDir(), &logs{}
	n, err := Embed(t.Context(), EmbedConfig{DataDir: dir, QuotaBytes: quota, Logger: log.logger()})
	if err != nil {
		t.Fatal(err)
	}
	i := newInspector(n, log, 0)
	registry := prometheus.NewRegistry()
	registry.MustRegister(i)
	i.inspect(t.Context())
	if log.count("space") > 0 || len(n.Troubles()) > 0 {
		t.Errorf("said of an empty member: %s, %v", log.text.String(), n.Troubles())
	}

	value := string(make([]byte, 256<<10))
	put := func() error {
		_, err := n.KV().Put(t.Context(), "k", value)
		return err
	}
	for n.Member().Server.Backend().Size() < quota*85/100 {
		if err := put(); err != nil {
			t.Fatal(err)
		}
	}
	i.inspect(t.Context())
	i.inspect(t.Context())
	if log.count("level=WARN", "space runs out", "restart sessiond") != 1 || len(n.Troubles()) > 0 {
		t.Errorf("at four fifths: %s, %v", log.text.String(), n.Troubles())
	}

	for err = put(); err == nil; err = put() {
	}
	if !errors.Is(err, rpctypes.ErrNoSpace) {
		t.Fatal(err)
	}
	i.inspect(t.Context())
	i.inspect(t.Context())
	if log.count("level=ERROR", "takes no writes", "NOSPACE", "restart sessiond") != 1 {
		t.Errorf("when it is full: %s", log.text.String())
	}
	if troubles := n.Troubles(); len(troubles) != 1 || !strings.Contains(troubles[0], "NOSPACE") {
		t.Errorf("troubles: %q", troubles)
	}
	if got := gauges(t, registry); got["sessiond_etcd_alarm NOSPACE"] != 1 || got["sessiond_etcd_alarm CORRUPT"] != 0 || got["sessiond_etcd_db_quota_bytes embedded"] != quota {
		t.Errorf("metrics: %v", got)
	}
	if _, err := n.KV().Delete(t.Context(), "nothing"); err != nil {
		t.Errorf("a delete while it is full: %v", err)
	}

	// Its history compacted, which a member does by itself within two minutes, and started anew, it goes on.
	resp, err := n.KV().Get(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Client().Compact(t.Context(), resp.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	n, err = Embed(t.Context(), EmbedConfig{DataDir: dir, QuotaBytes: quota, Logger: log.logger()})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if err := put(); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	if log.count("there is room again") != 1 {
		t.Errorf("log: %s", log.text.String())
	}
	i = newInspector(n, log, 0)
	i.inspect(t.Context())
	if len(n.Troubles()) > 0 {
		t.Errorf("troubles: %q", n.Troubles())
	}
}

// O5: advice to defragment, when most of a large file is free space.
func TestDefragAdvice(t *testing.T) {
	log := &logs{}
	i := &inspector{cfg: InspectConfig{Logger: log.logger()}, said: map[string]time.Time{}}
	for _, s := range []memberState{
		{size: 100 << 20, inUse: 1 << 20, quota: 8 << 30}, // small
		{size: 2 << 30, inUse: 3 << 29, quota: 8 << 30},   // in use
		{size: 1 << 30, inUse: 1 << 20, quota: 8 << 30},   // far from the quota
	} {
		i.checkSpace(t.Context(), "m", s)
	}
	if log.text.Len() > 0 {
		t.Errorf("said: %s", log.text.String())
	}
	i.checkSpace(t.Context(), "m", memberState{size: 3 << 30, inUse: 1 << 30, quota: 8 << 30})
	i.checkSpace(t.Context(), "m", memberState{size: 3 << 30, inUse: 1 << 30}) // an etcd that does not tell its quota
	if log.count("most of etcd's file is free space", "etcdctl defrag") != 1 {
		t.Errorf("said: %s", log.text.String())
	}
}

// O5: a member older than 3.6 is spoken of, once.
func TestOldVersion(t *testing.T) {
	for version, want := range map[string]int{"3.5.21": 1, "2.3.8": 1, "3.6.0": 0, "3.7.3": 0, "4.0.0": 0, "unknown": 0} {
		log := &logs{}
		i := &inspector{cfg: InspectConfig{Logger: log.logger()}, said: map[string]time.Time{}}
		i.checkVersion(t.Context(), "m", version)
		i.checkVersion(t.Context(), "m", version)
		if log.count("older than 3.6", "version="+version) != want {
			t.Errorf("%s: %s", version, log.text.String())
		}
	}
}

// cluster starts an etcd as an operator would, with its defaults where set changes nothing, and connects to it.
func cluster(t *testing.T, set func(*embed.Config)) *Node {
	t.Helper()
	ec := embed.NewConfig()
	ec.Dir = filepath.Join(t.TempDir(), "etcd")
	socket := filepath.Join(t.TempDir(), "s")
	ec.ListenPeerUrls = nil
	ec.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	if set != nil {
		set(ec)
	}
	member, err := embed.StartEtcd(ec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(member.Close)
	<-member.Server.ReadyNotify()
	n, err := Connect(ConnectConfig{Endpoints: []string{"unix://" + socket}, MaxValueBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// O5: a cluster whose limit of requests is smaller than the largest session is spoken of at the start; the look changes nothing.
func TestRequestSize(t *testing.T) {
	small := cluster(t, nil)
	for size, want := range map[int]int{1 << 20: 0, 3 << 19: 1, 4 << 20: 1} {
		log := &logs{}
		i := newInspector(small, log, size)
		i.inspect(t.Context())
		i.inspect(t.Context())
		if log.count("level=WARN", "--max-request-bytes", "--max-session-bytes") != want || !i.asked {
			t.Errorf("%d bytes: %s", size, log.text.String())
		}
	}
	if resp, err := small.KV().Get(t.Context(), "", clientv3.WithPrefix()); err != nil || resp.Header.Revision != 1 {
		t.Errorf("the look wrote something: %v, %v", resp, err)
	}
	large, log := cluster(t, func(ec *embed.Config) { ec.MaxRequestBytes = 5 << 20 }), &logs{}
	i := newInspector(large, log, 4<<20)
	i.inspect(t.Context())
	if log.text.Len() > 0 || !i.asked {
		t.Errorf("said: %s", log.text.String())
	}
	if _, err := large.KV().Put(t.Context(), "k", string(make([]byte, 4<<20))); err != nil {
		t.Errorf("a write of the largest session: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	i.asked = false
	i.checkRequestSize(ended)
	if i.asked || log.text.Len() > 0 {
		t.Error("took a failure for an answer")
	}
}

// O5: history that nobody compacts is spoken of: at the start if there is much, later if there is much after a day.
func TestHistory(t *testing.T) {
	n, log := cluster(t, nil), &logs{}
	i := newInspector(n, log, 0)
	i.checkHistory(t.Context())
	if log.text.Len() > 0 {
		t.Errorf("said of a new cluster: %s", log.text.String())
	}
	for r := range 20 {
		if _, err := n.KV().Put(t.Context(), "k", fmt.Sprint(r)); err != nil {
			t.Fatal(err)
		}
	}
	// A hundred thousand writes and a day are not to be had here.
	later := func() {
		i.historyAt = time.Time{}
		i.markedAt = time.Now().Add(-longHistory)
		i.checkHistory(t.Context())
	}
	later()
	if log.text.Len() > 0 {
		t.Errorf("said of 20 revisions: %s", log.text.String())
	}
	i.much = 10
	later()
	later()
	if log.count("level=WARN", "--auto-compaction-retention=1h") != 1 {
		t.Errorf("said: %s", log.text.String())
	}
	if _, err := n.Client().Compact(t.Context(), 15); err != nil {
		t.Fatal(err)
	}
	later()
	if log.count("history") != 1 || i.marked < 20 {
		t.Errorf("after a compaction: %s, marked %d", log.text.String(), i.marked)
	}
}
