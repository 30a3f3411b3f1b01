package mcpserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"math"
	"mime"
	"net/http"
	"slices"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
)

const (
	headerSessionID = "Mcp-Session-Id"
	headerRevision  = "Mcp-Protocol-Version"
	headerEventID   = "Last-Event-ID"
)

// The protocol revisions that differ in what the transport does.
const (
	// assumedRevision is that of a request that does not name one (F18), and the only one with batches.
	assumedRevision = "2025-03-26"
	modernRevision  = "2026-07-28"
)

// incoming is a POST's body and what its headers say about it.
type incoming struct {
	messages []*message
	batch    bool
	revision string // as the header names it; "": it does not
	jsonOK   bool
	streamOK bool
}

// revisionOf is the revision that a session's request goes by.
func (in *incoming) revisionOf(sess *session) string {
	if in.revision != "" {
		return in.revision
	}
	return sess.rec.revision()
}

func (in *incoming) single(method string) *message {
	if len(in.messages) == 1 && !in.batch && in.messages[0].method == method {
		return in.messages[0]
	}
	return nil
}

func (h *Handler) servePOST(w http.ResponseWriter, r *http.Request) {
	if mediaType, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || mediaType != "application/json" {
		h.refuse(w, r, errContentType(), nil)
		return
	}
	body, err := h.readBody(w, r)
	if err != nil {
		h.refuse(w, r, err, nil)
		return
	}
	in := &incoming{}
	in.jsonOK, in.streamOK = accepts(r.Header.Values("Accept"))
	if in.messages, in.batch, err = parseBody(body); err != nil {
		h.refuse(w, r, errParse(err), nil)
		return
	}
	if !in.jsonOK && !in.streamOK {
		h.refuse(w, r, errAccept("application/json or text/event-stream"), in)
		return
	}
	if in.revision, err = revisionHeader(r); err != nil {
		h.refuse(w, r, err, in)
		return
	}
	if in.isModern() {
		r.Body = io.NopCloser(bytes.NewReader(body))
		if m := in.single(methodListen); m != nil && m.isCall() && h.opts.Store != nil && h.server(r) != nil {
			h.serveListen(w, r, m)
			return
		}
		h.serveModern(w, r, in.streamOK)
		return
	}
	if err := h.serveHandshakeEra(w, r, in); err != nil {
		h.refuse(w, r, err, in)
	}
}

// isModern tells the eras apart (N2): by what the message says of itself, by its method, by its header. initialize
// belongs to the handshake era, whatever header comes with it.
func (in *incoming) isModern() bool {
	for _, m := range in.messages {
		if m.method == methodDiscover || m.method == methodListen || m.metaRevision() >= modernRevision {
			return true
		}
	}
	return in.revision >= modernRevision && in.single(methodInitialize) == nil
}

func (h *Handler) serveHandshakeEra(w http.ResponseWriter, r *http.Request, in *incoming) error {
	initialize := slices.ContainsFunc(in.messages, func(m *message) bool { return m.method == methodInitialize })
	if initialize && (in.batch || !in.messages[0].isCall()) {
		return errBadRequest("initialize must be a request of its own, not part of a batch, with an id")
	}
	if !initialize && in.revision != "" && !slices.Contains(mcp.SupportedProtocolVersions(), in.revision) {
		return errBadRequest("%s %q is not supported, want one of %s", headerRevision, in.revision, strings.Join(mcp.SupportedProtocolVersions(), ", "))
	}
	server := h.server(r)
	if server == nil {
		return errBadRequest("no server for this request")
	}
	if h.opts.Store == nil {
		return h.serveSessionless(w, r, server, in)
	}
	id, err := sessionID(r)
	if err != nil {
		return err
	}
	if initialize {
		return h.serveInitialize(w, r, server, in, id)
	}
	if id == "" {
		return errBadRequest("%s is missing: start with initialize", headerSessionID)
	}
	return h.serveSession(w, r, server, in, id)
}

// sessionID reads the session's id from the header: "" if there is none.
func sessionID(r *http.Request) (string, error) {
	values := r.Header.Values(headerSessionID)
	if len(values) == 0 {
		return "", nil
	}
	if len(values) > 1 {
		return "", errBadRequest("%s is given %d times", headerSessionID, len(values))
	}
	id := values[0]
	if len(id) == 0 || len(id) > 128 {
		return "", errBadRequest("%s has %d characters, want 1 to 128", headerSessionID, len(id))
	}
	for i := range len(id) {
		if id[i] < 0x21 || id[i] > 0x7e {
			return "", errBadRequest("%s has a character that is not visible ASCII", headerSessionID)
		}
	}
	return id, nil
}

func revisionHeader(r *http.Request) (string, error) {
	values := r.Header.Values(headerRevision)
	if len(values) > 1 {
		return "", errBadRequest("%s is given %d times", headerRevision, len(values))
	}
	return r.Header.Get(headerRevision), nil
}

// accepts reads Accept leniently: wildcards count, and so does a header that is not there.
func accepts(values []string) (jsonOK, streamOK bool) {
	if len(values) == 0 {
		return true, true
	}
	for part := range strings.SplitSeq(strings.Join(values, ","), ",") {
		mediaType, _, _ := strings.Cut(part, ";")
		switch strings.ToLower(strings.TrimSpace(mediaType)) {
		case "*/*":
			jsonOK, streamOK = true, true
		case "application/json", "application/*":
			jsonOK = true
		case "text/event-stream", "text/*":
			streamOK = true
		}
	}
	return jsonOK, streamOK
}

// serveInitialize opens a session. It takes no lock: nobody knows the session yet.
func (h *Handler) serveInitialize(w http.ResponseWriter, r *http.Request, server *mcp.Server, in *incoming, offered string) error {
	user := userOf(r.Context())
	if offered != "" {
		_, err := h.open(r.Context(), offered, user, false)
		if err == nil {
			return errBadRequest("initialize with the %s of a live session: end it first, or leave the header out", headerSessionID)
		}
		if !errors.Is(err, client.ErrSessionNotFound) {
			return err
		}
		// A session that is gone, or somebody else's: a fresh one, never under the offered id.
	}
	m := in.messages[0]
	id := randomID()
	// The values that handlers set during initialize are kept with the new session.
	sess := &session{h: h, id: id, store: h.opts.Store, ttl: h.opts.SessionTTL, rec: &record{
		fields: map[string]json.RawMessage{}, values: map[string]json.RawMessage{},
	}}
	// Not cancelled by a disconnect (F15): the handshake era's requests run on.
	x := h.newExchange(context.WithoutCancel(r.Context()), r, nil, id, in.messages)
	x.draft = sess
	x.reply = newReply(w, in.streamOK, in.jsonOK, !h.opts.JSON)
	x.reply.held = true
	x.ending = func(ctx context.Context) error { return h.createSession(ctx, w, m, x, user) }
	if err := x.start(server, nil); err != nil {
		return err
	}
	x.run()
	return nil
}

// createSession stores the session that initialize has opened. An initialize that was refused leaves none behind.
func (h *Handler) createSession(ctx context.Context, w http.ResponseWriter, m *message, x *exchange, user identity) error {
	var answer struct {
		Result *struct {
			ProtocolVersion string `json:"protocolVersion"`
		} `json:"result"`
	}
	if err := json.Unmarshal(x.order[0].body, &answer); err != nil || answer.Result == nil {
		return nil
	}
	rec, err := newRecord(m.params, answer.Result.ProtocolVersion, user, h.topic.now())
	if err != nil {
		return err
	}
	x.draft.finish()
	x.draft.mu.Lock()
	apply(rec, nil, x.draft.values)
	x.draft.mu.Unlock()
	data, err := rec.encode()
	if err != nil {
		return err
	}
	opts := client.CreateOptions{ID: x.draft.id, TTL: h.opts.SessionTTL}
	_, err = h.opts.Store.Create(ctx, data, opts)
	if errors.Is(err, client.ErrOutcomeUnknown) {
		// A node died over it. Nobody else has the id, so a session that is there now is the one that was stored.
		if _, err = h.opts.Store.Create(ctx, data, opts); errors.Is(err, client.ErrSessionExists) {
			err = nil
		}
	}
	if err != nil {
		return err
	}
	w.Header().Set(headerSessionID, x.draft.id)
	return nil
}

// serveSession serves the messages of a session.
func (h *Handler) serveSession(w http.ResponseWriter, r *http.Request, server *mcp.Server, in *incoming, id string) error {
	// Not cancelled by a disconnect (F15).
	ctx := context.WithoutCancel(r.Context())
	locked := slices.ContainsFunc(in.messages, needsLock)
	opening, cancel := context.WithCancel(ctx)
	defer context.AfterFunc(h.force, cancel)()
	defer cancel()
	sess, err := h.open(opening, id, userOf(ctx), locked)
	if err != nil {
		return err
	}
	rest, err := h.passOn(ctx, sess, in)
	if sess.touchDue {
		h.topic.announce(slices.Collect(maps.Keys(sess.subscriptions()))...)
	}
	if err == nil && len(rest) == 0 {
		err = sess.save(ctx, true)
	}
	if err != nil {
		sess.release(ctx)
		return err
	}
	if len(rest) == 0 {
		w.WriteHeader(statusAccepted)
		return nil
	}
	h.topic.subscribed(slices.Collect(maps.Keys(sess.subscriptions()))...)
	x := h.newExchange(ctx, r, sess, id, rest)
	x.batch = in.batch
	if len(x.order) > 0 {
		x.reply = newReply(w, in.streamOK, in.jsonOK, !h.opts.JSON)
		x.keepHistory(in.revisionOf(sess))
	}
	// The SDK takes the notification in the state before it, or it would be one too many.
	state, err := sess.rec.state()
	if err == nil {
		markInitialized(sess, rest)
		if x.reply == nil {
			// The 202 says that its effect is there for the next request to see.
			err = sess.save(ctx, false)
		}
	}
	if err == nil {
		err = x.start(server, state)
	}
	if err != nil {
		sess.release(ctx)
		return err
	}
	if x.reply == nil {
		w.WriteHeader(statusAccepted)
		// What the notification sets off runs on after the 202.
		h.running.Go(x.run)
		return nil
	}
	x.serve()
	return nil
}

// needsLock tells whether a message runs under the lock (F4): all but what has to work while a long handler holds it.
func needsLock(m *message) bool {
	return !m.isResponse() && m.method != methodPing && m.method != notifyCancelled
}

// passOn hands on the answers and cancellations among the messages, and returns the rest.
func (h *Handler) passOn(ctx context.Context, sess *session, in *incoming) (rest []*message, err error) {
	if revision := in.revisionOf(sess); in.batch && revision != assumedRevision {
		return nil, errBadRequest("batches belong to revision %s, this session has %s", assumedRevision, revision)
	}
	for _, m := range in.messages {
		switch {
		case m.isResponse():
			err = h.publishAnswer(ctx, sess, m)
		case m.method == notifyCancelled && m.isNotification():
			err = h.publishCancel(ctx, sess, m)
		default:
			rest = append(rest, m)
		}
		if err != nil {
			return nil, err
		}
	}
	return rest, nil
}

// markInitialized puts notifications/initialized, if it is among the messages, into the record.
func markInitialized(sess *session, messages []*message) {
	if _, ok := sess.rec.fields[fieldInitialized]; ok {
		return
	}
	for _, m := range messages {
		if m.method == notifyInitialized {
			params := m.params
			if firstByte(params) != '{' {
				params = json.RawMessage(`{}`)
			}
			sess.setField(fieldInitialized, params)
			return
		}
	}
}

// publishAnswer hands a client's answer to the request that waits for it, wherever it runs. No lock is taken. What nobody
// waits for is dropped there, or here if it cannot be an answer of ours.
func (h *Handler) publishAnswer(ctx context.Context, sess *session, m *message) error {
	id, ok := isAskID(m.id)
	if !ok {
		return nil
	}
	return h.publishControl(ctx, sess, control{Answer: id, Result: m.result, Error: m.err})
}

// publishCancel hands a cancellation to the request that it is about, if that runs. One that names none is ignored.
func (h *Handler) publishCancel(ctx context.Context, sess *session, m *message) error {
	var params struct {
		RequestID json.RawMessage `json:"requestId"`
	}
	if json.Unmarshal(m.params, &params) != nil || params.RequestID == nil || string(params.RequestID) == "null" {
		return nil
	}
	return h.publishControl(ctx, sess, control{Cancel: params.RequestID})
}

// publishControl publishes to the control stream.
func (h *Handler) publishControl(ctx context.Context, sess *session, c control) error {
	_, err := h.publish(ctx, sess.id, controlStream, marshal(c), client.PublishOptions{TTL: controlTTL})
	return err
}

// publish publishes to a stream of a session. If the session's room for messages is full, the oldest ones of the streams
// where readers have nearly always had them give way; but not to one of low priority.
func (h *Handler) publish(ctx context.Context, id, stream string, payload []byte, opts client.PublishOptions) (uint64, error) {
	if opts.RequestID == "" {
		opts.RequestID = randomID()
	}
	position, err := h.opts.Messages.Publish(ctx, id, stream, payload, opts)
	for _, keep := range []int{100, 10, 1} {
		if !errors.Is(err, client.ErrTooManyMessages) || opts.LowPriority {
			break
		}
		h.log.WarnContext(ctx, "a session's room for messages is full, the oldest give way", slog.Int("keep", keep))
		for _, other := range []string{controlStream, presenceStream, standaloneStream} {
			if err := h.opts.Messages.Trim(ctx, id, other, math.MaxInt64, keep); err != nil {
				return 0, err
			}
		}
		position, err = h.opts.Messages.Publish(ctx, id, stream, payload, opts)
	}
	return position, err
}

// serveDELETE ends a session, waiting for no lock. What runs of it is told through its control stream's end.
func (h *Handler) serveDELETE(w http.ResponseWriter, r *http.Request) {
	id, err := h.existing(r)
	if err == nil {
		_, err = h.open(r.Context(), id, userOf(r.Context()), false)
	}
	if err == nil {
		_, err = h.opts.Store.Destroy(context.WithoutCancel(r.Context()), id)
	}
	if err != nil {
		h.refuse(w, r, err, nil)
		return
	}
	w.WriteHeader(statusNoContent)
}

// existing reads the headers of a request that must name a session.
func (h *Handler) existing(r *http.Request) (string, error) {
	revision, err := revisionHeader(r)
	if err != nil {
		return "", err
	}
	if revision != "" && !slices.Contains(mcp.SupportedProtocolVersions(), revision) {
		return "", errBadRequest("%s %q is not supported, want one of %s", headerRevision, revision, strings.Join(mcp.SupportedProtocolVersions(), ", "))
	}
	id, err := sessionID(r)
	if err == nil && id == "" {
		err = errBadRequest("%s is missing", headerSessionID)
	}
	return id, err
}
