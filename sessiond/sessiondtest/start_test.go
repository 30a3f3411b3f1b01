package sessiondtest_test

import (
	"context"
	"errors"
	"net"
	"testing"

	"go.uber.org/goleak"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// C1: one line starts a node that serves, with the configuration as set; when the test ends nothing of it is left.
func TestStart(t *testing.T) {
	var addr string
	t.Run("node", func(t *testing.T) {
		node := sessiondtest.Start(t, func(c *sessiond.Config) { c.MaxSessionBytes = 10 })
		addr = node.Addr()
		other := sessiondtest.Start(t)
		if other.Addr() == addr {
			t.Fatalf("both nodes are at %s", addr)
		}
		mine, err := client.New([]string{addr}, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer mine.Close()

		s, err := node.Client().Create(t.Context(), []byte("a"), client.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := mine.Read(t.Context(), s.ID); err != nil || string(got.Data) != "a" {
			t.Errorf("read by an own client: %q, %v", got.Data, err)
		}
		if _, err := other.Client().Read(t.Context(), s.ID); !errors.Is(err, client.ErrSessionNotFound) {
			t.Errorf("read from another node: %v", err)
		}
		if _, err := node.Client().Create(t.Context(), make([]byte, 11), client.CreateOptions{}); !errors.Is(err, client.ErrSessionTooLarge) {
			t.Errorf("create 11 bytes where 10 are allowed: %v", err)
		}
		// What a test registers after Start may still use the node, though the test's context has ended by then.
		t.Cleanup(func() {
			if _, err := node.Client().Destroy(context.WithoutCancel(t.Context()), s.ID); err != nil {
				t.Errorf("destroy in a clean-up: %v", err)
			}
		})
	})
	if conn, err := net.Dial("tcp", addr); err == nil {
		conn.Close()
		t.Errorf("somebody still serves at %s", addr)
	}
	if err := goleak.Find(); err != nil {
		t.Error(err)
	}
}

// C1: a node without etcd and a node on a Unix socket start the same way.
func TestStartElsewhere(t *testing.T) {
	t.Chdir(t.TempDir()) // a socket's path has 107 bytes at most, and a test's folder may need more
	node := sessiondtest.Start(t, func(c *sessiond.Config) {
		c.Store, c.Listen = sessiond.StoreMemory, "unix:sock"
	})
	if err := node.Client().Ready(t.Context()); err != nil {
		t.Error(err)
	}
	mine, err := client.New([]string{node.Addr()}, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer mine.Close()
	if _, err := mine.Create(t.Context(), nil, client.CreateOptions{}); err != nil {
		t.Error(err)
	}
}
