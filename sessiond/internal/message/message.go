// Package message has the rules of messages: what one front-end hands to another, outside the session's data.
//
// A subscription first reads what is stored and then takes what the store pushes. It asks for the push before it reads,
// so that nothing falls between the two, and drops what it has already by position. Whenever the push has a gap (a full
// buffer, a broken watch) it reads again from its position.
package message

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// Limits of the API.
const (
	DefaultTTL = 5 * time.Minute
	MinTTL     = time.Second
	MaxTTL     = 24 * time.Hour
	// MaxBytes limits one message.
	MaxBytes = 4 << 20
	// MaxStored and MaxStoredBytes limit what a session stores. Publishers at the same moment can exceed them by a message each: a
	// node may count what others publish when it hears of it, until three quarters are taken.
	MaxStored      = 1000
	MaxStoredBytes = 16 << 20
	MaxStreams     = 16
	MaxNameLength  = 128
)

// TooLargeError says that a message is over the limit.
type TooLargeError struct {
	Limit, Size int
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("message of %d bytes is over the limit of %d", e.Size, e.Limit)
}

// TooManyError says that a session stores too many messages, or too many bytes of them.
type TooManyError struct {
	// Limit is in bytes if Bytes is set, else in messages.
	Limit int
	Bytes bool
}

func (e *TooManyError) Error() string {
	if e.Bytes {
		return fmt.Sprintf("session stores more than %d bytes of messages", e.Limit)
	}
	return fmt.Sprintf("session stores %d messages, the limit", e.Limit)
}

// Message is a published message.
type Message struct {
	Stream   string
	Position uint64
	Payload  []byte
}

// Publish is what a publish asks for.
type Publish struct {
	Session, Stream string
	Payload         []byte
	TTL             time.Duration
	// LowPriority leaves half of the session's room to others.
	LowPriority bool
	// Request names the request.
	Request string
}

// Room is how many messages, and bytes of them, a session may store with this one.
func (p Publish) Room() (messages, bytes int) {
	if p.LowPriority {
		return MaxStored / 2, MaxStoredBytes / 2
	}
	return MaxStored, MaxStoredBytes
}

// Batch is the next part of what a subscription delivers.
type Batch struct {
	Messages []Message
	// Position is the one up to which everything has been delivered.
	Position uint64
}

// Store keeps messages.
type Store interface {
	// Publish appends a message, or returns the position of the one of the same request.
	Publish(ctx context.Context, p Publish) (uint64, error)
	// Trim removes a stream's messages up to a position, but for the newest of these. It returns how many.
	Trim(ctx context.Context, sessionID, stream string, through uint64, keep int) (int, error)
	// Retain gives what a stream stores another TTL, from now on.
	Retain(ctx context.Context, sessionID, stream string, ttl time.Duration) error
	// Feed asks for what is published on streams of a session from now on. It must be closed.
	Feed(sessionID string, streams []string) Feed
	// Down is closed while the store cannot be reached.
	Down() <-chan struct{}
}

// ErrGap says that a feed cannot tell all that was published since it was last asked: read what is stored again.
var ErrGap = errors.New("feed has a gap")

// Feed is one subscriber's view of the streams. It is used by one goroutine.
type Feed interface {
	// Stored gives yield what is stored after a position, in order, in parts. It gives at least one part, maybe an empty one, whose
	// position is the one up to which all is read.
	Stored(ctx context.Context, after uint64, yield func(Batch) error) error
	// Ready receives when Next has something to say.
	Ready() <-chan struct{}
	// Next returns what has been pushed after a position, in order; an empty batch if nothing. ErrGap: read Stored again.
	// session.ErrNotFound: the session has gone.
	Next(ctx context.Context, after uint64) (Batch, error)
	// Close ends the feed.
	Close()
}

// Service has the rules of messages. Its methods may be called concurrently.
type Service struct {
	store Store
	drain <-chan struct{}
}

// NewService makes a Service. When drain is closed, subscribers are told.
func NewService(store Store, drain <-chan struct{}) *Service {
	return &Service{store: store, drain: drain}
}

// Publish appends a message to a stream of a session.
func (s *Service) Publish(ctx context.Context, p Publish) (uint64, error) {
	if len(p.Payload) > MaxBytes {
		return 0, &TooLargeError{Limit: MaxBytes, Size: len(p.Payload)}
	}
	if p.Request == "" {
		p.Request = rand.Text()
	}
	return s.store.Publish(ctx, p)
}

// Trim removes the stored messages of a stream up to a position, but for the newest of these.
func (s *Service) Trim(ctx context.Context, sessionID, stream string, through uint64, keep int) (int, error) {
	return s.store.Trim(ctx, sessionID, stream, through, keep)
}

// Retain gives what a stream stores another TTL, from now on.
func (s *Service) Retain(ctx context.Context, sessionID, stream string, ttl time.Duration) error {
	return s.store.Retain(ctx, sessionID, stream, ttl)
}

// Subscribe gives deliver every message of the streams after a position, once and in order, until ctx or the session
// ends or deliver fails. The first call of deliver comes at once.
func (s *Service) Subscribe(ctx context.Context, sessionID string, streams []string, after uint64, deliver func(Batch) error) error {
	feed := s.store.Feed(sessionID, streams)
	defer feed.Close()

	for gap := true; ; {
		if gap {
			err := feed.Stored(ctx, after, func(b Batch) error {
				after = max(after, b.Position)
				b.Position = after
				return deliver(b)
			})
			if err != nil {
				return err
			}
			gap = false
		}
		select {
		case <-feed.Ready():
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.drain:
			return session.ErrDraining
		case <-s.store.Down():
			return session.ErrUnavailable
		}
		batch, err := feed.Next(ctx, after)
		switch {
		case errors.Is(err, ErrGap):
			gap = true
		case err != nil:
			return err
		case len(batch.Messages) > 0:
			after = batch.Position
			if err := deliver(batch); err != nil {
				return err
			}
		}
	}
}
