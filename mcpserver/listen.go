package mcpserver

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"sync"
	"time"
)

// listenWriter stands between the SDK, which serves subscriptions/listen of the modern era, and the client. The SDK
// checks the request, acknowledges it and keeps it open, but knows of changes on this replica only; so its notifications of
// changes are left out, and those of the topic, which has them too, take their place.
type listenWriter struct {
	http.ResponseWriter
	rc *http.ResponseController
	id json.RawMessage // of the request: what notifications are tagged with

	mu           sync.Mutex
	acknowledged chan struct{}
	agreed       listenFilter // set before acknowledged is closed
	over         bool
}

// listenFilter is what a client listens to.
type listenFilter struct {
	Tools     bool     `json:"toolsListChanged"`
	Prompts   bool     `json:"promptsListChanged"`
	Resources bool     `json:"resourcesListChanged"`
	URIs      []string `json:"resourceSubscriptions"`
}

func (f listenFilter) wants(e topicEvent) bool {
	switch e.Method {
	case notifyToolsList:
		return f.Tools
	case notifyPromptsList:
		return f.Prompts
	case notifyResourcesList:
		return f.Resources
	default:
		return slices.Contains(f.URIs, e.uri)
	}
}

// serveListen serves subscriptions/listen.
func (h *Handler) serveListen(w http.ResponseWriter, r *http.Request, m *message) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	lw := &listenWriter{ResponseWriter: w, rc: http.NewResponseController(w), id: m.id, acknowledged: make(chan struct{})}
	w.Header().Set("X-Accel-Buffering", "no")
	heard := h.topic.now()
	wake := make(chan struct{}, 1)
	leave := h.topic.listen(func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	})
	defer leave()
	var injector sync.WaitGroup
	injector.Go(func() {
		defer cancel()
		select {
		case <-lw.acknowledged:
			h.inject(ctx, lw, wake, heard)
		case <-ctx.Done():
		}
	})
	h.modern.ServeHTTP(lw, r.WithContext(ctx))
	cancel()
	injector.Wait()
}

// inject writes the topic's events until the client leaves or the server drains.
func (h *Handler) inject(ctx context.Context, lw *listenWriter, wake <-chan struct{}, heard uint64) {
	h.topic.announce(lw.agreed.URIs...)
	comment := time.NewTicker(commentEvery)
	defer comment.Stop()
	renew := time.NewTicker(h.opts.touchInterval())
	defer renew.Stop()
	for {
		events, position := h.topic.after(heard, lw.agreed.wants)
		heard = position
		for _, e := range events {
			if !lw.event(encodeRequest("", e.Method, tagged(e.Params, lw.id))) {
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-h.draining:
			lw.finish()
			return
		case <-wake:
		case <-comment.C:
			if !lw.raw([]byte(": keep-alive\n\n")) {
				return
			}
		case <-renew.C:
			h.topic.announce(lw.agreed.URIs...)
		}
	}
}

const metaSubscriptionID = "io.modelcontextprotocol/subscriptionId"

// tagged puts the listen request's id into the params' _meta.
func tagged(params, id json.RawMessage) json.RawMessage {
	var fields, meta map[string]json.RawMessage
	// What is not an object has nothing to keep.
	_ = json.Unmarshal(params, &fields)
	_ = json.Unmarshal(fields["_meta"], &meta)
	if fields == nil {
		fields = map[string]json.RawMessage{}
	}
	if meta == nil {
		meta = map[string]json.RawMessage{}
	}
	meta[metaSubscriptionID] = id
	fields["_meta"] = marshal(meta)
	return marshal(fields)
}

// FlushError is what the SDK flushes with.
func (lw *listenWriter) FlushError() error {
	lw.mu.Lock()
	defer lw.mu.Unlock()
	return lw.rc.Flush()
}

func (lw *listenWriter) WriteHeader(status int) {
	lw.mu.Lock()
	defer lw.mu.Unlock()
	lw.ResponseWriter.WriteHeader(status)
}

// Write is called by the SDK with a whole event at a time, or with a body that is no stream.
func (lw *listenWriter) Write(data []byte) (int, error) {
	lw.mu.Lock()
	defer lw.mu.Unlock()
	if lw.over {
		return len(data), nil
	}
	var m struct {
		Method string `json:"method"`
		Params struct {
			Notifications listenFilter `json:"notifications"`
		} `json:"params"`
	}
	if _, payload, ok := bytes.Cut(data, []byte("data: ")); ok && json.Unmarshal(bytes.TrimSpace(payload), &m) == nil {
		if isChange(m.Method) {
			return len(data), nil
		}
		if m.Method == "notifications/subscriptions/acknowledged" {
			lw.agreed = m.Params.Notifications
			defer close(lw.acknowledged)
		}
	}
	return lw.ResponseWriter.Write(data)
}

func (lw *listenWriter) event(data []byte) bool {
	return lw.raw(append(append([]byte("event: message\ndata: "), data...), "\n\n"...))
}

func (lw *listenWriter) raw(data []byte) bool {
	lw.mu.Lock()
	defer lw.mu.Unlock()
	return writeOut(lw.ResponseWriter, lw.rc, data) == nil
}

// finish ends the subscription with its result, which tells the client that it ended in order.
func (lw *listenWriter) finish() {
	lw.event(encodeResponse(lw.id, marshal(map[string]any{
		"resultType": "complete", "_meta": map[string]any{metaSubscriptionID: lw.id},
	}), nil))
	lw.mu.Lock()
	defer lw.mu.Unlock()
	lw.over = true
}
