package mcpserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"
	"weak"

	"github.com/modelcontextprotocol/go-sdk/auth"
	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
)

// The defaults of [Options].
const (
	DefaultSessionTTL   = time.Hour
	DefaultLockTimeout  = 30 * time.Second
	DefaultLockTTL      = 300 * time.Second
	DefaultAskTimeout   = 120 * time.Second
	DefaultMaxBodyBytes = 4 << 20
	DefaultTopic        = "mcpserver.topic"
)

// The limits of the durations in [Options].
const (
	MinTTL         = time.Second
	MaxSessionTTL  = 30 * 24 * time.Hour
	MaxLockTTL     = time.Hour
	MinTimeout     = time.Millisecond
	MaxLockTimeout = time.Hour
	MaxAskTimeout  = 24 * time.Hour
	MaxHistory     = client.MaxMessageTTL / 2
)

// Options are the settings of a [Handler].
type Options struct {
	// Store keeps the sessions. Without one, handshake-era clients are served without sessions: no Mcp-Session-Id, GET
	// and DELETE are refused, handlers cannot ask the client, and there are no values, log levels or subscriptions.
	Store Store
	// Messages carries messages between replicas. Default: Store, if it is one.
	Messages Messages
	// Locker, if set, makes requests of one session run one after the other, in order of arrival over all replicas.
	// Default: no locking. Set it to the same client as Store, and on all replicas alike: a replica without it is refused
	// to save while another holds the lock.
	Locker Locker

	// SessionTTL is how long a session lives after its last use: a request, a running call or an open stream on any
	// replica. [MinTTL] to [MaxSessionTTL]. Default: [DefaultSessionTTL]. Its end is late by up to a third of it, since uses are
	// written down only that often.
	SessionTTL time.Duration
	// LockTimeout is how long a request waits for its session's lock before it is answered 503. [MinTimeout] to
	// [MaxLockTimeout]. Default: [DefaultLockTimeout].
	LockTimeout time.Duration
	// LockTTL bounds how long one request may hold the lock, waits for the client not counted; its handler's context
	// ends a little before. [MinTTL] to [MaxLockTTL]. Default: [DefaultLockTTL].
	LockTTL time.Duration
	// AskTimeout is how long a handler waits for the client's answer to a question. [MinTimeout] to [MaxAskTimeout].
	// Default: [DefaultAskTimeout].
	AskTimeout time.Duration

	// History is how long the events of a stream are kept after its last one, at least, so that a client whose connection
	// broke gets what it missed, from any replica (Last-Event-ID): [MinTTL] to [MaxHistory]. It costs a commit per event, the
	// answer included, and while a call runs one more per History. A session keeps at most 500 events and 8 MiB of them at a
	// time; what is over that goes out without an event id. Default: 0, streams cannot be resumed, and no event ids are sent.
	History time.Duration
	// JSON prefers application/json answers; a request becomes a stream only if its handler has something to say or ask
	// before the end. Default: streams.
	JSON bool
	// MaxBodyBytes limits a request's body. Default: [DefaultMaxBodyBytes], which is also the most that sessiond carries
	// in one message.
	MaxBodyBytes int64
	// Topic is the id of the session through which replicas tell each other of changed lists and updated resources. Those
	// of one application must have the same, and applications that share a sessiond had better have different ones.
	// Default: [DefaultTopic].
	Topic string
	// StateKeys seal what a modern client carries back between the rounds of one request (requestState), so that it can be
	// neither read nor changed, and is good only for the same user, request and arguments, for an hour. All replicas need
	// the same; [StateKeySize] bytes each. The first one seals, all open: to rotate, put a new one first on all replicas once
	// it is last on all. Default: none, states go out as handlers made them.
	StateKeys [][]byte
	// AllowedOrigins are the values of the Origin header served beside the server's own ("https://app.example.com"). A
	// request with any other is refused (403): browsers send it, and a foreign page must not use its visitor's server. Pages
	// of these origins may read the answers (CORS).
	AllowedOrigins []string
	// AllowedHosts are names, without a port, under which requests that reach a loopback address are served, beside localhost
	// and loopback addresses themselves: those that a proxy on the same machine passes on. Under any other they are
	// refused (403), against DNS rebinding.
	AllowedHosts []string
	// DisableLocalhostProtection serves them under any name.
	DisableLocalhostProtection bool

	// Logger gets what goes wrong. It is given no session ids and no contents. Default: none.
	Logger *slog.Logger
}

func (o *Options) complete() error {
	if o.Messages == nil {
		o.Messages, _ = o.Store.(Messages)
	}
	var errs []error
	if o.Store == nil && (o.Locker != nil || o.Messages != nil) {
		errs = append(errs, errors.New("Locker and Messages need a Store"))
	}
	if o.Store != nil && o.Messages == nil {
		errs = append(errs, errors.New("Messages is not set and Store does not carry messages"))
	}
	for _, d := range []struct {
		name               string
		value              *time.Duration
		preset, least, max time.Duration
	}{
		{"SessionTTL", &o.SessionTTL, DefaultSessionTTL, MinTTL, MaxSessionTTL},
		{"LockTimeout", &o.LockTimeout, DefaultLockTimeout, MinTimeout, MaxLockTimeout},
		{"LockTTL", &o.LockTTL, DefaultLockTTL, MinTTL, MaxLockTTL},
		{"AskTimeout", &o.AskTimeout, DefaultAskTimeout, MinTimeout, MaxAskTimeout},
	} {
		if *d.value == 0 {
			*d.value = d.preset
		}
		if *d.value < d.least || *d.value > d.max {
			errs = append(errs, fmt.Errorf("%s is %s, want %s to %s", d.name, *d.value, d.least, d.max))
		}
	}
	if o.History != 0 && (o.History < MinTTL || o.History > MaxHistory) {
		errs = append(errs, fmt.Errorf("%s is %s, want 0 or %s to %s", "History", o.History, MinTTL, MaxHistory))
	}
	if o.Topic == "" {
		o.Topic = DefaultTopic
	}
	if len(o.Topic) > 128 || strings.ContainsFunc(o.Topic, func(c rune) bool { return c < 0x21 || c > 0x7e }) {
		errs = append(errs, fmt.Errorf("%s is %q, want 1 to 128 visible ASCII characters", "Topic", o.Topic))
	}
	if o.MaxBodyBytes == 0 {
		o.MaxBodyBytes = DefaultMaxBodyBytes
	}
	if o.MaxBodyBytes < 0 {
		errs = append(errs, fmt.Errorf("MaxBodyBytes is %d, want more than 0", o.MaxBodyBytes))
	}
	for _, origin := range o.AllowedOrigins {
		if err := CheckOrigin(origin); err != nil {
			errs = append(errs, fmt.Errorf("AllowedOrigins: %w", err))
		}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return errors.Join(errs...)
}

// stateTTL is how long a modern client may take from one round of a request to the next.
const stateTTL = time.Hour

// touchInterval is how often what runs long keeps its session alive (S1).
func (o *Options) touchInterval() time.Duration { return max(o.SessionTTL/3, 100*time.Millisecond) }

// CheckOrigin returns an error unless origin can be one of [Options].AllowedOrigins.
func CheckOrigin(origin string) error {
	if u, err := url.Parse(origin); err != nil || u.Scheme == "" || u.Host == "" || u.Path != "" {
		return fmt.Errorf("%q is no origin, want scheme://host[:port]", origin)
	}
	return nil
}

// messageTTL is how long what is due to a client is kept for it.
func (o *Options) messageTTL() time.Duration { return min(o.SessionTTL, client.MaxMessageTTL) }

// Handler serves MCP over Streamable HTTP, both eras on one URL. It keeps no session; any number of them, in any
// processes, may serve the same sessions. It is safe for concurrent use.
type Handler struct {
	server func(*http.Request) *mcp.Server
	opts   Options
	log    *slog.Logger
	modern http.Handler
	topic  *topic
	sealer *sealer // nil: without

	running  sync.WaitGroup  // requests, and what runs on after them
	force    context.Context //nolint:containedctx // Ends when what still runs is to be cut short.
	cut      context.CancelFunc
	draining chan struct{}

	mu           sync.Mutex
	drained      bool                             // no more is added to running from outside
	instrumented map[weak.Pointer[mcp.Server]]int // how often the server was met, up to 2
}

// NewHandler returns a handler in place of mcp.NewStreamableHTTPHandler. getServer returns the server for a request; it may
// be the same for all. nil refuses the request (400). The handler adds one receiving middleware to each server, outside
// of those it has. Errors: all that is wrong with opts, at once.
func NewHandler(getServer func(*http.Request) *mcp.Server, opts *Options) (*Handler, error) {
	h := &Handler{
		draining:     make(chan struct{}),
		instrumented: map[weak.Pointer[mcp.Server]]int{},
	}
	if opts != nil {
		h.opts = *opts
	}
	err := h.opts.complete()
	sealer, kerr := newSealer(h.opts.StateKeys, stateTTL)
	err = errors.Join(err, kerr)
	if len(h.opts.StateKeys) == 0 {
		sealer = nil
	}
	if getServer == nil {
		err = errors.Join(errors.New("getServer is nil"), err)
	}
	if err != nil {
		return nil, fmt.Errorf("mcpserver: %w", err)
	}
	h.log = h.opts.Logger
	h.topic = newTopic(h)
	h.sealer = sealer
	h.force, h.cut = context.WithCancel(context.Background())
	h.server = func(r *http.Request) *mcp.Server {
		server := getServer(r)
		if server != nil {
			h.instrument(server)
		}
		return server
	}
	h.modern = mcp.NewStreamableHTTPHandler(h.server, &mcp.StreamableHTTPOptions{
		Stateless:                    true,
		JSONResponse:                 h.opts.JSON,
		Logger:                       h.opts.Logger,
		MaxRequestBodyBytes:          h.opts.MaxBodyBytes,
		DisableLocalhostProtection:   true, // checked before
		PropagateRequestCancellation: true, // in the modern era, a disconnect is a cancellation
	})
	return h, nil
}

// Ready returns nil while the handler can serve sessions, for a readiness probe.
func (h *Handler) Ready(ctx context.Context) error {
	select {
	case <-h.draining:
		return errDraining()
	default:
	}
	if h.opts.Store == nil {
		return nil
	}
	return h.opts.Store.Ready(ctx)
}

// Shutdown drains the handler: new requests are refused (503), standalone streams end, so that clients open them on another
// replica, and what runs goes on to its end, or until ctx ends; then it is cut short with an error, its locks released,
// and ctx's error returned. Call it before http.Server.Shutdown, which waits for the streams.
func (h *Handler) Shutdown(ctx context.Context) error {
	h.mu.Lock()
	if !h.drained {
		h.drained = true
		close(h.draining)
	}
	h.mu.Unlock()
	h.topic.wakeAll()
	done := make(chan struct{})
	go func() {
		h.running.Wait()
		close(done)
	}()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	h.cut()
	h.topic.end()
	return err
}

// ServeHTTP serves one request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !h.begin() {
		w.Header().Set("Connection", "close")
		h.refuse(w, r, errDraining(), h.idsOf(w, r))
		return
	}
	defer h.running.Done()
	if h.cors(w, r) {
		return
	}
	if err := h.admit(r); err != nil {
		h.refuse(w, r, err, nil)
		return
	}
	switch {
	case r.Method == http.MethodPost:
		h.servePOST(w, r)
	case h.opts.Store == nil:
		h.refuse(w, r, errMethod("POST"), nil)
	case r.Method == http.MethodGet:
		h.serveGET(w, r)
	case r.Method == http.MethodDelete:
		h.serveDELETE(w, r)
	default:
		h.refuse(w, r, errMethod("GET, POST, DELETE"), nil)
	}
}

// begin counts a request in, unless the handler drains.
func (h *Handler) begin() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.drained {
		return false
	}
	h.running.Add(1)
	return true
}

// admit refuses what is not to be served at all.
func (h *Handler) admit(r *http.Request) error {
	if !h.opts.DisableLocalhostProtection {
		local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		if local != nil && isLoopback(local.String()) && !isLoopback(r.Host) && !slices.Contains(h.opts.AllowedHosts, hostname(r.Host)) {
			return errForbidden("Host %q is not this server: it listens on a loopback address, and that name is not allowed", r.Host)
		}
	}
	if origin := r.Header.Get("Origin"); origin != "" && !slices.Contains(h.opts.AllowedOrigins, origin) {
		if u, err := url.Parse(origin); err != nil || u.Host == "" || u.Host != r.Host {
			return errForbidden("Origin %q is not allowed", origin)
		}
	}
	return nil
}

func isLoopback(address string) bool {
	host := hostname(address)
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// hostname is an address without its port, if it has one.
func hostname(address string) string {
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return strings.Trim(address, "[]")
}

// refuse answers with an error, under the ids of the request's calls.
func (h *Handler) refuse(w http.ResponseWriter, r *http.Request, err error, in *incoming) {
	f := refusalOf(err)
	f.report(r.Context(), h.log, r)
	if in == nil {
		f.write(w, nil, false)
		return
	}
	f.write(w, callIDs(in.messages), in.batch)
}

// idsOf reads what a refusal needs of a request that is not looked at otherwise.
func (h *Handler) idsOf(w http.ResponseWriter, r *http.Request) *incoming {
	if r.Method != http.MethodPost {
		return nil
	}
	body, err := h.readBody(w, r)
	if err != nil {
		return nil
	}
	in := &incoming{}
	if in.messages, in.batch, err = parseBody(body); err != nil {
		return nil
	}
	return in
}

// userOf is whom the request's credentials, verified before this handler, belong to.
func userOf(ctx context.Context) identity {
	info := auth.TokenInfoFromContext(ctx)
	if info == nil {
		return identity{}
	}
	user := identity{Subject: info.UserID}
	if issuer, ok := info.Extra["iss"].(string); ok {
		user.Issuer = issuer
	}
	if subject, ok := info.Extra["sub"].(string); ok && user.Subject == "" {
		user.Subject = subject
	}
	return user
}

// instrument puts our middleware around a server's handlers, once. A server that is met again has come to stay (getServer
// may make one for each request), and is worth a hub.
func (h *Handler) instrument(server *mcp.Server) {
	key := weak.Make(server)
	h.mu.Lock()
	met := h.instrumented[key]
	hear := met == 1 && h.opts.Store != nil && !h.drained
	if met < 2 {
		h.instrumented[key] = met + 1
	}
	if met == 0 {
		// Under the lock, so that no request is served without it.
		server.AddReceivingMiddleware(h.receive)
		runtime.AddCleanup(server, func(key weak.Pointer[mcp.Server]) {
			h.mu.Lock()
			defer h.mu.Unlock()
			delete(h.instrumented, key)
		}, key)
	}
	h.mu.Unlock()
	// Not under the lock, which every request takes.
	if hear {
		h.topic.hear(server)
	}
}

// Relay has what changes on the server told to the clients of all replicas from now on. A server that the handler has met
// in two requests needs no call; one that changes before that does, such as that of a replica that has just started. It may
// be called more than once. The server is kept for the life of the handler.
func (h *Handler) Relay(server *mcp.Server) {
	h.instrument(server)
	h.instrument(server)
}

// receive runs around every handler: it ends the handler's context with its exchange, and turns a panic into an error.
func (h *Handler) receive(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (res mcp.Result, err error) {
		x := exchangeOf(ctx)
		if x != nil && x.h == h {
			if req.GetExtra() == x.marker {
				return &mcp.CallToolResult{}, nil
			}
			var leave func()
			ctx, leave = x.enter(ctx)
			defer leave()
		}
		defer func() {
			if p := recover(); p != nil {
				h.log.ErrorContext(ctx, "handler panicked", slog.String("method", method), slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
				res, err = nil, &jsonrpc.Error{Code: jsonrpc.CodeInternalError, Message: fmt.Sprintf("the handler of %s failed unexpectedly", method)}
			}
		}()
		if h.sealer != nil {
			return h.sealer.around(ctx, method, req, next)
		}
		return next(ctx, method, req)
	}
}

// readBody reads a request's body, up to the limit.
func (h *Handler) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, h.opts.MaxBodyBytes))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return nil, errBodyTooLarge(h.opts.MaxBodyBytes)
		}
		return nil, errBadRequest("the body could not be read: %v", err)
	}
	return body, nil
}
