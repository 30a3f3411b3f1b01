//go:build unix

package main

import (
	"fmt"
	"io"
	"math"
)

// A target is a figure with a bound on it.
type target struct {
	What    string
	Value   float64
	Bound   float64
	AtMost  bool // else at least
	Reached bool
	Unit    string `json:",omitempty"`
}

// judge compares what was measured with what is wanted. What was not measured does not appear.
func (r *report) judge() []target {
	var list []target
	add := func(t target) {
		if math.IsNaN(t.Value) {
			return
		}
		// As exact as it is printed: a lease for a thousand cycles is not to look like a third commit.
		v := math.Round(t.Value*100) / 100
		t.Reached = t.AtMost && v <= t.Bound || !t.AtMost && v >= t.Bound
		list = append(list, t)
	}
	atMost := func(what string, value, bound float64, unit string) {
		add(target{What: what, Value: value, Bound: bound, AtMost: true, Unit: unit})
	}
	atLeast := func(what string, value, bound float64, unit string) {
		add(target{What: what, Value: value, Bound: bound, Unit: unit})
	}
	ours := []string{nameEmbedded, nameSeparate, nameCluster}
	for _, name := range ours {
		atMost(name+": commits a cycle, 1 caller", r.value("cycle-1", name, commits), 2, "")
	}
	for _, name := range ours {
		atMost(name+": commits a cycle, 128 callers", r.value("cycle-128", name, commits), 0.2, "")
	}
	for _, name := range ours {
		atMost(name+": commits a read, 128 callers", r.value("read-128", name, commits), 0, "")
	}
	for _, name := range ours {
		atMost(name+": commits a refused try", r.value("refused", name, commits), 0, "")
	}
	cycles := func(name string) *contestantReport { return r.find("cycle-128", name) }
	atLeast("cycles, 128 callers, embedded: of raw Puts", ratio(cycles(nameEmbedded), cycles(namePut), rate), 0.75, "")
	atLeast("cycles, 128 callers, etcd apart: of raw Puts", ratio(cycles(nameSeparate), cycles(namePut), rate), 0.6, "")
	for _, name := range []string{nameEmbedded, nameSeparate} {
		fastest := math.Inf(1)
		for _, recipe := range []string{nameEtcdNew, nameEtcdLong, nameV3Lock} {
			if f := ratio(cycles(name), cycles(recipe), rate); !math.IsNaN(f) {
				fastest = min(fastest, f)
			}
		}
		if !math.IsInf(fastest, 1) {
			atLeast("cycles, 128 callers, "+name+": of etcd's fastest lock recipe", fastest, 2.5, "")
		}
	}
	atLeast("cycles, 128 callers, embedded: of half the empty gRPC calls", 2*ratio(cycles(nameEmbedded), cycles(nameEmpty), rate), 0.6, "")
	alone := func(name string) *contestantReport { return r.find("cycle-1", name) }
	atMost("cycle, 1 caller, embedded: raw Puts (p50)", ratio(alone(nameEmbedded), alone(namePut), p50), 2.3, "")
	atMost("cycle, 1 caller, etcd apart: raw Puts (p50)", ratio(alone(nameSeparate), alone(namePut), p50), 2.8, "")
	for _, callers := range []int{16, 64} {
		w := fmt.Sprintf("contended-%d", callers)
		for _, name := range []string{nameEmbedded, nameSeparate} {
			atLeast(fmt.Sprintf("hand-overs, %d callers, %s: of sequential Puts", callers, name),
				ratio(r.find(w, name), r.find(w, namePut), rate), 0.75, "")
		}
	}
	for _, name := range ours {
		atMost("burst of 16 calls of 5 ms, "+name+": all served", r.value("burst", name, p50)/1e3, 115, "ms")
	}
	atMost("publish to delivery across nodes: raw Puts of the same etcd (p50)",
		ratio(r.find("message", nameCluster), r.find("put", namePut3), p50), 1.5, "")
	for _, callers := range []int{1, 16} {
		w := fmt.Sprintf("tool-call-%d", callers)
		atMost(fmt.Sprintf("tools/call with a session, no lock, %s: processor time more than in memory", people(callers)),
			(r.value(w, nameSessions, serversCPU)-r.value(w, nameSDK, serversCPU))/1e3, 1, "ms")
	}
	for _, f := range r.Figures {
		for _, x := range f.Figures {
			if x.Bound != nil {
				atMost(x.What, x.Value, *x.Bound, x.Unit)
			}
		}
	}
	return list
}

func commits(r round) float64    { return r.CommitsPerOp }
func serversCPU(r round) float64 { return r.ServersCPU }

// value is a contestant's median, or not a number.
func (r *report) value(work, name string, figure func(round) float64) float64 {
	if c := r.find(work, name); c != nil {
		return figure(c.Median)
	}
	return math.NaN()
}

func (r *report) textOfTargets(out io.Writer) {
	if len(r.Targets) == 0 {
		return
	}
	t := table{head: []string{"targets", "measured", "wanted", "", "by"}}
	for _, x := range r.Targets {
		want, by := "at least ", x.Value/x.Bound-1
		if x.AtMost {
			want, by = "at most ", 1-x.Value/x.Bound
		}
		verdict := "reached"
		if !x.Reached {
			verdict = "MISSED"
		}
		margin := fmt.Sprintf("%+.0f %%", 100*by)
		if x.Bound == 0 {
			margin = ""
		}
		t.row(x.What, number(x.Value)+unit(x.Unit), want+number(x.Bound)+unit(x.Unit), verdict, margin)
	}
	fmt.Fprintln(out)
	t.write(out)
}

func unit(u string) string {
	if u == "" {
		return ""
	}
	return " " + u
}
