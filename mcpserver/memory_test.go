package mcpserver_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"iter"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/mcpserver"
	"github.com/sessiond/sessiond/mcpserver/backendtest"
)

// memory is a store, lock and messages in the test's process, with the contract of sessiond and time that a synctest
// bubble can turn. Its faults are set by tests.
type memory struct {
	mu       sync.Mutex
	position uint64
	sessions map[string]*memorySession
	changed  chan struct{} // closed and replaced at every change

	down  bool // every call fails as unreachable
	saves int
	locks int
}

type memorySession struct {
	data     []byte
	revision uint64
	ttl      time.Duration
	written  time.Time
	queue    []*memoryEntry
	messages []message
}

// message is a stored message, and until when it is kept.
type message struct {
	client.Message

	until time.Time
}

// maxStored is how many messages a session may store.
const maxStored = 1000

type memoryEntry struct {
	token   uint64
	request string
	expires time.Time // zero: waiting
}

func newMemory() *memory {
	return &memory{sessions: map[string]*memorySession{}, changed: make(chan struct{})}
}

// tick is a commit. It is called with the lock held.
func (m *memory) tick() uint64 {
	m.position++
	close(m.changed)
	m.changed = make(chan struct{})
	return m.position
}

// find is called with the lock held.
func (m *memory) find(id string) (*memorySession, error) {
	if m.down {
		return nil, client.ErrUnavailable
	}
	s, ok := m.sessions[id]
	if !ok || time.Since(s.written) >= s.ttl {
		return nil, client.ErrSessionNotFound
	}
	return s, nil
}

func (m *memory) export(id string, s *memorySession) client.Session {
	return client.Session{
		ID: id, Data: bytes.Clone(s.data), Revision: s.revision, TTL: s.ttl,
		TTLRemaining: s.ttl - time.Since(s.written), Position: m.position,
	}
}

func (m *memory) Create(_ context.Context, data []byte, opts client.CreateOptions) (client.Session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down {
		return client.Session{}, client.ErrUnavailable
	}
	if _, ok := m.sessions[opts.ID]; ok {
		return client.Session{}, client.ErrSessionExists
	}
	s := &memorySession{data: bytes.Clone(data), revision: m.tick(), ttl: opts.TTL, written: time.Now()}
	m.sessions[opts.ID] = s
	return m.export(opts.ID, s), nil
}

func (m *memory) Read(_ context.Context, id string) (client.Session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, err := m.find(id)
	if err != nil {
		return client.Session{}, err
	}
	return m.export(id, s), nil
}

// holder drops grants whose TTL has passed. It is called with the lock held.
func (s *memorySession) holder() *memoryEntry {
	for len(s.queue) > 0 && !s.queue[0].expires.IsZero() && !time.Now().Before(s.queue[0].expires) {
		s.queue = s.queue[1:]
	}
	if len(s.queue) == 0 {
		return nil
	}
	return s.queue[0]
}

func (m *memory) Save(_ context.Context, id string, data []byte, opts client.SaveOptions) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, err := m.find(id)
	if err != nil {
		return 0, err
	}
	holder := s.holder()
	switch {
	case opts.Grant != nil && (holder == nil || holder.token != opts.Grant.FencingToken):
		return 0, client.ErrLockLost
	case opts.Grant == nil && holder != nil:
		return 0, client.ErrSessionLocked
	case opts.ExpectedRevision != 0 && opts.ExpectedRevision != s.revision:
		return 0, client.ErrRevisionMismatch
	case len(data) > 1<<20:
		return 0, client.ErrSessionTooLarge
	}
	if opts.Release {
		s.queue = s.queue[1:]
	}
	m.saves++
	s.data, s.ttl, s.written, s.revision = bytes.Clone(data), opts.TTL, time.Now(), m.tick()
	return s.revision, nil
}

func (m *memory) Touch(_ context.Context, id string) (time.Duration, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, err := m.find(id)
	if err != nil {
		return 0, err
	}
	if time.Since(s.written) >= s.ttl/3 {
		s.written, s.revision = time.Now(), m.tick()
	}
	return s.ttl - time.Since(s.written), nil
}

func (m *memory) Destroy(_ context.Context, id string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down {
		return false, client.ErrUnavailable
	}
	_, ok := m.sessions[id]
	delete(m.sessions, id)
	m.tick()
	return ok, nil
}

func (m *memory) Ready(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down {
		return client.ErrUnavailable
	}
	return nil
}

func (m *memory) Acquire(ctx context.Context, id string, opts client.AcquireOptions) (client.Grant, error) {
	timeout := time.NewTimer(opts.Timeout)
	defer timeout.Stop()
	m.mu.Lock()
	defer m.mu.Unlock()
	s, err := m.find(id)
	if err != nil {
		return client.Grant{}, err
	}
	m.locks++
	entry := &memoryEntry{token: m.tick(), request: rand.Text()}
	s.queue = append(s.queue, entry)
	leave := func() {
		s.queue = slices.DeleteFunc(s.queue, func(e *memoryEntry) bool { return e == entry })
		m.tick()
	}
	for s.holder() != entry {
		changed := m.changed
		expiry := time.NewTimer(time.Hour)
		if holder := s.holder(); !holder.expires.IsZero() {
			expiry.Reset(time.Until(holder.expires))
		}
		m.mu.Unlock()
		select {
		case <-changed:
		case <-expiry.C:
		case <-timeout.C:
			err = client.ErrLockTimeout
		case <-ctx.Done():
			err = ctx.Err()
		}
		expiry.Stop()
		m.mu.Lock()
		if _, ferr := m.find(id); ferr != nil {
			err = ferr
		}
		if err != nil {
			leave()
			return client.Grant{}, err
		}
	}
	entry.expires = time.Now().Add(opts.TTL)
	return client.Grant{
		SessionID: id, RequestID: entry.request, FencingToken: entry.token, TTL: opts.TTL, Deadline: entry.expires,
		Session: m.export(id, s),
	}, nil
}

func (m *memory) Release(_ context.Context, grant client.Grant) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, err := m.find(grant.SessionID)
	switch {
	case errors.Is(err, client.ErrSessionNotFound):
		return client.ErrLockNotHeld
	case err != nil:
		return err
	}
	if holder := s.holder(); holder == nil || holder.token != grant.FencingToken {
		return client.ErrLockNotHeld
	}
	s.queue = s.queue[1:]
	m.tick()
	return nil
}

func (m *memory) Publish(_ context.Context, id, stream string, payload []byte, opts client.PublishOptions) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, err := m.find(id)
	if err != nil {
		return 0, err
	}
	now := time.Now()
	s.messages = slices.DeleteFunc(s.messages, func(c message) bool { return c.until.Before(now) })
	room := maxStored
	if opts.LowPriority {
		room /= 2
	}
	if len(s.messages) >= room {
		return 0, client.ErrTooManyMessages
	}
	position := m.tick()
	s.messages = append(s.messages, message{client.Message{Stream: stream, Position: position, Payload: bytes.Clone(payload)}, now.Add(opts.TTL)})
	return position, nil
}

func (m *memory) Trim(_ context.Context, id, stream string, through uint64, keep int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, err := m.find(id)
	if err != nil {
		return err
	}
	due := func(c message) bool { return c.Stream == stream && c.Position <= through }
	count := -keep
	for _, c := range s.messages {
		if due(c) {
			count++
		}
	}
	s.messages = slices.DeleteFunc(s.messages, func(c message) bool {
		if count <= 0 || !due(c) {
			return false
		}
		count--
		return true
	})
	m.tick()
	return nil
}

func (m *memory) Retain(_ context.Context, id, stream string, ttl time.Duration) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, err := m.find(id)
	if err != nil {
		return err
	}
	for i, c := range s.messages {
		if c.Stream == stream {
			s.messages[i].until = time.Now().Add(ttl)
		}
	}
	return nil
}

func (m *memory) Subscribe(ctx context.Context, id string, after uint64, streams ...string) (iter.Seq2[client.Message, error], error) {
	m.mu.Lock()
	_, err := m.find(id)
	m.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return func(yield func(client.Message, error) bool) {
		for {
			m.mu.Lock()
			s, err := m.find(id)
			changed := m.changed
			var due []client.Message
			if err == nil {
				for _, c := range s.messages {
					if c.Position > after && slices.Contains(streams, c.Stream) && time.Now().Before(c.until) {
						due = append(due, c.Message)
						after = c.Position
					}
				}
			}
			m.mu.Unlock()
			if err != nil {
				yield(client.Message{}, err)
				return
			}
			for _, c := range due {
				if !yield(c, nil) {
					return
				}
			}
			select {
			case <-changed:
			case <-ctx.Done():
				yield(client.Message{}, ctx.Err())
				return
			}
		}
	}, nil
}

func (m *memory) setDown(down bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.down = down
}

func (m *memory) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := len(m.sessions)
	if m.sessions[mcpserver.DefaultTopic] != nil {
		n-- // the replicas' own
	}
	return n
}

// clear forgets all sessions, as if their TTLs had passed.
func (m *memory) clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id := range m.sessions {
		if id != mcpserver.DefaultTopic {
			delete(m.sessions, id)
		}
	}
}

func (m *memory) lockCount() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.locks
}

func (m *memory) saveCount() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.saves
}

// expireLock ends the present grant, as its TTL would.
func (m *memory) expireLock(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.sessions[id]; len(s.queue) > 0 {
		s.queue = s.queue[1:]
	}
	m.tick()
}

// untilTrimmed waits until nothing is stored for the standalone stream.
func (m *memory) untilTrimmed(t *testing.T, id string) {
	t.Helper()
	for {
		m.mu.Lock()
		changed := m.changed
		stored := slices.ContainsFunc(m.sessions[id].messages, func(c message) bool { return c.Stream == "standalone" })
		m.mu.Unlock()
		if !stored {
			return
		}
		select {
		case <-changed:
		case <-t.Context().Done():
			t.Fatal("not trimmed")
		}
	}
}

// now is the number of commits so far.
func (m *memory) now() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.position
}

// The store in these tests keeps the contract that others have to (F21).
func TestF21MemoryKeepsTheContract(t *testing.T) {
	m := newMemory()
	backendtest.Run(t, func(*testing.T) backendtest.Backend { return backendtest.Backend{Store: m, Locker: m, Messages: m} })
}
