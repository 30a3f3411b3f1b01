package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/memstore"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// Faults that are planted, each the mistake that somebody could make in a store or a client: a store around the one in memory that
// makes it, or an interceptor in the client. Nothing of them is in the product. The suite must catch each.

// queueOf shows who stands first in the queue of a session.
func queueOf(ctx context.Context, s lock.Store, id string) (*lock.Entry, error) {
	v, err := s.Look(ctx, lock.Request{Session: id, ID: "nobody"})
	return v.First, err
}

// fenceByExistence checks that there is a holder, not that it is the one whose token the save carries.
type fenceByExistence struct{ *memstore.Store }

func (s fenceByExistence) SaveSession(ctx context.Context, save session.Save) (uint64, error) {
	if first, err := queueOf(ctx, s, save.ID); save.Token != 0 && err == nil && first != nil {
		save.Token, save.Request = first.Token, first.Request
	}
	return s.Store.SaveSession(ctx, save)
}

// releaseByName releases what the same holder holds by now, not the grant that is named.
type releaseByName struct {
	*memstore.Store
	mu      sync.Mutex
	holders map[string]string // by request
}

func (s *releaseByName) Place(r lock.Request) lock.Place {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holders[r.ID] = r.Holder
	return s.Store.Place(r)
}

func (s *releaseByName) Release(ctx context.Context, id, request string, token uint64) error {
	first, err := queueOf(ctx, s, id)
	s.mu.Lock()
	holder := s.holders[request]
	s.mu.Unlock()
	if err == nil && first != nil && first.Holder == holder {
		request, token = first.Request, first.Token
	}
	return s.Store.Release(ctx, id, request, token)
}

// lateWatch opens the watch of a waiter after it has looked: what is released in between wakes nobody.
type lateWatch struct{ *memstore.Store }

func (s lateWatch) Place(r lock.Request) lock.Place { return &lateWatcher{Place: s.Store.Place(r)} }

type lateWatcher struct {
	lock.Place
	open bool
}

func (p *lateWatcher) Wake() <-chan struct{} {
	if !p.open {
		p.open = true
		// As long as it takes to open one.
		select {
		case <-time.After(5 * time.Millisecond):
		case <-p.Place.Wake():
		}
	}
	return p.Place.Wake()
}

func (p *lateWatcher) Check(ctx context.Context) (lock.View, error) {
	p.open = false
	return p.Place.Check(ctx)
}

// noCheck takes a wake-up for a grant.
type noCheck struct{ *memstore.Store }

func (s noCheck) Place(r lock.Request) lock.Place {
	return &unchecked{Place: s.Store.Place(r), ttl: r.TTL}
}

type unchecked struct {
	lock.Place
	ttl time.Duration
	own *lock.Entry
}

func (p *unchecked) Join(ctx context.Context, ifFree bool) (lock.View, error) {
	v, err := p.Place.Join(ctx, ifFree)
	p.own = v.Own
	return v, err
}

func (p *unchecked) Check(ctx context.Context) (lock.View, error) {
	v, err := p.Place.Check(ctx)
	if err == nil && v.Exists && p.own != nil {
		v.Own, v.First = p.own, p.own
		v.Until = time.Now().Add(p.ttl)
	}
	return v, err
}

// savingCreates makes a session of a save that finds none.
type savingCreates struct{ *memstore.Store }

func (s savingCreates) SaveSession(ctx context.Context, save session.Save) (uint64, error) {
	revision, err := s.Store.SaveSession(ctx, save)
	if errors.Is(err, session.ErrNotFound) {
		revision, _, err = s.CreateSession(ctx, save.ID, save.Data, time.Hour)
	}
	return revision, err
}

// keptAlive keeps locks alive while they are held.
type keptAlive struct{ *memstore.Store }

func (s keptAlive) Place(r lock.Request) lock.Place {
	p := &kept{ttl: r.TTL}
	r.TTL *= 20
	p.Place = s.Store.Place(r)
	return p
}

type kept struct {
	lock.Place
	ttl time.Duration
}

// told is what the caller believes.
func (p *kept) told(v lock.View, err error) (lock.View, error) {
	v.Until = time.Now().Add(p.ttl)
	return v, err
}

func (p *kept) Join(ctx context.Context, ifFree bool) (lock.View, error) {
	return p.told(p.Place.Join(ctx, ifFree))
}

func (p *kept) Check(ctx context.Context) (lock.View, error) { return p.told(p.Place.Check(ctx)) }

// freshIDs gives each attempt of an acquire a request id of its own.
func freshIDs(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if r, ok := req.(*sessiondv1.AcquireRequest); ok {
		r.RequestId = fmt.Sprintf("fresh-%x", rand.Uint64())
	}
	return invoke(ctx, method, req, reply, cc, opts...)
}

// lockStays destroys the session and forgets its lock, which the next session of the same id begins with.
type lockStays struct {
	*memstore.Store
	mu        sync.Mutex
	destroyed map[string]bool
}

func (s *lockStays) gone(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.destroyed[id]
}

func (s *lockStays) DestroySession(ctx context.Context, id string) (bool, error) {
	if s.gone(id) {
		return false, nil
	}
	_, _, err := s.Store.ReadSession(ctx, id)
	if errors.Is(err, session.ErrNotFound) {
		return false, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.destroyed[id] = true
	return true, err
}

func (s *lockStays) CreateSession(ctx context.Context, id string, data []byte, ttl time.Duration) (uint64, time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.destroyed[id] {
		return s.Store.CreateSession(ctx, id, data, ttl)
	}
	save := session.Save{ID: id, Data: data, TTL: ttl}
	if first, err := queueOf(ctx, s.Store, id); err == nil && first != nil {
		save.Token, save.Request = first.Token, first.Request
	}
	revision, err := s.Store.SaveSession(ctx, save)
	if err != nil {
		return 0, 0, session.ErrExists
	}
	delete(s.destroyed, id)
	return revision, ttl, nil
}

func (s *lockStays) ReadSession(ctx context.Context, id string) (session.Session, uint64, error) {
	if s.gone(id) {
		return session.Session{}, 0, session.ErrNotFound
	}
	return s.Store.ReadSession(ctx, id)
}

func (s *lockStays) SaveSession(ctx context.Context, save session.Save) (uint64, error) {
	if s.gone(save.ID) {
		return 0, session.ErrNotFound
	}
	return s.Store.SaveSession(ctx, save)
}

func (s *lockStays) TouchSession(ctx context.Context, id string) (time.Duration, error) {
	if s.gone(id) {
		return 0, session.ErrNotFound
	}
	return s.Store.TouchSession(ctx, id)
}

// cachedReads answers reads from what was read a moment ago.
type cachedReads struct {
	*memstore.Store
	mu    sync.Mutex
	cache map[string]cachedRead
}

type cachedRead struct {
	session  session.Session
	position uint64
	until    time.Time
}

func (s *cachedReads) ReadSession(ctx context.Context, id string) (session.Session, uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c, ok := s.cache[id]; ok && time.Now().Before(c.until) {
		return c.session, c.position, nil
	}
	found, position, err := s.Store.ReadSession(ctx, id)
	if err == nil {
		s.cache[id] = cachedRead{found, position, time.Now().Add(20 * time.Millisecond)}
	}
	return found, position, err
}

// earlyPositions takes the position of a message before it is stored: others are stored with later ones meanwhile.
type earlyPositions struct {
	*memstore.Store
	mu       sync.Mutex
	last     uint64
	stored   map[string][]message.Message // by session
	requests map[string]uint64            // their positions
	feeds    map[*earlyFeed]struct{}
}

func (s *earlyPositions) Publish(_ context.Context, p message.Publish) (uint64, error) {
	s.mu.Lock()
	s.last++
	m := message.Message{Stream: p.Stream, Position: s.last, Payload: slices.Clone(p.Payload)}
	if at, ok := s.requests[p.Session+p.Request]; ok {
		s.mu.Unlock()
		return at, nil
	}
	s.requests[p.Session+p.Request] = m.Position
	s.mu.Unlock()
	<-time.After(rand.N(3 * time.Millisecond)) // a commit
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stored[p.Session] = append(s.stored[p.Session], m)
	for f := range s.feeds {
		select {
		case f.ready <- struct{}{}:
		default:
		}
	}
	return m.Position, nil
}

func (s *earlyPositions) Feed(id string, _ []string) message.Feed {
	f := &earlyFeed{s: s, id: id, ready: make(chan struct{}, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.feeds[f] = struct{}{}
	return f
}

type earlyFeed struct {
	s     *earlyPositions
	id    string
	ready chan struct{}
}

func (f *earlyFeed) Ready() <-chan struct{} { return f.ready }

func (f *earlyFeed) Close() {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	delete(f.s.feeds, f)
}

func (f *earlyFeed) Stored(ctx context.Context, after uint64, yield func(message.Batch) error) error {
	b, err := f.Next(ctx, after)
	if err != nil {
		return err
	}
	return yield(b)
}

func (f *earlyFeed) Next(_ context.Context, after uint64) (message.Batch, error) {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	b := message.Batch{Position: after}
	for _, m := range f.s.stored[f.id] {
		if m.Position > after {
			b.Messages = append(b.Messages, m)
			b.Position = max(b.Position, m.Position)
		}
	}
	slices.SortFunc(b.Messages, func(x, y message.Message) int { return int(x.Position) - int(y.Position) })
	return b, nil
}

// Each planted fault is caught, by the seed that the table in README.md gives, well within the 60 s that it may take.
func TestPlantedFaults(t *testing.T) {
	for _, c := range []struct {
		name string
		seed uint64
		make func(*memstore.Store) store
		more []grpc.DialOption
	}{
		{"fence checked by the key's existence only", 1, func(s *memstore.Store) store { return fenceByExistence{s} }, nil},
		{"release by name", 2, func(s *memstore.Store) store { return &releaseByName{Store: s, holders: map[string]string{}} }, nil},
		{"watch opened too late", 3, func(s *memstore.Store) store { return lateWatch{s} }, nil},
		{"no check after the wait", 4, func(s *memstore.Store) store { return noCheck{s} }, nil},
		{"save that creates", 5, func(s *memstore.Store) store { return savingCreates{s} }, nil},
		{"lease refreshed while held", 6, func(s *memstore.Store) store { return keptAlive{s} }, nil},
		{"acquire retried without its id", 7, func(s *memstore.Store) store { return s }, []grpc.DialOption{grpc.WithChainUnaryInterceptor(freshIDs)}},
		{"destroy that forgets the lock", 8, func(s *memstore.Store) store { return &lockStays{Store: s, destroyed: map[string]bool{}} }, nil},
		{"message position taken before the commit", 9, func(s *memstore.Store) store {
			return &earlyPositions{Store: s, stored: map[string][]message.Message{}, requests: map[string]uint64{}, feeds: map[*earlyFeed]struct{}{}}
		}, nil},
		{"a cached read", 10, func(s *memstore.Store) store { return &cachedReads{Store: s, cache: map[string]cachedRead{}} }, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := memstore.Open()
			t.Cleanup(func() { s.Close(context.WithoutCancel(t.Context())) })
			began := time.Now()
			totals := tryStore(t, c.seed, time.Minute, c.make(s), c.more...)
			if len(totals.Violations) == 0 {
				t.Fatalf("not caught in %d operations and %d messages", totals.Operations, totals.Published)
			}
			t.Logf("caught after %.1f s, %d operations and %d messages: %s", time.Since(began).Seconds(), totals.Operations, totals.Published, totals.Violations[0].Rule)
		})
	}
}
