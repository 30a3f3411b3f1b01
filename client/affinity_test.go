package client_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/sessiond/sessiond/client"
	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

// visits are the nodes that were asked about each session, one after the other.
type visits struct {
	mu    sync.Mutex
	nodes map[string][]int
}

func (v *visits) add(session string, node int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.nodes[session] = append(v.nodes[session], node)
}

// take returns who has been asked since it was called last.
func (v *visits) take() map[string][]int {
	v.mu.Lock()
	defer v.mu.Unlock()
	nodes := v.nodes
	v.nodes = map[string][]int{}
	return nodes
}

// visited starts nodes that note who is asked. Each answers as it is told, at once if by nil.
func visited(t *testing.T, count int) (v *visits, nodes []*sharer, addresses []string) {
	t.Helper()
	v = &visits{nodes: map[string][]int{}}
	for i := range count {
		f := &sharer{}
		f.serve = func(s *sharerStream, call *sessiondv1.MultiplexCall) bool {
			var r sessiondv1.ReadRequest
			if err := proto.Unmarshal(call.GetRequest(), &r); err != nil {
				t.Error(err)
			}
			v.add(r.GetSessionId(), i)
			s.answer(call.GetId(), &sessiondv1.ReadResponse{}, nil)
			return true
		}
		nodes, addresses = append(nodes, f), append(addresses, startSharer(t, f))
	}
	return v, nodes, addresses
}

// readAll reads sessions until all nodes are asked on shared streams, and once more.
func readAll(t *testing.T, c *client.Client, v *visits, nodes []*sharer) {
	t.Helper()
	share(t, c, nodes...)
	v.take()
	for n := range 300 {
		if _, err := c.Read(t.Context(), fmt.Sprint(n)); err != nil {
			t.Fatal(err)
		}
	}
}

// C1: what is about a session goes to one node, the same one from all clients, and each node has its share of the sessions.
func TestC1SessionsHaveTheirNodes(t *testing.T) {
	v, nodes, addresses := visited(t, 3)
	var of []map[string][]int
	for range 2 {
		c := newClient(t, addresses...)
		readAll(t, c, v, nodes)
		readAll(t, c, v, nodes)
		of = append(of, v.take())
		slices.Reverse(addresses) // the order in which a client knows them is no matter
	}
	count := map[int]int{}
	for session, by := range of[0] {
		if other := of[1][session]; len(by) == 0 || slices.ContainsFunc(append(by, other...), func(n int) bool { return n != by[0] }) {
			t.Errorf("session %s: nodes %v, by another client %v", session, by, other)
		}
		count[by[0]]++
	}
	for i := range nodes {
		if count[i] < 60 || count[i] > 140 {
			t.Errorf("node %d has %d of 300 sessions", i, count[i])
		}
	}
}

// C1: when a node shuts down its sessions go to others, and the sessions of those stay where they are.
func TestC1OnlyTheSessionsOfANodeMove(t *testing.T) {
	v, nodes, addresses := visited(t, 3)
	c := newClient(t, addresses...)
	readAll(t, c, v, nodes)
	before := v.take()
	serve := nodes[0].serve
	nodes[0].serve = func(s *sharerStream, call *sessiondv1.MultiplexCall) bool {
		s.answer(call.GetId(), nil, failure(codes.Unavailable, "SHUTTING_DOWN"))
		s.send(&sessiondv1.MultiplexResponse{Draining: true})
		return serve(s, &sessiondv1.MultiplexCall{}) // an answer too much is nobody's
	}
	for session := range before {
		if _, err := c.Read(t.Context(), session); err != nil {
			t.Fatal(err)
		}
	}
	after, moved := v.take(), map[int]int{}
	for session, by := range before {
		switch now := after[session]; {
		case by[0] != 0 && (len(now) != 1 || now[0] != by[0]):
			t.Errorf("session %s of node %d: %v", session, by[0], now)
		case by[0] == 0 && (len(now) != 1 || now[0] == 0):
			t.Errorf("session %s of the node that shuts down: %v", session, now)
		default:
			moved[now[0]]++
		}
	}
	if moved[1] == 0 || moved[2] == 0 {
		t.Errorf("moved to %v", moved)
	}
}

// C1: a call that a node refuses goes to another node at once, and so do those that come after it.
func TestC1RefusedCallsGoToAnotherNode(t *testing.T) {
	for name, c := range map[string]struct {
		reason string
		want   error // of the first
	}{
		"shutting down": {"SHUTTING_DOWN", nil},
		"backend":       {"BACKEND_UNAVAILABLE", client.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			v, nodes, addresses := visited(t, 2)
			cl := newClient(t, addresses...)
			share(t, cl, nodes...)
			v.take()
			if _, err := cl.Read(t.Context(), "x"); err != nil {
				t.Fatal(err)
			}
			home := v.take()["x"][0]
			nodes[home].serve = func(s *sharerStream, call *sessiondv1.MultiplexCall) bool {
				v.add("x", home)
				s.answer(call.GetId(), nil, failure(codes.Unavailable, c.reason))
				return true
			}
			if _, err := cl.Read(t.Context(), "x"); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			for range 3 {
				if _, err := cl.Read(t.Context(), "x"); err != nil {
					t.Error(err)
				}
			}
			asked := v.take()["x"]
			if slices.Index(asked, home) != 0 || slices.Contains(asked[1:], home) {
				t.Errorf("node %d refuses, asked were %v", home, asked)
			}
		})
	}
}

// C1: a node that keeps silent, stopped or cut off, fails the calls that it has; the next ones go to another node. One that answers
// others is not silent, however short the callers' deadlines are.
func TestC1SilentNodeIsPassedOver(t *testing.T) {
	v, nodes, addresses := visited(t, 2)
	cl := newClient(t, addresses...)
	share(t, cl, nodes...)
	v.take()
	if _, err := cl.Read(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	home := v.take()["x"][0]
	nodes[home].serve = func(*sharerStream, *sessiondv1.MultiplexCall) bool {
		v.add("x", home)
		return true
	}
	read := func(timeout time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		defer cancel()
		_, err := cl.Read(ctx, "x")
		return err
	}
	for _, timeout := range []time.Duration{10 * time.Millisecond, 1100 * time.Millisecond} {
		if err := read(timeout); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%v after %v", err, timeout)
		}
	}
	if err := read(10 * time.Second); err != nil {
		t.Fatal(err)
	}
	if asked := v.take()["x"]; !slices.Equal(asked, []int{home, home, 1 - home}) {
		t.Errorf("node %d is silent, asked were %v", home, asked)
	}
}
