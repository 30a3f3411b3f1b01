package sessiondtest

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const pollInterval = 20 * time.Millisecond

// Poll calls try until it returns nil, ctx ends, or it returns an error marked [Final]. The error that comes back is the
// last one of try, or the one before if the last was cut short by the end of ctx.
func Poll(ctx context.Context, try func(context.Context) error) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	var last error
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		if final, ok := errors.AsType[finalError](err); ok {
			return final.error
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), last)
		case <-tick.C:
		}
	}
}

// Final marks an error that trying again cannot mend.
func Final(err error) error { return finalError{err} }

type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }
