package mcpserver

import "testing"

// Sealer gives tests a sealer of request states for one request.
func Sealer(t *testing.T, key []byte) (seal func(string) string, open func(string) (string, error)) {
	t.Helper()
	s, err := newSealer([][]byte{key}, stateTTL)
	if err != nil {
		t.Fatal(err)
	}
	return func(state string) string { return s.seal(state, nil) }, func(sealed string) (string, error) { return s.open(sealed, nil) }
}
