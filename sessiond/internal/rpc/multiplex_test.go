package rpc

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"testing"

	"go.uber.org/goleak"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

type echo struct {
	sessiondv1.UnimplementedSessionServiceServer
}

func (echo) Touch(ctx context.Context, r *sessiondv1.TouchRequest) (*sessiondv1.TouchResponse, error) {
	if method, _ := grpc.Method(ctx); method != sessiondv1.SessionService_Touch_FullMethodName || r.GetSessionId() != "id" {
		return nil, status.Errorf(codes.Internal, "method %s, session %s", method, r.GetSessionId())
	}
	if err := grpc.SetTrailer(ctx, metadata.Pairs("a", "b")); err == nil {
		return nil, status.Error(codes.Internal, "a trailer was taken and cannot be sent")
	}
	return &sessiondv1.TouchResponse{}, nil
}

type echoes struct {
	sessiondv1.UnimplementedMessageServiceServer
}

func (echoes) Subscribe(r *sessiondv1.SubscribeRequest, stream grpc.ServerStreamingServer[sessiondv1.SubscribeResponse]) error {
	if method, _ := grpc.Method(stream.Context()); method != sessiondv1.MessageService_Subscribe_FullMethodName || r.GetSessionId() != "id" {
		return status.Errorf(codes.Internal, "method %s, session %s", method, r.GetSessionId())
	}
	if err := stream.SetHeader(metadata.Pairs("a", "b")); err == nil {
		return status.Error(codes.Internal, "a header was taken and cannot be sent")
	}
	if err := stream.RecvMsg(r); !errors.Is(err, io.EOF) {
		return status.Errorf(codes.Internal, "after the request: %v", err)
	}
	return nil
}

// Calls on a shared stream pass the interceptors of their kind, in the same order, each with its own metadata on top of the stream's;
// one that an interceptor refuses does not reach its method, and leaves the others alone.
func TestSharedCallsPassInterceptors(t *testing.T) {
	defer goleak.VerifyNone(t)
	var order []string
	outer := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		order = append(order, info.FullMethod)
		return next(ctx, req)
	}
	admit := func(ctx context.Context) error {
		order = append(order, "auth")
		md, _ := metadata.FromIncomingContext(ctx)
		if !slices.Equal(md.Get("authorization"), []string{"right"}) || !slices.Equal(md.Get("tenant"), []string{"of the stream"}) {
			return status.Error(codes.Unauthenticated, "who are you")
		}
		return nil
	}
	auth := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if err := admit(ctx); err != nil {
			return nil, err
		}
		return next(ctx, req)
	}
	outerStream := func(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if info.IsClientStream || !info.IsServerStream {
			t.Errorf("%+v", info)
		}
		order = append(order, info.FullMethod)
		return next(service, stream)
	}
	authStream := func(service any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if err := admit(stream.Context()); err != nil {
			return err
		}
		return next(service, stream)
	}
	m := &multiplexService{
		methods: map[string]multiplexMethod{}, workers: newWorkers(1), intercept: chain([]grpc.UnaryServerInterceptor{outer, auth}),
		interceptStream: chainStream([]grpc.StreamServerInterceptor{outerStream, authStream}),
	}
	defer m.workers.stop()
	sessiondv1.RegisterSessionServiceServer(m, echo{})
	sessiondv1.RegisterMessageServiceServer(m, echoes{})
	srv := grpc.NewServer()
	sessiondv1.RegisterMultiplexServiceServer(srv, m)
	l := bufconn.Listen(1 << 20)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	defer func() {
		srv.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "none", "tenant", "of the stream")
	stream, err := sessiondv1.NewMultiplexServiceClient(conn).Multiplex(ctx)
	if err != nil {
		t.Fatal(err)
	}
	id := uint64(0)
	for _, method := range []string{sessiondv1.SessionService_Touch_FullMethodName, sessiondv1.MessageService_Subscribe_FullMethodName} {
		for _, token := range []string{"right", "wrong", ""} {
			id++
			// Both kinds of requests have the session's id first.
			call := &sessiondv1.MultiplexCall{Id: id, Method: method, Request: append([]byte{1<<3 | 2, 2}, "id"...)}
			if token != "" {
				call.Metadata = []*sessiondv1.MultiplexMetadata{{Key: "authorization", Value: []byte(token)}}
			}
			order = nil
			if err := stream.Send(&sessiondv1.MultiplexRequest{Calls: []*sessiondv1.MultiplexCall{call}}); err != nil {
				t.Fatal(err)
			}
			var answers []*sessiondv1.MultiplexAnswer
			for len(answers) == 0 {
				r, err := stream.Recv()
				if err != nil {
					t.Fatal(err)
				}
				answers = r.GetAnswers()
			}
			var st spb.Status
			if err := proto.Unmarshal(answers[0].GetStatus(), &st); err != nil {
				t.Fatal(err)
			}
			want := codes.OK
			if token != "right" {
				want = codes.Unauthenticated
			}
			if codes.Code(st.GetCode()) != want || len(answers) != 1 || answers[0].GetContinues() || answers[0].GetId() != id {
				t.Errorf("%s with token %q: %v, %v", method, token, answers, &st)
			}
			if !slices.Equal(order, []string{method, "auth"}) {
				t.Errorf("interceptors ran as %v", order)
			}
		}
	}
}
