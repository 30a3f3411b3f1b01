package chaos

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// calm knows when faults were at work. A bound on a wait is promised for times without faults, and for the time that it takes to
// get over one, so waits are measured without those times.
type calm struct {
	// recovery is how long after its end a fault may still be felt.
	recovery time.Duration

	mu     sync.Mutex
	faults disturbances
}

// begin notes that a fault begins; the function that it returns notes its end.
func (c *calm) begin(now func() int64) func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := len(c.faults)
	c.faults = append(c.faults, disturbance{now(), never})
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.faults[i].to = now() + int64(c.recovery)
	}
}

// disturbed are the times until now when faults were felt.
func (c *calm) disturbed() disturbances {
	c.mu.Lock()
	all := slices.Clone(c.faults)
	c.mu.Unlock()
	slices.SortFunc(all, func(a, b disturbance) int { return cmp.Compare(a.from, b.from) })
	var merged disturbances
	for _, d := range all {
		if n := len(merged); n > 0 && merged[n-1].to >= d.from {
			merged[n-1].to = max(merged[n-1].to, d.to)
			continue
		}
		merged = append(merged, d)
	}
	return merged
}

// A disturbance is a time when faults were felt.
type disturbance struct{ from, to int64 }

// disturbances are in order, and apart from each other.
type disturbances []disturbance

// calm is how much of a time was without them.
func (ds disturbances) calm(from, to int64) time.Duration {
	left := max(to-from, 0)
	for _, d := range ds {
		if f, t := max(from, d.from), min(to, d.to); t > f {
			left -= t - f
		}
	}
	return time.Duration(left)
}

// after is the moment when so much calm time has passed since from.
func (ds disturbances) after(from int64, d time.Duration) int64 {
	end := from + int64(d)
	for _, f := range ds {
		if f.from >= end || f.to <= from {
			continue
		}
		if f.to == never {
			return never
		}
		end += f.to - max(from, f.from)
	}
	return end
}
