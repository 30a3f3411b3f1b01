package mcpserver_test

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/mcpserver"
)

func withHistory(o *mcpserver.Options) { o.History = time.Minute }

// eventWithID reads the next event of a stream with its id.
func (s *stream) eventWithID() (id, data string) {
	s.t.Helper()
	for {
		line, err := s.reader.ReadString('\n')
		if err != nil {
			return "", ""
		}
		line = strings.TrimRight(line, "\n")
		if v, ok := strings.CutPrefix(line, "id: "); ok {
			id = v
		}
		if v, ok := strings.CutPrefix(line, "data: "); ok {
			return id, v
		}
	}
}

func (s *stream) cut() { _ = s.resp.Body.Close() }

// resumable is a session with a call on replica 0 that has written a progress notification and waits for goOn.
func resumable(r *replicas, revision string) (id string, s *stream) {
	id = r.openWith(revision, `{"elicitation":{}}`)
	return id, r.requestTo(0, http.MethodPost, id, call(`"c"`, "set_then_wait", `{}`))
}

// F11 (C62): a stream that was cut goes on, on another replica, with what came after the last event received, to the final
// response; each event once.
func TestF11Resume(t *testing.T) {
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) {
			r := newReplicas(t, 3, func(o *mcpserver.Options) { mode(o); withHistory(o) })
			id, s := resumable(r, "2025-11-25")
			first, data := s.eventWithID()
			if data == "" { // the priming event, where streams are preferred
				first, data = s.eventWithID()
			}
			if first == "" || !strings.Contains(data, "notifications/progress") {
				t.Fatalf("event %q %q", first, data)
			}
			s.cut()
			resumed := r.requestTo(1, http.MethodGet, id, "", "Last-Event-ID", first)
			goOn <- struct{}{}
			last, data := resumed.eventWithID()
			if last == "" || last == first || !strings.Contains(data, `"id":"c"`) || !strings.Contains(data, "done") {
				t.Fatalf("event %q %q", last, data)
			}
			if _, data := resumed.eventWithID(); data != "" {
				t.Fatalf("after the final response: %q", data)
			}
			// C58: all of it again, though it has ended, from either point; nothing after the last event.
			again := r.requestTo(2, http.MethodGet, id, "", "Last-Event-ID", first)
			if got, data := again.eventWithID(); got != last || !strings.Contains(data, "done") {
				t.Fatalf("again: %q %q", got, data)
			}
			if _, data := r.requestTo(2, http.MethodGet, id, "", "Last-Event-ID", last).eventWithID(); data != "" {
				t.Fatalf("after the end: %q", data)
			}
		})
	}
}

// F11: an event id opens nothing of another stream or session, and an unknown one is refused.
func TestF11ForeignEventIDs(t *testing.T) {
	r := newReplicas(t, 2, withHistory)
	_, s := resumable(r, "2025-11-25")
	first, _ := s.eventWithID()
	goOn <- struct{}{}
	other := r.open()
	for _, eventID := range []string{first, "UNKNOWN-1", "x", "-", "standalone-x", "a b-1", strings.Repeat("A", 40) + "-1"} {
		if a := r.request(http.MethodGet, other, "", "Last-Event-ID", eventID).all(); a.status != 400 {
			t.Errorf("%q: %d %s", eventID, a.status, a.body)
		}
	}
	for m := s.event(); m != nil; m = s.event() {
		if m["method"] == "" && m["result"] == nil {
			t.Errorf("got %v", m)
		}
	}
}

// F11 (C74): priming events only for revisions that know them.
func TestF11PrimingEvent(t *testing.T) {
	for revision, primes := range map[string]bool{"2025-03-26": false, "2025-06-18": false, "2025-11-25": true} {
		r := newReplicas(t, 2, withHistory)
		id := r.openWith(revision, `{}`)
		eventID, data := r.request(http.MethodPost, id, call("1", "echo", `{}`)).eventWithID()
		if (data == "") != primes || eventID == "" {
			t.Errorf("%s: %q %q", revision, eventID, data)
		}
	}
	r := newReplicas(t, 1, nil)
	if a := r.post(r.open(), call("1", "echo", `{}`)); strings.Contains(a.body, "id: ") {
		t.Errorf("event ids without resumption: %s", a.body)
	}
}

// F11: the handler ends the response early, and the client gets the rest where it resumes.
func TestF11EndEarly(t *testing.T) {
	r := newReplicas(t, 2, withHistory)
	id := r.open()
	s := r.requestTo(0, http.MethodPost, id, call("1", "close_stream", `{}`))
	first, _ := s.eventWithID()
	if rest := s.all(); !strings.Contains(rest.body, "retry: 10") || strings.Contains(rest.body, "result") {
		t.Fatalf("got %s", rest.body)
	}
	resumed := r.requestTo(1, http.MethodGet, id, "", "Last-Event-ID", first)
	goOn <- struct{}{}
	if _, data := resumed.eventWithID(); !strings.Contains(data, "done") {
		t.Fatalf("got %q", data)
	}
}

// mortal is a store that a test can cut a replica off from, as the death of its process would.
type mortal struct {
	*memory
	dead *atomic.Bool
}

func (m mortal) Publish(ctx context.Context, id, stream string, payload []byte, opts client.PublishOptions) (uint64, error) {
	if m.dead.Load() {
		return 0, client.ErrUnavailable
	}
	return m.memory.Publish(ctx, id, stream, payload, opts)
}

func (m mortal) Subscribe(ctx context.Context, id string, after uint64, streams ...string) (iter.Seq2[client.Message, error], error) {
	messages, err := m.memory.Subscribe(ctx, id, after, streams...)
	if err != nil {
		return nil, err
	}
	return func(yield func(client.Message, error) bool) {
		for c, err := range messages {
			if !m.dead.Load() && !yield(c, err) {
				return
			}
		}
	}, nil
}

// F11: after the replica that ran the stream is gone, what was written before is replayed, and the request ends with an error
// that says that its handler was lost.
func TestF11HandlerLost(t *testing.T) {
	n := 0
	var dead atomic.Bool
	r := newReplicas(t, 2, func(o *mcpserver.Options) {
		withHistory(o)
		if n == 0 {
			store, _ := o.Store.(*memory)
			o.Messages = mortal{memory: store, dead: &dead}
		}
		n++
	})
	id, s := resumable(r, "2025-11-25")
	priming, _ := s.eventWithID()
	s.eventWithID()
	dead.Store(true)
	s.cut()
	resumed := r.requestTo(1, http.MethodGet, id, "", "Last-Event-ID", priming)
	if _, data := resumed.eventWithID(); !strings.Contains(data, "notifications/progress") {
		t.Fatalf("got %q", data)
	}
	_, data := resumed.eventWithID()
	if !strings.Contains(data, `"id":"c"`) || !strings.Contains(data, "handler was lost") {
		t.Fatalf("got %q", data)
	}
	goOn <- struct{}{}
}

// F11: the standalone stream resumes too: what the client has not seen comes again, in order, and nothing else.
func TestF11ResumeStandalone(t *testing.T) {
	r := newReplicas(t, 3, withHistory)
	id := r.open()
	r.post(id, `{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":"debug"}}`)
	s := r.requestTo(0, http.MethodGet, id, "")
	var ids []string
	for range 3 {
		r.post(id, call("1", "log_later", `{}`))
		eventID, data := s.eventWithID()
		if eventID == "" || !strings.Contains(data, "notifications/message") {
			t.Fatalf("event %q %q", eventID, data)
		}
		ids = append(ids, eventID)
	}
	s.cut()
	r.post(id, call("1", "log_later", `{}`))
	resumed := r.requestTo(1, http.MethodGet, id, "", "Last-Event-ID", ids[0])
	var got []string
	for range 3 {
		eventID, _ := resumed.eventWithID()
		got = append(got, eventID)
	}
	if got[0] != ids[1] || got[1] != ids[2] || got[2] == "" {
		t.Fatalf("got %v after %v", got, ids)
	}
	// A stream that does not resume gets only what is new.
	fresh := r.requestTo(2, http.MethodGet, id, "")
	if m := resumed.event(); m != nil {
		t.Fatalf("the older stream got %v", m)
	}
	r.post(id, call("1", "log_later", `{}`))
	if eventID, _ := fresh.eventWithID(); eventID == "" || strings.Contains(fmt.Sprint(got), eventID) {
		t.Fatalf("the fresh stream got %q", eventID)
	}
}

// F11, M4: events kept for resumption leave room for what must get through: a call with more questions and answers than a session
// may store messages gets each answer.
func TestF11HistoryLeavesRoom(t *testing.T) {
	const n = maxStored + 200
	r := newReplicas(t, 2, withHistory)
	id := r.open()
	s := r.requestTo(0, http.MethodPost, id, call("1", "ask", fmt.Sprintf(`{"by":%d}`, n)))
	for i := range n {
		if a := r.requestTo(1, http.MethodPost, id, accept(s.event()["id"], fmt.Sprint(i))).all(); a.status != http.StatusAccepted {
			t.Fatalf("answer %d: %d %s", i, a.status, a.body)
		}
	}
	if got := text(s.event()); !strings.HasPrefix(got, `["0","1",`) || !strings.HasSuffix(got, fmt.Sprintf(`"%d"]`, n-1)) {
		t.Errorf("result %.100s", got)
	}
}
