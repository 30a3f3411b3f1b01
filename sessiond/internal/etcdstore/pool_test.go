package etcdstore

import (
	"testing"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
)

// Idle leases are as many as callers come and go, and no more than can be kept alive at little cost.
func TestMaxIdle(t *testing.T) {
	for ttl, want := range map[time.Duration]int{lock.MinTTL: 64, 30 * time.Second: 103, lock.DefaultTTL: 1024, lock.MaxTTL: 1024} {
		if got := maxIdle(lockLeaseTTL(ttl)); got != want {
			t.Errorf("locks of %v: %d, want %d", ttl, got, want)
		}
	}
}
