package etcdstore

import (
	"context"
	"hash/fnv"
	"io"
	"slices"
	"sync"
	"time"
)

const (
	// How long after a session has gone its leftovers are looked for: its waiters leave by themselves.
	cleanAfter = 300 * time.Millisecond
	// When another node looks again, in case that the first has died.
	cleanAgainAfter = 6 * time.Second
	// How many sessions' leftovers are looked for at one go, three reads each.
	cleanTogether = maxTxnOps / 3
	// While there is more at once, no leftovers are looked for after some for so many times as long as that took, and at most for so long: the
	// reads of very many sessions that expired together are not to take the processor from everybody else. Not if so many sessions wait for it
	// that there might soon be too many.
	cleanPauses   = 3
	maxCleanPause = 10 * time.Millisecond
	// How many sessions may wait for that. Beyond it, what they leave is left to its TTLs.
	maxToClean = 200_000
)

// cleaner removes the lock entries and messages of sessions that have expired. All nodes see a session go; two of them are
// picked by its id, so that the work is shared when very many expire at once. A destroyed session leaves nothing, and to
// find that out costs a share of one read.
type cleaner struct {
	node string
	more chan struct{}

	mu    sync.Mutex
	nodes []string // that live
	soon  []expired
	later []expired
}

type expired struct {
	session string // escaped
	due     time.Time
}

func newCleaner(node string) *cleaner {
	return &cleaner{node: node, more: make(chan struct{}, 1)}
}

func (c *cleaner) setNodes(nodes []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes = nodes
}

// expired notes a session that has gone, if it is one of this node's.
func (c *cleaner) expired(session string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list, after := &c.soon, cleanAfter
	switch c.placeLocked(session) {
	case 0:
	case 1:
		list, after = &c.later, cleanAgainAfter
	default:
		return
	}
	if len(*list) >= maxToClean {
		return
	}
	*list = append(*list, expired{session, time.Now().Add(after)})
	select {
	case c.more <- struct{}{}:
	default:
	}
}

// placeLocked is this node's place in the order in which nodes care for a session.
func (c *cleaner) placeLocked(session string) int {
	weight := func(node string) uint64 {
		h := fnv.New64a()
		_, _ = io.WriteString(h, session)
		_, _ = io.WriteString(h, node)
		// The last bytes hardly reach the high bits: mix them (the finalizer of MurmurHash3).
		sum := h.Sum64()
		sum = (sum ^ sum>>33) * 0xff51afd7ed558ccd
		sum = (sum ^ sum>>33) * 0xc4ceb9fe1a85ec53
		return sum ^ sum>>33
	}
	mine, place := weight(c.node), 0
	for _, node := range c.nodes {
		if node != c.node && weight(node) < mine {
			place++
		}
	}
	return place
}

// due takes out what is due, and says when there is more; 0: there is none.
func (c *cleaner) due() (sessions []string, wait time.Duration) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, list := range []*[]expired{&c.soon, &c.later} {
		n := 0
		for n < len(*list) && len(sessions) < cleanTogether && !(*list)[n].due.After(now) {
			if s := (*list)[n].session; !slices.Contains(sessions, s) {
				sessions = append(sessions, s)
			}
			n++
		}
		if *list = (*list)[n:]; len(*list) == 0 {
			*list = nil
			continue
		}
		if left := max((*list)[0].due.Sub(now), time.Millisecond); wait == 0 || left < wait {
			wait = left
		}
	}
	return sessions, wait
}

// pauseAfter is how long to look for no more leftovers after those of so many sessions, which took so long.
func (c *cleaner) pauseAfter(sessions int, took time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if sessions < cleanTogether || max(len(c.soon), len(c.later)) > maxToClean/2 {
		return 0
	}
	return min(cleanPauses*took, maxCleanPause)
}

// clean removes leftovers until ctx ends.
func (s *Store) clean(ctx context.Context) {
	for ctx.Err() == nil {
		sessions, wait := s.cleaner.due()
		if len(sessions) > 0 {
			began := time.Now()
			if err := s.cleanUp(ctx, sessions); err != nil && ctx.Err() == nil {
				// The other node of each session, or the leftovers' own TTLs, will see to it.
				s.logger.DebugContext(ctx, "leftovers of expired sessions not removed", "error", err)
				pause(ctx, sweepRetry)
			}
			pause(ctx, s.cleaner.pauseAfter(len(sessions), time.Since(began)))
			continue
		}
		pauseFor(ctx, s.cleaner.more, wait)
	}
}

// cleanUp looks for what sessions left, and removes it unless the session is there again.
func (s *Store) cleanUp(ctx context.Context, sessions []string) error {
	octx, cancel := s.op(ctx)
	defer cancel()
	var looks []operation
	for _, id := range sessions {
		for _, prefix := range []string{s.keys.locksOf(id), s.keys.messagesOf(id)} {
			looks = append(looks, opGetAnyKey(prefix))
		}
		looks = append(looks, opGetKey(s.keys.tailOf(id)))
	}
	found, err := s.kv.read(octx, looks...)
	if err != nil {
		return err
	}
	var tails []operation // which may go in any case
	for i, id := range sessions {
		if len(found.Responses[3*i+2].GetResponseRange().Kvs) > 0 {
			tails = append(tails, opDelete(s.keys.tailOf(id)))
		}
	}
	if len(tails) > 0 {
		if _, err := s.txn(octx, nil, tails, nil); err != nil {
			return err
		}
	}
	for i, id := range sessions {
		var removals []operation
		for j, prefix := range []string{s.keys.locksOf(id), s.keys.messagesOf(id)} {
			if len(found.Responses[3*i+j].GetResponseRange().Kvs) > 0 {
				removals = append(removals, opDeleteAll(prefix))
			}
		}
		if len(removals) == 0 {
			continue
		}
		rctx, cancel := s.op(ctx)
		_, err := s.txn(rctx, []compare{missing(s.keys.sessionOf(id))}, removals, nil)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}
