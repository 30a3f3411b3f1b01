package client

import (
	"slices"
	"testing"
	"time"
)

// claimed are the requests that an attachment stands by.
func claimed(a *attachment) []string {
	var names []string
	for _, r := range a.claims() {
		names = append(names, r.GetSessionId()+"/"+r.GetRequestId())
	}
	slices.Sort(names)
	return names
}

// L8, L10: a client claims what is under way and what it holds, until the grant ends by release, loss, its TTL or its session's end;
// what it does not know it abandons.
func TestL10Claims(t *testing.T) {
	a := &attachment{standing: true, given: make(chan struct{}, 1), requests: map[lockRequest]lockState{}}
	check := func(when string, want ...string) {
		t.Helper()
		if got := claimed(a); !slices.Equal(got, want) {
			t.Errorf("%s: claims %v, want %v", when, got, want)
		}
	}
	later := time.Now().Add(time.Hour)
	a.begin("s", "r")
	check("under way", "s/r")
	a.begin("s", "r")
	a.end("s", "r", time.Time{}, true)
	check("one of two calls was lost", "s/r")
	a.end("s", "r", later, false)
	check("granted", "s/r")
	a.over("s", "r", false)
	check("released")

	a.begin("s", "refused")
	a.end("s", "refused", time.Time{}, false)
	a.begin("s", "past")
	a.end("s", "past", time.Now().Add(-time.Second), false)
	check("neither what was refused nor what has expired")
	a.begin("s", "r")
	a.end("s", "r", later, false)
	a.begin("other", "r")
	a.destroyed("s")
	check("the session was destroyed", "other/r")

	if len(a.abandoned) != 0 {
		t.Errorf("abandoned: %v", a.abandoned)
	}
	a.end("other", "r", time.Time{}, true)
	a.begin("third", "r")
	a.end("third", "r", later, false)
	a.over("third", "r", true)
	check("both lost")
	if want := []lockRequest{{"other", "r"}, {"third", "r"}}; !slices.Equal(a.abandoned, want) {
		t.Errorf("abandoned: %v", a.abandoned)
	}
	a.begin("third", "r")
	if want := []lockRequest{{"other", "r"}}; !slices.Equal(a.abandoned, want) {
		t.Errorf("abandoned, although it is tried again: %v", a.abandoned)
	}

	for range 1000 {
		a.begin("s", newRequestID())
	}
	for r := range a.requests {
		a.requests[r] = lockState{until: time.Now().Add(-time.Second)}
	}
	a.pruneAt = 0
	a.begin("s", "last")
	if len(a.requests) != 1 {
		t.Errorf("%d requests are remembered", len(a.requests))
	}

	var none *attachment
	none.begin("s", "r")
	none.end("s", "r", later, true)
	none.over("s", "r", true)
	none.destroyed("s")
	none.close()
	if none.id() != "" || none.stands() {
		t.Error("a client that does not attach has an attachment")
	}
}
