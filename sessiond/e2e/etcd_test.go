//go:build unix

package e2e

import (
	"context"
	"fmt"
	"testing"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// The harness itself: a cluster of etcd gets a new leader when its own is killed, and the killed one comes back.
func TestEtcdFailsOver(t *testing.T) {
	etcd := sessiondtest.StartEtcd(t, 3)
	old, err := etcd.Leader(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := etcd.Members[old].Kill(); err != nil {
		t.Fatal(err)
	}
	if err := sessiondtest.Poll(within(t, patience), func(ctx context.Context) error {
		leader, err := etcd.Leader(ctx)
		if err == nil && leader == old {
			err = fmt.Errorf("member %d leads and is dead", old)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := etcd.Members[old].Restart(within(t, patience)); err != nil {
		t.Fatal(err)
	}
}
