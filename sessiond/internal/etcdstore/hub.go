package etcdstore

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"
)

const (
	// How much may lie ready for a subscriber until it has to read again.
	maxFeedEvents = 256
	maxFeedBytes  = 4 << 20
	reopenAfter   = 100 * time.Millisecond
	// How many watches a node has.
	watches = 3
	// How often a watch is asked for a sign of life, and how long it may keep silent.
	watchAskEvery = 800 * time.Millisecond
	watchSilence  = 2 * time.Second
)

var errWatchSilent = errors.New("watch gives no sign of life")

// hub hands what the node's watches bring to those on this node whom it concerns. Who registers does so before
// reading, so that what happens between the two is not missed. It never waits for anyone.
type hub struct {
	keys     keys
	released func(key string, revision int64)
	// expired and died are told of sessions (escaped) and nodes that have gone. They do not wait for anything.
	expired func(session string)
	died    func()

	mu      sync.Mutex
	waiters map[string]map[*waiter]struct{} // by escaped session id
	feeds   map[string]map[*feed]struct{}
	rooms   map[string]*room
	open    int // watches
}

// waiter is woken when an entry or a session that it depends on has gone.
type waiter struct {
	session string // escaped
	own     string
	record  string // key of the session
	wake    chan struct{}

	// Under the hub's lock. While it is not known where the entry stands, what goes is kept with the revision at which it
	// went.
	standing standing
	known    bool
	gone     map[string]int64
	promised bool // a release is under way that brings its turn
	turn     *turn
}

// standing is where a waiter's entry stands in the queue.
type standing struct {
	before   string    // the entry before it
	revision int64     // as of which this is so
	created  int64     // revision of its own entry
	number   int64     // of its own entry
	counter  int64     // what counted it
	ready    time.Time // until when its lease has enough left for a grant
	term     uint64    // up to which that is known
	read     bool      // the grant is to show the session with its data
}

func newHub(k keys) *hub {
	return &hub{
		keys:    k,
		waiters: map[string]map[*waiter]struct{}{},
		feeds:   map[string]map[*feed]struct{}{},
		rooms:   map[string]*room{},
	}
}

func (h *hub) addWaiter(sessionID, own string) *waiter {
	w := &waiter{
		session: escaper.Replace(sessionID),
		own:     own,
		record:  h.keys.session(sessionID),
		wake:    make(chan struct{}, 1),
		gone:    map[string]int64{},
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	add(h.waiters, w.session, w)
	return w
}

func (h *hub) removeWaiter(w *waiter) {
	h.mu.Lock()
	defer h.mu.Unlock()
	remove(h.waiters, w.session, w)
}

// unset is called before a read that tells which entry is before the waiter's.
func (h *hub) unset(w *waiter) {
	h.mu.Lock()
	defer h.mu.Unlock()
	w.known = false
	w.standing = standing{}
	w.promised, w.turn = false, nil
	if w.gone == nil {
		w.gone = map[string]int64{}
	}
	select {
	case <-w.wake:
	default:
	}
}

// crowded says whether others of this node wait for the lock that a waiter is about to wait for.
func (h *hub) crowded(w *waiter) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for other := range h.waiters[w.session] {
		if other != w && other.known && other.standing.before != "" && other.turn == nil {
			return true
		}
	}
	return false
}

// chain returns an entry, and those of waiters on this node that are behind it one after the other with none between, as far as
// they are known, most at most.
func (h *hub) chain(sessionID string, entry made, most int) []made {
	h.mu.Lock()
	defer h.mu.Unlock()
	entries := []made{entry}
	waiters := h.waiters[escaper.Replace(sessionID)]
	for n := 1; n < most && len(waiters) > 1; n++ {
		for w := range waiters {
			if before := entries[n-1]; w.known && w.standing.before == before.key && w.standing.created > before.created {
				entries = append(entries, made{w.own, w.standing.created, w.standing.number, w.standing.counter})
				break
			}
		}
		if len(entries) == n {
			break
		}
	}
	return entries
}

// set says where the waiter's entry stands.
func (h *hub) set(w *waiter, now standing) {
	h.mu.Lock()
	defer h.mu.Unlock()
	w.known = true
	w.standing = now
	for key, rev := range w.gone {
		if rev > now.revision && w.concerns(key) {
			w.signal()
		}
	}
	w.gone = nil
}

func (w *waiter) concerns(key string) bool {
	return key == w.standing.before || key == w.own || key == w.record
}

func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (h *hub) addFeed(f *feed) {
	h.mu.Lock()
	defer h.mu.Unlock()
	add(h.feeds, f.session, f)
}

func (h *hub) removeFeed(f *feed) {
	h.mu.Lock()
	defer h.mu.Unlock()
	remove(h.feeds, f.session, f)
}

// onDelete takes what was removed anywhere under the prefix.
func (h *hub) onDelete(ev *clientv3.Event) {
	key, revision := string(ev.Kv.Key), ev.Kv.ModRevision
	kind, sessionID, _ := h.keys.kind(key)
	switch kind {
	case 'l':
		h.released(key, revision)
	case 's':
		h.expired(sessionID)
	case 'n':
		h.died()
		return
	case 'm':
		if p, ok := h.keys.part(key); ok {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.changed(sessionID, key, p, -1, revision)
		}
		return
	default:
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.waiters[sessionID] {
		switch {
		case !w.known:
			w.gone[key] = revision
		case w.promised && key == w.standing.before:
			h.remindLocked(w)
		case w.concerns(key):
			w.signal()
		}
	}
	if kind == 's' {
		delete(h.rooms, sessionID)
		for f := range h.feeds[sessionID] {
			f.gone = max(f.gone, revision)
			f.signal()
		}
	}
}

// onMessage takes what was put under the messages.
func (h *hub) onMessage(ev *clientv3.Event) {
	key := string(ev.Kv.Key)
	_, sessionID, _ := h.keys.kind(key)
	p, ok := h.keys.part(key)
	if !ok || !ev.IsCreate() { // others are moved to another lease
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.changed(sessionID, key, p, 1, ev.Kv.CreateRevision)
	if !p.last {
		return
	}
	for f := range h.feeds[sessionID] {
		if slices.Contains(f.escaped, p.stream) {
			f.push(pushed{key: key, part: p, value: ev.Kv.Value, revision: ev.Kv.CreateRevision})
		}
	}
}

// opened is called when a watch has begun.
func (h *hub) opened() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open++
}

// wakeAll has the readers find out what happened before a watch began.
func (h *hub) wakeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, ws := range h.waiters {
		for w := range ws {
			w.signal()
		}
	}
	for _, fs := range h.feeds {
		for f := range fs {
			f.overflow()
		}
	}
}

func (h *hub) closed() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open--
	clear(h.rooms)
}

func (h *hub) watching() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.open == watches
}

// watched is what a watch is for.
type watched struct {
	prefix string
	// opened is called when the watch has begun, before any event.
	opened func(context.Context) error
	handle func(*clientv3.Event)
	// What is handled.
	puts, removals bool
}

// watch keeps one watch open until ctx ends.
func (s *Store) watch(ctx context.Context, watcher Watcher, w watched) {
	for {
		err := s.watchOnce(ctx, watcher, w)
		wait := time.NewTimer(reopenAfter)
		select {
		case <-wait.C:
			s.logger.WarnContext(ctx, "watch broke off, opening it anew", "error", err)
		case <-ctx.Done():
			wait.Stop()
			return
		}
	}
}

func (s *Store) watchOnce(ctx context.Context, watcher Watcher, w watched) error {
	// The client puts watches with the same metadata on one stream; large messages are not to hold up releases.
	ctx = metadata.AppendToOutgoingContext(clientv3.WithRequireLeader(ctx), "sessiond-watch", w.prefix)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	open := false
	defer func() {
		if open {
			s.hub.closed()
		}
	}()
	updates := watcher.Watch(ctx, w.prefix, w.puts, w.removals)
	ask := time.NewTicker(watchAskEvery)
	defer ask.Stop()
	heard := time.Now()
	for {
		select {
		case resp, ok := <-updates:
			if !ok {
				return context.Cause(ctx)
			}
			heard = time.Now()
			if err := resp.Err(); err != nil {
				return err
			}
			if resp.Created && !open {
				if err := w.opened(ctx); err != nil {
					return err
				}
				open = true
				s.hub.opened()
			}
			for _, ev := range resp.Events {
				w.handle(ev)
			}
		case <-ask.C:
			// A member that has died without a word is noticed by gRPC only after some 10 s. One that lives answers this
			// on the watch. An error needs no answer: then nothing is heard.
			if time.Since(heard) > watchSilence {
				return errWatchSilent
			}
			actx, cancel := context.WithTimeout(ctx, watchAskEvery)
			_ = watcher.RequestProgress(actx)
			cancel()
		}
	}
}

func add[T any](m map[string]map[*T]struct{}, key string, v *T) {
	if m[key] == nil {
		m[key] = map[*T]struct{}{}
	}
	m[key][v] = struct{}{}
}

func remove[T any](m map[string]map[*T]struct{}, key string, v *T) {
	delete(m[key], v)
	if len(m[key]) == 0 {
		delete(m, key)
	}
}
