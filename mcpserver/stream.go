package mcpserver

import (
	"encoding/json"
	"net/http"
	"time"
)

// commentEvery keeps idle streams open through proxies, which cut them after 15 s at the strictest (F19).
const commentEvery = 12 * time.Second

// writeTimeout is how long a client may take to accept what is written to it. One that takes longer is given up, and its
// request runs on without it: it must not hold up a handler, nor a lock.
const writeTimeout = 30 * time.Second

// reply writes the answer to one POST: one JSON body, or, once there is something to say before the end, a stream of
// server-sent events. It is used by one goroutine. Once the client is gone, what is written is dropped.
type reply struct {
	w         http.ResponseWriter
	rc        *http.ResponseController
	streamOK  bool // the client accepts a stream
	jsonOK    bool
	preferSSE bool
	held      bool // not before the end: headers that come with the end are missing
	streaming bool
	done      bool
}

func newReply(w http.ResponseWriter, streamOK, jsonOK, preferSSE bool) *reply {
	return &reply{w: w, rc: http.NewResponseController(w), streamOK: streamOK, jsonOK: jsonOK, preferSSE: preferSSE}
}

// stream makes the answer a stream, if the client accepts one.
func (r *reply) stream() bool {
	if !r.streamOK || r.done || r.held {
		return false
	}
	if !r.streaming {
		r.streaming = true
		startEvents(r.w)
	}
	return true
}

// event writes a message to the stream, which has to be one.
func (r *reply) event(data []byte) {
	_ = writeEvent(r.w, r.rc, data)
}

// comment shows proxies that the stream lives.
func (r *reply) comment() {
	_ = writeComment(r.w, r.rc)
}

// finish writes the last answers: the JSON body, or events at the end of the stream.
func (r *reply) finish(status int, bodies [][]byte, batch bool) {
	if r.done {
		return
	}
	r.held = false
	if !r.streaming && status == statusOK && (r.preferSSE || !r.jsonOK) {
		r.stream()
	}
	r.done = true
	if r.streaming {
		for _, body := range bodies {
			r.event(body)
		}
		return
	}
	_ = r.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	r.w.Header().Set("Content-Type", "application/json")
	r.w.WriteHeader(status)
	if batch {
		_, _ = r.w.Write(joinArray(bodies))
	} else if len(bodies) > 0 {
		_, _ = r.w.Write(bodies[0])
	}
}

// refuse answers with a refusal: as the whole answer, or, if the stream has begun, under the ids left to answer.
func (r *reply) refuse(f *refusal, ids []json.RawMessage, batch bool) {
	if r.done {
		return
	}
	if r.streaming {
		bodies := make([][]byte, len(ids))
		for i, id := range ids {
			bodies[i] = encodeResponse(id, nil, f.rpcError())
		}
		r.finish(statusOK, bodies, batch)
		return
	}
	r.done = true
	f.write(r.w, ids, batch)
}

// startEvents sends the header of a stream.
func startEvents(w http.ResponseWriter) {
	header := w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-cache, no-transform")
	header.Set("X-Accel-Buffering", "no")
	w.WriteHeader(statusOK)
}

func writeEvent(w http.ResponseWriter, rc *http.ResponseController, data []byte) error {
	event := make([]byte, 0, len(data)+32)
	event = append(event, "event: message\ndata: "...)
	event = append(event, data...)
	event = append(event, "\n\n"...)
	return writeOut(w, rc, event)
}

func writeComment(w http.ResponseWriter, rc *http.ResponseController) error {
	return writeOut(w, rc, []byte(": keep-alive\n\n"))
}

func writeOut(w http.ResponseWriter, rc *http.ResponseController, data []byte) error {
	// Not every writer has deadlines; those of net/http do.
	_ = rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := w.Write(data); err != nil {
		return err
	}
	return rc.Flush()
}
