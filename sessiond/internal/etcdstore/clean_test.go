package etcdstore

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
)

// slowReads finds nothing, which takes some time.
type slowReads struct {
	KV

	took  time.Duration
	reads int
}

func (r *slowReads) Txn(_ context.Context, req *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	time.Sleep(r.took)
	r.reads++
	resp := &etcdserverpb.TxnResponse{}
	for range req.Success {
		none := &etcdserverpb.ResponseOp_ResponseRange{ResponseRange: &etcdserverpb.RangeResponse{}}
		resp.Responses = append(resp.Responses, &etcdserverpb.ResponseOp{Response: none})
	}
	return resp, nil
}

// S12: what very many expired sessions left is looked for bit by bit.
func TestCleanerLeavesOthersTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rounds, took = 10, time.Millisecond
		etcd := &slowReads{took: took}
		s := &Store{kv: kv{KV: etcd, members: 1}, cleaner: newCleaner("node")}
		for i := range rounds * cleanTogether {
			s.cleaner.expired(fmt.Sprint(i))
		}
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), cleanAfter+rounds*(1+cleanPauses)*took-time.Nanosecond)
		defer cancel()
		s.clean(ctx)
		if etcd.reads != rounds {
			t.Errorf("%d rounds of %d in %v", etcd.reads, rounds, time.Since(began))
		}
		if soon, _ := s.cleaner.due(); len(soon) > 0 {
			t.Errorf("%d sessions left", len(soon))
		}
	})
	synctest.Test(t, func(t *testing.T) {
		etcd := &slowReads{took: time.Millisecond}
		s := &Store{kv: kv{KV: etcd, members: 1}, cleaner: newCleaner("node")}
		for i := range 10 * cleanTogether {
			s.cleaner.expired(fmt.Sprint(i))
		}
		ctx, cancel := context.WithTimeout(t.Context(), cleanAfter+10*etcd.took)
		defer cancel()
		s.clean(ctx)
		if etcd.reads > 10/(1+cleanPauses)+1 {
			t.Errorf("%d rounds without a pause", etcd.reads)
		}
	})
}

// S12: while there is more at once to look for, others have their turn, unless there is so much that some might be left out.
func TestPausesOfCleaner(t *testing.T) {
	t.Parallel()
	const took = time.Millisecond
	for _, c := range []struct {
		sessions, waiting int
		took, want        time.Duration
	}{
		{cleanTogether, 0, took, 3 * took},
		{cleanTogether, 100, time.Second, maxCleanPause},
		{cleanTogether, maxToClean/2 + 1, took, 0},
		{cleanTogether - 1, 100, took, 0},
	} {
		cleaner := newCleaner("node")
		for i := range c.waiting {
			cleaner.expired(fmt.Sprint(i))
		}
		if got := cleaner.pauseAfter(c.sessions, c.took); got != c.want {
			t.Errorf("%d sessions in %v, %d wait: a pause of %v, want %v", c.sessions, c.took, c.waiting, got, c.want)
		}
	}
}
