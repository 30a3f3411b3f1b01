//go:build unix

package main

import (
	"context"
	"iter"
	"sync"
	"time"
)

// A channel is how a contestant's messages go: a subscriber, whose messages come from what subscribe returns once it is ready for
// them, a publisher, and what has to be done now and then that does not belong to either.
type channel struct {
	subscribe func(context.Context) (iter.Seq[error], error)
	publish   func(context.Context) error
	tidy      func(context.Context) error // may be nil
}

// open begins to subscribe. Each call of send publishes one message and says how long it took to arrive. The clock stops when
// the subscriber has the message, which may be before the publisher is told.
func (c channel) open(ctx context.Context) (send func(context.Context) (time.Duration, error), stop func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	messages, err := c.subscribe(ctx)
	if err != nil {
		cancel()
		return nil, nil, err
	}
	type arrival struct {
		at  time.Time
		err error
	}
	arrived := make(chan arrival, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		for err := range messages {
			select {
			case arrived <- arrival{time.Now(), err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	})
	send = func(ctx context.Context) (time.Duration, error) {
		began := time.Now()
		if err := c.publish(ctx); err != nil {
			return 0, err
		}
		select {
		case a := <-arrived:
			if a.err == nil && c.tidy != nil {
				a.err = c.tidy(ctx)
			}
			return a.at.Sub(began), a.err
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	return send, func() { cancel(); wg.Wait() }, nil
}

// endless is a sequence of what next returns, until yield has enough.
func endless(next func() error) iter.Seq[error] {
	return func(yield func(error) bool) {
		for yield(next()) {
		}
	}
}
