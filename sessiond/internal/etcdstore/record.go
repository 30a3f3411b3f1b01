package etcdstore

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"time"

	"github.com/sessiond/sessiond/sessiond/internal/session"
)

// A record begins with the number of its format. A reader refuses a format that it does not know.
const recordFormat = 1

// encodeSession makes a session record: format, TTL in milliseconds as a uvarint, data.
func encodeSession(ttl time.Duration, data []byte) []byte {
	b := make([]byte, 0, len(data)+1+binary.MaxVarintLen64)
	b = append(b, recordFormat)
	b = binary.AppendUvarint(b, uint64(ttl.Milliseconds()))
	return append(b, data...)
}

func decodeSession(b []byte) (time.Duration, []byte, error) {
	n, rest, err := decodeHead(b, "session")
	if err != nil {
		return 0, nil, err
	}
	if n > math.MaxInt64/uint64(time.Millisecond) {
		return 0, nil, fmt.Errorf("%w: session: TTL of %d ms", session.ErrFormat, n)
	}
	return time.Duration(n) * time.Millisecond, rest, nil
}

// encodeLast makes the record of a message's last chunk: format, flags (none yet), data.
func encodeLast(data []byte) []byte {
	return append([]byte{recordFormat, 0}, data...)
}

func decodeLast(b []byte) ([]byte, error) {
	_, rest, err := decodeHead(b, "message")
	return rest, err
}

func decodeHead(b []byte, what string) (uint64, []byte, error) {
	if len(b) == 0 || b[0] != recordFormat {
		return 0, nil, fmt.Errorf("%w: %s", session.ErrFormat, what)
	}
	n, size := binary.Uvarint(b[1:])
	if size <= 0 {
		return 0, nil, fmt.Errorf("%w: %s: cut short", session.ErrFormat, what)
	}
	return n, b[1+size:], nil
}

// entryRecord is a lock entry. Fields that are not known are ignored.
type entryRecord struct {
	Format int    `json:"f"`
	Holder string `json:"holder"`
	// Node is the run of the node that answers for the entry while it waits, Mark the call there. Together they are
	// unique, so who wrote an entry last can be told from its value alone.
	Node string `json:"node"`
	Mark uint64 `json:"mark"`
	// FrontEnd is whose entry it is, and Attached says that it was attached when the entry was made: if it is attached
	// nowhere any more, the entry is nobody's. One that never attached is left to the TTL.
	FrontEnd string `json:"fe,omitempty"`
	Attached bool   `json:"att,omitempty"`
	// Term is that of raft in which its lease was granted, or an earlier one.
	Term uint64 `json:"term,omitempty"`
}

// frontEndRecord says where a front-end is attached.
type frontEndRecord struct {
	Format int    `json:"f"`
	Node   string `json:"node"`
	Number uint64 `json:"number"`
	// How much longer than others it may take to find out that its node has died, in milliseconds.
	LatenessMS int64 `json:"late_ms,omitempty"`
}

func (r frontEndRecord) lateness() time.Duration {
	return time.Duration(r.LatenessMS) * time.Millisecond
}

func (e entryRecord) encode() string {
	e.Format = recordFormat
	b, err := json.Marshal(e)
	if err != nil {
		panic(err) // strings and numbers only
	}
	return string(b)
}

func decodeEntry(b []byte) (entryRecord, error) {
	var e entryRecord
	if err := json.Unmarshal(b, &e); err != nil {
		return e, fmt.Errorf("%w: lock entry: %w", session.ErrFormat, err)
	}
	if e.Format != recordFormat {
		return e, fmt.Errorf("%w: lock entry: format %d", session.ErrFormat, e.Format)
	}
	return e, nil
}

func (r frontEndRecord) encode() string {
	r.Format = recordFormat
	b, err := json.Marshal(r)
	if err != nil {
		panic(err) // strings and numbers only
	}
	return string(b)
}

func decodeFrontEnd(b []byte) (frontEndRecord, error) {
	var r frontEndRecord
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("%w: front-end: %w", session.ErrFormat, err)
	}
	if r.Format != recordFormat {
		return r, fmt.Errorf("%w: front-end: format %d", session.ErrFormat, r.Format)
	}
	return r, nil
}
