package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/sessiond/sessiond/client"
	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

// A Kind is what a client did.
type Kind string

// The kinds of operations on a session.
const (
	Create     Kind = "create"
	Read       Kind = "read"
	Save       Kind = "save"
	Touch      Kind = "touch"
	Destroy    Kind = "destroy"
	Acquire    Kind = "acquire"
	TryAcquire Kind = "tryAcquire"
	Release    Kind = "release"
)

// An Outcome is what came of an operation.
type Outcome string

// What can come of an operation.
const (
	OK          Outcome = "ok"
	NotFound    Outcome = "not found"
	Exists      Outcome = "exists"
	Mismatch    Outcome = "revision mismatch"
	Locked      Outcome = "locked"
	LockLost    Outcome = "lock lost"
	TimedOut    Outcome = "lock timeout"
	NotHeld     Outcome = "not held"
	AlreadyHeld Outcome = "already held"
	Busy        Outcome = "busy"
	// Unknown is a write that may have happened, or may still, or anything that brought no answer.
	Unknown Outcome = "unknown"
	// Refused is a call that certainly did nothing: no node took it.
	Refused Outcome = "refused"
	// Unexpected is what no client may ever see. It fails the run.
	Unexpected Outcome = "unexpected"
)

// An Op is an operation as its client saw it. Times are in nanoseconds since the run began, on the clock of the one process that all
// clients run in.
type Op struct {
	Session string  `json:"session"`
	Client  int     `json:"client"`
	Kind    Kind    `json:"kind"`
	Outcome Outcome `json:"outcome"`
	Call    int64   `json:"call"`
	Return  int64   `json:"return"`

	// Value is what was to be stored; Parent is the value that it is made from.
	Value  string `json:"value,omitempty"`
	Parent string `json:"parent,omitempty"`
	// TTL is the session's or the lock's, in nanoseconds.
	TTL int64 `json:"ttl,omitempty"`
	// Expected is the revision that a save demanded.
	Expected uint64 `json:"expected,omitempty"`
	// Fence is the token that a save or a release carried.
	Fence uint64 `json:"fence,omitempty"`
	// Releases says that the save was to release the lock as well.
	Releases bool `json:"releases,omitempty"`
	// Holder is the name that an acquire gave; empty if it gave none.
	Holder string `json:"holder,omitempty"`
	// Attached says that the lock goes with the client's attachment, which may end before the TTL.
	Attached bool `json:"attached,omitempty"`

	// Got is the value read.
	Got string `json:"got,omitempty"`
	// Revision is the session's, as told.
	Revision uint64 `json:"revision,omitempty"`
	// Granted is the fencing token of a grant, and Deadline until when it was promised.
	Granted  uint64 `json:"granted,omitempty"`
	Deadline int64  `json:"deadline,omitempty"`
	// Position is the store's at the moment of the answer.
	Position uint64 `json:"position,omitempty"`
	// Existed is what a destroy answered.
	Existed bool `json:"existed,omitempty"`
	// Left is the time that a touch answered.
	Left int64 `json:"left,omitempty"`
	// Attempts is how often the client sent the call.
	Attempts int `json:"attempts"`
	// Error is the text of the error, if any.
	Error string `json:"error,omitempty"`
}

// String says it in a line.
func (o *Op) String() string {
	text, err := json.Marshal(o)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%8.3f-%8.3f s %s", time.Duration(o.Call).Seconds(), time.Duration(o.Return).Seconds(), text)
}

// judged says whether the client learned what became of the operation. The rate of these among all is what a run is worth.
func (o *Op) judged() bool { return o.Outcome != Unknown && o.Outcome != Refused }

// known are the errors that tell an outcome.
var known = []struct {
	err     error
	outcome Outcome
}{
	{client.ErrSessionNotFound, NotFound},
	{client.ErrSessionExists, Exists},
	{client.ErrRevisionMismatch, Mismatch},
	{client.ErrSessionLocked, Locked},
	{client.ErrLockLost, LockLost},
	{client.ErrLockTimeout, TimedOut},
	{client.ErrLockNotHeld, NotHeld},
	{client.ErrLockAlreadyHeld, AlreadyHeld},
}

// settle notes what came of an operation.
func (o *Op) settle(err error) {
	if o.Outcome == "" {
		o.Outcome = o.outcome(err)
	}
	if err != nil {
		o.Error = err.Error()
	}
}

func (o *Op) outcome(err error) Outcome {
	if err == nil {
		return OK
	}
	if errors.Is(err, client.ErrOutcomeUnknown) {
		return Unknown
	}
	for _, k := range known {
		if errors.Is(err, k.err) {
			return k.outcome
		}
	}
	e, ok := errors.AsType[*client.Error](err)
	switch {
	case ok && e.Reason == sessiondv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN && (o.Attempts <= 1 || o.Kind == Create || o.Kind == Save):
		// Those two are tried again only if no node had begun with them.
		return Refused
	case errors.Is(err, client.ErrUnavailable), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return Unknown
	default:
		return Unexpected
	}
}

// writeHistory writes operations, one a line.
func writeHistory(w io.Writer, ops []Op) error {
	out := bufio.NewWriter(w)
	enc := json.NewEncoder(out)
	for i := range ops {
		if err := enc.Encode(&ops[i]); err != nil {
			return err
		}
	}
	return out.Flush()
}

// readHistory reads what writeHistory wrote.
func readHistory(r io.Reader) ([]Op, error) {
	var ops []Op
	dec := json.NewDecoder(r)
	for {
		var o Op
		switch err := dec.Decode(&o); {
		case errors.Is(err, io.EOF):
			return ops, nil
		case err != nil:
			return nil, fmt.Errorf("history: %w", err)
		}
		ops = append(ops, o)
	}
}
