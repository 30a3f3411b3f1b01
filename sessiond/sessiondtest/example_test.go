package sessiondtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond/sessiondtest"
)

// count is what the example tests: it counts a session's requests under the lock.
func count(ctx context.Context, sessions *client.Client, id string) error {
	return sessions.WithLock(ctx, id, client.AcquireOptions{TTL: time.Minute}, func(_ context.Context, data []byte) ([]byte, error) {
		return append(data, '+'), nil
	})
}

// A test of code that uses sessiond, against a real one. In a test file it is a function of its own:
//
//	func TestCount(t *testing.T) { ... }
func ExampleStart() {
	_ = func(t *testing.T) {
		sessions := sessiondtest.Start(t).Client()

		session, err := sessions.Create(t.Context(), nil, client.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := count(t.Context(), sessions, session.ID); err != nil {
				t.Fatal(err)
			}
		}
		if session, err = sessions.Read(t.Context(), session.ID); err != nil || string(session.Data) != "++" {
			t.Errorf("counted %q, %v", session.Data, err)
		}
	}
}
