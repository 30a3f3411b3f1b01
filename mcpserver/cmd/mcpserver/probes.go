package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// This file has tools for our own end-to-end tests: they show on one replica what was set off through another.

// waits remembers how calls of test_wait ended on this replica. A cancelled call has no answer that could tell.
type waits struct {
	mu   sync.Mutex
	ends map[string]waitEnd
}

// waitEnd is how and when a call of test_wait ended.
type waitEnd struct {
	At    time.Time `json:"at"`
	Cause string    `json:"cause"`
}

// addProbes adds the tools to a server made with [everythingOptions].
func addProbes(server *mcp.Server) {
	w := &waits{ends: map[string]waitEnd{}}
	mcp.AddTool(server, &mcp.Tool{Name: "test_wait", Description: "Waits until it is cancelled, which test_waits tells."}, w.wait)
	mcp.AddTool(server, &mcp.Tool{Name: "test_waits", Description: "Answers a JSON object: when and why calls of test_wait ended on this replica, by their name."}, w.list)
	mcp.AddTool(server, &mcp.Tool{Name: "test_update_resource", Description: "Tells those subscribed to a resource that it was updated."},
		func(ctx context.Context, _ *mcp.CallToolRequest, in updateInput) (*mcp.CallToolResult, any, error) {
			if err := server.ResourceUpdated(ctx, &mcp.ResourceUpdatedNotificationParams{URI: in.URI}); err != nil {
				return nil, nil, err
			}
			return text("updated"), nil, nil
		})
}

type updateInput struct {
	URI string `json:"uri" jsonschema:"the resource"`
}

type waitInput struct {
	Name    string  `json:"name" jsonschema:"what test_waits is to call it"`
	Seconds float64 `json:"seconds,omitempty" jsonschema:"how long to wait at most, 60 if not given"`
}

// wait reports progress when it begins, if the client asked for that: then a cancellation finds it running.
func (w *waits) wait(ctx context.Context, req *mcp.CallToolRequest, in waitInput) (*mcp.CallToolResult, any, error) {
	if in.Seconds == 0 {
		in.Seconds = 60
	}
	if in.Seconds < 0 || in.Seconds > maxSeconds {
		return nil, nil, fmt.Errorf("seconds is %v, want 0 to %d", in.Seconds, maxSeconds)
	}
	if token := req.Params.GetProgressToken(); token != nil {
		if err := req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: 0, Total: in.Seconds}); err != nil {
			return nil, nil, err
		}
	}
	err := pause(ctx, time.Duration(in.Seconds*float64(time.Second)))
	end := waitEnd{At: time.Now(), Cause: "its time was over"}
	if err != nil {
		end.Cause = err.Error()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.ends) == maxMessages {
		clear(w.ends)
	}
	w.ends[in.Name] = end
	if err != nil {
		return nil, nil, err
	}
	return text("waited"), nil, nil
}

func (w *waits) list(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return jsonText(w.ends)
}
