package rpc

import (
	"context"
	"errors"
	"io"
	"maps"
	"math"
	"runtime"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

const (
	// What one message holds, and what one answer may take of it until all others have had a turn. gRPC's buffers come in sizes of
	// 32 KiB and then of 1 MiB, each cleared before use.
	batchBytes, partBytes = 28 << 10, 24 << 10
	// What an answer takes beside its response, about, unless it is an error.
	envelopeBytes = 20
	// How much may wait to be sent on a stream before no more calls are read from it: the client does not read.
	maxUnsentBytes = 16 << 20
	// How many unary calls of one stream may run.
	maxMultiplexed = 1 << 14
)

// multiplexService serves calls that come over one stream, each as if it were a gRPC call of its own.
//
// A call over a stream costs neither a stream's set-up nor its headers, and shares writes to the socket, messages and wake-ups with
// the calls that come and end at about the same time: what is there when the sender gets to run is sent as one message. Nothing
// waits for more to come.
type multiplexService struct {
	sessiondv1.UnimplementedMultiplexServiceServer

	methods         map[string]multiplexMethod
	intercept       grpc.UnaryServerInterceptor
	interceptStream grpc.StreamServerInterceptor
	drain           <-chan struct{}
	workers         *workers
}

// multiplexMethod is a method with what serves it.
type multiplexMethod struct {
	handle  grpc.MethodHandler // nil: it answers with a stream
	stream  grpc.StreamHandler
	service any
}

// RegisterService notes the methods of a service that take one request.
func (m *multiplexService) RegisterService(desc *grpc.ServiceDesc, service any) {
	for _, method := range desc.Methods {
		m.methods["/"+desc.ServiceName+"/"+method.MethodName] = multiplexMethod{handle: method.Handler, service: service}
	}
	for _, method := range desc.Streams {
		if !method.ClientStreams {
			m.methods["/"+desc.ServiceName+"/"+method.StreamName] = multiplexMethod{stream: method.Handler, service: service}
		}
	}
}

type multiplexServer = grpc.BidiStreamingServer[sessiondv1.MultiplexRequest, sessiondv1.MultiplexResponse]

// Multiplex returns when all calls of the stream have ended and are answered, or cannot be answered.
func (m *multiplexService) Multiplex(stream multiplexServer) error {
	// The first response has nothing in it: it says that calls are welcome.
	if err := stream.Send(&sessiondv1.MultiplexResponse{}); err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(stream.Context())
	defer fail(nil)
	s := &multiplexStream{multiplexService: m, stream: stream, ctx: ctx, fail: fail, running: map[uint64]*runningCall{}, streamed: map[uint64]*streamedCall{}}
	s.opened, _ = metadata.FromIncomingContext(ctx)
	s.changed.L = &s.mu
	wake := context.AfterFunc(ctx, s.change(func() {}))
	defer wake()

	var sender, watcher sync.WaitGroup
	sender.Go(func() {
		if err := s.send(); err != nil {
			fail(err)
		}
	})
	read := make(chan struct{})
	watcher.Go(func() {
		select {
		case <-m.drain:
			s.change(func() { s.draining = true })()
		case <-read:
		}
	})
	err := s.read()
	if err != nil {
		fail(err)
	}
	close(read)
	watcher.Wait()
	s.calls.Wait()
	s.change(func() { s.finished = true })()
	sender.Wait()
	return context.Cause(ctx)
}

// multiplexStream is one stream with the calls on it.
type multiplexStream struct {
	*multiplexService

	stream multiplexServer
	ctx    context.Context //nolint:containedctx // The stream's: calls end with it.
	fail   context.CancelCauseFunc
	opened metadata.MD
	calls  sync.WaitGroup

	mu      sync.Mutex
	changed sync.Cond
	// running are the unary calls that want an answer, by their ids; active counts those that were cancelled as well. streamed and
	// activeStreamed are those that answer with a stream.
	running        map[uint64]*runningCall
	active         int
	streamed       map[uint64]*streamedCall
	activeStreamed int
	// unsent are the answers that wait to be sent, and bytes their size.
	unsent []*sessiondv1.MultiplexAnswer
	bytes  int
	// streamedBytes of these are of streamed calls; parked are responses of such that do not wait there yet, for these are enough.
	streamedBytes int
	parked        []*sessiondv1.MultiplexAnswer
	// sending says that somebody sends, told that the client has been told of draining.
	sending        bool
	draining, told bool
	finished       bool
}

// runningCall is a call of which the handler has not returned.
type runningCall struct {
	ctx    context.Context //nolint:containedctx // The call's.
	cancel context.CancelFunc
	call   *sessiondv1.MultiplexCall
}

// change returns a function that does something to the stream's state and tells all who wait for it to change.
func (s *multiplexStream) change(do func()) func() {
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		do()
		s.changed.Broadcast()
	}
}

// read begins calls until the client sends no more, or the stream breaks.
func (s *multiplexStream) read() error {
	for {
		s.mu.Lock()
		for s.bytes > maxUnsentBytes && s.ctx.Err() == nil {
			s.changed.Wait()
		}
		s.mu.Unlock()
		request, err := s.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, call := range request.GetCalls() {
			if err := s.begin(call); err != nil {
				return err
			}
		}
		for _, c := range request.GetCredits() {
			s.grant(c.GetId(), c.GetBytes())
		}
		for _, id := range request.GetCancelled() {
			s.cancel(id)
		}
	}
}

func (s *multiplexStream) cancel(id uint64) {
	s.mu.Lock()
	c, streamed := s.running[id], s.streamed[id]
	delete(s.running, id)
	delete(s.streamed, id)
	s.mu.Unlock()
	if c != nil {
		c.cancel()
	}
	if streamed != nil {
		streamed.giveUp()
	}
}

// inUse tells whether a call under way has an id.
func (s *multiplexStream) inUse(id uint64) bool { return s.running[id] != nil || s.streamed[id] != nil }

func errCallIDInUse() error {
	var faults check
	faults.fault("calls.id", "must not be that of a call under way")
	return faults.err()
}

// begin serves a call beside others.
func (s *multiplexStream) begin(call *sessiondv1.MultiplexCall) error {
	if method := s.methods[call.GetMethod()]; method.stream != nil {
		return s.beginStreamed(call, method)
	}
	c := &runningCall{call: call}
	c.ctx, c.cancel = s.context(call)
	s.mu.Lock()
	if s.inUse(call.GetId()) {
		s.mu.Unlock()
		c.cancel()
		return errCallIDInUse()
	}
	s.running[call.GetId()] = c
	s.active++
	tooMany := s.active > maxMultiplexed
	s.mu.Unlock()
	if tooMany {
		s.answer(c, nil, errTooManyCalls)
		return nil
	}
	s.calls.Add(1)
	s.workers.run(func() {
		defer s.calls.Done()
		response, err := s.serve(c.ctx, call)
		s.answer(c, response, err)
	})
	return nil
}

// context is what a unary call would have: a deadline, metadata, and the method's name.
func (s *multiplexStream) context(call *sessiondv1.MultiplexCall) (context.Context, context.CancelFunc) {
	ctx := grpc.NewContextWithServerTransportStream(s.ctx, multiplexedCall(call.GetMethod()))
	if entries := call.GetMetadata(); len(entries) > 0 {
		own := metadata.MD{}
		for _, e := range entries {
			own.Append(e.GetKey(), string(e.GetValue()))
		}
		merged := s.opened.Copy()
		maps.Copy(merged, own)
		ctx = metadata.NewIncomingContext(ctx, merged)
	}
	if us := call.GetTimeoutUs(); us > 0 && us < math.MaxInt64/1000 {
		return context.WithTimeout(ctx, time.Duration(us)*time.Microsecond)
	}
	return context.WithCancel(ctx)
}

// serve does what gRPC does with a unary call.
func (s *multiplexStream) serve(ctx context.Context, call *sessiondv1.MultiplexCall) ([]byte, error) {
	method, ok := s.methods[call.GetMethod()]
	if !ok {
		return nil, noMethod(call.GetMethod())
	}
	response, err := method.handle(method.service, ctx, func(into any) error { return decode(call.GetRequest(), into) }, s.intercept)
	if err != nil {
		return nil, err
	}
	return encode(response)
}

// answer ends a call. One that was cancelled gets no answer.
func (s *multiplexStream) answer(c *runningCall, response []byte, err error) {
	a := &sessiondv1.MultiplexAnswer{Id: c.call.GetId(), Response: response}
	if err != nil {
		a.Status = encodeStatus(err)
	}
	s.mu.Lock()
	s.active--
	if s.running[a.GetId()] == c {
		delete(s.running, a.GetId())
		s.unsent = append(s.unsent, a)
		s.bytes += len(a.GetResponse())
		// An answer with no other call under way is sent at once, without waking the sender.
		if len(s.running) == 0 && len(s.unsent) == 1 && !s.sending && s.ctx.Err() == nil {
			if err := s.sendLocked(); err != nil {
				s.fail(err)
			}
			if len(s.unsent) > 0 || s.draining && !s.told || s.finished {
				s.changed.Broadcast()
			}
		} else if len(s.unsent) == 1 {
			s.changed.Broadcast()
		}
	}
	s.mu.Unlock()
	c.cancel()
}

// send sends what there is to be sent until the stream is finished or broken.
func (s *multiplexStream) send() error {
	for {
		s.mu.Lock()
		for s.ctx.Err() == nil && (s.sending || len(s.unsent) == 0 && !s.finished && (s.told || !s.draining)) {
			s.changed.Wait()
		}
		s.mu.Unlock()
		// Who can run now, and answers, goes first: this is what gathers answers.
		runtime.Gosched()
		s.mu.Lock()
		var err error
		ended := s.ctx.Err() != nil || s.finished && len(s.unsent) == 0 && !s.sending
		if !ended && !s.sending {
			err = s.sendLocked()
		}
		s.mu.Unlock()
		if err != nil || ended {
			return err
		}
	}
}

// sendLocked sends what waits for it, about as much as a message holds. The lock is not held meanwhile.
func (s *multiplexStream) sendLocked() error {
	response := &sessiondv1.MultiplexResponse{Draining: s.draining && !s.told}
	s.told = s.draining
	size := s.takeLocked(response)
	if len(response.GetAnswers()) == 0 && !response.GetDraining() {
		return nil
	}
	s.sending = true
	s.mu.Unlock()
	err := s.stream.Send(response)
	s.mu.Lock()
	s.sending = false
	if s.bytes > maxUnsentBytes {
		s.changed.Broadcast()
	}
	s.bytes -= size
	return err
}

// takeLocked moves answers that wait to a response, and returns how large it is. An answer that is large goes in parts, with what
// comes after it in between.
func (s *multiplexStream) takeLocked(response *sessiondv1.MultiplexResponse) int {
	size, taken, room := 0, 0, batchBytes
	for taken < len(s.unsent) {
		a := s.unsent[taken]
		if taken > 0 && room < min(len(a.GetResponse()), partBytes)+envelopeBytes {
			break
		}
		s.unsent[taken] = nil
		taken++
		if len(a.GetResponse()) > partBytes {
			rest := &sessiondv1.MultiplexAnswer{Id: a.GetId(), Response: a.GetResponse()[partBytes:], Continues: a.GetContinues()}
			s.unsent = append(s.unsent, rest)
			a = &sessiondv1.MultiplexAnswer{Id: a.GetId(), Response: a.GetResponse()[:partBytes], More: true, Continues: a.GetContinues()}
		}
		response.Answers = append(response.Answers, a)
		size += len(a.GetResponse())
		room -= len(a.GetResponse()) + len(a.GetStatus()) + envelopeBytes
	}
	s.unsent = append(s.unsent[:0], s.unsent[taken:]...)
	for _, a := range response.GetAnswers() {
		if a.GetContinues() {
			s.takenLocked(a)
		}
	}
	return size
}

// multiplexedCall is what a handler can ask about its call by way of gRPC: the method's name.
type multiplexedCall string

func (c multiplexedCall) Method() string { return string(c) }

func (multiplexedCall) SetHeader(metadata.MD) error  { return errNoHeaders }
func (multiplexedCall) SendHeader(metadata.MD) error { return errNoHeaders }
func (multiplexedCall) SetTrailer(metadata.MD) error { return errNoHeaders }

// workers are goroutines that serve calls one after the other, for the reason that gRPC's own have (streamWorkers).
type workers struct {
	calls   chan func()
	running sync.WaitGroup
	stop    func()
}

func newWorkers(count int) *workers {
	w := &workers{calls: make(chan func())}
	stopped := make(chan struct{})
	w.stop = sync.OnceFunc(func() {
		close(stopped)
		w.running.Wait()
	})
	for range count {
		w.running.Go(func() {
			for {
				select {
				case serve := <-w.calls:
					serve()
				case <-stopped:
					return
				}
			}
		})
	}
	return w
}

// run has a worker serve a call, or a goroutine of its own if all are taken.
func (w *workers) run(serve func()) {
	select {
	case w.calls <- serve:
	default:
		go serve()
	}
}
