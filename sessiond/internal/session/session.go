// Package session has the rules of sessions: opaque bytes under an id, with a TTL that slides and a revision.
//
// It declares the Store that it needs. Everything that must hold at one moment (the session exists, nobody else holds
// its lock, its revision is the expected one) is decided by the Store in one atomic step; never by a read before a write.
// The errors that all stores share are here as well: locks and messages live and die with a session.
package session

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"
)

// Limits of the API.
const (
	DefaultTTL      = time.Hour
	MinTTL          = time.Second
	MaxTTL          = 30 * 24 * time.Hour
	DefaultMaxBytes = 1 << 20
	MaxIDLength     = 128
)

// The ways in which an operation on a session fails.
var (
	// ErrNotFound: the session is missing, expired or destroyed; never a store that cannot be reached.
	ErrNotFound = errors.New("session not found")
	// ErrExists: Create with an id in use.
	ErrExists = errors.New("session exists")
	// ErrRevisionMismatch: the session was written since the expected revision.
	ErrRevisionMismatch = errors.New("session was written since the expected revision")
	// ErrLocked: a save without a token while the lock is held.
	ErrLocked = errors.New("session is locked")
	// ErrLockLost: the token is not the holder's.
	ErrLockLost = errors.New("lock is no longer held")
	// ErrUnavailable: the store cannot be reached. Nothing is known of the session; a write may have happened.
	ErrUnavailable = errors.New("store is not reachable")
	// ErrFormat: a stored record that this version cannot read.
	ErrFormat = errors.New("stored record has an unknown format")
	// ErrDraining: this node is shutting down.
	ErrDraining = errors.New("node is shutting down")
)

// TooLargeError says that the data is over the limit.
type TooLargeError struct {
	Limit, Size int
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("session data of %d bytes is over the limit of %d", e.Size, e.Limit)
}

// Session is a stored session.
type Session struct {
	ID       string
	Data     []byte
	Revision uint64
	TTL      time.Duration
	// Remaining is what is left of the TTL, at least.
	Remaining time.Duration
}

// Save is what a save asks for.
type Save struct {
	ID   string
	Data []byte
	// TTL is zero to keep the session's.
	TTL time.Duration
	// Expected is the revision that the session must have, or nil.
	Expected *uint64
	// Token is the fencing token of the caller's grant, or zero.
	Token uint64
	// Request is the request id of that grant, or empty to look it up.
	Request string
	// Release ends the grant as well.
	Release bool
}

// Store keeps sessions. Each method is one atomic step. Its errors are this package's.
type Store interface {
	// CreateSession stores a session that must not exist. It returns its revision and what is left of the TTL.
	CreateSession(ctx context.Context, id string, data []byte, ttl time.Duration) (uint64, time.Duration, error)
	// ReadSession is linearizable. It returns the store's position too.
	ReadSession(ctx context.Context, id string) (Session, uint64, error)
	// SaveSession replaces data and TTL if all that s names holds. It returns the new revision.
	SaveSession(ctx context.Context, s Save) (uint64, error)
	// TouchSession starts the TTL anew if less than two thirds of it are left. It returns what is left.
	TouchSession(ctx context.Context, id string) (time.Duration, error)
	// DestroySession removes the session, its lock, its waiters and its messages. It says whether there was a session.
	DestroySession(ctx context.Context, id string) (bool, error)
}

// Service has the rules of sessions. Its methods may be called concurrently.
type Service struct {
	store    Store
	maxBytes int
}

// NewService makes a Service; maxBytes limits a session's data.
func NewService(store Store, maxBytes int) *Service {
	return &Service{store: store, maxBytes: maxBytes}
}

// Create stores a new session, with an unguessable id if none is given.
func (s *Service) Create(ctx context.Context, id string, data []byte, ttl time.Duration) (Session, error) {
	if err := s.checkSize(data); err != nil {
		return Session{}, err
	}
	if id == "" {
		id = rand.Text()
	}
	revision, remaining, err := s.store.CreateSession(ctx, id, data, ttl)
	if err != nil {
		return Session{}, err
	}
	return Session{ID: id, Revision: revision, TTL: ttl, Remaining: remaining}, nil
}

// Read returns a session as of now and the store's position.
func (s *Service) Read(ctx context.Context, id string) (Session, uint64, error) {
	return s.store.ReadSession(ctx, id)
}

// Save replaces a session's data and starts its TTL anew.
func (s *Service) Save(ctx context.Context, save Save) (uint64, error) {
	if err := s.checkSize(save.Data); err != nil {
		return 0, err
	}
	return s.store.SaveSession(ctx, save)
}

// Touch starts a session's TTL anew, at the cost of a write only when a third of it has passed.
func (s *Service) Touch(ctx context.Context, id string) (time.Duration, error) {
	return s.store.TouchSession(ctx, id)
}

// Destroy removes a session and all that belongs to it. To destroy what is gone is not an error.
func (s *Service) Destroy(ctx context.Context, id string) (bool, error) {
	return s.store.DestroySession(ctx, id)
}

func (s *Service) checkSize(data []byte) error {
	if len(data) > s.maxBytes {
		return &TooLargeError{Limit: s.maxBytes, Size: len(data)}
	}
	return nil
}
