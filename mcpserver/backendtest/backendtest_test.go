package backendtest_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/sessiond/sessiond/mcpserver/backendtest"
	"github.com/sessiond/sessiond/sessiond"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// F21: sessiond keeps the contract, on etcd and in memory.
func TestF21Sessiond(t *testing.T) {
	for name, change := range map[string]func(*sessiond.Config){
		"etcd":   func(*sessiond.Config) {},
		"memory": func(c *sessiond.Config) { c.Store, c.DataDir = sessiond.StoreMemory, "" },
	} {
		t.Run(name, func(t *testing.T) {
			sessions := sessiondtest.Start(t, change).Client()
			backendtest.Run(t, func(*testing.T) backendtest.Backend {
				return backendtest.Backend{Store: sessions, Locker: sessions, Messages: sessions}
			})
		})
	}
}
