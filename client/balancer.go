package client

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/roundrobin"
)

// balancerName is round_robin that also tells the multiplexer which node's turn it is. gRPC knows it from the start of the process.
var balancerName = register(balancerBuilder{})

func register(b balancer.Builder) string {
	balancer.Register(b)
	return b.Name()
}

type balancerBuilder struct{}

func (balancerBuilder) Name() string { return "sessiond_round_robin" }

func (balancerBuilder) Build(cc balancer.ClientConn, opts balancer.BuildOptions) balancer.Balancer {
	b := &sharedBalancer{}
	b.Balancer = balancer.Get(roundrobin.Name).Build(&balancerConn{ClientConn: cc, balancer: b}, opts)
	return b
}

// multiplexerKey is the resolver's attribute that says which multiplexer a balancer belongs to.
type multiplexerKey struct{}

// sharedBalancer balances the plain calls of a client, and has its multiplexer take part in it.
type sharedBalancer struct {
	balancer.Balancer

	multiplexer atomic.Pointer[multiplexer]
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

func (c *balancerConn) UpdateState(s balancer.State) {
	p := &sharedPicker{Picker: s.Picker}
	if m := c.balancer.multiplexer.Load(); m != nil {
		m.picker.Store(p)
		m.change()
	}
	s.Picker = p
	c.ClientConn.UpdateState(s)
}

// sharedPicker picks what round_robin does, unless the multiplexer has picked already.
type sharedPicker struct {
	balancer.Picker
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
