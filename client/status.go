package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

// errorDomain is the domain of the ErrorInfo in every status that a node makes itself.
const errorDomain = "sessiond"

// The kinds of errors, to be told apart with errors.Is. The errors that methods return are of type [*Error] and carry
// the node's message and facts.
var (
	// ErrSessionNotFound: the session is missing, expired or destroyed; never a store that cannot be reached.
	ErrSessionNotFound = errors.New("no such session")
	// ErrSessionExists: Create was given an id in use.
	ErrSessionExists = errors.New("session exists")
	// ErrSessionTooLarge: the data is over the size limit, which the message names; what was stored stays.
	ErrSessionTooLarge = errors.New("session too large")
	// ErrRevisionMismatch: the session was written since the expected revision.
	ErrRevisionMismatch = errors.New("session was written since")
	// ErrSessionLocked: a save without a grant while the lock is held.
	ErrSessionLocked = errors.New("session is locked by another")
	// ErrLockTimeout: the lock was not had within the timeout.
	ErrLockTimeout = errors.New("lock not had in time")
	// ErrLockLost: the grant ended before the save.
	ErrLockLost = errors.New("lock lost")
	// ErrLockNotHeld: a release of what is not held.
	ErrLockNotHeld = errors.New("lock not held")
	// ErrLockAlreadyHeld: the holder holds this lock already.
	ErrLockAlreadyHeld = errors.New("lock already held by this holder")
	// ErrTooManyWaiters: the lock's queue is full.
	ErrTooManyWaiters = errors.New("too many waiters")
	// ErrMessageTooLarge: the message is over the size limit.
	ErrMessageTooLarge = errors.New("message too large")
	// ErrTooManyMessages: the session has too many stored messages.
	ErrTooManyMessages = errors.New("too many stored messages")
	// ErrInvalidArgument: the request is out of the limits that the message names. Nothing was done.
	ErrInvalidArgument = errors.New("invalid argument")
	// ErrUnavailable: no node, or no etcd behind it, can be reached. Nothing is known about the session.
	ErrUnavailable = errors.New("sessiond unavailable")
	// ErrInternal: something unexpected in the node, described in its log.
	ErrInternal = errors.New("internal error")

	// ErrOutcomeUnknown comes on top of the cause when a write was cut off after it was sent: it may have been
	// carried out, or may still be.
	ErrOutcomeUnknown = errors.New("outcome unknown")
)

// sentinels maps each reason to its error. What is not here is [ErrInternal].
var sentinels = map[sessiondv1.ErrorReason]error{
	sessiondv1.ErrorReason_ERROR_REASON_SESSION_NOT_FOUND:   ErrSessionNotFound,
	sessiondv1.ErrorReason_ERROR_REASON_SESSION_EXISTS:      ErrSessionExists,
	sessiondv1.ErrorReason_ERROR_REASON_SESSION_TOO_LARGE:   ErrSessionTooLarge,
	sessiondv1.ErrorReason_ERROR_REASON_REVISION_MISMATCH:   ErrRevisionMismatch,
	sessiondv1.ErrorReason_ERROR_REASON_SESSION_LOCKED:      ErrSessionLocked,
	sessiondv1.ErrorReason_ERROR_REASON_LOCK_TIMEOUT:        ErrLockTimeout,
	sessiondv1.ErrorReason_ERROR_REASON_LOCK_LOST:           ErrLockLost,
	sessiondv1.ErrorReason_ERROR_REASON_LOCK_NOT_HELD:       ErrLockNotHeld,
	sessiondv1.ErrorReason_ERROR_REASON_LOCK_ALREADY_HELD:   ErrLockAlreadyHeld,
	sessiondv1.ErrorReason_ERROR_REASON_TOO_MANY_WAITERS:    ErrTooManyWaiters,
	sessiondv1.ErrorReason_ERROR_REASON_MESSAGE_TOO_LARGE:   ErrMessageTooLarge,
	sessiondv1.ErrorReason_ERROR_REASON_TOO_MANY_MESSAGES:   ErrTooManyMessages,
	sessiondv1.ErrorReason_ERROR_REASON_INVALID_ARGUMENT:    ErrInvalidArgument,
	sessiondv1.ErrorReason_ERROR_REASON_BACKEND_UNAVAILABLE: ErrUnavailable,
	sessiondv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN:       ErrUnavailable,
	sessiondv1.ErrorReason_ERROR_REASON_INTERNAL:            ErrInternal,
}

// reasonPrefix is what ErrorInfo.reason leaves out of the enum's names.
const reasonPrefix = "ERROR_REASON_"

// Error is an error that a node reported.
type Error struct {
	// Op is what was tried: "save session".
	Op string
	// Reason is the kind, for machines; unspecified if no node made the error (the connection broke).
	Reason sessiondv1.ErrorReason
	// Message is the node's, for people.
	Message string
	// Metadata are the facts that go with the reason: see the proto's ErrorReason.
	Metadata map[string]string
	// RetryAfter tells when a retry may help; 0 if the node did not say.
	RetryAfter time.Duration

	kind   error
	unsent bool
}

// Error returns what was tried and why it failed.
func (e *Error) Error() string { return e.Op + ": " + e.Message }

// Unwrap returns the kind: one of this package's Err variables, or the context's error.
func (e *Error) Unwrap() error { return e.kind }

type unknownOutcomeError struct{ cause error }

func (e *unknownOutcomeError) Error() string {
	return fmt.Sprintf("%v (%v)", e.cause, ErrOutcomeUnknown)
}
func (e *unknownOutcomeError) Unwrap() []error { return []error{ErrOutcomeUnknown, e.cause} }

// fromStatus is the one place that maps a gRPC status to an error of this package.
func fromStatus(op string, err error) error {
	st := status.Convert(err)
	e := &Error{Op: op, Message: st.Message(), unsent: unsent(err)}
	for _, detail := range st.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() == errorDomain {
				e.Reason = sessiondv1.ErrorReason(sessiondv1.ErrorReason_value[reasonPrefix+d.GetReason()])
				e.Metadata = d.GetMetadata()
			}
		case *errdetails.RetryInfo:
			e.RetryAfter = d.GetRetryDelay().AsDuration()
		}
	}
	e.kind = kindOf(st.Code(), e.Reason)
	return e
}

func kindOf(code codes.Code, reason sessiondv1.ErrorReason) error {
	if kind, ok := sentinels[reason]; ok {
		return kind
	}
	switch code {
	case codes.Canceled:
		return context.Canceled
	case codes.DeadlineExceeded:
		// A node answers within its own limits, so one that did not is out of reach as far as the caller can tell.
		return errTimedOut
	case codes.Unavailable:
		return ErrUnavailable
	case codes.InvalidArgument:
		return ErrInvalidArgument
	default:
		return ErrInternal
	}
}

// errTimedOut is an unavailable service and the end of a deadline at once.
var errTimedOut = &timedOutError{}

type timedOutError struct{}

func (*timedOutError) Error() string   { return "no answer in time" }
func (*timedOutError) Unwrap() []error { return []error{ErrUnavailable, context.DeadlineExceeded} }

// refusedUnseen tells that no node has even begun with a call, and that another may.
func refusedUnseen(err error) bool {
	e, ok := errors.AsType[*Error](fromStatus("", err))
	return ok && (e.Reason == sessiondv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN || e.unsent && e.retriable())
}

// unsentError is the error of a call that no node has seen, for it was given to no connection. So it may be made again, whatever it does.
type unsentError struct{ error }

func (e *unsentError) Unwrap() error              { return e.error }
func (e *unsentError) GRPCStatus() *status.Status { return status.Convert(e.error) }

func unsent(err error) bool {
	_, ok := errors.AsType[*unsentError](err)
	return ok
}

// isUnavailable tells that a node shuts down, or cannot reach its backend.
func isUnavailable(err error) bool { return status.Code(err) == codes.Unavailable }

// retriable is [Error.retriable] for a status.
func retriable(err error) bool {
	e, ok := errors.AsType[*Error](fromStatus("", err))
	return ok && e.retriable()
}

// retriable tells what another node may do better: a call that met no node, or one that shuts down. A node that cannot
// reach its backend has said so after trying, and must be heard at once.
func (e *Error) retriable() bool {
	return !errors.Is(e.kind, context.DeadlineExceeded) && errors.Is(e.kind, ErrUnavailable) &&
		e.Reason != sessiondv1.ErrorReason_ERROR_REASON_BACKEND_UNAVAILABLE
}

// What becomes of calls on a shared stream without a status from the node: the same as of unary calls.
var (
	errNodeGone       = status.Error(codes.Unavailable, "the connection to the node is gone")
	errBrokenOff      = status.Error(codes.Unavailable, "the connection to the node broke before the answer")
	errAnswerTooLarge = status.Errorf(codes.ResourceExhausted, "the answer is larger than %d bytes", maxMessageBytes)
)

func errNotProto(m any) error { return status.Errorf(codes.Internal, "%T is no protobuf message", m) }

// contextStatus is the status of a call whose context has ended.
func contextStatus(ctx context.Context) error { return status.FromContextError(ctx.Err()).Err() }

// decodeStatus decodes the status of a call that failed.
func decodeStatus(encoded []byte) error {
	var st spb.Status
	if err := proto.Unmarshal(encoded, &st); err != nil {
		return status.Errorf(codes.Internal, "decode status: %v", err)
	}
	return status.ErrorProto(&st)
}

// decodeAnswer decodes the answer to a call that did not.
func decodeAnswer(encoded []byte, out proto.Message) error {
	if err := proto.Unmarshal(encoded, out); err != nil {
		return status.Errorf(codes.Internal, "decode response: %v", err)
	}
	return nil
}

// isUnknownMethod tells that a node does not know a method: it is older than this client.
func isUnknownMethod(err error) bool { return status.Code(err) == codes.Unimplemented }
