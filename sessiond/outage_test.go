package sessiond_test

import (
	"context"
	"crypto/rand"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
)

// link is a connection to etcd that can be cut, so that etcd refuses, or frozen, so that it says nothing any more.
type link struct {
	path   string
	target string

	mu     sync.Mutex
	l      net.Listener
	conns  map[net.Conn]struct{}
	frozen chan struct{} // closed while data flows
	wg     sync.WaitGroup
}

func newLink(t *testing.T) *link {
	t.Helper()
	dir, err := os.MkdirTemp("", "link-") //nolint:usetesting // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	flows := make(chan struct{})
	close(flows)
	k := &link{
		path:   filepath.Join(dir, "s"),
		target: strings.TrimPrefix(etcd.EtcdEndpoints()[0], "unix://"),
		conns:  map[net.Conn]struct{}{},
		frozen: flows,
	}
	k.open(t)
	t.Cleanup(func() {
		k.cut()
		k.wg.Wait()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return k
}

func (k *link) open(t *testing.T) {
	t.Helper()
	l, err := net.Listen("unix", k.path)
	if err != nil {
		t.Fatal(err)
	}
	k.mu.Lock()
	k.l = l
	k.mu.Unlock()
	k.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("unix", k.target)
			if err != nil {
				c.Close()
				continue
			}
			k.mu.Lock()
			k.conns[c], k.conns[up] = struct{}{}, struct{}{}
			k.mu.Unlock()
			k.wg.Go(func() { k.copy(c, up) })
			k.wg.Go(func() { k.copy(up, c) })
		}
	})
}

func (k *link) copy(dst, src net.Conn) {
	defer dst.Close()
	defer src.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		k.mu.Lock()
		flows := k.frozen
		k.mu.Unlock()
		<-flows
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (k *link) freeze() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.frozen = make(chan struct{})
}

func (k *link) thaw() {
	k.mu.Lock()
	defer k.mu.Unlock()
	select {
	case <-k.frozen:
	default:
		close(k.frozen)
	}
}

func (k *link) cut() {
	k.thaw()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.l.Close()
	for c := range k.conns {
		c.Close()
	}
	clear(k.conns)
}

// L9, S4: an etcd that refuses or says nothing is reported within 3 s, by its own reason, by every method and to those who
// already wait. Afterwards everything works again, and those who gave up have left nothing in the queue.
func TestOutage(t *testing.T) {
	faults := map[string]struct{ begin, end func(*link, *testing.T) }{
		"refuses":      {func(k *link, _ *testing.T) { k.cut() }, (*link).open},
		"says nothing": {func(k *link, _ *testing.T) { k.freeze() }, func(k *link, _ *testing.T) { k.thaw() }},
	}
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefix := rand.Text() + "/"
			k := newLink(t)
			good := start(t, sessiond.Config{Endpoints: etcd.EtcdEndpoints(), Prefix: prefix})
			n := start(t, sessiond.Config{Endpoints: []string{"unix://" + k.path}, Prefix: prefix})
			id := n.create(t, "x")
			held := good.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
			waiting := queue(t.Context(), n, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "w"})
			n.settled(t, waiting)
			sub := n.subscribe(t, id, 0, "s")
			if _, err := sub.Recv(); err != nil {
				t.Fatal(err)
			}

			began := time.Now()
			fault.begin(k, t)
			calls := map[string]func(context.Context) error{
				"read": func(ctx context.Context) error {
					_, err := n.sessions.Read(ctx, &sessiondv1.ReadRequest{SessionId: id})
					return err
				},
				"read of nothing": func(ctx context.Context) error {
					_, err := n.sessions.Read(ctx, &sessiondv1.ReadRequest{SessionId: "nothing"})
					return err
				},
				"create": func(ctx context.Context) error {
					_, err := n.sessions.Create(ctx, &sessiondv1.CreateRequest{})
					return err
				},
				"save": func(ctx context.Context) error {
					_, err := n.sessions.Save(ctx, &sessiondv1.SaveRequest{SessionId: id, FencingToken: 5})
					return err
				},
				"touch": func(ctx context.Context) error {
					_, err := n.sessions.Touch(ctx, &sessiondv1.TouchRequest{SessionId: id})
					return err
				},
				"destroy": func(ctx context.Context) error {
					_, err := n.sessions.Destroy(ctx, &sessiondv1.DestroyRequest{SessionId: "other"})
					return err
				},
				"acquire": func(ctx context.Context) error {
					_, err := n.locks.Acquire(ctx, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "x"})
					return err
				},
				"try": func(ctx context.Context) error {
					_, err := n.locks.TryAcquire(ctx, &sessiondv1.TryAcquireRequest{SessionId: id})
					return err
				},
				"release": func(ctx context.Context) error {
					_, err := n.locks.Release(ctx, &sessiondv1.ReleaseRequest{SessionId: "other", FencingToken: 1})
					return err
				},
				"publish": func(ctx context.Context) error {
					_, err := n.messages.Publish(ctx, &sessiondv1.PublishRequest{SessionId: id, Stream: "s"})
					return err
				},
				"trim": func(ctx context.Context) error {
					_, err := n.messages.Trim(ctx, &sessiondv1.TrimRequest{SessionId: id, Stream: "s"})
					return err
				},
				"retain": func(ctx context.Context) error {
					_, err := n.messages.Retain(ctx, &sessiondv1.RetainRequest{SessionId: id, Stream: "s"})
					return err
				},
				"waiting acquire":      func(context.Context) error { return (<-waiting).err },
				"running subscription": func(context.Context) error { _, err := sub.Recv(); return err },
			}
			var wg sync.WaitGroup
			for name, call := range calls {
				wg.Go(func() {
					err := call(t.Context())
					if took := time.Since(began); reasonOf(err) != "BACKEND_UNAVAILABLE" || took > 3*time.Second {
						t.Errorf("%s: %v after %v", name, err, took)
					}
				})
			}
			wg.Wait()
			eventually(t, time.Second, "health says so", func() bool { return !serving(t, n) })

			fault.end(k, t)
			eventually(t, 10*time.Second, "health says that it is over", func() bool { return serving(t, n) })
			if s := n.read(t, id); string(s.GetData()) != "x" {
				t.Errorf("read: %v", s)
			}
			good.release(t, held)
			eventually(t, 5*time.Second, "nobody is left in the queue", func() bool {
				got, err := good.locks.TryAcquire(t.Context(), &sessiondv1.TryAcquireRequest{SessionId: id, RequestId: "after"})
				if err != nil {
					t.Fatal(err)
				}
				return got.GetAcquired()
			})
			// Watches have come back too.
			next := queue(t.Context(), n, &sessiondv1.AcquireRequest{SessionId: id, RequestId: "next"})
			n.settled(t, next)
			if _, err := good.locks.Release(t.Context(), &sessiondv1.ReleaseRequest{SessionId: id, FencingToken: tokenOf(t, good, id, "after")}); err != nil {
				t.Fatal(err)
			}
			n.release(t, take(t, next))
		})
	}
}

func tokenOf(t *testing.T, n *node, id, request string) uint64 {
	t.Helper()
	return n.acquire(t, &sessiondv1.AcquireRequest{SessionId: id, RequestId: request}).GetFencingToken()
}

func serving(t *testing.T, n *node) bool {
	t.Helper()
	conn, err := n.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, service := range []string{"", "sessiond.v1.LockService"} {
		resp, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
		if err != nil {
			t.Fatal(err)
		}
		if resp.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			return false
		}
	}
	return true
}

// O1: a node whose cluster is not there starts, says that it is not ready, and becomes ready when the cluster comes.
func TestStartsBeforeItsCluster(t *testing.T) {
	t.Parallel()
	k := newLink(t)
	k.cut()
	srv, err := sessiond.New(t.Context(), sessiond.Config{Endpoints: []string{"unix://" + k.path}, Listen: "127.0.0.1:0", Prefix: rand.Text() + "/", Logger: logTo(t)})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-srv.Ready():
		t.Fatal("ready")
	default:
	}
	opened := make(chan struct{})
	go func() {
		defer close(opened)
		conn, err := srv.Dial()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		began := time.Now()
		_, err = sessiondv1.NewSessionServiceClient(conn).Read(t.Context(), &sessiondv1.ReadRequest{SessionId: "x"})
		if reasonOf(err) != "BACKEND_UNAVAILABLE" || time.Since(began) > 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		k.open(t)
	}()
	n := serve(t, srv)
	<-opened
	n.create(t, "")
}

// L6, L9: of two members one dies without a word. The node stays up, and hand-overs go on within seconds, although gRPC would
// notice only after some 10 s. Until the node has noticed, a call may be told that the store is not reachable, within 3 s; its
// retry finds its place.
func TestSilentMember(t *testing.T) {
	t.Parallel()
	prefix := rand.Text() + "/"
	k := newLink(t)
	good := start(t, sessiond.Config{Endpoints: etcd.EtcdEndpoints(), Prefix: prefix})
	n := start(t, sessiond.Config{Endpoints: []string{"unix://" + k.path, etcd.EtcdEndpoints()[0]}, Prefix: prefix})
	id := n.create(t, "x")
	held := good.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
	request := &sessiondv1.AcquireRequest{SessionId: id, RequestId: "w"}
	waiting := queue(t.Context(), n, request)
	n.settled(t, waiting)
	k.freeze()
	good.release(t, held)
	frozen := time.Now()
	var got *sessiondv1.Grant
	for got == nil {
		asked := time.Now()
		select {
		case r := <-waiting:
			got = r.grant
			if r.err != nil {
				unreachable(t, r.err, asked, frozen)
				waiting = queue(t.Context(), n, request)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("not handed over")
		}
	}
	good.release(t, got)
	for reads := 0; reads < 10; reads++ {
		asked := time.Now()
		if _, err := n.sessions.Read(t.Context(), &sessiondv1.ReadRequest{SessionId: id}); err != nil {
			unreachable(t, err, asked, frozen)
			reads = -1
		}
	}
	if !serving(t, n) {
		t.Error("not serving")
	}
	k.thaw()
}

// unreachable checks that an error says, in time, that the store is not reachable, and comes while that is no surprise.
func unreachable(t *testing.T, err error, asked, frozen time.Time) {
	t.Helper()
	if took := time.Since(asked); reasonOf(err) != "BACKEND_UNAVAILABLE" || took > 3*time.Second {
		t.Fatalf("%v after %v", err, took)
	}
	if since := time.Since(frozen); since > 8*time.Second {
		t.Fatalf("%v, %v after a member died", err, since)
	}
}
