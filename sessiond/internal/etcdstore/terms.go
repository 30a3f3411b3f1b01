package etcdstore

import (
	"sync"
	"sync/atomic"
	"time"
)

// terms has the latest term of raft that etcd's answers have told: in each at most one member leads.
type terms struct {
	term atomic.Uint64

	mu    sync.Mutex
	began time.Time
}

// see takes the term of an answer.
func (t *terms) see(term uint64) {
	if term <= t.term.Load() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch was := t.term.Load(); {
	case term <= was:
		return
	case was > 0:
		t.began = time.Now()
	}
	t.term.Store(term)
}

// now is the latest term, or an earlier one if a later one has not been heard of yet.
func (t *terms) now() uint64 { return t.term.Load() }

// since is when the latest term was first heard of; it is the zero time if there has been no other.
func (t *terms) since() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.began
}
