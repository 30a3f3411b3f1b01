package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/auth"
	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
)

// watchAfter is how long a request runs before it subscribes to its session's control stream, to learn of its cancellation
// and of the session's end. What was published before is delivered then; nearly every request is over sooner and
// pays nothing.
const watchAfter = 100 * time.Millisecond

// watchAgain is how long after a failure it tries again. A cancellation is to be heard within a second of the store's return.
const watchAgain = 250 * time.Millisecond

// exchangeKey finds a request's exchange in its handlers' contexts.
type exchangeKey struct{}

// exchange is one POST of the handshake era: the messages fed to the SDK, the answers collected from it, and what
// happens in between. One goroutine, in run, does everything; others hand it functions with post.
type exchange struct {
	h       *Handler
	ctx     context.Context //nolint:containedctx // The request's; the exchange is the request.
	session *session        // nil: without session
	draft   *session        // the session that this initialize is about to open
	reply   *reply          // nil: nobody waits for an answer (notifications)
	batch   bool

	sdk     *mcp.ServerSession
	conn    *conn
	marker  *mcp.RequestExtra       // tells the marker from a ping of the client
	extra   *mcp.RequestExtra       // what handlers get beside their params
	alive   *time.Ticker            // set once the stream is resumed elsewhere
	calls   map[int64]*exchangeCall // by the id that the SDK knows it under
	order   []*exchangeCall
	waiting int                                   // calls not answered, and the marker after notifications
	ending  func(context.Context) error           // makes effects durable before the last answers go out
	result  func(json.RawMessage) json.RawMessage // edits results, if set

	asks     map[string]*ask // questions to the client, by their id on the wire
	answers  []*jsonrpc.Response
	resuming bool
	deferred []func() // for when the session has been resumed

	cancellations map[uint64]*cancellation // under way, by their position in the control stream

	tell     []presence // once the changes are durable
	watching bool
	started  sync.WaitGroup // goroutines of this exchange
	stop     context.CancelFunc

	actions chan func()
	ended   chan struct{}
	over    bool // ends run
	gone    bool // the session has ended, or the server stops: handlers may still run

	lockTimer *time.Timer

	mu       sync.Mutex
	handlers map[int]context.CancelCauseFunc
	nextID   int
	cause    error // why handlers were cancelled
}

// exchangeCall is a request of the POST.
type exchangeCall struct {
	id        json.RawMessage // as the client sent it
	method    string
	params    json.RawMessage
	body      []byte // the answer
	answered  bool
	cancelled bool
}

// ask is a question to the client under way.
type ask struct {
	id    jsonrpc.ID // as the SDK knows it
	timer *time.Timer
}

// markerID is the id of the ping that the SDK is fed after notifications: it handles these in order and answers none,
// so its answer shows that they are dealt with. Our middleware answers it, no other sees it.
const markerID = 0

// newExchange prepares an exchange for the messages, which have at least one request or notification. The context's values
// reach the handlers. What else is to be set must be before start.
func (h *Handler) newExchange(ctx context.Context, r *http.Request, sess *session, id string, messages []*message) *exchange {
	x := &exchange{
		h:             h,
		session:       sess,
		calls:         map[int64]*exchangeCall{},
		asks:          map[string]*ask{},
		cancellations: map[uint64]*cancellation{},
		actions:       make(chan func()),
		ended:         make(chan struct{}),
		handlers:      map[int]context.CancelCauseFunc{},
		marker:        &mcp.RequestExtra{},
	}
	x.ctx, x.stop = context.WithCancel(context.WithValue(ctx, exchangeKey{}, x))
	x.extra = &mcp.RequestExtra{TokenInfo: auth.TokenInfoFromContext(ctx), Header: r.Header}
	first := make([]jsonrpc.Message, 0, len(messages)+1)
	notifications := false
	for i, m := range messages {
		request := &jsonrpc.Request{Method: m.method, Params: m.params, Extra: x.extra}
		if m.isCall() {
			call := &exchangeCall{id: m.id, method: m.method, params: m.params}
			request.ID = surrogateID(markerID + 1 + i)
			x.calls[int64(markerID+1+i)] = call
			x.order = append(x.order, call)
		} else {
			notifications = true
		}
		first = append(first, request)
	}
	x.waiting = len(x.order)
	if notifications {
		first = append(first, &jsonrpc.Request{ID: surrogateID(markerID), Method: methodPing, Extra: x.marker})
		x.waiting++
	}
	x.conn = newConn(id, first, func(ctx context.Context, m jsonrpc.Message) error {
		return x.post(func() { x.written(ctx, m) })
	})
	return x
}

// start feeds the messages to a new session of the SDK. run must follow.
func (x *exchange) start(server *mcp.Server, state *mcp.ServerSessionState) (err error) {
	if x.sdk, err = server.Connect(x.ctx, x.conn, &mcp.ServerSessionOptions{State: state}); err != nil {
		x.stop()
		return fmt.Errorf("connect to the SDK's server: %w", err)
	}
	x.armLockTimer()
	return nil
}

func surrogateID(n int) jsonrpc.ID {
	// A float64 is always an id.
	id, _ := jsonrpc.MakeID(float64(n))
	return id
}

// exchangeOf returns the exchange that a handler's context belongs to, or nil.
func exchangeOf(ctx context.Context) *exchange {
	x, _ := ctx.Value(exchangeKey{}).(*exchange)
	return x
}

// post hands the exchange's goroutine something to do.
func (x *exchange) post(action func()) error {
	select {
	case x.actions <- action:
		return nil
	case <-x.ended:
		return errConnClosed
	}
}

// run serves the exchange to its end. All answers are written when it returns.
func (x *exchange) run() {
	defer x.close()
	comment := time.NewTicker(commentEvery)
	defer comment.Stop()
	watch, warned := time.NewTimer(watchAfter), false
	defer watch.Stop()
	if x.session == nil {
		watch.Stop()
	}
	if x.reply != nil && x.reply.history != nil && x.reply.history.primes && x.reply.preferSSE {
		// The client is to have something to resume from before anything happens.
		x.reply.stream()
	}
	touch := time.NewTicker(x.h.opts.touchInterval())
	defer touch.Stop()
	var retain <-chan time.Time
	if x.reply != nil && x.reply.history != nil {
		tick := time.NewTicker(x.h.opts.History)
		defer tick.Stop()
		retain = tick.C
	}
	for !x.over {
		select {
		case action := <-x.actions:
			action()
		case <-comment.C:
			if x.reply != nil && x.reply.stream() {
				x.reply.comment()
			}
		case <-watch.C:
			if err := x.watch(); errors.Is(err, client.ErrSessionNotFound) {
				x.sessionEnded()
			} else if err != nil {
				if !warned {
					warned = true
					x.h.log.WarnContext(x.ctx, "cannot watch a session for cancellation, trying again", slog.Any("error", err))
				}
				watch.Reset(watchAgain)
			}
		case <-touch.C:
			x.touch()
		case <-retain:
			x.reply.history.retain()
		case <-x.showAlive():
			x.reply.history.put(kept{Alive: true})
		case <-x.h.force.Done():
			x.abort(errDraining(), errDraining())
		}
	}
}

// showAlive ticks while the stream is resumed elsewhere.
func (x *exchange) showAlive() <-chan time.Time {
	if x.alive == nil {
		return nil
	}
	return x.alive.C
}

// close ends the SDK's session and everything that was started for the exchange.
func (x *exchange) close() {
	close(x.ended)
	x.stopLockTimer()
	if x.alive != nil {
		x.alive.Stop()
	}
	for _, a := range x.asks {
		a.timer.Stop()
	}
	for _, c := range x.cancellations {
		if c.timer != nil {
			c.timer.Stop()
		}
	}
	x.stop()
	x.started.Wait()
	_ = x.conn.Close()
	if x.gone {
		// Its handlers are told to stop, but the answer does not wait until they do.
		x.h.running.Go(func() { _ = x.sdk.Close() })
		return
	}
	_ = x.sdk.Close()
}

// written takes what the SDK writes: ctx is the handler's, for all but answers.
func (x *exchange) written(ctx context.Context, m jsonrpc.Message) {
	switch m := m.(type) {
	case *jsonrpc.Response:
		x.whenResumed(func() { x.answered(m) })
	case *jsonrpc.Request:
		if m.IsCall() {
			x.whenResumed(func() { x.ask(ctx, m) })
		} else {
			x.notice(ctx, m)
		}
	}
}

// whenResumed puts off what needs the session while it is being read afresh.
func (x *exchange) whenResumed(action func()) {
	if x.resuming {
		x.deferred = append(x.deferred, action)
		return
	}
	action()
}

// answered takes the SDK's answer to a call.
func (x *exchange) answered(m *jsonrpc.Response) {
	if x.over {
		return
	}
	id, _ := m.ID.Raw().(int64)
	if id != markerID {
		call := x.calls[id]
		if call == nil || call.answered {
			return
		}
		call.answered = true
		if m.Error != nil {
			call.body = encodeResponse(call.id, nil, rpcErrorOf(m.Error))
		} else {
			result := m.Result
			if x.result != nil {
				result = x.result(result)
			}
			call.body = encodeResponse(call.id, result, nil)
			x.effect(call)
		}
	}
	x.waiting--
	if x.waiting == 0 {
		x.finish()
		return
	}
	// On a stream, each answer of a batch goes out as soon as it is there, and what it did is saved first.
	if x.reply != nil && x.reply.streaming {
		if err := x.commit(false); err != nil {
			x.refuse(err)
			return
		}
		x.flush()
	}
}

// effect puts what a call means for the session into its record.
func (x *exchange) effect(call *exchangeCall) {
	if x.session == nil {
		return
	}
	var params struct {
		Level json.RawMessage `json:"level"`
		URI   string          `json:"uri"`
	}
	if json.Unmarshal(call.params, &params) != nil {
		return
	}
	switch {
	case call.method == methodSetLevel && params.Level != nil:
		x.session.setField(fieldLogLevel, params.Level)
	case call.method == methodSubscribe && params.URI != "":
		x.session.setField(fieldSubscription+params.URI, json.RawMessage(`true`))
		x.tell = append(x.tell, presence{Subscribed: params.URI})
	case call.method == methodUnsubscribe && params.URI != "":
		x.session.setField(fieldSubscription+params.URI, nil)
		x.tell = append(x.tell, presence{Unsubscribed: params.URI})
	}
}

// tellStreams tells the session's open stream, and through the topic all replicas, what the client is subscribed to now.
func (x *exchange) tellStreams() error {
	for _, p := range x.tell {
		if p.Subscribed != "" {
			x.h.topic.announce(p.Subscribed)
			x.h.topic.subscribed(p.Subscribed)
		}
		if _, err := x.h.publish(x.ctx, x.session.id, presenceStream, marshal(p), client.PublishOptions{TTL: x.h.opts.messageTTL()}); err != nil {
			return err
		}
	}
	x.tell = nil
	return nil
}

// commit makes the request's changes durable.
func (x *exchange) commit(last bool) error {
	if last && x.ending != nil {
		return x.ending(x.ctx)
	}
	if x.session == nil {
		return nil
	}
	err := x.session.save(x.ctx, last)
	if last {
		x.stopLockTimer()
	}
	if err != nil {
		return err
	}
	return x.tellStreams()
}

// finish answers what is not answered yet, once what the request did is durable (F15).
func (x *exchange) finish() {
	if x.session != nil {
		x.session.finish()
	}
	if err := x.commit(true); err != nil {
		x.refuse(err)
		return
	}
	x.over = true
	if x.reply != nil {
		x.reply.finish(statusOK, x.bodies(), x.batch)
	}
}

// bodies are the answers not written yet. A cancelled request gets none.
func (x *exchange) bodies() [][]byte {
	var bodies [][]byte
	for _, call := range x.order {
		if call.body != nil && !call.cancelled {
			bodies = append(bodies, call.body)
		}
		call.body = nil
	}
	return bodies
}

func (x *exchange) flush() {
	for _, body := range x.bodies() {
		x.reply.event(body, false)
	}
}

// refuse ends the exchange with an error for every call that is not answered on the wire.
func (x *exchange) refuse(err error) {
	f := refusalOf(err)
	x.h.log.LogAttrs(x.ctx, f.log, "request failed", slog.String("reason", f.message), slog.Any("error", f.cause))
	x.abort(f, err)
}

// abort ends the exchange at once, its handlers cancelled with a cause.
func (x *exchange) abort(f *refusal, cause error) {
	x.over = true
	for _, call := range x.order {
		x.gone = x.gone || !call.answered
	}
	x.gone = x.gone || x.waiting > 0
	x.cancelHandlers(cause)
	if x.session != nil {
		x.session.finish()
		// While the session is being resumed, whoever does that gives the lock back.
		if !x.resuming {
			x.releaseLock()
		}
	}
	if x.reply == nil {
		return
	}
	var ids []json.RawMessage
	for _, call := range x.order {
		if !call.answered || call.body != nil {
			ids = append(ids, call.id)
		}
	}
	x.reply.refuse(f, ids, x.batch)
}

// sessionEnded ends the exchange because its session is gone (F13).
func (x *exchange) sessionEnded() {
	if x.session != nil && !x.resuming {
		x.session.grant = nil
	}
	x.abort(errSessionNotFound(), ErrSessionEnded)
}

// touch keeps the session of a long call alive (S1). Whether a write is due the store knows best.
func (x *exchange) touch() {
	if x.session == nil || x.resuming {
		return
	}
	if _, err := x.session.store.Touch(x.ctx, x.session.id); errors.Is(err, client.ErrSessionNotFound) {
		x.sessionEnded()
	} else if err != nil {
		x.h.log.WarnContext(x.ctx, "cannot keep the session of a running request alive, trying again", slog.Any("error", err))
	}
}

// notice handles a notification from the server.
func (x *exchange) notice(ctx context.Context, m *jsonrpc.Request) {
	own := exchangeOf(ctx) == x
	switch {
	case isChange(m.Method) && !own:
		// The SDK tells every connected session. This one's client is told by its standalone stream.
		return
	case m.Method == notifyCancelled:
		x.withdraw(m)
		return
	}
	data := encodeRequest("", m.Method, m.Params)
	if own && x.reply != nil && x.reply.stream() {
		x.reply.event(data, false)
		return
	}
	if x.session == nil || m.Method == "notifications/progress" {
		return
	}
	if err := x.sendStandalone(data, true); err != nil {
		x.h.log.WarnContext(x.ctx, "notification not kept for the standalone stream", slog.String("method", m.Method), slog.Any("error", err))
	}
}

// enter is called on a handler's goroutine when it starts. The context it returns ends with the exchange's reasons.
func (x *exchange) enter(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.cause != nil {
		cancel(x.cause)
	}
	id := x.nextID
	x.nextID++
	x.handlers[id] = cancel
	return ctx, func() {
		cancel(nil)
		x.mu.Lock()
		defer x.mu.Unlock()
		delete(x.handlers, id)
	}
}

func (x *exchange) cancelHandlers(cause error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.cause == nil {
		x.cause = cause
	}
	for _, cancel := range x.handlers {
		cancel(cause)
	}
}

// armLockTimer ends the handlers' contexts before the lock's TTL does (F14).
func (x *exchange) armLockTimer() {
	x.stopLockTimer()
	if x.session == nil || x.session.grant == nil {
		return
	}
	grant := x.session.grant
	left := time.Until(grant.Deadline.Add(-client.Margin(grant.TTL)))
	x.lockTimer = time.AfterFunc(left, func() { x.cancelHandlers(ErrLockExpires) })
}

func (x *exchange) stopLockTimer() {
	if x.lockTimer != nil {
		x.lockTimer.Stop()
	}
}

// releaseLock gives the lock back, if it is held, when there is nothing to save.
func (x *exchange) releaseLock() {
	x.stopLockTimer()
	x.session.release(x.ctx)
}
