package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
)

// The streams of the topic.
const (
	eventStream = "events" // what changed
	uriStream   = "uris"   // which resources anyone is subscribed to: objects of a URI and how many seconds that holds
)

const (
	// eventTTL is how long a change can still be told to a client that had no stream open, or a replica that was cut off.
	eventTTL = 5 * time.Minute
	// maxEvents bounds the changes that a replica remembers, and those that wait for the store.
	maxEvents = 4096
	// topicTTL is that of the topic's session, which replicas keep alive.
	topicTTL   = time.Hour
	topicRetry = 500 * time.Millisecond
	// topicPatience is how many attempts in a row may fail before that is logged.
	topicPatience = 6
	// keptEvents is how many changes stay in the store when its room for them is full, for replicas that are cut off.
	keptEvents = 250
	// maxAnnounced is how many bytes of URIs go into one message.
	maxAnnounced = 1 << 20
)

// topicData is the record of the topic's session. It is no client's: see [session.load].
var topicData = json.RawMessage(`{"format":1,"topic":true}`)

// topic carries what concerns many sessions from the replica where it happens to those where the sessions' streams are:
// changed lists and updated resources (F12). It is a session of its own in the store, shared by all replicas, and costs
// one commit a change, however many clients are told.
//
// The SDK tells these changes to the sessions that are connected to the server at that moment. So on each replica one
// session of ours, the hub, stays connected, hears them, and publishes them; streams listen to the topic alone, and get
// each change once, whether it happened here or elsewhere. For the hub to hear of a resource it must be subscribed to it,
// and so each replica learns through the topic which resources anyone is subscribed to.
type topic struct {
	h       *Handler
	start   sync.Once
	running sync.WaitGroup
	ctx     context.Context //nolint:containedctx // Ends when the handler is shut down.
	stop    context.CancelFunc
	out     chan topicMessage

	mu        sync.Mutex
	position  uint64 // everything up to it is in events, or too old
	events    []topicEvent
	uris      map[string]time.Time // until when they are announced
	listeners map[*topicListener]struct{}
	hubs      []*hub
}

// topicEvent is a notification for the clients that want it.
type topicEvent struct {
	position uint64
	Method   string          `json:"method"`
	Params   json.RawMessage `json:"params,omitempty"`
	uri      string          // of an updated resource
}

type topicMessage struct {
	stream  string
	payload []byte
	ttl     time.Duration
}

// topicListener is woken when there are new events. It does not wait for anything.
type topicListener struct{ wake func() }

func newTopic(h *Handler) *topic {
	t := &topic{
		h:         h,
		out:       make(chan topicMessage, maxEvents),
		uris:      map[string]time.Time{},
		listeners: map[*topicListener]struct{}{},
	}
	t.ctx, t.stop = context.WithCancel(context.Background())
	return t
}

// begin starts the topic's goroutines, once somebody needs it.
func (t *topic) begin() {
	t.start.Do(func() {
		t.running.Go(t.receive)
		t.running.Go(t.send)
	})
}

// end stops everything and waits for it.
func (t *topic) end() {
	t.stop()
	t.start.Do(func() {}) // nothing begins after this
	t.running.Wait()
	t.mu.Lock()
	hubs := t.hubs
	t.hubs = nil
	t.mu.Unlock()
	for _, hub := range hubs {
		hub.close()
	}
}

// receive keeps the topic's session alive and takes in what is published to it.
func (t *topic) receive() {
	for failures := 0; t.ctx.Err() == nil; {
		began := time.Now()
		err := t.subscription()
		if t.ctx.Err() != nil {
			return
		}
		if failures++; time.Since(began) > time.Minute {
			failures = 0
		}
		// A store that is just starting is nothing to tell of.
		if failures == topicPatience {
			t.h.log.WarnContext(t.ctx, "changes on other replicas are not heard, trying again", slog.Any("error", err))
		}
		t.pause(topicRetry)
	}
}

func (t *topic) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.ctx.Done():
	}
}

// subscription lasts until the session is gone or ctx ends; breaks are the client's to mend.
func (t *topic) subscription() error {
	if err := t.exist(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(t.ctx)
	defer cancel()
	t.mu.Lock()
	position := t.position
	t.mu.Unlock()
	messages, err := t.h.opts.Messages.Subscribe(ctx, t.h.opts.Topic, position, eventStream, uriStream)
	if err != nil {
		return err
	}
	touched := make(chan struct{})
	go func() {
		defer close(touched)
		tick := time.NewTicker(topicTTL / 3)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				// One that fails is made good by the next, or by making the session anew.
				_, _ = t.h.opts.Store.Touch(ctx, t.h.opts.Topic)
			case <-ctx.Done():
				return
			}
		}
	}()
	defer func() { cancel(); <-touched }()
	for m, err := range messages {
		if err != nil {
			return err
		}
		t.take(m)
	}
	return t.ctx.Err()
}

// exist makes the topic's session, if no other replica has.
func (t *topic) exist() error {
	_, err := t.h.opts.Store.Create(t.ctx, topicData, client.CreateOptions{ID: t.h.opts.Topic, TTL: topicTTL})
	if errors.Is(err, client.ErrSessionExists) {
		return nil
	}
	return err
}

func (t *topic) take(m client.Message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.position = max(t.position, m.Position)
	if m.Stream == uriStream {
		var uris map[string]int
		if err := json.Unmarshal(m.Payload, &uris); err != nil {
			t.h.log.ErrorContext(t.ctx, "message of the topic cannot be read", slog.Any("error", err))
		}
		t.announced(uris)
		return
	}
	e := topicEvent{position: m.Position}
	if err := json.Unmarshal(m.Payload, &e); err != nil {
		t.h.log.ErrorContext(t.ctx, "message of the topic cannot be read", slog.Any("error", err))
		return
	}
	e.uri = uriOf(e.Params)
	if len(t.events) == maxEvents {
		t.events = slices.Delete(t.events, 0, maxEvents/4)
	}
	t.events = append(t.events, e)
	for l := range t.listeners {
		l.wake()
	}
}

// wakeAll wakes all listeners, to see that the server drains.
func (t *topic) wakeAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for l := range t.listeners {
		l.wake()
	}
}

func uriOf(params json.RawMessage) string {
	var p struct {
		URI string `json:"uri"`
	}
	// Params without one are those of other methods.
	_ = json.Unmarshal(params, &p)
	return p.URI
}

// send publishes what this replica has to tell, in order, for as long as it takes.
func (t *topic) send() {
	for {
		select {
		case m := <-t.out:
			for crowded := false; t.ctx.Err() == nil; {
				opts := client.PublishOptions{TTL: m.ttl, LowPriority: true}
				_, err := t.h.opts.Messages.Publish(t.ctx, t.h.opts.Topic, m.stream, m.payload, opts)
				switch {
				case err == nil:
				case errors.Is(err, client.ErrTooManyMessages) && !crowded:
					crowded = true
					if err := t.makeRoom(); err != nil {
						t.h.log.WarnContext(t.ctx, "cannot make room for changes", slog.Any("error", err))
					}
					continue
				case errors.Is(err, client.ErrTooManyMessages), errors.Is(err, client.ErrMessageTooLarge), errors.Is(err, client.ErrInvalidArgument):
					t.h.log.ErrorContext(t.ctx, "change not told to other replicas", slog.Any("error", err))
				case errors.Is(err, client.ErrSessionNotFound):
					_ = t.exist()
					continue
				default:
					t.pause(topicRetry)
					continue
				}
				break
			}
		case <-t.ctx.Done():
			return
		}
	}
}

// makeRoom removes from the store what replicas hardly need any more: all changes but the last ones, which each has long
// heard unless it is cut off, and the many announcements of resources, once a few say the same.
func (t *topic) makeRoom() error {
	if err := t.h.opts.Messages.Trim(t.ctx, t.h.opts.Topic, eventStream, math.MaxInt64, keptEvents); err != nil {
		return err
	}
	t.mu.Lock()
	through := t.position // what other replicas announced later stays
	uris := map[string]int{}
	for uri, until := range t.uris {
		if left := int(time.Until(until) / time.Second); left > 0 {
			uris[uri] = left
		}
	}
	t.mu.Unlock()
	for _, payload := range announcements(uris) {
		if _, err := t.h.opts.Messages.Publish(t.ctx, t.h.opts.Topic, uriStream, payload, client.PublishOptions{TTL: t.uriTTL()}); err != nil {
			return err
		}
	}
	return t.h.opts.Messages.Trim(t.ctx, t.h.opts.Topic, uriStream, through, 0)
}

// announcements are the messages for some resources.
func announcements(uris map[string]int) [][]byte {
	var payloads [][]byte
	part, size := map[string]int{}, 0
	for uri, seconds := range uris {
		part[uri] = seconds
		if size += len(uri); size > maxAnnounced {
			payloads = append(payloads, marshal(part))
			part, size = map[string]int{}, 0
		}
	}
	if len(part) > 0 {
		payloads = append(payloads, marshal(part))
	}
	return payloads
}

// publish queues a message. It never waits: the SDK calls it while it holds up others.
func (t *topic) publish(m topicMessage) {
	t.begin()
	select {
	case t.out <- m:
	default:
		t.h.log.Error("change not told to other replicas: too many wait for the store")
	}
}

// listen registers a listener, which has to leave. It is woken at once, too.
func (t *topic) listen(wake func()) (leave func()) {
	t.begin()
	l := &topicListener{wake}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.listeners[l] = struct{}{}
	wake()
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.listeners, l)
	}
}

// after returns the events after a position that are wanted, each list change once, and the position to go on from.
func (t *topic) after(position uint64, want func(topicEvent) bool) ([]topicEvent, uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i, _ := slices.BinarySearchFunc(t.events, position+1, func(e topicEvent, p uint64) int { return int(int64(e.position - p)) })
	var found []topicEvent
	for _, e := range t.events[i:] {
		position = e.position
		same := func(f topicEvent) bool { return f.Method == e.Method && f.uri == e.uri }
		if want(e) && !slices.ContainsFunc(found, same) {
			found = append(found, e)
		}
	}
	return found, position
}

// now is the position that this replica has heard everything up to.
func (t *topic) now() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.position
}

// uriTTL is how long a resource stays announced.
func (t *topic) uriTTL() time.Duration { return min(t.h.opts.SessionTTL*4/3, client.MaxMessageTTL) }

// announce sees to it that every replica is subscribed to the resources, for the sessions' TTL at least. It costs a commit
// at most once per quarter of that and resource, whoever asks.
func (t *topic) announce(uris ...string) {
	ttl := t.uriTTL()
	due := map[string]int{}
	t.mu.Lock()
	for _, uri := range uris {
		if time.Until(t.uris[uri]) <= ttl*3/4 {
			due[uri] = int((ttl + time.Second - 1) / time.Second)
		}
	}
	t.announced(due)
	t.mu.Unlock()
	for _, payload := range announcements(due) {
		t.publish(topicMessage{stream: uriStream, payload: payload, ttl: ttl})
	}
}

// subscribed returns when this replica is subscribed to the resources. The word of the replica where the client subscribed may
// still be on its way, and what the client does next may already change them, here (F15).
func (t *topic) subscribed(uris ...string) {
	if len(uris) == 0 {
		return
	}
	unknown := map[string]int{}
	var pending []<-chan struct{}
	t.mu.Lock()
	for _, uri := range uris {
		if _, known := t.uris[uri]; !known {
			unknown[uri] = int(t.uriTTL() / time.Second)
		}
	}
	t.announced(unknown)
	for _, uri := range uris {
		for _, h := range t.hubs {
			pending = append(pending, h.subscribe(uri))
		}
	}
	t.mu.Unlock()
	// An application's SubscribeHandler may take its time, but not every request's.
	patience := time.NewTimer(time.Second)
	defer patience.Stop()
	for _, done := range pending {
		select {
		case <-done:
		case <-patience.C:
			return
		case <-t.ctx.Done():
			return
		}
	}
}

// announced is called with the lock held.
func (t *topic) announced(uris map[string]int) {
	now := time.Now()
	fresh := false
	for uri, seconds := range uris {
		until := now.Add(min(time.Duration(seconds)*time.Second, client.MaxMessageTTL))
		before, known := t.uris[uri]
		if until.After(before) {
			t.uris[uri] = until
		}
		if !known {
			fresh = true
			for _, h := range t.hubs {
				h.subscribe(uri)
			}
		}
	}
	if !fresh {
		return
	}
	// As good a time as any to forget those that nobody renews.
	for uri, until := range t.uris {
		if now.After(until) {
			delete(t.uris, uri)
			for _, h := range t.hubs {
				h.unsubscribe(uri)
			}
		}
	}
}

// hub is this replica's own session on a server.
type hub struct {
	conn *conn
	sdk  *mcp.ServerSession

	mu   sync.Mutex
	next int
	// subscribed has what the hub is subscribed to, each with a channel that is closed once the SDK has answered.
	subscribed map[string]chan struct{}
	unanswered map[int64]chan struct{} // by the request's id
}

// hear connects a hub to a server that has come to stay.
func (t *topic) hear(server *mcp.Server) {
	t.begin()
	b := &hub{subscribed: map[string]chan struct{}{}, unanswered: map[int64]chan struct{}{}}
	b.conn = newConn("", nil, func(_ context.Context, m jsonrpc.Message) error {
		if response, ok := m.(*jsonrpc.Response); ok {
			b.answered(response.ID)
			return nil
		}
		request, ok := m.(*jsonrpc.Request)
		switch {
		case !ok:
		case request.IsCall():
			b.feed(&jsonrpc.Response{ID: request.ID, Result: json.RawMessage(`{}`)}) // the SDK's keep-alive
		case isChange(request.Method):
			t.publish(topicMessage{stream: eventStream, payload: marshal(topicEvent{Method: request.Method, Params: request.Params}), ttl: eventTTL})
		}
		return nil
	})
	var err error
	if b.sdk, err = server.Connect(context.WithValue(t.ctx, hubKey{}, true), b.conn, nil); err != nil {
		t.h.log.Error("changes on this replica are not told to others", slog.Any("error", err))
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ctx.Err() != nil {
		_ = b.conn.Close()
		return
	}
	t.hubs = append(t.hubs, b)
	for uri := range t.uris {
		b.subscribe(uri)
	}
}

// hubKey marks the context of the hub's own requests.
type hubKey struct{}

// IsRelay tells a SubscribeHandler or UnsubscribeHandler that it is not a client who asks, but this replica for itself, so as
// to hear of a resource that a client of some replica is subscribed to. Whether that client may was decided there.
func IsRelay(ctx context.Context) bool {
	relay, _ := ctx.Value(hubKey{}).(bool)
	return relay
}

func isChange(method string) bool {
	switch method {
	case notifyToolsList, notifyPromptsList, notifyResourcesList, notifyResourceUpdate:
		return true
	}
	return false
}

// subscribe has the SDK subscribe the hub, if it is not subscribed yet. The channel is closed once it is.
func (b *hub) subscribe(uri string) <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	done, ok := b.subscribed[uri]
	if !ok {
		done = make(chan struct{})
		b.subscribed[uri] = done
		b.unanswered[b.request(methodSubscribe, uri)] = done
	}
	return done
}

func (b *hub) unsubscribe(uri string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.subscribed, uri)
	b.request(methodUnsubscribe, uri)
}

// request is called with the lock held.
func (b *hub) request(method, uri string) (id int64) {
	b.next++
	b.feed(&jsonrpc.Request{ID: surrogateID(b.next), Method: method, Params: marshal(map[string]string{"uri": uri}), Extra: &mcp.RequestExtra{}})
	return int64(b.next)
}

// answered notes that the SDK has answered a request. Whether it refused it is all the same: then nothing is heard.
func (b *hub) answered(id jsonrpc.ID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, _ := id.Raw().(int64)
	if done, ok := b.unanswered[n]; ok {
		close(done)
		delete(b.unanswered, n)
	}
}

// feed does not hold up its caller, whom the SDK may be waiting for.
func (b *hub) feed(m jsonrpc.Message) { b.conn.feed(m) }

func (b *hub) close() {
	_ = b.conn.Close()
	_ = b.sdk.Close()
}
