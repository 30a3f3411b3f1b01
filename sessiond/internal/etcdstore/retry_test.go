package etcdstore

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// L9: a read that gets no answer is tried on other members, all within its time; one that fails is not.
func TestAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		silent := func(ctx context.Context) (int, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		}
		fault := errors.New("refused")
		tests := []struct {
			name    string
			members int
			answer  func(try int) func(context.Context) (int, error)
			tries   int
			err     error
			took    time.Duration
		}{
			{"answer", 3, func(int) func(context.Context) (int, error) {
				return func(context.Context) (int, error) { return 1, nil }
			}, 1, nil, 0},
			{"fault", 3, func(int) func(context.Context) (int, error) {
				return func(context.Context) (int, error) { return 0, fault }
			}, 1, fault, 0},
			{"all silent", 3, func(int) func(context.Context) (int, error) { return silent }, 3, context.DeadlineExceeded, 3 * time.Second},
			{"five silent", 5, func(int) func(context.Context) (int, error) { return silent }, 3, context.DeadlineExceeded, 3 * time.Second},
			{"only one member", 1, func(int) func(context.Context) (int, error) { return silent }, 1, context.DeadlineExceeded, 3 * time.Second},
			{"one silent", 3, func(try int) func(context.Context) (int, error) {
				if try == 1 {
					return silent
				}
				return func(context.Context) (int, error) { return 1, nil }
			}, 2, nil, time.Second},
		}
		for _, tt := range tests {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			began, tries := time.Now(), 0
			_, err := again(ctx, tt.members, func(ctx context.Context) (int, error) {
				tries++
				return tt.answer(tries)(ctx)
			})
			cancel()
			if !errors.Is(err, tt.err) || tries != tt.tries || time.Since(began) != tt.took {
				t.Errorf("%s: %v after %d tries and %v", tt.name, err, tries, time.Since(began))
			}
		}
	})
}
