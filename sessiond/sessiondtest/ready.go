package sessiondtest

import (
	"context"
	"fmt"
	"io"
	"net/http"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

// HTTPReady is a [Command]'s Ready: a GET of the URL answers 200.
func HTTPReady(url string) func(context.Context) error {
	return func(ctx context.Context) error {
		// No connection is kept: the next question may be meant for the process's next run.
		t := &http.Transport{DisableKeepAlives: true}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
		if err != nil {
			return err
		}
		resp, err := t.RoundTrip(req)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("GET %s: %s: %s", url, resp.Status, body)
		}
		return nil
	}
}

// GRPCReady is a [Command]'s Ready: the gRPC health service at addr says SERVING for the server as a whole.
func GRPCReady(addr string) func(context.Context) error {
	return func(ctx context.Context) error {
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		resp, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
		if err != nil {
			return err
		}
		if resp.GetStatus() != healthv1.HealthCheckResponse_SERVING {
			return fmt.Errorf("health of %s: %s", addr, resp.GetStatus())
		}
		return nil
	}
}
