package client

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// unsentError is the error of a call that no node has seen, for it was given to no connection. So it may be made again, whatever it does.
type unsentError struct{ error }

func (e *unsentError) Unwrap() error              { return e.error }
func (e *unsentError) GRPCStatus() *status.Status { return status.Convert(e.error) }

func unsent(err error) bool {
	_, ok := errors.AsType[*unsentError](err)
	return ok
}

// markUnsent is the innermost interceptor of calls that gRPC carries.
func markUnsent(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var to peer.Peer // is set when a call has been given to a connection
	err := invoke(ctx, method, req, reply, cc, append(slices.Clip(opts), grpc.Peer(&to))...)
	if err != nil && to.Addr == nil {
		return &unsentError{err}
	}
	return err
}
