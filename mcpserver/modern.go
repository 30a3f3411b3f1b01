package mcpserver

import (
	"maps"
	"net/http"
	"sync"
	"time"
)

// modernWriter stands between the SDK, which serves requests of the modern era, and the client. The SDK is silent until a
// handler has something to say, and proxies cut what is silent; so there is a comment after each commentEvery (F19). An
// answer that was to be JSON becomes a stream for it.
type modernWriter struct {
	w  http.ResponseWriter
	rc *http.ResponseController

	// The SDK sets its headers while comments may be written.
	header http.Header

	mu        sync.Mutex
	began     bool // the header has been sent
	streaming bool // as a stream
	converted bool // though the answer was to be JSON
	over      bool
	timer     *time.Timer // nil: the client does not accept streams
}

// serveModern serves a request of the modern era.
func (h *Handler) serveModern(w http.ResponseWriter, r *http.Request, streamOK bool) {
	mw := &modernWriter{w: w, rc: http.NewResponseController(w), header: http.Header{}}
	if streamOK {
		mw.mu.Lock()
		mw.timer = time.AfterFunc(commentEvery, mw.comment)
		mw.mu.Unlock()
	}
	defer mw.end()
	// A copy, since the SDK sets fields of it, which net/http reads when a comment begins the answer.
	h.modern.ServeHTTP(mw, r.WithContext(r.Context()))
}

// end is called when the SDK has written everything. Nothing is written after it.
func (mw *modernWriter) end() {
	mw.mu.Lock()
	defer mw.mu.Unlock()
	mw.over = true
	if mw.timer != nil {
		mw.timer.Stop()
	}
}

// comment shows that the request still runs.
func (mw *modernWriter) comment() {
	mw.mu.Lock()
	defer mw.mu.Unlock()
	if mw.over || mw.began && !mw.streaming {
		return
	}
	if !mw.began {
		mw.began, mw.streaming, mw.converted = true, true, true
		startEvents(mw.w)
	}
	if writeComment(mw.w, mw.rc) == nil {
		mw.timer.Reset(commentEvery)
	}
}

// Header implements http.ResponseWriter.
func (mw *modernWriter) Header() http.Header { return mw.header }

// WriteHeader implements http.ResponseWriter.
func (mw *modernWriter) WriteHeader(status int) {
	mw.mu.Lock()
	defer mw.mu.Unlock()
	mw.begin(status)
}

func (mw *modernWriter) begin(status int) {
	if mw.began {
		return
	}
	mw.began = true
	mw.streaming = mw.header.Get("Content-Type") == "text/event-stream"
	header := mw.w.Header()
	maps.Copy(header, mw.header)
	if mw.streaming {
		header.Set("X-Accel-Buffering", "no")
	}
	mw.w.WriteHeader(status)
}

// Write is called by the SDK with a whole event, or a whole body, at a time.
func (mw *modernWriter) Write(data []byte) (int, error) {
	mw.mu.Lock()
	defer mw.mu.Unlock()
	mw.begin(statusOK)
	if mw.converted && mw.header.Get("Content-Type") != "text/event-stream" {
		return len(data), writeEvent(mw.w, mw.rc, "", data)
	}
	return mw.w.Write(data)
}

// FlushError is what the SDK flushes with.
func (mw *modernWriter) FlushError() error {
	mw.mu.Lock()
	defer mw.mu.Unlock()
	mw.begin(statusOK)
	return mw.rc.Flush()
}
