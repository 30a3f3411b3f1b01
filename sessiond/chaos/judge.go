package chaos

import (
	"context"
	"sync"
	"time"
)

// A judge checks histories while the run goes on, and keeps the ones that are not as they should be.
type judge struct {
	calm   *calm
	bounds bounds
	// guilty is given the history of a session with violations.
	guilty func(ops []Op, violations []Violation)

	histories chan []Op
	running   sync.WaitGroup

	mu     sync.Mutex
	totals Totals
}

// Totals are what a run came to.
type Totals struct {
	// Sessions is how many had their histories judged; Undecided how many of them took too long to judge.
	Sessions, Undecided int
	// Operations is how many were done. Checked are those in histories that were judged, Answered those whose client learned what
	// became of them.
	Operations, Checked, Answered int
	// ByKind is how often there was each outcome of each kind of operation.
	ByKind map[Kind]map[Outcome]int
	// Talks is how many sessions had their messages judged; Published is how many messages there were, Acknowledged how many of them
	// certainly were published, and Delivered how many deliveries there were.
	Talks, Published, Acknowledged, Delivered int
	// Visits is how many MCP sessions were judged; Requests is how many calls of tools there were, RequestsAnswered how many of them
	// brought what they should.
	Visits, Requests, RequestsAnswered int
	// Violations is what is wrong.
	Violations []Violation
}

// SuccessRate is the part of the operations whose clients learned what became of them.
func (t *Totals) SuccessRate() float64 {
	if t.Operations == 0 {
		return 0
	}
	return float64(t.Answered) / float64(t.Operations)
}

func newJudge(c *calm, b bounds, guilty func([]Op, []Violation)) *judge {
	return &judge{
		calm: c, bounds: b, guilty: guilty,
		histories: make(chan []Op, 64), totals: Totals{ByKind: map[Kind]map[Outcome]int{}},
	}
}

// start begins to judge what is taken.
func (j *judge) start() {
	j.running.Go(func() {
		for ops := range j.histories {
			j.check(ops)
		}
	})
}

// take takes the history of a session. It waits if the judge is behind.
func (j *judge) take(ops []Op) { j.histories <- ops }

// finish returns the totals when everything taken has been judged.
func (j *judge) finish() *Totals {
	close(j.histories)
	j.running.Wait()
	return &j.totals
}

func (j *judge) check(ops []Op) {
	if len(ops) == 0 {
		return
	}
	v := checkSession(ops, j.calm.disturbed(), j.bounds)
	j.mu.Lock()
	t := &j.totals
	t.Sessions++
	t.Operations += len(ops)
	t.Checked += v.checked
	if v.unknown {
		t.Undecided++
	}
	for i := range ops {
		if ops[i].judged() {
			t.Answered++
		}
		if t.ByKind[ops[i].Kind] == nil {
			t.ByKind[ops[i].Kind] = map[Outcome]int{}
		}
		t.ByKind[ops[i].Kind][ops[i].Outcome]++
	}
	t.Violations = append(t.Violations, v.violations...)
	j.mu.Unlock()
	if len(v.violations) > 0 {
		j.guilty(ops, v.violations)
	}
}

// takeMessages judges a conversation.
func (j *judge) takeMessages(c *conversation, logf func(string, ...any)) {
	violations := checkMessages(c)
	for _, v := range violations {
		logf("VIOLATION %v", v)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	t := &j.totals
	t.Talks++
	t.Published += len(c.published)
	for _, p := range c.published {
		if p.acknowledged {
			t.Acknowledged++
		}
	}
	for _, got := range c.delivered {
		t.Delivered += len(got)
	}
	t.Violations = append(t.Violations, violations...)
}

// violated says whether anything is wrong so far.
func (j *judge) violated() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.totals.Violations) > 0
}

// untilViolated is a context that ends when anything is wrong.
func (j *judge) untilViolated(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if j.violated() {
					cancel()
					return
				}
			}
		}
	}()
	return ctx, cancel
}
