//go:build unix

package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// An action makes a fault, lets it last, and mends it.
type action func(ctx context.Context) error

// A fault says what it will do, chosen at random, and returns what does it.
type fault struct {
	kind string
	// layer is what it breaks. Faults at the same time are of different layers.
	layer layer
	plan  func(f *faulter, r *rand.Rand) (what string, do action)
}

type layer int

const (
	nodeLayer layer = iota
	etcdLayer
	clientLinkLayer
	nodeLinkLayer
	peerLinkLayer
	frontEndLayer
)

// allFaults are all kinds there are.
var allFaults = []fault{
	{"kill-node", nodeLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.kill(pick(r, f.nodes), between(r, 100, 3000))
	}},
	{"pause-node", nodeLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.pauseProcess(pick(r, f.nodes), between(r, 300, 6000))
	}},
	{"terminate-node", nodeLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.terminate(pick(r, f.nodes), between(r, 100, 2000))
	}},
	{"kill-member", etcdLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.kill(pick(r, f.etcd.Members), between(r, 100, 4000))
	}},
	{"kill-leader", etcdLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.toLeader(between(r, 100, 4000), f.kill)
	}},
	{"pause-member", etcdLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.pauseProcess(pick(r, f.etcd.Members), between(r, 300, 6000))
	}},
	{"pause-leader", etcdLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.toLeader(between(r, 300, 6000), f.pauseProcess)
	}},
	{"move-leader", etcdLayer, (*faulter).moveLeader},
	{"slow-disk", etcdLayer, (*faulter).slowDisk},
	{"restart-etcd", etcdLayer, (*faulter).restartEtcd},
	{"compact-defragment", etcdLayer, (*faulter).compactAndDefragment},
	{"no-space", etcdLayer, (*faulter).noSpace},
	{"cut-clients", clientLinkLayer, func(f *faulter, r *rand.Rand) (string, action) { return f.breakLinks(r, "clients", f.byClients) }},
	{"lose-answers-to-clients", clientLinkLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.loseAnswers(r, "clients", f.byClients)
	}},
	{"cut-nodes", nodeLinkLayer, func(f *faulter, r *rand.Rand) (string, action) { return f.breakLinks(r, "nodes", f.byNodes) }},
	{"lose-answers-to-nodes", nodeLinkLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.loseAnswers(r, "nodes", f.byNodes)
	}},
	{"cut-members", peerLinkLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.breakLinks(r, "members", [][]*sessiondtest.Link{f.byPeers})
	}},
	{"kill-front-end", frontEndLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.kill(pick(r, f.frontEnds), between(r, 100, 2000))
	}},
	{"pause-front-end", frontEndLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.pauseProcess(pick(r, f.frontEnds), between(r, 300, 5000))
	}},
	{"terminate-front-end", frontEndLayer, func(f *faulter, r *rand.Rand) (string, action) {
		return f.terminate(pick(r, f.frontEnds), between(r, 100, 2000))
	}},
}

// Kinds are the names of all faults, without those of front-ends unless asked for.
func Kinds(frontEnds bool) []string {
	var kinds []string
	for _, f := range allFaults {
		if f.layer != frontEndLayer || frontEnds {
			kinds = append(kinds, f.kind)
		}
	}
	return kinds
}

const (
	// How long it may take to make a fault and to mend it, beyond the time that it lasts.
	faultTimeout = 60 * time.Second
	// After so many faults there is a pause in which everything must be as if there had been none.
	faultsInARow = 5
	longPause    = 18 * time.Second
)

// faulter makes the faults of a run. All that is chosen at random follows from the seed: which faults, on what, and for how long.
type faulter struct {
	*cluster
	calm  *calm
	clock clock
	seed  uint64
	kinds []string
	// frontEnds are their processes, if there are any.
	frontEnds []*sessiondtest.Server
	logf      func(format string, args ...any)

	mu   sync.Mutex
	made map[string]int
}

// run makes faults until stop ends. Each that has begun is mended. An error says that one could not be: then the run is worth nothing.
func (f *faulter) run(ctx, stop context.Context) error {
	r := random(f.seed, 0xfa)
	var deck []fault
	for n := 1; ; n++ {
		gap := between(r, 500, 4000)
		if n%faultsInARow == 0 {
			gap = longPause
		}
		if !pause(stop, gap) {
			return nil
		}
		first := f.draw(r, &deck)
		at := []fault{first}
		if r.IntN(4) == 0 {
			if second := f.draw(r, &deck); second.layer != first.layer {
				at = append(at, second)
			} else {
				deck = append([]fault{second}, deck...)
			}
		}
		errs := make([]error, len(at))
		var wg sync.WaitGroup
		for i, one := range at {
			what, do := one.plan(f, r)
			wg.Go(func() { errs[i] = f.do(ctx, one.kind, what, do) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
}

// draw takes a fault of a deck that has each kind once, so that a run of some length has had them all.
func (f *faulter) draw(r *rand.Rand, deck *[]fault) fault {
	if len(*deck) == 0 {
		for _, one := range allFaults {
			if slices.Contains(f.kinds, one.kind) {
				*deck = append(*deck, one)
			}
		}
		r.Shuffle(len(*deck), func(i, j int) { (*deck)[i], (*deck)[j] = (*deck)[j], (*deck)[i] })
	}
	one := (*deck)[0]
	*deck = (*deck)[1:]
	return one
}

func (f *faulter) do(ctx context.Context, kind, what string, do action) error {
	ctx, cancel := context.WithTimeout(ctx, faultTimeout)
	defer cancel()
	over := f.calm.begin(f.clock.now)
	defer over()
	began := f.clock.now()
	err := do(ctx)
	f.logf("fault %s %s: %.3f to %.3f s", kind, what, time.Duration(began).Seconds(), time.Duration(f.clock.now()).Seconds())
	f.mu.Lock()
	defer f.mu.Unlock()
	f.made[kind]++
	if err != nil {
		return fmt.Errorf("fault %s %s: %w", kind, what, err)
	}
	return nil
}

func between(r *rand.Rand, least, most int) time.Duration {
	return time.Duration(least+r.IntN(most-least)) * time.Millisecond
}

func (f *faulter) kill(p *sessiondtest.Server, d time.Duration) (string, action) {
	return fmt.Sprintf("%s for %v", p.Name(), d), func(ctx context.Context) error {
		if err := p.Kill(); err != nil {
			return err
		}
		pause(ctx, d)
		return p.Restart(ctx)
	}
}

func (f *faulter) terminate(p *sessiondtest.Server, d time.Duration) (string, action) {
	return fmt.Sprintf("%s for %v", p.Name(), d), func(ctx context.Context) error {
		if err := p.Terminate(ctx); err != nil {
			return err
		}
		pause(ctx, d)
		return p.Restart(ctx)
	}
}

func (f *faulter) pauseProcess(p *sessiondtest.Server, d time.Duration) (string, action) {
	return fmt.Sprintf("%s for %v", p.Name(), d), func(ctx context.Context) error {
		if err := p.Pause(); err != nil {
			return err
		}
		pause(ctx, d)
		return p.Continue()
	}
}

// toLeader does something to the member that leads by then.
func (f *faulter) toLeader(d time.Duration, do func(*sessiondtest.Server, time.Duration) (string, action)) (string, action) {
	return fmt.Sprintf("for %v", d), func(ctx context.Context) error {
		i, err := f.leader(ctx)
		if err != nil {
			return err
		}
		_, run := do(f.etcd.Members[i], d)
		return run(ctx)
	}
}

// leader waits until there is one.
func (f *faulter) leader(ctx context.Context) (i int, err error) {
	err = sessiondtest.Poll(ctx, func(ctx context.Context) (err error) {
		i, err = f.etcd.Leader(ctx)
		return err
	})
	return i, err
}

// moveLeader has another member lead, some times, while locks are held.
func (f *faulter) moveLeader(r *rand.Rand) (string, action) {
	times, step := 1+r.IntN(3), 1+r.IntN(members-1)
	return fmt.Sprintf("%d times", times), func(ctx context.Context) error {
		for range times {
			err := sessiondtest.Poll(ctx, func(ctx context.Context) error {
				leads, err := f.leader(ctx)
				if err != nil {
					return err
				}
				to := (leads + step) % members
				status, err := f.member[to].Status(ctx, f.etcd.Members[to].Addr)
				if err != nil {
					return err
				}
				ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
				defer cancel()
				_, err = f.member[leads].MoveLeader(ctx, status.Header.MemberId)
				return err
			})
			if err != nil {
				return err
			}
			pause(ctx, 500*time.Millisecond)
		}
		return nil
	}
}

// slowDisk lets a member run for some milliseconds at a time, with longer stops in between: what a write to a slow disk looks like from
// outside.
func (f *faulter) slowDisk(r *rand.Rand) (string, action) {
	m, d := pick(r, f.etcd.Members), between(r, 1500, 5000)
	stop, run := between(r, 20, 150), between(r, 5, 30)
	return fmt.Sprintf("%s for %v, stopped for %v after each %v", m.Name(), d, stop, run), func(ctx context.Context) error {
		for end := time.Now().Add(d); time.Now().Before(end); {
			if err := m.Signal(syscall.SIGSTOP); err != nil {
				return err
			}
			pause(ctx, stop)
			if err := m.Continue(); err != nil {
				return err
			}
			pause(ctx, run)
		}
		return nil
	}
}

// restartEtcd kills all members, for longer than the TTLs of the locks that are held, and starts them again.
func (f *faulter) restartEtcd(r *rand.Rand) (string, action) {
	d := between(r, 500, 5000)
	return fmt.Sprintf("all members down for %v", d), func(ctx context.Context) error {
		each := func(do func(*sessiondtest.Server) error) error {
			errs := make([]error, members)
			var wg sync.WaitGroup
			for i, m := range f.etcd.Members {
				wg.Go(func() { errs[i] = do(m) })
			}
			wg.Wait()
			return errors.Join(errs...)
		}
		if err := each(func(m *sessiondtest.Server) error { return m.Kill() }); err != nil {
			return err
		}
		pause(ctx, d)
		return each(func(m *sessiondtest.Server) error { return m.Restart(ctx) })
	}
}

// compactAndDefragment forgets all history under those who wait, and has each member, which answers nothing meanwhile, write its file anew.
func (f *faulter) compactAndDefragment(r *rand.Rand) (string, action) {
	times := 2 + r.IntN(6)
	return fmt.Sprintf("compacted %d times", times), func(ctx context.Context) error {
		for range times {
			if err := f.compactAll(ctx); err != nil {
				return err
			}
			pause(ctx, 200*time.Millisecond)
		}
		return f.defragment(ctx)
	}
}

func (f *faulter) compactAll(ctx context.Context) error {
	return sessiondtest.Poll(ctx, func(ctx context.Context) error {
		resp, err := f.admin.Get(ctx, "none")
		if err != nil {
			return err
		}
		_, err = f.admin.Compact(ctx, resp.Header.Revision)
		if errors.Is(err, rpctypes.ErrCompacted) {
			return nil
		}
		return err
	})
}

func (f *faulter) defragment(ctx context.Context) error {
	for i, m := range f.etcd.Members {
		err := sessiondtest.Poll(ctx, func(ctx context.Context) error {
			_, err := f.member[i].Defragment(ctx, m.Addr)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// noSpace uses up etcd's space, until it takes no writes any more, and frees it after a while.
func (f *faulter) noSpace(r *rand.Rand) (string, action) {
	d := between(r, 500, 2000)
	const prefix = "chaos-fill/"
	return fmt.Sprintf("for %v", d), func(ctx context.Context) error {
		filler := strings.Repeat("x", 1<<20)
		errs := make([]error, 4)
		var wg sync.WaitGroup
		for w := range errs {
			wg.Go(func() {
				for i := 0; !errors.Is(errs[w], rpctypes.ErrNoSpace) && ctx.Err() == nil; i++ {
					_, errs[w] = f.admin.Put(ctx, fmt.Sprintf("%s%d/%d", prefix, w, i), filler)
				}
			})
		}
		wg.Wait()
		if ctx.Err() != nil {
			return fmt.Errorf("space was not used up: %w", errors.Join(errs...))
		}
		full := time.Now()
		pause(ctx, d)
		err := sessiondtest.Poll(ctx, func(ctx context.Context) error {
			_, err := f.admin.Delete(ctx, prefix, clientv3.WithPrefix())
			return err
		})
		if err != nil {
			return err
		}
		// A member that still counts what was there raises the alarm again when it is asked to write meanwhile.
		return sessiondtest.Poll(ctx, func(ctx context.Context) error {
			if err := errors.Join(f.compactAll(ctx), f.defragment(ctx)); err != nil {
				return err
			}
			if _, err := f.admin.AlarmDisarm(ctx, &clientv3.AlarmMember{}); err != nil {
				return err
			}
			pause(ctx, 500*time.Millisecond)
			for _, m := range f.member {
				if _, err := m.Put(ctx, prefix, "written again"); err != nil {
					return err
				}
			}
			f.logf("no space for %.1f s", time.Since(full).Seconds())
			return nil
		})
	}
}

// choose takes some links: one, all from one side, or all to one target.
func choose(r *rand.Rand, links [][]*sessiondtest.Link) (string, []*sessiondtest.Link) {
	from, to := r.IntN(len(links)), r.IntN(len(links[0]))
	switch n := r.IntN(4); {
	case n < 2:
		return fmt.Sprintf("%d to %d", from+1, to+1), links[from][to : to+1]
	case n == 2 && len(links) > 1:
		return fmt.Sprintf("%d to all", from+1), links[from]
	default:
		var all []*sessiondtest.Link
		for _, row := range links {
			all = append(all, row[to])
		}
		return fmt.Sprintf("all to %d", to+1), all
	}
}

// breakLinks cuts links, lets nothing through them without a word, or slows them down.
func (f *faulter) breakLinks(r *rand.Rand, who string, links [][]*sessiondtest.Link) (string, action) {
	which, chosen := choose(r, links)
	d := between(r, 500, 6000)
	how := pick(r, []string{"cut", "frozen", "delayed"})
	delay := between(r, 5, 300)
	if how == "delayed" {
		how = fmt.Sprintf("delayed by %v", delay)
	}
	return fmt.Sprintf("of %s, %s, %s for %v", who, which, how, d), func(ctx context.Context) error {
		for _, k := range chosen {
			switch how {
			case "cut":
				k.Cut()
			case "frozen":
				k.Freeze()
			default:
				k.Delay(delay)
			}
		}
		pause(ctx, d)
		var errs []error
		for _, k := range chosen {
			k.Thaw()
			k.Delay(0)
			errs = append(errs, k.Restore())
		}
		return errors.Join(errs...)
	}
}

// loseAnswers lets what is asked through, and cuts the connections before the answers, again and again.
func (f *faulter) loseAnswers(r *rand.Rand, who string, links [][]*sessiondtest.Link) (string, action) {
	which, chosen := choose(r, links)
	times, d := 2+r.IntN(5), between(r, 20, 250)
	return fmt.Sprintf("of %s, %s, %d times after %v", who, which, times, d), func(ctx context.Context) error {
		for range times {
			for _, k := range chosen {
				k.FreezeAnswers()
			}
			pause(ctx, d)
			for _, k := range chosen {
				k.Cut()
			}
			for _, k := range chosen {
				if err := k.Restore(); err != nil {
					return err
				}
			}
			pause(ctx, 300*time.Millisecond)
		}
		return nil
	}
}
