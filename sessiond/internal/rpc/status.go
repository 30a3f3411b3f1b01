package rpc

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

const (
	errorDomain = "sessiond"
	// When a call that met a store that cannot be reached, or a node that shuts down, is worth another try.
	retryUnavailable = 500 * time.Millisecond
	retryDraining    = 50 * time.Millisecond
	retryLocked      = 100 * time.Millisecond
)

// kind is how one kind of error is told to callers.
type kind struct {
	code   codes.Code
	reason sessiondv1.ErrorReason
	retry  time.Duration // zero: not worth it
}

// kinds has the errors that carry no facts.
var kinds = []struct {
	err error
	kind
}{
	{session.ErrNotFound, kind{codes.NotFound, sessiondv1.ErrorReason_ERROR_REASON_SESSION_NOT_FOUND, 0}},
	{session.ErrExists, kind{codes.AlreadyExists, sessiondv1.ErrorReason_ERROR_REASON_SESSION_EXISTS, 0}},
	{session.ErrRevisionMismatch, kind{codes.Aborted, sessiondv1.ErrorReason_ERROR_REASON_REVISION_MISMATCH, 0}},
	{session.ErrLocked, kind{codes.Aborted, sessiondv1.ErrorReason_ERROR_REASON_SESSION_LOCKED, retryLocked}},
	{session.ErrLockLost, kind{codes.Aborted, sessiondv1.ErrorReason_ERROR_REASON_LOCK_LOST, 0}},
	{lock.ErrTimeout, kind{codes.Aborted, sessiondv1.ErrorReason_ERROR_REASON_LOCK_TIMEOUT, retryLocked}},
	{lock.ErrNotHeld, kind{codes.FailedPrecondition, sessiondv1.ErrorReason_ERROR_REASON_LOCK_NOT_HELD, 0}},
	{session.ErrUnavailable, kind{codes.Unavailable, sessiondv1.ErrorReason_ERROR_REASON_BACKEND_UNAVAILABLE, retryUnavailable}},
	{session.ErrDraining, kind{codes.Unavailable, sessiondv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN, retryDraining}},
}

// toStatus is the one place that turns errors into what callers see. What it does not know it logs, with an id that is all
// that the caller is told.
func toStatus(ctx context.Context, logger *slog.Logger, err error) error {
	if err == nil {
		return nil
	}
	for _, k := range kinds {
		if errors.Is(err, k.err) {
			// Only the kind's own text: causes speak of addresses that are not the caller's business.
			if k.code == codes.Unavailable {
				logger.DebugContext(ctx, "call met a store that is not reachable", "error", err)
			}
			return k.status(k.err.Error(), nil)
		}
	}
	if e, ok := errors.AsType[*session.TooLargeError](err); ok {
		return kind{codes.ResourceExhausted, sessiondv1.ErrorReason_ERROR_REASON_SESSION_TOO_LARGE, 0}.
			status(e.Error(), map[string]string{"limit_bytes": strconv.Itoa(e.Limit), "size_bytes": strconv.Itoa(e.Size)})
	}
	if e, ok := errors.AsType[*lock.AlreadyHeldError](err); ok {
		return kind{codes.FailedPrecondition, sessiondv1.ErrorReason_ERROR_REASON_LOCK_ALREADY_HELD, 0}.
			status(e.Error(), map[string]string{"fencing_token": strconv.FormatUint(e.Token, 10)})
	}
	if e, ok := errors.AsType[*lock.TooManyWaitersError](err); ok {
		return kind{codes.ResourceExhausted, sessiondv1.ErrorReason_ERROR_REASON_TOO_MANY_WAITERS, 0}.
			status(e.Error(), map[string]string{"limit": strconv.Itoa(e.Limit)})
	}
	if e, ok := errors.AsType[*message.TooLargeError](err); ok {
		return kind{codes.ResourceExhausted, sessiondv1.ErrorReason_ERROR_REASON_MESSAGE_TOO_LARGE, 0}.
			status(e.Error(), map[string]string{"limit_bytes": strconv.Itoa(e.Limit), "size_bytes": strconv.Itoa(e.Size)})
	}
	if e, ok := errors.AsType[*message.TooManyError](err); ok {
		limit := "limit"
		if e.Bytes {
			limit = "limit_bytes"
		}
		return kind{codes.ResourceExhausted, sessiondv1.ErrorReason_ERROR_REASON_TOO_MANY_MESSAGES, 0}.
			status(e.Error(), map[string]string{limit: strconv.Itoa(e.Limit)})
	}
	if e, ok := errors.AsType[*invalidError](err); ok {
		return kind{codes.InvalidArgument, sessiondv1.ErrorReason_ERROR_REASON_INVALID_ARGUMENT, 0}.
			status(e.Error(), nil, &errdetails.BadRequest{FieldViolations: e.violations})
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return status.FromContextError(err).Err()
	}
	if s, ok := status.FromError(err); ok {
		return s.Err() // of gRPC itself: a broken stream, say
	}
	id := rand.Text()
	logger.ErrorContext(ctx, "unexpected error", "log_id", id, "error", err)
	return kind{codes.Internal, sessiondv1.ErrorReason_ERROR_REASON_INTERNAL, 0}.
		status("internal error, see the node's log: "+id, map[string]string{"log_id": id})
}

func (k kind) status(text string, metadata map[string]string, more ...protoadapt.MessageV1) error {
	details := append([]protoadapt.MessageV1{&errdetails.ErrorInfo{
		Domain:   errorDomain,
		Reason:   strings.TrimPrefix(k.reason.String(), "ERROR_REASON_"),
		Metadata: metadata,
	}}, more...)
	if k.retry > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(k.retry)})
	}
	s := status.New(k.code, text)
	detailed, err := s.WithDetails(details...)
	if err != nil {
		return s.Err() // cannot be: the details are well-known messages
	}
	return detailed.Err()
}

// logLevel: what callers do wrong, or meet in the course of things, is theirs to log. That etcd cannot be reached is
// logged once by who finds out, not once a call.
func logLevel(code codes.Code) logging.Level {
	switch code {
	case codes.ResourceExhausted:
		return logging.LevelInfo
	case codes.Internal, codes.Unknown, codes.DataLoss:
		return logging.LevelError
	default:
		return logging.LevelDebug
	}
}

// errorLevel is the level of a call that ends with an error of gRPC, or with none.
func errorLevel(err error) logging.Level { return logLevel(status.Code(err)) }

// What gRPC itself would say of a call, for those on a shared stream.

var (
	errTooManyCalls    = status.Errorf(codes.ResourceExhausted, "more than %d unary calls at once on one stream", maxMultiplexed)
	errTooManyStreamed = status.Errorf(codes.ResourceExhausted, "more than %d calls at once on one stream that answer with a stream", maxStreamed)
)

func noMethod(name string) error {
	return status.Errorf(codes.Unimplemented, "no method %s that a shared stream carries: one that takes one request", name)
}

func decode(request []byte, into any) error {
	message, ok := into.(proto.Message)
	if !ok {
		return status.Errorf(codes.Internal, "cannot decode into %T", into)
	}
	if err := proto.Unmarshal(request, message); err != nil {
		return status.Errorf(codes.Internal, "decode request: %v", err)
	}
	return nil
}

func encode(response any) ([]byte, error) {
	message, ok := response.(proto.Message)
	if !ok {
		return nil, status.Errorf(codes.Internal, "cannot encode %T", response)
	}
	encoded, err := proto.Marshal(message)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "encode response: %v", err)
	}
	return encoded, nil
}

// encodeStatus encodes the status that gRPC would make of a handler's error.
func encodeStatus(err error) []byte {
	st, ok := status.FromError(err)
	if !ok {
		st = status.FromContextError(err)
	}
	encoded, err := proto.Marshal(st.Proto())
	if err != nil { // the text is not UTF-8
		encoded, _ = proto.Marshal(status.New(st.Code(), fmt.Sprintf("%q", st.Message())).Proto())
	}
	return encoded
}
