package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sessiond/sessiond/client"
)

// releaseAgain is how long after a failed release the next one is tried.
const releaseAgain = 200 * time.Millisecond

// session is what one request knows of its session: the record as read, and the changes not saved yet. It is made for
// the request and ends with it. Handlers, which run on goroutines of their own, meet it through [Get], [Set] and
// [Delete]; everything else is called by the request's goroutine alone.
type session struct {
	h      *Handler
	id     string
	store  Store
	locker Locker // nil: without lock
	lock   client.AcquireOptions
	ttl    time.Duration

	grant    *client.Grant // the lock, while held
	revision uint64        // as read, or as saved last
	touchDue bool          // more than a third of the TTL has passed
	position uint64        // messages after it concern this request

	mu     sync.Mutex
	rec    *record                    // as read, with the changes
	values map[string]json.RawMessage // changes of values not saved yet; nil: deleted
	fields map[string]json.RawMessage // changes of the record's fields not saved yet
	over   bool
}

// open reads the session, under its lock if locked is set, and checks that it is user's.
func (h *Handler) open(ctx context.Context, id string, user identity, locked bool) (*session, error) {
	s := &session{h: h, id: id, store: h.opts.Store, ttl: h.opts.SessionTTL}
	// Who is not the session's user must not even take part in the queue for its lock.
	if !locked || h.opts.Locker == nil || user != (identity{}) {
		stored, err := s.store.Read(ctx, id)
		if err != nil {
			return nil, err
		}
		if err := s.load(stored, user); err != nil {
			return nil, err
		}
	}
	if locked && h.opts.Locker != nil {
		s.locker, s.lock = h.opts.Locker, client.AcquireOptions{TTL: h.opts.LockTTL, Timeout: h.opts.LockTimeout}
		grant, err := s.locker.Acquire(ctx, id, s.lock)
		if err != nil {
			return nil, err
		}
		s.grant = &grant
		if err := s.load(grant.Session, user); err != nil {
			s.release(ctx)
			return nil, err
		}
		// What was published while this request waited for the lock concerns it too.
		s.position = min(s.position, grant.FencingToken)
	}
	return s, nil
}

func (s *session) load(stored client.Session, user identity) error {
	rec, err := decodeRecord(stored.Data)
	if err != nil {
		return err
	}
	if _, topic := rec.fields[fieldTopic]; topic || rec.user() != user {
		return client.ErrSessionNotFound
	}
	s.take(stored, rec)
	return nil
}

// take makes a freshly read record the base of the changes not saved yet.
func (s *session) take(stored client.Session, rec *record) {
	s.revision, s.position = stored.Revision, stored.Position
	s.touchDue = stored.TTLRemaining < stored.TTL*2/3
	s.mu.Lock()
	defer s.mu.Unlock()
	apply(rec, s.fields, s.values)
	s.rec = rec
}

func apply(rec *record, fields, values map[string]json.RawMessage) {
	merge(rec.fields, fields)
	merge(rec.values, values)
}

// merge applies changes to a map; nil deletes.
func merge(to, changes map[string]json.RawMessage) {
	for key, value := range changes {
		if value == nil {
			delete(to, key)
		} else {
			to[key] = value
		}
	}
}

// setField changes one of the record's own fields; nil removes it.
func (s *session) setField(field string, value json.RawMessage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fields == nil {
		s.fields = map[string]json.RawMessage{}
	}
	s.fields[field] = value
	apply(s.rec, map[string]json.RawMessage{field: value}, nil)
}

// changes takes out what is to be saved, with the whole record as it is to be.
func (s *session) changes() (fields, values map[string]json.RawMessage, data []byte, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.fields) == 0 && len(s.values) == 0 {
		return nil, nil, nil, nil
	}
	data, err = s.rec.encode()
	if err == nil {
		fields, values, s.fields, s.values = s.fields, s.values, nil, nil
	}
	return fields, values, data, err
}

// putBack makes changes that could not be saved pending again, unless there are newer ones.
func (s *session) putBack(fields, values map[string]json.RawMessage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.Copy(fields, s.fields)
	maps.Copy(values, s.values)
	s.fields, s.values = fields, values
}

// save makes the request's changes durable and, if asked, releases the lock: one commit with the lock, and one without
// unless others changed the session meanwhile. What is unchanged is not written, but for its TTL when that is due (S10).
func (s *session) save(ctx context.Context, release bool) error {
	if s.locker != nil && s.grant == nil {
		// The lock was released for a wait that the handler gave up on. It is had again only if there is something to save.
		if !s.dirty() {
			return nil
		}
		if err := s.resume(ctx); err != nil {
			return err
		}
	}
	fields, values, data, err := s.changes()
	if err != nil {
		return err
	}
	if data == nil {
		return s.keep(ctx, release)
	}
	if fields == nil {
		fields = map[string]json.RawMessage{}
	}
	if values == nil {
		values = map[string]json.RawMessage{}
	}
	opts := client.SaveOptions{TTL: s.ttl}
	if s.grant != nil {
		opts.Grant, opts.Release = s.grant, release
		s.revision, err = s.store.Save(ctx, s.id, data, opts)
		if err != nil {
			s.putBack(fields, values)
			if errors.Is(err, client.ErrLockLost) || errors.Is(err, client.ErrSessionNotFound) {
				s.grant = nil
			}
			return err
		}
		if release {
			s.grant = nil
		}
		s.touchDue = false
		return nil
	}
	if err := s.swap(ctx, fields, values, data, opts); err != nil {
		s.putBack(fields, values)
		return err
	}
	s.touchDue = false
	return nil
}

// swap saves with compare-and-swap, and on a mismatch puts the same changes on what others have saved (F3).
func (s *session) swap(ctx context.Context, fields, values map[string]json.RawMessage, data []byte, opts client.SaveOptions) error {
	for {
		opts.ExpectedRevision = s.revision
		revision, err := s.store.Save(ctx, s.id, data, opts)
		if err == nil {
			s.revision = revision
			return nil
		}
		// A save whose outcome is unknown is tried again like one that was refused: to set the same keys twice does no harm.
		if !errors.Is(err, client.ErrRevisionMismatch) && !errors.Is(err, client.ErrOutcomeUnknown) {
			return err
		}
		if errors.Is(err, client.ErrOutcomeUnknown) && ctx.Err() != nil {
			return err
		}
		stored, err := s.store.Read(ctx, s.id)
		if err != nil {
			return err
		}
		rec, err := decodeRecord(stored.Data)
		if err != nil {
			return err
		}
		apply(rec, fields, values)
		if data, err = rec.encode(); err != nil {
			return err
		}
		position := s.position
		s.take(stored, rec)
		s.position = position
	}
}

// keep ends the request of a session that did not change.
func (s *session) keep(ctx context.Context, release bool) error {
	if s.touchDue {
		if _, err := s.store.Touch(ctx, s.id); err != nil {
			return err
		}
		s.touchDue = false
	}
	if release {
		s.release(ctx)
	}
	return nil
}

// release gives the lock back, if it is held, without a save. That it fails is no error of the request, which has nothing to
// lose by it; but others wait for the lock, so it is tried again in the background until it succeeds or the TTL is over.
func (s *session) release(ctx context.Context) {
	if s.grant == nil {
		return
	}
	grant := *s.grant
	s.grant = nil
	err := s.locker.Release(context.WithoutCancel(ctx), grant)
	if err == nil || errors.Is(err, client.ErrLockNotHeld) {
		return
	}
	s.h.log.WarnContext(ctx, "lock not released, trying again", slog.Any("error", err))
	s.h.running.Go(func() { s.h.releaseLater(s.locker, grant) })
}

// releaseLater tries to release a lock until it is free one way or another, or the handler is cut short.
func (h *Handler) releaseLater(locker Locker, grant client.Grant) {
	ctx, cancel := context.WithDeadline(h.force, grant.Deadline)
	defer cancel()
	again := time.NewTicker(releaseAgain)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			h.log.WarnContext(ctx, "lock not released, left to its TTL")
			return
		case <-again.C:
		}
		if err := locker.Release(ctx, grant); err == nil || errors.Is(err, client.ErrLockNotHeld) {
			return
		}
	}
}

// resume reads the session afresh after a wait, under the lock again if there is one, and keeps the changes not saved yet.
func (s *session) resume(ctx context.Context) error {
	var stored client.Session
	var err error
	if s.locker != nil && s.grant == nil {
		var grant client.Grant
		if grant, err = s.locker.Acquire(ctx, s.id, s.lock); err == nil {
			s.grant, stored = &grant, grant.Session
		}
	} else {
		stored, err = s.store.Read(ctx, s.id)
	}
	if err != nil {
		return err
	}
	rec, err := decodeRecord(stored.Data)
	if err != nil {
		s.release(ctx)
		return err
	}
	position := s.position
	s.take(stored, rec)
	s.position = position
	return nil
}

func (s *session) dirty() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.fields) > 0 || len(s.values) > 0
}

// finish makes later changes fail, which would be lost.
func (s *session) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
}

func (s *session) get(key string) (json.RawMessage, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, ok := s.rec.values[key]
	return value, ok
}

func (s *session) put(key string, value json.RawMessage) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return ErrRequestOver
	}
	if s.values == nil {
		s.values = map[string]json.RawMessage{}
	}
	s.values[key] = value
	apply(s.rec, nil, map[string]json.RawMessage{key: value})
	return nil
}

func (s *session) keys() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.rec.values))
}

// sessionOf returns the session of a handler's context.
func sessionOf(ctx context.Context) (*session, error) {
	x := exchangeOf(ctx)
	switch {
	case x == nil:
		return nil, ErrNoSession
	case x.session != nil:
		return x.session, nil
	case x.draft != nil:
		return x.draft, nil
	default:
		return nil, ErrNoSession
	}
}

// Get returns the value of a key of the session that the handler's context belongs to, and whether there is one. It sees
// the handler's own changes, and those of other requests as of when this one began (or went on after a question to the
// client). Errors: [ErrNoSession]; a value that is not a T. Safe for concurrent use.
func Get[T any](ctx context.Context, key string) (value T, found bool, err error) {
	s, err := sessionOf(ctx)
	if err != nil {
		return value, false, err
	}
	raw, ok := s.get(key)
	if !ok {
		return value, false, nil
	}
	if err := json.Unmarshal(raw, &value); err != nil {
		return value, true, fmt.Errorf("session value %q: %w", key, err)
	}
	return value, true, nil
}

// Set sets the value of a key of the session that the handler's context belongs to. Values are JSON. The change is
// durable before the client gets the request's answer; if it cannot be saved, the client gets an error instead. Errors:
// [ErrNoSession], [ErrRequestOver]; a value that cannot be JSON. Safe for concurrent use.
func Set[T any](ctx context.Context, key string, value T) error {
	s, err := sessionOf(ctx)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("session value %q: %w", key, err)
	}
	return s.put(key, raw)
}

// Delete removes a key of the session that the handler's context belongs to; one that is not there is no error.
// Errors: [ErrNoSession], [ErrRequestOver]. Safe for concurrent use.
func Delete(ctx context.Context, key string) error {
	s, err := sessionOf(ctx)
	if err != nil {
		return err
	}
	return s.put(key, nil)
}

// Keys returns the keys of the session that the handler's context belongs to, sorted. Errors: [ErrNoSession]. Safe for
// concurrent use.
func Keys(ctx context.Context) ([]string, error) {
	s, err := sessionOf(ctx)
	if err != nil {
		return nil, err
	}
	return s.keys(), nil
}
