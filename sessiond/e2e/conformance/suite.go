//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// suite is the npm package, installed.
type suite struct {
	dir string
}

const (
	// folder is where package.json is, from the root of the repository, where make runs this.
	folder = "sessiond/e2e/conformance"
	// limit is how long a run may take: many times what it does.
	limit = 3 * time.Minute
)

// newSuite installs the suite if it is not there yet.
func newSuite(ctx context.Context, stdout io.Writer) (*suite, error) {
	dir, err := filepath.Abs(folder)
	if err != nil {
		return nil, err
	}
	lock, err := os.Stat(filepath.Join(dir, "package-lock.json"))
	if err != nil {
		return nil, fmt.Errorf("%w (run this in the repository's root, as make does)", err)
	}
	// npm writes this file last.
	if done, err := os.Stat(filepath.Join(dir, "node_modules/.package-lock.json")); err == nil && !done.ModTime().Before(lock.ModTime()) {
		return &suite{dir}, nil
	}
	fmt.Fprintln(stdout, "npm ci in", folder, "(once)")
	cmd := exec.CommandContext(ctx, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("npm ci in %s (it needs Node 20.6 or newer with npm): %w\n%s", folder, err, out)
	}
	return &suite{dir}, nil
}

// run runs the suite, whose results go to a new folder.
func (s *suite) run(ctx context.Context, url, revision, results string) (result, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := os.MkdirAll(results, 0o750); err != nil {
		return result{}, err
	}
	// With a list of what may fail, an empty one, what the suite calls a warning fails too.
	cmd := exec.CommandContext(ctx, "node", "--import", "./node20.mjs", "node_modules/@modelcontextprotocol/conformance/dist/index.js",
		"server", "--url", url, "--suite", "all", "--spec-version", revision, "--expected-failures", "none.yaml", "--output-dir", results)
	cmd.Dir = s.dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if werr := os.WriteFile(filepath.Join(results, "output.txt"), out.Bytes(), 0o600); werr != nil {
		return result{}, werr
	}
	if ctx.Err() != nil {
		return result{}, context.Cause(ctx)
	}
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		return result{}, err
	}
	r, rerr := read(results)
	if rerr != nil {
		return result{}, rerr
	}
	// Whatever made it fail should be among the checks; should it not, then this is it.
	if err != nil && len(r.faults) == 0 {
		r.faults = append(r.faults, fmt.Sprintf("the suite says %v: %s", err, tail(out.Bytes())))
	}
	return r, nil
}

func tail(b []byte) []byte {
	const most = 2 << 10
	return bytes.TrimSpace(b[max(0, len(b)-most):])
}

// A result is what one run of the suite found.
type result struct {
	scenarios, passed int
	checks, succeeded int // without those that only inform
	warnings          int
	faults            []string
}

func (r *result) add(o result) {
	r.scenarios += o.scenarios
	r.passed += o.passed
	r.checks += o.checks
	r.succeeded += o.succeeded
	r.warnings += o.warnings
	r.faults = append(r.faults, o.faults...)
}

// What the suite says of a check.
const (
	success = "SUCCESS"
	warning = "WARNING"
	info    = "INFO"
)

// read reads what the suite wrote about each scenario.
func read(results string) (result, error) {
	files, err := filepath.Glob(filepath.Join(results, "*", "checks.json"))
	if err != nil {
		return result{}, err
	}
	var r result
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return result{}, err
		}
		var checks []struct {
			ID           string `json:"id"`
			Status       string `json:"status"`
			ErrorMessage string `json:"errorMessage"`
		}
		if err := json.Unmarshal(data, &checks); err != nil {
			return result{}, fmt.Errorf("%s: %w", file, err)
		}
		scenario := filepath.Base(filepath.Dir(file))
		if len(checks) == 0 {
			r.faults = append(r.faults, scenario+": no checks")
		}
		before := len(r.faults)
		for _, c := range checks {
			switch c.Status {
			case info:
				continue
			case success:
				r.succeeded++
			case warning:
				r.warnings++
			}
			r.checks++
			if c.Status != success {
				r.faults = append(r.faults, fmt.Sprintf("%s %s: %s: %s", c.Status, scenario, c.ID, c.ErrorMessage))
			}
		}
		r.scenarios++
		if len(r.faults) == before && len(checks) > 0 {
			r.passed++
		}
	}
	return r, nil
}
