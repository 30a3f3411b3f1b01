package client

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

// Session is a stored session.
type Session struct {
	// ID is the session's id: 1 to 128 visible ASCII characters.
	ID string
	// Data is opaque to sessiond. It is not set by Create.
	Data []byte
	// Revision grows with every write of the session, Touch included.
	Revision uint64
	// TTL is what the session was last saved with.
	TTL time.Duration
	// TTLRemaining is what was left of it, at least, when the node answered.
	TTLRemaining time.Duration
	// Position is the store's position as of this answer, for [Client.Subscribe] to bring what is published later.
	// Not set by Create.
	Position uint64
}

func sessionFrom(s *sessiondv1.Session, position uint64) Session {
	return Session{
		ID:           s.GetId(),
		Data:         s.GetData(),
		Revision:     s.GetRevision(),
		TTL:          s.GetTtl().AsDuration(),
		TTLRemaining: s.GetTtlRemaining().AsDuration(),
		Position:     position,
	}
}

// CreateOptions are the settings of [Client.Create].
type CreateOptions struct {
	// ID is the session's id. Default: the service makes an unguessable one.
	ID string
	// TTL is 1 s to 30 days. Default: 1 h.
	TTL time.Duration
}

// Create stores a new session. It never overwrites: an id in use is [ErrSessionExists]. Other errors:
// [ErrSessionTooLarge], [ErrInvalidArgument], [ErrUnavailable] (with [ErrOutcomeUnknown] if it may have been stored).
func (c *Client) Create(ctx context.Context, data []byte, opts CreateOptions) (Session, error) {
	resp, err := call(ctx, c.callTimeout, "create session", c.sessions.Create, &sessiondv1.CreateRequest{
		SessionId: opts.ID, Data: data, Ttl: duration(opts.TTL),
	}, onceOnly()...)
	if err != nil {
		return Session{}, outcomeUnknown(err)
	}
	return sessionFrom(resp.GetSession(), 0), nil
}

// Read returns a session as of now (linearizable). Errors: [ErrSessionNotFound], [ErrInvalidArgument], [ErrUnavailable].
func (c *Client) Read(ctx context.Context, id string) (Session, error) {
	resp, err := call(ctx, c.callTimeout, "read session", c.sessions.Read, &sessiondv1.ReadRequest{SessionId: id}, attempts)
	if err != nil {
		return Session{}, err
	}
	return sessionFrom(resp.GetSession(), resp.GetPosition()), nil
}

// SaveOptions are the settings of [Client.Save].
type SaveOptions struct {
	// TTL starts anew with this length. Default: the session keeps the one it has, for one more read in the node.
	TTL time.Duration
	// ExpectedRevision, if not 0, makes the save a compare-and-swap: [ErrRevisionMismatch] if the session was written
	// since.
	ExpectedRevision uint64
	// Grant is the lock that the caller holds: [ErrLockLost] if it does no more. Without it, a save while anyone holds
	// the lock is [ErrSessionLocked]. A save that was cut off, and is carried out late, never undoes a later one under the
	// same grant: unless ExpectedRevision is given, the client names the revision that the holder last saw or saved, and
	// reads it first if it does not know.
	Grant *Grant
	// Release releases Grant in the same atomic step.
	Release bool
}

// Save replaces a session's data and starts its TTL anew; it returns the new revision. It never creates:
// [ErrSessionNotFound] if the session is gone. A refused save changes nothing. Other errors: those named at
// [SaveOptions], [ErrSessionTooLarge], [ErrInvalidArgument], [ErrUnavailable] (with [ErrOutcomeUnknown] if it may have
// been saved; so has [ErrSessionNotFound] if it may have been saved before the session went).
func (c *Client) Save(ctx context.Context, id string, data []byte, opts SaveOptions) (uint64, error) {
	revision, err := c.save(ctx, id, data, opts)
	if opts.Grant != nil && (err == nil && opts.Release || errors.Is(err, ErrLockLost) || errors.Is(err, ErrSessionNotFound)) {
		c.attached.over(id, opts.Grant.RequestID, false)
	}
	return revision, err
}

func (c *Client) save(ctx context.Context, id string, data []byte, opts SaveOptions) (uint64, error) {
	req := &sessiondv1.SaveRequest{SessionId: id, Data: data, Ttl: duration(opts.TTL), Release: opts.Release}
	if opts.ExpectedRevision != 0 {
		req.ExpectedRevision = new(opts.ExpectedRevision)
	}
	if opts.Grant != nil {
		req.FencingToken, req.RequestId = opts.Grant.FencingToken, opts.Grant.RequestID
		if opts.Grant.latest != nil && opts.ExpectedRevision == 0 {
			return c.saveHeld(ctx, req, opts.Grant.latest)
		}
	}
	return c.saveOnce(ctx, req, false)
}

// saveHeld saves under a lock on condition that the session is as the holder last saw or saved it. What else may have
// written it is a touch, or a save of the holder that was cut off: then it reads the revision and saves on that one.
func (c *Client) saveHeld(ctx context.Context, req *sessiondv1.SaveRequest, latest *atomic.Uint64) (uint64, error) {
	expected := latest.Load()
	var unknown error // of a save that was cut off, and may have been carried out and saved over by who had the lock next
	for {
		if expected == 0 {
			s, err := c.Read(ctx, req.GetSessionId())
			if err != nil {
				return 0, orUnknown(err, unknown)
			}
			expected = s.Revision
		}
		req.ExpectedRevision = &expected
		revision, err := c.saveOnce(ctx, req, true)
		switch {
		case err == nil:
			latest.Store(revision)
			return revision, nil
		case errors.Is(err, ErrRevisionMismatch):
			if e, ok := errors.AsType[*cutOffError](err); ok {
				unknown = e.unknown
			}
			expected = 0
			continue
		case errors.Is(err, ErrOutcomeUnknown):
			latest.Store(0)
		}
		return 0, orUnknown(err, unknown)
	}
}

// cutOffError is the mismatch that a save met that had been cut off before, and tried again.
type cutOffError struct {
	error

	unknown error
}

func (e *cutOffError) Unwrap() error { return e.error }

// orUnknown is the error of a save whose earlier try may have been carried out: only a later one that is tells that it was not, for
// then the lock was held all the time.
func orUnknown(err, unknown error) error {
	switch {
	case unknown == nil:
		return err
	case errors.Is(err, ErrSessionNotFound):
		return &unknownOutcomeError{cause: err}
	}
	return unknown
}

// saveOnce has a save carried out once at most; held says that the caller tries again after a mismatch.
func (c *Client) saveOnce(ctx context.Context, req *sessiondv1.SaveRequest, held bool) (uint64, error) {
	resp, err := call(ctx, c.callTimeout, "save session", c.sessions.Save, req, onceOnly()...)
	if err = outcomeUnknown(err); !errors.Is(err, ErrOutcomeUnknown) {
		return resp.GetRevision(), err
	}
	if req.FencingToken == 0 && req.ExpectedRevision == nil || ctx.Err() != nil || isBackendFailure(err) {
		return 0, err
	}
	return c.saveAgain(ctx, req, held, err)
}

// saveAgain finds out whether a save that was cut off was carried out, by trying it again: its condition lets it happen
// once. If the condition does not hold any more, or somebody has locked the session since, the save was carried out if the session
// holds what it wrote. A session that has gone since tells nothing.
func (c *Client) saveAgain(ctx context.Context, req *sessiondv1.SaveRequest, held bool, unknown error) (uint64, error) {
	resp, err := call(ctx, c.callTimeout, "save session", c.sessions.Save, req, attempts)
	switch {
	case err == nil:
		return resp.GetRevision(), nil
	case errors.Is(err, ErrLockLost), errors.Is(err, ErrRevisionMismatch), errors.Is(err, ErrSessionLocked):
		s, rerr := c.Read(ctx, req.GetSessionId())
		switch {
		case rerr == nil && bytes.Equal(s.Data, req.GetData()):
			return s.Revision, nil
		case rerr == nil && held && errors.Is(err, ErrRevisionMismatch):
			return 0, &cutOffError{err, unknown}
		}
		return 0, unknown
	case errors.Is(err, ErrUnavailable):
		return 0, unknown
	case errors.Is(err, ErrSessionNotFound):
		return 0, &unknownOutcomeError{cause: err}
	default:
		return 0, err
	}
}

// Touch starts a session's TTL anew, if more than a third of it has passed, and returns what is left. Errors:
// [ErrSessionNotFound], [ErrInvalidArgument], [ErrUnavailable].
func (c *Client) Touch(ctx context.Context, id string) (time.Duration, error) {
	resp, err := call(ctx, c.callTimeout, "touch session", c.sessions.Touch, &sessiondv1.TouchRequest{SessionId: id}, attempts)
	if err != nil {
		return 0, err
	}
	return resp.GetTtlRemaining().AsDuration(), nil
}

// Destroy removes a session with its lock, waiters and messages. It reports whether this call removed it; that it was
// gone already is not an error. Errors: [ErrInvalidArgument], [ErrUnavailable].
func (c *Client) Destroy(ctx context.Context, id string) (bool, error) {
	resp, err := call(ctx, c.callTimeout, "destroy session", c.sessions.Destroy, &sessiondv1.DestroyRequest{SessionId: id}, attempts)
	if err != nil {
		return false, err
	}
	c.attached.destroyed(id)
	return resp.GetDestroyed(), nil
}

// duration leaves zero unset, so that the service's default applies.
func duration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

// outcomeUnknown marks the failure of a write that may have been carried out.
func outcomeUnknown(err error) error {
	if e, ok := errors.AsType[*Error](err); ok && (e.unsent || e.Reason == sessiondv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN) {
		return err
	}
	if errors.Is(err, ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return &unknownOutcomeError{cause: err}
	}
	return err
}

// isBackendFailure tells an etcd that cannot be reached from a node that cannot. Another node has the same etcd.
func isBackendFailure(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Reason == sessiondv1.ErrorReason_ERROR_REASON_BACKEND_UNAVAILABLE
}
