package mcpserver

import (
	"context"
	"iter"
	"time"

	"github.com/sessiond/sessiond/client"
)

// Store keeps sessions. *client.Client implements it. A session that does not exist is client.ErrSessionNotFound, and
// nothing else is: a store that cannot be reached is client.ErrUnavailable (it makes clients wait; "not found" would make
// them throw their session away). Methods must be safe for concurrent use.
type Store interface {
	// Create stores a new session under opts.ID; client.ErrSessionExists if it is in use.
	Create(ctx context.Context, data []byte, opts client.CreateOptions) (client.Session, error)
	// Read returns the session as of now.
	Read(ctx context.Context, id string) (client.Session, error)
	// Save replaces the session's data; see [client.Client.Save] for the checks that opts asks for.
	Save(ctx context.Context, id string, data []byte, opts client.SaveOptions) (uint64, error)
	// Touch starts the session's TTL anew if more than a third of it has passed.
	Touch(ctx context.Context, id string) (time.Duration, error)
	// Destroy removes the session, its lock and its messages; false if it was gone.
	Destroy(ctx context.Context, id string) (bool, error)
	// Ready returns nil while sessions can be served.
	Ready(ctx context.Context) error
}

// Locker grants sessions' locks. *client.Client implements it. Methods must be safe for concurrent use.
type Locker interface {
	// Acquire waits for the lock, at most opts.Timeout, and returns the session with it. client.ErrLockTimeout: others
	// held it all the time; client.ErrUnavailable: the backend failed.
	Acquire(ctx context.Context, id string, opts client.AcquireOptions) (client.Grant, error)
	// Release ends a grant.
	Release(ctx context.Context, grant client.Grant) error
}

// Messages carries messages between replicas, in named streams of a session. *client.Client implements it. Methods
// must be safe for concurrent use.
type Messages interface {
	// Publish appends a message durably and returns its position. A session's room for messages may be limited: then
	// client.ErrTooManyMessages, for those of low priority already when half of it is taken.
	Publish(ctx context.Context, id, stream string, payload []byte, opts client.PublishOptions) (uint64, error)
	// Subscribe delivers streams from after a position on; see [client.Client.Subscribe].
	Subscribe(ctx context.Context, id string, after uint64, streams ...string) (iter.Seq2[client.Message, error], error)
	// Trim removes a stream's messages up to a position, but for the newest of these, as many as keep says.
	Trim(ctx context.Context, id, stream string, through uint64, keep int) error
	// Retain gives what a stream stores another TTL, from now on.
	Retain(ctx context.Context, id, stream string, ttl time.Duration) error
}

var (
	_ Store    = (*client.Client)(nil)
	_ Locker   = (*client.Client)(nil)
	_ Messages = (*client.Client)(nil)
)
