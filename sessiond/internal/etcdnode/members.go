package etcdnode

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	memberAskEvery = 500 * time.Millisecond
	memberTimeout  = 1200 * time.Millisecond
)

// members keeps the client to those members of a cluster that answer. gRPC leaves out one that refuses, but goes on giving
// calls to one that has died without a word, or is cut off from the others, for some 10 s.
type members struct {
	client    *clientv3.Client
	endpoints []string
	asks      []*clientv3.Client // one for each endpoint
	logger    *slog.Logger
	used      []string
}

// run asks each member again and again until ctx ends. The question takes a quorum to answer.
func (m *members) run(ctx context.Context) {
	tick := time.NewTicker(memberAskEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if answered := m.ask(ctx); len(answered) > 0 && !slices.Equal(answered, m.used) {
			m.logger.WarnContext(ctx, "members of etcd that answer", "members", answered, "of", len(m.endpoints))
			m.client.SetEndpoints(answered...)
			m.used = answered
		}
	}
}

// ask returns those that answer. If none does, there is nobody to prefer.
func (m *members) ask(ctx context.Context) []string {
	ctx, cancel := context.WithTimeout(ctx, memberTimeout)
	defer cancel()
	ok := make([]bool, len(m.asks))
	var wg sync.WaitGroup
	for i, ask := range m.asks {
		wg.Go(func() {
			_, err := ask.Get(ctx, "sessiond", clientv3.WithCountOnly())
			ok[i] = err == nil
		})
	}
	wg.Wait()
	var answered []string
	for i, endpoint := range m.endpoints {
		if ok[i] {
			answered = append(answered, endpoint)
		}
	}
	return answered
}
