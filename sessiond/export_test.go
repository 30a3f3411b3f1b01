package sessiond

import (
	"context"
	"net"

	"github.com/sessiond/sessiond/sessiond/internal/memstore"
)

// OpenShared opens a node on a listener and on a store in memory that it may share with others, without a socket: so it
// runs in virtual time.
func OpenShared(ctx context.Context, cfg Config, l net.Listener, shared *memstore.Store) (*Server, error) {
	return open(ctx, cfg.withDefaults(), l, shared)
}
