package rpc

import (
	"context"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/stats"
)

// maxOften is how many connections are pinged, and the front-ends attached by them given a sign of life, every second. Either costs the
// node 75 to 80 µs of processor time.
const maxOften = 1000

// openConns counts the open connections of a gRPC server. That is the one way to know: gRPC treats what is no *net.TCPConn as
// something else, so a connection cannot be wrapped.
type openConns struct {
	most int64
	n    atomic.Int64
}

// many says whether there are as many as there may be. It lags behind by those that were accepted a moment ago.
func (o *openConns) many() bool { return o.n.Load() >= o.most }

// HandleConn implements stats.Handler.
func (o *openConns) HandleConn(_ context.Context, s stats.ConnStats) {
	switch s.(type) {
	case *stats.ConnBegin:
		o.n.Add(1)
	case *stats.ConnEnd:
		o.n.Add(-1)
	}
}

// TagConn implements stats.Handler.
func (o *openConns) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// TagRPC implements stats.Handler.
func (o *openConns) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (o *openConns) HandleRPC(context.Context, stats.RPCStats) {}

// split makes two listeners of one. A connection that is accepted while there are many goes to the second one. The first one is
// to be accepted from, and closed, as the listener itself would be.
func split(l net.Listener, many func() bool) (first, second net.Listener) {
	others := &otherConns{Listener: l, conns: make(chan net.Conn), closed: make(chan struct{})}
	return &firstConns{Listener: l, many: many, others: others}, others
}

type firstConns struct {
	net.Listener

	many   func() bool
	others *otherConns
}

func (f *firstConns) Accept() (net.Conn, error) {
	for {
		conn, err := f.Listener.Accept()
		if err != nil || !f.many() {
			return conn, err
		}
		select {
		case f.others.conns <- conn:
		case <-f.others.closed:
			_ = conn.Close()
			return nil, net.ErrClosed
		}
	}
}

// otherConns has the listener for its address alone.
type otherConns struct {
	net.Listener

	conns  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (o *otherConns) Accept() (net.Conn, error) {
	select {
	case conn := <-o.conns:
		return conn, nil
	case <-o.closed:
		return nil, net.ErrClosed
	}
}

func (o *otherConns) Close() error {
	o.once.Do(func() { close(o.closed) })
	return nil
}
