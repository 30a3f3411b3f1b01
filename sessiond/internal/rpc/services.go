package rpc

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

type sessionService struct {
	sessiondv1.UnimplementedSessionServiceServer
	rules *session.Service
}

func (s *sessionService) Create(ctx context.Context, r *sessiondv1.CreateRequest) (*sessiondv1.CreateResponse, error) {
	ttl, err := checkCreate(r)
	if err != nil {
		return nil, err
	}
	created, err := s.rules.Create(ctx, r.GetSessionId(), r.GetData(), ttl)
	if err != nil {
		return nil, err
	}
	return &sessiondv1.CreateResponse{Session: toSession(&created)}, nil
}

func (s *sessionService) Read(ctx context.Context, r *sessiondv1.ReadRequest) (*sessiondv1.ReadResponse, error) {
	if err := checkSessionID(r.GetSessionId()); err != nil {
		return nil, err
	}
	found, position, err := s.rules.Read(ctx, r.GetSessionId())
	if err != nil {
		return nil, err
	}
	return &sessiondv1.ReadResponse{Session: toSession(&found), Position: position}, nil
}

func (s *sessionService) Save(ctx context.Context, r *sessiondv1.SaveRequest) (*sessiondv1.SaveResponse, error) {
	save, err := checkSave(r)
	if err != nil {
		return nil, err
	}
	revision, err := s.rules.Save(ctx, save)
	if err != nil {
		return nil, err
	}
	return &sessiondv1.SaveResponse{Revision: revision}, nil
}

func (s *sessionService) Touch(ctx context.Context, r *sessiondv1.TouchRequest) (*sessiondv1.TouchResponse, error) {
	if err := checkSessionID(r.GetSessionId()); err != nil {
		return nil, err
	}
	remaining, err := s.rules.Touch(ctx, r.GetSessionId())
	if err != nil {
		return nil, err
	}
	return &sessiondv1.TouchResponse{TtlRemaining: durationpb.New(remaining)}, nil
}

func (s *sessionService) Destroy(ctx context.Context, r *sessiondv1.DestroyRequest) (*sessiondv1.DestroyResponse, error) {
	if err := checkSessionID(r.GetSessionId()); err != nil {
		return nil, err
	}
	destroyed, err := s.rules.Destroy(ctx, r.GetSessionId())
	if err != nil {
		return nil, err
	}
	return &sessiondv1.DestroyResponse{Destroyed: destroyed}, nil
}

type lockService struct {
	sessiondv1.UnimplementedLockServiceServer
	rules     *lock.Service
	frontEnds *lock.FrontEnds // nil: the store does not know any
	pingEvery time.Duration   // of front-ends that attach here
}

func (s *lockService) Acquire(ctx context.Context, r *sessiondv1.AcquireRequest) (*sessiondv1.AcquireResponse, error) {
	received := time.Now()
	req, err := checkAcquire(r)
	if err != nil {
		return nil, err
	}
	grant, err := s.rules.Acquire(ctx, req)
	if err != nil {
		return nil, err
	}
	return &sessiondv1.AcquireResponse{Grant: toGrant(grant, received), Session: toSession(grant.Data), Position: grant.Position}, nil
}

func (s *lockService) TryAcquire(ctx context.Context, r *sessiondv1.TryAcquireRequest) (*sessiondv1.TryAcquireResponse, error) {
	received := time.Now()
	req, err := checkTryAcquire(r)
	if err != nil {
		return nil, err
	}
	grant, holder, err := s.rules.TryAcquire(ctx, req)
	if err != nil {
		return nil, err
	}
	if holder != "" {
		return &sessiondv1.TryAcquireResponse{Holder: holder}, nil
	}
	return &sessiondv1.TryAcquireResponse{
		Acquired: true,
		Grant:    toGrant(grant, received),
		Session:  toSession(grant.Data),
		Position: grant.Position,
	}, nil
}

func (s *lockService) Release(ctx context.Context, r *sessiondv1.ReleaseRequest) (*sessiondv1.ReleaseResponse, error) {
	if err := checkRelease(r); err != nil {
		return nil, err
	}
	if err := s.rules.Release(ctx, r.GetSessionId(), r.GetRequestId(), r.GetFencingToken()); err != nil {
		return nil, err
	}
	return &sessiondv1.ReleaseResponse{}, nil
}

// Attach reads the stream beside the rules, and hands on what is said.
func (s *lockService) Attach(stream grpc.BidiStreamingServer[sessiondv1.AttachRequest, sessiondv1.AttachResponse]) error {
	if s.frontEnds == nil {
		return s.UnimplementedLockServiceServer.Attach(stream)
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	hello, err := checkHello(first)
	if err != nil {
		return err
	}
	// The reader ends when this function has returned, for that ends the stream.
	ctx, fail := context.WithCancelCause(stream.Context())
	defer fail(nil)
	said := make(chan lock.Said)
	go func() {
		defer close(said)
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			next, err := checkSaid(r)
			if err != nil {
				fail(err)
				return
			}
			select {
			case said <- next:
			case <-ctx.Done():
				return
			}
		}
	}()
	return s.frontEnds.Attach(ctx, hello.GetFrontEnd(), hello.GetNumber(), s.pingEvery, said, func(t lock.Told) error {
		return stream.Send(s.toAttachResponse(t))
	})
}

func (s *lockService) toAttachResponse(t lock.Told) *sessiondv1.AttachResponse {
	switch {
	case t.Attached:
		return &sessiondv1.AttachResponse{Message: &sessiondv1.AttachResponse_Attached{Attached: &sessiondv1.AttachAttached{
			Grace: durationpb.New(s.frontEnds.Grace()), PingInterval: durationpb.New(s.pingEvery),
		}}}
	case t.Ask:
		return &sessiondv1.AttachResponse{Message: &sessiondv1.AttachResponse_Ask{Ask: &sessiondv1.AttachAsk{Position: t.Position}}}
	default:
		return &sessiondv1.AttachResponse{Message: &sessiondv1.AttachResponse_Ping{Ping: &sessiondv1.AttachPing{}}}
	}
}

type messageService struct {
	sessiondv1.UnimplementedMessageServiceServer
	rules *message.Service
}

func (s *messageService) Publish(ctx context.Context, r *sessiondv1.PublishRequest) (*sessiondv1.PublishResponse, error) {
	publish, err := checkPublish(r)
	if err != nil {
		return nil, err
	}
	position, err := s.rules.Publish(ctx, publish)
	if err != nil {
		return nil, err
	}
	return &sessiondv1.PublishResponse{Position: position}, nil
}

func (s *messageService) Subscribe(r *sessiondv1.SubscribeRequest, stream grpc.ServerStreamingServer[sessiondv1.SubscribeResponse]) error {
	if err := checkSubscribe(r); err != nil {
		return err
	}
	return s.rules.Subscribe(stream.Context(), r.GetSessionId(), r.GetStreams(), r.GetAfterPosition(), func(b message.Batch) error {
		resp := &sessiondv1.SubscribeResponse{Position: b.Position}
		for _, m := range b.Messages {
			resp.Messages = append(resp.Messages, &sessiondv1.Message{Stream: m.Stream, Position: m.Position, Payload: m.Payload})
		}
		return stream.Send(resp)
	})
}

func (s *messageService) Trim(ctx context.Context, r *sessiondv1.TrimRequest) (*sessiondv1.TrimResponse, error) {
	if err := checkTrim(r); err != nil {
		return nil, err
	}
	removed, err := s.rules.Trim(ctx, r.GetSessionId(), r.GetStream(), r.GetThroughPosition(), int(r.GetKeep()))
	if err != nil {
		return nil, err
	}
	return &sessiondv1.TrimResponse{Removed: uint32(removed)}, nil
}

func (s *messageService) Retain(ctx context.Context, r *sessiondv1.RetainRequest) (*sessiondv1.RetainResponse, error) {
	ttl, err := checkRetain(r)
	if err != nil {
		return nil, err
	}
	if err := s.rules.Retain(ctx, r.GetSessionId(), r.GetStream(), ttl); err != nil {
		return nil, err
	}
	return &sessiondv1.RetainResponse{}, nil
}

func toSession(s *session.Session) *sessiondv1.Session {
	if s == nil {
		return nil
	}
	return &sessiondv1.Session{
		Id:           s.ID,
		Data:         s.Data,
		Revision:     s.Revision,
		Ttl:          durationpb.New(s.TTL),
		TtlRemaining: durationpb.New(s.Remaining),
	}
}

// toGrant tells what is left of the TTL and how long the request was here as of one moment: the caller adds them up, and were the
// process stopped in between, it would count on time that has passed. A TTL that ended before the answer ends that time as well.
func toGrant(g lock.Grant, received time.Time) *sessiondv1.Grant {
	now := time.Now()
	left := g.Until.Sub(now)
	waited := now.Sub(received) + min(left, 0)
	return &sessiondv1.Grant{
		SessionId:    g.Session,
		RequestId:    g.Request,
		FencingToken: g.Token,
		Ttl:          durationpb.New(max(left, 0)),
		Waited:       durationpb.New(max(waited, 0)),
	}
}
