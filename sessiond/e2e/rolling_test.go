//go:build unix

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// All front-ends, then all sessiond, then all etcd members are stopped with SIGTERM and started again, one at a time, under
// 200 calls a second in 100 sessions, through a balancer that asks /readyz (F20, F6; C60). No session is lost, no answer is
// wrong or lost, and whatever is not 200 is counted and named: front-ends and nodes that leave in order cost nothing. While
// etcd elects a leader, calls wait for it, or are refused with 503 if that takes longer.
func TestRollingRestart(t *testing.T) {
	const sessions, rate = 100, 200
	demo := binary(t, "demo")
	dir := t.TempDir()
	c := sessiondtest.StartCluster(t, sessiondtest.ClusterConfig{
		Dir: dir,
		// Not in this process, whose race detector would make it slow.
		Balancer: func(listen string, backends []string) sessiondtest.Command {
			return sessiondtest.Command{
				Name:  "balancer",
				Path:  demo,
				Args:  []string{"balancer", "--listen", listen, "--backends", strings.Join(backends, ",")},
				Log:   filepath.Join(dir, "balancer.log"),
				Ready: sessiondtest.HTTPReady("http://" + listen + "/readyz"),
			}
		},
	})
	l := &load{t: t, refusals: map[string]int{}}
	var clients []*loadClient
	for range sessions {
		clients = append(clients, &loadClient{load: l, rawSession: openRaw(t, c.URL)})
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var running sync.WaitGroup
	for i, cl := range clients {
		running.Go(func() { cl.run(ctx, i, sessions*time.Second/rate) })
		if i%10 == 0 {
			running.Go(func() { cl.listen(ctx) })
		}
	}
	// calls waits until so many more calls have been answered.
	calls := func(n int64) {
		t.Helper()
		from := l.calls.Load()
		if err := sessiondtest.Poll(within(t, patience), func(context.Context) error {
			if l.calls.Load() < from+n {
				return fmt.Errorf("%d calls in a while, want %d", l.calls.Load()-from, n)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, tier := range []struct {
		name      string
		servers   []*sessiondtest.Server
		mayRefuse bool
	}{{"none", nil, false}, {"front-ends", c.FrontEnds, false}, {"sessiond", c.Nodes, false}, {"etcd", c.Etcd.Members, true}} {
		l.took.reset()
		began, before := time.Now(), l.calls.Load()
		calls(rate)
		for _, s := range tier.servers {
			if err := s.Terminate(t.Context()); err != nil {
				t.Error(err)
			}
			calls(rate / 2)
			if err := s.Restart(within(t, patience)); err != nil {
				t.Fatal(err)
			}
			calls(rate)
		}
		took, n := time.Since(began), l.calls.Load()-before
		refused, times := l.end(), 0
		for _, n := range refused {
			times += n
		}
		t.Logf("restarted: %s. %d calls in %s, %.0f a second; answered in: %s; not 200: %d",
			tier.name, n, took.Round(time.Millisecond), float64(n)/took.Seconds(), &l.took, times)
		for _, what := range slices.Sorted(maps.Keys(refused)) {
			t.Logf("not 200 during the restart of %s, %d times: %s", tier.name, refused[what], what)
		}
		if len(refused) > 0 && !tier.mayRefuse {
			t.Errorf("the restart of %s was noticed", tier.name)
		}
	}
	stop()
	running.Wait()
	for _, cl := range clients {
		if got := cl.call(t, "1", "counter_add", `{"by":0}`); got != strconv.Itoa(cl.total) {
			t.Errorf("a session's total is %s at the end, want %d", got, cl.total)
		}
	}
	t.Logf("%d calls, %d questions answered, %d standalone streams opened", l.calls.Load(), l.answers.Load(), l.streams.Load())
}

// load is what all clients of a load test have in common.
type load struct {
	t                       *testing.T
	calls, answers, streams atomic.Int64
	took                    durations

	mu       sync.Mutex
	refusals map[string]int
}

// end gives what was not 200 since the last end, with how often it was.
func (l *load) end() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := l.refusals
	l.refusals = map[string]int{}
	return out
}

// refused counts a request that was refused. What is not 503 with an error in its body should not have happened.
func (l *load) refused(what string, status int, body string) error {
	var m rpcMessage
	err := fmt.Errorf("%s: %d %s", what, status, body)
	if status != http.StatusServiceUnavailable || json.Unmarshal([]byte(body), &m) != nil || len(m.Error) == 0 {
		return sessiondtest.Final(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refusals[fmt.Sprintf("%s: %d %s", what, status, m.Error)]++
	return err
}

// A loadClient is a session with a call every now and then.
type loadClient struct {
	*load
	rawSession

	total int
}

// run calls at an interval until ctx ends, never two calls at once.
func (c *loadClient) run(ctx context.Context, i int, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for n := i; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		var err error
		begin := time.Now()
		// A call that has begun is waited for also when the test is over.
		switch n % 10 {
		case 0, 2, 4, 6, 8:
			err = c.add()
		case 5:
			err = c.ask(fmt.Sprintf("answer %d of %d", n, i))
		default:
			text := fmt.Sprintf("text %d of %d", n, i)
			err = c.try(func() error {
				return c.expect("echo", fmt.Sprintf(`{"text":%q}`, text), nil, func(got string) bool { return got == text })
			})
		}
		if err != nil {
			c.t.Errorf("session %d, call %d: %v", i, n, err)
			return
		}
		c.took.add(time.Since(begin))
		c.calls.Add(1)
	}
}

// try tries a call again while it is refused.
func (c *loadClient) try(call func() error) error {
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	return sessiondtest.Poll(ctx, func(context.Context) error { return call() })
}

// add counts on. Whether a refused call had its effect is unknown; one that was answered has.
func (c *loadClient) add() error {
	tries := 0
	return c.try(func() error {
		tries++
		return c.expect("counter_add", `{"by":1}`, nil, func(got string) bool {
			total, err := strconv.Atoi(got)
			ok := err == nil && total > c.total && total <= c.total+tries
			c.total = total
			return ok
		})
	})
}

func (c *loadClient) ask(answer string) error {
	return c.try(func() error {
		return c.expect("ask", `{"questions":1}`, &answer, func(got string) bool { return got == fmt.Sprintf("[%q]", answer) })
	})
}

// expect calls a tool, answers its question if there is one, and checks the result. Only what was refused is worth another
// try; a response that breaks off, or one that is wrong, is not.
func (c *loadClient) expect(tool, args string, answer *string, right func(got string) bool) error {
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	r, err := c.begin(ctx, http.MethodPost, callMessage("1", tool, args))
	if err != nil {
		return sessiondtest.Final(err)
	}
	defer r.close()
	if r.StatusCode != http.StatusOK {
		body, err := io.ReadAll(r.Body)
		return errors.Join(c.refused(tool, r.StatusCode, string(body)), err)
	}
	m, err := r.next()
	if err == nil && m.Method == "elicitation/create" && answer != nil {
		message := fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"action":"accept","content":{"answer":%q}}}`, m.ID, *answer)
		err = c.try(func() error {
			a, err := c.begin(ctx, http.MethodPost, message)
			if err != nil {
				return sessiondtest.Final(err)
			}
			defer a.close()
			body, err := io.ReadAll(a.Body)
			if a.StatusCode != http.StatusAccepted {
				return errors.Join(c.refused("answer", a.StatusCode, string(body)), err)
			}
			c.answers.Add(1)
			return nil
		})
		if err == nil {
			m, err = r.next()
		}
	}
	switch {
	case err != nil:
		return sessiondtest.Final(fmt.Errorf("%s: no answer: %w", tool, err))
	case len(m.Error) > 0 || m.Result.IsError:
		// A stream has begun, so the status was sent before it was known that the store is away.
		text := string(m.Error)
		if len(m.Result.Content) > 0 {
			text = m.Result.Content[0].Text
		}
		if !strings.Contains(text, "unavailable") && !strings.Contains(text, "not reachable") {
			return sessiondtest.Final(fmt.Errorf("%s: %+v", tool, m))
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.refusals[tool+": 200 with the error "+text]++
		return errors.New(text)
	case len(m.Result.Content) != 1 || !right(m.Result.Content[0].Text):
		return sessiondtest.Final(fmt.Errorf("%s %s: wrong answer %+v", tool, args, m))
	}
	return nil
}

// listen keeps a standalone stream open until ctx ends. It ends when the front-end that has it drains.
func (c *loadClient) listen(ctx context.Context) {
	for ctx.Err() == nil {
		err := sessiondtest.Poll(ctx, func(context.Context) error {
			r, err := c.begin(ctx, http.MethodGet, "")
			if err != nil {
				return err
			}
			defer r.close()
			if r.StatusCode != http.StatusOK {
				body, _ := io.ReadAll(r.Body)
				return c.refused("GET", r.StatusCode, string(body))
			}
			c.streams.Add(1)
			if m, err := r.next(); !errors.Is(err, io.EOF) {
				return sessiondtest.Final(fmt.Errorf("the standalone stream brought %+v, %w", m, err))
			}
			return nil
		})
		if err != nil && ctx.Err() == nil {
			c.t.Errorf("standalone stream: %v", err)
			return
		}
	}
}
