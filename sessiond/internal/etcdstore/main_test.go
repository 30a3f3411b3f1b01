package etcdstore

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sessiond/sessiond/sessiond/internal/etcdnode"
)

// etcd is one embedded member for all tests of the package; each store has a prefix of its own.
var etcd *etcdnode.Node

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "etcdstore-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	etcd, err = etcdnode.Embed(context.Background(), etcdnode.EmbedConfig{DataDir: dir})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := etcd.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func open(t *testing.T, prefix string) *Store {
	t.Helper()
	return openOn(t, prefix, etcd.KV())
}

func openOn(t *testing.T, prefix string, kv KV) *Store {
	t.Helper()
	if prefix == "" {
		prefix = rand.Text() + "/"
	}
	s := Open(Config{
		KV: kv, Lease: etcd.Client(), Watcher: etcd.Watcher(), Members: 1, Prefix: prefix,
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	t.Cleanup(func() { s.Close(context.WithoutCancel(t.Context())) })
	select {
	case <-s.Up():
	case <-time.After(10 * time.Second):
		t.Fatal("store is not up")
	}
	return s
}
