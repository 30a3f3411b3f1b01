package memstore

import (
	"context"
	"slices"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
)

// entry is a place in a lock's queue. It has a deadline from when it holds the lock on: whoever waits does so in this
// process, and leaves.
type entry struct {
	rec             *record
	request, holder string
	frontEnd        string // or empty
	token           uint64
	ttl             time.Duration
	by              *place // the call that answers for the entry: the last one of its request
	end             deadline
}

func (r *record) find(request string) *entry {
	for _, e := range r.queue {
		if e.request == request {
			return e
		}
	}
	return nil
}

// holds says whether a grant is the one that has the lock. An empty request stands for any.
func (r *record) holds(request string, token uint64) bool {
	return len(r.queue) > 0 && r.queue[0].token == token && (request == "" || r.queue[0].request == request)
}

// removeEntry takes an entry out of the queue, and wakes the one behind it and those who wait for the entry itself. One
// that comes to hold the lock has its whole TTL from now on.
func (s *Store) removeEntry(r *record, e *entry, now time.Time) {
	s.next()
	i := slices.Index(r.queue, e)
	r.queue = slices.Delete(r.queue, i, i+1)
	s.forget(e)
	if i == 0 && len(r.queue) > 0 {
		s.start(r.queue[0], now)
	}
	behind := ""
	if i < len(r.queue) {
		behind = r.queue[i].request
	}
	for p := range s.places[r.id] {
		if p.r.ID == e.request || p.r.ID == behind {
			signal(p.wake)
		}
	}
}

// forget lets go of an entry that has been taken out of its queue.
func (s *Store) forget(e *entry) {
	s.unschedule(&e.end)
	if e.frontEnd != "" {
		drop(s.entries, e.frontEnd, e)
	}
}

// start begins the TTL of an entry that holds the lock.
func (s *Store) start(e *entry, now time.Time) { s.scheduleAt(&e.end, now.Add(e.ttl)) }

// look shows a queue to a caller, of whom own is the entry.
func (s *Store) look(r lock.Request, rec *record, own *entry, now time.Time) lock.View {
	v := lock.View{Exists: rec != nil, Position: s.revision}
	if rec == nil {
		return v
	}
	v.Waiting = max(len(rec.queue)-1, 0)
	if len(rec.queue) > 0 {
		v.First = rec.queue[0].view()
	}
	if own != nil {
		v.Own = own.view()
		v.Until = own.end.at
	}
	if r.Read {
		v.Session = new(rec.view(now))
	}
	return v
}

func (e *entry) view() *lock.Entry {
	return &lock.Entry{Request: e.request, Holder: e.holder, Token: e.token}
}

// Look implements lock.Store.
func (s *Store) Look(ctx context.Context, r lock.Request) (lock.View, error) {
	if ctx.Err() != nil {
		return lock.View{}, context.Cause(ctx)
	}
	now := s.begin()
	defer s.finish()
	r.Read = false
	rec := s.sessions[r.Session]
	if rec == nil {
		return s.look(r, nil, nil, now), nil
	}
	return s.look(r, rec, rec.find(r.ID), now), nil
}

// Release implements lock.Store.
func (s *Store) Release(ctx context.Context, sessionID, request string, token uint64) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	now := s.begin()
	defer s.finish()
	rec := s.sessions[sessionID]
	if rec == nil || !rec.holds(request, token) {
		return lock.ErrNotHeld
	}
	s.removeEntry(rec, rec.queue[0], now)
	return nil
}

// place implements lock.Place. Its entry is under the store's lock.
type place struct {
	s     *Store
	r     lock.Request
	wake  chan struct{}
	rec   *record // the session joined
	entry *entry  // nil: none yet
}

// Place implements lock.Store.
func (s *Store) Place(r lock.Request) lock.Place {
	p := &place{s: s, r: r, wake: make(chan struct{}, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	add(s.places, r.Session, p)
	return p
}

// Close implements lock.Place.
func (p *place) Close() {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	drop(p.s.places, p.r.Session, p)
}

// Wake implements lock.Place.
func (p *place) Wake() <-chan struct{} { return p.wake }

// CheckAfter implements lock.Place. An entry that waits does not end by itself.
func (p *place) CheckAfter() time.Duration { return lock.MaxTimeout }

// Join implements lock.Place.
func (p *place) Join(ctx context.Context, ifFree bool) (lock.View, error) {
	if ctx.Err() != nil {
		return lock.View{}, context.Cause(ctx)
	}
	s := p.s
	now := s.begin()
	defer s.finish()
	rec := s.sessions[p.r.Session]
	if rec == nil {
		return s.look(p.r, nil, nil, now), nil
	}
	own := rec.find(p.r.ID)
	switch {
	case own != nil:
		own.by = p
	case ifFree && len(rec.queue) > 0:
		p.r.Read = false
		return s.look(p.r, rec, nil, now), nil
	default:
		own = &entry{rec: rec, request: p.r.ID, holder: p.r.Holder, frontEnd: p.r.FrontEnd, token: s.next(), ttl: p.r.TTL, by: p}
		own.end = deadline{index: unscheduled, expire: func() { s.removeEntry(rec, own, own.end.at) }}
		rec.queue = append(rec.queue, own)
		if own.frontEnd != "" {
			add(s.entries, own.frontEnd, own)
		}
		if len(rec.queue) == 1 {
			s.start(own, now)
		}
	}
	p.rec, p.entry = rec, own
	return s.look(p.r, rec, own, now), nil
}

// Check implements lock.Place.
func (p *place) Check(ctx context.Context) (lock.View, error) {
	if ctx.Err() != nil {
		return lock.View{}, context.Cause(ctx)
	}
	s := p.s
	now := s.begin()
	defer s.finish()
	rec := s.sessions[p.r.Session]
	if rec != p.rec {
		rec = nil // a later session of the same id
	}
	if rec == nil {
		return s.look(p.r, nil, nil, now), nil
	}
	own := p.entry
	if !slices.Contains(rec.queue, own) {
		own = nil
	}
	return s.look(p.r, rec, own, now), nil
}

// Leave implements lock.Place.
func (p *place) Leave(context.Context) {
	s := p.s
	now := s.begin()
	defer s.finish()
	if rec := s.sessions[p.r.Session]; rec != nil && rec == p.rec && p.entry.by == p && slices.Contains(rec.queue, p.entry) {
		s.removeEntry(rec, p.entry, now)
	}
	p.rec, p.entry = nil, nil
}
