package chaos

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// A Violation is a promise that was not kept.
type Violation struct {
	// Rule names the check that found it.
	Rule string `json:"rule"`
	// Session is where.
	Session string `json:"session"`
	// Text says what is wrong.
	Text string `json:"text"`
}

func (v Violation) String() string { return fmt.Sprintf("%s: %s: %s", v.Rule, v.Session, v.Text) }

// bounds are how long what is promised "at once" or "after the TTL" may take when nothing else is wrong, on a machine that is
// busy with all of this.
type bounds struct {
	// late is how long after its TTL a lock may live.
	late time.Duration
	// handOver is how long a free lock may have a waiter that does not get it.
	handOver time.Duration
}

// patience is how long the search for an order may take.
const patience = 20 * time.Second

// A verdict is what the checks say of one session.
type verdict struct {
	violations []Violation
	// checked is how many operations were judged. None is if the search took too long.
	checked int
	unknown bool
}

// checkSession judges the history of one session, whole: the operations of all its incarnations.
func checkSession(ops []Op, faults disturbances, b bounds) verdict {
	var v verdict
	fail := func(rule, format string, args ...any) {
		v.violations = append(v.violations, Violation{Rule: rule, Session: ops[0].Session, Text: fmt.Sprintf(format, args...)})
	}
	switch porcupine.CheckOperationsTimeout(model, prepare(ops, faults), patience) {
	case porcupine.Ok:
		v.checked = len(ops)
	case porcupine.Unknown:
		v.unknown = true
	case porcupine.Illegal:
		fail("order", "there is no order of its operations in which each has the outcome that its client saw")
	}
	for i := range ops {
		if ops[i].Outcome == Unexpected {
			fail("errors", "%v", &ops[i])
		}
	}
	checkFences(ops, fail)
	checkTTLs(ops, fail)
	checkChain(ops, fail)
	checkWaits(ops, faults, b, fail)
	return v
}

type failure func(rule, format string, args ...any)

func granted(o *Op) bool {
	return (o.Kind == Acquire || o.Kind == TryAcquire) && o.Outcome == OK
}

// checkFences: tokens are never given twice, grow in real time, and are granted in the order in which their entries were made, which is
// the order of arrival (L5, L6). The positions of the grants tell their order exactly.
func checkFences(ops []Op, fail failure) {
	var grants []*Op
	for i := range ops {
		if granted(&ops[i]) {
			grants = append(grants, &ops[i])
		}
	}
	slices.SortFunc(grants, func(a, b *Op) int { return cmp.Compare(a.Granted, b.Granted) })
	for i := 1; i < len(grants); i++ {
		a, b := grants[i-1], grants[i]
		switch {
		case a.Granted == b.Granted:
			fail("fences", "granted twice:\n%v\n%v", a, b)
		case b.Return < a.Call:
			fail("fences", "a later grant has a lower token:\n%v\n%v", b, a)
		case b.Position < a.Position && a.Attempts <= 1 && b.Attempts <= 1:
			// The answer to a call that was sent again tells a later position.
			fail("arrival", "served before one that had come earlier:\n%v\n%v", b, a)
		}
	}
	for _, g := range grants {
		if g.Position < g.Granted {
			fail("fences", "granted before its entry was made: %v", g)
		}
	}
}

// checkTTLs: a grant gives the TTL asked for, but for the time that the answer took, and for the rounding of a retry (L4).
func checkTTLs(ops []Op, fail failure) {
	for i := range ops {
		o := &ops[i]
		if !granted(o) {
			continue
		}
		least := o.Call + o.TTL
		if o.Attempts > 1 {
			least -= o.Return - o.Call + int64(time.Second)
		}
		if o.Deadline < least {
			fail("ttl", "granted for less than was asked: %v", o)
		}
	}
}

// checkChain: each value names the one that it was made from, so the values that a session ever had form a chain. Of the last
// incarnation, every acknowledged save is on the chain of the last value read, unless somebody wrote without condition.
func checkChain(ops []Op, fail failure) {
	made := map[string]*Op{} // by value
	var last *Op             // the last read, alone at the end
	for i := range ops {
		o := &ops[i]
		switch {
		case o.Kind == Save && o.Fence == 0 && o.Expected == 0 && o.Outcome != Refused:
			return
		case o.Kind == Save || o.Kind == Create:
			made[o.Value] = o
		case o.Kind == Read && o.Outcome == OK && (last == nil || o.Call > last.Call):
			last = o
		}
	}
	if last == nil {
		return
	}
	on := map[string]bool{}
	var root *Op
	for value := last.Got; ; {
		o := made[value]
		if o == nil {
			fail("chain", "nobody wrote %q, which leads to %v", value, last)
			return
		}
		on[value] = true
		if o.Kind == Create {
			root = o
			break
		}
		value = o.Parent
	}
	for _, o := range made {
		if o.Outcome != OK || o.Kind != Save || on[o.Value] || o.Return >= last.Call {
			continue
		}
		// Those of earlier incarnations have gone with them.
		if root.Outcome == OK && o.Revision < root.Revision || rootOf(made, o) != root.Value {
			continue
		}
		fail("chain", "an acknowledged save is missing from what was read later:\n%v\n%v", o, last)
	}
}

// rootOf is the value that the incarnation began with in which a save was made.
func rootOf(made map[string]*Op, o *Op) string {
	for o != nil && o.Kind != Create {
		o = made[o.Parent]
	}
	if o == nil {
		return ""
	}
	return o.Value
}

// span is a time when somebody can have stood in the way of others.
type span struct{ from, to int64 }

// checkWaits: nobody waits for a lock that nobody has (L6), and none lives longer than its TTL and what is documented to come
// on top (L4). For each wait, the times are taken out when somebody else can have had the lock, or a fault was at work; what is left must
// be less than a hand-over may take.
func checkWaits(ops []Op, faults disturbances, b bounds, fail failure) {
	for i := range ops {
		o := &ops[i]
		if o.Kind != Acquire || o.Outcome != OK && o.Outcome != TimedOut || o.Return-o.Call <= int64(b.handOver) {
			continue
		}
		var spans []span
		for j := range ops {
			if other := &ops[j]; i != j && other.Call < o.Return {
				if from, to, ok := blocks(ops, other, faults, b); ok && to > o.Call && from < o.Return {
					spans = append(spans, span{max(from, o.Call), min(to, o.Return)})
				}
			}
		}
		slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.from, b.from) })
		at := o.Call
		for _, s := range append(spans, span{o.Return, o.Return}) {
			if idle := faults.calm(at, s.from); idle > b.handOver {
				fail("waits", "waited %v, of which %v at one go with nobody in the way, from %v on: %v", time.Duration(o.Return-o.Call), idle, time.Duration(at), o)
				break
			}
			at = max(at, s.to)
		}
	}
}

// blocks says when an operation can have had the lock.
func blocks(ops []Op, o *Op, faults disturbances, b bounds) (from, to int64, ok bool) {
	if o.Kind != Acquire && o.Kind != TryAcquire {
		return 0, 0, false
	}
	// A wait of its own is no excuse for the wait of another, or all could wait for nothing; it had the lock at the end of it.
	late := max(o.Call, o.Return-int64(b.handOver))
	switch o.Outcome {
	case OK:
		end := max(o.Deadline, o.Call+o.TTL)
		if o.Attempts > 1 {
			end = max(end, o.Return+o.TTL)
		}
		return late, min(faults.after(end, b.late), overBy(ops, o)), true
	case TimedOut:
		// It may have got the lock just as it gave up.
		moment := int64(b.handOver / 10)
		from, to = max(o.Call, o.Return-moment), o.Return+moment
		if around := int64(time.Second); faults.calm(o.Return-around, o.Return+around) < 2*time.Second {
			from, to = late, faults.after(o.Return, time.Duration(o.TTL)+b.late)
		}
		return from, to, true
	case Unknown, Unexpected:
		// It may have got the lock at any time, and have left it to its TTL.
		return o.Call, faults.after(o.Return, time.Duration(o.TTL)+b.late), true
	}
	return 0, 0, false
}

// overBy is when a grant had certainly ended, as far as what was done tells.
func overBy(ops []Op, grant *Op) int64 {
	end := int64(never)
	for i := range ops {
		o := &ops[i]
		over := false
		switch o.Kind {
		case Release:
			over = o.Fence == grant.Granted && (o.Outcome == OK || o.Outcome == NotHeld)
		case Save:
			over = o.Fence == grant.Granted && (o.Outcome == OK && o.Releases || o.Outcome == LockLost || o.Outcome == NotFound)
		case Destroy:
			over = o.Outcome == OK && o.Call > grant.Return
		}
		if over {
			end = min(end, o.Return)
		}
	}
	return end
}
