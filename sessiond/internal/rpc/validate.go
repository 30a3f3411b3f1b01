package rpc

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/durationpb"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/internal/lock"
	"github.com/sessiond/sessiond/sessiond/internal/message"
	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// invalidError says which fields of a request are out of their limits, and what the limits are.
type invalidError struct {
	violations []*errdetails.BadRequest_FieldViolation
}

func (e *invalidError) Error() string {
	texts := make([]string, 0, len(e.violations))
	for _, v := range e.violations {
		texts = append(texts, v.GetField()+": "+v.GetDescription())
	}
	return strings.Join(texts, "; ")
}

// check gathers the faults of a request.
type check struct {
	violations []*errdetails.BadRequest_FieldViolation
}

func (c *check) err() error {
	if len(c.violations) == 0 {
		return nil
	}
	return &invalidError{violations: c.violations}
}

func (c *check) fault(field, format string, args ...any) {
	c.violations = append(c.violations, &errdetails.BadRequest_FieldViolation{Field: field, Description: fmt.Sprintf(format, args...)})
}

// name checks 1 to 128 visible ASCII characters, or none where a name may be left out.
func (c *check) name(field, value string, optional bool) {
	if value == "" && optional {
		return
	}
	visible := func(r rune) bool { return r >= 0x21 && r <= 0x7e }
	if value == "" || len(value) > session.MaxIDLength || strings.ContainsFunc(value, func(r rune) bool { return !visible(r) }) {
		c.fault(field, "must be 1 to %d visible ASCII characters", session.MaxIDLength)
	}
}

// duration returns the duration, or def if it is unset.
func (c *check) duration(field string, value *durationpb.Duration, def, least, most time.Duration) time.Duration {
	if value == nil {
		return def
	}
	d := value.AsDuration()
	if value.CheckValid() != nil || d < least || d > most || d%time.Millisecond != 0 {
		c.fault(field, "must be %v to %v in whole milliseconds", least, most)
	}
	return d
}

// position checks a number that etcd keeps as a signed one and that is counted up from.
func (c *check) position(field string, value uint64) {
	if value >= math.MaxInt64 {
		c.fault(field, "must be less than 2^63-1")
	}
}

func checkCreate(r *sessiondv1.CreateRequest) (time.Duration, error) {
	var c check
	c.name("session_id", r.GetSessionId(), true)
	ttl := c.duration("ttl", r.GetTtl(), session.DefaultTTL, session.MinTTL, session.MaxTTL)
	return ttl, c.err()
}

func checkSessionID(id string) error {
	var c check
	c.name("session_id", id, false)
	return c.err()
}

func checkSave(r *sessiondv1.SaveRequest) (session.Save, error) {
	var c check
	c.name("session_id", r.GetSessionId(), false)
	c.name("request_id", r.GetRequestId(), true)
	ttl := c.duration("ttl", r.GetTtl(), 0, session.MinTTL, session.MaxTTL)
	c.position("fencing_token", r.GetFencingToken())
	c.position("expected_revision", r.GetExpectedRevision())
	if r.GetRelease() && r.GetFencingToken() == 0 {
		c.fault("release", "needs a fencing_token")
	}
	return session.Save{
		ID:       r.GetSessionId(),
		Data:     r.GetData(),
		TTL:      ttl,
		Expected: r.ExpectedRevision,
		Token:    r.GetFencingToken(),
		Request:  r.GetRequestId(),
		Release:  r.GetRelease(),
	}, c.err()
}

func checkAcquire(r *sessiondv1.AcquireRequest) (lock.Request, error) {
	var c check
	req := c.lockRequest(r)
	req.Timeout = c.duration("timeout", r.GetTimeout(), lock.DefaultTimeout, 0, lock.MaxTimeout)
	return req, c.err()
}

func checkTryAcquire(r *sessiondv1.TryAcquireRequest) (lock.Request, error) {
	var c check
	return c.lockRequest(r), c.err()
}

// lockRequest checks what Acquire and TryAcquire have in common.
func (c *check) lockRequest(r interface {
	GetSessionId() string
	GetRequestId() string
	GetHolder() string
	GetTtl() *durationpb.Duration
	GetReadSession() bool
	GetFrontEnd() string
},
) lock.Request {
	c.name("session_id", r.GetSessionId(), false)
	c.name("request_id", r.GetRequestId(), true)
	c.name("holder", r.GetHolder(), true)
	c.name("front_end", r.GetFrontEnd(), true)
	return lock.Request{
		Session:  r.GetSessionId(),
		ID:       r.GetRequestId(),
		Holder:   r.GetHolder(),
		FrontEnd: r.GetFrontEnd(),
		TTL:      c.duration("ttl", r.GetTtl(), lock.DefaultTTL, lock.MinTTL, lock.MaxTTL),
		Read:     r.GetReadSession(),
	}
}

func checkHello(r *sessiondv1.AttachRequest) (*sessiondv1.AttachHello, error) {
	var c check
	hello := r.GetHello()
	if hello == nil {
		c.fault("hello", "must be the first message")
		return nil, c.err()
	}
	c.name("hello.front_end", hello.GetFrontEnd(), false)
	if hello.GetNumber() == 0 {
		c.fault("hello.number", "must be at least 1")
	}
	return hello, c.err()
}

// checkSaid checks what comes after the hello.
func checkSaid(r *sessiondv1.AttachRequest) (lock.Said, error) {
	var c check
	var said lock.Said
	switch m := r.GetMessage().(type) {
	case *sessiondv1.AttachRequest_Claims:
		c.position("claims.position", m.Claims.GetPosition())
		said = lock.Said{Claimed: true, Position: m.Claims.GetPosition()}
		said.Claims = c.lockRequests("claims.requests", m.Claims.GetRequests(), lock.MaxClaims)
	case *sessiondv1.AttachRequest_Abandon:
		said.Abandoned = c.lockRequests("abandon.requests", m.Abandon.GetRequests(), lock.MaxAbandoned)
	case *sessiondv1.AttachRequest_Goodbye:
		said.Goodbye = true
	default:
		c.fault("message", "must be claims, abandon or goodbye after the hello")
	}
	return said, c.err()
}

func (c *check) lockRequests(field string, requests []*sessiondv1.LockRequest, most int) []lock.Claim {
	if len(requests) > most {
		c.fault(field, "must be at most %d", most)
		return nil
	}
	claims := make([]lock.Claim, 0, len(requests))
	for i, r := range requests {
		c.name(fmt.Sprintf("%s[%d].session_id", field, i), r.GetSessionId(), false)
		c.name(fmt.Sprintf("%s[%d].request_id", field, i), r.GetRequestId(), false)
		claims = append(claims, lock.Claim{Session: r.GetSessionId(), Request: r.GetRequestId()})
	}
	return claims
}

func checkRelease(r *sessiondv1.ReleaseRequest) error {
	var c check
	c.name("session_id", r.GetSessionId(), false)
	c.name("request_id", r.GetRequestId(), true)
	c.position("fencing_token", r.GetFencingToken())
	if r.GetFencingToken() == 0 {
		c.fault("fencing_token", "must be that of the grant")
	}
	return c.err()
}

func checkPublish(r *sessiondv1.PublishRequest) (message.Publish, error) {
	var c check
	c.name("session_id", r.GetSessionId(), false)
	c.name("stream", r.GetStream(), false)
	c.name("request_id", r.GetRequestId(), true)
	return message.Publish{
		Session: r.GetSessionId(),
		Stream:  r.GetStream(),
		Payload: r.GetPayload(),
		TTL:     c.duration("ttl", r.GetTtl(), message.DefaultTTL, message.MinTTL, message.MaxTTL),
		Request: r.GetRequestId(),

		LowPriority: r.GetLowPriority(),
	}, c.err()
}

func checkSubscribe(r *sessiondv1.SubscribeRequest) error {
	var c check
	c.name("session_id", r.GetSessionId(), false)
	streams := r.GetStreams()
	if len(streams) == 0 || len(streams) > message.MaxStreams {
		c.fault("streams", "must be 1 to %d streams", message.MaxStreams)
	} else {
		for i, stream := range streams {
			c.name(fmt.Sprintf("streams[%d]", i), stream, false)
			if slices.Contains(streams[:i], stream) {
				c.fault(fmt.Sprintf("streams[%d]", i), "must not be named twice")
			}
		}
	}
	c.position("after_position", r.GetAfterPosition())
	return c.err()
}

func checkTrim(r *sessiondv1.TrimRequest) error {
	var c check
	c.name("session_id", r.GetSessionId(), false)
	c.name("stream", r.GetStream(), false)
	return c.err()
}

func checkRetain(r *sessiondv1.RetainRequest) (time.Duration, error) {
	var c check
	c.name("session_id", r.GetSessionId(), false)
	c.name("stream", r.GetStream(), false)
	return c.duration("ttl", r.GetTtl(), message.DefaultTTL, message.MinTTL, message.MaxTTL), c.err()
}
