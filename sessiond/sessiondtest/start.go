package sessiondtest

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond"
)

// A Node is a sessiond inside the test's process, with a client of it. Its methods may be called concurrently.
type Node struct {
	addr   string
	client *client.Client
}

// Start starts a sessiond inside the test's process, on an embedded etcd in a folder of the test and at a free port of
// loopback, and returns when it serves. When the test ends it is stopped: clients and front-ends that the test made after it
// should be closed by then, or are told that the node shuts down. What it logs is in the test's log, warnings and errors only.
// The test fails if it does not start, breaks, or does not stop.
//
// Each call starts a node of its own, in a second or so; tests that can share one, with a session each, are faster. It can
// neither be killed nor cut off: for that, [StartCluster] and [StartProcess] start real processes.
//
// Each set may change the configuration, for limits that a test wants to reach:
//
//	node := sessiondtest.Start(t, func(c *sessiond.Config) { c.MaxWaiters = 1 })
//
// With Store set to [sessiond.StoreMemory] there is no etcd, and with Endpoints set it is that one.
func Start(t testing.TB, set ...func(*sessiond.Config)) *Node {
	t.Helper()
	cfg := sessiond.Config{
		Listen: "127.0.0.1:0",
		Grace:  time.Second,
		Logger: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	for _, f := range set {
		f(&cfg)
	}
	if cfg.DataDir == "" && len(cfg.Endpoints) == 0 && cfg.Store != sessiond.StoreMemory {
		cfg.DataDir = t.TempDir()
	}
	server, err := sessiond.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	// It outlives the test's context, which ends before what the test cleans up.
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	var failure error
	go func() {
		defer close(ended)
		failure = server.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		if failure != nil {
			t.Errorf("sessiond: %v", failure)
		}
	})

	addr := server.Addr().String()
	if server.Addr().Network() == "unix" {
		addr = "unix:" + addr
	}
	c, err := client.New([]string{addr}, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	patience, stop := context.WithTimeout(t.Context(), defaultReadyTimeout)
	defer stop()
	err = Poll(patience, func(ctx context.Context) error {
		select {
		case <-ended:
			return Final(context.Canceled) // the clean-up says why
		default:
			return c.Ready(ctx)
		}
	})
	if err != nil {
		t.Fatalf("sessiond: not ready: %v", err)
	}
	return &Node{addr: addr, client: c}
}

const defaultReadyTimeout = 30 * time.Second

// Addr is where the node serves gRPC, in plain text: as [client.New] takes it, and as mcpserver's --sessiond does.
func (n *Node) Addr() string { return n.addr }

// Client returns a client of the node, the same one each time. It is closed when the test ends.
func (n *Node) Client() *client.Client { return n.client }
