package etcdstore

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

const (
	// A message is stored in chunks that fit into one request of an etcd that is not configured for more.
	chunkBytes = 1 << 20
	// What one batch of a subscription may hold, unless a single message is larger.
	batchBytes    = 1 << 20
	batchMessages = 64
	// Operations of one transaction that any etcd accepts.
	maxTxnOps = 100
)

// Publish implements message.Store. A message of several chunks becomes visible with its last one, and its position is
// the revision of that. Chunks without a last one end with their leases. Nothing is read first if this node knows that there is
// room.
func (s *Store) Publish(ctx context.Context, p message.Publish) (uint64, error) {
	base := s.keys.message(p.Session, p.Stream, p.Request)
	most, mostBytes := p.Room()
	if len(p.Payload) <= chunkBytes {
		key := base + lastName(len(p.Payload), 0)
		if r := s.hub.reserve(p.Session, key, most, mostBytes); r != nil {
			position, stored, err := s.publishLast(ctx, p, key, p.Payload, r.born)
			if !stored {
				s.hub.forget(r)
			}
			if err != nil || position != 0 {
				return position, err
			}
		}
	}

	born, position, err := s.readRoom(ctx, p)
	if err != nil || position != 0 {
		return position, err
	}
	about := s.keys.session(p.Session)
	chunks := 0
	payload := p.Payload
	for ; len(payload) > chunkBytes; chunks++ {
		// A copy, because a caller who gives up has the payload back before it is sent.
		key, value := base+chunkName(chunks), bytes.Clone(payload[:chunkBytes])
		payload = payload[chunkBytes:]
		cctx, cancel := s.op(ctx)
		_, _, err := s.withLease(cctx, p.TTL, func(lease clientv3.LeaseID) (*etcdserverpb.TxnResponse, error) {
			return s.group.txn(cctx, &step{
				about: about,
				cmps:  []compare{exists(about)},
				then:  []operation{opPut(key, value, lease)},
			})
		})
		cancel()
		if err != nil {
			return 0, s.fail(ctx, err)
		}
	}

	position, _, err = s.publishLast(ctx, p, base+lastName(len(payload), chunks), payload, born)
	if err == nil && position == 0 {
		return 0, session.ErrNotFound
	}
	return position, err
}

// publishLast stores a message's last chunk, unless the request has published already, and returns its position. 0: the session
// that was made at the revision has gone.
func (s *Store) publishLast(
	ctx context.Context, p message.Publish, key string, payload []byte, born int64,
) (position uint64, stored bool, err error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	about, last := s.keys.session(p.Session), s.keys.message(p.Session, p.Stream, p.Request)+"e"
	value := encodeLast(payload)
	resp, _, err := s.withLease(octx, p.TTL, func(lease clientv3.LeaseID) (*etcdserverpb.TxnResponse, error) {
		return s.group.txn(octx, &step{
			about: about,
			cmps:  []compare{createdAt(about, born), empty(last)},
			then:  []operation{opPut(key, value, lease)},
			els:   []operation{s.readSession(p.Session, false), opGetKeys(last)},
		})
	})
	if err != nil {
		return 0, false, s.fail(ctx, err)
	}
	if resp.Succeeded {
		return uint64(resp.Header.Revision), true, nil
	}
	sess, done := resp.Responses[0].GetResponseRange(), resp.Responses[1].GetResponseRange()
	if len(sess.Kvs) == 0 || sess.Kvs[0].CreateRevision != born || len(done.Kvs) == 0 || done.Kvs[0].CreateRevision < born {
		return 0, false, nil
	}
	return uint64(done.Kvs[0].CreateRevision), false, nil
}

// readRoom checks that there is room for a message, and returns the revision at which the session was made, or the position of
// the message if the request has published it already.
func (s *Store) readRoom(ctx context.Context, p message.Publish) (born int64, position uint64, err error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	base := s.keys.message(p.Session, p.Stream, p.Request)
	known := s.hub.learn(p.Session)
	defer s.hub.abandon(known)
	var stored *etcdserverpb.RangeResponse
	for {
		resp, err := s.kv.read(octx,
			s.readSession(p.Session, false),
			opGetKeys(base+"e"),
			opGetKeys(s.keys.messages(p.Session)),
		)
		if err != nil {
			return 0, 0, s.fail(ctx, err)
		}
		sess, done := resp.Responses[0].GetResponseRange(), resp.Responses[1].GetResponseRange()
		if len(sess.Kvs) == 0 {
			return 0, 0, session.ErrNotFound
		}
		born = sess.Kvs[0].CreateRevision
		if len(done.Kvs) > 0 && done.Kvs[0].CreateRevision > born {
			return born, uint64(done.Kvs[0].CreateRevision), nil
		}
		if len(done.Kvs) == 0 {
			stored = resp.Responses[2].GetResponseRange()
			s.hub.learned(known, born, resp.Header.Revision, s.parts(stored.Kvs))
			break
		}
		// Of an earlier session of the same id, which expired before the message did.
		if _, err := s.kv.Delete(octx, base, clientv3.WithPrefix()); err != nil {
			return 0, 0, s.fail(ctx, err)
		}
	}

	count, size := 0, len(p.Payload)
	for _, kv := range stored.Kvs {
		if part, ok := s.keys.part(string(kv.Key)); ok && kv.CreateRevision > born {
			size += part.bytes
			if part.last {
				count++
			}
		}
	}
	most, mostBytes := p.Room()
	switch {
	case count >= most:
		return 0, 0, &message.TooManyError{Limit: most}
	case size > mostBytes:
		return 0, 0, &message.TooManyError{Limit: mostBytes, Bytes: true}
	}
	return born, 0, nil
}

// parts are what keys of messages say.
func (s *Store) parts(kvs []*mvccpb.KeyValue) []part {
	parts := make([]part, 0, len(kvs))
	for _, kv := range kvs {
		if p, ok := s.keys.part(string(kv.Key)); ok {
			parts = append(parts, p)
		}
	}
	return parts
}

// Trim implements message.Store.
func (s *Store) Trim(ctx context.Context, sessionID, stream string, through uint64, keep int) (int, error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	prefix := s.keys.stream(sessionID, stream)
	resp, err := s.kv.read(octx,
		s.readSession(sessionID, false),
		opGetKeys(prefix),
	)
	if err != nil {
		return 0, s.fail(ctx, err)
	}
	sess, all := resp.Responses[0].GetResponseRange(), resp.Responses[1].GetResponseRange()
	if len(sess.Kvs) == 0 {
		return 0, session.ErrNotFound
	}

	// What goes: complete messages up to the position. Chunks of a message that is being published stay.
	var due []pushed
	for _, kv := range all.Kvs {
		if part, ok := s.keys.part(string(kv.Key)); ok && part.last && uint64(kv.CreateRevision) <= through {
			due = append(due, pushed{part: part, revision: kv.CreateRevision})
		}
	}
	if len(due) <= keep {
		return 0, nil
	}
	slices.SortFunc(due, byRevision)
	gone := map[string]bool{}
	for _, d := range due[:len(due)-keep] {
		gone[d.part.prefix] = true
	}
	var ops []operation
	whole := true
	for _, kv := range all.Kvs {
		part, ok := s.keys.part(string(kv.Key))
		if !ok || !gone[part.prefix] {
			whole = false
		} else if part.last {
			if part.chunks > 0 {
				ops = append(ops, opDeleteAll(part.prefix))
			} else {
				ops = append(ops, opDelete(string(kv.Key)))
			}
		}
	}
	if whole {
		// All that is there: at one go, unless something has come meanwhile.
		resp, err := s.group.txn(octx, &step{
			about: s.keys.session(sessionID),
			cmps:  []compare{allOf(created(prefix, etcdserverpb.Compare_LESS, resp.Header.Revision+1))},
			then:  []operation{opDeleteAll(prefix)},
		})
		if err != nil {
			return 0, s.fail(ctx, err)
		}
		if resp.Succeeded {
			return len(gone), nil
		}
	}
	for part := range slices.Chunk(ops, maxTxnOps) {
		if _, err := s.group.txn(octx, &step{about: s.keys.session(sessionID), then: part}); err != nil {
			return 0, s.fail(ctx, err)
		}
	}
	return len(gone), nil
}

// Retain implements message.Store. It moves the keys to another lease, without their values.
func (s *Store) Retain(ctx context.Context, sessionID, stream string, ttl time.Duration) error {
	for {
		again, err := s.retain(ctx, sessionID, stream, ttl)
		if err != nil || !again {
			return err
		}
	}
}

func (s *Store) retain(ctx context.Context, sessionID, stream string, ttl time.Duration) (again bool, err error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	resp, err := s.kv.read(octx,
		s.readSession(sessionID, false),
		opGetKeys(s.keys.stream(sessionID, stream)),
	)
	if err != nil {
		return false, s.fail(ctx, err)
	}
	sess, all := resp.Responses[0].GetResponseRange(), resp.Responses[1].GetResponseRange()
	if len(sess.Kvs) == 0 {
		return false, session.ErrNotFound
	}
	for part := range slices.Chunk(all.Kvs, maxTxnOps) {
		cctx, cancel := s.op(ctx)
		resp, _, err := s.withLease(cctx, ttl, func(lease clientv3.LeaseID) (*etcdserverpb.TxnResponse, error) {
			var cmps []compare
			var then []operation
			for _, kv := range part {
				cmps = append(cmps, createdAt(string(kv.Key), kv.CreateRevision))
				then = append(then, opPutLease(string(kv.Key), lease))
			}
			return s.group.txn(cctx, &step{about: s.keys.session(sessionID), cmps: cmps, then: then})
		})
		cancel()
		if err != nil {
			return false, s.fail(ctx, err)
		}
		if !resp.Succeeded {
			return true, nil // some went meanwhile
		}
	}
	return false, nil
}

// feed implements message.Feed.
type feed struct {
	s       *Store
	id      string
	session string   // escaped
	streams []string // as they are
	escaped []string
	born    int64 // revision at which the session was made; 0: not known yet
	ready   chan struct{}

	// Under the hub's lock.
	events []pushed
	bytes  int
	gap    bool
	gone   int64 // revision at which the session was last seen to go
}

type pushed struct {
	key      string
	part     part
	value    []byte
	revision int64
}

func byRevision(a, b pushed) int { return cmp.Compare(a.revision, b.revision) }

// Feed implements message.Store.
func (s *Store) Feed(sessionID string, streams []string) message.Feed {
	f := &feed{s: s, id: sessionID, session: escaper.Replace(sessionID), streams: streams, ready: make(chan struct{}, 1)}
	for _, stream := range streams {
		f.escaped = append(f.escaped, escaper.Replace(stream))
	}
	s.hub.addFeed(f)
	return f
}

func (f *feed) Close()                 { f.s.hub.removeFeed(f) }
func (f *feed) Ready() <-chan struct{} { return f.ready }

func (f *feed) signal() {
	select {
	case f.ready <- struct{}{}:
	default:
	}
}

// push and overflow are called under the hub's lock.
func (f *feed) push(e pushed) {
	if f.gap {
		return
	}
	if len(f.events) >= maxFeedEvents || f.bytes+len(e.value) > maxFeedBytes {
		f.overflow()
		return
	}
	f.events = append(f.events, e)
	f.bytes += len(e.value)
	f.signal()
}

func (f *feed) overflow() {
	f.events, f.bytes, f.gap = nil, 0, true
	f.signal()
}

func (f *feed) Next(ctx context.Context, after uint64) (message.Batch, error) {
	h := f.s.hub
	h.mu.Lock()
	gap, gone := f.gap, f.gone > f.born
	var events []pushed
	if !gap && !gone {
		size := 0
		n := 0
		for n < len(f.events) && n < batchMessages && (n == 0 || size+f.events[n].part.size() <= batchBytes) {
			size += f.events[n].part.size()
			f.bytes -= len(f.events[n].value)
			n++
		}
		events, f.events = f.events[:n:n], f.events[n:]
		if len(f.events) > 0 {
			f.signal()
		}
	}
	f.gap = false
	h.mu.Unlock()

	switch {
	case gone:
		return message.Batch{}, session.ErrNotFound
	case gap:
		return message.Batch{}, message.ErrGap
	}
	events = slices.DeleteFunc(events, func(e pushed) bool { return uint64(e.revision) <= after })
	if len(events) == 0 {
		return message.Batch{}, nil
	}
	batch := message.Batch{Position: uint64(events[len(events)-1].revision)}
	octx, cancel := f.s.op(ctx)
	defer cancel()
	var err error
	batch.Messages, err = f.load(octx, events)
	return batch, f.s.known(ctx, err)
}

func (p part) size() int { return p.bytes + p.chunks*chunkBytes }

func (f *feed) Stored(ctx context.Context, after uint64, yield func(message.Batch) error) error {
	s := f.s
	octx, cancel := s.op(ctx)
	defer cancel()
	var known *room
	if after == 0 {
		known = s.hub.learn(f.id)
		defer s.hub.abandon(known)
	}
	resp, err := s.kv.read(octx,
		s.readSession(f.id, false),
		opGetKeysMade(s.keys.messages(f.id), int64(after)+1, 0),
	)
	if err != nil {
		return s.fail(ctx, err)
	}
	sess, all := resp.Responses[0].GetResponseRange(), resp.Responses[1].GetResponseRange()
	if len(sess.Kvs) == 0 || (f.born != 0 && sess.Kvs[0].CreateRevision != f.born) {
		return session.ErrNotFound
	}
	f.born = sess.Kvs[0].CreateRevision
	s.hub.learned(known, f.born, resp.Header.Revision, s.parts(all.Kvs))

	var found []pushed
	for _, kv := range all.Kvs {
		if part, ok := s.keys.part(string(kv.Key)); ok && part.last && kv.CreateRevision > f.born && slices.Contains(f.escaped, part.stream) {
			found = append(found, pushed{key: string(kv.Key), part: part, revision: kv.CreateRevision})
		}
	}
	slices.SortFunc(found, byRevision)

	for {
		size, n := 0, 0
		for n < len(found) && n < batchMessages && (n == 0 || size+found[n].part.size() <= batchBytes) {
			size += found[n].part.size()
			n++
		}
		batch := message.Batch{Position: uint64(resp.Header.Revision)}
		if n < len(found) {
			batch.Position = uint64(found[n-1].revision)
		}
		lctx, cancel := s.op(ctx)
		batch.Messages, err = f.load(lctx, found[:n])
		cancel()
		if err != nil {
			return s.known(ctx, err)
		}
		if err := yield(batch); err != nil {
			return err
		}
		found = found[n:]
		if len(found) == 0 {
			return nil
		}
	}
}

// load makes messages of what was found or pushed, and reads what was not pushed along. Those that have gone meanwhile are left out.
func (f *feed) load(ctx context.Context, found []pushed) ([]message.Message, error) {
	var ops []operation
	for _, e := range found {
		if e.value == nil || e.part.chunks > 0 {
			ops = append(ops, opGetAll(e.part.prefix))
		}
	}
	var answers []*mvccpb.KeyValue
	if len(ops) > 0 {
		resp, err := f.s.kv.read(ctx, ops...)
		if err != nil {
			return nil, err
		}
		for _, r := range resp.Responses {
			answers = append(answers, r.GetResponseRange().Kvs...)
		}
	}
	read := map[string]*mvccpb.KeyValue{}
	for _, kv := range answers {
		read[string(kv.Key)] = kv
	}

	var messages []message.Message
	for _, e := range found {
		value := e.value
		if value == nil {
			kv := read[e.key]
			if kv == nil || kv.CreateRevision != e.revision {
				continue
			}
			value = kv.Value
		}
		payload, err := decodeLast(value)
		if err != nil {
			return nil, err
		}
		whole := make([]byte, 0, e.part.size())
		complete := true
		for n := range e.part.chunks {
			kv := read[e.part.prefix+chunkName(n)]
			if kv == nil {
				complete = false
				break
			}
			whole = append(whole, kv.Value...)
		}
		if complete {
			messages = append(messages, message.Message{
				Stream:   f.streams[slices.Index(f.escaped, e.part.stream)],
				Position: uint64(e.revision),
				Payload:  append(whole, payload...),
			})
		}
	}
	return messages, nil
}
