package etcdstore

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

const (
	leftoversEvery = 500 * time.Millisecond
	// How many acquires may be making their entries. What etcd cannot do in time is no sign that it cannot be reached when thousands
	// come at once, so the others wait before their time runs.
	maxJoining = 1024
)

var (
	errUnsettled = errors.New("lock entry comes and goes")
	errTakenOver = errors.New("a retry of the same request has taken over")
)

// firstEntry reads the oldest entry of a queue; the answer's count is the length of the queue.
func (s *Store) firstEntry(id string) operation {
	return opGetOldest(s.keys.locks(id))
}

// entryBefore reads the youngest entry that is older than a revision.
func (s *Store) entryBefore(id string, revision int64) operation {
	return opGetYoungestKey(s.keys.locks(id), revision-1)
}

func (s *Store) readSession(id string, data bool) operation {
	return readRecord(s.keys.session(id), data)
}

// readRecord is readSession for the session's key.
func readRecord(key string, data bool) operation {
	if data {
		return opGet(key)
	}
	return opGetKey(key)
}

type foundRequest struct {
	exists  bool // the session
	request string
}

// findRequest looks up the request id of a grant.
func (s *Store) findRequest(ctx context.Context, id string, token uint64) (foundRequest, error) {
	resp, err := s.kv.read(ctx,
		s.readSession(id, false),
		opGetKeysMade(s.keys.locks(id), int64(token), int64(token)),
	)
	if err != nil {
		return foundRequest{}, err
	}
	found := foundRequest{exists: len(resp.Responses[0].GetResponseRange().Kvs) > 0}
	if kvs := resp.Responses[1].GetResponseRange().Kvs; len(kvs) > 0 {
		found.request = request(string(kvs[0].Key))
	}
	return found, nil
}

// view makes a view of the answers to readSession, a read of the caller's own entry, and firstEntry.
func (s *Store) view(ctx context.Context, r lock.Request, revision int64, sess, own, first []*mvccpb.KeyValue, queue int64) (lock.View, error) {
	v := lock.View{Exists: len(sess) > 0, Waiting: int(max(queue-1, 0)), Position: uint64(revision)}
	var err error
	if v.Own, err = toEntry(own); err != nil {
		return v, err
	}
	if v.First, err = toEntry(first); err != nil {
		return v, err
	}
	if v.Exists && r.Read {
		found, err := s.decode(ctx, r.Session, sess[0])
		if err != nil {
			return v, err
		}
		v.Session = &found
	}
	return v, nil
}

func toEntry(kvs []*mvccpb.KeyValue) (*lock.Entry, error) {
	if len(kvs) == 0 {
		return nil, nil
	}
	rec, err := decodeEntry(kvs[0].Value)
	if err != nil {
		return nil, err
	}
	return &lock.Entry{Request: request(string(kvs[0].Key)), Holder: rec.Holder, Token: uint64(kvs[0].CreateRevision)}, nil
}

// Look implements lock.Store.
func (s *Store) Look(ctx context.Context, r lock.Request) (lock.View, error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	resp, err := s.kv.read(octx, s.overview(r)...)
	if err != nil {
		return lock.View{}, s.fail(ctx, err)
	}
	r.Read = false
	sess, own, first := overviewed(resp)
	v, err := s.view(octx, r, resp.Header.Revision, sess, own, first.Kvs, first.Count)
	return v, s.known(ctx, err)
}

// overview reads what a request's caller can see of the session and the queue, and overviewed has the answers.
func (s *Store) overview(r lock.Request) []operation {
	return []operation{s.readSession(r.Session, false), opGet(s.keys.lock(r.Session, r.ID)), s.firstEntry(r.Session)}
}

func overviewed(resp *etcdserverpb.TxnResponse) (sess, own []*mvccpb.KeyValue, first *etcdserverpb.RangeResponse) {
	return resp.Responses[0].GetResponseRange().Kvs, resp.Responses[1].GetResponseRange().Kvs, resp.Responses[2].GetResponseRange()
}

// Release implements lock.Store.
func (s *Store) Release(ctx context.Context, sessionID, request string, token uint64) error {
	octx, cancel := s.op(ctx)
	defer cancel()
	if request == "" {
		found, err := s.findRequest(octx, sessionID, token)
		if err != nil {
			return s.fail(ctx, err)
		}
		if found.request == "" {
			return lock.ErrNotHeld
		}
		request = found.request
	}
	key := s.keys.lock(sessionID, request)
	next := s.hub.successor(sessionID, key)
	defer next.settle()
	resp, err := s.group.txn(octx, &step{
		about: s.keys.session(sessionID),
		role:  releases, entry: key, holds: true, urgent: next != nil,
		cmps: s.holds(sessionID, request, token),
		then: append([]operation{opDelete(key)}, next.reads()...),
	})
	if err != nil {
		return s.fail(ctx, err)
	}
	if !resp.Succeeded {
		return lock.ErrNotHeld
	}
	next.granted(resp, 1)
	s.removed(sessionID, key, resp.Header.Revision)
	return nil
}

// removed notes that this node removed an entry.
func (s *Store) removed(sessionID, key string, revision int64) {
	s.pool.released(key, revision)
	s.tails.removed(sessionID, key, revision)
}

// place implements lock.Place.
type place struct {
	s      *Store
	r      lock.Request
	key    string
	waiter *waiter

	record  entryRecord // what this call wrote
	value   string      // the same as the entry's value; empty: nothing yet
	unsure  bool        // whether it wrote it
	created int64
	lease   pooled
	number  int64  // of the entry; 0: not known
	counter int64  // the revision at which what counts them was made
	seen    uint64 // the term in which the entry was last looked at
}

// Place implements lock.Store.
func (s *Store) Place(r lock.Request) lock.Place {
	key := s.keys.lock(r.Session, r.ID)
	return &place{s: s, r: r, key: key, waiter: s.hub.addWaiter(r.Session, key)}
}

func (p *place) Close()                { p.s.hub.removeWaiter(p.waiter) }
func (p *place) Wake() <-chan struct{} { return p.waiter.wake }

func (p *place) CheckAfter() time.Duration {
	return max(min(p.lease.leaseTTL/3, time.Until(p.lease.until)/2), 50*time.Millisecond)
}

func (p *place) Join(ctx context.Context, ifFree bool) (lock.View, error) {
	if err := p.waitToJoin(ctx); err != nil {
		return lock.View{}, err
	}
	defer func() { <-p.s.joining }()
	octx, cancel := p.s.op(ctx)
	defer cancel()
	for range leaseTries {
		v, again, err := p.join(octx, ifFree)
		if err != nil {
			return v, p.s.known(ctx, err)
		}
		if !again {
			return v, nil
		}
	}
	return lock.View{}, p.s.fail(ctx, errUnsettled)
}

// waitToJoin waits until the caller may make its entry, no longer than for the lock itself.
func (p *place) waitToJoin(ctx context.Context) error {
	select {
	case p.s.joining <- struct{}{}:
		return nil
	default:
	}
	var timeout <-chan time.Time
	if p.r.Timeout > 0 {
		timer := time.NewTimer(p.r.Timeout)
		defer timer.Stop()
		timeout = timer.C
	}
	select {
	case p.s.joining <- struct{}{}:
		return nil
	case <-timeout:
		return lock.ErrTimeout
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-p.s.Down():
		return session.ErrUnavailable
	}
}

func (p *place) join(ctx context.Context, ifFree bool) (v lock.View, again bool, err error) {
	s, r := p.s, p.r
	s.hub.unset(p.waiter)
	// Without its key, the node's waiting entries would count as those of a dead one.
	if err := s.live.wait(ctx); err != nil {
		return v, false, err
	}
	tail, err := s.tails.lease(ctx, r.Session)
	if err != nil {
		return v, false, err
	}
	l, err := s.pool.take(ctx, r.TTL)
	if err != nil {
		return v, false, err
	}
	p.record = entryRecord{
		Holder: r.Holder, Node: s.node, Mark: s.marks.Add(1),
		FrontEnd: r.FrontEnd, Attached: r.FrontEnd != "" && s.live.attached(r.FrontEnd), Term: l.granted,
	}
	p.value = p.record.encode()
	about := s.keys.session(r.Session)
	var around surroundings
	entry := &step{
		about: about,
		role:  acquires, entry: p.key,
		cmps: []compare{exists(about), missing(p.key)},
		then: []operation{
			opPut(p.key, []byte(p.value), l.id),
			readRecord(about, r.Read),
			opExchange(s.keys.tail(r.Session), []byte(p.key), tail),
		},
		late: func() []operation {
			around = s.surroundings(r.Session)
			return around.ops(s.keys)
		},
		most: maxChain + 1,
	}
	if ifFree {
		entry.role = apart // its compare speaks of the entry that a release removes
		entry.cmps = append(entry.cmps, empty(s.keys.locks(r.Session)))
	} else {
		entry.patient = s.hub.crowded(p.waiter)
	}
	resp, err := s.group.txn(ctx, entry)
	switch {
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		s.tails.drop(ctx, tailTTL, tail) // of the two, one is gone
		return v, true, nil
	case errors.Is(err, errNotSent):
		s.pool.put(l)
		p.value = ""
		return v, false, err
	}
	if p.unsure = err != nil; p.unsure {
		return v, false, err
	}

	if !resp.Succeeded {
		s.pool.put(l)
		p.value = ""
		return p.refused(ctx, ifFree)
	}

	p.created, p.lease = resp.Header.Revision, l
	s.pool.hold(p.key, p.created, l)
	s.terms.see(resp.Header.RaftTerm)
	sess, tailBefore := resp.Responses[1].GetResponseRange(), resp.Responses[2].GetResponsePut().PrevKv
	p.number, p.counter = 1, p.created
	if tailBefore != nil {
		p.number, p.counter = tailBefore.Version+1, tailBefore.CreateRevision
	}
	s.tails.setLast(r.Session, p.made(), tail)
	at := around.found(resp.Responses[3:], p.made(), tailBefore)
	at.first = at.first || ifFree
	if sure := resp.Header.RaftTerm <= p.lease.term; !sure || (!at.first && at.holder == nil) {
		v, err = p.confirm(ctx, true, !sure)
		return v, false, err
	}
	s.hub.set(p.waiter, p.standing(at.before, resp.Header.Revision))
	if at.first {
		v, err = s.view(ctx, r, resp.Header.Revision, sess.Kvs, nil, nil, 1)
		return p.first(v), false, err
	}
	r.Read = false
	v, err = s.view(ctx, r, resp.Header.Revision, sess.Kvs, nil, []*mvccpb.KeyValue{at.holder}, int64(at.waiting)+1)
	v.Own, v.Until = p.own(), p.lease.until
	return v, false, err
}

// refused finds out why no entry could be made. The step itself could tell, but hardly any is refused, and all would carry what that
// reads. If the reason has gone since, the entry can be made now.
func (p *place) refused(ctx context.Context, ifFree bool) (v lock.View, again bool, err error) {
	resp, err := p.s.kv.read(ctx, p.s.overview(p.r)...)
	if err != nil {
		return v, false, err
	}
	sess, own, first := overviewed(resp)
	if len(own) > 0 {
		if len(sess) > 0 {
			return p.takeOver(ctx, own[0])
		}
		p.value = string(own[0].Value) // of a session that has gone: to be removed
	}
	r := p.r
	r.Read = false
	v, err = p.s.view(ctx, r, resp.Header.Revision, sess, own, first.Kvs, first.Count)
	return v, v.Exists && (!ifFree || v.First == nil), err
}

// takeOver makes the entry that an earlier call of the same request made this call's own, in its place and with its
// lease, which is not refreshed: it may be held. Only if it is not known any more how long that lives, since etcd's leader has
// changed, the entry gets another.
func (p *place) takeOver(ctx context.Context, kv *mvccpb.KeyValue) (v lock.View, again bool, err error) {
	s, r := p.s, p.r
	rec, err := decodeEntry(kv.Value)
	if err != nil {
		return v, false, err
	}
	rec.Node, rec.Mark = s.node, s.marks.Add(1)
	p.record, p.value = rec, rec.encode()
	l, ok := s.pool.of(p.key, kv.CreateRevision)
	if !ok {
		l = pooled{id: clientv3.LeaseID(kv.Lease), leaseTTL: lockLeaseTTL(r.TTL), granted: rec.Term, until: time.Now(), term: rec.Term}
		left, err := s.lease.TimeToLive(ctx, l.id)
		if err != nil {
			return v, false, err
		}
		l.until = l.until.Add(time.Duration(max(left.TTL, 0)) * time.Second)
	}
	resp, err := s.group.txn(ctx, &step{
		about: s.keys.session(r.Session),
		cmps: []compare{
			exists(s.keys.session(r.Session)),
			createdAt(p.key, kv.CreateRevision),
			writtenAt(p.key, kv.ModRevision),
		},
		then: []operation{
			opPutValue(p.key, []byte(p.value)),
			s.readSession(r.Session, r.Read),
			opGet(p.key),
			s.firstEntry(r.Session),
			s.entryBefore(r.Session, kv.CreateRevision),
		},
	})
	if err != nil {
		return v, false, err
	}
	if !resp.Succeeded {
		return v, true, nil
	}
	p.created, p.lease = kv.CreateRevision, l
	p.number, p.counter = 0, 0
	s.terms.see(resp.Header.RaftTerm)
	if resp.Header.RaftTerm > l.term {
		v, err = p.confirm(ctx, true, true)
		return v, false, err
	}
	before := ""
	if kvs := resp.Responses[4].GetResponseRange().Kvs; len(kvs) > 0 {
		before = string(kvs[0].Key)
	}
	s.hub.set(p.waiter, p.standing(before, resp.Header.Revision))
	first := resp.Responses[3].GetResponseRange()
	v, err = s.view(ctx, r, resp.Header.Revision, resp.Responses[1].GetResponseRange().Kvs,
		resp.Responses[2].GetResponseRange().Kvs, first.Kvs, first.Count)
	v.Until = p.lease.until
	return v, false, err
}

func (p *place) Check(ctx context.Context) (lock.View, error) {
	octx, cancel := p.s.op(ctx)
	defer cancel()
	v, err := p.check(octx)
	return v, p.s.known(ctx, err)
}

func (p *place) check(ctx context.Context) (lock.View, error) {
	s := p.s
	s.checks.Add(1)
	if t := s.hub.turnOf(ctx, p.waiter); t != nil {
		v, err := s.view(ctx, p.r, t.revision, t.session, nil, nil, 1)
		return p.first(v), err
	}
	s.hub.unset(p.waiter)
	return p.confirm(ctx, false, time.Until(p.lease.until) < enough(p.r.TTL))
}

// confirm looks at the queue, after a renewal of the lease if that is due. It shows the lock held only if it is known, in the
// term of the look, how long the lease lives: no leader of that or an earlier term can have it end sooner. The hub must have
// been told to keep what goes meanwhile.
func (p *place) confirm(ctx context.Context, whole, renew bool) (lock.View, error) {
	s := p.s
	for {
		if renew {
			if err := p.renew(ctx); err != nil {
				return lock.View{}, err
			}
		}
		v, err := p.look(ctx, whole)
		if err != nil || !v.Held() || p.seen <= p.lease.term {
			return v, err
		}
		s.hub.unset(p.waiter)
		renew = true
	}
}

// renew starts the lease anew, or has the entry take another if that of its own is good no more.
func (p *place) renew(ctx context.Context) error {
	s := p.s
	if p.lease.granted < s.terms.now() {
		return p.move(ctx)
	}
	l, err := s.pool.refresh(ctx, p.lease)
	switch {
	case err == nil:
		p.lease = l
		s.pool.extend(p.key, p.created, l)
	case !errors.Is(err, rpctypes.ErrLeaseNotFound):
		return err
	}
	return nil
}

// move has the entry take another lease, in its place. It is not held, unless by a call whose answer was lost. If the entry is
// gone nothing is done.
func (p *place) move(ctx context.Context) error {
	s := p.s
	for range leaseTries {
		l, err := s.pool.take(ctx, p.r.TTL)
		if err != nil {
			return err
		}
		was := p.value
		p.record.Mark, p.record.Term = s.marks.Add(1), l.granted
		p.value = p.record.encode()
		resp, err := s.group.txn(ctx, &step{
			about: s.keys.session(p.r.Session),
			cmps: []compare{
				createdAt(p.key, p.created),
				hasValue(p.key, was),
			},
			then: []operation{opPut(p.key, []byte(p.value), l.id)},
			els:  []operation{opGetKey(p.key)},
		})
		switch {
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			p.value = was
			continue
		case errors.Is(err, errNotSent):
			s.pool.put(l)
			p.value = was
			return err
		case err != nil:
			p.unsure = true
			s.left.add(leftover{key: p.key, value: was, until: time.Now().Add(lockLeaseTTL(p.r.TTL))})
			return err
		case resp.Succeeded:
			p.lease = l
			s.pool.hold(p.key, p.created, l)
			return nil
		}
		s.pool.put(l)
		p.value = was
		if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 && kvs[0].CreateRevision == p.created {
			return errTakenOver
		}
		return nil
	}
	return errUnsettled
}

// first makes a view one of a queue whose first entry is the caller's.
func (p *place) first(v lock.View) lock.View {
	v.Own = p.own()
	v.First, v.Until = v.Own, p.lease.until
	p.isFirst()
	return v
}

// isFirst notes that the entry is the first of its queue.
func (p *place) isFirst() {
	p.s.pool.setFirst(p.key, p.created)
	p.s.tails.setHead(p.r.Session, p.made())
}

func (p *place) made() made { return made{p.key, p.created, p.number, p.counter} }

func (p *place) own() *lock.Entry {
	return &lock.Entry{Request: p.r.ID, Holder: p.r.Holder, Token: uint64(p.created)}
}

// standing says where the entry stands as of a revision.
func (p *place) standing(before string, revision int64) standing {
	return standing{
		before: before, revision: revision,
		number: p.number, counter: p.counter,
		created: p.created, ready: p.lease.until.Add(-enough(p.r.TTL)), term: p.lease.term,
		read: p.r.Read,
	}
}

// look shows the queue around the entry, and with whole also the holder and the length, for which etcd reads all of it once
// more. The hub must have been told to keep what goes meanwhile.
func (p *place) look(ctx context.Context, whole bool) (lock.View, error) {
	s, r := p.s, p.r
	ops := []operation{
		s.readSession(r.Session, r.Read),
		opGet(p.key),
		s.entryBefore(r.Session, p.created),
	}
	if whole {
		ops = append(ops, s.firstEntry(r.Session))
	}
	resp, err := s.kv.read(ctx, ops...)
	if err != nil {
		return lock.View{}, err
	}
	sess, own, before := resp.Responses[0].GetResponseRange().Kvs, resp.Responses[1].GetResponseRange().Kvs, resp.Responses[2].GetResponseRange().Kvs
	if len(own) > 0 && own[0].CreateRevision != p.created {
		own = nil // another entry of the same request, made after this one had gone
	}
	at := p.standing("", resp.Header.Revision)
	if len(before) > 0 {
		at.before = string(before[0].Key)
	}
	p.seen = resp.Header.RaftTerm
	s.terms.see(p.seen)
	s.hub.set(p.waiter, at)
	var first []*mvccpb.KeyValue
	queue := int64(0)
	switch {
	case whole:
		all := resp.Responses[3].GetResponseRange()
		first, queue = all.Kvs, all.Count
	case at.before == "":
		first = own
	}
	v, err := s.view(ctx, r, resp.Header.Revision, sess, own, first, queue)
	v.Until = p.lease.until
	if v.Held() {
		p.isFirst()
	}
	return v, err
}

func (p *place) Leave(ctx context.Context) {
	if p.value == "" {
		return
	}
	l := leftover{key: p.key, value: p.value, until: time.Now().Add(lockLeaseTTL(p.r.TTL))}
	if p.unsure {
		l.unsure = time.Now().Add(2 * opTimeout)
	}
	p.value = ""
	if p.s.isDown() {
		p.s.left.add(l)
		return
	}
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(context.WithoutCancel(ctx)), leaveTimeout)
	defer cancel()
	if removed, err := p.s.removeEntry(ctx, l); err != nil || (p.unsure && !removed) {
		p.s.left.add(l)
	}
}

// removeEntry removes an entry if it still is as the call that gives it up wrote it.
func (s *Store) removeEntry(ctx context.Context, l leftover) (bool, error) {
	_, escaped, _ := s.keys.kind(l.key)
	resp, err := s.group.txn(ctx, &step{
		about: s.keys.sessionOf(escaped),
		cmps:  []compare{hasValue(l.key, l.value)},
		then:  []operation{opDelete(l.key)},
	})
	if err != nil || !resp.Succeeded {
		return false, err
	}
	s.pool.released(l.key, resp.Header.Revision)
	return true, nil
}

// leftovers are entries given up while etcd could not be reached, or whose making was cut off and may still be under way.
// Left alone, they would hold their locks until their TTL ends.
type leftovers struct {
	mu   sync.Mutex
	list []leftover
	kick chan struct{}
}

type leftover struct {
	key, value string
	until      time.Time // when the entry ends by itself
	unsure     time.Time // until when it may still be made
}

func newLeftovers() *leftovers { return &leftovers{kick: make(chan struct{}, 1)} }

func (l *leftovers) add(entry leftover) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, entry)
	l.kickAll()
}

func (l *leftovers) kickAll() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// clearLeftovers tries again and again until ctx ends.
func (s *Store) clearLeftovers(ctx context.Context) {
	for {
		select {
		case <-s.left.kick:
		case <-ctx.Done():
			return
		}
		for s.removeLeftovers(ctx) > 0 {
			wait := time.NewTimer(leftoversEvery)
			select {
			case <-wait.C:
			case <-ctx.Done():
				wait.Stop()
				return
			}
		}
	}
}

// removeLeftovers tries once, and returns how many are still left.
func (s *Store) removeLeftovers(ctx context.Context) int {
	s.left.mu.Lock()
	list := s.left.list
	s.left.list = nil
	s.left.mu.Unlock()

	ctx, cancel := s.op(ctx)
	defer cancel()
	now := time.Now()
	var keep []leftover
	for _, l := range list {
		if now.After(l.until) {
			continue
		}
		// Look first: a refused removal costs a commit.
		resp, err := s.kv.Get(ctx, l.key)
		there := err == nil && len(resp.Kvs) > 0 && string(resp.Kvs[0].Value) == l.value
		if there {
			_, err = s.removeEntry(ctx, l)
		}
		if err != nil || (!there && now.Before(l.unsure)) {
			keep = append(keep, l)
		}
	}
	s.left.mu.Lock()
	defer s.left.mu.Unlock()
	s.left.list = append(s.left.list, keep...)
	return len(s.left.list)
}
