package etcdstore

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sessiond/sessiond/sessiond/internal/session"
)

var errLeasesGone = errors.New("leases end as soon as they are granted")

// withLease runs fn, which puts a key, with a shared lease for the TTL, and again with another one if the first is gone. It also
// returns until when keys on it live, at least.
func (s *Store) withLease(ctx context.Context, ttl time.Duration, fn func(clientv3.LeaseID) (*etcdserverpb.TxnResponse, error)) (*etcdserverpb.TxnResponse, time.Time, error) {
	return s.withLeaseFor(ctx, ttl, 0, fn)
}

// withLeaseFor is withLease for a key that is on a lease.
func (s *Store) withLeaseFor(ctx context.Context, ttl time.Duration, on clientv3.LeaseID, fn func(clientv3.LeaseID) (*etcdserverpb.TxnResponse, error)) (*etcdserverpb.TxnResponse, time.Time, error) {
	for range leaseTries {
		id, until, err := s.leases.takeFor(ctx, ttl, on)
		if err != nil {
			return nil, until, err
		}
		resp, err := fn(id)
		if !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return resp, until, err
		}
		s.leases.drop(ctx, ttl, id)
	}
	return nil, time.Time{}, errLeasesGone
}

// left is what is left of a TTL on a lease whose keys live until then.
func left(until time.Time, ttl time.Duration) time.Duration {
	return max(min(time.Until(until), ttl), 0)
}

// holds is true if the entry is there, was made at the revision, and is the oldest of its queue. The oldest stays the oldest, so
// of an entry that this node has seen to be it, only the first is compared: etcd would read the whole queue for the other.
func (s *Store) holds(id, request string, token uint64) []compare {
	key := s.keys.lock(id, request)
	cmps := []compare{createdAt(key, int64(token))}
	if !s.pool.isFirst(key, int64(token)) {
		cmps = append(cmps, allOf(created(s.keys.locks(id), etcdserverpb.Compare_GREATER, int64(token)-1)))
	}
	return cmps
}

// CreateSession implements session.Store.
func (s *Store) CreateSession(ctx context.Context, id string, data []byte, ttl time.Duration) (uint64, time.Duration, error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	key, value := s.keys.session(id), encodeSession(ttl, data)
	resp, until, err := s.withLease(octx, ttl, func(lease clientv3.LeaseID) (*etcdserverpb.TxnResponse, error) {
		return s.group.txn(octx, &step{
			about: key,
			cmps:  []compare{missing(key)},
			then: []operation{
				opPut(key, value, lease),
				// What an expired session of the same id left, if nobody has removed it yet.
				opDeleteAll(s.keys.locks(id)),
				opDeleteAll(s.keys.messages(id)),
			},
		})
	})
	if err != nil {
		return 0, 0, s.fail(ctx, err)
	}
	if !resp.Succeeded {
		return 0, 0, session.ErrExists
	}
	return uint64(resp.Header.Revision), left(until, ttl), nil
}

// ReadSession implements session.Store.
func (s *Store) ReadSession(ctx context.Context, id string) (session.Session, uint64, error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	resp, err := s.kv.Get(octx, s.keys.session(id))
	if err != nil {
		return session.Session{}, 0, s.fail(ctx, err)
	}
	if len(resp.Kvs) == 0 {
		return session.Session{}, 0, session.ErrNotFound
	}
	found, err := s.decode(octx, id, resp.Kvs[0])
	return found, uint64(resp.Header.Revision), s.known(ctx, err)
}

// known leaves an error of ours as it is and turns one of etcd into one of ours.
func (s *Store) known(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, session.ErrFormat) {
		return err
	}
	return s.fail(ctx, err)
}

func (s *Store) decode(ctx context.Context, id string, kv *mvccpb.KeyValue) (session.Session, error) {
	ttl, data, err := decodeSession(kv.Value)
	if err != nil {
		return session.Session{}, err
	}
	remaining, _, err := s.leases.remaining(ctx, clientv3.LeaseID(kv.Lease), ttl)
	if err != nil {
		return session.Session{}, err
	}
	return session.Session{ID: id, Data: data, Revision: uint64(kv.ModRevision), TTL: ttl, Remaining: min(remaining, ttl)}, nil
}

// SaveSession implements session.Store.
func (s *Store) SaveSession(ctx context.Context, save session.Save) (uint64, error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	key := s.keys.session(save.ID)

	if save.TTL == 0 {
		resp, err := s.kv.Get(octx, key)
		if err != nil {
			return 0, s.fail(ctx, err)
		}
		if len(resp.Kvs) == 0 {
			return 0, session.ErrNotFound
		}
		if save.TTL, _, err = decodeSession(resp.Kvs[0].Value); err != nil {
			return 0, err
		}
	}
	if save.Token != 0 && save.Request == "" {
		found, err := s.findRequest(octx, save.ID, save.Token)
		switch {
		case err != nil:
			return 0, s.fail(ctx, err)
		case !found.exists:
			return 0, session.ErrNotFound
		case found.request == "":
			return 0, session.ErrLockLost
		}
		save.Request = found.request
	}

	cmps := append(make([]compare, 0, 3), exists(key))
	switch {
	case save.Expected == nil:
	case *save.Expected == 0:
		cmps = append(cmps, missing(key)) // no session has that revision
	default:
		// It cannot have been written and not exist, and for each compare etcd reads the whole session.
		cmps[0] = writtenAt(key, int64(*save.Expected))
	}
	if save.Token != 0 {
		// A grant from before the session was made anew is no grant of this one: its entry went when that was made.
		cmps = append(cmps, s.holds(save.ID, save.Request, save.Token)...)
	} else {
		cmps = append(cmps, empty(s.keys.locks(save.ID)))
	}
	value := encodeSession(save.TTL, save.Data)
	entry := s.keys.lock(save.ID, save.Request)
	var next *successor
	if save.Release {
		next = s.hub.successor(save.ID, entry)
		defer next.settle()
	}
	var saved clientv3.LeaseID
	resp, _, err := s.withLeaseFor(octx, save.TTL, s.leases.saved.of(save.ID), func(lease clientv3.LeaseID) (*etcdserverpb.TxnResponse, error) {
		saved = lease
		p := &step{
			about: key,
			cmps:  cmps,
			then:  append(make([]operation, 0, 4), opPut(key, value, lease)),
			holds: save.Token != 0,
		}
		if save.Token == 0 {
			p.els = s.refusal(save.ID)
		}
		if save.Release {
			p.role, p.entry, p.urgent = releases, entry, next != nil
			p.then = append(append(p.then, opDelete(entry)), next.reads()...)
		}
		return s.group.txn(octx, p)
	})
	if err != nil {
		return 0, s.fail(ctx, err)
	}
	if resp.Succeeded {
		s.leases.saved.set(save.ID, func(on *clientv3.LeaseID) { *on = saved })
		if save.Release {
			next.granted(resp, 2)
			s.removed(save.ID, entry, resp.Header.Revision)
		}
		return uint64(resp.Header.Revision), nil
	}

	// Hardly any save of a holder is refused, and all would carry what tells why. It is looked up afterwards: a grant that has been lost
	// stays so.
	if save.Token != 0 {
		if resp, err = s.kv.read(octx, s.refusal(save.ID)...); err != nil {
			return 0, s.fail(ctx, err)
		}
	}
	found, first := resp.Responses[0].GetResponseRange().Kvs, resp.Responses[1].GetResponseRange().Kvs
	switch {
	case len(found) == 0:
		return 0, session.ErrNotFound
	case save.Token != 0 && (save.Expected == nil || len(first) == 0 || first[0].CreateRevision != int64(save.Token) ||
		string(first[0].Key) != entry || found[0].CreateRevision >= int64(save.Token)):
		return 0, session.ErrLockLost
	case save.Token == 0 && len(first) > 0:
		return 0, session.ErrLocked
	default:
		return 0, session.ErrRevisionMismatch
	}
}

// refusal reads why a save is refused.
func (s *Store) refusal(id string) []operation {
	return []operation{s.readSession(id, false), s.firstEntry(id)}
}

// TouchSession implements session.Store.
func (s *Store) TouchSession(ctx context.Context, id string) (time.Duration, error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	key := s.keys.session(id)
	for {
		read, err := s.kv.Get(octx, key)
		if err != nil {
			return 0, s.fail(ctx, err)
		}
		if len(read.Kvs) == 0 {
			return 0, session.ErrNotFound
		}
		found, err := s.decode(octx, id, read.Kvs[0])
		if err != nil {
			return 0, s.known(ctx, err)
		}
		_, sure, err := s.leases.remaining(octx, clientv3.LeaseID(read.Kvs[0].Lease), found.TTL)
		if err != nil {
			return 0, s.fail(ctx, err)
		}
		if sure && found.Remaining >= found.TTL-found.TTL/3 {
			return found.Remaining, nil
		}
		resp, until, err := s.withLeaseFor(octx, found.TTL, clientv3.LeaseID(read.Kvs[0].Lease), func(lease clientv3.LeaseID) (*etcdserverpb.TxnResponse, error) {
			return s.group.txn(octx, &step{
				about: key,
				cmps:  []compare{writtenAt(key, int64(found.Revision))},
				then:  []operation{opPutLease(key, lease)},
			})
		})
		if err != nil {
			return 0, s.fail(ctx, err)
		}
		if resp.Succeeded {
			return left(until, found.TTL), nil
		}
		// Somebody wrote it, which started the TTL anew; or destroyed it.
	}
}

// DestroySession implements session.Store.
func (s *Store) DestroySession(ctx context.Context, id string) (bool, error) {
	octx, cancel := s.op(ctx)
	defer cancel()
	key := s.keys.session(id)
	resp, err := s.group.txn(octx, &step{about: key, then: []operation{
		opDelete(key),
		opDeleteAll(s.keys.locks(id)),
		opDeleteAll(s.keys.messages(id)),
		opDelete(s.keys.tail(id)),
	}})
	if err != nil {
		return false, s.fail(ctx, err)
	}
	return resp.Responses[0].GetResponseDeleteRange().Deleted > 0, nil
}
