package rpc

import (
	"context"
	"errors"
	"io"
	"math"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

const (
	// How many calls of one stream may run that answer with a stream. They wait most of the time, so they may be many more than others.
	maxStreamed = 1 << 17
	// How much of their responses may be in the queue of what is to be sent, or one response. More stays out of it, one of a call,
	// for unary calls would have to wait until all of it is sent.
	maxStreamedBytes = 64 << 10
)

// streamedCall is a call that answers with a stream, as its handler sees it. It has a goroutine, and nothing else of its own while it
// waits: what gRPC keeps for a stream there is once for all calls.
type streamedCall struct {
	stream  *multiplexStream
	ctx     context.Context //nolint:containedctx // The call's.
	cancel  context.CancelFunc
	id      uint64
	method  string
	request []byte // until the handler has it
	// heard says that the handler has had the request.
	heard bool

	// Of the stream's lock: how much may be sent, and whether a response waits to be sent, of which there is one at most.
	credit int64
	queued bool
	// given says that the client has given up the call.
	given bool
	// woken receives when one of these changes, while somebody waits for that.
	woken chan struct{}
}

var _ grpc.ServerStream = (*streamedCall)(nil)

// beginStreamed serves a call that answers with a stream. It has a goroutine of its own: a worker would be lost to other calls for long.
func (s *multiplexStream) beginStreamed(call *sessiondv1.MultiplexCall, method multiplexMethod) error {
	c := &streamedCall{stream: s, id: call.GetId(), method: call.GetMethod(), request: call.GetRequest()}
	c.ctx, c.cancel = s.context(call)
	s.mu.Lock()
	if s.inUse(c.id) {
		s.mu.Unlock()
		c.cancel()
		return errCallIDInUse()
	}
	s.streamed[c.id] = c
	c.grantLocked(call.GetCredit())
	s.activeStreamed++
	tooMany := s.activeStreamed > maxStreamed
	s.mu.Unlock()
	if tooMany {
		c.end(errTooManyStreamed)
		return nil
	}
	s.calls.Go(func() {
		c.end(s.interceptStream(method.service, c, &grpc.StreamServerInfo{FullMethod: c.method, IsServerStream: true}, method.stream))
	})
	return nil
}

// grant lets more of a call be sent, if there is such a call.
func (s *multiplexStream) grant(id, bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.streamed[id]; c != nil {
		c.grantLocked(bytes)
	}
}

func (c *streamedCall) grantLocked(bytes uint64) {
	// What is more than there can be is as much as there can be.
	if bytes > uint64(math.MaxInt64-max(c.credit, 0)) {
		c.credit = math.MaxInt64
	} else {
		c.credit += int64(bytes)
	}
	c.wakeLocked()
}

func (c *streamedCall) wakeLocked() {
	if c.woken != nil {
		select {
		case c.woken <- struct{}{}:
		default:
		}
	}
}

// giveUp ends a call that the client wants to hear no more of.
func (c *streamedCall) giveUp() {
	c.stream.mu.Lock()
	c.given = true
	c.wakeLocked()
	c.stream.mu.Unlock()
	c.cancel()
}

// waitLocked waits until something of the call has changed; false: stop has come first. The lock is not held meanwhile.
func (c *streamedCall) waitLocked(stop, drain <-chan struct{}) bool {
	if c.woken == nil {
		c.woken = make(chan struct{}, 1)
	}
	c.stream.mu.Unlock()
	defer c.stream.mu.Lock()
	select {
	case <-c.woken:
		return true
	case <-stop:
	case <-drain:
	}
	return false
}

// SendMsg has a response sent. It waits for the client to grant credit and for the response before to have been sent, so that one
// response of a call waits to be sent at most.
func (c *streamedCall) SendMsg(m any) error {
	s := c.stream
	s.mu.Lock()
	for c.credit <= 0 || c.queued {
		if !c.waitLocked(c.ctx.Done(), s.drain) {
			s.mu.Unlock()
			if err := c.ctx.Err(); err != nil {
				return err
			}
			return session.ErrDraining // who is told may go on elsewhere
		}
	}
	s.mu.Unlock()
	response, err := encode(m)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.given {
		return context.Canceled
	}
	c.credit -= int64(max(len(response), 1))
	c.queued = true
	a := &sessiondv1.MultiplexAnswer{Id: c.id, Response: response, Continues: true}
	if s.streamedBytes > maxStreamedBytes {
		s.parked = append(s.parked, a)
		return nil
	}
	s.admitLocked(a)
	return nil
}

// admitLocked puts a response of a streamed call in the queue.
func (s *multiplexStream) admitLocked(a *sessiondv1.MultiplexAnswer) {
	s.streamedBytes += len(a.GetResponse())
	s.queueLocked(a)
}

// queueLocked has the sender send an answer.
func (s *multiplexStream) queueLocked(a *sessiondv1.MultiplexAnswer) {
	s.unsent = append(s.unsent, a)
	s.bytes += len(a.GetResponse())
	if len(s.unsent) == 1 {
		s.changed.Broadcast()
	}
}

// takenLocked notes that a part of a streamed call's response is about to be sent, and admits what waits for that.
func (s *multiplexStream) takenLocked(a *sessiondv1.MultiplexAnswer) {
	s.streamedBytes -= len(a.GetResponse())
	if c := s.streamed[a.GetId()]; c != nil && !a.GetMore() {
		c.queued = false
		c.wakeLocked()
	}
	for len(s.parked) > 0 && s.streamedBytes <= maxStreamedBytes {
		next := s.parked[0]
		s.parked[0] = nil
		s.parked = s.parked[1:]
		s.admitLocked(next)
	}
}

// end answers that a call has ended, after its last response.
func (c *streamedCall) end(err error) {
	s := c.stream
	s.mu.Lock()
	for c.queued && !c.given && c.waitLocked(s.ctx.Done(), nil) {
	}
	s.activeStreamed--
	if s.streamed[c.id] == c {
		delete(s.streamed, c.id)
		a := &sessiondv1.MultiplexAnswer{Id: c.id}
		if err != nil {
			a.Status = encodeStatus(err)
		}
		s.queueLocked(a)
	}
	s.mu.Unlock()
	c.cancel()
}

// RecvMsg gives the handler the request.
func (c *streamedCall) RecvMsg(m any) error {
	if c.heard {
		return io.EOF
	}
	err := decode(c.request, m)
	c.heard, c.request = true, nil
	return err
}

// Context is the call's.
func (c *streamedCall) Context() context.Context { return c.ctx }

// SetHeader fails: there are no headers.
func (*streamedCall) SetHeader(metadata.MD) error { return errNoHeaders }

// SendHeader fails: there are no headers.
func (*streamedCall) SendHeader(metadata.MD) error { return errNoHeaders }

// SetTrailer does nothing, for it cannot say that there are no trailers.
func (*streamedCall) SetTrailer(metadata.MD) {}

var errNoHeaders = errors.New("a call on a shared stream has no headers and trailers of its own")
