package client

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

const (
	// A request larger than this is a call of its own, so that it holds up no other.
	maxSharedBytes = 64 << 10
	// What one message holds, unless it is one call. gRPC's buffers come in sizes of 32 KiB and then of 1 MiB, each cleared before use.
	batchBytes = 28 << 10
	// What a call without metadata takes beside its request, about.
	envelopeBytes = 64
	// How many calls may be under way on one stream. More are calls of their own.
	maxShared = 1 << 13
	// How long a node may take to open a stream, and when to ask again one that did not: it could not, or does not know how.
	openTimeout, openAgain, openRarely = 5 * time.Second, 250 * time.Millisecond, 30 * time.Second
)

// errNotSent says that a stream does not carry a call, and that no node has seen it.
var errNotSent = errors.New("not sent")

// errPickDone says that a balancer wants to be told when a call has ended, which only gRPC does.
var errPickDone = errors.New("balancer counts calls")

// multiplexer carries calls over one stream to each node, which costs a fraction of what they cost on their own: unary calls, and
// those that answer with a stream (sharedSubscription).
//
// It is the innermost interceptor, so retries and what else there is see no difference. Whatever does not fit is left to gRPC: a call
// while a stream is being opened, to a node that does not know of it or shuts down, or with a large request. So is a call that
// had not been sent when a stream broke; one that had been sent fails as a unary call on a broken connection does.
//
// Calls about a session go to one node while that is healthy, the same one from all clients (sharedPicker.preferred). Any other would
// do: but this one knows the session's queue, so its waiters are handed the lock without a read, what they ask for meanwhile
// shares transactions, and etcd's index need not be searched. A call that is tried again goes to the next node, and so do
// a node's sessions for a while when it has kept silent. All other calls, and those of clients that make unary ones, go to the nodes in turns.
type multiplexer struct {
	picker  atomic.Pointer[sharedPicker] // nil: there is no node
	service sessiondv1.MultiplexServiceClient
	ctx     context.Context //nolint:containedctx // The client's life, which the streams have.
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu      sync.RWMutex
	closed  bool
	streams map[balancer.SubConn]*sharedStream
	// changes is closed when those who wait for a stream are to look again; nil: nobody waits.
	changes chan struct{}
}

func newMultiplexer() *multiplexer {
	m := &multiplexer{streams: map[balancer.SubConn]*sharedStream{}}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	return m
}

// close ends all streams.
func (m *multiplexer) close() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.cancel()
	m.running.Wait()
}

// intercept carries a call, or leaves it to gRPC.
func (m *multiplexer) intercept(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	in, isMessage := req.(proto.Message)
	out, toMessage := reply.(proto.Message)
	picker := m.picker.Load()
	if !isMessage || !toMessage || picker == nil || !isOurs(method) || !plain(opts) || ctx.Err() != nil {
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	size := proto.Size(in)
	if size > maxSharedBytes {
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	conn, s, err := m.pick(ctx, picker, method, in)
	if err != nil {
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	if s != nil {
		if err := s.call(ctx, method, in, size, out); !errors.Is(err, errNotSent) {
			return err
		}
	}
	return invoke(picker.with(ctx, conn, false), method, req, reply, cc, opts...)
}

// pick returns the connection to the node that a call is to go to, and the stream to it, or nil if there is none at the moment.
func (m *multiplexer) pick(ctx context.Context, picker *sharedPicker, method string, request proto.Message) (balancer.SubConn, *sharedStream, error) {
	if about, ok := request.(interface{ GetSessionId() string }); ok && about.GetSessionId() != "" {
		for n := range picker.preferred(about.GetSessionId(), triedBefore(ctx)) {
			if s := m.stream(picker, n.conn); s != nil || m.comes(n.conn) {
				return n.conn, s, nil
			}
		}
	}
	pick, err := picker.Pick(balancer.PickInfo{FullMethodName: method, Ctx: ctx})
	if err == nil && pick.Done != nil {
		err = errPickDone
	}
	if err != nil {
		return nil, nil, err
	}
	return pick.SubConn, m.stream(picker, pick.SubConn), nil
}

// triedBefore is how often a call has been made already.
func triedBefore(ctx context.Context) int {
	md, ok := metadata.FromOutgoingContext(ctx)
	if !ok {
		return 0
	}
	for _, v := range md[retry.AttemptMetadataKey] {
		if n, err := strconv.Atoi(v); err == nil {
			return max(n, 0)
		}
	}
	return 0
}

// isOurs tells whether a method may be one that a shared stream carries.
func isOurs(method string) bool { return strings.HasPrefix(method, "/sessiond.") }

// plain tells whether options of a call are those that all calls have.
func plain(opts []grpc.CallOption) bool {
	for _, o := range opts {
		switch o.(type) {
		case grpc.MaxRecvMsgSizeCallOption, grpc.MaxSendMsgSizeCallOption, grpc.StaticMethodCallOption:
		default:
			return false
		}
	}
	return true
}

// stream returns the stream to a node, or nil while there is none; then it sees to one, if it is time for that.
func (m *multiplexer) stream(picker *sharedPicker, conn balancer.SubConn) *sharedStream {
	m.mu.RLock()
	s := m.streams[conn]
	m.mu.RUnlock()
	if s != nil && s.ready.Load() {
		return s
	}
	now := time.Now()
	if s != nil && !s.over(now) {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.streams[conn] != s || m.closed {
		return nil
	}
	for other, s := range m.streams {
		if s.over(now) {
			delete(m.streams, other)
		}
	}
	s = &sharedStream{node: picker.node(conn), calls: map[uint64]*sharedCall{}, subscriptions: map[uint64]*sharedSubscription{}}
	s.changed.L = &s.mu
	m.streams[conn] = s
	m.running.Go(func() {
		wait := s.run(m.ctx, m.service, picker, conn, m.change)
		s.again.Store(new(time.Now().Add(wait)))
		m.change()
	})
	return nil
}

type multiplexClient = grpc.BidiStreamingClient[sessiondv1.MultiplexRequest, sessiondv1.MultiplexResponse]

// sharedStream is a stream to a node with the calls on it.
type sharedStream struct {
	// ready says that the stream takes calls; again is set when it has ended, to when there may be another.
	ready atomic.Bool
	again atomic.Pointer[time.Time]

	node   *sharedNode // nil: not known
	stream multiplexClient
	fail   context.CancelFunc

	mu      sync.Mutex
	changed sync.Cond
	lastID  uint64
	// calls are those under way; unsent are those of them that wait to be sent, and cancelled what the node is to be told about
	// others.
	calls     map[uint64]*sharedCall
	unsent    []*sharedCall
	cancelled []uint64
	// subscriptions are the calls under way that answer with a stream; granting are those of which the node may send more.
	subscriptions map[uint64]*sharedSubscription
	granting      []*sharedSubscription
	// closing says that the stream takes no more calls, ended that it has broken, or answered all.
	closing, ended bool
	// sending says that somebody sends, heard that the node has answered since something was sent; responses counts what it said.
	sending, heard bool
	responses      uint64
}

// sharedCall is a call on a stream. Its lock is the stream's.
type sharedCall struct {
	sessiondv1.MultiplexCall

	subscription *sharedSubscription // that begins with it; nil: a unary call

	done   chan struct{} // receives once it is answered, or err is set
	begun  time.Time
	heard  uint64 // how much the node had said then
	sent   bool
	answer []byte
	status []byte
	err    error
}

// over tells whether the stream has ended, and there may be another one.
func (s *sharedStream) over(now time.Time) bool {
	again := s.again.Load()
	return again != nil && !now.Before(*again)
}

// run opens the stream, tells that, and serves it until it ends. It returns how long to wait before another.
func (s *sharedStream) run(ctx context.Context, service sessiondv1.MultiplexServiceClient, picker *sharedPicker, conn balancer.SubConn, opened func()) time.Duration {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	timer := time.AfterFunc(openTimeout, cancel)
	defer timer.Stop()
	stream, err := service.Multiplex(picker.with(ctx, conn, true))
	if err == nil {
		_, err = stream.Recv() // the first one only says that the node knows how
	}
	switch {
	case isUnknownMethod(err):
		return openRarely
	case err != nil || !timer.Stop():
		return openAgain
	}
	s.stream, s.fail = stream, cancel
	var sender sync.WaitGroup
	sender.Go(func() {
		if s.send() != nil {
			cancel()
		}
	})
	s.ready.Store(true)
	opened()
	s.receive()
	s.ready.Store(false)
	s.end()
	cancel()
	sender.Wait()
	return openAgain
}

// send sends what there is to be sent until the stream ends, or takes no more calls.
func (s *sharedStream) send() error {
	for {
		s.mu.Lock()
		for !s.ended && (s.sending || !s.waitsLocked() && !s.closing) {
			s.changed.Wait()
		}
		s.mu.Unlock()
		// Who can run now, and calls, goes first: this is what gathers calls.
		runtime.Gosched()
		s.mu.Lock()
		switch {
		case s.ended:
			s.mu.Unlock()
			return nil
		case s.sending:
			s.mu.Unlock()
			continue
		}
		closing := s.closing && len(s.unsent) == 0
		if err := s.sendLocked(); err != nil || closing {
			s.mu.Unlock()
			if err == nil {
				// What is cancelled from now on the node ends by itself, for it shuts down.
				err = s.stream.CloseSend()
			}
			return err
		}
		s.mu.Unlock()
	}
}

// waitsLocked tells whether there is something to be sent.
func (s *sharedStream) waitsLocked() bool {
	return len(s.unsent) > 0 || len(s.cancelled) > 0 || len(s.granting) > 0
}

// sendLocked sends what waits for it, about as much as a message holds. The lock is not held meanwhile.
func (s *sharedStream) sendLocked() error {
	if !s.waitsLocked() {
		return nil
	}
	request := s.takeLocked()
	s.sending, s.heard = true, false
	s.mu.Unlock()
	err := s.stream.Send(request)
	s.mu.Lock()
	s.sending = false
	return err
}

// takeLocked moves what waits to be sent to a request.
func (s *sharedStream) takeLocked() *sessiondv1.MultiplexRequest {
	request := &sessiondv1.MultiplexRequest{
		Cancelled: s.cancelled, Credits: s.grantsLocked(), Calls: make([]*sessiondv1.MultiplexCall, 0, len(s.unsent)),
	}
	s.cancelled = nil
	size, taken := 0, 0
	for taken < len(s.unsent) {
		c := s.unsent[taken]
		if taken > 0 && size+len(c.GetRequest())+envelopeBytes > batchBytes {
			break
		}
		s.unsent[taken] = nil
		taken++
		c.sent = true
		if c.subscription != nil {
			c.subscription.unsent = nil
		}
		request.Calls = append(request.Calls, &c.MultiplexCall)
		size += len(c.GetRequest()) + envelopeBytes
	}
	s.unsent = append(s.unsent[:0], s.unsent[taken:]...)
	return request
}

// receive hands out answers until the stream ends.
func (s *sharedStream) receive() {
	for {
		response, err := s.stream.Recv()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.heard = true
		s.responses++
		for _, a := range response.GetAnswers() {
			c := s.calls[a.GetId()]
			if c == nil {
				s.deliverLocked(a)
				continue // or cancelled
			}
			switch {
			case len(c.answer)+len(a.GetResponse()) > maxMessageBytes:
				c.err = errAnswerTooLarge
				s.cancelled = append(s.cancelled, a.GetId())
				s.changed.Signal()
			case len(c.answer) == 0:
				c.answer = a.GetResponse()
			default:
				c.answer = append(c.answer, a.GetResponse()...)
			}
			if a.GetMore() && c.err == nil {
				continue
			}
			c.status = a.GetStatus()
			delete(s.calls, a.GetId())
			c.done <- struct{}{}
		}
		if response.GetDraining() {
			s.ready.Store(false)
			s.closing = true
			for _, c := range s.unsent {
				if c.subscription != nil {
					c.subscription.endLocked(errNotSent)
					continue
				}
				c.err = errNotSent
				delete(s.calls, c.GetId())
				c.done <- struct{}{}
			}
			s.unsent = nil
			s.changed.Signal()
		}
		s.mu.Unlock()
	}
}

// end fails the calls that got no answer.
func (s *sharedStream) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for _, c := range s.calls {
		c.err = errNotSent
		if c.sent {
			c.err = errBrokenOff
		}
		c.done <- struct{}{}
	}
	s.endSubscriptionsLocked()
	s.calls, s.unsent = nil, nil
	s.changed.Signal()
}

// call makes a call and waits for its answer. It returns errNotSent if gRPC is to make it.
func (s *sharedStream) call(ctx context.Context, method string, in proto.Message, size int, out proto.Message) error {
	c := &sharedCall{done: make(chan struct{}, 1)}
	if err := c.encode(ctx, method, in, size); err != nil {
		return errNotSent // gRPC says what is wrong
	}
	if !s.begin(c) {
		return errNotSent
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		if s.cancel(c) {
			return contextStatus(ctx)
		}
		<-c.done // it is answered already
	}
	switch {
	case c.err != nil:
		return c.err
	case len(c.status) > 0:
		err := decodeStatus(c.status)
		if isUnavailable(err) {
			s.node.suspected()
		}
		return err
	}
	return decodeAnswer(c.answer, out)
}

func (c *sharedCall) encode(ctx context.Context, method string, in proto.Message, size int) error {
	request, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(make([]byte, 0, size), in)
	if err != nil {
		return fmt.Errorf("encode request: %w", err)
	}
	c.Method, c.Request = method, request
	if deadline, ok := ctx.Deadline(); ok {
		c.TimeoutUs = uint64(max(time.Until(deadline).Microseconds(), 1))
	}
	md, _ := metadata.FromOutgoingContext(ctx)
	for key, values := range md {
		for _, v := range values {
			c.Metadata = append(c.Metadata, &sessiondv1.MultiplexMetadata{Key: key, Value: []byte(v)})
		}
	}
	return nil
}

// begin has a call sent, if the stream takes it.
func (s *sharedStream) begin(c *sharedCall) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing || s.ended || len(s.calls) >= maxShared {
		return false
	}
	s.lastID++
	c.Id, c.begun, c.heard = s.lastID, time.Now(), s.responses
	s.calls[c.Id] = c
	s.unsent = append(s.unsent, c)
	// A call that is alone is sent at once, without waking the sender; not to a node that may have ceased to read, for that could
	// take longer than the call may.
	if len(s.calls) == 1 && s.heard && !s.sending {
		if s.sendLocked() != nil {
			s.fail()
		}
		if !s.waitsLocked() && !s.closing && !s.ended {
			return true
		}
	} else if len(s.unsent) > 1 {
		return true
	}
	s.changed.Signal()
	return true
}

// cancel gives up a call. It reports whether that has no answer yet.
func (s *sharedStream) cancel(c *sharedCall) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls[c.GetId()] != c {
		return false
	}
	delete(s.calls, c.GetId())
	if !c.sent {
		s.unsent = slices.DeleteFunc(s.unsent, func(other *sharedCall) bool { return other == c })
		return true
	}
	s.cancelled = append(s.cancelled, c.GetId())
	s.changed.Signal()
	if s.responses == c.heard && time.Since(c.begun) >= silence {
		s.node.suspected()
	}
	return true
}
