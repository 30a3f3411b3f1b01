//go:build unix

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// The main job in the three ways of running front-ends. One cluster serves all scenarios of a configuration, as it would
// serve many clients; those that break it come last.

func TestClusterWithoutLock(t *testing.T) {
	c := sessiondtest.StartCluster(t, sessiondtest.ClusterConfig{})
	testTypeScript(t, c, 100)
	t.Run("go", func(t *testing.T) { testGoClient(t, c) })
	t.Run("turns", func(t *testing.T) { testTurns(t, c) })
	t.Run("answers", func(t *testing.T) { testAnswers(t, c) })
	t.Run("delete while running", func(t *testing.T) { testDeleteWhileRunning(t, c) })
	testCasualties(t, c)
	testOutages(t, c)
}

func TestClusterWithLock(t *testing.T) {
	c := sessiondtest.StartCluster(t, sessiondtest.ClusterConfig{FrontEndArgs: []string{"--lock"}})
	testTypeScript(t, c, 100, "parallel-counter")
	t.Run("go", func(t *testing.T) { testGoClient(t, c) })
	t.Run("answers", func(t *testing.T) { testAnswers(t, c) })
	t.Run("order", func(t *testing.T) { testOrder(t, c) })
	t.Run("delete while running", func(t *testing.T) { testDeleteWhileRunning(t, c) })
	t.Run("holder killed", func(t *testing.T) { testHolderKilled(t, c) })
	t.Run("rolling restart", func(t *testing.T) { testRollingRestart(t, c) })
	testCasualties(t, c)
	testOutages(t, c)
}

func TestClusterWithJSON(t *testing.T) {
	c := sessiondtest.StartCluster(t, sessiondtest.ClusterConfig{FrontEndArgs: []string{"--json"}})
	testTypeScript(t, c, 50)
	t.Run("go", func(t *testing.T) { testGoClient(t, c) })
	t.Run("answers", func(t *testing.T) { testAnswers(t, c) })
}

// testTypeScript runs the scenarios of the TypeScript driver, and more that only this configuration promises. The scenario
// load has so many rounds.
func testTypeScript(t *testing.T, c *sessiondtest.Cluster, rounds int, more ...string) {
	t.Run("typescript", func(t *testing.T) {
		names := append([]string{
			"basics", "counter", "ask", "ask-while-busy", "ask-in-parallel", "cannot-be-asked", "sampling", "roots", "progress",
			"logging", "errors", "delete", "notes", "load",
		}, more...)
		for _, r := range scenarios(t, c.URL, append([]string{fmt.Sprint("--rounds=", rounds)}, names...)...) {
			t.Run(r.Scenario, func(t *testing.T) {
				r.check(t)
				// Too few requests to reach all front-ends would prove nothing.
				if r.Scenario != "progress" && len(r.Served) != len(c.FrontEnds) {
					t.Errorf("served by %v, want %d back-ends", r.Served, len(c.FrontEnds))
				}
				switch r.Scenario {
				case "ask":
					for _, hops := range r.Hops {
						if !slices.ContainsFunc(hops[1:], func(by string) bool { return by != hops[0] }) {
							t.Errorf("asked and answered on the same front-end only: %v", hops)
						}
					}
				case "load":
					if want := 14 * rounds; r.Right != want {
						t.Errorf("%d of %d answers right", r.Right, want)
					}
				}
			})
		}
	})
}

// testCasualties kills one front-end, one sessiond and one etcd member in turn, between two calls, under two clients with
// a session each: both sessions go on.
func testCasualties(t *testing.T, c *sessiondtest.Cluster) {
	ts := startSteps(t, c.URL)
	gosdk := connect(t, c.URL, handshakeEra)
	clients := map[string]*survivor{
		"typescript": {call: ts.call},
		"go": {call: func(tool string, args map[string]any) (string, error) {
			return gosdk.call(within(t, patience), tool, args)
		}},
	}
	// All front-ends and nodes take part in this many calls.
	const calls = 6

	goOn := func(t *testing.T, tolerance time.Duration) {
		t.Helper()
		for name, cl := range clients {
			if err := cl.goOn(within(t, patience), calls, tolerance); err != nil {
				t.Errorf("%s client: %v", name, err)
			}
		}
	}
	casualty := func(t *testing.T, s *sessiondtest.Server, tolerance time.Duration) {
		t.Helper()
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		goOn(t, tolerance)
		if err := s.Restart(within(t, patience)); err != nil {
			t.Fatal(err)
		}
		goOn(t, tolerance)
	}

	goOn(t, 0)
	// Not one call may fail for a process that died while nothing was under way: there are others that can do its work.
	t.Run("a front-end is killed", func(t *testing.T) { casualty(t, c.FrontEnds[0], 0) })
	t.Run("a sessiond is killed", func(t *testing.T) { casualty(t, c.Nodes[1], 0) })
	// etcd needs an election when its leader dies, and says so until it has a new one.
	t.Run("an etcd follower is killed", func(t *testing.T) {
		leader, err := c.Etcd.Leader(within(t, patience))
		if err != nil {
			t.Fatal(err)
		}
		casualty(t, c.Etcd.Members[(leader+1)%len(c.Etcd.Members)], 5*time.Second)
	})
	t.Run("the etcd leader is killed", func(t *testing.T) {
		leader, err := c.Etcd.Leader(within(t, patience))
		if err != nil {
			t.Fatal(err)
		}
		casualty(t, c.Etcd.Members[leader], 10*time.Second)
	})
}

// A survivor counts along with its session's counter.
type survivor struct {
	call  func(tool string, args map[string]any) (string, error)
	total int
}

// goOn adds to the counter n times and asks questions in between. Calls may fail for as long as tolerance; whether such a
// call had its effect is unknown, but what was acknowledged must be there.
func (s *survivor) goOn(ctx context.Context, n int, tolerance time.Duration) error {
	for i := range n {
		if err := s.add(ctx, tolerance); err != nil {
			return fmt.Errorf("call %d: %w", i+1, err)
		}
		if i%3 != 0 {
			continue
		}
		err := s.try(ctx, tolerance, func() error {
			_, err := s.call("ask", map[string]any{"questions": 2})
			return err
		})
		if err != nil {
			return fmt.Errorf("ask after call %d: %w", i+1, err)
		}
	}
	return nil
}

// add adds one to the counter, trying again for as long as tolerance.
func (s *survivor) add(ctx context.Context, tolerance time.Duration) error {
	tries := 0
	return s.try(ctx, tolerance, func() error {
		tries++
		text, err := s.call("counter_add", map[string]any{"by": 1})
		if err != nil {
			return err
		}
		total, err := strconv.Atoi(text)
		if err != nil || total <= s.total || total > s.total+tries {
			return sessiondtest.Final(fmt.Errorf("total %q after %d and %d tries", text, s.total, tries))
		}
		s.total = total
		return nil
	})
}

func (s *survivor) try(ctx context.Context, tolerance time.Duration, f func() error) error {
	end := time.Now().Add(tolerance)
	return sessiondtest.Poll(ctx, func(context.Context) error {
		err := f()
		if err != nil && time.Now().After(end) {
			return sessiondtest.Final(errors.Join(err))
		}
		return err
	})
}
