package etcdstore

import (
	"bytes"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// What transactions consist of is made as etcd's protocol has it, by who wants it. The client would turn types of its own into this
// when a transaction is sent, and then all others wait for that one. Each is made in one piece, and is only read from then on, so
// that it may be in several requests, also at the same time.

// What an operation or a compare takes beside keys and values, at most.
const opOverhead = 64

type (
	operation = *etcdserverpb.RequestOp
	compare   = *etcdserverpb.Compare
)

type rangeOp struct {
	op   etcdserverpb.RequestOp
	kind etcdserverpb.RequestOp_RequestRange
	req  etcdserverpb.RangeRequest
}

type putOp struct {
	op   etcdserverpb.RequestOp
	kind etcdserverpb.RequestOp_RequestPut
	req  etcdserverpb.PutRequest
}

type deleteOp struct {
	op   etcdserverpb.RequestOp
	kind etcdserverpb.RequestOp_RequestDeleteRange
	req  etcdserverpb.DeleteRangeRequest
}

type txnOp struct {
	op   etcdserverpb.RequestOp
	kind etcdserverpb.RequestOp_RequestTxn
	req  etcdserverpb.TxnRequest
}

type createdCmp struct {
	cmp  etcdserverpb.Compare
	kind etcdserverpb.Compare_CreateRevision
}

// rangeEnd ends the range of the keys with a prefix. No prefix of ours ends with the greatest byte there is.
func rangeEnd(prefix []byte) []byte {
	end := bytes.Clone(prefix)
	end[len(end)-1]++
	return end
}

func newRange(key string) *rangeOp {
	o := &rangeOp{}
	o.req.Key = []byte(key)
	o.kind.RequestRange = &o.req
	o.op.Request = &o.kind
	return o
}

func newRangeAll(prefix string) *rangeOp {
	o := newRange(prefix)
	o.req.RangeEnd = rangeEnd(o.req.Key)
	return o
}

// opGet reads a key.
func opGet(key string) operation { return &newRange(key).op }

// opGetKey reads a key without its value.
func opGetKey(key string) operation {
	o := newRange(key)
	o.req.KeysOnly = true
	return &o.op
}

// opGetAll reads all keys with a prefix.
func opGetAll(prefix string) operation { return &newRangeAll(prefix).op }

// opGetKeys reads all keys with a prefix without their values.
func opGetKeys(prefix string) operation {
	o := newRangeAll(prefix)
	o.req.KeysOnly = true
	return &o.op
}

// opGetKeysMade is opGetKeys of those that were made from one revision to another; 0: there is no bound.
func opGetKeysMade(prefix string, from, to int64) operation {
	o := newRangeAll(prefix)
	o.req.KeysOnly, o.req.MinCreateRevision, o.req.MaxCreateRevision = true, from, to
	return &o.op
}

// opGetOldest reads the key with a prefix that was made before all others.
func opGetOldest(prefix string) operation {
	o := newRangeAll(prefix)
	o.req.Limit = 1
	o.req.SortTarget, o.req.SortOrder = etcdserverpb.RangeRequest_CREATE, etcdserverpb.RangeRequest_ASCEND
	return &o.op
}

// opGetYoungestKey reads, without its value, the key with a prefix that was made last up to a revision.
func opGetYoungestKey(prefix string, to int64) operation {
	o := newRangeAll(prefix)
	o.req.Limit, o.req.KeysOnly, o.req.MaxCreateRevision = 1, true, to
	o.req.SortTarget, o.req.SortOrder = etcdserverpb.RangeRequest_CREATE, etcdserverpb.RangeRequest_DESCEND
	return &o.op
}

// opGetAnyKey reads one of the keys with a prefix, without its value.
func opGetAnyKey(prefix string) operation {
	o := newRangeAll(prefix)
	o.req.Limit, o.req.KeysOnly = 1, true
	return &o.op
}

// opCount counts the keys with a prefix.
func opCount(prefix string) operation {
	o := newRangeAll(prefix)
	o.req.CountOnly = true
	return &o.op
}

func newPut(key string, value []byte, lease clientv3.LeaseID) *putOp {
	o := &putOp{}
	o.req.Key, o.req.Value, o.req.Lease = []byte(key), value, int64(lease)
	o.kind.RequestPut = &o.req
	o.op.Request = &o.kind
	return o
}

// opPut writes a key.
func opPut(key string, value []byte, lease clientv3.LeaseID) operation {
	return &newPut(key, value, lease).op
}

// opExchange writes a key, and reads what it was before.
func opExchange(key string, value []byte, lease clientv3.LeaseID) operation {
	o := newPut(key, value, lease)
	o.req.PrevKv = true
	return &o.op
}

// opPutValue writes a key that is there, and leaves its lease as it is.
func opPutValue(key string, value []byte) operation {
	o := newPut(key, value, clientv3.NoLease)
	o.req.IgnoreLease = true
	return &o.op
}

// opPutLease moves a key that is there to a lease, and leaves its value as it is.
func opPutLease(key string, lease clientv3.LeaseID) operation {
	o := newPut(key, nil, lease)
	o.req.IgnoreValue = true
	return &o.op
}

func newDelete(key string) *deleteOp {
	o := &deleteOp{}
	o.req.Key = []byte(key)
	o.kind.RequestDeleteRange = &o.req
	o.op.Request = &o.kind
	return o
}

// opDelete removes a key.
func opDelete(key string) operation { return &newDelete(key).op }

// opDeleteAll removes all keys with a prefix.
func opDeleteAll(prefix string) operation {
	o := newDelete(prefix)
	o.req.RangeEnd = rangeEnd(o.req.Key)
	return &o.op
}

// fill makes it a transaction within another.
func (o *txnOp) fill(cmps []compare, then, els []operation) operation {
	o.req.Compare, o.req.Success, o.req.Failure = cmps, then, els
	o.kind.RequestTxn = &o.req
	o.op.Request = &o.kind
	return &o.op
}

// created compares the revision at which a key was made; a missing key's is 0.
func created(key string, result etcdserverpb.Compare_CompareResult, revision int64) compare {
	c := &createdCmp{}
	c.cmp.Key, c.cmp.Target, c.cmp.Result = []byte(key), etcdserverpb.Compare_CREATE, result
	c.kind.CreateRevision = revision
	c.cmp.TargetUnion = &c.kind
	return &c.cmp
}

// exists holds if a key is there.
func exists(key string) compare { return created(key, etcdserverpb.Compare_GREATER, 0) }

// missing holds if a key is not there.
func missing(key string) compare { return createdAt(key, 0) }

// createdAt holds if a key was made at a revision; a missing key's is 0.
func createdAt(key string, revision int64) compare {
	return created(key, etcdserverpb.Compare_EQUAL, revision)
}

// writtenAt holds if a key was last written at a revision; a missing key's is 0.
func writtenAt(key string, revision int64) compare {
	return &etcdserverpb.Compare{
		Key: []byte(key), Target: etcdserverpb.Compare_MOD, Result: etcdserverpb.Compare_EQUAL,
		TargetUnion: &etcdserverpb.Compare_ModRevision{ModRevision: revision},
	}
}

// hasValue holds if a key is there and has a value.
func hasValue(key, value string) compare {
	return &etcdserverpb.Compare{
		Key: []byte(key), Target: etcdserverpb.Compare_VALUE, Result: etcdserverpb.Compare_EQUAL,
		TargetUnion: &etcdserverpb.Compare_Value{Value: []byte(value)},
	}
}

// allOf makes a compare of a prefix hold if it does for each key with it. If there is none, it compares a missing key.
func allOf(cmp compare) compare {
	cmp.RangeEnd = rangeEnd(cmp.Key)
	return cmp
}

// empty holds if there is no key with the prefix.
func empty(prefix string) compare { return allOf(missing(prefix)) }

// cmpBytes and opBytes are how much a part of a transaction takes in a request, at most.
func cmpBytes(c compare) int {
	return opOverhead + len(c.Key) + len(c.RangeEnd) + len(c.GetValue())
}

func opBytes(op operation) int {
	switch o := op.Request.(type) {
	case *etcdserverpb.RequestOp_RequestRange:
		return opOverhead + len(o.RequestRange.Key) + len(o.RequestRange.RangeEnd)
	case *etcdserverpb.RequestOp_RequestPut:
		return opOverhead + len(o.RequestPut.Key) + len(o.RequestPut.Value)
	case *etcdserverpb.RequestOp_RequestDeleteRange:
		return opOverhead + len(o.RequestDeleteRange.Key) + len(o.RequestDeleteRange.RangeEnd)
	default:
		return opOverhead
	}
}

func isPut(op operation) bool { return op.GetRequestPut() != nil }
