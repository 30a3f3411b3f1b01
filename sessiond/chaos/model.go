package chaos

import (
	"fmt"
	"hash/maphash"
	"math"
	"time"

	"github.com/anishathalye/porcupine"
)

// A state is what a session is at one moment, as far as the order of operations tells.
type state struct {
	exists bool
	value  string
	// revision is the session's if exact, else the least that it can be: a call that was sent twice may have written twice.
	revision uint64
	exact    bool
	// touched says that it may be greater, because a touch may have written the session, until somebody sees it.
	touched bool
	// ends is when the session expires, at the earliest.
	ends int64
	// fence is the holder's, 0 if nobody holds; name is the holder's, and lockEnds when its lock expires, at the earliest.
	fence    uint64
	name     string
	lockEnds int64
	// orphan is the fence of who held when the session expired: that one may still release.
	orphan uint64
	// top is the highest fence ever granted, also across destroy and create.
	top uint64
}

// An input is an operation to judge. The outputs are in it: porcupine passes both to the model at once.
type input struct {
	*Op

	// ends is when the operation can still have happened: its return, or never if its outcome is unknown.
	ends int64
	// ghost says that, during the operation, the entry of an acquire that failed, or was under way, can have been in the queue, where
	// nobody may take the lock beside it; ownGhost that it can have been one of the same holder.
	ghost, ownGhost bool
}

// never is the return of what may still happen.
const never = math.MaxInt64

// shortTTL divides sessions that a touch may write at any time from those whose revision is known exactly as long as no touch may have
// written them.
const shortTTL = time.Minute

// model is a session for porcupine.
//
// Porcupine has no clock. It does not need one: what depends on time is legal from a moment on, so an operation may see a
// lock or a session expired if it returned after the earliest moment of that. What may have happened or not is given no return: that it
// did not happen is the same as that it happens after everything else, so the model does it wherever it is put, and the
// search puts it where it fits.
var model = porcupine.Model{
	Init: func() any { return state{} },
	Step: func(s, in, _ any) (bool, any) { return step(as[state](s), as[*input](in)) },
	Hash: func(s any) uint64 { return maphash.Comparable(hashSeed, as[state](s)) },
	DescribeOperation: func(in, _ any) string {
		o := as[*input](in)
		return fmt.Sprintf("%s(%s %d) -> %s %s %d", o.Kind, o.Value, o.Fence, o.Outcome, o.Got, max(o.Granted, o.Revision))
	},
	DescribeState: func(s any) string { return fmt.Sprintf("%+v", s) },
}

var hashSeed = maphash.MakeSeed()

// as is what porcupine hands back as it got it.
func as[T any](v any) T {
	t, _ := v.(T)
	return t
}

// step says whether the operation may have had its outcome in the state, and what the state is then.
func step(s state, o *input) (bool, state) {
	if o.Outcome == NotFound {
		return s.goneBy(o.ends), s.expired()
	}
	switch o.Kind {
	case Create:
		return s.create(o)
	case Read:
		return s.exists && o.saw(s), s.seen(o)
	case Save:
		return s.save(o)
	case Touch:
		if o.Outcome == OK {
			s.touched = true
			return s.exists, s.until(o.Call + o.Left)
		}
		s.touched = s.touched || s.exists
		return true, s
	case Destroy:
		// A call that was sent twice may have found nothing the second time because of the first.
		legal := o.Outcome == Unknown || o.Existed && s.exists || !o.Existed && (s.goneBy(o.ends) || o.Attempts > 1)
		return legal, s.gone()
	case Acquire, TryAcquire:
		return s.acquire(o)
	case Release:
		return s.release(o)
	}
	return false, s
}

// goneBy says whether there can be no session.
func (s state) goneBy(now int64) bool { return !s.exists || now >= s.ends }

// freeBy says whether nobody can hold the lock.
func (s state) freeBy(now int64) bool { return s.fence == 0 || now >= s.lockEnds }

// lostBy says whether a grant can be over.
func (s state) lostBy(fence uint64, now int64) bool { return s.fence != fence || now >= s.lockEnds }

func (s state) gone() state { return state{revision: s.revision, top: s.top} }

func (s state) expired() state {
	gone := s.gone()
	gone.orphan = max(s.fence, s.orphan)
	return gone
}

func (s state) free() state {
	s.fence, s.name, s.lockEnds = 0, "", 0
	return s
}

// until says that the session lives so long at least.
func (s state) until(end int64) state {
	s.ends = max(s.ends, end)
	return s
}

// written is the state after a write of the session.
func (s state) written(o *input) state {
	s.exists, s.value, s.orphan = true, o.Value, 0
	if o.Outcome == Unknown {
		s.ends = 0 // carried out late, its TTL still counts from when it was asked for, whatever else was saved meanwhile
	}
	s.ends = max(s.ends, o.Call+o.TTL)
	s.touched = false
	s.exact = o.Outcome == OK && o.Attempts <= 1 && o.TTL >= int64(shortTTL)
	if s.exact || o.Outcome == OK && o.Attempts <= 1 {
		s.revision = o.Revision
	} else {
		s.revision++
	}
	return s
}

// saw says whether what the operation read is what there is.
func (o *input) saw(s state) bool {
	return o.Got == s.value && s.matches(o.Revision)
}

// seen is the state after somebody saw its revision.
func (s state) seen(o *input) state {
	s.revision, s.touched = max(s.revision, o.Revision), false
	return s
}

// matches says whether the session can have the revision, and differs whether it can have another.
func (s state) matches(revision uint64) bool {
	return revision == s.revision || s.mayBeLater() && revision > s.revision
}
func (s state) differs(revision uint64) bool { return s.mayBeLater() || revision != s.revision }
func (s state) mayBeLater() bool             { return !s.exact || s.touched }

func (s state) create(o *input) (bool, state) {
	switch o.Outcome {
	case OK:
		return s.goneBy(o.ends) && o.Revision > s.revision, s.gone().written(o)
	case Exists:
		return s.exists, s
	case Unknown:
		if s.goneBy(o.ends) {
			return true, s.gone().written(o)
		}
		return true, s
	}
	return false, s
}

// mayWrite says whether a save's conditions can hold.
func (s state) mayWrite(o *input) bool {
	if !s.exists || o.Expected != 0 && !s.matches(o.Expected) {
		return false
	}
	if o.Fence != 0 {
		return s.fence == o.Fence
	}
	return s.freeBy(o.ends)
}

func (s state) save(o *input) (bool, state) {
	switch o.Outcome {
	case OK, Unknown:
		if !s.mayWrite(o) {
			return o.Outcome == Unknown, s
		}
		// The answer to a call that was sent again may tell a later revision, never an earlier one.
		if o.Outcome == OK && o.Revision <= s.revision {
			return false, s
		}
		if o.Fence == 0 || o.Releases {
			s = s.free()
		}
		return true, s.written(o)
	case LockLost:
		if s.fence != o.Fence {
			return s.exists, s
		}
		return s.exists && s.lostBy(o.Fence, o.ends), s.free()
	case Locked:
		return s.exists && (s.fence != 0 || o.ghost), s
	case Mismatch:
		return s.exists && o.Expected != 0 && s.differs(o.Expected), s
	}
	return false, s
}

func (s state) acquire(o *input) (bool, state) {
	switch o.Outcome {
	case OK:
		if !s.exists || o.Granted <= s.top || !s.freeBy(o.ends) || !o.saw(s) {
			return false, s
		}
		s = s.seen(o)
		s.fence, s.top, s.name, s.lockEnds = o.Granted, o.Granted, o.Holder, o.Deadline
		if o.Attached {
			s.lockEnds = o.Call
		}
		return true, s
	case Busy:
		return s.exists && (s.fence != 0 || o.ghost), s
	case AlreadyHeld:
		return s.exists && (s.fence != 0 && o.Holder != "" && s.name == o.Holder || o.ownGhost), s
	}
	return false, s
}

func (s state) release(o *input) (bool, state) {
	switch o.Outcome {
	case OK, Unknown:
		if s.exists && s.fence == o.Fence {
			return true, s.free()
		}
		if s.orphan == o.Fence {
			s.orphan = 0
			return true, s
		}
		// A release that was sent again is answered as done if the lock is not held any more, for whatever reason.
		return o.Outcome == Unknown || o.Attempts > 1, s
	case NotHeld:
		if s.exists && s.fence == o.Fence {
			return s.lostBy(o.Fence, o.ends) || s.goneBy(o.ends), s.free()
		}
		return true, s
	}
	return false, s
}

// linger is how long the entry of an acquire that failed may stay in the queue while nothing else is wrong: its lease, late as
// it may end.
const linger = 10 * time.Second

// prepare makes of a session's history what porcupine judges. Operations that say nothing about the state are left out.
func prepare(ops []Op, faults disturbances) []porcupine.Operation {
	type interval struct {
		from, to int64
		holder   string
		client   int
	}
	var ghosts []interval
	for i := range ops {
		o := &ops[i]
		if o.Kind != Acquire && o.Kind != TryAcquire {
			continue
		}
		to := o.Return
		// A call that was sent again may have its first entry made late, when the second is over. The node that began with it removes it.
		if o.Outcome != OK && o.Outcome != Busy && o.Outcome != Refused || o.Attempts > 1 {
			to = faults.after(o.Return, linger)
		}
		ghosts = append(ghosts, interval{o.Call, to, o.Holder, i})
	}
	var history []porcupine.Operation
	for i := range ops {
		o := &ops[i]
		if o.Outcome == Refused || o.Outcome == TimedOut || o.Outcome == Unexpected {
			continue
		}
		if o.Outcome == Unknown && (o.Kind == Read || o.Kind == Acquire || o.Kind == TryAcquire) {
			continue // it changes nothing, or is a ghost
		}
		in := &input{Op: o, ends: o.Return}
		if o.Outcome == Unknown {
			in.ends = never
		}
		for _, g := range ghosts {
			if g.client != i && g.from <= o.Return && g.to >= o.Call {
				in.ghost = true
				in.ownGhost = in.ownGhost || o.Holder != "" && g.holder == o.Holder
			}
		}
		history = append(history, porcupine.Operation{ClientId: o.Client, Input: in, Call: o.Call, Return: in.ends})
		if o.Kind == Destroy && o.Attempts > 1 && o.Outcome != Unknown {
			// A call that was sent again may have been carried out twice, and the first of them late. Ids are made anew only here.
			late := *o
			late.Outcome = Unknown
			history = append(history, porcupine.Operation{
				ClientId: o.Client, Input: &input{Op: &late, ends: never}, Call: o.Call, Return: never,
			})
		}
	}
	return history
}
