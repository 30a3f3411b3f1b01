//go:build unix

// Package liveness has the end-to-end tests of locks whose holders, waiters or nodes die: front-ends and nodes as processes
// of their own, killed and paused. Run them with `make e2e`.
package liveness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/sessiond/sessiond/client"
	sessiondv1 "github.com/sessiond/sessiond/proto/sessiond/v1"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// What the front-end process, which is this test program, is told by its environment.
const (
	envNodes   = "LIVENESS_NODES"
	envSession = "LIVENESS_SESSION"
	envTTL     = "LIVENESS_TTL"
	envAttach  = "LIVENESS_ATTACH"
	envDir     = "LIVENESS_DIR"
)

const patience = 30 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(envNodes) != "" {
		if err := holdLock(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	for _, program := range []string{"etcd", "sessiond"} {
		if _, err := sessiondtest.Binary(program); err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// holdLock is a front-end that acquires a lock, says so in the file "grant", and holds it. Once there is a file "save" it saves
// and says in the file "saved" what came of it. It goes on until it is told to stop, and then says goodbye.
func holdLock() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	ttl, err := time.ParseDuration(os.Getenv(envTTL))
	if err != nil {
		return err
	}
	attach := os.Getenv(envAttach) == "true"
	c, err := client.New(strings.Split(os.Getenv(envNodes), ","), client.Options{Attach: attach})
	if err != nil {
		return err
	}
	defer c.Close()
	if attach {
		if err := sessiondtest.Poll(ctx, func(context.Context) error { return unless(c.Attached(), "not attached") }); err != nil {
			return err
		}
	}
	session := os.Getenv(envSession)
	grant, err := c.Acquire(ctx, session, client.AcquireOptions{TTL: ttl})
	if err != nil {
		return err
	}
	file := func(name string) string { return filepath.Join(os.Getenv(envDir), name) }
	text, err := json.Marshal(grant)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file("grant"), text, 0o600); err != nil {
		return err
	}
	if sessiondtest.Poll(ctx, func(context.Context) error {
		_, err := os.Stat(file("save"))
		return err
	}) != nil {
		return nil // told to stop
	}
	save := func() error {
		_, err := c.Save(ctx, session, []byte("late"), client.SaveOptions{Grant: &grant})
		return err
	}
	err = save()
	if errors.Is(err, client.ErrOutcomeUnknown) {
		err = save() // the connection had been closed while the process was paused
	}
	result := "saved"
	switch {
	case errors.Is(err, client.ErrLockLost):
		result = "lock lost"
	case err != nil:
		result = err.Error()
	}
	if err := os.WriteFile(file("saved"), []byte(result), 0o600); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func unless(ok bool, problem string) error {
	if ok {
		return nil
	}
	return errors.New(problem)
}

// cluster is nodes on one etcd, and an unattached client of all of them.
type cluster struct {
	etcd      *sessiondtest.Etcd
	nodes     []*sessiondtest.Server
	addresses []string
	client    *client.Client
}

func startCluster(t *testing.T, members, nodes int) *cluster {
	t.Helper()
	etcd := sessiondtest.StartEtcd(t, members)
	addrs, err := sessiondtest.FreeAddrs(nodes)
	if err != nil {
		t.Fatal(err)
	}
	path, err := sessiondtest.Binary("sessiond")
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{etcd: etcd, addresses: addrs}
	for i, addr := range addrs {
		name := "sessiond-" + strconv.Itoa(i+1)
		c.nodes = append(c.nodes, &sessiondtest.Server{Addr: addr, Process: sessiondtest.StartProcess(t, sessiondtest.Command{
			Name: name, Path: path, Args: []string{"--listen", addr, "--etcd-endpoints", strings.Join(etcd.Endpoints(), ",")},
			Log: filepath.Join(t.TempDir(), name+".log"), Ready: sessiondtest.GRPCReady(addr),
		})})
	}
	c.client = c.connect(t, client.Options{})
	return c
}

func (c *cluster) connect(t *testing.T, opts client.Options) *client.Client {
	t.Helper()
	cl, err := client.New(c.addresses, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cl.Close() })
	if opts.Attach {
		c.poll(t, func() error { return unless(cl.Attached(), "not attached") })
	}
	return cl
}

func (c *cluster) poll(t *testing.T, f func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := sessiondtest.Poll(ctx, func(context.Context) error { return f() }); err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) create(t *testing.T) string {
	t.Helper()
	s, err := c.client.Create(t.Context(), []byte("new"), client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return s.ID
}

// holder is a front-end process that holds a lock.
type holder struct {
	*sessiondtest.Process

	dir string
}

func (c *cluster) startHolder(t *testing.T, session string, ttl time.Duration, attach bool) holder {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	p := sessiondtest.StartProcess(t, sessiondtest.Command{
		Name: "front-end", Path: self, Log: filepath.Join(dir, "log"),
		Env: []string{
			envNodes + "=" + strings.Join(c.addresses, ","), envSession + "=" + session, envTTL + "=" + ttl.String(),
			envAttach + "=" + strconv.FormatBool(attach), envDir + "=" + dir,
		},
		Ready: func(context.Context) error {
			_, err := os.Stat(filepath.Join(dir, "grant"))
			return err
		},
	})
	return holder{p, dir}
}

// waitFor starts a waiter for the session's lock and returns what tells when it holds it.
func (c *cluster) waitFor(t *testing.T, session string) <-chan time.Time {
	t.Helper()
	got := make(chan time.Time, 1)
	go func() {
		defer close(got)
		g, err := c.client.Acquire(t.Context(), session, client.AcquireOptions{Timeout: patience})
		if err != nil {
			t.Error(err)
			return
		}
		got <- time.Now()
		if _, err := c.client.Save(context.WithoutCancel(t.Context()), session, []byte("second"), client.SaveOptions{Grant: &g, Release: true}); err != nil {
			t.Error(err)
		}
	}()
	return got
}

func within(t *testing.T, got <-chan time.Time, began time.Time, least, most time.Duration) {
	t.Helper()
	at, ok := <-got
	took := at.Sub(began)
	if !ok || took < least || took > most {
		t.Errorf("the next waiter held the lock after %v, want %v to %v", took, least, most)
	}
	t.Logf("the next waiter held the lock after %v", took)
	<-got
}

// L10, L4: a holder is killed: the next waiter holds the lock within 3 s if the holder was attached, although the TTL is 300 s, and
// at the end of the TTL if not.
func TestHolderKilled(t *testing.T) {
	c := startCluster(t, 1, 3)
	t.Run("attached", func(t *testing.T) {
		session := c.create(t)
		h := c.startHolder(t, session, 300*time.Second, true)
		got := c.waitFor(t, session)
		began := time.Now()
		if err := h.Kill(); err != nil {
			t.Fatal(err)
		}
		within(t, got, began, 0, 3*time.Second)
	})
	t.Run("not attached", func(t *testing.T) {
		session := c.create(t)
		const ttl = 5 * time.Second
		h := c.startHolder(t, session, ttl, false)
		got := c.waitFor(t, session)
		began := time.Now()
		if err := h.Kill(); err != nil {
			t.Fatal(err)
		}
		// It was granted a moment before.
		within(t, got, began, ttl-2*time.Second, ttl+4*time.Second)
	})
	// What a frozen process has is released too: 1 s until it is asked, 2 s for the answer, and the grace period.
	t.Run("frozen", func(t *testing.T) {
		session := c.create(t)
		h := c.startHolder(t, session, 300*time.Second, true)
		got := c.waitFor(t, session)
		began := time.Now()
		if err := h.Pause(); err != nil {
			t.Fatal(err)
		}
		within(t, got, began, 2*time.Second, 7*time.Second)
	})
	// L11: one that is told to stop releases at once.
	t.Run("stopped", func(t *testing.T) {
		session := c.create(t)
		h := c.startHolder(t, session, 300*time.Second, true)
		got := c.waitFor(t, session)
		began := time.Now()
		if err := h.Terminate(t.Context()); err != nil {
			t.Error(err)
		}
		within(t, got, began, 0, time.Second)
	})
}

// L5, S6: a holder that is paused past its TTL and goes on cannot save: the value is the second holder's.
func TestPausedHolder(t *testing.T) {
	c := startCluster(t, 1, 2)
	for _, attach := range []bool{false, true} {
		t.Run(fmt.Sprint("attached ", attach), func(t *testing.T) {
			session := c.create(t)
			h := c.startHolder(t, session, 2*time.Second, attach)
			if err := h.Pause(); err != nil {
				t.Fatal(err)
			}
			got := c.waitFor(t, session)
			within(t, got, time.Now(), 0, 10*time.Second)
			if err := os.WriteFile(filepath.Join(h.dir, "save"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := h.Continue(); err != nil {
				t.Fatal(err)
			}
			var result string
			c.poll(t, func() error {
				text, err := os.ReadFile(filepath.Join(h.dir, "saved"))
				if result = string(text); err == nil && result == "" {
					err = errors.New("not written yet")
				}
				return err
			})
			if result != "lock lost" {
				t.Errorf("the late save: %s", result)
			}
			s, err := c.client.Read(t.Context(), session)
			if err != nil || string(s.Data) != "second" {
				t.Errorf("value: %q, %v", s.Data, err)
			}
			if err := h.Terminate(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// L6, L10: 30 waiters are spread over three nodes and one node is killed, and the lock handed over just then. Those that
// waited on it and retry keep their places: nobody is skipped, and the order is kept.
func TestNodeKilled(t *testing.T) {
	c := startCluster(t, 3, 3)
	session := c.create(t)
	fe := c.connect(t, client.Options{Attach: true})
	held, err := fe.Acquire(t.Context(), session, client.AcquireOptions{})
	if err != nil {
		t.Fatal(err)
	}
	const waiters = 30
	var mu sync.Mutex
	var served []uint64
	var wg sync.WaitGroup
	for range waiters {
		wg.Go(func() {
			g, err := fe.Acquire(t.Context(), session, client.AcquireOptions{Timeout: patience})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			served = append(served, g.FencingToken)
			mu.Unlock()
			if err := fe.Release(t.Context(), g); err != nil {
				t.Error(err)
			}
		})
	}
	settle()
	began := time.Now()
	if err := c.nodes[1].Kill(); err != nil {
		t.Fatal(err)
	}
	if err := fe.Release(t.Context(), held); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	took := time.Since(began)
	t.Logf("all served after %v", took)
	if took > 5*time.Second {
		t.Errorf("all served after %v", took)
	}
	if len(served) != waiters || !slices.IsSorted(served) {
		t.Errorf("%d served, not in order: %v", len(served), served)
	}
}

// settle gives waiters time to take their places, which are not shown to anybody.
func settle() { <-time.NewTimer(2 * time.Second).C }

// L6, L8: ten of 30 waiters waited on a node that is killed, and their callers do not try again: the others wait for no longer than
// it takes to declare the node dead, in order, because the front-end, asked, does not stand by the dead ones.
func TestDeadWaiters(t *testing.T) {
	c := startCluster(t, 1, 3)
	session := c.create(t)
	var stubs []sessiondv1.LockServiceClient
	for _, addr := range c.addresses {
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		stubs = append(stubs, sessiondv1.NewLockServiceClient(conn))
	}
	// The front-end of all waiters, attached to a node that lives.
	stream, err := stubs[0].Attach(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	hello := &sessiondv1.AttachHello{FrontEnd: "by-hand", Number: 1}
	if err := stream.Send(&sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Hello{Hello: hello}}); err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || m.GetAttached() == nil {
		t.Fatalf("attach: %v, %v", m, err)
	}
	claims := func(position uint64) *sessiondv1.AttachRequest {
		m := &sessiondv1.AttachClaims{Position: position}
		for i := range 30 {
			if i%3 != 1 {
				m.Requests = append(m.Requests, &sessiondv1.LockRequest{SessionId: session, RequestId: fmt.Sprint(i)})
			}
		}
		return &sessiondv1.AttachRequest{Message: &sessiondv1.AttachRequest_Claims{Claims: m}}
	}
	go func() {
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			if m.GetAsk() != nil {
				_ = stream.Send(claims(m.GetAsk().GetPosition())) // or the next Recv fails
			}
		}
	}()
	held, err := c.client.Acquire(t.Context(), session, client.AcquireOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var served []uint64
	var wg sync.WaitGroup
	for i := range 30 {
		stub := stubs[i%3]
		wg.Go(func() {
			resp, err := stub.Acquire(t.Context(), &sessiondv1.AcquireRequest{SessionId: session, RequestId: fmt.Sprint(i), FrontEnd: "by-hand"})
			if i%3 == 1 {
				if err == nil {
					t.Errorf("waiter %d was served by a dead node", i)
				}
				return
			}
			if err != nil {
				t.Error(err)
				return
			}
			g := resp.GetGrant()
			mu.Lock()
			served = append(served, g.GetFencingToken())
			mu.Unlock()
			if _, err := stub.Release(t.Context(), &sessiondv1.ReleaseRequest{SessionId: session, RequestId: g.GetRequestId(), FencingToken: g.GetFencingToken()}); err != nil {
				t.Error(err)
			}
		})
	}
	settle()
	began := time.Now()
	if err := c.nodes[1].Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.client.Release(t.Context(), held); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	took := time.Since(began)
	t.Logf("all that live were served %v after the node's death", took)
	if took > 5*time.Second {
		t.Errorf("delayed for %v", took)
	}
	if len(served) != 20 || !slices.IsSorted(served) {
		t.Errorf("%d served, not in order: %v", len(served), served)
	}
}

// L10: a front-end whose node is killed attaches to another and keeps its locks; killed itself afterwards, it loses them, also
// those that it acquired through the dead node, and a node that was paused past its lease does no harm.
func TestFrontEndOutlivesItsNodes(t *testing.T) {
	c := startCluster(t, 1, 3)
	session := c.create(t)
	h := c.startHolder(t, session, 300*time.Second, true)
	stillHeld := func(when string) {
		t.Helper()
		c.stillHeld(t, session, when)
	}
	for _, n := range c.nodes[:2] {
		if err := n.Kill(); err != nil {
			t.Fatal(err)
		}
		pause(6500 * time.Millisecond) // the lease of the node, etcd's half a second, the grace period
		stillHeld(n.Name() + " was killed")
		if err := n.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range c.nodes {
		if err := n.Pause(); err != nil {
			t.Fatal(err)
		}
		pause(6500 * time.Millisecond)
		if err := n.Continue(); err != nil {
			t.Fatal(err)
		}
		stillHeld(n.Name() + " was paused")
		pause(3 * time.Second)
		stillHeld(n.Name() + " went on")
	}
	got := c.waitFor(t, session)
	began := time.Now()
	if err := h.Kill(); err != nil {
		t.Fatal(err)
	}
	within(t, got, began, 0, 4*time.Second)
}

func pause(d time.Duration) { <-time.NewTimer(d).C }

func (c *cluster) stillHeld(t *testing.T, session, when string) {
	t.Helper()
	try, err := c.client.TryAcquire(t.Context(), session, client.AcquireOptions{})
	if err != nil || try.Acquired {
		t.Fatalf("%s: %+v, %v", when, try, err)
	}
}

// L10: an outage of etcd releases nobody's locks: nobody could attach meanwhile. A front-end that dies during it is found out
// after it.
func TestOutage(t *testing.T) {
	c := startCluster(t, 1, 2)
	lives, dies := c.create(t), c.create(t)
	c.startHolder(t, lives, 300*time.Second, true)
	dead := c.startHolder(t, dies, 300*time.Second, true)
	member := c.etcd.Members[0]
	if err := member.Kill(); err != nil {
		t.Fatal(err)
	}
	pause(5 * time.Second) // the nodes have noticed, and have let their front-ends go
	if err := dead.Kill(); err != nil {
		t.Fatal(err)
	}
	pause(3 * time.Second)
	if err := member.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.poll(t, func() error { return c.client.Ready(t.Context()) })
	within(t, c.waitFor(t, dies), time.Now(), 0, 8*time.Second)
	pause(4 * time.Second)
	c.stillHeld(t, lives, "etcd is back")
}
