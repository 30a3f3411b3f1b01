package chaos

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/sessiond/sessiond/client"
)

// A clock gives the time since a run began.
type clock struct{ began time.Time }

func (c clock) now() int64           { return int64(time.Since(c.began)) }
func (c clock) at(t time.Time) int64 { return int64(t.Sub(c.began)) }

// attemptsKey is the context's key of the counter of attempts.
type attemptsKey struct{}

// countAttempts is an interceptor that sees every attempt of a call: what the client tries again by itself decides what an answer
// can mean.
func countAttempts(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if n, ok := ctx.Value(attemptsKey{}).(*int); ok {
		*n++
	}
	return invoke(ctx, method, req, reply, cc, opts...)
}

// A caller is a client that records what it does. It is used by one goroutine.
type caller struct {
	*client.Client

	id       int
	attached bool
	clock    clock
	record   func(Op)
}

// do runs one operation and records it.
func (c *caller) do(ctx context.Context, o Op, f func(ctx context.Context, o *Op) error) (Op, error) {
	o.Client = c.id
	ctx = context.WithValue(ctx, attemptsKey{}, &o.Attempts)
	o.Call = c.clock.now()
	err := f(ctx, &o)
	o.Return = c.clock.now()
	o.settle(err)
	c.record(o)
	return o, err
}

func (c *caller) create(ctx context.Context, id, value string, ttl time.Duration) (Op, error) {
	return c.do(ctx, Op{Session: id, Kind: Create, Value: value, TTL: int64(ttl)}, func(ctx context.Context, o *Op) error {
		s, err := c.Create(ctx, []byte(value), client.CreateOptions{ID: id, TTL: ttl})
		o.Revision = s.Revision
		return err
	})
}

func (c *caller) read(ctx context.Context, id string) (Op, error) {
	return c.do(ctx, Op{Session: id, Kind: Read}, func(ctx context.Context, o *Op) error {
		s, err := c.Read(ctx, id)
		o.Got, o.Revision, o.Position = string(s.Data), s.Revision, s.Position
		return err
	})
}

// save stores a value that is made from another.
func (c *caller) save(ctx context.Context, id, value, parent string, opts client.SaveOptions) (Op, error) {
	o := Op{Session: id, Kind: Save, Value: value, Parent: parent, TTL: int64(opts.TTL), Expected: opts.ExpectedRevision, Releases: opts.Release}
	if opts.Grant != nil {
		o.Fence = opts.Grant.FencingToken
	}
	return c.do(ctx, o, func(ctx context.Context, o *Op) (err error) {
		o.Revision, err = c.Save(ctx, id, []byte(value), opts)
		return err
	})
}

func (c *caller) touch(ctx context.Context, id string) (Op, error) {
	return c.do(ctx, Op{Session: id, Kind: Touch}, func(ctx context.Context, o *Op) error {
		left, err := c.Touch(ctx, id)
		o.Left = int64(left)
		return err
	})
}

func (c *caller) destroy(ctx context.Context, id string) (Op, error) {
	return c.do(ctx, Op{Session: id, Kind: Destroy}, func(ctx context.Context, o *Op) (err error) {
		o.Existed, err = c.Destroy(ctx, id)
		return err
	})
}

// acquire waits for the lock. A call whose outcome is unknown is made again under the same request id, as a caller that knows of
// retries would: all that is one operation.
func (c *caller) acquire(ctx context.Context, id string, tries int, opts client.AcquireOptions) (client.Grant, Op, error) {
	var grant client.Grant
	o := Op{Session: id, Kind: Acquire, Holder: opts.Holder, TTL: int64(opts.TTL), Attached: c.attached}
	o, err := c.do(ctx, o, func(ctx context.Context, o *Op) (err error) {
		for range tries {
			grant, err = c.Acquire(ctx, id, opts)
			if (&Op{Kind: Acquire, Attempts: 2}).outcome(err) != Unknown {
				break
			}
		}
		c.note(o, grant)
		return err
	})
	return grant, o, err
}

func (c *caller) note(o *Op, g client.Grant) {
	if g.FencingToken == 0 {
		return
	}
	o.Got, o.Revision, o.Position = string(g.Session.Data), g.Session.Revision, g.Session.Position
	o.Granted, o.Deadline = g.FencingToken, c.clock.at(g.Deadline)
}

func (c *caller) tryAcquire(ctx context.Context, id string, opts client.AcquireOptions) (client.Grant, Op, error) {
	var grant client.Grant
	o := Op{Session: id, Kind: TryAcquire, Holder: opts.Holder, TTL: int64(opts.TTL), Attached: c.attached}
	o, err := c.do(ctx, o, func(ctx context.Context, o *Op) error {
		res, err := c.TryAcquire(ctx, id, opts)
		if grant = res.Grant; err == nil && !res.Acquired {
			o.Outcome = Busy
		}
		c.note(o, grant)
		return err
	})
	return grant, o, err
}

func (c *caller) release(ctx context.Context, grant client.Grant) (Op, error) {
	return c.do(ctx, Op{Session: grant.SessionID, Kind: Release, Fence: grant.FencingToken}, func(ctx context.Context, _ *Op) error {
		return c.Release(ctx, grant)
	})
}
