//go:build unix

// Command chaos makes faults in a cluster of real processes, from a seed, and judges what its clients saw. See package chaos.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/sessiond/sessiond/sessiond/chaos"
)

// Exit codes.
const (
	exitViolated = 1
	exitUsage    = 2
	exitFailed   = 3
	exitTooFew   = 4
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// After the first signal the next one ends the run at once (and on Linux its children with it).
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run is the program: 0 if all is well, 1 if a promise was broken, 2 if the command line is wrong, 3 if the run itself
// failed, 4 if no promise was broken but too few operations were answered for the run to count.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cfg := chaos.Config{Out: stdout}
	var faults, history string
	flags := flag.NewFlagSet("chaos", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Uint64Var(&cfg.Seed, "seed", 0, "`number` that decides what happens; 0: a random one, which is printed")
	flags.DurationVar(&cfg.Duration, "duration", 3*time.Minute, "how `long` to make faults")
	flags.StringVar(&faults, "faults", "", "`kinds` of faults, separated by commas; all if empty: "+strings.Join(chaos.Kinds(true), ", "))
	flags.BoolVar(&cfg.FrontEnds, "front-ends", false, "add front-ends and MCP clients of them, and their faults")
	flags.StringVar(&cfg.Dir, "dir", "", "`folder` for logs, data and histories, empty or to be made, kept at the end (default: a temporary one, kept if a promise was broken)")
	flags.StringVar(&history, "explain", "", "judge a saved history (`file`) again, say where it goes wrong, and do nothing else")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return exitUsage
	case flags.NArg() > 0:
		fmt.Fprintf(stderr, "chaos: unexpected argument %q\n", flags.Arg(0))
		return exitUsage
	}
	if cfg.Duration <= 0 {
		fmt.Fprintf(stderr, "chaos: --duration is %v, want more than 0\n", cfg.Duration)
		return exitUsage
	}
	if history != "" {
		return explain(history, stdout, stderr)
	}
	if cfg.Seed == 0 {
		cfg.Seed = rand.Uint64()>>32 + 1
	}
	if faults != "" {
		cfg.Faults = strings.Split(faults, ",")
	}
	kept := cfg.Dir != ""
	// The members would find the cluster of an earlier run there, and wait for it.
	if entries, _ := os.ReadDir(cfg.Dir); kept && len(entries) > 0 {
		fmt.Fprintf(stderr, "chaos: --dir %s is not empty, want a folder that is empty or is to be made\n", cfg.Dir)
		return exitUsage
	}
	if !kept {
		dir, err := os.MkdirTemp("", "sessiond-chaos-")
		if err != nil {
			fmt.Fprintln(stderr, "chaos:", err)
			return exitFailed
		}
		cfg.Dir = dir
	}
	report, err := chaos.Run(ctx, cfg)
	if report != nil {
		report.Write(stdout)
	}
	if err != nil {
		fmt.Fprintln(stderr, "chaos:", err)
		removed := !kept && os.Remove(cfg.Dir) == nil // unless it is not empty
		switch {
		case errors.Is(err, chaos.ErrNoFault):
			return exitUsage
		case !removed:
			fmt.Fprintln(stderr, "logs are in", cfg.Dir)
		}
		return exitFailed
	}
	switch {
	case len(report.Violations) > 0:
		fmt.Fprintf(stdout, "histories and logs are in %s; repeat with --seed %d\n", cfg.Dir, cfg.Seed)
		return exitViolated
	case !report.Valid():
		fmt.Fprintf(stdout, "logs are in %s; repeat with --seed %d\n", cfg.Dir, cfg.Seed)
		return exitTooFew
	}
	if !kept {
		if err := os.RemoveAll(cfg.Dir); err != nil {
			fmt.Fprintln(stderr, "chaos:", err)
		}
	}
	return 0
}

func explain(history string, stdout, stderr io.Writer) int {
	file, err := os.Open(history)
	if err == nil {
		err = errors.Join(chaos.Explain(stdout, file), file.Close())
	}
	if err != nil {
		fmt.Fprintln(stderr, "chaos:", err)
		return exitFailed
	}
	return 0
}
