package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

// Defaults of [AcquireOptions].
const (
	// DefaultLockTimeout is how long Acquire waits unless told otherwise.
	DefaultLockTimeout = 30 * time.Second
	// DefaultLockTTL is a lock's TTL unless told otherwise.
	DefaultLockTTL = 300 * time.Second
)

// Grant is a lock held. It ends with its release, its TTL, or its session.
type Grant struct {
	// SessionID is the session that is locked.
	SessionID string
	// RequestID is that of the acquire that was granted.
	RequestID string
	// FencingToken names the grant and is greater than that of every earlier grant of this session's lock.
	FencingToken uint64
	// TTL is what was really given.
	TTL time.Duration
	// Deadline is when the TTL ends, at the earliest, on this process's monotonic clock.
	Deadline time.Time
	// Session is the session as it is under the lock, unless it was not asked for.
	Session Session

	// latest is the revision of the session as the holder last saw or saved it, 0 while that is not known; nil in a grant that
	// this client did not make. Copies of the grant share it.
	latest *atomic.Uint64
}

// grantFrom counts the TTL from the moment the request was sent plus the time it was with the node: the latest moment
// that is certainly not after that of the answer.
func grantFrom(g *sessiondv1.Grant, s *sessiondv1.Session, position uint64, sent time.Time) Grant {
	ttl := g.GetTtl().AsDuration()
	latest := new(atomic.Uint64)
	latest.Store(s.GetRevision())
	return Grant{
		latest:       latest,
		SessionID:    g.GetSessionId(),
		RequestID:    g.GetRequestId(),
		FencingToken: g.GetFencingToken(),
		TTL:          ttl,
		Deadline:     sent.Add(g.GetWaited().AsDuration() + ttl),
		Session:      sessionFrom(s, position),
	}
}

// AcquireOptions are the settings of [Client.Acquire] and [Client.TryAcquire].
type AcquireOptions struct {
	// RequestID names the request, so that a retry by the caller finds its place or its grant. Default: a fresh one,
	// under which the client's own retries go.
	RequestID string
	// Holder says who asks, for operators to see. A holder that acquires what it holds is [ErrLockAlreadyHeld]. Default:
	// the request id.
	Holder string
	// TTL is the lock's: 1 s to 1 h, fixed when it is granted. Default: [DefaultLockTTL].
	TTL time.Duration
	// Timeout is how long to wait, up to 1 h; TryAcquire does not use it. Default: [DefaultLockTimeout].
	Timeout time.Duration
	// OmitSession leaves Grant.Session empty.
	OmitSession bool
}

// Acquire waits until the caller holds the session's lock, in order of arrival over the whole cluster, and returns the
// session with it. When ctx ends, the wait ends and no lock is left behind. Errors: [ErrLockTimeout],
// [ErrSessionNotFound] (also when the session ends during the wait), [ErrLockAlreadyHeld], [ErrTooManyWaiters],
// [ErrInvalidArgument], [ErrUnavailable].
func (c *Client) Acquire(ctx context.Context, id string, opts AcquireOptions) (Grant, error) {
	timeout := opts.Timeout
	if timeout == 0 {
		timeout = DefaultLockTimeout
	}
	requestID := opts.RequestID
	if requestID == "" {
		requestID = newRequestID()
	}
	c.attached.begin(id, requestID)
	sent := time.Now()
	waiting, done := c.attached.waiting(ctx)
	defer done()
	resp, err := call(waiting, timeout+c.callTimeout, "acquire lock", c.locks.Acquire, &sessiondv1.AcquireRequest{
		SessionId: id, RequestId: requestID, Holder: opts.Holder, Ttl: duration(opts.TTL),
		Timeout: durationpb.New(timeout), ReadSession: !opts.OmitSession, FrontEnd: c.attached.id(),
	}, attempts)
	if err != nil {
		if errors.Is(context.Cause(waiting), errSilent) {
			err = &Error{Op: "acquire lock", Message: errSilent.Error(), kind: errTimedOut}
		}
		c.notGranted(ctx, id, requestID, opts, err)
		return Grant{}, err
	}
	grant := grantFrom(resp.GetGrant(), resp.GetSession(), resp.GetPosition(), sent)
	c.attached.end(id, requestID, grant.Deadline, false)
	return grant, nil
}

// notGranted notes that an acquire failed. If it may have been granted all the same, the node is told that nobody wants it,
// unless the caller named the request: then it may try again.
func (c *Client) notGranted(ctx context.Context, id, requestID string, opts AcquireOptions, err error) {
	unknown := !isBackendFailure(err) &&
		(errors.Is(err, ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled))
	var until time.Time
	if unknown && opts.RequestID != "" && ctx.Err() == nil {
		until = time.Now().Add(cmp.Or(opts.TTL, DefaultLockTTL))
	}
	c.attached.end(id, requestID, until, unknown)
}

// TryResult is what TryAcquire found.
type TryResult struct {
	// Acquired tells whether the caller holds the lock now.
	Acquired bool
	// Grant is set if it does.
	Grant Grant
	// Holder says who holds the lock if the caller does not.
	Holder string
}

// TryAcquire takes the session's lock if it is free, and answers at once. That it is held is not an error. Errors:
// [ErrSessionNotFound], [ErrLockAlreadyHeld], [ErrInvalidArgument], [ErrUnavailable].
func (c *Client) TryAcquire(ctx context.Context, id string, opts AcquireOptions) (TryResult, error) {
	requestID := opts.RequestID
	if requestID == "" {
		requestID = newRequestID()
	}
	c.attached.begin(id, requestID)
	sent := time.Now()
	resp, err := call(ctx, c.callTimeout, "try to acquire lock", c.locks.TryAcquire, &sessiondv1.TryAcquireRequest{
		SessionId: id, RequestId: requestID, Holder: opts.Holder, Ttl: duration(opts.TTL), ReadSession: !opts.OmitSession,
		FrontEnd: c.attached.id(),
	}, attempts)
	if err != nil {
		c.notGranted(ctx, id, requestID, opts, err)
		return TryResult{}, err
	}
	if !resp.GetAcquired() {
		c.attached.end(id, requestID, time.Time{}, false)
		return TryResult{Holder: resp.GetHolder()}, nil
	}
	grant := grantFrom(resp.GetGrant(), resp.GetSession(), resp.GetPosition(), sent)
	c.attached.end(id, requestID, grant.Deadline, false)
	return TryResult{Acquired: true, Grant: grant}, nil
}

// Release ends a grant. Errors: [ErrLockNotHeld] (it was released before, expired, or its session is gone),
// [ErrInvalidArgument], [ErrUnavailable]; in the last case the lock ends with its TTL at the latest. After any of them the
// grant counts as given up: an attached client does not claim it any more.
func (c *Client) Release(ctx context.Context, grant Grant) error {
	err := c.release(ctx, grant)
	c.attached.over(grant.SessionID, grant.RequestID, err != nil && !errors.Is(err, ErrLockNotHeld))
	return err
}

func (c *Client) release(ctx context.Context, grant Grant) error {
	req := &sessiondv1.ReleaseRequest{SessionId: grant.SessionID, FencingToken: grant.FencingToken, RequestId: grant.RequestID}
	_, err := call(ctx, c.callTimeout, "release lock", c.locks.Release, req)
	if !errors.Is(err, ErrUnavailable) || ctx.Err() != nil {
		return err
	}
	// The release may have been carried out. A second one, which names the same grant, tells: not held means released.
	_, err = call(ctx, c.callTimeout, "release lock", c.locks.Release, req, attempts)
	if errors.Is(err, ErrLockNotHeld) {
		return nil
	}
	return err
}

// WithLock runs f under the session's lock: acquire and read, f, save and release; two commits in all. f gets the
// session's data and returns the new data, or nil to leave it unchanged. If f fails, nothing is saved and its error is
// returned. The context given to f ends before the lock's TTL does. Errors: those of [Client.Acquire] and
// [Client.Save]; [ErrLockLost] means that nothing was saved because f took longer than the TTL.
func (c *Client) WithLock(ctx context.Context, id string, opts AcquireOptions, f func(ctx context.Context, data []byte) ([]byte, error)) (err error) {
	opts.OmitSession = false
	grant, err := c.Acquire(ctx, id, opts)
	if err != nil {
		return err
	}
	released := false
	defer func() {
		if !released {
			// Also when ctx has ended or f panics: others wait for this lock.
			if rerr := c.Release(context.WithoutCancel(ctx), grant); rerr != nil && err == nil {
				err = rerr
			}
		}
	}()
	data, err := c.runLocked(ctx, grant, f)
	if err != nil || data == nil {
		return err
	}
	_, err = c.Save(ctx, id, data, SaveOptions{TTL: grant.Session.TTL, Grant: &grant, Release: true})
	released = err == nil || errors.Is(err, ErrLockLost) || errors.Is(err, ErrSessionNotFound)
	return err
}

func (c *Client) runLocked(ctx context.Context, grant Grant, f func(context.Context, []byte) ([]byte, error)) ([]byte, error) {
	ctx, cancel := context.WithDeadlineCause(ctx, grant.Deadline.Add(-Margin(grant.TTL)),
		fmt.Errorf("the lock's TTL of %s is nearly over: %w", grant.TTL, context.DeadlineExceeded))
	defer cancel()
	return f(ctx, grant.Session.Data)
}

// Margin is how long before the end of a lock's TTL a holder should stop its work, to have time left to save and
// release: a tenth of the TTL, at least 200 ms, at most 5 s.
func Margin(ttl time.Duration) time.Duration {
	return min(max(ttl/10, 200*time.Millisecond), 5*time.Second)
}
