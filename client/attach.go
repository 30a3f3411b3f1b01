package client

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

const (
	// How long a node may take to answer a hello. The next attempt most likely meets another node. From the third one in a row that
	// fails on, each has that much longer, up to what a node needs to say that its store fails: nodes that have very much to do must
	// not be asked again and again for what they are doing already.
	helloTimeout, helloAtMost = time.Second, 3 * time.Second
	// How many streams that fell silent are kept until the client is attached anew.
	maxSilent = 4
	// How long an attach that failed is waited for until the next one: at least the first, at most the second, and if
	// trying again cannot help the third.
	attachSoon, attachSlow, attachRarely = 10 * time.Millisecond, 250 * time.Millisecond, 5 * time.Second
	// How long Close waits for the node to release what is left.
	goodbyeTimeout = 2 * time.Second
	// What a node takes at once.
	maxClaims    = 10_000
	maxAbandoned = 1000
	// How many nodes are asked for a sign of life.
	askedNodes = 3
)

// errLeft says that the client said goodbye.
var errLeft = errors.New("said goodbye")

// errSilent says that no node gives a sign of life: neither the one that the client was attached to nor another one.
var errSilent = errors.New("no sign of life from any node")

// attachment keeps the client attached to some node, and knows which of its requests for locks stand. A nil one does
// nothing.
type attachment struct {
	locks    sessiondv1.LockServiceClient
	ready    func(context.Context) error
	frontEnd string
	cancel   context.CancelFunc
	leave    context.CancelFunc
	done     chan struct{}
	given    chan struct{} // receives when there is something to abandon

	mu        sync.Mutex
	standing  bool
	requests  map[lockRequest]lockState
	pruneAt   int
	abandoned []lockRequest
	// served ends when the nodes fall silent, and is made anew when one is heard again.
	served   context.Context //nolint:containedctx // Calls that wait for a lock end with it.
	unserved context.CancelFunc
}

type lockRequest struct {
	session, request string
}

// lockState is what is known of a request: how many calls for it are under way, and until when a grant of it may live.
type lockState struct {
	calls int
	until time.Time
}

// attach attaches to a node. ready asks one for a sign of life, and fails after a while.
func attach(locks sessiondv1.LockServiceClient, ready func(context.Context) error) *attachment {
	ctx, cancel := context.WithCancel(context.Background())
	leaving, leave := context.WithCancel(ctx)
	a := &attachment{
		locks: locks, ready: ready, frontEnd: newRequestID(), cancel: cancel, leave: leave,
		done: make(chan struct{}), given: make(chan struct{}, 1), requests: map[lockRequest]lockState{},
	}
	a.served, a.unserved = context.WithCancel(context.Background())
	go func() {
		defer close(a.done)
		a.run(ctx, leaving)
	}()
	return a
}

// close says goodbye, if attached, and returns when the node has released what was left, or after a while.
func (a *attachment) close() {
	if a == nil {
		return
	}
	a.leave()
	timer := time.NewTimer(goodbyeTimeout)
	defer timer.Stop()
	select {
	case <-a.done:
	case <-timer.C:
	}
	a.cancel()
	<-a.done
}

// id is what requests name the front-end by.
func (a *attachment) id() string {
	if a == nil {
		return ""
	}
	return a.frontEnd
}

func (a *attachment) stands() bool {
	if a == nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.standing
}

func (a *attachment) setStanding(standing bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.standing = standing
}

// setSilent notes whether the nodes are silent. One that the client has attached to meanwhile is not.
func (a *attachment) setSilent(silent bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case silent && !a.standing:
		a.unserved()
	case silent:
	case a.served.Err() != nil:
		a.served, a.unserved = context.WithCancel(context.Background())
	}
}

// waiting gives a call that may have to wait for long a context that ends with [errSilent] when the nodes fall silent. A
// connection that is dead without having been closed would otherwise be found out after gRPC's keep-alive alone.
func (a *attachment) waiting(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	if a == nil {
		return ctx, func() { cancel(nil) }
	}
	a.mu.Lock()
	served := a.served
	a.mu.Unlock()
	stop := context.AfterFunc(served, func() { cancel(errSilent) })
	return ctx, func() { stop(); cancel(nil) }
}

// begin notes that a call for a lock is under way.
func (a *attachment) begin(session, request string) {
	if a == nil {
		return
	}
	r := lockRequest{session, request}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.abandoned = slices.DeleteFunc(a.abandoned, func(other lockRequest) bool { return other == r })
	s := a.requests[r]
	s.calls++
	a.requests[r] = s
	if len(a.requests) > a.pruneAt {
		a.pruneLocked(time.Now())
		a.pruneAt = 2*len(a.requests) + 100
	}
}

// end notes that a call for a lock has ended: with a grant that lives until then, with nothing (zero), or without anybody
// knowing.
func (a *attachment) end(session, request string, until time.Time, unknown bool) {
	if a == nil {
		return
	}
	r := lockRequest{session, request}
	a.mu.Lock()
	defer a.mu.Unlock()
	s, ok := a.requests[r]
	if !ok {
		return // the session was destroyed meanwhile
	}
	s.calls = max(s.calls-1, 0)
	if until.After(s.until) {
		s.until = until
	}
	switch {
	case s.calls > 0 || !s.until.IsZero():
		a.requests[r] = s
	case unknown:
		a.abandonLocked(r)
	default:
		delete(a.requests, r)
	}
}

// over notes that a grant has ended, or that nobody wants it any more although it may not have.
func (a *attachment) over(session, request string, unknown bool) {
	if a == nil {
		return
	}
	r := lockRequest{session, request}
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.requests[r]; s.calls > 0 {
		s.until = time.Time{}
		a.requests[r] = s
		return
	}
	if unknown {
		a.abandonLocked(r)
		return
	}
	delete(a.requests, r)
}

// destroyed notes that a session has gone with all its grants.
func (a *attachment) destroyed(session string) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for r, s := range a.requests {
		if r.session == session && s.calls == 0 {
			delete(a.requests, r)
		}
	}
}

// abandonLocked has the node told, if there is one. If there is none, the next one is told what is still wanted.
func (a *attachment) abandonLocked(r lockRequest) {
	delete(a.requests, r)
	if !a.standing || len(a.abandoned) >= maxAbandoned {
		return
	}
	a.abandoned = append(a.abandoned, r)
	select {
	case a.given <- struct{}{}:
	default:
	}
}

func (a *attachment) pruneLocked(now time.Time) {
	for r, s := range a.requests {
		if s.calls == 0 && now.After(s.until) {
			delete(a.requests, r)
		}
	}
}

// claims are the requests that stand.
func (a *attachment) claims() []*sessiondv1.LockRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pruneLocked(time.Now())
	claims := make([]*sessiondv1.LockRequest, 0, len(a.requests))
	for r := range a.requests {
		claims = append(claims, r.proto())
	}
	return claims
}

func (r lockRequest) proto() *sessiondv1.LockRequest {
	return &sessiondv1.LockRequest{SessionId: r.session, RequestId: r.request}
}

// run attaches again and again.
func (a *attachment) run(ctx, leaving context.Context) {
	var asking sync.WaitGroup
	defer asking.Wait()
	var asked atomic.Bool
	delay, failed := attachSoon, 0
	// A node that is late is not hung up on before the client is attached anew, to the same or another one: it would count the client
	// as gone from then on, and release its locks if it is as slow to take it in again (L10).
	var silent []func()
	hangUp := func() {
		for _, f := range silent {
			f()
		}
		silent = nil
	}
	defer hangUp()
	for number := uint64(1); leaving.Err() == nil; number++ {
		patience := min(time.Duration(max(failed, 1))*helloTimeout, helloAtMost)
		stood, end, err := a.stand(ctx, leaving, number, patience, hangUp)
		a.setStanding(false)
		failed++
		if stood {
			delay, failed = attachSoon, 0
		}
		if errors.Is(err, errTimedOut) {
			if silent = append(silent, end); len(silent) > maxSilent {
				silent[0]()
				silent = silent[1:]
			}
		} else {
			end()
		}
		if !errors.Is(err, errTimedOut) {
			a.setSilent(false)
		} else if asked.CompareAndSwap(false, true) {
			// Not before the client attaches to another node: locks are released when it is late for that (L10).
			asking.Go(func() {
				defer asked.Store(false)
				a.setSilent(a.allSilent(leaving))
			})
		}
		wait := delay/2 + rand.N(delay)
		switch {
		case errors.Is(err, errLeft):
			return
		case !errors.Is(err, io.EOF) && !errors.Is(err, ErrUnavailable):
			wait = attachRarely // a node that knows nothing of this, or refuses it
		}
		delay = min(2*delay, attachSlow)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-leaving.Done():
			timer.Stop()
		}
	}
}

// allSilent asks several nodes, for they take turns, whether they are there. Attaching may take long for other reasons.
func (a *attachment) allSilent(ctx context.Context) bool {
	var silent atomic.Int32
	var asked sync.WaitGroup
	for range askedNodes {
		asked.Go(func() {
			if errors.Is(a.ready(ctx), context.DeadlineExceeded) {
				silent.Add(1)
			}
		})
	}
	asked.Wait()
	return silent.Load() == askedNodes
}

type attachStream = grpc.BidiStreamingClient[sessiondv1.AttachRequest, sessiondv1.AttachResponse]

// stand attaches to a node and keeps the stream until it breaks or falls silent; end then ends it. The node has the time given to
// agree, and then attached is called. It says whether the node had agreed.
func (a *attachment) stand(
	ctx, leaving context.Context, number uint64, patience time.Duration, attached func(),
) (stood bool, end func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	var reader sync.WaitGroup
	end = func() {
		cancel()
		reader.Wait()
	}
	// Nothing has to be released before there is an attachment.
	stop := context.AfterFunc(leaving, cancel)
	defer stop()
	stream, err := a.locks.Attach(ctx, grpc.WaitForReady(true))
	if err != nil {
		return false, end, fromStatus("attach", err)
	}
	said := make(chan *sessiondv1.AttachResponse)
	broken := make(chan error, 1)
	began := time.Now()
	var heard atomic.Int64 // when the node was heard last, since then
	reader.Go(func() {
		for {
			m, err := stream.Recv()
			if err != nil {
				broken <- err
				return
			}
			heard.Store(int64(time.Since(began)))
			if m.GetPing() != nil {
				continue // which is all that there is to do, nearly always
			}
			select {
			case said <- m:
			case <-ctx.Done():
			}
		}
	})
	send := func(m *sessiondv1.AttachRequest) {
		// A node that takes nothing any more must not hold this up. What became of it, the reader is told.
		timer := time.AfterFunc(helloTimeout, cancel)
		defer timer.Stop()
		_ = stream.Send(m)
	}

	send(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Hello{
		Hello: &sessiondv1.AttachHello{FrontEnd: a.frontEnd, Number: number},
	}})
	silence := time.NewTimer(patience)
	defer silence.Stop()
	for {
		select {
		case m := <-said:
			switch m := m.GetMessage().(type) {
			case *sessiondv1.AttachResponse_Attached:
				if !stop() {
					return false, end, errLeft
				}
				stood = true
				a.setStanding(true)
				a.setSilent(false)
				attached()
				patience = max(5*m.Attached.GetPingInterval().AsDuration()/2, 100*time.Millisecond)
				silence.Reset(patience)
			case *sessiondv1.AttachResponse_Ask:
				a.answer(m.Ask.GetPosition(), send)
			}
		case <-a.given:
			a.abandon(send)
		case <-silence.C:
			if left := patience - time.Since(began.Add(time.Duration(heard.Load()))); left > 0 {
				silence.Reset(left)
				continue
			}
			return stood, end, &Error{Op: "attach", Message: "no sign of life from the node", kind: errTimedOut}
		case err := <-broken:
			if errors.Is(err, io.EOF) {
				return stood, end, io.EOF
			}
			if leaving.Err() != nil && !stood {
				return stood, end, errLeft
			}
			return stood, end, fromStatus("attach", err)
		case <-leaving.Done():
			if !stood {
				return stood, end, errLeft
			}
			sayGoodbye(stream, send, said, broken)
			return stood, end, errLeft
		}
	}
}

func (a *attachment) answer(position uint64, send func(*sessiondv1.AttachRequest)) {
	claims := a.claims()
	if len(claims) > maxClaims {
		return // all is kept
	}
	send(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Claims{
		Claims: &sessiondv1.AttachClaims{Position: position, Requests: claims},
	}})
}

func (a *attachment) abandon(send func(*sessiondv1.AttachRequest)) {
	a.mu.Lock()
	abandoned := a.abandoned
	a.abandoned = nil
	a.mu.Unlock()
	if len(abandoned) == 0 {
		return
	}
	requests := make([]*sessiondv1.LockRequest, 0, len(abandoned))
	for _, r := range abandoned {
		requests = append(requests, r.proto())
	}
	send(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Abandon{
		Abandon: &sessiondv1.AttachAbandon{Requests: requests},
	}})
}

// sayGoodbye waits until the node has ended the stream; who calls close bounds that.
func sayGoodbye(stream attachStream, send func(*sessiondv1.AttachRequest), said <-chan *sessiondv1.AttachResponse, broken <-chan error) {
	send(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Goodbye{Goodbye: &sessiondv1.AttachGoodbye{}}})
	_ = stream.CloseSend()
	for {
		select {
		case <-said:
		case err := <-broken:
			if err != nil {
				return
			}
		}
	}
}
