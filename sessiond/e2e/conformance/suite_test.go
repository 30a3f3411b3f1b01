//go:build unix

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Everything but a success is a fault, also what the suite itself would let pass.
func TestRead(t *testing.T) {
	dir := t.TempDir()
	for scenario, checks := range map[string]string{
		"good":    `[{"id":"a","status":"SUCCESS"},{"id":"b","status":"SUCCESS"},{"id":"c","status":"INFO"}]`,
		"failed":  `[{"id":"d","status":"SUCCESS"},{"id":"e","status":"FAILURE","errorMessage":"why"}]`,
		"warned":  `[{"id":"f","status":"WARNING","errorMessage":"should"}]`,
		"skipped": `[{"id":"g","status":"SKIPPED"}]`,
		"empty":   `[]`,
	} {
		if err := os.Mkdir(filepath.Join(dir, scenario), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, scenario, "checks.json"), []byte(checks), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, err := read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if r.scenarios != 5 || r.passed != 1 || r.checks != 6 || r.succeeded != 3 || r.warnings != 1 {
		t.Errorf("%+v", r)
	}
	all := strings.Join(r.faults, "\n")
	for _, fault := range []string{"FAILURE failed: e: why", "WARNING warned: f: should", "SKIPPED skipped: g", "empty: no checks"} {
		if !strings.Contains(all, fault) {
			t.Errorf("%q lacks %q", all, fault)
		}
	}
	if len(r.faults) != 4 {
		t.Errorf("faults: %q", all)
	}
}

// A word that is not understood must not leave out what was meant.
func TestBadArguments(t *testing.T) {
	for _, args := range [][]string{{"--configurations", "no-such"}, {"--revisions", "2024-11-05"}, {"argument"}, {"--no-such-flag"}} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), args, &stdout, &stderr); code != exitUsage || stderr.Len() == 0 {
			t.Errorf("%v: exit code %d, %q", args, code, stderr.String())
		}
	}
}
