//go:build unix

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// A report is what is written as JSON.
type report struct {
	Machine   machine
	Quick     bool
	Seconds   float64
	IdleCores float64 // what all processes together use while nobody asks for anything
	// What everybody else on the machine used while it was measured: with more than a little of it, nothing here means much.
	OthersCores float64
	Works       []*workReport
	Figures     []*figures `json:",omitempty"`
	Targets     []target
	Failures    []string `json:",omitempty"` // of whole sections

	config *config
}

// A workReport is what came of one work.
type workReport struct {
	Name, Title, Unit string
	Base              string // whose rate the others are compared with
	Callers           int
	Contestants       []*contestantReport
}

// A contestantReport has the rounds of a contestant and their medians.
type contestantReport struct {
	Name   string
	Failed string `json:",omitempty"`
	Rounds []round
	Median round
}

// A round is one measurement. Times are in microseconds.
type round struct {
	Rate                float64
	P50, P99, Max       float64
	Samples             int
	CommitsPerOp        float64
	OwnCPU, ServersCPU  float64 // per operation
	MemoryMiB           float64
	HandOver, Overtaken float64 `json:",omitempty"`
	WorstOvertaken      int64   `json:",omitempty"`
	MaxOverMedian       float64 `json:",omitempty"`
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

func newRound(out outcome) round {
	return round{
		Rate: out.rate, P50: micros(quantile(out.latencies, 0.5)), P99: micros(quantile(out.latencies, 0.99)), Max: micros(quantile(out.latencies, 1)),
		Samples: len(out.latencies), CommitsPerOp: out.use.commits, OwnCPU: micros(out.use.own), ServersCPU: micros(out.use.servers),
		MemoryMiB: float64(out.rss) / (1 << 20),
	}
}

// String is a line of progress.
func (r round) String() string {
	return fmt.Sprintf("%9.1f/s  p50 %9s  p99 %9s  commits %.2f", r.Rate, inMillis(r.P50), inMillis(r.P99), r.CommitsPerOp)
}

func inMillis(micros float64) string { return fmt.Sprintf("%.2f ms", micros/1e3) }

// medianOf takes each figure's median over the rounds.
func medianOf(rounds []round) round {
	of := func(figure func(round) float64) float64 {
		var list []float64
		for _, r := range rounds {
			list = append(list, figure(r))
		}
		return median(list)
	}
	m := round{
		Rate: of(func(r round) float64 { return r.Rate }), P50: of(func(r round) float64 { return r.P50 }),
		P99: of(func(r round) float64 { return r.P99 }), CommitsPerOp: of(func(r round) float64 { return r.CommitsPerOp }),
		OwnCPU: of(func(r round) float64 { return r.OwnCPU }), ServersCPU: of(func(r round) float64 { return r.ServersCPU }),
		MemoryMiB: of(func(r round) float64 { return r.MemoryMiB }), HandOver: of(func(r round) float64 { return r.HandOver }),
		Overtaken: of(func(r round) float64 { return r.Overtaken }), MaxOverMedian: of(func(r round) float64 { return r.MaxOverMedian }),
	}
	for _, r := range rounds {
		m.Max, m.WorstOvertaken, m.Samples = max(m.Max, r.Max), max(m.WorstOvertaken, r.WorstOvertaken), m.Samples+r.Samples
	}
	return m
}

func newReport(c *config) *report {
	return &report{Machine: describeMachine(), Quick: c.quick, config: c}
}

func (r *report) of(w work, name string) *contestantReport {
	var wr *workReport
	for _, have := range r.Works {
		if have.Name == w.name {
			wr = have
		}
	}
	if wr == nil {
		wr = &workReport{Name: w.name, Title: w.title, Unit: w.unit, Base: cmp.Or(w.base, namePut), Callers: w.callers}
		r.Works = append(r.Works, wr)
	}
	for _, have := range wr.Contestants {
		if have.Name == name {
			return have
		}
	}
	c := &contestantReport{Name: name}
	wr.Contestants = append(wr.Contestants, c)
	return c
}

func (r *report) add(w work, name string, _ int, result round) {
	c := r.of(w, name)
	c.Rounds = append(c.Rounds, result)
	c.Median = medianOf(c.Rounds)
}

func (r *report) fail(w work, name string, err error) { r.of(w, name).Failed = err.Error() }

// find returns a contestant's part of a work, or nil.
func (r *report) find(workName, contestant string) *contestantReport {
	for _, w := range r.Works {
		if w.Name != workName {
			continue
		}
		for _, c := range w.Contestants {
			if c.Name == contestant && c.Failed == "" && len(c.Rounds) > 0 {
				return c
			}
		}
	}
	return nil
}

// ratio is the median of the rounds' ratios of a figure: what two contestants did right after each other.
func ratio(a, b *contestantReport, figure func(round) float64) float64 {
	if a == nil || b == nil {
		return math.NaN()
	}
	var list []float64
	for i := range min(len(a.Rounds), len(b.Rounds)) {
		list = append(list, figure(a.Rounds[i])/figure(b.Rounds[i]))
	}
	return median(list)
}

func rate(r round) float64 { return r.Rate }
func p50(r round) float64  { return r.P50 }

// write writes the report as text to a writer and into a folder, as JSON, and as plots.
func (r *report) write(dir string, stdout io.Writer) error {
	r.Targets = r.judge()
	var text strings.Builder
	r.text(&text)
	if _, err := io.WriteString(stdout, text.String()); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "results.txt"), []byte(text.String()), 0o600); err != nil {
		return err
	}
	b, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "results.json"), append(b, '\n'), 0o600); err != nil {
		return err
	}
	if err := r.plot(dir); err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "\nwritten to %s: results.txt, results.json and plots (*.svg); %.0f s\n", dir, r.Seconds)
	return err
}

func (r *report) text(out io.Writer) {
	fmt.Fprintf(out, "%s\n", r.Machine)
	fmt.Fprintf(out, "others on this machine used %.2f of its cores meanwhile; all contestants at rest %.2f\n", r.OthersCores, r.IdleCores)
	for _, w := range r.Works {
		contended := strings.HasPrefix(w.Name, "contended")
		fmt.Fprintf(out, "\n%s\n\n", w.Title)
		t := table{head: []string{"", w.Unit, "of " + short(w.Base), "p50", "p99", "max", "commits", "CPU servers", "client", "memory"}}
		if contended {
			t.head = append(t.head, "hand-over", "overtaken", "at most", "max/median")
		}
		for _, c := range w.Contestants {
			if c.Failed != "" {
				t.row(c.Name, "failed: "+c.Failed)
				continue
			}
			m := c.Median
			base := r.find(w.Name, w.Base)
			if w.Base == namePut && (c.Name == namePut3 || c.Name == nameCluster) {
				base = r.find(w.Name, namePut3)
			}
			cells := []string{
				c.Name, number(m.Rate), number(ratio(c, base, rate)), inMillis(m.P50), inMillis(m.P99), inMillis(m.Max), number(m.CommitsPerOp),
				fmt.Sprintf("%.0f µs", m.ServersCPU), fmt.Sprintf("%.0f µs", m.OwnCPU), fmt.Sprintf("%.0f MiB", m.MemoryMiB),
			}
			if contended && c.Name != namePut && c.Name != namePut3 {
				cells = append(cells, inMillis(m.HandOver), number(m.Overtaken), fmt.Sprint(m.WorstOvertaken), number(m.MaxOverMedian))
			}
			t.row(cells...)
		}
		t.write(out)
	}
	for _, f := range r.Figures {
		f.text(out)
	}
	r.textOfTargets(out)
	for _, f := range r.Failures {
		fmt.Fprintf(out, "\nFAILED: %s\n", f)
	}
}

// short is the name of a base as the head of a column.
func short(base string) string {
	switch base {
	case namePut:
		return "Put"
	case nameSDK:
		return "SDK"
	default:
		return "1st"
	}
}

// number has three digits or so; what is not there is a dash.
func number(f float64) string {
	switch {
	case math.IsNaN(f):
		return "–"
	case math.Abs(f) >= 100:
		return fmt.Sprintf("%.0f", f)
	case math.Abs(f) >= 10:
		return fmt.Sprintf("%.1f", f)
	default:
		return fmt.Sprintf("%.2f", f)
	}
}
