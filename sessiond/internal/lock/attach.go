package lock

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// Limits and times of attachments.
const (
	DefaultAttachGrace = 2 * time.Second
	MinAttachGrace     = 100 * time.Millisecond
	MaxAttachGrace     = time.Minute
	MaxClaims          = 10_000
	MaxAbandoned       = 1000
	// PingEvery is how often an attached front-end is given a sign of life, and RarePingEvery how often when its node has very
	// many connections.
	PingEvery     = time.Second
	RarePingEvery = 5 * time.Second
	// A front-end that has heard nothing for so many of them should attach elsewhere.
	missedPings = 3
	// detachRetry is how soon a detach that failed is tried again.
	detachRetry = 500 * time.Millisecond
)

// Lateness is how much later than others a front-end finds out that its node has fallen silent, or is found out to have fallen
// silent itself, because signs of life come as rarely as that.
func Lateness(every time.Duration) time.Duration { return missedPings * max(every-PingEvery, 0) }

// ErrReplaced says that a front-end has attached anew, here or on another node.
var ErrReplaced = errors.New("front-end has attached anew")

// Claim names a request that a front-end stands by, or has given up.
type Claim struct {
	Session, Request string
}

// FrontEndStore knows where front-ends are attached.
type FrontEndStore interface {
	// Attach notes that a front-end is attached to this node, instead of where it was, unless a later attach (a greater
	// number) is known: ErrReplaced. It is given a sign of life so often; if the node dies, it may take that much longer to
	// attach elsewhere (Lateness). With any other error there is an Attachment as well if it may be attached all the same: one that
	// has ended.
	Attach(ctx context.Context, frontEnd string, number uint64, every time.Duration) (Attachment, error)
	// Up is closed while the store can be reached.
	Up() <-chan struct{}
	// Down is closed while it cannot be.
	Down() <-chan struct{}
}

// Attachment is a front-end's being attached to this node. Its methods may be called concurrently. The front-end's entries
// are those whose requests named it, on any node.
type Attachment interface {
	// Ended is closed when the attachment has been replaced, or the store cannot vouch for it any more. Err says which.
	Ended() <-chan struct{}
	// Err is nil until Ended is closed, then ErrReplaced or session.ErrUnavailable.
	Err() error
	// Asks receives when the front-end is to be asked for its claims.
	Asks() <-chan struct{}
	// Position is the store's, as of now.
	Position(ctx context.Context) (uint64, error)
	// Keep removes those of the front-end's entries that were made up to a position and are not claimed.
	Keep(ctx context.Context, position uint64, claims []Claim) error
	// Abandon removes the entries of requests of the front-end.
	Abandon(ctx context.Context, requests []Claim) error
	// Detach removes all of the front-end's entries and the attachment with them, unless it has been replaced: then it
	// does nothing. It can be called again after an error.
	Detach(ctx context.Context) error
	// Close lets go of the attachment's resources in this process and leaves everything as it is.
	Close()
}

// Said is one message of an attached front-end.
type Said struct {
	// Goodbye: it leaves.
	Goodbye bool
	// Claimed: Claims answer an ask at Position.
	Claimed  bool
	Claims   []Claim
	Position uint64
	// Abandoned are requests that it has given up.
	Abandoned []Claim
}

// Told is one message to an attached front-end. One that neither says that it is attached nor asks is a sign of life.
type Told struct {
	Attached bool
	Ask      bool
	Position uint64
}

// FrontEnds has the rules of attachments: what a front-end acquired is released when it has been away for the grace
// period, and at once when it says goodbye. Its methods may be called concurrently.
type FrontEnds struct {
	store  FrontEndStore
	grace  time.Duration
	drain  <-chan struct{}
	logger *slog.Logger

	mu     sync.Mutex
	closed bool
	stop   chan struct{}
	away   sync.WaitGroup
}

// NewFrontEnds makes FrontEnds. When drain is closed, attached front-ends are told to go elsewhere.
func NewFrontEnds(store FrontEndStore, grace time.Duration, drain <-chan struct{}, logger *slog.Logger) *FrontEnds {
	return &FrontEnds{store: store, grace: grace, drain: drain, logger: logger, stop: make(chan struct{})}
}

// Grace is how long a front-end may be away.
func (f *FrontEnds) Grace() time.Duration { return f.grace }

// Close stops waiting for front-ends that are away, and leaves them to the other nodes. Nothing attaches any more.
func (f *FrontEnds) Close() {
	f.mu.Lock()
	if !f.closed {
		f.closed = true
		close(f.stop)
	}
	f.mu.Unlock()
	f.away.Wait()
}

// Attach keeps a front-end attached while its stream lasts: until said is closed (the stream broke), it says goodbye, or
// an error ends it. It returns nil after a goodbye and when the front-end has attached anew. It calls tell from one
// goroutine, and at least every so often.
func (f *FrontEnds) Attach(
	ctx context.Context, frontEnd string, number uint64, every time.Duration, said <-chan Said, tell func(Told) error,
) error {
	at, err := f.store.Attach(ctx, frontEnd, number, every)
	switch {
	case errors.Is(err, ErrReplaced):
		return nil
	case err != nil:
		if at != nil {
			f.wait(at)
		}
		return err
	}
	goodbye, err := f.serve(ctx, at, number, every, said, tell)
	switch {
	case errors.Is(at.Err(), ErrReplaced):
		at.Close()
		return nil
	case goodbye:
		if err = at.Detach(context.WithoutCancel(ctx)); err == nil {
			at.Close()
			return nil
		}
	}
	f.wait(at)
	return err
}

// serve handles the stream. It says whether the front-end said goodbye.
func (f *FrontEnds) serve(
	ctx context.Context, at Attachment, number uint64, every time.Duration, said <-chan Said, tell func(Told) error,
) (goodbye bool, err error) {
	var work sync.WaitGroup
	defer work.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// What takes the store's time is done beside the stream, one after the other: signs of life must not wait for it. Most
	// front-ends never have anything to do.
	failed := make(chan error, 1)
	var jobs chan func(context.Context) error
	asks := make(chan uint64, 1)
	doJobs := func() {
		for {
			select {
			case job := <-jobs:
				if err := job(ctx); err != nil && ctx.Err() == nil {
					failed <- err
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}
	do := func(job func(context.Context) error) {
		if jobs == nil {
			jobs = make(chan func(context.Context) error, 16)
			work.Go(doJobs)
		}
		select {
		case jobs <- job:
		case <-ctx.Done():
		case <-at.Ended():
		case <-f.drain:
		}
	}
	ask := func() {
		do(func(ctx context.Context) error {
			position, err := at.Position(ctx)
			if err != nil {
				return err
			}
			select {
			case <-asks: // a newer one takes its place
			default:
			}
			asks <- position
			return nil
		})
	}

	if err := tell(Told{Attached: true}); err != nil {
		return false, err
	}
	if number > 1 {
		ask()
	}
	ping := time.NewTicker(every)
	defer ping.Stop()
	for {
		var err error
		select {
		case s, ok := <-said:
			switch {
			case !ok:
				return false, context.Cause(ctx)
			case s.Goodbye:
				return true, nil
			case s.Claimed:
				do(func(ctx context.Context) error { return at.Keep(ctx, s.Position, s.Claims) })
			default:
				do(func(ctx context.Context) error { return at.Abandon(ctx, s.Abandoned) })
			}
		case position := <-asks:
			err = tell(Told{Ask: true, Position: position})
		case <-at.Asks():
			ask()
		case <-ping.C:
			err = tell(Told{})
		case err = <-failed:
		case <-at.Ended():
			return false, at.Err()
		case <-f.drain:
			return false, session.ErrDraining
		case <-ctx.Done():
			return false, context.Cause(ctx)
		}
		if err != nil {
			return false, err
		}
	}
}

// wait gives the front-end the grace period to attach again, and detaches it if it does not. Time during which the store
// could not be reached does not count: the front-end could not attach anywhere.
func (f *FrontEnds) wait(at Attachment) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		at.Close()
		return
	}
	f.away.Go(func() {
		defer at.Close()
		for f.pause(at, f.store.Up(), 0) {
			if !f.pause(at, f.store.Down(), f.grace) {
				return
			}
			select {
			case <-f.store.Down():
				continue
			default:
			}
			err := at.Detach(context.Background())
			if err == nil {
				return
			}
			f.logger.Warn("locks of a front-end that has gone are not released yet", "error", err)
			if !f.pause(at, nil, detachRetry) {
				return
			}
		}
	})
}

// pause waits until a channel is closed or, unless it is zero, a time has passed. False: there is nothing to wait for any more.
func (f *FrontEnds) pause(at Attachment, until <-chan struct{}, most time.Duration) bool {
	var passed <-chan time.Time
	if most > 0 {
		timer := time.NewTimer(most)
		defer timer.Stop()
		passed = timer.C
	}
	ended := at.Ended()
	for {
		select {
		case <-until:
			return true
		case <-passed:
			return true
		case <-f.stop:
			return false
		case <-ended:
			if errors.Is(at.Err(), ErrReplaced) {
				return false
			}
			ended = nil // the store has its doubts, but the attachment may well stand
		}
	}
}
