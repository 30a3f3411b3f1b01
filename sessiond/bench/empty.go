//go:build unix

package main

import (
	"context"
	"errors"
	"flag"
	"net"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// childEmpty is this program as a gRPC server that does nothing.
const childEmpty = "serve-empty"

const emptyMethod = "/sessiond.bench.Empty/Call"

// serveEmpty is that server.
func serveEmpty(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet(childEmpty, flag.ContinueOnError)
	listen := flags.String("listen", "", "`host:port`")
	if err := flags.Parse(args); err != nil {
		return err
	}
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: "sessiond.bench.Empty",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{
			MethodName: "Call",
			Handler: func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
				in := &emptypb.Empty{}
				if err := decode(in); err != nil {
					return nil, err
				}
				return in, nil
			},
		}},
	}, nil)
	grpc_health_v1.RegisterHealthServer(s, health.NewServer())
	stop := context.AfterFunc(ctx, s.Stop)
	defer stop()
	if err := s.Serve(l); !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

func (b *bench) startEmpty(ctx context.Context) ([]*contestant, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	addrs, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		return nil, err
	}
	p, err := b.launch(ctx, sessiondtest.Command{
		Name: "empty", Path: self, Args: []string{childEmpty, "--listen", addrs[0]}, Ready: sessiondtest.GRPCReady(addrs[0]),
	})
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient(addrs[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	call := func(ctx context.Context, _, _ int) error {
		return conn.Invoke(ctx, emptyMethod, &emptypb.Empty{}, &emptypb.Empty{})
	}
	return []*contestant{{
		name:  nameEmpty,
		meter: meter{processes: []*sessiondtest.Process{p}},
		cycle: func(ctx context.Context, caller, session int, _ func()) error { return call(ctx, caller, session) },
		read:  call,
		clean: conn.Close,
	}}, nil
}
