package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// L9: every reason of the API comes from an error, with the code that the API says, and exactly one ErrorInfo.
func TestEveryReason(t *testing.T) {
	invalid := checkSessionID("")
	tests := []struct {
		err    error
		code   codes.Code
		reason sessiondv1.ErrorReason
		facts  string
		retry  bool
	}{
		{session.ErrNotFound, codes.NotFound, sessiondv1.ErrorReason_ERROR_REASON_SESSION_NOT_FOUND, "", false},
		{session.ErrExists, codes.AlreadyExists, sessiondv1.ErrorReason_ERROR_REASON_SESSION_EXISTS, "", false},
		{&session.TooLargeError{Limit: 1, Size: 2}, codes.ResourceExhausted, sessiondv1.ErrorReason_ERROR_REASON_SESSION_TOO_LARGE, "limit_bytes=1 size_bytes=2", false},
		{session.ErrRevisionMismatch, codes.Aborted, sessiondv1.ErrorReason_ERROR_REASON_REVISION_MISMATCH, "", false},
		{session.ErrLocked, codes.Aborted, sessiondv1.ErrorReason_ERROR_REASON_SESSION_LOCKED, "", true},
		{lock.ErrTimeout, codes.Aborted, sessiondv1.ErrorReason_ERROR_REASON_LOCK_TIMEOUT, "", true},
		{session.ErrLockLost, codes.Aborted, sessiondv1.ErrorReason_ERROR_REASON_LOCK_LOST, "", false},
		{lock.ErrNotHeld, codes.FailedPrecondition, sessiondv1.ErrorReason_ERROR_REASON_LOCK_NOT_HELD, "", false},
		{&lock.AlreadyHeldError{Token: 7}, codes.FailedPrecondition, sessiondv1.ErrorReason_ERROR_REASON_LOCK_ALREADY_HELD, "fencing_token=7", false},
		{&lock.TooManyWaitersError{Limit: 3}, codes.ResourceExhausted, sessiondv1.ErrorReason_ERROR_REASON_TOO_MANY_WAITERS, "limit=3", false},
		{&message.TooLargeError{Limit: 1, Size: 2}, codes.ResourceExhausted, sessiondv1.ErrorReason_ERROR_REASON_MESSAGE_TOO_LARGE, "limit_bytes=1 size_bytes=2", false},
		{&message.TooManyError{Limit: 4}, codes.ResourceExhausted, sessiondv1.ErrorReason_ERROR_REASON_TOO_MANY_MESSAGES, "limit=4", false},
		{&message.TooManyError{Limit: 5, Bytes: true}, codes.ResourceExhausted, sessiondv1.ErrorReason_ERROR_REASON_TOO_MANY_MESSAGES, "limit_bytes=5", false},
		{invalid, codes.InvalidArgument, sessiondv1.ErrorReason_ERROR_REASON_INVALID_ARGUMENT, "", false},
		{fmt.Errorf("%w: dial tcp 10.0.0.1", session.ErrUnavailable), codes.Unavailable, sessiondv1.ErrorReason_ERROR_REASON_BACKEND_UNAVAILABLE, "", true},
		{session.ErrDraining, codes.Unavailable, sessiondv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN, "", true},
		{errors.New("secret cause"), codes.Internal, sessiondv1.ErrorReason_ERROR_REASON_INTERNAL, "log_id=*", false},
		{fmt.Errorf("%w: session", session.ErrFormat), codes.Internal, sessiondv1.ErrorReason_ERROR_REASON_INTERNAL, "log_id=*", false},
	}
	seen := map[sessiondv1.ErrorReason]bool{sessiondv1.ErrorReason_ERROR_REASON_UNSPECIFIED: true}
	for _, tt := range tests {
		t.Run(tt.reason.String(), func(t *testing.T) {
			seen[tt.reason] = true
			var log strings.Builder
			logger := slog.New(slog.NewTextHandler(&log, nil))
			// Wrapped, as it comes out of the layers below.
			s := status.Convert(toStatus(t.Context(), logger, fmt.Errorf("layer: %w", tt.err)))
			if s.Code() != tt.code {
				t.Errorf("code: %v", s.Code())
			}
			if strings.Contains(s.Message(), "10.0.0.1") || strings.Contains(s.Message(), "secret") {
				t.Errorf("the cause is told to the caller: %q", s.Message())
			}
			infos, retries, violations := 0, 0, 0
			for _, d := range s.Details() {
				switch d := d.(type) {
				case *errdetails.ErrorInfo:
					infos++
					if d.GetDomain() != "sessiond" || "ERROR_REASON_"+d.GetReason() != tt.reason.String() {
						t.Errorf("info: %v", d)
					}
					var facts []string
					for _, key := range []string{"fencing_token", "limit", "limit_bytes", "size_bytes"} {
						if v := d.GetMetadata()[key]; v != "" {
							facts = append(facts, key+"="+v)
						}
					}
					if id := d.GetMetadata()["log_id"]; id != "" {
						facts = append(facts, "log_id=*")
						if !strings.Contains(log.String(), id) || !strings.Contains(log.String(), tt.err.Error()) {
							t.Errorf("log without id or cause: %s", log.String())
						}
					}
					if got := strings.Join(facts, " "); got != tt.facts {
						t.Errorf("facts: %q", got)
					}
				case *errdetails.RetryInfo:
					retries++
				case *errdetails.BadRequest:
					violations = len(d.GetFieldViolations())
				}
			}
			if infos != 1 || (retries == 1) != tt.retry || (violations > 0) != errors.Is(tt.err, invalid) {
				t.Errorf("%d infos, %d retries, %d violations", infos, retries, violations)
			}
		})
	}
	for n, name := range sessiondv1.ErrorReason_name {
		if !seen[sessiondv1.ErrorReason(n)] {
			t.Errorf("no error for %s", name)
		}
	}
}

func TestContextErrors(t *testing.T) {
	for err, want := range map[error]codes.Code{context.Canceled: codes.Canceled, context.DeadlineExceeded: codes.DeadlineExceeded} {
		if got := status.Code(toStatus(t.Context(), slog.New(slog.DiscardHandler), err)); got != want {
			t.Errorf("%v: %v", err, got)
		}
	}
	if toStatus(t.Context(), nil, nil) != nil {
		t.Error("an error without an error")
	}
}
