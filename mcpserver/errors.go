package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"

	"github.com/sessiond/sessiond/client"
)

// The errors that handlers meet, to be told apart with errors.Is.
var (
	// ErrNoSession: the request belongs to no session: the handler was built without a [Store], or the request is one of
	// the modern era, or the context is not a request's. Values need a session, and so does asking the client.
	ErrNoSession = errors.New("no session: asking the client and session values need one")
	// ErrNoStream: the client cannot be asked, since there is no stream to carry the question: the request is a
	// notification, or accepts JSON alone, and the client has no standalone stream open.
	ErrNoStream = errors.New("no stream to ask the client on")
	// ErrNoCapability: the client did not declare the capability that the question needs.
	ErrNoCapability = errors.New("the client did not declare the capability")
	// ErrAskTimeout: the client did not answer in time ([Options].AskTimeout).
	ErrAskTimeout = errors.New("the client did not answer in time")
	// ErrLockNotRegained: the client answered, but the session's lock, released for the wait, could not be had again. The
	// cause is wrapped.
	ErrLockNotRegained = errors.New("the session's lock was not regained after the client's answer")
	// ErrLockExpires is the cause of a handler's cancelled context when its lock's TTL is nearly over.
	ErrLockExpires = errors.New("the session's lock is about to expire")
	// ErrSessionEnded is the cause of a handler's cancelled context when its session was deleted or expired.
	ErrSessionEnded = errors.New("the session has ended")
	// ErrCancelled is the cause of a handler's cancelled context when the client cancelled the request.
	ErrCancelled = errors.New("the client cancelled the request")
	// ErrRequestOver: a session value was changed after the request's answer was saved.
	ErrRequestOver = errors.New("the request is over, its session values can no longer be changed")
)

// errRecord: a stored session that this version cannot read. It is a failing backend (S9), not a missing session.
var errRecord = errors.New("session record cannot be read")

// codeServerError is the JSON-RPC code of refusals that are the server's own.
const codeServerError = -32000

// refusal is an answer to a whole HTTP request other than a result.
type refusal struct {
	status     int
	code       int64
	message    string
	retryAfter int    // seconds; 0: not said
	allow      string // for 405
	log        slog.Level
	cause      error
}

func (f *refusal) Error() string { return f.message }
func (f *refusal) Unwrap() error { return f.cause }

func refuse(status int, code int64, format string, args ...any) *refusal {
	return &refusal{status: status, code: code, message: fmt.Sprintf(format, args...), log: slog.LevelDebug}
}

func errBadRequest(format string, args ...any) *refusal {
	return refuse(http.StatusBadRequest, jsonrpc.CodeInvalidRequest, format, args...)
}

func errParse(err error) *refusal {
	return refuse(http.StatusBadRequest, jsonrpc.CodeParseError, "the body is not a JSON-RPC 2.0 message: %v", err)
}

func errForbidden(format string, args ...any) *refusal {
	return refuse(http.StatusForbidden, jsonrpc.CodeInvalidRequest, format, args...)
}

func errContentType() *refusal {
	return refuse(http.StatusUnsupportedMediaType, jsonrpc.CodeInvalidRequest, "Content-Type must be application/json")
}

func errAccept(want string) *refusal {
	return refuse(http.StatusNotAcceptable, jsonrpc.CodeInvalidRequest, "Accept must allow %s", want)
}

func errBodyTooLarge(limit int64) *refusal {
	return refuse(http.StatusRequestEntityTooLarge, jsonrpc.CodeInvalidRequest, "the body is over the limit of %d bytes", limit)
}

func errMethod(allow string) *refusal {
	f := refuse(http.StatusMethodNotAllowed, jsonrpc.CodeInvalidRequest, "method not allowed, use %s", allow)
	f.allow = allow
	return f
}

func errSessionNotFound() *refusal {
	return refuse(http.StatusNotFound, codeServerError, "session not found")
}

func errHandlerLost() *refusal {
	return refuse(http.StatusOK, codeServerError, "the request's handler was lost with the server that ran it; whether it had any effect is unknown")
}

func errDraining() *refusal {
	f := refuse(http.StatusServiceUnavailable, codeServerError, "this server is shutting down, try again")
	f.retryAfter = 1
	return f
}

// refusalOf is the one place that maps errors of the store and the lock to HTTP.
func refusalOf(err error) *refusal {
	var f *refusal
	switch {
	case errors.As(err, &f):
		return f
	case errors.Is(err, client.ErrSessionNotFound), errors.Is(err, ErrSessionEnded):
		f = errSessionNotFound()
	case errors.Is(err, client.ErrLockTimeout):
		f = refuse(http.StatusServiceUnavailable, codeServerError, "another request of this session is still being processed, try again")
		f.retryAfter, f.log = 1, slog.LevelWarn
	case errors.Is(err, client.ErrTooManyWaiters):
		f = refuse(http.StatusServiceUnavailable, codeServerError, "too many requests of this session wait to be processed, try again")
		f.retryAfter, f.log = 1, slog.LevelWarn
	case errors.Is(err, client.ErrSessionLocked):
		f = refuse(http.StatusServiceUnavailable, codeServerError, "the session is locked by another request, try again")
		f.retryAfter, f.log = 1, slog.LevelWarn
	case errors.Is(err, client.ErrTooManyMessages):
		f = refuse(http.StatusServiceUnavailable, codeServerError, "too many undelivered messages of this session, try again")
		f.retryAfter, f.log = 1, slog.LevelWarn
	case errors.Is(err, client.ErrSessionTooLarge), errors.Is(err, client.ErrMessageTooLarge):
		f = refuse(http.StatusRequestEntityTooLarge, codeServerError, "%v", err)
	case errors.Is(err, client.ErrLockLost):
		f = refuse(http.StatusOK, codeServerError, "the session's lock was lost while the request was processed, its changes were not saved")
		f.log = slog.LevelWarn
	default:
		f = refuse(http.StatusServiceUnavailable, codeServerError, "the session store is unavailable, try again")
		f.retryAfter, f.log = 1, slog.LevelError
		if errors.Is(err, context.Canceled) {
			f.log = slog.LevelDebug // the client left, or the server stops: not the store's fault
		}
	}
	f.cause = err
	return f
}

// rpcError is the refusal as a JSON-RPC error object.
func (f *refusal) rpcError() *jsonrpc.Error { return &jsonrpc.Error{Code: f.code, Message: f.message} }

// write answers the HTTP request. ids are those of the request's calls: the error goes out under each of them, and
// under none if there is none (F7).
func (f *refusal) write(w http.ResponseWriter, ids []json.RawMessage, batch bool) {
	if f.allow != "" {
		w.Header().Set("Allow", f.allow)
	}
	if f.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(f.retryAfter))
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(f.status)
	_, _ = w.Write(errorBody(f.rpcError(), ids, batch))
}

func errorBody(rpcError *jsonrpc.Error, ids []json.RawMessage, batch bool) []byte {
	if len(ids) == 0 {
		return encodeResponse(nil, nil, rpcError)
	}
	bodies := make([][]byte, len(ids))
	for i, id := range ids {
		bodies[i] = encodeResponse(id, nil, rpcError)
	}
	if batch {
		return joinArray(bodies)
	}
	return bodies[0]
}

// report logs a refusal once, with its cause, at the level that fits its kind.
func (f *refusal) report(ctx context.Context, logger *slog.Logger, r *http.Request) {
	attrs := []slog.Attr{slog.String("http_method", r.Method), slog.Int("status", f.status), slog.String("reason", f.message)}
	if f.cause != nil {
		attrs = append(attrs, slog.Any("error", f.cause))
	}
	logger.LogAttrs(ctx, f.log, "request refused", attrs...)
}

// The statuses of answers that are no refusals.
const (
	statusOK        = http.StatusOK
	statusAccepted  = http.StatusAccepted
	statusNoContent = http.StatusNoContent
)
