package mcpserver

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
)

// standalone is a client's open GET stream: it carries what the server has to say outside of any request.
type standalone struct {
	h       *Handler
	id      string // of this stream, for takeovers
	session *session
	w       http.ResponseWriter
	rc      *http.ResponseController

	events chan []byte // from the SDK
	ended  chan struct{}
}

// serveGET serves the standalone stream, on any replica. The newest stream of a session takes over from older ones.
func (h *Handler) serveGET(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	s, messages, takeover, err := h.openStandalone(ctx, w, r)
	if err != nil {
		h.refuse(w, r, err, nil)
		return
	}
	server := h.server(r)
	if server == nil {
		h.refuse(w, r, errBadRequest("no server for this request"), nil)
		return
	}
	sdk, err := s.connect(ctx, server)
	if err != nil {
		h.refuse(w, r, err, nil)
		return
	}
	startEvents(w)
	s.comment()

	incoming := make(chan client.Message)
	gone := make(chan error, 1)
	var reader sync.WaitGroup
	reader.Go(func() {
		for m, err := range messages {
			if err != nil {
				gone <- err
				return
			}
			select {
			case incoming <- m:
			case <-s.ended:
				return
			}
		}
	})
	s.serve(ctx, incoming, gone, takeover)
	close(s.ended)
	cancel()
	reader.Wait()
	_ = sdk.Close()
}

// openStandalone checks the request and subscribes. takeover is the position from which on this stream is the newest.
func (h *Handler) openStandalone(ctx context.Context, w http.ResponseWriter, r *http.Request) (_ *standalone, messages func(func(client.Message, error) bool), takeover uint64, err error) {
	if _, streamOK := accepts(r.Header.Values("Accept")); !streamOK {
		return nil, nil, 0, errAccept("text/event-stream")
	}
	id, err := h.existing(r)
	if err != nil {
		return nil, nil, 0, err
	}
	if r.Header.Get(headerEventID) != "" {
		return nil, nil, 0, errBadRequest("%s: this server sends no event ids, so there is no stream to resume", headerEventID)
	}
	sess, err := h.open(ctx, id, userOf(ctx), false)
	if err != nil {
		return nil, nil, 0, err
	}
	s := &standalone{
		h: h, id: rand.Text(), session: sess, w: w, rc: http.NewResponseController(w),
		events: make(chan []byte), ended: make(chan struct{}),
	}
	// What is stored of the standalone stream is due; of the control stream only what comes from now on.
	if messages, err = h.opts.Messages.Subscribe(ctx, id, 0, standaloneStream, controlStream); err != nil {
		return nil, nil, 0, err
	}
	takeover, err = h.opts.Messages.Publish(ctx, id, controlStream, marshal(control{Takeover: s.id}), client.PublishOptions{TTL: time.Minute})
	return s, messages, takeover, err
}

// connect makes the stream a session of the SDK, which hears of changed lists and resources on this replica.
func (s *standalone) connect(ctx context.Context, server *mcp.Server) (*mcp.ServerSession, error) {
	state, err := s.session.rec.state()
	if err != nil {
		return nil, err
	}
	var c *conn
	c = newConn(s.session.id, nil, func(_ context.Context, m jsonrpc.Message) error {
		request, ok := m.(*jsonrpc.Request)
		if !ok {
			return nil
		}
		if request.IsCall() {
			// The SDK's keep-alive: the stream's comments do what it is for. Nothing else asks here.
			c.feed(&jsonrpc.Response{ID: request.ID, Result: json.RawMessage(`{}`)})
			return nil
		}
		select {
		case s.events <- encodeRequest("", request.Method, request.Params):
			return nil
		case <-s.ended:
			return errConnClosed
		}
	})
	// The stream's end closes the connection, so that the SDK does not wait for answers that never come.
	context.AfterFunc(ctx, func() { _ = c.Close() })
	return server.Connect(context.WithoutCancel(ctx), c, &mcp.ServerSessionOptions{State: state})
}

// serve writes the stream until the client leaves, a newer stream takes over, the session ends or the server drains.
func (s *standalone) serve(ctx context.Context, incoming <-chan client.Message, gone <-chan error, takeover uint64) {
	comment := time.NewTicker(commentEvery)
	defer comment.Stop()
	touch := time.NewTicker(s.h.opts.touchInterval())
	defer touch.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.h.draining:
			// Come back at once: the balancer knows another replica.
			_ = writeOut(s.w, s.rc, []byte("retry: 100\n\n"))
			return
		case err := <-gone:
			if !errors.Is(err, client.ErrSessionNotFound) && ctx.Err() == nil {
				s.h.log.ErrorContext(ctx, "subscription of a standalone stream failed", slog.Any("error", err))
			}
			return
		case data := <-s.events:
			if !s.event(data) {
				return
			}
		case m := <-incoming:
			if m.Stream == controlStream {
				if s.superseded(m, takeover) {
					return
				}
				continue
			}
			if !s.event(m.Payload) {
				return
			}
			if err := s.h.opts.Messages.Trim(ctx, s.session.id, standaloneStream, m.Position); err != nil && ctx.Err() == nil {
				s.h.log.WarnContext(ctx, "delivered notification not removed, it may be delivered again", slog.Any("error", err))
			}
		case <-comment.C:
			if !s.comment() {
				return
			}
		case <-touch.C:
			if _, err := s.session.store.Touch(ctx, s.session.id); err != nil && ctx.Err() == nil && !errors.Is(err, client.ErrSessionNotFound) {
				s.h.log.WarnContext(ctx, "cannot keep the session of an open stream alive, trying again", slog.Any("error", err))
			}
		}
	}
}

// superseded tells whether a control message says that a newer stream has taken over.
func (s *standalone) superseded(m client.Message, takeover uint64) bool {
	var c control
	return m.Position > takeover && json.Unmarshal(m.Payload, &c) == nil && c.Takeover != "" && c.Takeover != s.id
}

func (s *standalone) event(data []byte) bool {
	return writeEvent(s.w, s.rc, data) == nil
}

func (s *standalone) comment() bool {
	return writeComment(s.w, s.rc) == nil
}
