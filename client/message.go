package client

import (
	"context"
	"errors"
	"io"
	"iter"
	"math"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

// MaxMessageTTL is the longest that a message can be kept.
const MaxMessageTTL = 24 * time.Hour

// Message is a message of a session's stream.
type Message struct {
	// Stream is the stream's name.
	Stream string
	// Position is greater than that of every message published before it in the session.
	Position uint64
	// Payload is opaque to sessiond.
	Payload []byte
}

// PublishOptions are the settings of [Client.Publish].
type PublishOptions struct {
	// TTL is how long the message is kept, at least: 1 s to 24 h. Default: 5 min.
	TTL time.Duration
	// LowPriority has the message refused ([ErrTooManyMessages]) when half of the session's room for messages is taken, so
	// that the other half is there for what must get through. A session's room is 1,000 messages and 16 MiB of them.
	LowPriority bool
	// RequestID names the request, so that a retry by the caller does not publish twice. Default: a fresh one, under
	// which the client's own retries go.
	RequestID string
}

// Publish appends a message of up to 4 MiB to a stream of a session, durably, and returns its position. Errors:
// [ErrSessionNotFound], [ErrMessageTooLarge], [ErrTooManyMessages], [ErrInvalidArgument], [ErrUnavailable].
func (c *Client) Publish(ctx context.Context, id, stream string, payload []byte, opts PublishOptions) (uint64, error) {
	requestID := opts.RequestID
	if requestID == "" {
		requestID = newRequestID()
	}
	resp, err := call(ctx, c.callTimeout, "publish message", c.messages.Publish, &sessiondv1.PublishRequest{
		SessionId: id, Stream: stream, Payload: payload, Ttl: duration(opts.TTL), RequestId: requestID,
		LowPriority: opts.LowPriority,
	}, attempts)
	if err != nil {
		return 0, err
	}
	return resp.GetPosition(), nil
}

// Trim removes the stored messages of a stream up to a position, inclusive, but for the newest of these, as many as keep
// says (0 or more). Errors: [ErrSessionNotFound], [ErrInvalidArgument], [ErrUnavailable].
func (c *Client) Trim(ctx context.Context, id, stream string, through uint64, keep int) error {
	_, err := call(ctx, c.callTimeout, "trim messages", c.messages.Trim, &sessiondv1.TrimRequest{
		SessionId: id, Stream: stream, ThroughPosition: through, Keep: uint32(min(max(keep, 0), math.MaxInt32)),
	}, attempts)
	return err
}

// Retain gives the messages that a stream stores at this moment another TTL, from now on: 1 s to 24 h; 0: 5 min. Errors:
// [ErrSessionNotFound], [ErrInvalidArgument], [ErrUnavailable].
func (c *Client) Retain(ctx context.Context, id, stream string, ttl time.Duration) error {
	_, err := call(ctx, c.callTimeout, "retain messages", c.messages.Retain, &sessiondv1.RetainRequest{
		SessionId: id, Stream: stream, Ttl: duration(ttl),
	}, attempts)
	return err
}

// subscription is a Subscribe call under way: as many calls, one after the other, as it takes.
type subscription struct {
	client   *Client
	ctx      context.Context //nolint:containedctx // It is the call's, which outlives the function that makes it.
	request  *sessiondv1.SubscribeRequest
	stream   grpc.ServerStreamingClient[sessiondv1.SubscribeResponse]
	hangUp   context.CancelCauseFunc // ends the present stream
	pending  []*sessiondv1.Message
	position uint64
}

// Subscribe delivers streams of a session from after a position on (0: from the oldest stored message), each message
// once, in order. It returns when the node has confirmed: what is published from then on is delivered. The messages come
// from the iterator, which is to be ranged over once, by one goroutine; it waits for the next one until ctx ends, which
// the caller has to see to, also if it does not range at all. A connection that breaks is made anew, on any node, where it
// broke off, for as long as it takes; nothing is lost that has not outlived its TTL. Errors, here and at the
// iterator's end: [ErrSessionNotFound] (the session has ended), [ErrInvalidArgument], [ErrInternal]; here also
// [ErrUnavailable], there ctx's error.
func (c *Client) Subscribe(ctx context.Context, id string, after uint64, streams ...string) (iter.Seq2[Message, error], error) {
	s := &subscription{
		client: c, ctx: ctx, position: after,
		request: &sessiondv1.SubscribeRequest{SessionId: id, Streams: streams},
	}
	if err := s.begin(); err != nil {
		return nil, err
	}
	return func(yield func(Message, error) bool) {
		defer s.hangUp(nil)
		for {
			m, err := s.receive()
			if !yield(m, err) || err != nil {
				return
			}
		}
	}, nil
}

// begin connects for the first time, also if the node that was asked dies over it and another one serves.
func (s *subscription) begin() error {
	for attempt := uint(1); ; attempt++ {
		err := s.connect()
		if e, ok := errors.AsType[*Error](err); !ok || !e.retriable() || attempt == maxAttempts {
			return err
		}
		select {
		case <-s.ctx.Done():
			return s.ctx.Err()
		case <-time.After(firstPause + rand.N(firstPause)):
		}
	}
}

// firstPause is what passes between a break and the next attempt, at least; it grows up to longestPause.
const (
	firstPause   = 10 * time.Millisecond
	longestPause = 500 * time.Millisecond
)

// connect opens the stream after the last position and waits for the first answer.
func (s *subscription) connect() error {
	if s.hangUp != nil {
		s.hangUp(nil)
	}
	s.request.AfterPosition = s.position
	// The call lives as long as the subscription, only its first answer has a time limit.
	ctx, cancel := context.WithCancelCause(s.ctx)
	timer := time.AfterFunc(s.client.callTimeout, func() { cancel(context.DeadlineExceeded) })
	stream, err := s.client.messages.Subscribe(ctx, s.request)
	var first *sessiondv1.SubscribeResponse
	if err == nil {
		first, err = stream.Recv()
	}
	if err == nil && !timer.Stop() {
		err = context.DeadlineExceeded
	}
	if err != nil {
		timer.Stop()
		timedOut := errors.Is(context.Cause(ctx), context.DeadlineExceeded) && s.ctx.Err() == nil
		cancel(nil)
		if timedOut {
			return &Error{Op: "subscribe", Message: "no answer in time", kind: errTimedOut}
		}
		return fromStatus("subscribe", err)
	}
	s.stream, s.hangUp = stream, cancel
	s.take(first)
	return nil
}

func (s *subscription) take(resp *sessiondv1.SubscribeResponse) {
	s.pending = resp.GetMessages()
	if len(s.pending) == 0 {
		s.position = max(s.position, resp.GetPosition())
	}
}

// receive waits for the next message.
func (s *subscription) receive() (Message, error) {
	for {
		for len(s.pending) > 0 {
			m := s.pending[0]
			s.pending = s.pending[1:]
			if m.GetPosition() <= s.position {
				continue
			}
			s.position = m.GetPosition()
			return Message{Stream: m.GetStream(), Position: m.GetPosition(), Payload: m.GetPayload()}, nil
		}
		s.pending = nil // not to be kept while nothing comes
		resp, err := s.stream.Recv()
		if err == nil {
			s.take(resp)
			continue
		}
		if err := s.reconnect(err); err != nil {
			return Message{}, err
		}
	}
}

// reconnect goes on after a break, with back-off, until it succeeds or trying again cannot help.
func (s *subscription) reconnect(cause error) error {
	pause := firstPause
	for {
		if s.ctx.Err() != nil {
			return s.ctx.Err()
		}
		// A node that ends the stream without an error is one that was asked to go away.
		if !errors.Is(cause, io.EOF) && !errors.Is(asError(cause), ErrUnavailable) {
			return asError(cause)
		}
		select {
		case <-s.ctx.Done():
			return s.ctx.Err()
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = min(2*pause, longestPause)
		if cause = s.connect(); cause == nil {
			return nil
		}
	}
}

func asError(err error) error {
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	return fromStatus("subscribe", err)
}
