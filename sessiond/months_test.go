package sessiond_test

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

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

// M4, M2: messages of 4 MiB, published on two nodes at once over an etcd whose limit of requests is its default of 1.5 MiB, arrive
// whole, in one order and once, pushed and stored.
func TestLargestMessages(t *testing.T) {
	ec := embed.NewConfig()
	ec.Dir = filepath.Join(t.TempDir(), "etcd")
	ec.ListenPeerUrls = nil
	socket := filepath.Join(t.TempDir(), "s")
	ec.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	member, err := embed.StartEtcd(ec)
	if err != nil {
		t.Fatal(err)
	}
	defer member.Close()
	<-member.Server.ReadyNotify()
	if ec.MaxRequestBytes != 3<<19 {
		t.Fatalf("etcd's limit is %d", ec.MaxRequestBytes)
	}

	var nodes []*node
	for range 2 {
		nodes = append(nodes, start(t, sessiond.Config{Endpoints: []string{"unix://" + socket}}))
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
