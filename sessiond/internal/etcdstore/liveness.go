package etcdstore

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

const (
	// How long a node counts as living after its last sign of life. etcd takes up to half a second more to notice, and
	// grants no less than one and a half times its election timeout.
	nodeTTL = 3 * time.Second
	// How soon a sign of life that failed is tried again.
	nodeRetry = 250 * time.Millisecond
	// How long one may take.
	nodeCall = time.Second
	// Of how many front-ends it is remembered that they find out late.
	maxLate = 1 << 17
)

var errNoNode = errors.New("node is not known to the others")

// liveness has the node's own key, which front-ends are attached where, and those that are attached here.
type liveness struct {
	keys keys

	mu        sync.Mutex
	lease     clientv3.LeaseID // of the node's key; 0: there is none
	known     chan struct{}    // closed while there is
	frontEnds map[string]int64 // all that are attached anywhere: the revision of their keys
	here      map[string]*attachment

	// Of front-ends that find out late that their nodes have died: how late. It is asked for when their keys have gone.
	lateness *recent[time.Duration]
}

func newLiveness(k keys) *liveness {
	return &liveness{
		keys: k, known: make(chan struct{}), frontEnds: map[string]int64{}, here: map[string]*attachment{},
		lateness: newRecent[time.Duration](maxLate),
	}
}

// wait waits until the node has its key.
func (l *liveness) wait(ctx context.Context) error {
	l.mu.Lock()
	known := l.known
	l.mu.Unlock()
	select {
	case <-known:
		return nil
	default:
	}
	select {
	case <-known:
		return nil
	case <-ctx.Done():
		return errNoNode
	}
}

func (l *liveness) isKnown() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lease != 0
}

func (l *liveness) set(lease clientv3.LeaseID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lease = lease
	close(l.known)
}

// lost notes that the node's key has gone, and with it what is attached here.
func (l *liveness) lost() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lease != 0 {
		l.lease = 0
		l.known = make(chan struct{})
	}
	l.endAllLocked()
}

// doubt ends what is attached here, because it may have gone: the front-ends can attach elsewhere in time.
func (l *liveness) doubt() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endAllLocked()
}

func (l *liveness) endAllLocked() {
	for _, a := range l.here {
		a.endLocked(session.ErrUnavailable)
	}
}

// askAll has all front-ends that are attached here asked for their claims.
func (l *liveness) askAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.here {
		select {
		case a.asks <- struct{}{}:
		default:
		}
	}
}

// attached says whether a front-end is attached anywhere, as far as this node has heard.
func (l *liveness) attached(frontEnd string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.frontEnds[frontEnd]
	return ok
}

// onFrontEnd takes what happens to front-ends' keys.
func (l *liveness) onFrontEnd(ev *clientv3.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seenLocked(ev.Kv, ev.Type == mvccpb.DELETE)
}

func (l *liveness) seenLocked(kv *mvccpb.KeyValue, gone bool) {
	id := unescaper.Replace(strings.TrimPrefix(string(kv.Key), l.keys.allFrontEnds()))
	switch {
	case kv.ModRevision < l.frontEnds[id]:
		return
	case gone:
		delete(l.frontEnds, id)
	default:
		l.frontEnds[id] = kv.ModRevision
		// A value that cannot be read says nothing.
		rec, _ := decodeFrontEnd(kv.Value)
		if late := rec.lateness(); late != l.lateness.of(id) {
			l.lateness.set(id, func(known *time.Duration) { *known = late })
		}
	}
	if a := l.here[id]; a != nil && kv.ModRevision > a.revision {
		if gone {
			a.endLocked(session.ErrUnavailable)
		} else {
			a.endLocked(lock.ErrReplaced)
		}
	}
}

// loadFrontEnds reads who is attached where, when the watch has begun.
func (s *Store) loadFrontEnds(ctx context.Context) error {
	ctx, cancel := s.op(ctx)
	defer cancel()
	resp, err := s.kv.Get(ctx, s.keys.allFrontEnds(), clientv3.WithPrefix())
	if err != nil {
		return err
	}
	l := s.live
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.frontEnds)
	for _, kv := range resp.Kvs {
		l.seenLocked(kv, false)
	}
	for id, a := range l.here {
		if _, ok := l.frontEnds[id]; !ok && a.revision <= resp.Header.Revision {
			a.endLocked(session.ErrUnavailable)
		}
	}
	return nil
}

// keepNode keeps the node's key alive until ctx ends, and makes it again when it has gone.
func (s *Store) keepNode(ctx context.Context) {
	for said := false; ctx.Err() == nil; {
		lease, ttl, err := s.register(ctx)
		if err == nil {
			said = false
			s.live.set(lease)
			err = s.keepLease(ctx, lease, ttl)
		}
		if ctx.Err() != nil {
			return
		}
		if !said && !s.isDown() {
			said = true
			s.logger.WarnContext(ctx, "node is not known to the others, making it known again", "error", err)
		}
		s.live.lost()
		pause(ctx, nodeRetry)
	}
}

func (s *Store) register(ctx context.Context) (clientv3.LeaseID, time.Duration, error) {
	ctx, cancel := s.op(ctx)
	defer cancel()
	lease, err := s.lease.Grant(ctx, int64(nodeTTL/time.Second))
	if err != nil {
		return 0, 0, err
	}
	s.grants.Add(1)
	_, err = s.kv.Put(ctx, s.keys.node(s.node), "", clientv3.WithLease(lease.ID))
	return lease.ID, time.Duration(lease.TTL) * time.Second, err
}

// keepLease returns when the lease has gone.
func (s *Store) keepLease(ctx context.Context, lease clientv3.LeaseID, ttl time.Duration) error {
	until := time.Now().Add(ttl)
	wait := ttl / 3
	for {
		pause(ctx, wait)
		began := time.Now()
		cctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), nodeCall)
		_, err := s.lease.KeepAliveOnce(cctx, lease)
		cancel()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			until, wait = began.Add(ttl), ttl/3
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			return err
		default:
			// It may live on: while etcd has no leader, no lease ends.
			wait = nodeRetry
			if time.Now().After(until) {
				s.live.doubt()
			}
		}
	}
}

// leave removes the node's key, and what is attached to it, which tells the others.
func (s *Store) leave(ctx context.Context) {
	s.live.mu.Lock()
	lease := s.live.lease
	s.live.mu.Unlock()
	if lease == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, revokeAtMost)
	defer cancel()
	_, _ = s.lease.Revoke(ctx, lease) // or it ends by itself
}

// nodeDied is called when a node has gone, or may have.
func (s *Store) nodeDied() {
	s.live.askAll()
	s.sweeper.kick()
}

func (s *Store) nodeIDs(resp *clientv3.GetResponse) []string {
	ids := make([]string, 0, len(resp.Kvs))
	for _, kv := range resp.Kvs {
		ids = append(ids, strings.TrimPrefix(string(kv.Key), s.keys.allNodes()))
	}
	return ids
}

// pause waits, unless ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// pauseFor is pause until there is more at the latest; without an end of its own if d is 0.
func pauseFor(ctx context.Context, more <-chan struct{}, d time.Duration) {
	var end <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		end = timer.C
	}
	select {
	case <-more:
	case <-end:
	case <-ctx.Done():
	}
}

// attachment implements lock.Attachment.
type attachment struct {
	s        *Store
	frontEnd string
	key      string
	value    string // of the key, as this attachment wrote it and no other does
	revision int64  // of the key; 0: not known
	asks     chan struct{}
	ended    chan struct{}

	// Under liveness.mu.
	err error
}

// Attach implements lock.FrontEndStore.
func (s *Store) Attach(ctx context.Context, frontEnd string, number uint64, every time.Duration) (lock.Attachment, error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	if err := s.live.wait(octx); err != nil {
		return nil, s.fail(ctx, err)
	}
	s.live.mu.Lock()
	lease := s.live.lease
	s.live.mu.Unlock()
	a := &attachment{
		s: s, frontEnd: frontEnd, key: s.keys.frontEnd(frontEnd),
		value: frontEndRecord{Node: s.node, Number: number, LatenessMS: lock.Lateness(every).Milliseconds()}.encode(),
		asks:  make(chan struct{}, 1), ended: make(chan struct{}),
	}
	// One that attaches for the first time is known nowhere.
	revision := int64(0)
	if number > 1 {
		read, err := s.kv.Get(octx, a.key)
		if err != nil {
			return nil, s.fail(ctx, err)
		}
		if revision, err = attachedBefore(read.Kvs, number); err != nil {
			return nil, err
		}
	}
	// What is sent is waited for, although the front-end may have gone meanwhile: somebody has to know that it is attached.
	tctx, cancel := s.op(context.WithoutCancel(ctx))
	defer cancel()
	for range leaseTries {
		resp, err := s.txn(tctx,
			[]compare{writtenAt(a.key, revision)},
			[]operation{opPut(a.key, []byte(a.value), lease)},
			[]operation{opGet(a.key)})
		switch {
		case refused(err):
			return nil, s.fail(ctx, err)
		case err != nil:
			a.end(session.ErrUnavailable)
			return a, s.fail(ctx, err)
		case resp.Succeeded:
			a.revision = resp.Header.Revision
			s.live.add(a, lease)
			return a, nil
		}
		if revision, err = attachedBefore(resp.Responses[0].GetResponseRange().Kvs, number); err != nil {
			return nil, err
		}
	}
	return nil, s.fail(ctx, errUnsettled)
}

// attachedBefore returns the revision at which the key of a front-end was written, 0 if there is none, or ErrReplaced if by a later
// attach than one with that number.
func attachedBefore(kvs []*mvccpb.KeyValue, number uint64) (int64, error) {
	if len(kvs) == 0 {
		return 0, nil
	}
	rec, err := decodeFrontEnd(kvs[0].Value)
	if err == nil && rec.Number >= number {
		err = lock.ErrReplaced
	}
	return kvs[0].ModRevision, err
}

func (l *liveness) add(a *attachment, lease clientv3.LeaseID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if old := l.here[a.frontEnd]; old != nil {
		if old.revision > a.revision {
			a.endLocked(lock.ErrReplaced)
			return
		}
		old.endLocked(lock.ErrReplaced)
	}
	l.here[a.frontEnd] = a
	switch {
	case l.lease != lease:
		a.endLocked(session.ErrUnavailable)
	case l.frontEnds[a.frontEnd] > a.revision:
		a.endLocked(lock.ErrReplaced)
	default:
		l.frontEnds[a.frontEnd] = a.revision
	}
}

func (a *attachment) endLocked(err error) {
	if a.err == nil {
		a.err = err
		close(a.ended)
	}
}

func (a *attachment) end(err error) {
	a.s.live.mu.Lock()
	defer a.s.live.mu.Unlock()
	a.endLocked(err)
}

func (a *attachment) Ended() <-chan struct{} { return a.ended }
func (a *attachment) Asks() <-chan struct{}  { return a.asks }

func (a *attachment) Err() error {
	a.s.live.mu.Lock()
	defer a.s.live.mu.Unlock()
	return a.err
}

func (a *attachment) Close() {
	l := a.s.live
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.here[a.frontEnd] == a {
		delete(l.here, a.frontEnd)
	}
}

func (a *attachment) Position(ctx context.Context) (uint64, error) {
	octx, cancel := a.s.op(ctx)
	defer cancel()
	resp, err := a.s.kv.Get(octx, a.key, clientv3.WithCountOnly())
	if err != nil {
		return 0, a.s.fail(ctx, err)
	}
	return uint64(resp.Header.Revision), nil
}

func (a *attachment) Keep(ctx context.Context, position uint64, claims []lock.Claim) error {
	claimed := make(map[string]struct{}, len(claims))
	for _, c := range claims {
		claimed[a.s.keys.lock(c.Session, c.Request)] = struct{}{}
	}
	found, err := a.s.passes.of(ctx, a.s, a.frontEnd)
	if err != nil {
		return a.s.fail(ctx, err)
	}
	found = slices.DeleteFunc(found, func(e queued) bool {
		_, ok := claimed[e.key]
		return ok || uint64(e.created) > position
	})
	return a.remove(ctx, found, false)
}

func (a *attachment) Abandon(ctx context.Context, requests []lock.Claim) error {
	var found []queued
	for len(requests) > 0 {
		n := min(len(requests), maxTxnOps)
		var ops []operation
		for _, r := range requests[:n] {
			ops = append(ops, opGet(a.s.keys.lock(r.Session, r.Request)))
		}
		requests = requests[n:]
		octx, cancel := a.s.op(ctx)
		resp, err := a.s.kv.read(octx, ops...)
		cancel()
		if err != nil {
			return a.s.fail(ctx, err)
		}
		for _, r := range resp.Responses {
			for _, kv := range r.GetResponseRange().Kvs {
				if e, ok := toQueued(kv); ok && e.FrontEnd == a.frontEnd {
					found = append(found, e)
				}
			}
		}
	}
	return a.remove(ctx, found, false)
}

func (a *attachment) Detach(ctx context.Context) error {
	found, err := a.s.passes.of(ctx, a.s, a.frontEnd)
	if err != nil {
		return a.s.fail(ctx, err)
	}
	return a.remove(ctx, found, true)
}

// remove removes entries, and in the end the attachment, if the front-end is still attached here and not anew.
func (a *attachment) remove(ctx context.Context, entries []queued, detach bool) error {
	guard := hasValue(a.key, a.value)
	var removals []removal
	for _, e := range entries {
		removals = append(removals, removal{e.key, []compare{createdAt(e.key, e.created)}})
	}
	if detach {
		removals = append(removals, removal{key: a.key})
	}
	kept, err := a.s.remove(ctx, []compare{guard}, removals)
	if err != nil {
		return a.s.fail(ctx, err)
	}
	if kept {
		a.end(lock.ErrReplaced)
	}
	return nil
}
