package client

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

const (
	// How much of a subscription's responses the node may send that have not been taken. The last of them may be larger.
	subscriptionCredit = 64 << 10
	// How many subscriptions may be on one stream. More are streams of their own.
	maxSubscriptions = 1 << 16
	// How long a subscription waits for the stream that it is to share, unless it is known that there is none. Otherwise all that come
	// back after a break would get streams of their own, for good.
	streamPatience = time.Second
)

// sharedSubscription is a call that answers with a stream of responses: on a shared stream, where it takes neither a goroutine nor
// anything of gRPC's, or left to gRPC. It is used by one goroutine.
type sharedSubscription struct {
	ctx     context.Context //nolint:containedctx // The call's.
	carrier *multiplexer
	method  string
	// What it takes to leave the call to gRPC, until the first response is there.
	request proto.Message
	leave   func() (grpc.ClientStream, error)
	own     grpc.ClientStream // the call was left to it
	forget  func() bool       // of ctx

	stream *sharedStream
	id     uint64
	// All else is of the stream's lock.
	changed sync.Cond
	unsent  *sharedCall // the call until it has been sent
	// responses have come and were not taken; part is the beginning of another one.
	responses [][]byte
	part      []byte
	// taken counts what the node may send again; granting says that it is about to be told.
	taken    uint64
	granting bool
	// err is how the call has ended; io.EOF if without an error.
	err error
}

var _ grpc.ClientStream = (*sharedSubscription)(nil)

// interceptStream carries a call that takes one request and answers with a stream, or leaves it to gRPC.
func (m *multiplexer) interceptStream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, next grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if desc.ClientStreams || !isOurs(method) || !plain(opts) {
		return next(ctx, desc, cc, method, opts...)
	}
	return &sharedSubscription{
		ctx: ctx, carrier: m, method: method,
		leave: func() (grpc.ClientStream, error) { return next(ctx, desc, cc, method, opts...) },
	}, nil
}

// SendMsg begins the call.
func (c *sharedSubscription) SendMsg(m any) error {
	request, ok := m.(proto.Message)
	if !ok {
		return errNotProto(m)
	}
	c.request = request
	return c.begin()
}

func (c *sharedSubscription) begin() error {
	if size := proto.Size(c.request); size <= maxSharedBytes {
		if s := c.carrier.await(c.ctx, c.method, c.request); s != nil && s.subscribe(c, size) {
			return nil
		}
	}
	return c.leaveToGRPC()
}

// leaveToGRPC makes it a call of gRPC's.
func (c *sharedSubscription) leaveToGRPC() error {
	own, err := c.leave()
	if err != nil {
		return err
	}
	c.own, c.leave = own, nil
	request := c.request
	c.request = nil
	if err := own.SendMsg(request); err != nil {
		return err
	}
	return own.CloseSend()
}

// RecvMsg waits for the next response.
func (c *sharedSubscription) RecvMsg(m any) error {
	for c.own == nil {
		response, err := c.receive()
		again := c.leave != nil
		switch {
		case again && errors.Is(err, errNotSent):
			c.forget()
			c.err = nil
			err = c.begin()
		case again && isUnknownMethod(err):
			c.forget()
			err = c.leaveToGRPC()
		default:
			return c.received(response, err, m)
		}
		if err != nil {
			return err
		}
	}
	return c.own.RecvMsg(m)
}

// received decodes a response, or ends the call.
func (c *sharedSubscription) received(response []byte, err error, m any) error {
	c.leave, c.request = nil, nil
	if err != nil {
		c.forget()
		return err
	}
	out, ok := m.(proto.Message)
	if !ok {
		return errNotProto(m)
	}
	return decodeAnswer(response, out)
}

// CloseSend does nothing: there is one request.
func (*sharedSubscription) CloseSend() error { return nil }

// Context is the call's.
func (c *sharedSubscription) Context() context.Context {
	if c.own != nil {
		return c.own.Context()
	}
	return c.ctx
}

// Header is empty on a shared stream.
func (c *sharedSubscription) Header() (metadata.MD, error) {
	if c.own != nil {
		return c.own.Header()
	}
	return nil, nil
}

// Trailer is empty on a shared stream.
func (c *sharedSubscription) Trailer() metadata.MD {
	if c.own != nil {
		return c.own.Trailer()
	}
	return nil
}

// await returns the stream to the node that a call is to go to, and waits for it while there is going to be one soon. nil: leave the call to
// gRPC.
func (m *multiplexer) await(ctx context.Context, method string, request proto.Message) *sharedStream {
	var changed <-chan struct{}
	var patience <-chan time.Time
	for {
		if s, wait := m.next(ctx, method, request); !wait {
			return s
		}
		if changed == nil {
			changed = m.changed()
			continue // from here on no change goes unnoticed
		}
		if patience == nil {
			patience = time.After(streamPatience)
		}
		select {
		case <-changed:
		case <-time.After(openAgain): // a stream that has ended may be opened again
		case <-patience:
			return nil
		case <-ctx.Done():
			return nil
		case <-m.ctx.Done():
			return nil
		}
		changed = nil
	}
}

// next returns the stream to the node that a call is to go to, or nil, and whether it is worth waiting for one.
func (m *multiplexer) next(ctx context.Context, method string, request proto.Message) (s *sharedStream, wait bool) {
	picker := m.picker.Load()
	if picker == nil {
		return nil, true
	}
	conn, s, err := m.pick(ctx, picker, method, request)
	if err != nil {
		return nil, errors.Is(err, balancer.ErrNoSubConnAvailable)
	}
	if s != nil {
		return s, false
	}
	return nil, m.comes(conn)
}

// comes tells whether there may soon be a stream to a node.
func (m *multiplexer) comes(conn balancer.SubConn) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	s := m.streams[conn]
	if s == nil || m.closed {
		return false
	}
	if again := s.again.Load(); again != nil {
		return time.Until(*again) <= openAgain
	}
	return !s.draining()
}

// draining tells whether the node has said that it shuts down.
func (s *sharedStream) draining() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

// changed is closed when there are other nodes, or a stream has opened or ended.
func (m *multiplexer) changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.changes == nil {
		m.changes = make(chan struct{})
	}
	return m.changes
}

// change tells those who wait for a stream to look again.
func (m *multiplexer) change() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.changes != nil {
		close(m.changes)
		m.changes = nil
	}
}

// subscribe begins a call, if the stream takes it.
func (s *sharedStream) subscribe(c *sharedSubscription, size int) bool {
	call := &sharedCall{subscription: c}
	if err := call.encode(c.ctx, c.method, c.request, size); err != nil {
		return false // gRPC says what is wrong
	}
	call.Credit = subscriptionCredit
	s.mu.Lock()
	if s.closing || s.ended || len(s.subscriptions) >= maxSubscriptions {
		s.mu.Unlock()
		return false
	}
	s.lastID++
	id := s.lastID
	call.Id = id
	c.stream, c.id, c.unsent = s, id, call
	c.changed.L = &s.mu
	s.subscriptions[c.id] = c
	s.unsent = append(s.unsent, call)
	s.changed.Signal()
	s.mu.Unlock()
	c.forget = context.AfterFunc(c.ctx, func() { s.unsubscribe(id) })
	return true
}

// unsubscribe gives a call up when its context has ended.
func (s *sharedStream) unsubscribe(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.subscriptions[id]
	if c == nil {
		return
	}
	if c.unsent != nil {
		s.unsent = slices.DeleteFunc(s.unsent, func(other *sharedCall) bool { return other == c.unsent })
	} else {
		s.cancelled = append(s.cancelled, c.id)
		s.changed.Signal()
	}
	c.responses = nil
	c.endLocked(contextStatus(c.ctx))
}

// endLocked ends the call. What has come can still be taken.
func (c *sharedSubscription) endLocked(err error) {
	delete(c.stream.subscriptions, c.id)
	c.unsent, c.part, c.err = nil, nil, err
	c.changed.Signal()
}

// receive waits for the next response, and lets the node send more when that is time.
func (c *sharedSubscription) receive() ([]byte, error) {
	s := c.stream
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(c.responses) == 0 && c.err == nil {
		c.changed.Wait()
	}
	if len(c.responses) == 0 {
		return nil, c.err
	}
	first := c.responses[0]
	c.responses[0] = nil
	c.responses = c.responses[1:]
	if len(c.responses) == 0 {
		c.responses = nil // not to be kept while nothing comes
	}
	c.taken += uint64(max(len(first), 1))
	if c.taken >= subscriptionCredit/2 && c.err == nil && !c.granting {
		c.granting = true
		s.granting = append(s.granting, c)
		s.changed.Signal()
	}
	return first, nil
}

// deliverLocked hands an answer to the subscription that it is for.
func (s *sharedStream) deliverLocked(a *sessiondv1.MultiplexAnswer) {
	c := s.subscriptions[a.GetId()]
	if c == nil {
		return // cancelled
	}
	switch {
	case len(c.part)+len(a.GetResponse()) > maxMessageBytes:
		s.cancelled = append(s.cancelled, c.id)
		s.changed.Signal()
		c.endLocked(errAnswerTooLarge)
		return
	case c.part == nil:
		c.part = a.GetResponse()
	default:
		c.part = append(c.part, a.GetResponse()...)
	}
	switch {
	case a.GetMore():
	case a.GetContinues():
		c.responses = append(c.responses, c.part)
		c.part = nil
		c.changed.Signal()
	case len(a.GetStatus()) > 0:
		c.endLocked(decodeStatus(a.GetStatus()))
	default:
		c.endLocked(io.EOF)
	}
}

// grantsLocked takes what the node may send again.
func (s *sharedStream) grantsLocked() []*sessiondv1.MultiplexCredit {
	var grants []*sessiondv1.MultiplexCredit
	for _, c := range s.granting {
		if c.err == nil {
			grants = append(grants, &sessiondv1.MultiplexCredit{Id: c.id, Bytes: c.taken})
		}
		c.granting, c.taken = false, 0
	}
	s.granting = nil
	return grants
}

// endSubscriptionsLocked ends all subscriptions when the stream has broken. One that was not sent can be made elsewhere.
func (s *sharedStream) endSubscriptionsLocked() {
	for _, c := range s.subscriptions {
		if c.unsent != nil {
			c.endLocked(errNotSent)
		} else {
			c.endLocked(errBrokenOff)
		}
	}
	s.granting = nil
}
