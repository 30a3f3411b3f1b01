//go:build unix

package liveness

import (
	"errors"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/client"
)

// L4, S1: a change of etcd's leader starts running TTLs anew and never ends one early. A session and a lock outlive their TTL
// through three changes, each before the TTL is over, and end within the stated bound of the last one.
func TestLeaderChanges(t *testing.T) {
	const (
		ttl   = 4 * time.Second
		again = 2 * time.Second
		// A session's lease has a window of at least 1 s over its TTL, a lock's 2 s, and etcd looks for ended ones and
		// removes them within about 1 s; the rest is for a busy machine.
		late = 2*time.Second + time.Second + 4*time.Second
	)
	c := startCluster(t, 3, 1)
	etcd, err := clientv3.New(clientv3.Config{Endpoints: c.etcd.Endpoints()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = etcd.Close() })

	s, err := c.client.Create(t.Context(), nil, client.CreateOptions{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	locked := c.create(t)
	held, err := c.client.Acquire(t.Context(), locked, client.AcquireOptions{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(again)
	defer tick.Stop()
	for range 3 {
		<-tick.C
		moveLeader(t, etcd, c.etcd.Endpoints())
	}
	moved := time.Now()
	if time.Until(held.Deadline) > 0 {
		t.Fatal("the changes came too soon to tell anything")
	}
	// Both are past their TTL, and alive for a whole TTL more.
	c.poll(t, func() error {
		_, err := c.client.Read(t.Context(), s.ID)
		if errors.Is(err, client.ErrUnavailable) {
			return err // the new leader is about to answer
		}
		if err != nil {
			t.Fatalf("the session, %v after the last change: %v", time.Since(moved), err)
		}
		return nil
	})
	next, err := c.client.Acquire(t.Context(), locked, client.AcquireOptions{TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(moved); took > ttl+late {
		t.Errorf("the lock was free %v after the last change", took)
	} else {
		t.Logf("the lock was free %v after the last change", took)
	}
	if next.FencingToken <= held.FencingToken {
		t.Errorf("fencing token %d after %d", next.FencingToken, held.FencingToken)
	}
	c.poll(t, func() error {
		_, err := c.client.Read(t.Context(), s.ID)
		return unless(errors.Is(err, client.ErrSessionNotFound), "the session is still there")
	})
	if took := time.Since(moved); took > ttl+late {
		t.Errorf("the session was gone %v after the last change", took)
	}
}

// moveLeader makes another member the leader.
func moveLeader(t *testing.T, etcd *clientv3.Client, endpoints []string) {
	t.Helper()
	for _, endpoint := range endpoints {
		status, err := etcd.Status(t.Context(), endpoint)
		if err != nil {
			t.Fatal(err)
		}
		if status.Leader != status.Header.MemberId {
			continue
		}
		members, err := etcd.MemberList(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range members.Members {
			if m.ID == status.Leader {
				continue
			}
			leader, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}})
			if err != nil {
				t.Fatal(err)
			}
			_, err = leader.MoveLeader(t.Context(), m.ID)
			if cerr := leader.Close(); err != nil || cerr != nil {
				t.Fatal(errors.Join(err, cerr))
			}
			return
		}
	}
	t.Fatal("no leader")
}
