package etcdstore

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/memstore"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// subject is a store that the same operations are tried on. Revisions, tokens and positions differ between stores: so they are
// named by when they were first seen.
type subject struct {
	sessions *session.Service
	locks    *lock.Service
	messages *message.Service
	store    message.Store
	seen     map[uint64]int
	numbers  []uint64
	grants   map[string]lock.Grant // the last one of each session
}

func (s *subject) name(n uint64) string {
	if n == 0 {
		return "none"
	}
	if _, ok := s.seen[n]; !ok {
		s.seen[n] = len(s.numbers)
		s.numbers = append(s.numbers, n)
	}
	return fmt.Sprint("#", s.seen[n])
}

// number is the one of a name, chosen by r alike for all subjects.
func (s *subject) number(r uint64) uint64 {
	if len(s.numbers) == 0 {
		return 1 << 40 // of nothing
	}
	// Mostly a late one: those of long ago are all refused alike.
	late := min(len(s.numbers), 12)
	return s.numbers[len(s.numbers)-1-int(r%uint64(late))]
}

func (s *subject) failure(err error) string {
	for _, known := range []error{
		session.ErrNotFound, session.ErrExists, session.ErrRevisionMismatch, session.ErrLocked, session.ErrLockLost, lock.ErrNotHeld, lock.ErrTimeout,
	} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	if e, ok := errors.AsType[*lock.AlreadyHeldError](err); ok {
		return "held already by " + s.name(e.Token)
	}
	return "unexpected: " + err.Error()
}

// step tries one operation, chosen by r, and says in words what came of it.
func (s *subject) step(t *testing.T, r *rand.Rand) string {
	ctx := t.Context()
	id := fmt.Sprint("s", r.IntN(3))
	stream, request := fmt.Sprint("m", r.IntN(2)), fmt.Sprint("r", r.IntN(6))
	number, flags, data := s.number(r.Uint64()), r.IntN(8), fmt.Sprint(r.IntN(1000))
	held, mine := s.grants[id], r.IntN(3) > 0
	if mine = mine && held.Token != 0; mine {
		number = held.Token
	}
	named := s.name(number)
	switch op := r.IntN(14); op {
	case 0, 1:
		made, err := s.sessions.Create(ctx, id, []byte(data), time.Hour)
		if err != nil {
			return "create " + id + ": " + s.failure(err)
		}
		return "create " + id + ": " + s.name(made.Revision)
	case 2, 3:
		found, _, err := s.sessions.Read(ctx, id)
		if err != nil {
			return "read " + id + ": " + s.failure(err)
		}
		return fmt.Sprintf("read %s: %q %s %v", id, found.Data, s.name(found.Revision), found.TTL)
	case 4, 5, 6:
		save := session.Save{ID: id, Data: []byte(data)}
		if flags&1 != 0 || mine {
			save.Token, save.Release = number, flags&2 != 0
		} else if flags&2 != 0 {
			save.Expected = &number
		}
		if save.Token != 0 && flags&4 != 0 {
			save.Request = request
			if mine {
				save.Request = held.Request
			}
		}
		what := fmt.Sprintf("save %s with flags %d, %s and %s: ", id, flags, named, save.Request)
		revision, err := s.sessions.Save(ctx, save)
		if err != nil {
			return what + s.failure(err)
		}
		return what + s.name(revision)
	case 7:
		_, err := s.sessions.Touch(ctx, id)
		if err != nil {
			return "touch " + id + ": " + s.failure(err)
		}
		return "touch " + id
	case 8:
		if flags > 2 {
			return ""
		}
		was, err := s.sessions.Destroy(ctx, id)
		return fmt.Sprint("destroy ", id, ": ", was, err)
	case 9, 10:
		what := fmt.Sprintf("try %s by %s, %d: ", id, request, flags&1)
		g, holder, err := s.locks.TryAcquire(ctx, lock.Request{Session: id, ID: request, Holder: fmt.Sprint("h", flags&1), TTL: time.Minute, Read: true})
		switch {
		case err != nil:
			return what + s.failure(err)
		case holder != "":
			return what + holder
		}
		s.grants[id] = g
		return what + s.name(g.Token) + string(g.Data.Data)
	case 11:
		if mine {
			request = held.Request
		}
		if flags&1 != 0 {
			request = ""
		}
		what := "release " + id + " " + request + " " + named + ": "
		if err := s.locks.Release(ctx, id, request, number); err != nil {
			return what + s.failure(err)
		}
		return what + "done"
	case 12:
		what := "publish to " + id + " " + stream + " by " + request + ": "
		position, err := s.messages.Publish(ctx, message.Publish{Session: id, Stream: stream, Payload: []byte(data), Request: request, TTL: time.Hour})
		if err != nil {
			return what + s.failure(err)
		}
		return what + s.name(position)
	default:
		if flags == 0 {
			removed, err := s.messages.Trim(ctx, id, stream, number, 0)
			if err != nil {
				return "trim: " + s.failure(err)
			}
			return fmt.Sprint("trim ", id, " ", stream, " to ", named, ": ", removed)
		}
		feed := s.store.Feed(id, []string{"m0", "m1"})
		defer feed.Close()
		var text strings.Builder
		fmt.Fprintf(&text, "stored in %s:", id)
		err := feed.Stored(ctx, 0, func(b message.Batch) error {
			for _, m := range b.Messages {
				fmt.Fprintf(&text, " %s %s %q", s.name(m.Position), m.Stream, m.Payload)
			}
			return nil
		})
		if err != nil {
			fmt.Fprint(&text, s.failure(err))
		}
		return text.String()
	}
}

// S3 to S8, L3, L5, L7, L8, M1, M2: whatever is done in whatever order, the store in etcd answers as the model does, the one in memory.
func TestLikeTheModel(t *testing.T) {
	const runs, steps = 6, 200
	etcd := newServices(t, "")
	for range runs {
		seed := rand.Uint64()
		memory := memstore.Open()
		model := &subject{
			sessions: session.NewService(memory, session.DefaultMaxBytes), locks: lock.NewService(memory, lock.DefaultMaxWaiters, nil),
			messages: message.NewService(memory, nil), store: memory, seen: map[uint64]int{}, grants: map[string]lock.Grant{},
		}
		tried := &subject{
			sessions: etcd.sessions, locks: etcd.locks, messages: etcd.messages, store: etcd.store,
			seen: map[uint64]int{}, grants: map[string]lock.Grant{},
		}
		one, other := rand.New(rand.NewPCG(seed, 0)), rand.New(rand.NewPCG(seed, 0))
		var history []string
		for range steps {
			want, got := model.step(t, one), tried.step(t, other)
			if want != got {
				t.Fatalf("seed %d, after\n%s\netcd: %s\nmodel: %s", seed, strings.Join(history[max(len(history)-25, 0):], "\n"), got, want)
			}
			if want != "" {
				history = append(history, want)
			}
		}
		for _, id := range []string{"s0", "s1", "s2"} {
			if _, err := etcd.sessions.Destroy(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		memory.Close(t.Context())
	}
}
