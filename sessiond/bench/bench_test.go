//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A quantile is one of the measured values, and the median of rounds ignores what could not be computed.
func TestStatistics(t *testing.T) {
	var list []time.Duration
	for i := range 100 {
		list = append(list, time.Duration(i+1))
	}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 50, 0.99: 99, 1: 100} {
		if got := quantile(list, q); got != want {
			t.Errorf("quantile %v: %d, want %d", q, got, want)
		}
	}
	if got := median([]float64{3, math.NaN(), 1, 2, 10}); got != 2.5 {
		t.Errorf("median %v", got)
	}
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("median of nothing: %v", got)
	}
}

// A lock for tests: first come, first served, or whoever is quicker.
func fakeContestant(name string) *contestant {
	var mu sync.Mutex
	return &contestant{name: name, locks: true, cycle: func(_ context.Context, _, _ int, under func()) error {
		mu.Lock()
		defer mu.Unlock()
		under()
		<-time.After(time.Millisecond)
		return nil
	}}
}

func testBench(t *testing.T) *bench {
	t.Helper()
	c := &config{rounds: 3, settle: 5 * time.Millisecond, measure: 50 * time.Millisecond, bursts: 1, out: t.TempDir()}
	return &bench{config: c, report: newReport(c), progress: io.Discard}
}

// Contestants take turns, one that fails does not stop the others, and the report says what came of each in all its forms.
func TestTurnsAndReport(t *testing.T) {
	b := testBench(t)
	broken := &contestant{name: nameSeparate, locks: true, cycle: func(context.Context, int, int, func()) error { return errors.New("out of order") }}
	field := []*contestant{fakeContestant(namePut), fakeContestant(nameEmbedded), broken}
	w := work{
		name: "contended-16", callers: 4, unit: "hand-overs/s", title: "test",
		can: func(c *contestant) bool { return c.locks }, run: contend,
	}
	if err := b.takeTurns(t.Context(), field, w); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := b.report.write(b.out, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"failed: out of order", nameEmbedded, "hand-overs, 16 callers, sessiond, embedded etcd: of sequential Puts"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
	ours := b.report.find(w.name, nameEmbedded)
	if len(ours.Rounds) != 3 || ours.Median.Rate < 100 || ours.Median.HandOver <= 0 {
		t.Errorf("%+v", ours)
	}
	raw, err := os.ReadFile(filepath.Join(b.out, "results.json"))
	if err != nil {
		t.Fatal(err)
	}
	var back report
	if err := json.Unmarshal(raw, &back); err != nil || len(back.Works) != 1 || len(back.Targets) != 1 {
		t.Errorf("%v: %s", err, raw)
	}
	if plots, err := filepath.Glob(filepath.Join(b.out, "*.svg")); err != nil || len(plots) != 2 {
		t.Errorf("plots %v, %v", plots, err)
	}
}

// Two holders at once are found out, and so is a caller who is served before one that came earlier.
func TestQueue(t *testing.T) {
	q := &queue{waiting: map[int]int64{}}
	for caller := range 3 {
		q.arrive(caller)
	}
	q.hold(2) // before 0 and 1
	q.hold(0) // while 2 holds
	q.free(0)
	q.hold(1)
	q.free(1)
	if q.worst != 2 || q.overtaken != 2 || q.overlaps != 1 || len(q.handOvers) != 1 {
		t.Errorf("%+v", q)
	}
}

// What was not measured is not judged, and what was is compared as it is printed.
func TestTargets(t *testing.T) {
	r := newReport(&config{})
	if got := r.judge(); len(got) != 0 {
		t.Errorf("judged without a measurement: %+v", got)
	}
	r.add(work{name: "cycle-1"}, nameEmbedded, 0, round{Rate: 1, CommitsPerOp: 2.004})
	r.add(work{name: "cycle-128"}, nameEmbedded, 0, round{Rate: 700, CommitsPerOp: 0.21})
	r.add(work{name: "cycle-128"}, namePut, 0, round{Rate: 1000})
	want := map[string]bool{
		nameEmbedded + ": commits a cycle, 1 caller":    true,
		nameEmbedded + ": commits a cycle, 128 callers": false,
		"cycles, 128 callers, embedded: of raw Puts":    false,
	}
	got := r.judge()
	if len(got) != len(want) {
		t.Errorf("%+v", got)
	}
	for _, x := range got {
		if reached, ok := want[x.What]; !ok || reached != x.Reached {
			t.Errorf("%+v", x)
		}
	}
}

// A wrong command line is answered with what is allowed.
func TestFlags(t *testing.T) {
	for _, args := range [][]string{{"--only", "nothing"}, {"more"}, {"--bogus"}} {
		var stderr bytes.Buffer
		if code := run(t.Context(), args, io.Discard, &stderr); code != exitUsage || stderr.Len() == 0 {
			t.Errorf("%v: exit code %d, %s", args, code, stderr.String())
		}
	}
}
