package etcdnode

import (
	"context"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// eachWatcher runs a test on watches within the process and over a connection: they tell the same.
func eachWatcher(t *testing.T, test func(t *testing.T, n *Node, w *Watcher)) {
	n, err := Embed(t.Context(), EmbedConfig{DataDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	remote, err := Connect(ConnectConfig{Endpoints: n.Endpoints()})
	if err != nil {
		t.Fatal(err)
	}
	for name, w := range map[string]*Watcher{"in process": n.Watcher(), "remote": remote.Watcher()} {
		t.Run(name, func(t *testing.T) { test(t, n, w) })
	}
	for _, node := range []*Node{remote, n} {
		if err := node.Close(); err != nil {
			t.Error(err)
		}
	}
}

// begin opens a watch and waits until it has begun.
func begin(ctx context.Context, t *testing.T, w *Watcher, prefix string, puts, removals bool) <-chan clientv3.WatchResponse {
	t.Helper()
	responses := w.Watch(ctx, prefix, puts, removals)
	if r := <-responses; !r.Created || len(r.Events) > 0 || r.Err() != nil {
		t.Fatalf("the first response is %+v", r)
	}
	return responses
}

// A watch tells what it is to tell, in order, and nothing else; it ends with its context.
func TestWatch(t *testing.T) {
	eachWatcher(t, func(t *testing.T, n *Node, w *Watcher) {
		for _, want := range []struct {
			puts, removals bool
			events         string
		}{
			{true, true, "[PUT a/1=x PUT a/2=y DELETE a/1= PUT a/1=z DELETE a/1= DELETE a/2=]"},
			{true, false, "[PUT a/1=x PUT a/2=y PUT a/1=z]"},
			{false, true, "[DELETE a/1= DELETE a/1= DELETE a/2=]"},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			responses := begin(ctx, t, w, "a/", want.puts, want.removals)
			for _, op := range []clientv3.Op{
				clientv3.OpPut("a/1", "x"), clientv3.OpPut("a/2", "y"), clientv3.OpPut("b/1", "no"),
				clientv3.OpDelete("a/1"), clientv3.OpPut("a/1", "z"), clientv3.OpDelete("a", clientv3.WithPrefix()),
			} {
				if _, err := n.Client().Do(t.Context(), op); err != nil {
					t.Fatal(err)
				}
			}
			var got []string
			for fmt.Sprint(got) != want.events {
				select {
				case r := <-responses:
					for _, e := range r.Events {
						if e.Kv.ModRevision != r.Header.Revision {
							t.Errorf("%s is of revision %d, the response of %d", e.Kv.Key, e.Kv.ModRevision, r.Header.Revision)
						}
						got = append(got, fmt.Sprintf("%s %s=%s", e.Type, e.Kv.Key, e.Kv.Value))
					}
				case <-time.After(10 * time.Second):
					t.Fatalf("told %v, want %s", got, want.events)
				}
				if len(got) > 6 {
					t.Fatalf("told %v, want %s", got, want.events)
				}
			}
			cancel()
			for range responses { // until it is closed
			}
		}
	})
}

// Who reads late misses nothing and holds up nobody: not those who write, nor other watches.
func TestWatchReadLate(t *testing.T) {
	eachWatcher(t, func(t *testing.T, n *Node, w *Watcher) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		late, prompt := begin(ctx, t, w, "a/", true, false), begin(ctx, t, w, "a/", true, false)
		const count = 1000
		for i := range count {
			if _, err := n.KV().Put(t.Context(), "a/1", fmt.Sprint(i)); err != nil {
				t.Fatal(err)
			}
			if r := <-prompt; len(r.Events) != 1 {
				t.Fatalf("%d events at once", len(r.Events))
			}
		}
		for next := 0; next < count; {
			for _, e := range (<-late).Events {
				if got := string(e.Kv.Value); got != fmt.Sprint(next) {
					t.Fatalf("told %s, want %d", got, next)
				}
				next++
			}
		}
		cancel()
		for _, responses := range []<-chan clientv3.WatchResponse{late, prompt} {
			for range responses { // until it is closed
			}
		}
	})
}

// An idle watch gives a sign of life when it is asked for one.
func TestWatchProgress(t *testing.T) {
	eachWatcher(t, func(t *testing.T, _ *Node, w *Watcher) {
		ctx, cancel := context.WithCancel(t.Context())
		responses := begin(ctx, t, w, "a/", true, true)
		if err := w.RequestProgress(ctx); err != nil {
			t.Fatal(err)
		}
		if r := <-responses; !r.IsProgressNotify() {
			t.Errorf("told %+v", r)
		}
		cancel()
		for range responses { // until it is closed
		}
	})
}
