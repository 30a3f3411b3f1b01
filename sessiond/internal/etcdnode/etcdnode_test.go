package etcdnode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// O1: a data folder serves one process at a time; the second one is told at once, and the folder is free again afterwards.
func TestDataDirInUse(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "folder")
	first, err := Embed(t.Context(), EmbedConfig{DataDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, err := Embed(t.Context(), EmbedConfig{DataDir: dir}); !errors.Is(err, ErrDataDirInUse) || time.Since(began) > time.Second {
		t.Errorf("second: %v after %v", err, time.Since(began))
	}
	if _, err := first.KV().Put(t.Context(), "k", "v"); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Embed(t.Context(), EmbedConfig{DataDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := again.KV().Get(t.Context(), "k"); err != nil || len(resp.Kvs) != 1 {
		t.Errorf("after a restart: %v, %v", resp, err)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestDataDirUnusable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Embed(t.Context(), EmbedConfig{DataDir: file}); err == nil {
		t.Error("a file serves as a folder")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Embed(ctx, EmbedConfig{DataDir: t.TempDir()}); !errors.Is(err, context.Canceled) {
		t.Errorf("start in an ended context: %v", err)
	}
}

// A data folder may have a longer path than a socket; so may the folder for temporary files.
func TestLongPaths(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 100))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", long)
	n, err := Embed(t.Context(), EmbedConfig{DataDir: long})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

// A data folder may have a name that means something else in a URL.
func TestOddPaths(t *testing.T) {
	for _, name := range []string{"a#b", "a?b", "a%20b", "a b", "é"} {
		n, err := Embed(t.Context(), EmbedConfig{DataDir: filepath.Join(t.TempDir(), name)})
		if err != nil {
			t.Fatalf("%q: %v", name, err)
		}
		if _, err := n.Client().Get(t.Context(), "x"); err != nil {
			t.Errorf("%q: %v", name, err)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}

// O3: what etcd logs of its requests has the ids of sessions in it; those never reach our log.
func TestLogHasNoIDs(t *testing.T) {
	var text strings.Builder
	var quiet atomic.Bool
	lg := newZap(slog.New(slog.NewTextHandler(&text, nil)), &quiet, zap.WarnLevel)
	lg.With(zap.String("member", "m1")).Warn("apply request took too long", zap.Duration("took", time.Second), zap.String("request", "key:secret-id"))
	lg.Info("not of interest")
	if s := text.String(); strings.Contains(s, "secret-id") || !strings.Contains(s, "took=1s") || !strings.Contains(s, "member=m1") || strings.Contains(s, "interest") {
		t.Errorf("log: %s", s)
	}
	quiet.Store(true)
	text.Reset()
	lg.Error("closing")
	if text.Len() > 0 {
		t.Errorf("log: %s", text.String())
	}
}

func TestCheckEndpoint(t *testing.T) {
	for endpoint, ok := range map[string]bool{
		"127.0.0.1:2379": true, "http://etcd-0:2379": true, "https://[::1]:2379": true, "unix:///tmp/s": true,
		"": false, "etcd": false, "http://etcd": false, "ftp://a:1": false, "unix://": false, ":2379": false,
	} {
		if err := CheckEndpoint(endpoint); (err == nil) != ok {
			t.Errorf("%q: %v", endpoint, err)
		}
	}
}

// O1, O5: what a start has to read and replay of the log is bounded, and so is what of it is in memory: a commit may have a session of
// the largest size.
func TestLogIsShort(t *testing.T) {
	dir := t.TempDir()
	n, err := Embed(t.Context(), EmbedConfig{DataDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	snapshots := func() int {
		files, err := filepath.Glob(filepath.Join(dir, "etcd", "member", "snap", "*.snap"))
		if err != nil {
			t.Fatal(err)
		}
		return len(files)
	}
	// Several at a time, which share what a commit costs of the disk.
	var wg sync.WaitGroup
	for caller := range 20 {
		wg.Go(func() {
			for range (2*snapshotEvery + 100) / 20 {
				if _, err := n.KV().Put(t.Context(), fmt.Sprint(caller), "v"); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if got := snapshots(); got != 2 {
		t.Errorf("%d snapshots after %d commits", got, n.Member().Server.CommittedIndex())
	}
}

// O1: a start waits for no election timeout, the first one on a data folder and those that follow, and has nothing to warn of.
func TestElectsItselfAtOnce(t *testing.T) {
	dir := t.TempDir()
	logged := &strings.Builder{}
	logger := slog.New(slog.NewTextHandler(logged, &slog.HandlerOptions{Level: slog.LevelWarn}))
	// A member that is alone skips the election timeout but for a random part, so five elections would take 25 s in the mean, and 10 s
	// or less once in a hundred times.
	const timeout, starts, patience = 10 * time.Second, 5, 10 * time.Second
	var took time.Duration
	for range starts {
		began := time.Now()
		n, err := Embed(t.Context(), EmbedConfig{DataDir: dir, Logger: logger, electionTimeout: timeout})
		if err != nil {
			t.Fatal(err)
		}
		took += time.Since(began)
		if _, err := n.KV().Put(t.Context(), "key", "value"); err != nil {
			t.Error(err)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	if took > patience {
		t.Errorf("%d starts took %s", starts, took)
	}
	if logged.Len() > 0 {
		t.Errorf("it warns: %s", logged)
	}
}
