package client

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
)

// markUnsent is the innermost interceptor of calls that gRPC carries.
func markUnsent(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var to peer.Peer // is set when a call has been given to a connection
	err := invoke(ctx, method, req, reply, cc, append(slices.Clip(opts), grpc.Peer(&to))...)
	if err != nil && to.Addr == nil {
		return &unsentError{err}
	}
	return err
}
