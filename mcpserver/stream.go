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

	history  *history      // nil: the stream cannot be resumed
	detached bool          // events are kept, and written no more
	released chan struct{} // closed when detached
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
		r.begin()
	}
	return true
}

// begin is the start of a stream that can be resumed. Where the client knows what that is, it gets an event without data,
// to resume from if nothing else comes.
func (r *reply) begin() {
	if r.history == nil {
		return
	}
	if id := r.history.put(kept{Begin: r.history.ids}); id != "" && r.history.primes {
		_ = writeOut(r.w, r.rc, []byte("id: "+id+"\ndata: \n\n"))
	}
}

// detach ends the HTTP response; what comes is kept for who resumes the stream.
func (r *reply) detach() {
	if !r.detached {
		r.detached = true
		close(r.released)
	}
}

// event writes a message to the stream, which has to be one.
func (r *reply) event(data []byte, last bool) {
	id := ""
	if r.history != nil {
		id = r.history.put(kept{Data: data, Last: last})
	}
	if !r.detached {
		_ = writeEvent(r.w, r.rc, id, data)
	}
}

// comment shows proxies that the stream lives.
func (r *reply) comment() {
	if !r.detached {
		_ = writeComment(r.w, r.rc)
	}
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
		for i, body := range bodies {
			r.event(body, i == len(bodies)-1)
		}
		if len(bodies) == 0 && r.history != nil {
			r.history.put(kept{Last: true})
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

func writeEvent(w http.ResponseWriter, rc *http.ResponseController, id string, data []byte) error {
	event := make([]byte, 0, len(data)+96)
	event = append(event, "event: message\n"...)
	if id != "" {
		event = append(append(append(event, "id: "...), id...), '\n')
	}
	event = append(event, "data: "...)
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
