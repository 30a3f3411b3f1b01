package mcpserver

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// conn is the SDK's connection for one HTTP request: it reads the request's messages from it, and the client's answers as
// they come, and writes to it.
type conn struct {
	sessionID string
	in        chan jsonrpc.Message
	// out takes what the SDK writes. It is called concurrently.
	out func(context.Context, jsonrpc.Message) error

	accepted     chan struct{} // closed once the SDK has taken in the first batch
	unread       int
	acceptedOnce sync.Once
	closed       chan struct{}
	closeOnce    sync.Once
}

func newConn(sessionID string, first []jsonrpc.Message, out func(context.Context, jsonrpc.Message) error) *conn {
	c := &conn{
		sessionID: sessionID,
		in:        make(chan jsonrpc.Message, len(first)+1),
		out:       out,
		accepted:  make(chan struct{}),
		unread:    len(first),
		closed:    make(chan struct{}),
	}
	for _, m := range first {
		c.in <- m
	}
	return c
}

// Connect makes the conn the transport of itself.
func (c *conn) Connect(context.Context) (mcp.Connection, error) { return c, nil }

// SupportsProtocolVersion says that this connection serves the handshake era only.
func (c *conn) SupportsProtocolVersion(version string) bool { return version < modernRevision }

// Read is called by one goroutine of the SDK, which has taken in a message when it asks for the next.
func (c *conn) Read(ctx context.Context) (jsonrpc.Message, error) {
	if c.unread == 0 {
		c.acceptedOnce.Do(func() { close(c.accepted) })
	}
	c.unread--
	select {
	case m := <-c.in:
		return m, nil
	case <-c.closed:
		return nil, io.EOF
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *conn) Write(ctx context.Context, m jsonrpc.Message) error {
	select {
	case <-c.closed:
		return errConnClosed
	default:
		return c.out(ctx, m)
	}
}

var errConnClosed = errors.New("the request is over, its connection is closed")

// feed hands the SDK a message. It does nothing once the connection is closed.
func (c *conn) feed(m jsonrpc.Message) {
	select {
	case c.in <- m:
	case <-c.closed:
	}
}

func (c *conn) Close() error {
	c.closeOnce.Do(func() { close(c.closed) })
	return nil
}

func (c *conn) SessionID() string { return c.sessionID }
