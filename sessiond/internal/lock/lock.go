// Package lock has the rules of locks: one lock per session, first come first served across all nodes.
//
// An acquire puts one entry into its session's queue; the oldest entry is the holder, and the revision at which it was
// made is its fencing token. Entries are never replaced, so "the entry still exists with that revision" is all that a
// save, a release or a retry has to compare, and to remove the holder's entry is to hand the lock to the next one.
//
// A retry of an acquire finds the entry of its request id and takes it over, from then on the entry is its own: an older
// call for the same request that gives up later leaves it alone, and so can end neither its place nor its grant.
//
// A request may name its front-end. FrontEnds then has the rules by which what a front-end acquired goes with it.
package lock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// Limits of the API.
const (
	DefaultTTL        = 300 * time.Second
	MinTTL            = time.Second
	MaxTTL            = time.Hour
	DefaultTimeout    = 30 * time.Second
	MaxTimeout        = time.Hour
	DefaultMaxWaiters = 1000
	MaxNameLength     = 128
)

// The ways in which an operation on a lock fails.
var (
	// ErrTimeout: the lock was not had in time.
	ErrTimeout = errors.New("lock was not had within the timeout")
	// ErrNotHeld: a release by anyone but the holder.
	ErrNotHeld = errors.New("lock is not held by this grant")
)

// AlreadyHeldError says that the holder holds the lock already, by another request.
type AlreadyHeldError struct {
	Token uint64
}

func (e *AlreadyHeldError) Error() string { return "holder holds this lock already" }

// TooManyWaitersError says that the queue is full.
type TooManyWaitersError struct {
	Limit int
}

func (e *TooManyWaitersError) Error() string {
	return fmt.Sprintf("more than %d callers wait for this lock", e.Limit)
}

// Request asks for a lock.
type Request struct {
	Session string
	// ID names the request.
	ID string
	// Holder is who asks.
	Holder string
	// FrontEnd is the front-end that asks, with which the lock goes if it is attached. Empty: none.
	FrontEnd string
	TTL      time.Duration
	// Timeout is how long to wait. Zero: not at all.
	Timeout time.Duration
	// Read asks for the session along with the grant.
	Read bool
}

// Grant is a lock held.
type Grant struct {
	Session, Request string
	Token            uint64
	// Until is when the TTL ends, at the earliest.
	Until time.Time
	// Data is the session under the lock, if it was asked for.
	Data *session.Session
	// Position is the store's as of the grant.
	Position uint64
}

// Entry is a place in a lock's queue.
type Entry struct {
	Request, Holder string
	// Token is the revision at which the entry was made.
	Token uint64
}

// View is a queue as one caller sees it at one moment.
type View struct {
	// Exists says whether the session does.
	Exists bool
	// Own is the caller's entry, First the holder's; nil if there is none.
	Own, First *Entry
	// Waiting is the number of entries behind the holder's. That of a Join may count some that have gone.
	Waiting int
	// Until is when the TTL of Own ends, at the earliest.
	Until time.Time
	// Session is set if it was asked for.
	Session *session.Session
	// Position is the store's at this moment.
	Position uint64
}

// Held says whether the caller holds the lock.
func (v *View) Held() bool {
	return v.Own != nil && v.First != nil && v.Own.Token == v.First.Token
}

// Store keeps the queues. Each method that talks to the store is one atomic step.
type Store interface {
	// Look shows a queue to the request's caller. It writes nothing.
	Look(ctx context.Context, r Request) (View, error)
	// Place makes the caller's handle on its place in the queue, without taking one yet. The handle must be closed.
	Place(r Request) Place
	// Release removes the holder's entry if its token is the one given; ErrNotHeld if it is not. An empty request is looked up.
	Release(ctx context.Context, sessionID, request string, token uint64) error
	// Down is closed while the store cannot be reached.
	Down() <-chan struct{}
}

// Place is a caller's place in a queue. It is used by one goroutine.
type Place interface {
	// Join puts the caller's entry at the end of the queue, or takes over the one of the same request, if the session
	// exists. With ifFree it does so only if the queue is empty.
	Join(ctx context.Context, ifFree bool) (View, error)
	// Check starts the TTL of the waiting entry anew, if a grant would not have the whole of it, then shows the queue. It writes nothing and is never called again
	// once it has shown that the lock is held. A view with Own nil says that the entry is gone. Who holds the lock, if not
	// the caller, and how many wait it need not show.
	Check(ctx context.Context) (View, error)
	// CheckAfter is how long the entry may wait until the next Check, lest its TTL ends.
	CheckAfter() time.Duration
	// Wake receives when the entry before the caller's, the caller's own or the session has gone.
	Wake() <-chan struct{}
	// Leave removes the entry, unless a retry has taken it over. It waits a moment at most; what then remains undone is
	// done in the background.
	Leave(ctx context.Context)
	// Close ends the handle and leaves the entry as it is.
	Close()
}

// Service has the rules of locks. Its methods may be called concurrently.
type Service struct {
	store      Store
	maxWaiters int
	drain      <-chan struct{}

	mu      sync.Mutex
	waiting map[string]int // callers on this node, by session
}

// NewService makes a Service. At most maxWaiters wait for one lock; when drain is closed, those who wait are told.
func NewService(store Store, maxWaiters int, drain <-chan struct{}) *Service {
	return &Service{store: store, maxWaiters: maxWaiters, drain: drain, waiting: map[string]int{}}
}

// enter counts a caller in, unless this node alone has as many for the lock as may wait: those are refused without a
// write. It returns what counts the caller out.
func (s *Service) enter(sessionID string) (func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting[sessionID] > s.maxWaiters {
		return nil, &TooManyWaitersError{Limit: s.maxWaiters}
	}
	s.waiting[sessionID]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.waiting[sessionID]--; s.waiting[sessionID] == 0 {
			delete(s.waiting, sessionID)
		}
	}, nil
}

// Acquire waits until the caller holds the lock or the timeout passes.
func (s *Service) Acquire(ctx context.Context, r Request) (Grant, error) {
	r = r.withDefaults()
	if r.Timeout == 0 {
		grant, holder, err := s.TryAcquire(ctx, r)
		if err == nil && holder != "" {
			err = ErrTimeout
		}
		return grant, err
	}
	leave, err := s.enter(r.Session)
	if err != nil {
		return Grant{}, err
	}
	defer leave()
	timeout := time.NewTimer(r.Timeout)
	defer timeout.Stop()

	place := s.store.Place(r)
	defer place.Close()
	view, err := place.Join(ctx, false)
	joined := true
	for {
		if err != nil {
			// The entry may have been made although the answer was lost.
			place.Leave(ctx)
			return Grant{}, err
		}
		switch {
		case !view.Exists:
			if view.Own != nil {
				place.Leave(ctx)
			}
			return Grant{}, session.ErrNotFound
		case view.Own == nil:
			// The lease of the waiting entry ran out, or somebody removed the entry: a new one, at the end.
			view, err = place.Join(ctx, false)
			joined = true
			continue
		case view.Held():
			return s.grant(ctx, r, place, view)
		case joined && view.First.Holder == r.Holder:
			place.Leave(ctx)
			return Grant{}, &AlreadyHeldError{Token: view.First.Token}
		case joined && view.Waiting > s.maxWaiters && s.full(ctx, r):
			place.Leave(ctx)
			return Grant{}, &TooManyWaitersError{Limit: s.maxWaiters}
		}
		joined = false

		check := time.NewTimer(place.CheckAfter())
		select {
		case <-place.Wake():
			view, err = place.Check(ctx)
		case <-check.C:
			view, err = place.Check(ctx)
		case <-timeout.C:
			err = ErrTimeout
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-s.drain:
			err = session.ErrDraining
		case <-s.store.Down():
			err = session.ErrUnavailable
		}
		check.Stop()
	}
}

// full says whether more wait for a lock than may. A store that does not answer leaves it at the caller's waiting.
func (s *Service) full(ctx context.Context, r Request) bool {
	view, err := s.store.Look(ctx, r)
	return err == nil && view.Waiting > s.maxWaiters
}

// TryAcquire takes the lock if nobody holds it or waits for it. If somebody does, it returns the holder.
func (s *Service) TryAcquire(ctx context.Context, r Request) (Grant, string, error) {
	r = r.withDefaults()
	view, err := s.store.Look(ctx, r)
	switch {
	case err != nil:
		return Grant{}, "", err
	case !view.Exists:
		return Grant{}, "", session.ErrNotFound
	case view.First != nil && !view.Held():
		return Grant{}, view.First.Holder, refused(r, view)
	}

	place := s.store.Place(r)
	defer place.Close()
	view, err = place.Join(ctx, true)
	switch {
	case err != nil:
		place.Leave(ctx)
		return Grant{}, "", err
	case !view.Exists:
		return Grant{}, "", session.ErrNotFound
	case view.Held():
		grant, err := s.grant(ctx, r, place, view)
		return grant, "", err
	case view.First == nil:
		// It was free, then taken, and is free again: all between two looks.
		return Grant{}, "", session.ErrUnavailable
	}
	return Grant{}, view.First.Holder, refused(r, view)
}

func refused(r Request, view View) error {
	if view.First.Holder == r.Holder && view.First.Request != r.ID {
		return &AlreadyHeldError{Token: view.First.Token}
	}
	return nil
}

// Release ends a grant.
func (s *Service) Release(ctx context.Context, sessionID, request string, token uint64) error {
	return s.store.Release(ctx, sessionID, request, token)
}

// grant turns a view that holds the lock into a grant, unless there is nobody left to take it.
func (s *Service) grant(ctx context.Context, r Request, place Place, view View) (Grant, error) {
	if ctx.Err() != nil {
		place.Leave(ctx)
		return Grant{}, context.Cause(ctx)
	}
	return Grant{
		Session:  r.Session,
		Request:  r.ID,
		Token:    view.Own.Token,
		Until:    view.Until,
		Data:     view.Session,
		Position: view.Position,
	}, nil
}

func (r Request) withDefaults() Request {
	if r.ID == "" {
		r.ID = rand.Text()
	}
	if r.Holder == "" {
		r.Holder = r.ID
	}
	return r
}
