package sessiond_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
)

// lockedBuffer is a log that is read while it is written.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// O5, L6, M2: history is compacted past every open watch while 20 callers wait for a lock and 20 subscribers for messages; what
// happened while their node was cut off is not in the history any more when it comes back. All of them are served.
func TestCompaction(t *testing.T) {
	client, err := clientv3.New(clientv3.Config{Endpoints: etcd.EtcdEndpoints(), Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	prefix, k, log := rand.Text()+"/", newLink(t), &lockedBuffer{}
	good := start(t, sessiond.Config{Endpoints: etcd.EtcdEndpoints(), Prefix: prefix})
	srv, err := sessiond.New(t.Context(), sessiond.Config{
		Endpoints: []string{"unix://" + k.path}, Prefix: prefix, Listen: "127.0.0.1:0", Grace: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	n := serve(t, srv)
	id := good.create(t, "")
	held := good.acquire(t, &sessiondv1.AcquireRequest{SessionId: id})
	const count = 20
	waiting := make([]<-chan result, count)
	subs := make([]*subscription, count)
	for i := range count {
		waiting[i] = queue(t.Context(), n, &sessiondv1.AcquireRequest{SessionId: id, RequestId: fmt.Sprint("w", i)})
		eventually(t, 10*time.Second, "the waiter has its place", func() bool {
			resp, err := client.Get(t.Context(), prefix+"l/", clientv3.WithPrefix(), clientv3.WithCountOnly())
			if err != nil {
				t.Fatal(err)
			}
			return int(resp.Count) == i+2
		})
		subs[i] = n.subscribe(t, id, 0, "s")
		if _, err := subs[i].Recv(); err != nil {
			t.Fatal(err)
		}
	}
	compact := func() {
		t.Helper()
		resp, err := client.Get(t.Context(), prefix, clientv3.WithCountOnly())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Compact(t.Context(), resp.Header.Revision); err != nil {
			t.Fatal(err)
		}
	}
	receive := func(want string) {
		t.Helper()
		for i, sub := range subs {
			if m := sub.next(t, 1)[0]; string(m.GetPayload()) != want {
				t.Errorf("subscriber %d: %q, want %q", i, m.GetPayload(), want)
			}
		}
	}

	good.publish(t, id, "s", "1")
	compact()
	receive("1")

	k.cut()
	good.publish(t, id, "s", "2")
	good.release(t, held)
	for range 10 {
		good.create(t, "")
	}
	compact()
	k.open(t)
	for _, ch := range waiting {
		n.release(t, take(t, ch))
	}
	receive("2")
	if !strings.Contains(log.String(), "required revision has been compacted") {
		t.Errorf("no watch met the compaction: %s", log.String())
	}
}

// startEtcd starts an etcd as an operator would, with its defaults where set changes nothing, and returns its address.
func startEtcd(t *testing.T, set func(*embed.Config)) string {
	t.Helper()
	ec := embed.NewConfig()
	ec.Dir = filepath.Join(t.TempDir(), "etcd")
	ec.ListenPeerUrls = nil
	socket := filepath.Join(t.TempDir(), "s")
	ec.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	if set != nil {
		set(ec)
	}
	member, err := embed.StartEtcd(ec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(member.Close)
	<-member.Server.ReadyNotify()
	if ec.MaxRequestBytes != 3<<19 {
		t.Fatalf("etcd's limit of requests is %d", ec.MaxRequestBytes)
	}
	return "unix://" + socket
}

// O5: when etcd's space is used up, nodes go on with what needs none: reads, and the destroys that free some. What is wrong and what
// to do is said in the log, the health and the metrics, also by a node that is started then, which cannot become ready.
func TestNoSpace(t *testing.T) {
	endpoint := startEtcd(t, func(ec *embed.Config) { ec.QuotaBackendBytes = 16 << 20 })
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	running := start(t, sessiond.Config{Endpoints: []string{endpoint}})
	id := running.create(t, "kept")
	for err == nil {
		_, err = client.Put(t.Context(), "other", string(make([]byte, 1<<20)))
	}
	if !errors.Is(err, rpctypes.ErrNoSpace) {
		t.Fatal(err)
	}

	log := &lockedBuffer{}
	srv, err := sessiond.New(t.Context(), sessiond.Config{
		Endpoints: []string{endpoint}, Listen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0", Grace: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- srv.Run(ctx) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	n := &node{Server: srv}
	var health string
	eventually(t, 10*time.Second, "its health says so", func() bool {
		var code int
		code, health = get(t, n, "/healthz")
		return code == http.StatusOK && health != ""
	})
	if !strings.Contains(health, "NOSPACE") || !strings.Contains(health, "etcdctl defrag") {
		t.Errorf("health: %q", health)
	}
	if text := log.String(); !strings.Contains(text, "level=ERROR") || !strings.Contains(text, "alarm disarm") {
		t.Errorf("log: %s", text)
	}
	if _, body := get(t, n, "/metrics"); !strings.Contains(body, `sessiond_etcd_alarm{alarm="NOSPACE"} 1`) || !strings.Contains(body, "sessiond_etcd_db_quota_bytes{member=") {
		t.Errorf("no word of it in the metrics")
	}
	if code, _ := get(t, n, "/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("ready: %d", code)
	}
	if s := running.read(t, id); string(s.GetData()) != "kept" || !serving(t, running) {
		t.Errorf("read: %v", s)
	}
	_, err = running.sessions.Save(t.Context(), &sessiondv1.SaveRequest{SessionId: id})
	wantReason(t, err, codes.Unavailable, "BACKEND_UNAVAILABLE")
	if resp, err := running.sessions.Destroy(t.Context(), &sessiondv1.DestroyRequest{SessionId: id}); err != nil || !resp.GetDestroyed() {
		t.Errorf("destroy: %v, %v", resp, err)
	}
	if lines := strings.Count(log.String(), "\n"); lines > 20 {
		t.Errorf("%d lines in the log: %s", lines, log.String())
	}
}

// M4, M2: messages of 4 MiB, published on two nodes at once over an etcd whose limit of requests is its default of 1.5 MiB, arrive
// whole, in one order and once, pushed and stored.
func TestLargestMessages(t *testing.T) {
	endpoint := startEtcd(t, nil)
	var nodes []*node
	for range 2 {
		nodes = append(nodes, start(t, sessiond.Config{Endpoints: []string{endpoint}}))
	}
	id := nodes[0].create(t, "")
	payload := func(publisher, i int) []byte {
		return bytes.Repeat([]byte{byte('a' + publisher), byte('0' + i)}, 2<<20)
	}
	// A busy machine may need longer for it all than a call may take: then a publish is repeated, and a subscription goes on
	// from where it was, as clients do.
	publish := func(publisher, i int) {
		req := &sessiondv1.PublishRequest{SessionId: id, Stream: "s", Payload: payload(publisher, i), RequestId: fmt.Sprintf("%d-%d", publisher, i)}
		for {
			_, err := nodes[publisher].messages.Publish(t.Context(), req)
			if reasonOf(err) == "BACKEND_UNAVAILABLE" {
				continue
			}
			if err != nil {
				t.Error(err)
			}
			return
		}
	}
	const count = 3
	receive := func(n *node) (got []*sessiondv1.Message) {
		var after uint64
		for len(got) < count && !t.Failed() {
			sub := n.subscribe(t, id, after, "s")
			for len(got) < count {
				resp, err := sub.Recv()
				if reasonOf(err) == "BACKEND_UNAVAILABLE" {
					break
				}
				if err != nil {
					t.Error(err)
					return got
				}
				got, after = append(got, resp.GetMessages()...), resp.GetPosition()
			}
			sub.cancel()
		}
		return got
	}
	var pushed []*sessiondv1.Message
	var receiver, publishers sync.WaitGroup
	receiver.Go(func() { pushed = receive(nodes[1]) })
	publishers.Go(func() { publish(0, 0) })
	publishers.Go(func() { publish(1, 0) })
	publishers.Wait()
	publish(0, 1)
	if t.Failed() {
		return
	}
	receiver.Wait()

	stored := receive(nodes[0])
	if len(pushed) != count || len(stored) != count {
		t.Fatalf("%d messages pushed, %d stored, want %d", len(pushed), len(stored), count)
	}
	next := map[byte]int{}
	for i, m := range pushed {
		publisher := m.GetPayload()[0]
		if !bytes.Equal(m.GetPayload(), payload(int(publisher-'a'), next[publisher])) {
			t.Errorf("message %d: %d bytes that begin with %q, want number %d of this publisher", i, len(m.GetPayload()), m.GetPayload()[:2], next[publisher])
		}
		next[publisher]++
		if m.GetPosition() != stored[i].GetPosition() || !bytes.Equal(m.GetPayload(), stored[i].GetPayload()) {
			t.Errorf("message %d: pushed at %d, stored at %d", i, m.GetPosition(), stored[i].GetPosition())
		}
	}
}
