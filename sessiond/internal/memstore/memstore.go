// Package memstore keeps sessions, locks and messages in memory: the contract of the packages session, lock and message
// in its plainest form. It is the model that other stores are compared with, and a store for those who need none: what
// it holds ends with the process.
//
// Everything happens under one lock, at one moment, and takes the next revision, as it would in etcd. What is due to end
// stands in one heap: every operation first removes what has ended by then, and one goroutine with one timer does when
// nobody comes. So ends are exact, an idle session costs neither a goroutine nor a timer, and in a testing/synctest bubble
// hours pass at once.
//
//	s := memstore.Open()
//	defer s.Close(ctx)
//
// Against etcd there is one difference, which the contract allows: TTLs are neither rounded up nor late, and what belongs to a
// session goes with it in the same moment.
package memstore

import (
	"bytes"
	"container/heap"
	"context"
	"sync"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// Store implements session.Store, lock.Store, lock.FrontEndStore and message.Store. Its methods may be called concurrently. What it returns is
// shared and must not be changed.
type Store struct {
	up, down chan struct{} // closed, never closed
	rewind   chan struct{} // tells the scheduler that something ends earlier than it knows
	stop     chan struct{}
	wg       sync.WaitGroup

	mu       sync.Mutex
	revision uint64
	sessions map[string]*record
	ends     deadlines
	// Those who wait for something of a session, whether it exists or not.
	places map[string]map[*place]struct{}
	feeds  map[string]map[*feed]struct{}
	// Front-ends that are attached, and the entries of all that named one.
	attached map[string]*attachment
	entries  map[string]map[*entry]struct{}
}

var (
	_ session.Store = (*Store)(nil)
	_ lock.Store    = (*Store)(nil)
	_ message.Store = (*Store)(nil)
)

// record is a session with all that belongs to it.
type record struct {
	id            string
	data          []byte
	ttl           time.Duration
	born, written uint64 // revisions
	end           deadline
	queue         []*entry  // in order of token; the first holds the lock
	messages      []*stored // in order of position
	size          int       // of the messages' payloads
}

// Open makes an empty Store. It must be closed.
func Open() *Store {
	s := &Store{
		up:       make(chan struct{}),
		down:     make(chan struct{}),
		rewind:   make(chan struct{}, 1),
		stop:     make(chan struct{}),
		sessions: map[string]*record{},
		places:   map[string]map[*place]struct{}{},
		feeds:    map[string]map[*feed]struct{}{},
		attached: map[string]*attachment{},
		entries:  map[string]map[*entry]struct{}{},
	}
	close(s.up)
	s.wg.Go(s.schedule)
	return s
}

// Close stops the Store and forgets everything. Nothing may use it any more.
func (s *Store) Close(context.Context) {
	close(s.stop)
	s.wg.Wait()
}

// Up is closed: what is in memory can be reached.
func (s *Store) Up() <-chan struct{} { return s.up }

// Down is never closed.
func (s *Store) Down() <-chan struct{} { return s.down }

// begin starts an operation, which sees nothing that has ended. It must be followed by end.
func (s *Store) begin() time.Time {
	s.mu.Lock()
	now := time.Now()
	s.expire(now)
	return now
}

// finish ends an operation.
func (s *Store) finish() { s.mu.Unlock() }

// next is the revision of a write.
func (s *Store) next() uint64 {
	s.revision++
	return s.revision
}

// CreateSession implements session.Store.
func (s *Store) CreateSession(ctx context.Context, id string, data []byte, ttl time.Duration) (uint64, time.Duration, error) {
	if ctx.Err() != nil {
		return 0, 0, context.Cause(ctx)
	}
	now := s.begin()
	defer s.finish()
	if s.sessions[id] != nil {
		return 0, 0, session.ErrExists
	}
	r := &record{id: id, data: bytes.Clone(data), ttl: ttl, born: s.next(), written: s.revision}
	r.end = deadline{at: now.Add(ttl), index: unscheduled, expire: func() { s.remove(r) }}
	s.sessions[id] = r
	s.scheduleAt(&r.end, r.end.at)
	return r.born, ttl, nil
}

// ReadSession implements session.Store.
func (s *Store) ReadSession(ctx context.Context, id string) (session.Session, uint64, error) {
	if ctx.Err() != nil {
		return session.Session{}, 0, context.Cause(ctx)
	}
	now := s.begin()
	defer s.finish()
	r := s.sessions[id]
	if r == nil {
		return session.Session{}, 0, session.ErrNotFound
	}
	return r.view(now), s.revision, nil
}

func (r *record) view(now time.Time) session.Session {
	return session.Session{ID: r.id, Data: r.data, Revision: r.written, TTL: r.ttl, Remaining: r.end.at.Sub(now)}
}

// SaveSession implements session.Store.
func (s *Store) SaveSession(ctx context.Context, save session.Save) (uint64, error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	now := s.begin()
	defer s.finish()
	r := s.sessions[save.ID]
	switch {
	case r == nil:
		return 0, session.ErrNotFound
	case save.Token != 0 && !r.holds(save.Request, save.Token):
		return 0, session.ErrLockLost
	case save.Token == 0 && len(r.queue) > 0:
		return 0, session.ErrLocked
	case save.Expected != nil && *save.Expected != r.written:
		return 0, session.ErrRevisionMismatch
	}
	r.data = bytes.Clone(save.Data)
	if save.TTL != 0 {
		r.ttl = save.TTL
	}
	r.written = s.next()
	s.scheduleAt(&r.end, now.Add(r.ttl))
	if save.Release {
		s.removeEntry(r, r.queue[0], now)
	}
	return r.written, nil
}

// TouchSession implements session.Store.
func (s *Store) TouchSession(ctx context.Context, id string) (time.Duration, error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	now := s.begin()
	defer s.finish()
	r := s.sessions[id]
	if r == nil {
		return 0, session.ErrNotFound
	}
	if r.end.at.Sub(now) < r.ttl-r.ttl/3 {
		r.written = s.next()
		s.scheduleAt(&r.end, now.Add(r.ttl))
	}
	return r.end.at.Sub(now), nil
}

// DestroySession implements session.Store.
func (s *Store) DestroySession(ctx context.Context, id string) (bool, error) {
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	s.begin()
	defer s.finish()
	r := s.sessions[id]
	if r == nil {
		return false, nil
	}
	s.remove(r)
	return true, nil
}

// remove ends a session with all that belongs to it, and tells those who wait.
func (s *Store) remove(r *record) {
	s.next()
	delete(s.sessions, r.id)
	s.unschedule(&r.end)
	for _, e := range r.queue {
		s.forget(e)
	}
	for _, m := range r.messages {
		s.unschedule(&m.end)
	}
	for p := range s.places[r.id] {
		signal(p.wake)
	}
	for f := range s.feeds[r.id] {
		signal(f.ready)
	}
}

func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func add[T any](m map[string]map[*T]struct{}, key string, v *T) {
	if m[key] == nil {
		m[key] = map[*T]struct{}{}
	}
	m[key][v] = struct{}{}
}

func drop[T any](m map[string]map[*T]struct{}, key string, v *T) {
	delete(m[key], v)
	if len(m[key]) == 0 {
		delete(m, key)
	}
}

// deadline is when something ends, and what then happens.
type deadline struct {
	at     time.Time
	index  int // in the heap
	expire func()
}

const unscheduled = -1

// deadlines is a heap of what is due to end, the earliest first.
type deadlines []*deadline

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, j int) bool { return d[i].at.Before(d[j].at) }
func (d deadlines) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].index, d[j].index = i, j
}

// Push implements heap.Interface.
func (d *deadlines) Push(x any) {
	e := x.(*deadline) //nolint:errcheck // heap.Interface is from before generics; only scheduleAt pushes
	e.index = len(*d)
	*d = append(*d, e)
}

// Pop implements heap.Interface.
func (d *deadlines) Pop() any {
	last := len(*d) - 1
	e := (*d)[last]
	(*d)[last] = nil
	*d = (*d)[:last]
	e.index = unscheduled
	return e
}

// scheduleAt sets or moves a deadline.
func (s *Store) scheduleAt(d *deadline, at time.Time) {
	d.at = at
	if d.index == unscheduled {
		heap.Push(&s.ends, d)
	} else {
		heap.Fix(&s.ends, d.index)
	}
	if d.index == 0 {
		signal(s.rewind)
	}
}

func (s *Store) unschedule(d *deadline) {
	if d.index != unscheduled {
		heap.Remove(&s.ends, d.index)
	}
}

// expire ends what is due.
func (s *Store) expire(now time.Time) {
	for len(s.ends) > 0 && !now.Before(s.ends[0].at) {
		d := s.ends[0]
		heap.Pop(&s.ends)
		d.expire()
	}
}

// schedule ends what is due while no operation does, until the store is closed.
func (s *Store) schedule() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		s.begin()
		if len(s.ends) > 0 {
			timer.Reset(time.Until(s.ends[0].at))
		} else {
			timer.Stop()
		}
		s.finish()
		select {
		case <-timer.C:
		case <-s.rewind:
		case <-s.stop:
			return
		}
	}
}
