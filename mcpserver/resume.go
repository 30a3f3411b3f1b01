package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
)

const (
	// streamPrefix and a POST's stream id name the session's stream that keeps the POST's events.
	streamPrefix = "post."
	// standaloneID is what event ids of the standalone stream begin with.
	standaloneID = "standalone"
	// primingRevision is the first that knows empty priming events and a server that ends its streams early.
	primingRevision = "2025-11-25"
	// aliveEvery is how often a request whose stream was resumed elsewhere shows that it still runs, and lostAfter how
	// long it may fail to until it counts as lost with its replica.
	aliveEvery = 2 * time.Second
	lostAfter  = 5 * time.Second
	// knownWithin is how long a stream may take to show that there is anything kept of it.
	knownWithin = time.Second
)

// kept is an event of a POST's stream as it is kept for resumption (F11).
type kept struct {
	// Begin holds the ids of the POST's requests; it is the first event of a stream.
	Begin []json.RawMessage `json:"begin,omitempty"`
	// Data is what the client got, or would have.
	Data json.RawMessage `json:"data,omitempty"`
	// Last marks the end of the stream.
	Last bool `json:"last,omitempty"`
	// Alive only shows that the request still runs.
	Alive bool `json:"alive,omitempty"`
}

// history keeps the events of a POST's stream in the store, each before it is written, so that the client can have them
// again from any replica. It costs a commit per event. Each is kept for twice Options.History, and a call that takes longer
// than that has what is kept retained once per Options.History: so all its events are there for that long after the last
// (F11), and are gone soon after should this replica die. When they have taken half of the session's room for messages, no
// more are kept for now: the other half is for answers, cancellations and questions.
type history struct {
	h       *Handler
	ctx     context.Context //nolint:containedctx // The request's.
	session string
	id      string // of the stream
	ids     []json.RawMessage
	primes  bool
}

// put keeps an event and returns its id, or "" if it could not be kept: then the client just cannot resume after it.
func (y *history) put(k kept) string {
	position, err := y.h.opts.Messages.Publish(y.ctx, y.session, streamPrefix+y.id, marshal(k), client.PublishOptions{
		TTL: 2 * y.h.opts.History, LowPriority: true,
	})
	if err != nil {
		if !errors.Is(err, client.ErrSessionNotFound) {
			y.h.log.WarnContext(y.ctx, "event not kept for resumption", slog.Any("error", err))
		}
		return ""
	}
	return eventID(y.id, position)
}

// retain keeps what is kept until the next time.
func (y *history) retain() {
	err := y.h.opts.Messages.Retain(y.ctx, y.session, streamPrefix+y.id, 2*y.h.opts.History)
	if err != nil && !errors.Is(err, client.ErrSessionNotFound) {
		y.h.log.WarnContext(y.ctx, "events of a long call may not be kept for resumption", slog.Any("error", err))
	}
}

func eventID(stream string, position uint64) string {
	return stream + "-" + strconv.FormatUint(position, 36)
}

// parseEventID is the reverse of eventID, for ids of POSTs' streams.
func parseEventID(id string) (stream string, position uint64, err error) {
	stream, digits, ok := strings.Cut(id, "-")
	if ok {
		position, err = strconv.ParseUint(digits, 36, 63)
	}
	if !ok || err != nil || stream == "" || len(stream) > 32 || strings.Trim(stream, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") != "" {
		return "", 0, errBadRequest("%s %q is not an event id of this server", headerEventID, id)
	}
	return stream, position, nil
}

// keepHistory makes the POST's stream one that can be resumed.
func (x *exchange) keepHistory(revision string) {
	if x.h.opts.History == 0 || x.session == nil || x.reply == nil {
		return
	}
	y := &history{h: x.h, ctx: x.ctx, session: x.session.id, id: randomID(), primes: revision >= primingRevision}
	for _, call := range x.order {
		y.ids = append(y.ids, call.id)
	}
	x.reply.history, x.reply.released = y, make(chan struct{})
	if y.primes {
		x.extra.CloseSSEStream = func(args mcp.CloseSSEStreamArgs) {
			_ = x.post(func() { x.endEarly(args.RetryAfter) })
		}
	}
}

// serve runs the exchange. One whose stream can be resumed outlives its HTTP request.
func (x *exchange) serve() {
	if x.reply.history == nil {
		x.run()
		return
	}
	x.h.running.Go(x.run)
	select {
	case <-x.ended:
	case <-x.reply.released:
	}
}

// endEarly ends the HTTP response at the handler's wish, and leaves the rest to the stream that the client opens after
// the given time.
func (x *exchange) endEarly(retry time.Duration) {
	if x.reply.detached || x.over || !x.reply.stream() {
		return
	}
	// The client comes back for the rest through the control stream.
	if err := x.watch(); err != nil {
		x.h.log.WarnContext(x.ctx, "stream not ended early", slog.Any("error", err))
		return
	}
	if retry > 0 {
		_ = writeOut(x.reply.w, x.reply.rc, fmt.Appendf(nil, "retry: %d\n\n", retry.Milliseconds()))
	}
	x.reply.detach()
}

// resumedElsewhere leaves the stream to a replica where the client has resumed it, and keeps showing that the request runs.
func (x *exchange) resumedElsewhere(stream string) {
	if x.reply == nil || x.reply.history == nil || x.reply.history.id != stream {
		return
	}
	x.reply.detach()
	x.reply.history.put(kept{Alive: true})
	if x.alive == nil {
		x.alive = time.NewTicker(aliveEvery)
	}
}

// serveResume serves a GET with Last-Event-ID: what came after that event of that stream, to the end of its requests.
func (h *Handler) serveResume(w http.ResponseWriter, r *http.Request, sess *session, lastEvent string) error {
	stream, position, err := parseEventID(lastEvent)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	// From the beginning, which holds the requests' ids, and shows that the stream exists.
	messages, err := h.opts.Messages.Subscribe(ctx, sess.id, 0, streamPrefix+stream)
	if err != nil {
		return err
	}
	if err := h.publishControl(ctx, sess, control{Resumed: stream}); err != nil {
		return err
	}
	s := &resumption{h: h, w: w, rc: http.NewResponseController(w), stream: stream, after: position, session: sess, events: make(chan client.Message)}
	var reader sync.WaitGroup
	reader.Go(func() { s.read(ctx, messages) })
	defer reader.Wait()
	defer cancel()
	return s.serve(ctx)
}

// resumption is a stream that goes on where another connection broke off.
type resumption struct {
	h       *Handler
	w       http.ResponseWriter
	rc      *http.ResponseController
	session *session
	stream  string
	after   uint64
	ids     []json.RawMessage
	events  chan client.Message // closed at the end
}

func (s *resumption) read(ctx context.Context, messages iter.Seq2[client.Message, error]) {
	defer close(s.events)
	for m, err := range messages {
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, client.ErrSessionNotFound) {
				s.h.log.ErrorContext(ctx, "subscription of a resumed stream failed", slog.Any("error", err))
			}
			return
		}
		select {
		case s.events <- m:
		case <-ctx.Done():
			return
		}
	}
}

func (s *resumption) serve(ctx context.Context) error {
	known := time.NewTimer(knownWithin)
	defer known.Stop()
	select {
	case <-ctx.Done():
		return nil
	case <-known.C:
		return errBadRequest("%s: nothing is kept of this stream: it is unknown, or ended more than %s ago", headerEventID, s.h.opts.History)
	case m, ok := <-s.events:
		if !ok {
			return errSessionNotFound()
		}
		startEvents(s.w)
		_ = writeComment(s.w, s.rc)
		if !s.deliver(m) {
			return nil
		}
	}
	comment := time.NewTicker(commentEvery)
	defer comment.Stop()
	touch := time.NewTicker(s.h.opts.touchInterval())
	defer touch.Stop()
	lost := time.NewTimer(lostAfter)
	defer lost.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.h.draining:
			_ = writeOut(s.w, s.rc, []byte("retry: 100\n\n"))
			return nil
		case m, ok := <-s.events:
			if !ok || !s.deliver(m) {
				return nil
			}
			lost.Reset(lostAfter)
		case <-lost.C:
			s.giveUp(ctx)
			return nil
		case <-comment.C:
			if writeComment(s.w, s.rc) != nil {
				return nil
			}
		case <-touch.C:
			_, _ = s.session.store.Touch(ctx, s.session.id)
		}
	}
}

// deliver writes an event if the client does not have it. false: there are no more.
func (s *resumption) deliver(m client.Message) bool {
	var k kept
	if err := json.Unmarshal(m.Payload, &k); err != nil {
		return true
	}
	if k.Begin != nil {
		s.ids = k.Begin
	}
	if k.Data != nil && m.Position > s.after && writeEvent(s.w, s.rc, eventID(s.stream, m.Position), k.Data) != nil {
		return false
	}
	return !k.Last
}

// giveUp ends a stream whose request nobody answers for any more: its replica is gone, and its handler with it.
func (s *resumption) giveUp(ctx context.Context) {
	f := errHandlerLost()
	s.h.log.WarnContext(ctx, "resumed request lost with its replica")
	y := &history{h: s.h, ctx: ctx, session: s.session.id, id: s.stream}
	for i, id := range s.ids {
		body := encodeResponse(id, nil, f.rpcError())
		_ = writeEvent(s.w, s.rc, y.put(kept{Data: body, Last: i == len(s.ids)-1}), body)
	}
}
