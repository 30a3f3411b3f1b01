package memstore

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
)

var _ lock.FrontEndStore = (*Store)(nil)

// attachment implements lock.Attachment. There is nobody whose death could put it in doubt: it ends when it is replaced.
type attachment struct {
	s        *Store
	frontEnd string
	number   uint64
	ended    chan struct{}
	asks     chan struct{}
}

// Attach implements lock.FrontEndStore.
func (s *Store) Attach(ctx context.Context, frontEnd string, number uint64, _ time.Duration) (lock.Attachment, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	s.begin()
	defer s.finish()
	if old := s.attached[frontEnd]; old != nil {
		if old.number >= number {
			return nil, lock.ErrReplaced
		}
		close(old.ended)
	}
	a := &attachment{s: s, frontEnd: frontEnd, number: number, ended: make(chan struct{}), asks: make(chan struct{})}
	s.attached[frontEnd] = a
	return a, nil
}

// Ended implements lock.Attachment.
func (a *attachment) Ended() <-chan struct{} { return a.ended }

// Asks implements lock.Attachment. What a front-end acquired is asked for when it attaches anew; here no node dies.
func (a *attachment) Asks() <-chan struct{} { return a.asks }

// Err implements lock.Attachment.
func (a *attachment) Err() error {
	select {
	case <-a.ended:
		return lock.ErrReplaced
	default:
		return nil
	}
}

// Close implements lock.Attachment.
func (a *attachment) Close() {}

// Position implements lock.Attachment.
func (a *attachment) Position(ctx context.Context) (uint64, error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	a.s.begin()
	defer a.s.finish()
	return a.s.revision, nil
}

// Keep implements lock.Attachment.
func (a *attachment) Keep(ctx context.Context, position uint64, claims []lock.Claim) error {
	claimed := set(claims)
	return a.remove(ctx, func(e *entry) bool { return e.token <= position && !claimed[e.claim()] })
}

// Abandon implements lock.Attachment.
func (a *attachment) Abandon(ctx context.Context, requests []lock.Claim) error {
	abandoned := set(requests)
	return a.remove(ctx, func(e *entry) bool { return abandoned[e.claim()] })
}

func set(claims []lock.Claim) map[lock.Claim]bool {
	m := make(map[lock.Claim]bool, len(claims))
	for _, c := range claims {
		m[c] = true
	}
	return m
}

// Detach implements lock.Attachment.
func (a *attachment) Detach(ctx context.Context) error {
	err := a.remove(ctx, func(*entry) bool { return true })
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	if err == nil && a.s.attached[a.frontEnd] == a {
		delete(a.s.attached, a.frontEnd)
	}
	return err
}

func (e *entry) claim() lock.Claim { return lock.Claim{Session: e.rec.id, Request: e.request} }

// remove removes those of the front-end's entries that match, in order of their tokens, unless it has attached anew.
func (a *attachment) remove(ctx context.Context, match func(*entry) bool) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s := a.s
	now := s.begin()
	defer s.finish()
	if s.attached[a.frontEnd] != a {
		return nil
	}
	entries := slices.SortedFunc(maps.Keys(s.entries[a.frontEnd]), func(x, y *entry) int { return int(x.token) - int(y.token) })
	for _, e := range entries {
		if match(e) {
			s.removeEntry(e.rec, e, now)
		}
	}
	return nil
}
