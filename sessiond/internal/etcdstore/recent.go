package etcdstore

import "sync"

// recent remembers something about the keys that it was told about last, at least half of most and at most so many.
type recent[V any] struct {
	most int

	mu         sync.Mutex
	young, old map[string]V
}

func newRecent[V any](most int) *recent[V] {
	return &recent[V]{most: most, young: map[string]V{}}
}

// of returns what is known of a key: the zero value if nothing is.
func (r *recent[V]) of(key string) V {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ofLocked(key)
}

func (r *recent[V]) ofLocked(key string) V {
	if v, ok := r.young[key]; ok {
		return v
	}
	return r.old[key]
}

// set changes what is known of a key.
func (r *recent[V]) set(key string, change func(*V)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.ofLocked(key)
	change(&v)
	if _, ok := r.young[key]; !ok && len(r.young) >= r.most/2 {
		r.young, r.old = map[string]V{}, r.young
	}
	r.young[key] = v
}
