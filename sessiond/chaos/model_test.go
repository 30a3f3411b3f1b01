package chaos

import (
	"bytes"
	"slices"
	"testing"
	"time"
)

// times makes the times of a history readable: in seconds, on a clock that has been running for a while.
func at(seconds float64) int64 { return int64((100 + seconds) * float64(time.Second)) }

// op makes an operation that lasted from one time to another.
func op(from, to float64, kind Kind, outcome Outcome, set ...func(*Op)) Op {
	o := Op{Session: "s", Kind: kind, Outcome: outcome, Call: at(from), Return: at(to), Attempts: 1}
	for _, f := range set {
		f(&o)
	}
	return o
}

func wrote(value string, revision uint64) func(*Op) {
	return func(o *Op) { o.Value, o.Revision, o.TTL = value, revision, int64(time.Hour) }
}

func got(value string, revision uint64) func(*Op) {
	return func(o *Op) { o.Got, o.Revision, o.Position = value, revision, revision }
}

// grant is a lock of 2 s, held from the operation's return on.
func grant(fence uint64) func(*Op) {
	return func(o *Op) {
		o.TTL, o.Granted, o.Position = int64(2*time.Second), fence, max(fence, o.Position)
		o.Deadline = o.Return + o.TTL
	}
}

func fence(f uint64) func(*Op)          { return func(o *Op) { o.Fence = f } }
func releases(o *Op)                    { o.Releases = true }
func twice(o *Op)                       { o.Attempts = 2 }
func existed(o *Op)                     { o.Existed = true }
func expects(revision uint64) func(*Op) { return func(o *Op) { o.Expected = revision } }
func holder(name string) func(*Op)      { return func(o *Op) { o.Holder = name } }
func brief(o *Op)                       { o.TTL = int64(3 * time.Second) }
func parent(value string) func(*Op)     { return func(o *Op) { o.Parent = value } }

// rulesOf are the rules that a history breaks.
func rulesOf(ops []Op) []string {
	v := checkSession(ops, nil, bounds{late: 4 * time.Second, handOver: 2 * time.Second})
	var rules []string
	for _, violation := range v.violations {
		rules = append(rules, violation.Rule)
	}
	slices.Sort(rules)
	return slices.Compact(rules)
}

// made is how most histories begin.
var made = op(0, 1, Create, OK, wrote("a", 10))

// What a session may do, and what it may not: each history is right, or breaks the one rule that is named.
func TestHistories(t *testing.T) {
	for name, c := range map[string]struct {
		ops  []Op
		want []string
	}{
		// Sessions.
		"a read sees the save before it":       {[]Op{made, op(2, 3, Save, OK, wrote("b", 11), parent("a")), op(4, 5, Read, OK, got("b", 11))}, nil},
		"a read sees a save beside it, or not": {[]Op{made, op(2, 5, Save, OK, wrote("b", 11)), op(3, 4, Read, OK, got("a", 10)), op(3, 4, Read, OK, got("b", 11))}, nil},
		"a stale read":                         {[]Op{made, op(2, 3, Save, OK, wrote("b", 11)), op(4, 5, Read, OK, got("a", 10))}, []string{"order"}},
		"reads that go back":                   {[]Op{made, op(2, 9, Save, OK, wrote("b", 11)), op(3, 4, Read, OK, got("b", 11)), op(5, 6, Read, OK, got("a", 10))}, []string{"order"}},
		"a value that nobody wrote":            {[]Op{made, op(2, 3, Read, OK, got("x", 10))}, []string{"chain", "order"}},
		"a revision of something else":         {[]Op{made, op(2, 3, Read, OK, got("a", 11))}, []string{"order"}},
		"a revision after a touch": {[]Op{
			made, op(2, 3, Touch, OK), op(3, 4, Read, OK, got("a", 12)), op(4, 5, Save, OK, wrote("b", 13), expects(12), parent("a")),
		}, nil},
		"a revision after a touch that was cut off": {[]Op{made, op(2, 3, Touch, Unknown), op(4, 5, Read, OK, got("a", 10)), op(6, 7, Read, OK, got("a", 12))}, nil},
		"two revisions after a touch":               {[]Op{made, op(2, 3, Touch, OK), op(3, 4, Read, OK, got("a", 12)), op(5, 6, Read, OK, got("a", 13))}, []string{"order"}},
		"created twice":                             {[]Op{made, op(2, 3, Create, OK, wrote("b", 11))}, []string{"order"}},
		"created beside another":                    {[]Op{made, op(0, 1, Create, Exists, wrote("b", 0))}, nil},
		"exists without one":                        {[]Op{op(0, 1, Create, Exists)}, []string{"order"}},
		"not found while it is there":               {[]Op{made, op(2, 3, Read, NotFound)}, []string{"order"}},
		"expired":                                   {[]Op{op(0, 1, Create, OK, wrote("a", 10), brief), op(4, 5, Read, NotFound)}, nil},
		"expired before its time":                   {[]Op{op(0, 1, Create, OK, wrote("a", 10), brief), op(2, 2.5, Read, NotFound)}, []string{"order"}},
		"a save starts the TTL anew":                {[]Op{op(0, 1, Create, OK, wrote("a", 10), brief), op(2, 2.5, Save, OK, wrote("b", 11), brief), op(4, 4.5, Read, NotFound)}, []string{"order"}},
		"an unknown save, done late, has its TTL": {[]Op{
			op(0, 1, Create, OK, wrote("a", 10), brief), op(1, 2, Save, Unknown, wrote("x", 0), brief),
			op(3, 3.2, Save, OK, wrote("b", 11), brief), op(3.5, 4, Read, OK, got("x", 12)), op(4.2, 4.5, Read, NotFound),
		}, nil},
		"an unknown save has its TTL before it is done": {[]Op{
			op(0, 1, Create, OK, wrote("a", 10), brief), op(1, 2, Save, Unknown, wrote("x", 0), brief),
			op(3, 3.2, Save, OK, wrote("b", 11), brief), op(3.3, 3.5, Read, OK, got("b", 11)), op(3.5, 3.9, Read, NotFound),
		}, []string{"order"}},
		"expired and back again":       {[]Op{op(0, 1, Create, OK, wrote("a", 10), brief), op(4, 5, Read, NotFound), op(6, 7, Read, OK, got("a", 10))}, []string{"order"}},
		"destroyed":                    {[]Op{made, op(2, 3, Destroy, OK, existed), op(4, 5, Read, NotFound), op(6, 7, Create, OK, wrote("b", 12)), op(8, 9, Read, OK, got("b", 12))}, nil},
		"a save that creates":          {[]Op{made, op(2, 3, Destroy, OK, existed), op(4, 5, Save, OK, wrote("b", 12)), op(6, 7, Read, OK, got("b", 12))}, []string{"order"}},
		"destroyed what was gone":      {[]Op{made, op(2, 3, Destroy, OK, existed), op(4, 5, Destroy, OK)}, nil},
		"destroyed twice":              {[]Op{made, op(2, 3, Destroy, OK, existed), op(4, 5, Destroy, OK, existed)}, []string{"order"}},
		"destroyed by a first attempt": {[]Op{made, op(2, 3, Destroy, OK, twice), op(4, 5, Read, NotFound)}, nil},
		"a revision used again":        {[]Op{made, op(2, 3, Destroy, OK, existed), op(4, 5, Create, OK, wrote("b", 10))}, []string{"order"}},

		// Compare-and-swap.
		"swapped":                        {[]Op{made, op(2, 3, Save, OK, wrote("b", 11), expects(10), parent("a")), op(4, 5, Read, OK, got("b", 11))}, nil},
		"swapped on a revision gone by":  {[]Op{made, op(2, 3, Save, OK, wrote("b", 11), expects(10), parent("a")), op(4, 5, Save, OK, wrote("c", 12), expects(10), parent("a")), op(6, 7, Read, OK, got("c", 12))}, []string{"chain", "order"}},
		"a mismatch that is none":        {[]Op{made, op(2, 3, Save, Mismatch, wrote("b", 0), expects(10))}, []string{"order"}},
		"a mismatch":                     {[]Op{made, op(2, 3, Save, Mismatch, wrote("b", 0), expects(9))}, nil},
		"a refused save that was done":   {[]Op{made, op(2, 3, Save, Mismatch, wrote("b", 0), expects(9), parent("a")), op(4, 5, Read, OK, got("b", 11))}, []string{"order"}},
		"an unknown save, done":          {[]Op{made, op(2, 3, Save, Unknown, wrote("b", 0), expects(10), parent("a")), op(4, 5, Read, OK, got("b", 11))}, nil},
		"an unknown save, not done":      {[]Op{made, op(2, 3, Save, Unknown, wrote("b", 0), expects(10), parent("a")), op(4, 5, Read, OK, got("a", 10))}, nil},
		"an unknown save, done later":    {[]Op{made, op(2, 3, Save, Unknown, wrote("b", 0), expects(10), parent("a")), op(4, 5, Read, OK, got("a", 10)), op(6, 7, Read, OK, got("b", 11))}, nil},
		"an unknown save, done and lost": {[]Op{made, op(2, 3, Save, Unknown, wrote("b", 0), expects(10), parent("a")), op(4, 5, Read, OK, got("b", 11)), op(6, 7, Read, OK, got("a", 10))}, []string{"order"}},

		// Locks.
		"a cycle": {[]Op{
			made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3, 4, Save, OK, wrote("b", 12), parent("a"), fence(11), releases),
			op(4, 5, Acquire, OK, got("b", 12), grant(13)), op(5, 6, Release, OK, fence(13)), op(7, 8, Read, OK, got("b", 12)),
		}, nil},
		"two holders":            {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3.5, 4, Acquire, OK, got("a", 10), grant(12))}, []string{"order"}},
		"the next after the TTL": {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3.5, 5.5, Acquire, OK, got("a", 10), grant(12))}, nil},
		"a lower token":          {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(12)), op(3, 3.5, Release, OK, fence(12)), op(4, 5, Acquire, OK, got("a", 10), grant(11))}, []string{"fences", "order"}},
		"a lower token, made anew": {[]Op{
			made, op(2, 3, Acquire, OK, got("a", 10), grant(20)), op(3, 3.5, Destroy, OK, existed), op(4, 5, Create, OK, wrote("b", 21)),
			op(6, 7, Acquire, OK, got("b", 21), grant(15)),
		}, []string{"fences", "order"}},
		"an old value under the lock": {[]Op{made, op(2, 3, Save, OK, wrote("b", 11)), op(4, 5, Acquire, OK, got("a", 10), grant(12))}, []string{"order"}},
		"a late save":                 {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3, 3.5, Release, OK, fence(11)), op(4, 5, Save, OK, wrote("b", 12), fence(11))}, []string{"order"}},
		"a late save, refused":        {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3, 3.5, Release, OK, fence(11)), op(4, 5, Save, LockLost, wrote("b", 0), fence(11))}, nil},
		"lost before its time":        {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3.5, 4, Save, LockLost, wrote("b", 0), fence(11))}, []string{"order"}},
		"lost after the TTL":          {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3.5, 5.5, Save, LockLost, wrote("b", 0), fence(11))}, nil},
		"kept after the TTL":          {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(5.5, 6, Save, OK, wrote("b", 12), fence(11), parent("a"))}, nil},
		"an attached holder loses it": {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11), func(o *Op) { o.Attached = true }), op(3.5, 4, Save, LockLost, wrote("b", 0), fence(11))}, nil},
		"saved beside the lock":       {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3.5, 4, Save, OK, wrote("b", 12))}, []string{"order"}},
		"refused beside the lock":     {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3.5, 4, Save, Locked, wrote("b", 0))}, nil},
		"refused beside no lock":      {[]Op{made, op(3.5, 4, Save, Locked, wrote("b", 0))}, []string{"order"}},
		"busy":                        {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3.5, 4, TryAcquire, Busy)}, nil},
		"busy with nobody":            {[]Op{made, op(3.5, 4, TryAcquire, Busy)}, []string{"order"}},
		"busy with one that gave up":  {[]Op{made, op(2, 3, Acquire, TimedOut), op(3.5, 4, TryAcquire, Busy)}, nil},
		"held already":                {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11), holder("h")), op(3.5, 4, Acquire, AlreadyHeld, holder("h"))}, nil},
		"held by somebody else":       {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11), holder("h")), op(3.5, 4, Acquire, AlreadyHeld, holder("i"))}, []string{"order"}},
		"released twice":              {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3.5, 4, Release, OK, fence(11)), op(4, 4.5, Release, OK, fence(11))}, []string{"order"}},
		"released after the session": {[]Op{
			op(0, 1, Create, OK, wrote("a", 10), brief), op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(4, 4.5, Read, NotFound), op(5, 5.5, Release, OK, fence(11)),
			op(6, 7, Create, OK, wrote("b", 12), brief),
		}, nil},
		"released after the session, twice": {[]Op{
			op(0, 1, Create, OK, wrote("a", 10), brief), op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(4, 4.5, Read, NotFound), op(5, 5.5, Release, OK, fence(11)),
			op(6, 7, Release, OK, fence(11)),
		}, []string{"order"}},
		"released after it was destroyed": {[]Op{
			made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3, 3.5, Destroy, OK, existed), op(4, 5, Release, OK, fence(11)),
		}, []string{"order"}},
		"a late release frees a newer grant": {[]Op{
			made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3, 3.2, Release, OK, fence(11)), op(3.2, 3.4, Acquire, OK, got("a", 10), grant(12)),
			op(3.4, 3.6, Release, NotHeld, fence(11)), op(3.6, 3.8, Acquire, OK, got("a", 10), grant(13)),
		}, []string{"order"}},
		"a release sent twice":     {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3.5, 6, Release, OK, fence(11), twice)}, nil},
		"refused while it is held": {[]Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11)), op(3.5, 4, Release, NotHeld, fence(11))}, []string{"order"}},
		"a lock that outlives its session": {[]Op{
			made, op(2, 2.2, Acquire, OK, got("a", 10), grant(11)), op(2.2, 2.4, Destroy, OK, existed), op(2.4, 2.6, Create, OK, wrote("b", 13)),
			op(2.6, 2.8, Save, OK, wrote("c", 14), fence(11)),
		}, []string{"order"}},

		// Rules beside the order.
		"served before an earlier one": {[]Op{
			made, op(2, 6, Acquire, OK, got("a", 10), grant(11), func(o *Op) { o.Position = 20; o.Attached = true }),
			op(2, 6, Acquire, OK, got("a", 10), grant(12), func(o *Op) { o.Position = 15; o.Attached = true }),
		}, []string{"arrival"}},
		"less than the TTL asked for": {[]Op{made, op(2, 2.1, Acquire, OK, got("a", 10), grant(11), func(o *Op) { o.Deadline = at(3) })}, []string{"ttl"}},
		"a wait for nobody":           {[]Op{made, op(2, 6, Acquire, OK, got("a", 10), grant(11))}, []string{"waits"}},
		"a timeout for nobody":        {[]Op{made, op(2, 7, Acquire, TimedOut), op(2, 7, Acquire, TimedOut)}, []string{"waits"}},
		"a wait for a holder that died": {[]Op{
			made, op(1, 1.1, Acquire, OK, got("a", 10), grant(11)), op(2, 8, Acquire, OK, got("a", 10), grant(12)),
		}, nil},
		"a holder that died and was kept alive": {[]Op{
			made, op(1, 1.1, Acquire, OK, got("a", 10), grant(11)), op(2, 12, Acquire, OK, got("a", 10), grant(12)),
		}, []string{"waits"}},
		"what no client may see": {[]Op{made, op(2, 3, Read, Unexpected)}, []string{"errors", "order"}},
	} {
		t.Run(name, func(t *testing.T) {
			want := c.want
			if slices.Contains(want, "errors") {
				want = []string{"errors"} // it is no part of the order
			}
			if rules := rulesOf(c.ops); !slices.Equal(rules, want) {
				t.Errorf("breaks %v, want %v", rules, want)
			}
		})
	}
}

// An acknowledged save that is missing from what is read in the end is found, whoever overwrote it.
func TestChain(t *testing.T) {
	lost := []Op{
		made,
		op(2, 3, Save, OK, wrote("b", 11), fence(5), parent("a")),
		op(4, 5, Save, OK, wrote("c", 12), fence(6), parent("a")), // made from what was before b
		op(6, 7, Read, OK, got("c", 12)),
	}
	if rules := rulesOf(lost); !slices.Contains(rules, "chain") {
		t.Errorf("breaks %v, want chain", rules)
	}
	// A holder that does not know whether its save was carried out, and goes on: the client sees to it that the first is not carried out
	// after the second.
	late := []Op{
		made, op(1, 1.1, Acquire, OK, got("a", 10), grant(11)),
		op(1.1, 1.2, Save, Unknown, wrote("b", 0), fence(11), parent("a")),
		op(1.3, 1.4, Save, OK, wrote("c", 12), fence(11), parent("a")),
		op(1.5, 1.6, Read, OK, got("b", 13)),
	}
	if rules := rulesOf(late); !slices.Contains(rules, "chain") {
		t.Errorf("breaks %v, want chain", rules)
	}
}

// A wait is excused by a fault, for as long as it may be felt.
func TestWaitsAndFaults(t *testing.T) {
	ops := []Op{made, op(2, 6, Acquire, OK, got("a", 10), grant(11))}
	b := bounds{late: 4 * time.Second, handOver: 2 * time.Second}
	if v := checkSession(ops, disturbances{{at(3), at(5)}}, b); len(v.violations) > 0 {
		t.Errorf("with a fault from 3 to 5 s: %v", v.violations)
	}
	if v := checkSession(ops, disturbances{{at(5), at(6)}}, b); len(v.violations) == 0 {
		t.Error("a fault that came later excuses the wait")
	}
}

func TestDisturbances(t *testing.T) {
	now := int64(10)
	c := &calm{recovery: 5}
	clock := func() int64 { return now }
	first := c.begin(clock)
	now = 12
	second := c.begin(clock)
	now = 20
	first()
	if got := c.disturbed(); len(got) != 1 || got[0] != (disturbance{10, never}) {
		t.Errorf("while one is at work: %v", got)
	}
	now = 30
	second()
	now = 50
	c.begin(clock)()
	ds := c.disturbed()
	if want := (disturbances{{10, 35}, {50, 55}}); !slices.Equal(ds, want) {
		t.Fatalf("%v, want %v", ds, want)
	}
	if got := ds.calm(0, 60); got != 30 {
		t.Errorf("calm for %d of 60", got)
	}
	if got := ds.after(8, 4); got != 37 {
		t.Errorf("4 calm ones after 8 end at %d, want 37", got)
	}
}

// A history that is saved is the same when it is read.
func TestSavedHistory(t *testing.T) {
	ops := []Op{made, op(2, 3, Acquire, OK, got("a", 10), grant(11), holder("h"))}
	var b bytes.Buffer
	if err := writeHistory(&b, ops); err != nil {
		t.Fatal(err)
	}
	read, err := readHistory(bytes.NewReader(b.Bytes()))
	if err != nil || !slices.Equal(read, ops) {
		t.Errorf("%v, %v", read, err)
	}
	b.Reset()
	if err := writeHistory(&b, append(ops, op(4, 5, Read, OK, got("x", 1)))); err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := Explain(&text, &b); err != nil || !bytes.Contains(text.Bytes(), []byte("none of these can come next:\n 104.000")) {
		t.Errorf("%s, %v", text.String(), err)
	}
}
