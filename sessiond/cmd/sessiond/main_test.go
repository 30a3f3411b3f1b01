package main

import (
	"bytes"
	"context"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

func env(pairs ...string) func(string) string {
	return func(name string) string {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1]
			}
		}
		return ""
	}
}

// A wrong command line is answered with one line that says what is allowed, and exit code 2.
func TestUsageErrors(t *testing.T) {
	tests := []struct {
		name string
		args []string
		env  []string
		want string
	}{
		{"unknown flag", []string{"--bogus"}, nil, "unknown flag --bogus: allowed are --attach-grace, --data-dir,"},
		{"argument", []string{"serve"}, nil, `unexpected argument "serve"`},
		{"no value", []string{"--listen"}, nil, "listen"},
		{"level", []string{"--log-level", "loud"}, nil, "--log-level: must be debug, info, warn or error"},
		{"format", []string{"--log-format", "xml"}, nil, "must be text or json"},
		{"number", []string{"--max-session-bytes", "many"}, nil, "--max-session-bytes: must be a whole number"},
		{"zero", []string{"--max-session-bytes", "0"}, nil, "limits must be at least 1"},
		{"too much", []string{"--max-session-bytes", "4194305"}, nil, "must be 1 to 4194304"},
		{"grace", []string{"--grace", "10"}, nil, "--grace: must be a duration, like 10s"},
		{"no grace", []string{"--grace", "0s"}, nil, "--grace: must be more than 0"},
		{"no attach grace", []string{"--attach-grace", "0s"}, nil, "--attach-grace: must be more than 0"},
		{"long attach grace", []string{"--attach-grace", "2m", "--data-dir", "d"}, nil, "attach grace: must be 100ms to 1m0s"},
		{"empty", []string{"--prefix", ""}, nil, "must not be empty"},
		{"listen", []string{"--listen", "7400"}, nil, `"7400" is not host:port or unix:/path`},
		{"both", []string{"--data-dir", "d", "--etcd-endpoints", "a:1"}, nil, "exactly one of"},
		{"store", []string{"--store", "disk"}, nil, `store "disk": must be etcd or memory`},
		{"memory with a folder", []string{"--store", "memory", "--data-dir", "d"}, nil, "takes neither a data folder nor etcd endpoints"},
		{"memory with a cluster", []string{"--store", "memory"}, []string{"SESSIOND_ETCD_ENDPOINTS", "a:1"}, "takes neither a data folder nor etcd endpoints"},
		{"endpoint", []string{"--etcd-endpoints", "a:1,b"}, nil, `"b" is not host:port`},
		{"prefix", []string{"--prefix", "p"}, nil, "end with a slash"},
		{"two faults", []string{"--prefix", "p", "--listen", "x"}, nil, "; "},
		{"environment", nil, []string{"SESSIOND_GRACE", "soon"}, `SESSIOND_GRACE: invalid value "soon": must be a duration`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if code := run(t.Context(), tt.args, env(tt.env...), &stdout, &stderr); code != exitUsage {
				t.Errorf("exit code %d", code)
			}
			text := stderr.String()
			if !strings.Contains(text, tt.want) || strings.Count(text, "\n") != 1 || !strings.HasPrefix(text, "sessiond: ") || stdout.Len() > 0 {
				t.Errorf("stderr %q, stdout %q", text, stdout.String())
			}
		})
	}
}

func TestHelpAndVersion(t *testing.T) {
	for arg, want := range map[string]string{"--help": "SESSIOND_DATA_DIR", "--version": "sessiond "} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), []string{arg}, env(), &stdout, &stderr); code != exitOK || !strings.Contains(stdout.String(), want) || stderr.Len() > 0 {
			t.Errorf("%s: exit code %d, %q, %q", arg, code, stdout.String(), stderr.String())
		}
	}
}

// A flag has precedence over its twin in the environment.
func TestEnvironment(t *testing.T) {
	o, err := parse([]string{"--prefix", "flag/"}, env("SESSIOND_PREFIX", "env/", "SESSIOND_LISTEN", "unix:/tmp/s", "SESSIOND_ETCD_ENDPOINTS", "a:1,b:2", "SESSIOND_GRACE", "3s"))
	if err != nil {
		t.Fatal(err)
	}
	if o.cfg.Prefix != "flag/" || o.cfg.Listen != "unix:/tmp/s" || len(o.cfg.Endpoints) != 2 || o.cfg.DataDir != "" || o.cfg.Grace != 3*time.Second {
		t.Errorf("config: %+v", o.cfg)
	}
}

// syncBuffer is a log that is read while it is written.
type syncBuffer struct {
	mu   sync.Mutex
	text strings.Builder
	wait chan string
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text.Write(p)
	if strings.Contains(b.text.String(), "msg=ready") {
		select {
		case b.wait <- b.text.String():
		default:
		}
	}
	return len(p), nil
}

// A signal during the start is no failure either.
func TestStoppedWhileStarting(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	stop()
	var stderr bytes.Buffer
	if code := run(ctx, []string{"--data-dir", t.TempDir(), "--listen", "127.0.0.1:0"}, env(), &bytes.Buffer{}, &stderr); code != exitOK || stderr.Len() > 0 {
		t.Errorf("exit code %d, %q", code, stderr.String())
	}
}

// O1: one command serves; a second one on its folder or port ends at once with one line and exit code 1; a signal ends the
// first with exit code 0.
func TestServe(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	dir, socket := t.TempDir(), sessiondSocket(t)
	log := &syncBuffer{wait: make(chan string, 1)}
	done := make(chan int, 1)
	go func() {
		done <- run(ctx, []string{"--data-dir", dir, "--listen", "unix:" + socket}, env(), &bytes.Buffer{}, log)
	}()
	select {
	case <-log.wait:
	case <-time.After(30 * time.Second):
		t.Fatal("not ready")
	}

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for name, args := range map[string][]string{
		"folder in use": {"--data-dir", dir, "--listen", "127.0.0.1:0"},
		"port in use":   {"--data-dir", t.TempDir(), "--listen", taken.Addr().String()},
	} {
		var stderr bytes.Buffer
		began := time.Now()
		code := run(ctx, args, env(), &bytes.Buffer{}, &stderr)
		if code != exitError || strings.Count(stderr.String(), "\n") != 1 || !strings.Contains(stderr.String(), "in use") || time.Since(began) > 5*time.Second {
			t.Errorf("%s: exit code %d after %v, %q", name, code, time.Since(began), stderr.String())
		}
	}

	stop()
	if code := <-done; code != exitOK {
		t.Errorf("exit code %d: %s", code, log.text.String())
	}
	if strings.Contains(log.text.String(), "level=ERROR") {
		t.Errorf("errors in the log: %s", log.text.String())
	}
}

// O1: with --store memory there is nothing to run beside it, nothing on disk, and a line that says what that means.
func TestServeFromMemory(t *testing.T) {
	t.Chdir(t.TempDir())
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	log := &syncBuffer{wait: make(chan string, 1)}
	done := make(chan int, 1)
	go func() {
		done <- run(ctx, []string{"--store", "memory", "--listen", "127.0.0.1:0"}, env(), &bytes.Buffer{}, log)
	}()
	select {
	case <-log.wait:
	case <-time.After(30 * time.Second):
		t.Fatal("not ready")
	}
	stop()
	if code := <-done; code != exitOK {
		t.Errorf("exit code %d: %s", code, log.text.String())
	}
	if text := log.text.String(); strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, "they end with this process") {
		t.Errorf("log: %s", text)
	}
	files, err := os.ReadDir(".")
	if err != nil || len(files) > 0 {
		t.Errorf("left on disk: %v, %v", files, err)
	}
}

func sessiondSocket(t *testing.T) string {
	t.Helper()
	return t.TempDir() + "/s.sock"
}
