package etcdstore

const (
	// Of how many sessions a node knows what they store.
	maxRooms = 1 << 14
	// How many changes of what a session stores are kept while it is being read.
	maxEarlyChanges = 1 << 10
)

// room is what a session stores of messages, as far as this node knows: what it once read, and since then what its watches tell,
// which is what other nodes publish and whatever is removed. So a publish needs no read to see whether there is room.
// It lags behind by what the watches do, and a node that cannot watch knows nothing. All is under the hub's lock.
type room struct {
	session string // escaped
	born    int64  // revision at which the session was made
	asOf    int64  // revision of the read; 0: not read yet
	count   int    // messages
	bytes   int
	early   []change // while not read yet
	// Keys that this node writes and has counted already, before its watch tells of them.
	ahead map[string]struct{}
}

// change is a key that came or went.
type change struct {
	part     part
	sign     int
	revision int64
}

func (r *room) apply(c change) {
	if c.revision <= r.asOf {
		return
	}
	r.bytes += c.sign * c.part.bytes
	if c.part.last {
		r.count += c.sign
	}
}

// learn is called before what a session stores is read. It returns nil if that is known, or being read, or cannot be known.
func (h *hub) learn(sessionID string) *room {
	h.mu.Lock()
	defer h.mu.Unlock()
	session := escaper.Replace(sessionID)
	if h.rooms[session] != nil || h.open != watches {
		return nil
	}
	if len(h.rooms) >= maxRooms {
		for other := range h.rooms {
			delete(h.rooms, other) // any will do: it costs a read
			break
		}
	}
	r := &room{session: session, ahead: map[string]struct{}{}}
	h.rooms[session] = r
	return r
}

// learned is called with what learn's caller has read: all parts of the session's messages as of a revision.
func (h *hub) learned(r *room, born, asOf int64, parts []part) {
	if r == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	r.born, r.asOf = born, asOf
	for _, p := range parts {
		r.apply(change{part: p, sign: 1, revision: asOf + 1})
	}
	for _, c := range r.early {
		r.apply(c)
	}
	r.early = nil
}

// abandon is called when learn's caller is done. What has not been read is forgotten.
func (h *hub) abandon(r *room) {
	if r == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if r.asOf == 0 {
		h.forgetLocked(r)
	}
}

// forget is called when what is known may be wrong.
func (h *hub) forget(r *room) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forgetLocked(r)
}

func (h *hub) forgetLocked(r *room) {
	if h.rooms[r.session] == r {
		delete(h.rooms, r.session)
	}
}

// reserve counts a message that is about to be stored, if it is known that there is room: what others publish at
// the same moment is not, so a quarter of the most is left to them. Unless the message is stored then, the room is to be
// forgotten.
func (h *hub) reserve(sessionID, key string, most, mostBytes int) *room {
	p, ok := h.keys.part(key)
	if !ok {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.rooms[escaper.Replace(sessionID)]
	if r == nil || r.asOf == 0 || r.count >= most-most/4 || r.bytes+p.bytes > mostBytes-mostBytes/4 {
		return nil
	}
	if _, twice := r.ahead[key]; !twice {
		r.ahead[key] = struct{}{}
		r.apply(change{part: p, sign: 1, revision: r.asOf + 1})
	}
	return r
}

// changed is called under the lock with a key that came or went.
func (h *hub) changed(session, key string, p part, sign int, revision int64) {
	r := h.rooms[session]
	if r == nil {
		return
	}
	if _, ok := r.ahead[key]; ok && sign > 0 {
		delete(r.ahead, key)
		return
	}
	c := change{part: p, sign: sign, revision: revision}
	switch {
	case r.asOf != 0:
		r.apply(c)
	case len(r.early) < maxEarlyChanges:
		r.early = append(r.early, c)
	default:
		h.forgetLocked(r)
	}
}
