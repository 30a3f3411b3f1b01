package etcdnode

import (
	"context"
	"sync"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
)

// Watcher opens watches. With an embedded member they are watches of its store: each lock that is handed over is an event, and to
// have it written to a socket and read from it by the same process takes more processor time than all else that is done about it.
// It does not go through etcd's in-process client, whose watches can block each other for good when some are cancelled. Its methods
// may be called concurrently.
type Watcher struct {
	client *clientv3.Client
	store  mvcc.Watchable // of the embedded member; nil without one

	mu      sync.Mutex
	closed  bool
	streams map[mvcc.WatchStream]struct{}
	running sync.WaitGroup
}

func newWatcher(client *clientv3.Client, store mvcc.Watchable) *Watcher {
	return &Watcher{client: client, store: store, streams: map[mvcc.WatchStream]struct{}{}}
}

// Watch tells what is put under a prefix, what is removed, or both, from now on. The first response has nothing in it but says that
// the watch has begun. The channel is closed when ctx ends, and when the watch breaks off, after a response that says why.
func (w *Watcher) Watch(ctx context.Context, prefix string, puts, removals bool) <-chan clientv3.WatchResponse {
	if w.store == nil {
		opts := []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithCreatedNotify()}
		if !puts {
			opts = append(opts, clientv3.WithFilterPut())
		}
		if !removals {
			opts = append(opts, clientv3.WithFilterDelete())
		}
		return w.client.Watch(ctx, prefix, opts...)
	}
	responses := make(chan clientv3.WatchResponse)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		close(responses)
		return responses
	}
	w.running.Go(func() {
		defer close(responses)
		w.serve(ctx, prefix, func(e *mvccpb.Event) bool {
			return e.GetType() == mvccpb.Event_PUT && !puts || e.GetType() == mvccpb.Event_DELETE && !removals
		}, responses)
	})
	return responses
}

// serve is a watch of the member's store.
func (w *Watcher) serve(ctx context.Context, prefix string, drop mvcc.FilterFunc, responses chan<- clientv3.WatchResponse) {
	stream := w.store.NewWatchStream()
	w.mu.Lock()
	w.streams[stream] = struct{}{}
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.streams, stream)
		w.mu.Unlock()
		stream.Close()
		for r := range stream.Chan() {
			mvcc.ReportEventReceived(len(r.Events))
		}
	}()
	send := func(r clientv3.WatchResponse) bool {
		select {
		case responses <- r:
			return true
		case <-ctx.Done():
			return false
		}
	}
	_, err := stream.Watch(ctx, clientv3.AutoWatchID, []byte(prefix), []byte(clientv3.GetPrefixRangeEnd(prefix)), 0, drop)
	if err != nil || !send(clientv3.WatchResponse{Header: &etcdserverpb.ResponseHeader{Revision: stream.Rev()}, Created: true}) {
		return
	}
	for {
		select {
		case r := <-stream.Chan():
			mvcc.ReportEventReceived(len(r.Events))
			response := clientv3.WatchResponse{
				Header:          &etcdserverpb.ResponseHeader{Revision: r.Revision},
				Events:          make([]*clientv3.Event, len(r.Events)),
				CompactRevision: r.CompactRevision,
				Canceled:        r.CompactRevision != 0,
			}
			for i, e := range r.Events {
				response.Events[i] = (*clientv3.Event)(e)
			}
			if !send(response) || response.Canceled {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// RequestProgress has each watch give a sign of life, a response without events, unless it has events to tell of.
func (w *Watcher) RequestProgress(ctx context.Context) error {
	if w.store == nil {
		return w.client.RequestProgress(ctx)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for stream := range w.streams {
		stream.RequestProgressAll()
	}
	return nil
}

// close waits for the watches, which have to have been ended, and lets none begin any more.
func (w *Watcher) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.running.Wait()
}
