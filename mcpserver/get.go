package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sessiond/sessiond/client"
)

// presenceStream of a session says where its standalone stream is, so that there is one at a time, whatever replica it is on,
// and what the client is subscribed to changes on it.
const presenceStream = "presence"

// yieldTimeout is how long a new standalone stream waits for the older one to say how far it got. One that does not answer
// is dead; what it may have delivered is delivered again.
const yieldTimeout = time.Second

// presence is a message of the presence stream.
type presence struct {
	// Open names a stream that opens, and takes over from older ones.
	Open string `json:"open,omitempty"`
	// Closed names a stream that has closed. It delivered the session's own messages up to Delivered, and the topic's up to
	// Heard.
	Closed    string `json:"closed,omitempty"`
	Delivered uint64 `json:"delivered,omitempty"`
	Heard     uint64 `json:"heard,omitempty"`
	// Probe asks nothing of anyone: who published it knows what was said before it.
	Probe string `json:"probe,omitempty"`
	// Subscribed and Unsubscribed are resources.
	Subscribed   string `json:"subscribed,omitempty"`
	Unsubscribed string `json:"unsubscribed,omitempty"`
}

// standalone is a client's open GET stream: it carries what the server has to say outside of any request. As there may be very
// many of them, nothing waits for it but the goroutine that net/http gives it, which takes what is published to the session. All
// else is done by timers, in turn with it.
type standalone struct {
	h      *Handler
	ctx    context.Context //nolint:containedctx // The request's, and cut short when the stream is over.
	hangUp context.CancelFunc
	id     string // of this stream
	w      http.ResponseWriter
	rc     *http.ResponseController

	// Of the session.
	sessionID string
	position  uint64 // as of which it was read
	opened    uint64 // position at which this stream became the newest
	// Where the client resumes: it tells better than the stream before how far that got.
	resumed struct {
		set              bool
		delivered, heard uint64
	}

	turn chan struct{} // held by who writes, or uses what is below
	// Until it is known how far the stream before got, what is stored is kept.
	open      bool
	starting  *starting
	over      bool
	delivered uint64 // position of the last message delivered, of the session's own
	heard     uint64 // position up to which the topic was looked at
	resources map[string]bool

	wake, comments, touches *time.Timer
	woken                   atomic.Bool // and not looked yet
	touching                sync.WaitGroup
}

// starting is what a stream knows until it is open.
type starting struct {
	begun  bool     // it is the newest
	before presence // of the stream before it
	stored []client.Message
	// timeout ends the wait for the stream before it.
	timeout *time.Timer
}

// serveGET serves the standalone stream, on any replica. The newest stream of a session takes over from older ones.
func (h *Handler) serveGET(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	sess, lastEvent, err := h.openGET(ctx, r)
	if err == nil && lastEvent != "" && !strings.HasPrefix(lastEvent, standaloneID) {
		if err = h.serveResume(w, r, sess, lastEvent); err == nil {
			return
		}
	}
	var s *standalone
	var messages iter.Seq2[client.Message, error]
	if err == nil {
		s, messages, err = h.openStandalone(ctx, w, sess, lastEvent)
	}
	if err != nil {
		h.refuse(w, r, err, nil)
		return
	}
	s.hangUp = cancel
	s.serve(messages)
	s.leave(context.WithoutCancel(ctx))
}

// standaloneIsOpen tells whether the session's client has a standalone stream open, on any replica. One whose replica has
// just died may still count.
func (h *Handler) standaloneIsOpen(ctx context.Context, id string) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	probe := randomID()
	if _, err := h.publish(ctx, id, presenceStream, marshal(presence{Probe: probe}), client.PublishOptions{TTL: time.Minute}); err != nil {
		return false, err
	}
	messages, err := h.opts.Messages.Subscribe(ctx, id, 0, presenceStream)
	if err != nil {
		return false, err
	}
	open := ""
	for m, err := range messages {
		if err != nil {
			return false, err
		}
		var p presence
		if err := json.Unmarshal(m.Payload, &p); err != nil {
			continue
		}
		switch {
		case p.Probe == probe:
			return open != "", nil
		case p.Open != "":
			open = p.Open
		case p.Closed == open:
			open = ""
		}
	}
	return false, ctx.Err()
}

// openGET checks the request. lastEvent: what the client resumes after, if it does.
func (h *Handler) openGET(ctx context.Context, r *http.Request) (sess *session, lastEvent string, err error) {
	if _, streamOK := accepts(r.Header.Values("Accept")); !streamOK {
		return nil, "", errAccept("text/event-stream")
	}
	id, err := h.existing(r)
	if err != nil {
		return nil, "", err
	}
	lastEvent = r.Header.Get(headerEventID)
	if lastEvent != "" && h.opts.History == 0 {
		return nil, "", errBadRequest("%s: this server sends no event ids, so there is no stream to resume", headerEventID)
	}
	if h.server(r) == nil {
		return nil, "", errBadRequest("no server for this request")
	}
	sess, err = h.open(ctx, id, userOf(ctx), false)
	return sess, lastEvent, err
}

// openStandalone subscribes, and says that this is the newest stream.
func (h *Handler) openStandalone(ctx context.Context, w http.ResponseWriter, sess *session, lastEvent string) (*standalone, iter.Seq2[client.Message, error], error) {
	s := &standalone{
		h: h, ctx: ctx, id: randomID(), w: w, rc: http.NewResponseController(w),
		sessionID: sess.id, position: sess.position, heard: sess.since(), resources: sess.subscriptions(),
		turn: make(chan struct{}, 1), starting: &starting{},
	}
	if lastEvent != "" {
		if _, err := fmt.Sscanf(lastEvent, standaloneID+"-%d-%d", &s.resumed.delivered, &s.resumed.heard); err != nil {
			return nil, nil, errBadRequest("%s %q is not an event id of this server", headerEventID, lastEvent)
		}
		s.resumed.set = true
	}
	messages, err := h.opts.Messages.Subscribe(ctx, s.sessionID, 0, standaloneStream, presenceStream)
	if err != nil {
		return nil, nil, err
	}
	s.opened, err = h.publish(ctx, s.sessionID, presenceStream, marshal(presence{Open: s.id}), client.PublishOptions{TTL: h.opts.messageTTL()})
	return s, messages, err
}

// serve writes the stream until the client leaves, a newer stream takes over, the session ends or the server drains.
func (s *standalone) serve(messages iter.Seq2[client.Message, error]) {
	startEvents(s.w)
	s.inTurn(func() bool {
		s.wake = time.AfterFunc(commentEvery, s.look)
		s.comments = time.AfterFunc(commentEvery, func() { s.inTurn(s.comment) })
		s.touches = time.AfterFunc(s.h.opts.touchInterval(), s.touch)
		return s.comment()
	})
	leave := s.h.topic.listen(func() {
		if s.woken.CompareAndSwap(false, true) {
			s.wake.Reset(0)
		}
	})
	defer func() {
		leave()
		s.end()
	}()
	for m, err := range messages {
		if err != nil {
			s.reportLost(err)
			return
		}
		if !s.inTurn(func() bool { return s.take(m) }) {
			return
		}
	}
}

// inTurn does something with the stream, unless it is over. If f returns false, it is from then on.
func (s *standalone) inTurn(f func() bool) bool {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	if !s.over && !f() {
		s.over = true
		s.hangUp()
	}
	return !s.over
}

// end waits for what timers do.
func (s *standalone) end() {
	s.inTurn(func() bool { return false })
	for _, t := range []*time.Timer{s.wake, s.comments, s.touches} {
		t.Stop()
	}
	s.touching.Wait()
}

// look tells of what has changed, and ends the stream if the server drains.
func (s *standalone) look() {
	s.inTurn(func() bool {
		s.woken.Store(false)
		select {
		case <-s.h.draining:
			// Come back at once: the balancer knows another replica.
			_ = writeOut(s.w, s.rc, []byte("retry: 100\n\n"))
			return false
		default:
			return !s.open || s.changes(0)
		}
	})
}

// take handles a message; false ends the stream.
func (s *standalone) take(m client.Message) bool {
	if s.open {
		return s.deliver(m)
	}
	// What is stored up to this stream's own beginning tells how far the stream before it got; or that stream says so now.
	st := s.starting
	if m.Stream == standaloneStream {
		st.stored = append(st.stored, m)
		return true
	}
	var p presence
	if err := json.Unmarshal(m.Payload, &p); err != nil {
		s.h.log.ErrorContext(s.ctx, "message of a session's presence stream cannot be read", slog.Any("error", err))
		return true
	}
	switch {
	case p.Open == s.id:
		st.begun = true
		if st.before.Open != "" {
			st.timeout = time.AfterFunc(yieldTimeout, func() { s.inTurn(s.start) })
		}
	case p.Open != "" && st.begun:
		return false // superseded already
	case p.Open != "" || p.Closed != "" && (st.before.Open == "" || st.before.Open == p.Closed):
		st.before = p
	default:
		s.subscription(m.Position, p)
	}
	if st.begun && st.before.Open == "" {
		return s.start()
	}
	return true
}

// start delivers what is stored, and opens the stream for what comes.
func (s *standalone) start() bool {
	if s.open {
		return true
	}
	st := s.starting
	s.open, s.starting = true, nil
	if st.timeout != nil {
		st.timeout.Stop()
	}
	if st.before.Open == "" && st.before.Closed != "" {
		s.heard, s.delivered = st.before.Heard, st.before.Delivered
	}
	for _, m := range s.due(st.stored) {
		if !s.deliver(m) {
			return false
		}
	}
	s.h.topic.announce(slices.Collect(maps.Keys(s.resources))...)
	return s.changes(0)
}

// due is what the client does not have yet.
func (s *standalone) due(stored []client.Message) []client.Message {
	if s.resumed.set {
		s.delivered, s.heard = s.resumed.delivered, s.resumed.heard
	}
	return slices.DeleteFunc(stored, func(m client.Message) bool { return m.Position <= s.delivered })
}

// event writes a notification, with an id if the stream can be resumed.
func (s *standalone) event(data []byte) error {
	id := ""
	if s.h.opts.History != 0 {
		id = fmt.Sprintf(standaloneID+"-%d-%d", s.delivered, s.heard)
	}
	return writeEvent(s.w, s.rc, id, data)
}

// deliver handles a message; false ends the stream.
func (s *standalone) deliver(m client.Message) bool {
	if m.Stream == standaloneStream {
		s.delivered = m.Position
		if s.event(m.Payload) != nil {
			return false
		}
		if s.h.opts.History != 0 {
			return true // kept, for the client may have to have it again
		}
		if err := s.h.opts.Messages.Trim(s.ctx, s.sessionID, standaloneStream, m.Position, 0); err != nil && s.ctx.Err() == nil {
			s.h.log.WarnContext(s.ctx, "delivered notification not removed, it may be delivered again", slog.Any("error", err))
		}
		return true
	}
	var p presence
	if err := json.Unmarshal(m.Payload, &p); err != nil {
		s.h.log.ErrorContext(s.ctx, "message of a session's presence stream cannot be read", slog.Any("error", err))
		return true
	}
	if p.Open != "" && m.Position > s.opened {
		// What happened before the newer stream opened is for this one to tell.
		s.changes(m.Position)
		return false
	}
	known := s.resources[p.Subscribed]
	s.subscription(m.Position, p)
	if p.Subscribed != "" && !known && s.resources[p.Subscribed] {
		return s.catchUp(m.Position, p.Subscribed)
	}
	return true
}

// catchUp tells of the changes of a resource that happened after the client subscribed to it but were heard of before that.
func (s *standalone) catchUp(since uint64, uri string) bool {
	events, _ := s.h.topic.after(since, func(e topicEvent) bool { return e.uri == uri && e.position <= s.heard })
	for _, e := range events {
		if s.event(encodeRequest("", e.Method, e.Params)) != nil {
			return false
		}
	}
	return true
}

// subscription follows what the client subscribes to while the stream is open.
func (s *standalone) subscription(position uint64, p presence) {
	switch {
	case position <= s.position: // part of the record that was read
	case p.Subscribed != "":
		if s.resources == nil {
			s.resources = map[string]bool{}
		}
		s.resources[p.Subscribed] = true
	case p.Unsubscribed != "":
		delete(s.resources, p.Unsubscribed)
	}
}

// changes tells the client of the topic's events that concern it, before a position if that is not 0.
func (s *standalone) changes(before uint64) bool {
	events, heard := s.h.topic.after(s.heard, func(e topicEvent) bool {
		return (before == 0 || e.position < before) && (e.Method != notifyResourceUpdate || s.resources[e.uri])
	})
	for _, e := range events {
		s.heard = max(s.heard, e.position)
		if s.event(encodeRequest("", e.Method, e.Params)) != nil {
			return false
		}
	}
	s.heard = max(s.heard, heard)
	return true
}

// leave says how far the stream got, for the next one, and removes what was said before this stream opened. What was said
// since stays: a newer stream may not have read it yet.
func (s *standalone) leave(ctx context.Context) {
	_, err := s.h.publish(ctx, s.sessionID, presenceStream,
		marshal(presence{Closed: s.id, Delivered: s.delivered, Heard: s.heard}), client.PublishOptions{TTL: s.h.opts.messageTTL()})
	if err == nil {
		err = s.h.opts.Messages.Trim(ctx, s.sessionID, presenceStream, s.opened-1, 0)
	}
	if err != nil && !errors.Is(err, client.ErrSessionNotFound) {
		s.h.log.WarnContext(ctx, "end of a standalone stream not noted, the next one may repeat notifications", slog.Any("error", err))
	}
}

// touch keeps the session alive, and the word of what it is subscribed to.
func (s *standalone) touch() {
	var uris []string
	if !s.inTurn(func() bool {
		uris = slices.Collect(maps.Keys(s.resources))
		s.touching.Add(1)
		return true
	}) {
		return
	}
	defer s.touching.Done()
	if _, err := s.h.opts.Store.Touch(s.ctx, s.sessionID); err != nil && s.ctx.Err() == nil && !errors.Is(err, client.ErrSessionNotFound) {
		s.h.log.WarnContext(s.ctx, "cannot keep the session of an open stream alive, trying again", slog.Any("error", err))
	}
	s.h.topic.announce(uris...)
	s.inTurn(func() bool {
		s.touches.Reset(s.h.opts.touchInterval())
		return true
	})
}

func (s *standalone) reportLost(err error) {
	if !errors.Is(err, client.ErrSessionNotFound) && s.ctx.Err() == nil {
		s.h.log.ErrorContext(s.ctx, "subscription of a standalone stream failed", slog.Any("error", err))
	}
}

// comment shows proxies that the stream lives.
func (s *standalone) comment() bool {
	s.comments.Reset(commentEvery)
	return writeComment(s.w, s.rc) == nil
}

// subscriptions are the resources that the session is subscribed to.
func (s *session) subscriptions() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var uris map[string]bool // hardly any session has some
	for field := range s.rec.fields {
		if uri, ok := strings.CutPrefix(field, fieldSubscription); ok {
			if uris == nil {
				uris = map[string]bool{}
			}
			uris[uri] = true
		}
	}
	return uris
}

// since is the topic's position when the session began: what happened before does not concern it.
func (s *session) since() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var position uint64
	_ = json.Unmarshal(s.rec.fields[fieldSince], &position)
	return position
}
