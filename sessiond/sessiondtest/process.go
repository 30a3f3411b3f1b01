//go:build unix

package sessiondtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"
)

const (
	defaultStartTimeout = 30 * time.Second
	defaultStopGrace    = 10 * time.Second
	probeTimeout        = 2 * time.Second
	pauseTimeout        = 5 * time.Second
	errorTail           = 2 << 10
)

// A Command says how to run a process.
type Command struct {
	// Name tells the process from others in messages: "etcd-1".
	Name string
	// Path is the program.
	Path string
	// Args are its arguments, without the program's name.
	Args []string
	// Env is added to this process's environment.
	Env []string
	// Log is the file to which its output is appended. Empty: the output is thrown away.
	Log string
	// Ready tells whether the process can do its work; it is called again and again until it returns nil. Its context
	// ends after a few seconds. Nil: the process is ready once it runs.
	Ready func(context.Context) error
	// StartTimeout bounds the wait for Ready. Zero: 30 s.
	StartTimeout time.Duration
	// StopGrace is how long Terminate waits before it kills. Zero: 10 s.
	StopGrace time.Duration
}

// A Process is a child process that can be stopped and started again with the same command.
//
// Its methods may be called concurrently; of two that start or stop it, the second waits for the first.
type Process struct {
	cmd Command

	step sync.Mutex // held while the process is started or stopped

	mu  sync.Mutex
	run *run
}

// A run is the time from one start of a process to its end.
type run struct {
	proc *os.Process
	done chan struct{}
	// state is set before done is closed.
	state *os.ProcessState
	// asked is set under Process.mu once somebody has told the process to stop.
	asked bool
}

// Launch starts a process and waits until it is ready. If it ends before that, or is not ready in time, it is killed and
// the error has the end of its output.
func Launch(ctx context.Context, cmd Command) (*Process, error) {
	p := &Process{cmd: cmd}
	p.step.Lock()
	defer p.step.Unlock()
	if err := p.start(ctx); err != nil {
		return nil, err
	}
	return p, nil
}

// Restart starts the process again after it has ended, with the same command, and waits until it is ready.
func (p *Process) Restart(ctx context.Context) error {
	p.step.Lock()
	defer p.step.Unlock()
	if p.Running() {
		return fmt.Errorf("%s: already running", p.cmd.Name)
	}
	return p.start(ctx)
}

func (p *Process) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, or(p.cmd.StartTimeout, defaultStartTimeout))
	defer cancel()
	logStart := fileSize(p.cmd.Log)
	r, err := p.spawn()
	if err != nil {
		return fmt.Errorf("%s: %w", p.cmd.Name, err)
	}
	p.mu.Lock()
	p.run = r
	p.mu.Unlock()
	if p.cmd.Ready == nil {
		return nil
	}
	err = Poll(ctx, func(ctx context.Context) error {
		select {
		case <-r.done:
			return Final(fmt.Errorf("ended before it was ready: %s", r.state))
		default:
		}
		probe, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		return p.cmd.Ready(probe)
	})
	if err != nil {
		_ = p.kill()
		logStart = max(logStart, fileSize(p.cmd.Log)-errorTail)
		return fmt.Errorf("%s: not ready: %w%s", p.cmd.Name, err, outputSince(p.cmd.Log, logStart))
	}
	return nil
}

func (p *Process) spawn() (*run, error) {
	out, err := openLog(p.cmd.Log)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(p.cmd.Path, p.cmd.Args...)
	cmd.Env = append(os.Environ(), p.cmd.Env...)
	cmd.SysProcAttr = sysProcAttr()
	// A file, not a pipe: nothing has to be copied, and Wait never waits for a grandchild that kept the pipe.
	cmd.Stdout, cmd.Stderr = out, out
	r := &run{done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// The kernel sends the death signal when the *thread* that started the child ends, so this one stays.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		_ = out.Close() // the child has its own
		if err == nil {
			r.proc = cmd.Process
		}
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait() // the state says it all
		r.state = cmd.ProcessState
		close(r.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return r, nil
}

// Name is the name that the command gave.
func (p *Process) Name() string { return p.cmd.Name }

// Log is the file that has the output of all its runs, or empty.
func (p *Process) Log() string { return p.cmd.Log }

// Pid is the process id of the present or last run.
func (p *Process) Pid() int { return p.current().proc.Pid }

// Done is closed when the present run ends. After a Restart it is another channel.
func (p *Process) Done() <-chan struct{} { return p.current().done }

// Running tells whether the process runs (it may be paused).
func (p *Process) Running() bool {
	select {
	case <-p.Done():
		return false
	default:
		return true
	}
}

// Exit says how the last run ended, and whether somebody here had told it to stop. The state is nil while it runs.
func (p *Process) Exit() (state *os.ProcessState, asked bool) {
	r := p.current()
	select {
	case <-r.done:
	default:
		return nil, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return r.state, r.asked
}

func (p *Process) current() *run {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run
}

// Kill ends the process at once (SIGKILL) and returns when it has ended.
func (p *Process) Kill() error {
	p.step.Lock()
	defer p.step.Unlock()
	return p.kill()
}

// Terminate asks the process to stop (SIGTERM) and returns when it has ended. One that does not stop within its grace
// period or before ctx ends is killed, and that is an error. A process that has ended already is none.
func (p *Process) Terminate(ctx context.Context) error {
	p.step.Lock()
	defer p.step.Unlock()
	r := p.current()
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if err := p.Continue(); err != nil { // a paused process acts on nothing but SIGKILL
		return err
	}
	grace := time.NewTimer(or(p.cmd.StopGrace, defaultStopGrace))
	defer grace.Stop()
	select {
	case <-r.done:
		return nil
	case <-ctx.Done():
	case <-grace.C:
	}
	return errors.Join(fmt.Errorf("%s: did not stop in time and was killed", p.cmd.Name), p.kill())
}

// Pause stops the process without ending it (SIGSTOP): its connections stay open and nothing answers. On Linux it returns
// when the last of its threads has stopped; elsewhere a little earlier.
func (p *Process) Pause() error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), pauseTimeout)
	defer cancel()
	return Poll(ctx, func(context.Context) error {
		if p.Running() && !stopped(p.Pid()) {
			return fmt.Errorf("%s: not stopped yet", p.cmd.Name)
		}
		return nil
	})
}

// Continue lets a paused process go on (SIGCONT).
func (p *Process) Continue() error { return p.Signal(syscall.SIGCONT) }

// Signal sends the process a signal; to one that has ended it does nothing. SIGINT, SIGTERM and SIGKILL tell it to stop.
func (p *Process) Signal(sig os.Signal) error {
	switch sig {
	case syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL:
		p.ask()
	}
	if err := p.current().proc.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("%s: signal %v: %w", p.cmd.Name, sig, err)
	}
	return nil
}

func (p *Process) ask() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.run.done: // it ended by itself
	default:
		p.run.asked = true
	}
}

func (p *Process) kill() error {
	r := p.current()
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-r.done
	return nil
}

// Tail is the end of the process's output, at most n bytes.
func (p *Process) Tail(n int64) string {
	return outputSince(p.cmd.Log, max(0, fileSize(p.cmd.Log)-n))
}

func openLog(path string) (*os.File, error) {
	if path == "" {
		return os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, err
	}
	return os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
}

func fileSize(path string) int64 {
	if fi, err := os.Stat(path); err == nil {
		return fi.Size()
	}
	return 0
}

// outputSince gives what a log file has from an offset on, as an appendix to a message.
func outputSince(path string, from int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	if _, err := f.Seek(from, io.SeekStart); err != nil {
		return ""
	}
	b, err := io.ReadAll(f)
	if b = bytes.TrimSpace(b); err != nil || len(b) == 0 {
		return ""
	}
	return "\n" + path + ":\n" + string(b)
}

func or(d, zero time.Duration) time.Duration {
	if d == 0 {
		return zero
	}
	return d
}
