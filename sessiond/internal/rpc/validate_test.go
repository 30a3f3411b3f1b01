package rpc

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
)

// fields are the fields that an error complains of.
func fields(err error) string {
	e, ok := errors.AsType[*invalidError](err)
	if !ok {
		return ""
	}
	var names []string
	for _, v := range e.violations {
		names = append(names, v.GetField())
	}
	return strings.Join(names, " ")
}

// S2: the limits of the API's comments.
func TestNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"a": true, "!": true, "~": true, strings.Repeat("x", 128): true, "a/b%": true,
		"": false, strings.Repeat("x", 129): false, "a b": false, "\x7f": false, "é": false, "\n": false, "\x00": false, "\xff": false,
	} {
		if err := checkSessionID(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestDurations(t *testing.T) {
	create := func(d *durationpb.Duration) error {
		_, err := checkCreate(&sessiondv1.CreateRequest{Ttl: d})
		return err
	}
	acquire := func(d *durationpb.Duration) error {
		_, err := checkAcquire(&sessiondv1.AcquireRequest{SessionId: "s", Ttl: d})
		return err
	}
	timeout := func(d *durationpb.Duration) error {
		_, err := checkAcquire(&sessiondv1.AcquireRequest{SessionId: "s", Timeout: d})
		return err
	}
	publish := func(d *durationpb.Duration) error {
		_, err := checkPublish(&sessiondv1.PublishRequest{SessionId: "s", Stream: "m", Ttl: d})
		return err
	}
	tests := []struct {
		name        string
		check       func(*durationpb.Duration) error
		least, most time.Duration
	}{
		{"session", create, time.Second, 30 * 24 * time.Hour},
		{"lock", acquire, time.Second, time.Hour},
		{"timeout", timeout, 0, time.Hour},
		{"message", publish, time.Second, 24 * time.Hour},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for d, ok := range map[time.Duration]bool{
				tt.least: true, tt.most: true, 1500 * time.Millisecond: true,
				tt.least - time.Millisecond: false, tt.most + time.Millisecond: false, 1500*time.Millisecond + 1: false, -time.Second: false,
			} {
				if err := tt.check(durationpb.New(d)); (err == nil) != ok {
					t.Errorf("%v: %v", d, err)
				}
			}
			if tt.check(nil) != nil {
				t.Error("unset is refused")
			}
			if tt.check(&durationpb.Duration{Seconds: math.MaxInt64, Nanos: -1}) == nil {
				t.Error("nonsense is allowed")
			}
		})
	}
}

func TestDefaults(t *testing.T) {
	ttl, err := checkCreate(&sessiondv1.CreateRequest{})
	if err != nil || ttl != time.Hour {
		t.Errorf("create: %v, %v", ttl, err)
	}
	req, err := checkAcquire(&sessiondv1.AcquireRequest{SessionId: "s"})
	if err != nil || req.TTL != 300*time.Second || req.Timeout != 30*time.Second {
		t.Errorf("acquire: %+v, %v", req, err)
	}
	publish, err := checkPublish(&sessiondv1.PublishRequest{SessionId: "s", Stream: "m"})
	if err != nil || publish.TTL != 5*time.Minute {
		t.Errorf("publish: %+v, %v", publish, err)
	}
}

func TestFields(t *testing.T) {
	many := make([]string, 17)
	for i := range many {
		many[i] = strings.Repeat("s", i+1)
	}
	save := func(r *sessiondv1.SaveRequest) error { _, err := checkSave(r); return err }
	retain := func(r *sessiondv1.RetainRequest) error { _, err := checkRetain(r); return err }
	publish := func(r *sessiondv1.PublishRequest) error { _, err := checkPublish(r); return err }
	try := func(r *sessiondv1.TryAcquireRequest) error { _, err := checkTryAcquire(r); return err }
	hello := func(r *sessiondv1.AttachHello) error {
		m := &sessiondv1.AttachRequest{}
		if r != nil {
			m.Message = &sessiondv1.AttachRequest_Hello{Hello: r}
		}
		_, err := checkHello(m)
		return err
	}
	claims := func(r *sessiondv1.AttachClaims) error {
		_, err := checkSaid(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Claims{Claims: r}})
		return err
	}
	const far = math.MaxUint64
	tests := []struct {
		name string
		err  error
		want string
	}{
		{"save", save(&sessiondv1.SaveRequest{SessionId: "s"}), ""},
		{"save, all wrong", save(&sessiondv1.SaveRequest{RequestId: " ", Release: true, ExpectedRevision: new(uint64(far))}), "session_id request_id expected_revision release"},
		{"save, far token", save(&sessiondv1.SaveRequest{SessionId: "s", FencingToken: far}), "fencing_token"},
		{"try", try(&sessiondv1.TryAcquireRequest{SessionId: "s", Holder: "h", RequestId: "r"}), ""},
		{"try, all wrong", try(&sessiondv1.TryAcquireRequest{Holder: " ", RequestId: " "}), "session_id request_id holder"},
		{"try, front-end", try(&sessiondv1.TryAcquireRequest{SessionId: "s", FrontEnd: " "}), "front_end"},
		{"hello", hello(&sessiondv1.AttachHello{FrontEnd: "f", Number: 1}), ""},
		{"hello, all wrong", hello(&sessiondv1.AttachHello{}), "hello.front_end hello.number"},
		{"no hello", hello(nil), "hello"},
		{"claims", claims(&sessiondv1.AttachClaims{Requests: []*sessiondv1.LockRequest{{SessionId: "s", RequestId: "r"}}}), ""},
		{"claims, all wrong", claims(&sessiondv1.AttachClaims{Position: far, Requests: []*sessiondv1.LockRequest{{SessionId: " "}}}), "claims.position claims.requests[0].session_id claims.requests[0].request_id"},
		{"release", checkRelease(&sessiondv1.ReleaseRequest{SessionId: "s", FencingToken: 1}), ""},
		{"release of nothing", checkRelease(&sessiondv1.ReleaseRequest{SessionId: "s"}), "fencing_token"},
		{"publish", publish(&sessiondv1.PublishRequest{}), "session_id stream"},
		{"subscribe", checkSubscribe(&sessiondv1.SubscribeRequest{SessionId: "s", Streams: many[:16]}), ""},
		{"subscribe to none", checkSubscribe(&sessiondv1.SubscribeRequest{SessionId: "s"}), "streams"},
		{"subscribe to too many", checkSubscribe(&sessiondv1.SubscribeRequest{SessionId: "s", Streams: many}), "streams"},
		{"subscribe twice", checkSubscribe(&sessiondv1.SubscribeRequest{SessionId: "s", Streams: []string{"a", "a", ""}}), "streams[1] streams[2]"},
		{"subscribe far", checkSubscribe(&sessiondv1.SubscribeRequest{SessionId: "s", Streams: []string{"a"}, AfterPosition: math.MaxInt64}), "after_position"},
		{"retain", retain(&sessiondv1.RetainRequest{Ttl: durationpb.New(-1)}), "session_id stream ttl"},
		{"trim", checkTrim(&sessiondv1.TrimRequest{ThroughPosition: far}), "session_id stream"},
	}
	for _, tt := range tests {
		if got := fields(tt.err); got != tt.want || (tt.err == nil) != (tt.want == "") {
			t.Errorf("%s: %q (%v), want %q", tt.name, got, tt.err, tt.want)
		}
	}
}
