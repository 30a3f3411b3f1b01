// Package balancer spreads HTTP requests over several back-ends, strictly in turn or at random.
//
// It stands in for the load balancer that people run in front of their front-ends, set up in the way that is hardest for
// a server with sessions: no affinity of any kind, so two requests of one session, even on one connection, go to
// different back-ends. The demo, the end-to-end tests and the conformance suite use it.
//
// It is not [httputil.ReverseProxy] alone, because that one leaves three things to chance which a test must not:
// which back-end is next, whether a request is sent twice (Go's transport repeats some by itself), and whether an
// answer arrives whole when the back-end answers before the request's body has been read to its end.
package balancer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"sync"
	"time"
)

// ServedBy is the response header that names the back-end (host:port) which served the request.
const ServedBy = "X-Served-By"

const (
	defaultMaxBody  = 8 << 20
	defaultDeadTime = time.Second
	dialTimeout     = 2 * time.Second
	closeGrace      = 2 * time.Second
	probeTimeout    = 2 * time.Second
)

// A Policy says which back-end is next.
type Policy int

const (
	// InTurn is strict round robin.
	InTurn Policy = iota
	// AtRandom takes any, also the same one twice.
	AtRandom
)

// Options adjust a balancer. The zero value is what the demo runs with.
type Options struct {
	// Policy says which back-end is next. Zero: InTurn.
	Policy Policy
	// MaxBody is the largest request body in bytes; a larger one is answered 413. Zero: 8 MiB.
	MaxBody int64
	// DeadTime is how long a back-end that refused a connection is left out. Zero: one second.
	DeadTime time.Duration
	// Probe is how often Serve asks each back-end's /readyz. One that does not answer 200 there gets requests only if none
	// does. Zero: never; a back-end that drains then has requests until it refuses them.
	Probe time.Duration
	// Logger is told about back-ends that cannot be reached and requests that broke. Nil: nothing is logged.
	Logger *slog.Logger
}

// Balancer is an [http.Handler] that passes each request on to the next back-end.
//
// A back-end whose connection is refused is skipped, because nothing was sent to it. A request that was sent is never
// sent again: if its connection breaks before the answer begins, the client gets 502.
//
// Its methods may be called concurrently.
type Balancer struct {
	policy   Policy
	maxBody  int64
	deadTime time.Duration
	probe    time.Duration
	log      *slog.Logger
	proxy    *httputil.ReverseProxy

	// calls keeps connections to the back-ends open. Go's transport repeats a request by itself when a connection from
	// its pool turns out to be dead, after sending it too if the request counts as safe to repeat (a GET, or one with
	// an Idempotency-Key). Those go through single, where each has a connection of its own and nothing is repeated.
	calls  *http.Transport
	single *http.Transport

	mu       sync.Mutex
	backends []backend
	cursor   int
	idle     chan struct{} // closed, and made anew, when a back-end has nothing in flight any more
}

type backend struct {
	addr      string
	deadUntil time.Time
	unready   bool // as of the last probe
	inFlight  int  // requests whose response has not been copied to its end
	out       bool // taken out by TakeOut
}

// New makes a balancer over back-ends given as host:port.
func New(backends []string, o Options) (*Balancer, error) {
	if len(backends) == 0 {
		return nil, errors.New("balancer: no back-ends")
	}
	b := &Balancer{policy: o.Policy, maxBody: o.MaxBody, deadTime: o.DeadTime, probe: o.Probe, log: o.Logger, idle: make(chan struct{})}
	if b.maxBody == 0 {
		b.maxBody = defaultMaxBody
	}
	if b.deadTime == 0 {
		b.deadTime = defaultDeadTime
	}
	if b.log == nil {
		b.log = slog.New(slog.DiscardHandler)
	}
	for _, addr := range backends {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return nil, fmt.Errorf("balancer: back-end %q is not host:port: %w", addr, err)
		}
		b.backends = append(b.backends, backend{addr: addr})
	}
	b.calls = transport()
	b.single = transport()
	b.single.DisableKeepAlives = true
	b.proxy = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme = "http"
			r.Out.URL.Host = "back-end" // the round tripper below puts the real one
			r.Out.Host = r.In.Host
			r.Out.Header.Del("Expect") // its body is here already
			r.SetXForwarded()
		},
		Transport:     roundTripper{b},
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(b.log.Handler(), slog.LevelDebug),
		ErrorHandler:  b.failed,
	}
	return b, nil
}

func transport() *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		DisableCompression:  true,
		MaxIdleConnsPerHost: 256,
		IdleConnTimeout:     30 * time.Second,
	}
}

// ServeHTTP passes the request on and copies the answer back, every part of it as soon as it arrives.
func (b *Balancer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// The body is read to its end before anything is sent: a back-end that answers fast would otherwise close or reuse
	// the connection under the copying of the body, which cuts about one answer in a thousand.
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, b.maxBody))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			http.Error(w, fmt.Sprintf("request body over %d bytes", b.maxBody), http.StatusRequestEntityTooLarge)
			return
		}
		http.Error(w, "request body could not be read", http.StatusBadRequest)
		return
	}
	read := r.WithContext(r.Context())
	read.ContentLength = int64(len(body))
	read.TransferEncoding = nil
	read.Body = http.NoBody
	if len(body) > 0 {
		read.Body = io.NopCloser(bytes.NewReader(body))
		read.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	}
	b.proxy.ServeHTTP(w, read)
}

// Serve answers on l until ctx ends, then closes l and, after a short grace, the connections that are still busy.
// It closes b's idle connections to the back-ends too.
func (b *Balancer) Serve(ctx context.Context, l net.Listener) error {
	srv := &http.Server{
		Handler:           b,
		ReadHeaderTimeout: 10 * time.Second,
		ErrorLog:          slog.NewLogLogger(b.log.Handler(), slog.LevelDebug),
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer b.Close()
	done := make(chan struct{})
	defer close(done)
	if b.probe > 0 {
		for _, be := range b.backends {
			wg.Go(func() { b.probeUntil(done, be.addr) })
		}
	}
	wg.Go(func() {
		select {
		case <-done:
			return
		case <-ctx.Done():
		}
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeGrace)
		defer cancel()
		if srv.Shutdown(grace) != nil {
			_ = srv.Close() // open streams never end by themselves
		}
	})
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// probeUntil asks a back-end whether it is ready, again and again until done is closed.
func (b *Balancer) probeUntil(done <-chan struct{}, addr string) {
	tick := time.NewTicker(b.probe)
	defer tick.Stop()
	for {
		ready := b.ready(addr)
		b.mu.Lock()
		b.find(addr).unready = !ready
		b.mu.Unlock()
		select {
		case <-done:
			return
		case <-tick.C:
		}
	}
}

func (b *Balancer) ready(addr string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/readyz", http.NoBody)
	if err != nil {
		return false
	}
	resp, err := b.single.RoundTrip(req)
	if err != nil {
		return false
	}
	defer func() { _ = resp.Body.Close() }()
	return resp.StatusCode == http.StatusOK
}

// Close closes the idle connections to the back-ends. The balancer can still be used afterwards.
func (b *Balancer) Close() {
	b.calls.CloseIdleConnections()
	b.single.CloseIdleConnections()
}

type roundTripper struct{ b *Balancer }

func (t roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	b := t.b
	via := b.calls
	if repeatable(r) {
		via = b.single
	}
	var tried []string
	for {
		addr, ok := b.next(tried)
		if !ok {
			return nil, fmt.Errorf("no back-end can be reached (tried %v)", tried)
		}
		tried = append(tried, addr)
		attempt := r.Clone(r.Context())
		attempt.URL.Host = addr
		if r.GetBody != nil {
			body, err := r.GetBody()
			if err != nil {
				return nil, err
			}
			attempt.Body, attempt.GetBody = body, r.GetBody
		}
		resp, err := via.RoundTrip(attempt)
		if err == nil {
			resp.Header.Set(ServedBy, addr)
			resp.Body = &response{ReadCloser: resp.Body, done: sync.OnceFunc(func() { b.done(addr) })}
			return resp, nil
		}
		b.done(addr)
		op, ok := errors.AsType[*net.OpError](err)
		if !ok || op.Op != "dial" || r.Context().Err() != nil {
			return nil, fmt.Errorf("%s: %w", addr, err)
		}
		b.markDead(addr)
		b.log.WarnContext(r.Context(), "back-end cannot be reached", "backend", addr, "error", err)
	}
}

// A response tells when it has been copied, or given up.
type response struct {
	io.ReadCloser

	done func()
}

func (r *response) Close() error {
	defer r.done()
	return r.ReadCloser.Close()
}

// repeatable tells whether Go's transport would take the request to be safe to send twice.
func repeatable(r *http.Request) bool {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return r.Header.Values("Idempotency-Key") != nil || r.Header.Values("X-Idempotency-Key") != nil
}

// next gives the back-end whose turn it is, and counts a request for it. One that was found dead a short while ago, or is not
// ready, loses its turn to the next one, unless all are: then they are tried all the same.
func (b *Balancer) next(tried []string) (string, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	first := b.cursor
	if b.policy == AtRandom {
		first = rand.IntN(len(b.backends))
	}
	now := time.Now()
	for _, evenDead := range []bool{false, true} {
		for i := range b.backends {
			n := (first + i) % len(b.backends)
			be := &b.backends[n]
			if be.out || slices.Contains(tried, be.addr) || !evenDead && (be.unready || now.Before(be.deadUntil)) {
				continue
			}
			b.cursor = (n + 1) % len(b.backends)
			be.inFlight++
			return be.addr, true
		}
	}
	return "", false
}

func (b *Balancer) done(addr string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	be := b.find(addr)
	if be.inFlight--; be.inFlight == 0 {
		close(b.idle)
		b.idle = make(chan struct{})
	}
}

func (b *Balancer) find(addr string) *backend {
	for i := range b.backends {
		if b.backends[i].addr == addr {
			return &b.backends[i]
		}
	}
	panic("balancer: no back-end " + addr)
}

// TakeOut waits until a back-end serves no request, neither a call nor a stream, and gives it no more of them until it is
// put back with PutBack. It returns the back-end's address, or an error if ctx ends first. At least one back-end must be
// left: with all others taken out it waits for one to be put back.
func (b *Balancer) TakeOut(ctx context.Context) (string, error) {
	for {
		b.mu.Lock()
		left, idle := 0, b.idle
		for _, be := range b.backends {
			if !be.out {
				left++
			}
		}
		// Not always the same one: the search begins with the one whose turn it is.
		for i := range b.backends {
			be := &b.backends[(b.cursor+i)%len(b.backends)]
			if left > 1 && !be.out && be.inFlight == 0 {
				be.out = true
				b.mu.Unlock()
				return be.addr, nil
			}
		}
		b.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return "", fmt.Errorf("balancer: no back-end is idle: %w", context.Cause(ctx))
		}
	}
}

// PutBack has a back-end that was taken out take part again. Nothing is sent on connections that were opened before.
func (b *Balancer) PutBack(addr string) {
	b.Close()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.find(addr).out = false
	close(b.idle)
	b.idle = make(chan struct{})
}

func (b *Balancer) markDead(addr string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.find(addr).deadUntil = time.Now().Add(b.deadTime)
}

func (b *Balancer) failed(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil {
		return // the client has gone; nobody reads an answer
	}
	b.log.WarnContext(r.Context(), "request failed", "method", r.Method, "path", r.URL.Path, "error", err)
	http.Error(w, "bad gateway: "+err.Error(), http.StatusBadGateway)
}
