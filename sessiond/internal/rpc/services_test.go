package rpc

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
)

// L4: what a caller adds up to the end of its lock is never later than the end, also if the answer came when that had passed.
func TestGrantEndsNoLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, took := range []time.Duration{0, time.Second, 2 * time.Second, 5 * time.Second} {
			received := time.Now()
			until := received.Add(2 * time.Second)
			time.Sleep(took)
			g := toGrant(lock.Grant{Until: until}, received)
			if end := received.Add(g.GetWaited().AsDuration() + g.GetTtl().AsDuration()); !end.Equal(until) {
				t.Errorf("answered after %v: ends %v, want %v", took, end.Sub(received), until.Sub(received))
			}
			if want := max(2*time.Second-took, 0); g.GetTtl().AsDuration() != want {
				t.Errorf("answered after %v: TTL %v, want %v", took, g.GetTtl().AsDuration(), want)
			}
		}
	})
}
