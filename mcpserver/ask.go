package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"

	"github.com/sessiond/sessiond/client"
)

// The streams of a session.
const (
	// controlStream carries what a request under way must hear, wherever it runs.
	controlStream = "control"
	// standaloneStream carries what is due on the client's standalone stream (GET), wherever that is open, and keeps it
	// while it is not.
	standaloneStream = "standalone"
)

// control is a message of the control stream: one of Answer, Cancel, Claim and Resumed is set. The keys are short, so that
// an answer fits whenever the POST that brought it did (M4).
type control struct {
	// Answer is the id of the question that Result or Error answers.
	Answer string          `json:"answer,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
	Error  json.RawMessage `json:"error,omitempty"`
	// Cancel is the id of the request that the client cancelled, as it sent it.
	Cancel json.RawMessage `json:"cancel,omitempty"`
	// Claim is the position of a Cancel, of which the sender runs a request; By is a name for the sender.
	Claim uint64 `json:"claim,omitempty"`
	By    string `json:"by,omitempty"`
	// Resumed is the id of the POST's stream that the client has resumed on some replica.
	Resumed string `json:"resumed,omitempty"`
}

// capabilityFor is what a client must have declared to be asked.
var capabilityFor = map[string]string{
	methodElicit:        "elicitation",
	methodCreateMessage: "sampling",
	methodListRoots:     "roots",
}

const (
	// controlTTL is how long an answer or a cancellation waits for a replica that is reconnecting.
	controlTTL = 5 * time.Minute
	// claimsWithin is how long, from when an exchange reads its own claim to a cancellation, others' claims may still come.
	claimsWithin = 200 * time.Millisecond
)

// cancellation is one of the client's that names a request of this exchange. The client's ids need not be unique among the
// requests in flight, and another that has this id may run on any replica; which one the client means then nobody knows,
// and to cancel neither is the lesser fault. So whoever runs such a request claims the cancellation on the control
// stream, and cancels only if no other claim is there soon after its own.
type cancellation struct {
	id        json.RawMessage
	by        string
	contested bool
	timer     *time.Timer
}

// ask sends a handler's question to the client (F8, F9). The handler goes on, with the answer or an error, when the SDK is
// fed a response.
func (x *exchange) ask(ctx context.Context, m *jsonrpc.Request) {
	fail := func(err error) { x.conn.feed(&jsonrpc.Response{ID: m.ID, Error: err}) }
	if m.Method == methodPing && exchangeOf(ctx) != x {
		// The SDK's keep-alive. A connection that lives as long as one request needs none.
		x.conn.feed(&jsonrpc.Response{ID: m.ID, Result: json.RawMessage(`{}`)})
		return
	}
	if x.session == nil {
		fail(ErrNoSession)
		return
	}
	if x.over {
		fail(ErrNoStream)
		return
	}
	if capability := capabilityFor[m.Method]; capability != "" && !x.session.declares(capability) {
		fail(fmt.Errorf("%w: %s", ErrNoCapability, capability))
		return
	}
	onOwnStream := x.reply != nil && x.reply.streamOK
	if !onOwnStream {
		// A notification has no stream of its own, nor has a client that accepts JSON alone: the standalone one serves.
		switch open, err := x.h.standaloneIsOpen(x.ctx, x.session.id); {
		case err != nil:
			fail(fmt.Errorf("look for a stream to ask the client on: %w", err))
			return
		case !open:
			fail(ErrNoStream)
			return
		}
	}
	// The subscription comes before the question, or a quick answer would be missed; the save and the release come before
	// it too, so that what the client does next finds the handler's changes and a free lock.
	if err := x.watch(); err != nil {
		fail(fmt.Errorf("ask the client: %w", err))
		return
	}
	if err := x.session.save(x.ctx, true); err != nil {
		fail(fmt.Errorf("save the session before asking the client: %w", err))
		return
	}
	x.stopLockTimer()
	id := randomID()
	x.asks[id] = &ask{id: m.ID, timer: time.AfterFunc(x.h.opts.AskTimeout, func() {
		_ = x.post(func() {
			x.resolve(id, &jsonrpc.Response{Error: fmt.Errorf("%w (%s)", ErrAskTimeout, x.h.opts.AskTimeout)})
		})
	})}
	question := encodeRequest(id, m.Method, m.Params)
	if onOwnStream {
		x.reply.stream()
		x.reply.event(question, false)
		return
	}
	if err := x.sendStandalone(question, false); err != nil {
		x.resolve(id, &jsonrpc.Response{Error: fmt.Errorf("ask the client on its standalone stream: %w", err)})
	}
}

// sendStandalone sends a message on the session's standalone stream, wherever that is. One of low priority is refused when
// many are kept for a stream that nobody opens.
func (x *exchange) sendStandalone(data []byte, lowPriority bool) error {
	opts := client.PublishOptions{TTL: x.h.opts.messageTTL(), LowPriority: lowPriority}
	_, err := x.h.publish(x.ctx, x.session.id, standaloneStream, data, opts)
	return err
}

func (s *session) declares(capability string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.declares(capability)
}

// withdraw passes on that the handler no longer waits for an answer. The handler may have gone on already.
func (x *exchange) withdraw(m *jsonrpc.Request) {
	var params map[string]json.RawMessage
	if json.Unmarshal(m.Params, &params) != nil {
		return
	}
	for id, a := range x.asks {
		if string(marshal(a.id.Raw())) == string(params["requestId"]) {
			a.timer.Stop()
			delete(x.asks, id)
			params["requestId"] = marshal(id)
			withdrawal := encodeRequest("", m.Method, marshal(params))
			if x.reply != nil && x.reply.streaming {
				x.reply.event(withdrawal, false)
			} else if err := x.sendStandalone(withdrawal, false); err != nil {
				x.h.log.WarnContext(x.ctx, "client not told that its answer is no longer needed", slog.Any("error", err))
			}
			return
		}
	}
}

// resolve takes the answer to a question, from the client or instead of it. A second answer finds no question.
func (x *exchange) resolve(id string, response *jsonrpc.Response) {
	a, ok := x.asks[id]
	if !ok || x.over {
		return
	}
	a.timer.Stop()
	delete(x.asks, id)
	response.ID = a.id
	x.answers = append(x.answers, response)
	if x.resuming {
		return
	}
	x.resuming = true
	// To have the lock again can take as long as it takes others; meanwhile the stream wants comments.
	x.started.Go(func() {
		err := x.session.resume(x.ctx)
		if x.post(func() { x.resumed(err) }) != nil {
			// The exchange ended meanwhile; nobody else gives back what was just acquired.
			x.releaseLock()
		}
	})
}

// resumed lets the handlers go on with their answers, on the session read afresh; or with an error if that failed.
func (x *exchange) resumed(err error) {
	x.resuming = false
	if err != nil {
		if x.session.locker != nil {
			err = fmt.Errorf("%w: %w", ErrLockNotRegained, err)
		}
		x.h.log.WarnContext(x.ctx, "handler's wait for the client ends with an error", slog.Any("error", err))
	} else {
		x.armLockTimer()
	}
	answers, deferred := x.answers, x.deferred
	x.answers, x.deferred = nil, nil
	for _, response := range answers {
		if err != nil {
			response = &jsonrpc.Response{ID: response.ID, Error: err}
		}
		x.conn.feed(response)
	}
	for _, action := range deferred {
		x.whenResumed(action)
	}
}

// watch subscribes to the session's control stream. It returns once the subscription stands.
func (x *exchange) watch() error {
	if x.watching || x.session == nil {
		return nil
	}
	messages, err := x.h.opts.Messages.Subscribe(x.ctx, x.session.id, x.session.position, controlStream)
	if err != nil {
		return err
	}
	x.watching = true
	x.started.Go(func() {
		for m, err := range messages {
			switch {
			case errors.Is(err, client.ErrSessionNotFound):
				_ = x.post(x.sessionEnded)
			case err != nil:
				if x.ctx.Err() == nil {
					x.h.log.ErrorContext(x.ctx, "subscription to a session's control stream failed", slog.Any("error", err))
				}
			case x.post(func() { x.control(m) }) != nil:
				return
			}
		}
	})
	return nil
}

// control handles a message of the control stream.
func (x *exchange) control(m client.Message) {
	var c control
	if err := json.Unmarshal(m.Payload, &c); err != nil {
		x.h.log.ErrorContext(x.ctx, "message of a session's control stream cannot be read", slog.Any("error", err))
		return
	}
	switch {
	case c.Answer != "":
		response := &jsonrpc.Response{Result: c.Result}
		if c.Error != nil {
			rpcError := &jsonrpc.Error{}
			if err := json.Unmarshal(c.Error, rpcError); err != nil {
				rpcError.Message = fmt.Sprintf("the client's error cannot be read: %v", err)
			}
			response.Error = rpcError
		}
		x.resolve(c.Answer, response)
	case c.Cancel != nil:
		x.claim(m.Position, c.Cancel)
	case c.Claim != 0:
		x.claimed(c.Claim, c.By)
	case c.Resumed != "":
		x.resumedElsewhere(c.Resumed)
	}
}

// running returns the calls with the client's id that are not answered, by the id that the SDK knows them under.
func (x *exchange) running(id json.RawMessage) map[int64]*exchangeCall {
	found := map[int64]*exchangeCall{}
	for n, call := range x.calls {
		if string(call.id) == string(id) && !call.answered {
			found[n] = call
		}
	}
	return found
}

// claim answers a cancellation, the one at the position, if it names a request of this exchange (F10).
func (x *exchange) claim(position uint64, id json.RawMessage) {
	if len(x.running(id)) == 0 {
		return
	}
	by := randomID()
	x.cancellations[position] = &cancellation{id: id, by: by}
	x.started.Go(func() {
		for {
			_, err := x.h.publish(x.ctx, x.session.id, controlStream, marshal(control{Claim: position, By: by}),
				client.PublishOptions{TTL: controlTTL})
			if err == nil || errors.Is(err, client.ErrSessionNotFound) || x.ctx.Err() != nil {
				return
			}
			x.h.log.WarnContext(x.ctx, "cannot tell that a cancelled request runs here, trying again", slog.Any("error", err))
			select {
			case <-time.After(claimsWithin):
			case <-x.ctx.Done():
				return
			}
		}
	})
}

// claimed takes a claim to a cancellation. The wait for others begins with the own one, which shows that the subscription is
// up to date.
func (x *exchange) claimed(position uint64, by string) {
	c := x.cancellations[position]
	switch {
	case c == nil:
	case by != c.by:
		c.contested = true
	case c.timer == nil:
		c.timer = time.AfterFunc(claimsWithin, func() {
			_ = x.post(func() {
				delete(x.cancellations, position)
				x.cancelCall(c)
			})
		})
	}
}

// cancelCall cancels the handler of the request that a cancellation names, and suppresses its answer.
func (x *exchange) cancelCall(c *cancellation) {
	if c.contested {
		x.h.log.WarnContext(x.ctx, "cancellation ignored: several requests in flight have its id", slog.String("id", string(c.id)))
		return
	}
	for n, call := range x.running(c.id) {
		call.cancelled = true
		x.conn.feed(&jsonrpc.Request{Method: notifyCancelled, Params: marshal(map[string]any{"requestId": n})})
	}
}

// isAskID tells whether an id can be one that ask made. What cannot is not worth a commit.
func isAskID(id json.RawMessage) (string, bool) {
	var s string
	if json.Unmarshal(id, &s) != nil || len(s) != len(randomID()) {
		return "", false
	}
	return s, true
}
