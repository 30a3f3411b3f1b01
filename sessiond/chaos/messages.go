package chaos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sessiond/sessiond/client"
)

// A publication is a message that somebody published, or tried to. Its payload is nobody else's.
type publication struct {
	payload      string
	call, ret    int64
	acknowledged bool
	position     uint64
}

// A delivery is a message that a subscriber got.
type delivery struct {
	payload  string
	position uint64
}

// conversation is all that was published to a stream and delivered from it.
type conversation struct {
	session   string
	published []publication
	// delivered is what each subscriber got, in the order in which it did. Each of them had been there from the beginning, and was
	// there until all that had been acknowledged was with it, or time was up.
	delivered [][]delivery
}

// checkMessages: each message is delivered to each subscriber exactly once, in the order of the positions, which is the order in
// which they were published as far as one was over before the other began (M1, M2).
func checkMessages(c *conversation) []Violation {
	var violations []Violation
	fail := func(format string, args ...any) {
		violations = append(violations, Violation{Rule: "messages", Session: c.session, Text: fmt.Sprintf(format, args...)})
	}
	known := map[string]*publication{}
	for i := range c.published {
		known[c.published[i].payload] = &c.published[i]
	}
	positions := map[string]uint64{}
	for s, got := range c.delivered {
		seen := map[string]bool{}
		last := uint64(0)
		for _, d := range got {
			p := known[d.payload]
			if at, ok := positions[d.payload]; ok && at != d.position {
				fail("%q has positions %d and %d", d.payload, at, d.position)
			}
			positions[d.payload] = d.position
			switch {
			case p == nil:
				fail("subscriber %d got %q, which nobody published", s, d.payload)
			case p.acknowledged && p.position != d.position:
				fail("%q was published at %d and delivered at %d", d.payload, p.position, d.position)
			}
			if seen[d.payload] {
				fail("subscriber %d got %q twice", s, d.payload)
			}
			if d.position <= last {
				fail("subscriber %d got %q at %d after %d", s, d.payload, d.position, last)
			}
			seen[d.payload], last = true, max(last, d.position)
		}
	}
	for s, got := range c.delivered {
		seen := map[string]bool{}
		for _, d := range got {
			seen[d.payload] = true
		}
		for _, p := range c.published {
			if p.acknowledged && !seen[p.payload] {
				fail("subscriber %d never got %q, published at %d", s, p.payload, p.position)
			}
		}
		for payload, at := range positions {
			if p := known[payload]; p != nil && !p.acknowledged && !seen[payload] && at <= lastOf(got) {
				fail("subscriber %d never got %q at %d, which another did", s, payload, at)
			}
		}
	}
	acknowledged := slices.DeleteFunc(slices.Clone(c.published), func(p publication) bool { return !p.acknowledged })
	slices.SortFunc(acknowledged, func(a, b publication) int { return cmp.Compare(a.position, b.position) })
	// Of all that have a higher position, none may have been over before this one began.
	first := int64(never)
	for _, p := range slices.Backward(acknowledged) {
		if first < p.call {
			fail("%q at %d was published after one with a higher position was", p.payload, p.position)
		}
		first = min(first, p.ret)
	}
	return violations
}

func lastOf(got []delivery) uint64 {
	if len(got) == 0 {
		return 0
	}
	return got[len(got)-1].position
}

// talks is publishers and subscribers at work, on one session after the other in each slot.
type talks struct {
	seed    uint64
	slots   int
	clients []*client.Client
	clock   clock
	calm    *calm
	// patience is how long, in calm times, subscribers may be without something that was published.
	patience time.Duration
	judge    func(*conversation)
}

const (
	publishers  = 2
	subscribers = 3
	perTalk     = 40
	stream      = "talk"
	// Messages of more than one chunk are one in so many.
	oneLarge = 50
	large    = 5 << 18
)

func (t *talks) run(ctx, stop context.Context) {
	var slots sync.WaitGroup
	for slot := range t.slots {
		slots.Go(func() {
			for n := 0; stop.Err() == nil && ctx.Err() == nil; n++ {
				t.talk(ctx, stop, slot, n)
			}
		})
	}
	slots.Wait()
}

// talk is the life of one session.
func (t *talks) talk(ctx, stop context.Context, slot, n int) {
	rng := random(t.seed, 0x7a, uint64(slot), uint64(n))
	c := &conversation{session: fmt.Sprintf("talk-%d-%d", slot, n), delivered: make([][]delivery, subscribers)}
	pickClient := func() *client.Client { return t.clients[rng.IntN(len(t.clients))] }
	for {
		_, err := pickClient().Create(ctx, nil, client.CreateOptions{ID: c.session})
		if err == nil || errors.Is(err, client.ErrSessionExists) {
			break
		}
		if !pause(stop, 200*time.Millisecond) {
			return
		}
	}
	listening, hangUp := context.WithCancel(ctx)
	defer hangUp()
	var listeners, speakers sync.WaitGroup
	end := &ending{published: make(chan struct{})}
	for s := range subscribers {
		who, r := pickClient(), random(t.seed, 0x7b, uint64(slot), uint64(n), uint64(s))
		listeners.Go(func() { c.delivered[s] = t.listen(listening, who, r, c.session, s > 0, end) })
	}
	var mu sync.Mutex
	for p := range publishers {
		who, r := pickClient(), random(t.seed, 0x7c, uint64(slot), uint64(n), uint64(p))
		speakers.Go(func() {
			for i := 0; i < perTalk && stop.Err() == nil; i++ {
				one := t.publish(ctx, who, r, c.session, fmt.Sprintf("%d.%d", p, i))
				mu.Lock()
				c.published = append(c.published, one)
				mu.Unlock()
				pause(stop, time.Duration(r.IntN(60))*time.Millisecond)
			}
		})
	}
	speakers.Wait()
	// Whoever has got the last one has got all that he will get.
	r := random(t.seed, 0x7d, uint64(slot), uint64(n))
	for i := 0; ctx.Err() == nil; i++ {
		one := t.publish(ctx, pickClient(), r, c.session, fmt.Sprint(lastPrefix, i))
		c.published = append(c.published, one)
		if end.payload = one.payload; one.acknowledged {
			break
		}
	}
	close(end.published)
	published := t.clock.now()
	over := make(chan struct{})
	go func() {
		listeners.Wait()
		close(over)
	}()
	for done := false; !done; {
		select {
		case <-over:
			done = true
		case <-time.After(100 * time.Millisecond):
			if t.calm.disturbed().calm(published, t.clock.now()) > t.patience {
				hangUp()
			}
		}
	}
	if ctx.Err() != nil {
		return // it was cut short
	}
	for ctx.Err() == nil {
		if _, err := pickClient().Destroy(ctx, c.session); err == nil {
			break
		}
		pause(ctx, 500*time.Millisecond)
	}
	t.judge(c)
}

// publish publishes one message. While its outcome is unknown it does so again under the same request id.
func (t *talks) publish(ctx context.Context, who *client.Client, r *rand.Rand, session, payload string) publication {
	one := publication{payload: payload, call: t.clock.now()}
	body := payload
	if r.IntN(oneLarge) == 0 {
		body += strings.Repeat(" ", large)
	}
	opts := client.PublishOptions{RequestID: fmt.Sprintf("%s-%x", payload, r.Uint64())}
	for range 3 {
		position, err := who.Publish(ctx, session, stream, []byte(body), opts)
		if one.ret = t.clock.now(); err == nil {
			one.acknowledged, one.position = true, position
			break
		}
		if !pause(ctx, 100*time.Millisecond) {
			break
		}
	}
	return one
}

// An ending is the last message of a talk, once that has been acknowledged.
type ending struct {
	published chan struct{} // closed when payload is set
	payload   string
}

const lastPrefix = "last."

// reached says whether the message is the last, as soon as that is known.
func (e *ending) reached(ctx context.Context, payload string) bool {
	if !strings.HasPrefix(payload, lastPrefix) {
		return false
	}
	select {
	case <-e.published:
		return payload == e.payload
	case <-ctx.Done():
		return true
	}
}

// listen subscribes and takes what comes until the end. One that is restless hangs up again and again, and goes on from where it was.
func (t *talks) listen(ctx context.Context, who *client.Client, r *rand.Rand, session string, restless bool, end *ending) []delivery {
	var got []delivery
	for ctx.Err() == nil {
		call, hangUp := context.WithCancel(ctx)
		messages, err := who.Subscribe(call, session, lastOf(got), stream)
		if err != nil {
			hangUp()
			pause(ctx, 100*time.Millisecond)
			continue
		}
		most := never
		if restless {
			most = 1 + r.IntN(8)
		}
		over := false
		for m, err := range messages {
			if err != nil {
				break
			}
			got = append(got, delivery{payload: strings.TrimRight(string(m.Payload), " "), position: m.Position})
			over = end.reached(ctx, got[len(got)-1].payload)
			if most--; most == 0 || over {
				break
			}
		}
		hangUp()
		if over {
			break
		}
	}
	return got
}
