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

// standalone is a client's open GET stream: it carries what the server has to say outside of any request.
type standalone struct {
	h       *Handler
	id      string // of this stream
	session *session
	w       http.ResponseWriter
	rc      *http.ResponseController

	opened    uint64 // position at which this stream became the newest
	delivered uint64 // position of the last message delivered, of the session's own
	heard     uint64 // position up to which the topic was looked at
	// Where the client resumes: it tells better than the stream before how far that got.
	resumed struct {
		set              bool
		delivered, heard uint64
	}
	resources map[string]bool

	incoming chan client.Message
	lost     chan error // why no more come
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
	startEvents(w)
	s.comment()
	var reader sync.WaitGroup
	reader.Go(func() { s.read(ctx, messages) })
	s.serve(ctx)
	cancel()
	reader.Wait()
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
	id := sess.id
	s := &standalone{
		h: h, id: randomID(), session: sess, w: w, rc: http.NewResponseController(w), resources: sess.subscriptions(),
		incoming: make(chan client.Message), lost: make(chan error, 1),
	}
	if lastEvent != "" {
		if _, err := fmt.Sscanf(lastEvent, standaloneID+"-%d-%d", &s.resumed.delivered, &s.resumed.heard); err != nil {
			return nil, nil, errBadRequest("%s %q is not an event id of this server", headerEventID, lastEvent)
		}
		s.resumed.set = true
	}
	messages, err := h.opts.Messages.Subscribe(ctx, id, 0, standaloneStream, presenceStream)
	if err != nil {
		return nil, nil, err
	}
	s.opened, err = h.publish(ctx, id, presenceStream, marshal(presence{Open: s.id}), client.PublishOptions{TTL: h.opts.messageTTL()})
	return s, messages, err
}

// read hands on messages until ctx ends.
func (s *standalone) read(ctx context.Context, messages iter.Seq2[client.Message, error]) {
	for m, err := range messages {
		if err != nil {
			s.lost <- err
			return
		}
		select {
		case s.incoming <- m:
		case <-ctx.Done():
			return
		}
	}
}

// serve writes the stream until the client leaves, a newer stream takes over, the session ends or the server drains.
func (s *standalone) serve(ctx context.Context) {
	listener, leave := s.h.topic.listen()
	defer leave()
	stored, ok := s.takeOver(ctx)
	for _, m := range stored {
		ok = ok && s.deliver(ctx, m)
	}
	s.h.topic.announce(slices.Collect(maps.Keys(s.resources))...)
	comment := time.NewTicker(commentEvery)
	defer comment.Stop()
	touch := time.NewTicker(s.h.opts.touchInterval())
	defer touch.Stop()
	for ok && s.changes(0) {
		select {
		case <-ctx.Done():
			return
		case <-s.h.draining:
			// Come back at once: the balancer knows another replica.
			_ = writeOut(s.w, s.rc, []byte("retry: 100\n\n"))
			return
		case err := <-s.lost:
			s.reportLost(ctx, err)
			return
		case m := <-s.incoming:
			ok = s.deliver(ctx, m)
		case <-listener.wake:
		case <-comment.C:
			ok = s.comment()
		case <-touch.C:
			s.touch(ctx)
		}
	}
}

// takeOver reads what is stored up to this stream's own beginning, learns from the stream before it how far that got, and
// returns the messages that are left to deliver.
func (s *standalone) takeOver(ctx context.Context) (stored []client.Message, ok bool) {
	var before presence
	timeout := time.NewTimer(time.Hour)
	defer timeout.Stop()
	s.heard = s.session.since()
	for begun := false; ; {
		select {
		case <-ctx.Done():
			return nil, false
		case <-s.h.draining:
			return nil, true // serve sees it too
		case err := <-s.lost:
			s.reportLost(ctx, err)
			return nil, false
		case <-timeout.C:
			return s.due(stored), true
		case m := <-s.incoming:
			if m.Stream == standaloneStream {
				stored = append(stored, m)
				continue
			}
			var p presence
			if err := json.Unmarshal(m.Payload, &p); err != nil {
				s.h.log.ErrorContext(ctx, "message of a session's presence stream cannot be read", slog.Any("error", err))
				continue
			}
			switch {
			case p.Open == s.id:
				begun = true
				timeout.Reset(yieldTimeout)
			case p.Open != "" && begun:
				return nil, false // superseded already
			case p.Open != "" || p.Closed != "" && (before.Open == "" || before.Open == p.Closed):
				before = p
			default:
				s.subscription(m.Position, p)
			}
			if begun && before.Open == "" {
				if before.Closed != "" {
					s.heard, s.delivered = before.Heard, before.Delivered
				}
				return s.due(stored), true
			}
		}
	}
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
func (s *standalone) deliver(ctx context.Context, m client.Message) bool {
	if m.Stream == standaloneStream {
		s.delivered = m.Position
		if s.event(m.Payload) != nil {
			return false
		}
		if s.h.opts.History != 0 {
			return true // kept, for the client may have to have it again
		}
		if err := s.h.opts.Messages.Trim(ctx, s.session.id, standaloneStream, m.Position, 0); err != nil && ctx.Err() == nil {
			s.h.log.WarnContext(ctx, "delivered notification not removed, it may be delivered again", slog.Any("error", err))
		}
		return true
	}
	var p presence
	if err := json.Unmarshal(m.Payload, &p); err != nil {
		s.h.log.ErrorContext(ctx, "message of a session's presence stream cannot be read", slog.Any("error", err))
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
	case position <= s.session.position: // part of the record that was read
	case p.Subscribed != "":
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
	_, err := s.h.publish(ctx, s.session.id, presenceStream,
		marshal(presence{Closed: s.id, Delivered: s.delivered, Heard: s.heard}), client.PublishOptions{TTL: s.h.opts.messageTTL()})
	if err == nil {
		err = s.h.opts.Messages.Trim(ctx, s.session.id, presenceStream, s.opened-1, 0)
	}
	if err != nil && !errors.Is(err, client.ErrSessionNotFound) {
		s.h.log.WarnContext(ctx, "end of a standalone stream not noted, the next one may repeat notifications", slog.Any("error", err))
	}
}

func (s *standalone) touch(ctx context.Context) {
	if _, err := s.session.store.Touch(ctx, s.session.id); err != nil && ctx.Err() == nil && !errors.Is(err, client.ErrSessionNotFound) {
		s.h.log.WarnContext(ctx, "cannot keep the session of an open stream alive, trying again", slog.Any("error", err))
	}
	s.h.topic.announce(slices.Collect(maps.Keys(s.resources))...)
}

func (s *standalone) reportLost(ctx context.Context, err error) {
	if !errors.Is(err, client.ErrSessionNotFound) && ctx.Err() == nil {
		s.h.log.ErrorContext(ctx, "subscription of a standalone stream failed", slog.Any("error", err))
	}
}

func (s *standalone) comment() bool { return writeComment(s.w, s.rc) == nil }

// subscriptions are the resources that the session is subscribed to.
func (s *session) subscriptions() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	uris := map[string]bool{}
	for field := range s.rec.fields {
		if uri, ok := strings.CutPrefix(field, fieldSubscription); ok {
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
