package client

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/roundrobin"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/resolver"
)

const (
	// A node that has kept silent for so long, although it was asked for something, may be gone.
	silence = time.Second
	// How long it comes after all others then.
	suspicion = 5 * time.Second
)

// balancerName is round_robin that also tells the multiplexer which node's turn it is, and which nodes there are. gRPC knows it from the
// start of the process.
var balancerName = register(balancerBuilder{})

func register(b balancer.Builder) string {
	balancer.Register(b)
	return b.Name()
}

type balancerBuilder struct{}

func (balancerBuilder) Name() string { return "sessiond_round_robin" }

func (balancerBuilder) Build(cc balancer.ClientConn, opts balancer.BuildOptions) balancer.Balancer {
	b := &sharedBalancer{nodes: map[balancer.SubConn]*sharedNode{}}
	b.Balancer = balancer.Get(roundrobin.Name).Build(&balancerConn{ClientConn: cc, balancer: b}, opts)
	return b
}

// multiplexerKey is the resolver's attribute that says which multiplexer a balancer belongs to.
type multiplexerKey struct{}

// sharedBalancer balances the plain calls of a client, and has its multiplexer take part in it.
type sharedBalancer struct {
	balancer.Balancer

	multiplexer atomic.Pointer[multiplexer]

	mu    sync.Mutex
	nodes map[balancer.SubConn]*sharedNode // that there are connections to, or may be
}

// sharedNode is a node by its address.
type sharedNode struct {
	conn balancer.SubConn
	seed uint64
	// suspect is until when others come first, in nanoseconds of Unix time.
	suspect atomic.Int64
}

// suspected says that the node has kept silent for too long, or cannot do what it is asked for.
func (n *sharedNode) suspected() {
	if n != nil {
		n.suspect.Store(time.Now().Add(suspicion).UnixNano())
	}
}

func (b *sharedBalancer) UpdateClientConnState(s balancer.ClientConnState) error {
	if m, ok := s.ResolverState.Attributes.Value(multiplexerKey{}).(*multiplexer); ok {
		b.multiplexer.Store(m)
	}
	return b.Balancer.UpdateClientConnState(s)
}

func (b *sharedBalancer) Close() {
	if m := b.multiplexer.Load(); m != nil {
		m.picker.Store(nil)
		m.change()
	}
	b.Balancer.Close()
}

// balancerConn takes the pickers on their way from round_robin to gRPC.
type balancerConn struct {
	balancer.ClientConn

	balancer *sharedBalancer
}

// NewSubConn notes the node's address.
func (c *balancerConn) NewSubConn(addresses []resolver.Address, opts balancer.NewSubConnOptions) (balancer.SubConn, error) {
	b := c.balancer
	var conn balancer.SubConn
	tell := opts.StateListener
	opts.StateListener = func(s balancer.SubConnState) {
		if s.ConnectivityState == connectivity.Shutdown {
			b.mu.Lock()
			delete(b.nodes, conn)
			b.mu.Unlock()
		}
		if tell != nil {
			tell(s)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	conn, err := c.ClientConn.NewSubConn(addresses, opts) //nolint:staticcheck // It is what round_robin calls.
	if err == nil && len(addresses) > 0 {
		b.nodes[conn] = &sharedNode{conn: conn, seed: xxhash.Sum64String(addresses[0].Addr)}
	}
	return conn, err
}

func (c *balancerConn) UpdateState(s balancer.State) {
	p := &sharedPicker{Picker: s.Picker}
	if s.ConnectivityState == connectivity.Ready {
		p.nodes = c.balancer.healthy(s.Picker)
	}
	if m := c.balancer.multiplexer.Load(); m != nil {
		m.picker.Store(p)
		m.change()
	}
	s.Picker = p
	c.ClientConn.UpdateState(s)
}

// healthy returns the nodes that a picker gives a turn to: all once, for it is new.
func (b *sharedBalancer) healthy(picker balancer.Picker) []*sharedNode {
	b.mu.Lock()
	defer b.mu.Unlock()
	var nodes []*sharedNode
	for range maxTurns {
		pick, err := picker.Pick(balancer.PickInfo{Ctx: context.Background()})
		node := b.nodes[pick.SubConn]
		if err != nil || pick.Done != nil || node == nil || slices.Contains(nodes, node) {
			break
		}
		nodes = append(nodes, node)
	}
	return nodes
}

// sharedPicker picks what round_robin does, unless the multiplexer has picked already.
type sharedPicker struct {
	balancer.Picker

	nodes []*sharedNode // that take turns
}

// preferred are the nodes in the order in which a session's calls are to go to them: by rendezvous hashing (Thaler and Ravishankar,
// 1998), so that all clients that know the nodes by the same addresses agree, and if a node comes or goes only its own sessions
// move. The first skip of them, which have failed a call already, come last, and so do those that have kept silent.
func (p *sharedPicker) preferred(session string, skip int) iter.Seq[*sharedNode] {
	return func(yield func(*sharedNode) bool) {
		if len(p.nodes) < 2 {
			return // it is the only one's turn
		}
		type ranked struct {
			*sharedNode

			weight uint64
		}
		var order [8]ranked // on the stack unless there are many
		nodes := order[:0]
		for _, n := range p.nodes {
			nodes = append(nodes, ranked{n, n.weight(session)})
		}
		slices.SortFunc(nodes, func(a, b ranked) int { return cmp.Compare(b.weight, a.weight) })
		now := time.Now().UnixNano()
		for _, suspects := range []bool{false, true} {
			for i := range nodes {
				n := nodes[(skip+i)%len(nodes)]
				if n.suspect.Load() > now == suspects && !yield(n.sharedNode) {
					return
				}
			}
		}
	}
}

// node returns the node of a connection, or nil if it does not take turns.
func (p *sharedPicker) node(conn balancer.SubConn) *sharedNode {
	i := slices.IndexFunc(p.nodes, func(n *sharedNode) bool { return n.conn == conn })
	if i < 0 {
		return nil
	}
	return p.nodes[i]
}

// weight is the greater the sooner the node comes for a session.
func (n *sharedNode) weight(session string) uint64 {
	var d xxhash.Digest
	d.ResetWithSeed(n.seed)
	_, _ = d.WriteString(session)
	return d.Sum64()
}

func (p *sharedPicker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	picked, ok := info.Ctx.Value(pickedKey{}).(*picked)
	switch {
	case !ok:
		return p.Picker.Pick(info)
	// From another picker the connection may have gone: gRPC would wait for the next one.
	case picked.from == p && picked.taken.CompareAndSwap(false, true):
		return balancer.PickResult{SubConn: picked.conn}, nil
	case !picked.only:
		return p.Picker.Pick(info)
	}
	for range maxTurns {
		if pick, err := p.Picker.Pick(info); err != nil || pick.SubConn == picked.conn {
			return pick, err
		}
	}
	return balancer.PickResult{}, errNodeGone
}

// maxTurns is how many nodes may come before one whose turn is waited for.
const maxTurns = 100

type pickedKey struct{}

// picked is a node's turn that a multiplexer has taken.
type picked struct {
	conn balancer.SubConn
	from *sharedPicker
	// only says that no other node will do.
	only  bool
	taken atomic.Bool
}

func (p *sharedPicker) with(ctx context.Context, conn balancer.SubConn, only bool) context.Context {
	return context.WithValue(ctx, pickedKey{}, &picked{conn: conn, from: p, only: only})
}
