package main

import (
	"bytes"
	"context"
	"errors"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// A wrong command line is answered with one line that says what is allowed, and exit code 2.
func TestBenchUsageErrors(t *testing.T) {
	for _, tt := range []struct {
		args []string
		env  []string
		want string
	}{
		{[]string{"--bogus"}, nil, "unknown flag --bogus: allowed are --bytes, --callers,"},
		{[]string{"more"}, nil, `unexpected argument "more"`},
		{[]string{"--callers", "few"}, nil, "--callers: must be a whole number"},
		{[]string{"--callers", "1025"}, nil, "--callers: must be 1 to 1024"},
		{[]string{"--callers", "2", "--sessions", "3"}, nil, "--sessions: must be 1 to the number of callers"},
		{[]string{"--bytes", "-1"}, nil, "--bytes: must be 0 to 1048576"},
		{[]string{"--duration", "11m"}, nil, "--duration: must be 1s to 10m0s"},
		{[]string{"--sessiond", "here"}, nil, `"here" is not host:port or unix:/path`},
		{nil, []string{"SESSIOND_BENCH_DURATION", "soon"}, `SESSIOND_BENCH_DURATION: invalid value "soon": must be a duration`},
	} {
		var stdout, stderr bytes.Buffer
		code := run(t.Context(), append([]string{"bench"}, tt.args...), env(tt.env...), &stdout, &stderr)
		if text := stderr.String(); code != exitUsage || !strings.Contains(text, tt.want) || strings.Count(text, "\n") != 1 || stdout.Len() > 0 {
			t.Errorf("%v: exit code %d, stderr %q, stdout %q", tt.args, code, text, stdout.String())
		}
	}
	var stdout bytes.Buffer
	if code := run(t.Context(), []string{"bench", "--help"}, env(), &stdout, &bytes.Buffer{}); code != exitOK || !strings.Contains(stdout.String(), "safe beside") {
		t.Errorf("help: exit code %d, %s", code, stdout.String())
	}
}

// benchOutput calls back for the first line of progress.
type benchOutput struct {
	mu       sync.Mutex
	text     strings.Builder
	progress func()
}

func (b *benchOutput) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text.Write(p)
	if b.progress != nil && strings.Contains(b.text.String(), "cycles/s") {
		b.progress()
		b.progress = nil
	}
	return len(p), nil
}

// It measures, says how long cycles take, leaves others' sessions alone and none of its own behind, also if it is stopped.
func TestBench(t *testing.T) {
	node := sessiondtest.Start(t, func(c *sessiond.Config) { c.Store = sessiond.StoreMemory })
	other, err := node.Client().Create(t.Context(), []byte("x"), client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		args []string
		stop bool // as Ctrl-C does, after the first line of progress
	}{
		{"to the end", []string{"--callers", "4", "--duration", "2s"}, false},
		{"contended", []string{"--callers", "4", "--sessions", "2", "--duration", "1s", "--bytes", "0"}, false},
		{"stopped", []string{"--callers", "4", "--duration", "10m"}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var stdout bytes.Buffer
			stderr := &benchOutput{}
			if tt.stop {
				stderr.progress = stop
			}
			args := append([]string{"bench", "--sessiond", node.Addr()}, tt.args...)
			if code := run(ctx, args, env(), &stdout, stderr); code != exitOK {
				t.Fatalf("exit code %d: %s", code, stderr.text.String())
			}
			for _, want := range []string{`^\d+ cycles in [\d.]+ s, \d+ a second; failed: 0\n`, `\np50 [\d.]+ ms .*  max [\d.]+ ms\n`, `up to +[\d.]+ ms +\d+  #`} {
				if !regexp.MustCompile(want).MatchString(stdout.String()) {
					t.Errorf("no %s in:\n%s", want, stdout.String())
				}
			}
			first := regexp.MustCompile(benchIDPrefix + `\w+-0`).FindString(stderr.text.String())
			if first == "" {
				t.Fatalf("it does not say what its sessions are called: %s", stderr.text.String())
			}
			for _, n := range []string{"0", "1", "2", "3"} {
				id := strings.TrimSuffix(first, "0") + n
				if _, err := node.Client().Read(t.Context(), id); !errors.Is(err, client.ErrSessionNotFound) {
					t.Errorf("%s is left behind: %v", id, err)
				}
			}
		})
	}
	if s, err := node.Client().Read(t.Context(), other.ID); err != nil || string(s.Data) != "x" || s.Revision != other.Revision {
		t.Errorf("somebody else's session: %+v, %v", s, err)
	}
}

// A cluster that cannot be reached is said to be so, with exit code 1.
func TestBenchWithoutCluster(t *testing.T) {
	addrs, err := sessiondtest.FreeAddrs(1)
	if err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	if code := run(t.Context(), []string{"bench", "--sessiond", addrs[0]}, env(), &stdout, &stderr); code != exitError || stdout.Len() > 0 {
		t.Errorf("exit code %d: %s %s", code, stdout.String(), stderr.String())
	}
}

// A quantile is at most a twentieth too high, whatever the size.
func TestBenchQuantiles(t *testing.T) {
	for _, d := range []time.Duration{time.Microsecond, 17 * time.Microsecond, time.Millisecond, 333 * time.Millisecond, time.Hour} {
		m := &measurement{}
		m.add(time.Nanosecond)
		for range 98 {
			m.add(d)
		}
		m.add(12 * time.Hour)
		for _, q := range []float64{0.5, 0.99} {
			if got := m.counts().quantile(q); got < d*999/1000 || got > d*105/100 {
				t.Errorf("%s: quantile %v is %s", d, q, got)
			}
		}
	}
}
