package etcdstore

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func FuzzSessionRecord(f *testing.F) {
	f.Add(encodeSession(time.Hour, []byte("data")))
	f.Add([]byte{1})
	f.Add([]byte{2, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		ttl, data, err := decodeSession(b)
		if err != nil {
			return
		}
		again, data2, err := decodeSession(encodeSession(ttl, data))
		if err != nil || again != ttl || !bytes.Equal(data, data2) {
			t.Fatalf("%v %q: %v %q, %v", ttl, data, again, data2, err)
		}
	})
}

// S2: no name, however odd, reaches into the range of another.
func FuzzKeys(f *testing.F) {
	f.Add("a", "a/b", "c")
	f.Add("a%2Fb", "a/b", "%")
	f.Fuzz(func(t *testing.T, one, other, name string) {
		k := keys{prefix: "p/"}
		if one != other && strings.HasPrefix(k.lock(other, name), k.locks(one)) {
			t.Errorf("lock of %q in the range of %q", other, one)
		}
		if one != other && k.session(one) == k.session(other) {
			t.Errorf("%q and %q share a key", one, other)
		}
		if got := request(k.lock(one, name)); got != name {
			t.Errorf("request %q read as %q", name, got)
		}
		p, ok := k.part(k.message(one, other, name) + lastName(5, 2))
		if !ok || p.stream != escaper.Replace(other) || !p.last || p.bytes != 5 || p.chunks != 2 || p.prefix != k.message(one, other, name) {
			t.Errorf("part of %q/%q/%q: %+v %v", one, other, name, p, ok)
		}
	})
}
