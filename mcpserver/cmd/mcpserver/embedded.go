package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/sessiond"
)

// startEmbedded starts a sessiond inside this process, on a Unix socket that only this user can reach. failed is called if
// it stops by itself. The function it returns stops it.
func startEmbedded(ctx context.Context, c config, logger *slog.Logger, failed func(error)) (_ *client.Client, stop func() error, err error) {
	dir, err := os.MkdirTemp("", "mcpserver-")
	if err != nil {
		return nil, nil, fmt.Errorf("embedded sessiond: %w", err)
	}
	socket := "unix:" + filepath.Join(dir, "sessiond.sock")
	cfg := sessiond.Config{Listen: socket, Grace: c.grace, Logger: logger.With(slog.String("part", "sessiond"))}
	if c.sessiond == sessiondMemory {
		cfg.Store = sessiond.StoreMemory
	} else {
		cfg.DataDir = c.dataDir
	}
	node, err := sessiond.New(ctx, cfg)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("embedded sessiond: %w", err), os.RemoveAll(dir))
	}
	// The node outlives ctx: the front-end drains first, and needs it for that.
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() {
		err := node.Run(running)
		if err != nil && running.Err() == nil {
			failed(fmt.Errorf("embedded sessiond: %w", err))
		}
		done <- err
	}()
	sessions, err := client.New([]string{socket}, client.Options{Attach: c.lock})
	stop = func() error {
		var errs []error
		if sessions != nil {
			errs = append(errs, sessions.Close())
		}
		cancel()
		return errors.Join(append(errs, <-done, os.RemoveAll(dir))...)
	}
	if err != nil {
		return nil, nil, errors.Join(err, stop())
	}
	return sessions, stop, nil
}
