package memstore

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

const (
	// What one batch of a subscription may hold, unless a single message is larger.
	batchBytes    = 1 << 20
	batchMessages = 64
)

// stored is a message.
type stored struct {
	message.Message

	request string
	end     deadline
}

// Publish implements message.Store.
func (s *Store) Publish(ctx context.Context, p message.Publish) (uint64, error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	now := s.begin()
	defer s.finish()
	rec := s.sessions[p.Session]
	if rec == nil {
		return 0, session.ErrNotFound
	}
	for _, m := range rec.messages {
		if m.request == p.Request && m.Stream == p.Stream {
			return m.Position, nil
		}
	}
	most, mostBytes := p.Room()
	switch {
	case len(rec.messages) >= most:
		return 0, &message.TooManyError{Limit: most}
	case rec.size+len(p.Payload) > mostBytes:
		return 0, &message.TooManyError{Limit: mostBytes, Bytes: true}
	}
	m := &stored{
		Message: message.Message{Stream: p.Stream, Position: s.next(), Payload: bytes.Clone(p.Payload)},
		request: p.Request,
	}
	m.end = deadline{index: unscheduled, expire: func() { s.removeMessages(rec, func(other *stored) bool { return other == m }) }}
	rec.messages = append(rec.messages, m)
	rec.size += len(m.Payload)
	s.scheduleAt(&m.end, now.Add(p.TTL))
	for f := range s.feeds[p.Session] {
		if slices.Contains(f.streams, p.Stream) {
			signal(f.ready)
		}
	}
	return m.Position, nil
}

// removeMessages removes those that match, and returns how many.
func (s *Store) removeMessages(rec *record, match func(*stored) bool) int {
	before := len(rec.messages)
	rec.messages = slices.DeleteFunc(rec.messages, func(m *stored) bool {
		if !match(m) {
			return false
		}
		s.unschedule(&m.end)
		rec.size -= len(m.Payload)
		return true
	})
	return before - len(rec.messages)
}

// Trim implements message.Store.
func (s *Store) Trim(ctx context.Context, sessionID, stream string, through uint64, keep int) (int, error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	s.begin()
	defer s.finish()
	rec := s.sessions[sessionID]
	if rec == nil {
		return 0, session.ErrNotFound
	}
	due := func(m *stored) bool { return m.Stream == stream && m.Position <= through }
	count := -keep
	for _, m := range rec.messages {
		if due(m) {
			count++
		}
	}
	return s.removeMessages(rec, func(m *stored) bool {
		if count <= 0 || !due(m) {
			return false
		}
		count--
		return true
	}), nil
}

// Retain implements message.Store.
func (s *Store) Retain(ctx context.Context, sessionID, stream string, ttl time.Duration) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	now := s.begin()
	defer s.finish()
	rec := s.sessions[sessionID]
	if rec == nil {
		return session.ErrNotFound
	}
	for _, m := range rec.messages {
		if m.Stream == stream {
			s.scheduleAt(&m.end, now.Add(ttl))
		}
	}
	return nil
}

// feed implements message.Feed. What is pushed is a signal; the messages are read from where they are stored, so there
// is no buffer to overflow and never a gap.
type feed struct {
	s       *Store
	id      string
	streams []string
	ready   chan struct{}
	born    uint64 // revision at which the session was made; 0: not known yet
}

// Feed implements message.Store.
func (s *Store) Feed(sessionID string, streams []string) message.Feed {
	f := &feed{s: s, id: sessionID, streams: streams, ready: make(chan struct{}, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	add(s.feeds, sessionID, f)
	return f
}

// Close implements message.Feed.
func (f *feed) Close() {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	drop(f.s.feeds, f.id, f)
}

// Ready implements message.Feed.
func (f *feed) Ready() <-chan struct{} { return f.ready }

// Next implements message.Feed.
func (f *feed) Next(ctx context.Context, after uint64) (message.Batch, error) {
	batch, more, err := f.read(ctx, after)
	if err != nil || len(batch.Messages) == 0 {
		return message.Batch{}, err
	}
	batch.Position = batch.Messages[len(batch.Messages)-1].Position
	if more {
		signal(f.ready)
	}
	return batch, nil
}

// Stored implements message.Feed.
func (f *feed) Stored(ctx context.Context, after uint64, yield func(message.Batch) error) error {
	for {
		batch, more, err := f.read(ctx, after)
		if err != nil {
			return err
		}
		if err := yield(batch); err != nil || !more {
			return err
		}
		after = batch.Position
	}
}

// read returns the first part of what is stored after a position, and whether there is more.
func (f *feed) read(ctx context.Context, after uint64) (batch message.Batch, more bool, err error) {
	if ctx.Err() != nil {
		return batch, false, context.Cause(ctx)
	}
	f.s.begin()
	defer f.s.finish()
	rec := f.s.sessions[f.id]
	if rec == nil || (f.born != 0 && rec.born != f.born) {
		return batch, false, session.ErrNotFound
	}
	f.born = rec.born
	batch.Position = f.s.revision
	first, _ := slices.BinarySearchFunc(rec.messages, after+1, func(m *stored, position uint64) int { return cmp.Compare(m.Position, position) })
	size := 0
	for _, m := range rec.messages[first:] {
		if !slices.Contains(f.streams, m.Stream) {
			continue
		}
		if n := len(batch.Messages); n == batchMessages || n > 0 && size+len(m.Payload) > batchBytes {
			batch.Position = batch.Messages[n-1].Position
			return batch, true, nil
		}
		size += len(m.Payload)
		batch.Messages = append(batch.Messages, m.Message)
	}
	return batch, false, nil
}
