package etcdstore

import (
	"fmt"
	"strconv"
	"strings"
)

// Keys, all under the prefix of a namespace:
//
//	s/<session>                                       session record
//	l/<session>/<request>                             lock entry
//	q/<session>                                       the key of the lock entry that was made last
//	m/<session>/<stream>/<request>/c<n>               an earlier chunk of a message
//	m/<session>/<stream>/<request>/e<bytes>-<chunks>  its last chunk, of that many bytes, after that many chunks
//	n/<node>                                          a node that lives
//	a/<front-end>                                     where a front-end is attached
//
// A slash in a name is escaped, so that no name can reach into the range of another. The sizes are in the key so that
// limits are checked without reading values.
type keys struct {
	prefix string
}

var (
	escaper   = replacer{strings.NewReplacer("%", "%25", "/", "%2F"), "%/"}
	unescaper = replacer{strings.NewReplacer("%2F", "/", "%25", "%"), "%"}
)

// replacer leaves a string alone that has none of the characters that all it replaces begin with. Hardly any name has, and
// the library's looks through the whole string for each.
type replacer struct {
	*strings.Replacer

	first string
}

func (r replacer) Replace(s string) string {
	for i := range len(r.first) {
		if strings.IndexByte(s, r.first[i]) >= 0 {
			return r.Replacer.Replace(s)
		}
	}
	return s
}

func (k keys) session(id string) string { return k.sessionOf(escaper.Replace(id)) }
func (k keys) locks(id string) string   { return k.locksOf(escaper.Replace(id)) }
func (k keys) lock(id, request string) string {
	return k.prefix + "l/" + escaper.Replace(id) + "/" + escaper.Replace(request)
}
func (k keys) tail(id string) string      { return k.tailOf(escaper.Replace(id)) }
func (k keys) allLocks() string           { return k.prefix + "l/" }
func (k keys) allNodes() string           { return k.prefix + "n/" }
func (k keys) node(id string) string      { return k.allNodes() + id }
func (k keys) allFrontEnds() string       { return k.prefix + "a/" }
func (k keys) frontEnd(id string) string  { return k.allFrontEnds() + escaper.Replace(id) }
func (k keys) allMessages() string        { return k.prefix + "m/" }
func (k keys) messages(id string) string  { return k.messagesOf(escaper.Replace(id)) }
func (k keys) stream(id, s string) string { return k.messages(id) + escaper.Replace(s) + "/" }
func (k keys) message(id, stream, request string) string {
	return k.stream(id, stream) + escaper.Replace(request) + "/"
}

// These take an escaped id.
func (k keys) sessionOf(escaped string) string  { return k.prefix + "s/" + escaped }
func (k keys) locksOf(escaped string) string    { return k.prefix + "l/" + escaped + "/" }
func (k keys) tailOf(escaped string) string     { return k.prefix + "q/" + escaped }
func (k keys) messagesOf(escaped string) string { return k.allMessages() + escaped + "/" }

func chunkName(n int) string            { return fmt.Sprintf("c%03d", n) }
func lastName(bytes, chunks int) string { return fmt.Sprintf("e%d-%d", bytes, chunks) }

// kind splits a key into its kind (s, l, m, n or a), the escaped session id (or the node, or the front-end) and the rest.
func (k keys) kind(key string) (kind byte, session, rest string) {
	key, ok := strings.CutPrefix(key, k.prefix)
	if !ok || len(key) < 2 || key[1] != '/' {
		return 0, "", ""
	}
	session, rest, _ = strings.Cut(key[2:], "/")
	return key[0], session, rest
}

// part is what a message key says.
type part struct {
	stream string // escaped
	last   bool
	bytes  int
	chunks int
	prefix string // of all keys of the message
}

func (k keys) part(key string) (part, bool) {
	kind, _, rest := k.kind(key)
	stream, rest, ok := strings.Cut(rest, "/")
	if kind != 'm' || !ok {
		return part{}, false
	}
	_, name, ok := strings.Cut(rest, "/")
	if !ok || name == "" {
		return part{}, false
	}
	p := part{stream: stream, prefix: strings.TrimSuffix(key, name)}
	switch name[0] {
	case 'c':
		p.bytes = chunkBytes
		return p, true
	case 'e':
		size, chunks, ok := strings.Cut(name[1:], "-")
		var err1, err2 error
		p.last = true
		p.bytes, err1 = strconv.Atoi(size)
		p.chunks, err2 = strconv.Atoi(chunks)
		return p, ok && err1 == nil && err2 == nil
	}
	return part{}, false
}

func request(lockKey string) string {
	return unescaper.Replace(lockKey[strings.LastIndexByte(lockKey, '/')+1:])
}
