package sessiond_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/reflection/grpc_reflection_v1"

	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond"
)

// A node serves on a unix socket as well, also where a killed one left its socket behind; it does not take over a live one.
func TestUnixSocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "s-") //nolint:usetesting // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, "s")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	n := startWith(t, 1, sessiond.Config{Listen: "unix:" + path})[0]
	n.create(t, "")
	_, err = sessiond.New(t.Context(), sessiond.Config{Listen: "unix:" + path, Endpoints: etcd.EtcdEndpoints()})
	if err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("second on the same socket: %v", err)
	}
	n.create(t, "")
}

// Validate reports all faults together.
func TestValidate(t *testing.T) {
	err := sessiond.Config{Listen: "x", Prefix: "p", MaxSessionBytes: -1, MaxWaiters: -1, AttachGrace: -1, Grace: -1, MetricsListen: "m", Endpoints: []string{"e"}, DataDir: "d"}.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	if err := (sessiond.Config{Store: sessiond.StoreMemory, DataDir: "d"}).Validate(); err == nil || !strings.Contains(err.Error(), "neither") {
		t.Errorf("a folder for a store in memory: %v", err)
	}
	for _, what := range []string{"listen:", "metrics listen:", "exactly one", "etcd endpoints:", "prefix:", "max session bytes:", "max waiters:", "attach grace:", "grace:"} {
		if !strings.Contains(err.Error(), what) {
			t.Errorf("no word of %q in %v", what, err)
		}
	}
}

// get asks a node over HTTP.
func get(t *testing.T, n *node, path string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+n.MetricsAddr().String()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// O3: metrics, liveness and readiness over HTTP; reflection over gRPC; no id of a session in any of them.
func TestOperatorsView(t *testing.T) {
	n := startWith(t, 1, sessiond.Config{MetricsListen: "127.0.0.1:0"})[0]
	id := n.create(t, "")
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, _ := get(t, n, path); code != http.StatusOK {
			t.Errorf("%s: %d", path, code)
		}
	}
	if code, body := get(t, n, "/metrics"); code != http.StatusOK || strings.Contains(body, id) ||
		!strings.Contains(body, `grpc_server_handled_total{grpc_code="OK",grpc_method="Create",grpc_service="sessiond.v1.SessionService",grpc_type="unary"} 1`) {
		t.Errorf("metrics: %d, %d bytes", code, len(body))
	}

	conn, err := n.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	stream, err := grpc_reflection_v1.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	resp, err := stream.Recv()
	if err != nil || !strings.Contains(resp.String(), "sessiond.v1.MessageService") {
		t.Errorf("reflection: %v, %v", resp, err)
	}
}

// New undoes what it did when it fails, and Close undoes a node that was never run.
func TestNewWithoutRun(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		srv, err := sessiond.New(t.Context(), sessiond.Config{DataDir: dir, Listen: "127.0.0.1:0", Logger: logTo(t)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sessiond.New(t.Context(), sessiond.Config{DataDir: dir, Listen: "127.0.0.1:0", Logger: logTo(t)}); err == nil {
			t.Error("two nodes on a folder")
		}
		for range 2 {
			if err := srv.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A larger limit of sessions holds with an embedded etcd.
func TestLargeSessions(t *testing.T) {
	n := start(t, sessiond.Config{DataDir: t.TempDir(), MaxSessionBytes: 4 << 20})
	big := make([]byte, 4<<20)
	resp, err := n.sessions.Create(t.Context(), &sessiondv1.CreateRequest{Data: big})
	if err != nil {
		t.Fatal(err)
	}
	if s := n.read(t, resp.GetSession().GetId()); len(s.GetData()) != len(big) {
		t.Errorf("%d bytes", len(s.GetData()))
	}
}
