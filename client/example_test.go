package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/sessiond/sessiond/client"
)

// A session is created, changed under its lock, and removed.
func Example() {
	ctx := context.Background()
	sessions, err := client.New([]string{"sessiond-1:7400", "sessiond-2:7400"}, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sessions.Close()

	session, err := sessions.Create(ctx, []byte("0"), client.CreateOptions{TTL: 30 * time.Minute})
	if err != nil {
		log.Fatal(err)
	}
	err = sessions.WithLock(ctx, session.ID, client.AcquireOptions{}, func(_ context.Context, data []byte) ([]byte, error) {
		return append(data, '1'), nil // two commits in all: acquire and read, save and release
	})
	switch {
	case errors.Is(err, client.ErrLockTimeout):
		fmt.Println("somebody else held the lock all the time")
	case err != nil:
		log.Fatal(err)
	}
	if _, err := sessions.Destroy(ctx, session.ID); err != nil {
		log.Fatal(err)
	}
}

// Without a lock, a save that names the revision it is based on is refused if others saved meanwhile.
func ExampleClient_Save() {
	ctx := context.Background()
	sessions, err := client.New([]string{"127.0.0.1:7400"}, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sessions.Close()
	for {
		session, err := sessions.Read(ctx, "my-session")
		if err != nil {
			log.Fatal(err)
		}
		_, err = sessions.Save(ctx, session.ID, append(session.Data, '1'), client.SaveOptions{ExpectedRevision: session.Revision})
		if errors.Is(err, client.ErrRevisionMismatch) {
			continue
		}
		if err != nil {
			log.Fatal(err)
		}
		return
	}
}
