package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/mcpserver"
)

// newServer makes the MCP server that this program serves: tools that show what sessions are for.
func newServer(version string, everything bool) *mcp.Server {
	opts := &mcp.ServerOptions{}
	if everything {
		opts = everythingOptions()
	}
	opts.Instructions = "Tools that show sessions kept in sessiond. Any replica serves any call."
	server := mcp.NewServer(&mcp.Implementation{Name: "sessiond-mcpserver", Title: "sessiond demonstration server", Version: version}, opts)
	addTools(server)
	addResources(server)
	if everything {
		addEverything(server)
	}
	return server
}

func addTools(server *mcp.Server) {
	mcp.AddTool(server, &mcp.Tool{Name: "echo", Description: "Answers the text, verbatim."}, echo)
	mcp.AddTool(server, &mcp.Tool{Name: "counter_add", Description: "Adds to the session's total and answers the new total."}, counterAdd)
	mcp.AddTool(server, &mcp.Tool{Name: "note_set", Description: "Sets a note of the session."}, noteSet)
	mcp.AddTool(server, &mcp.Tool{Name: "notes_list", Description: "Answers the session's notes, a JSON object."}, notesList)
	mcp.AddTool(server, &mcp.Tool{Name: "ask", Description: "Asks the user so many questions, one after the other, and answers a JSON array of the answers."}, ask)
	mcp.AddTool(server, &mcp.Tool{Name: "sample", Description: "Has the client's model answer a prompt."}, sample)
	mcp.AddTool(server, &mcp.Tool{Name: "roots", Description: "Answers the client's roots, a JSON array of URIs."}, roots)
	mcp.AddTool(server, &mcp.Tool{Name: "slow", Description: "Takes so many seconds, with progress each second."}, slow)
	mcp.AddTool(server, &mcp.Tool{Name: "say", Description: "Sends so many log messages, so many milliseconds apart."}, say)
	mcp.AddTool(server, &mcp.Tool{Name: "fail", Description: "Fails with the message, as a tool error."}, fail)
	mcp.AddTool(server, &mcp.Tool{Name: "panic", Description: "Panics."}, panics)
}

func text(s string) *mcp.CallToolResult {
	return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: s}}}
}

type echoInput struct {
	Text string `json:"text" jsonschema:"what to answer"`
}

func echo(_ context.Context, _ *mcp.CallToolRequest, in echoInput) (*mcp.CallToolResult, any, error) {
	return text(in.Text), nil, nil
}

type counterInput struct {
	By int64 `json:"by" jsonschema:"what to add"`
}

// counterAdd reads, changes and saves a value. Without the lock, calls at the same time overwrite each other's total.
func counterAdd(ctx context.Context, _ *mcp.CallToolRequest, in counterInput) (*mcp.CallToolResult, any, error) {
	total, _, err := mcpserver.Get[int64](ctx, "counter")
	if err != nil {
		return nil, nil, err
	}
	total += in.By
	if err := mcpserver.Set(ctx, "counter", total); err != nil {
		return nil, nil, err
	}
	return text(fmt.Sprint(total)), nil, nil
}

// noteKey keeps notes apart from other values, each under a key of its own, so that those set at the same time all stay.
const noteKey = "note/"

type noteInput struct {
	Key   string `json:"key" jsonschema:"the note's name"`
	Value string `json:"value" jsonschema:"the note"`
}

func noteSet(ctx context.Context, _ *mcp.CallToolRequest, in noteInput) (*mcp.CallToolResult, any, error) {
	if in.Key == "" {
		return nil, nil, errors.New("key is empty")
	}
	if err := mcpserver.Set(ctx, noteKey+in.Key, in.Value); err != nil {
		return nil, nil, err
	}
	return text("ok"), nil, nil
}

func notesList(ctx context.Context, _ *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
	notes, err := notesOf(ctx)
	if err != nil {
		return nil, nil, err
	}
	return jsonText(notes)
}

func notesOf(ctx context.Context) (map[string]string, error) {
	keys, err := mcpserver.Keys(ctx)
	if err != nil {
		return nil, err
	}
	notes := map[string]string{}
	for _, key := range keys {
		name, ok := strings.CutPrefix(key, noteKey)
		if !ok {
			continue
		}
		if notes[name], _, err = mcpserver.Get[string](ctx, key); err != nil {
			return nil, err
		}
	}
	return notes, nil
}

func jsonText(v any) (*mcp.CallToolResult, any, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, nil, err
	}
	return text(string(data)), nil, nil
}

// The most that a call may ask of this program, which is for demonstration and tests.
const (
	maxQuestions = 100
	maxSeconds   = 3600
	maxMessages  = 10_000
)

type askInput struct {
	Questions int `json:"questions" jsonschema:"how many questions, 1 to 100"`
}

func ask(ctx context.Context, req *mcp.CallToolRequest, in askInput) (*mcp.CallToolResult, any, error) {
	if in.Questions < 1 || in.Questions > maxQuestions {
		return nil, nil, fmt.Errorf("questions is %d, want 1 to %d", in.Questions, maxQuestions)
	}
	answers := make([]any, 0, in.Questions)
	for i := range in.Questions {
		res, err := req.Session.Elicit(ctx, &mcp.ElicitParams{
			Message: fmt.Sprintf("Question %d of %d", i+1, in.Questions),
			RequestedSchema: map[string]any{
				"type":       "object",
				"properties": map[string]any{"answer": map[string]any{"type": "string"}},
				"required":   []string{"answer"},
			},
		})
		if err != nil {
			return nil, nil, err
		}
		if res.Action != "accept" {
			answers = append(answers, nil)
			continue
		}
		answers = append(answers, res.Content["answer"])
	}
	return jsonText(answers)
}

type sampleInput struct {
	Prompt string `json:"prompt" jsonschema:"what to ask the model"`
}

func sample(ctx context.Context, req *mcp.CallToolRequest, in sampleInput) (*mcp.CallToolResult, any, error) {
	res, err := req.Session.CreateMessage(ctx, &mcp.CreateMessageParams{
		Messages:  []*mcp.SamplingMessage{{Role: "user", Content: &mcp.TextContent{Text: in.Prompt}}},
		MaxTokens: 100,
	})
	if err != nil {
		return nil, nil, err
	}
	answer, ok := res.Content.(*mcp.TextContent)
	if !ok {
		return nil, nil, fmt.Errorf("the model answered with %T, want text", res.Content)
	}
	return text(answer.Text), nil, nil
}

func roots(ctx context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
	res, err := req.Session.ListRoots(ctx, nil)
	if err != nil {
		return nil, nil, err
	}
	uris := make([]string, 0, len(res.Roots))
	for _, root := range res.Roots {
		uris = append(uris, root.URI)
	}
	return jsonText(uris)
}

type slowInput struct {
	Seconds float64 `json:"seconds" jsonschema:"how long to take, 0 to 3600"`
}

func slow(ctx context.Context, req *mcp.CallToolRequest, in slowInput) (*mcp.CallToolResult, any, error) {
	if in.Seconds < 0 || in.Seconds > maxSeconds {
		return nil, nil, fmt.Errorf("seconds is %v, want 0 to %d", in.Seconds, maxSeconds)
	}
	for passed := 0.0; passed < in.Seconds; {
		step := min(1, in.Seconds-passed)
		if err := pause(ctx, time.Duration(step*float64(time.Second))); err != nil {
			return nil, nil, err
		}
		passed += step
		token := req.Params.GetProgressToken()
		if token == nil {
			continue
		}
		if err := req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: passed, Total: in.Seconds}); err != nil {
			return nil, nil, err
		}
	}
	return text(fmt.Sprintf("took %v s", in.Seconds)), nil, nil
}

type sayInput struct {
	Count    int `json:"count" jsonschema:"how many messages, 0 to 10000"`
	Interval int `json:"interval_ms" jsonschema:"milliseconds between them"`
}

func say(ctx context.Context, req *mcp.CallToolRequest, in sayInput) (*mcp.CallToolResult, any, error) {
	if in.Count < 0 || in.Count > maxMessages || in.Interval < 0 || in.Interval > maxSeconds*1000 {
		return nil, nil, fmt.Errorf("count is %d and interval_ms %d, want 0 to %d and 0 to %d", in.Count, in.Interval, maxMessages, maxSeconds*1000)
	}
	for i := range in.Count {
		if i > 0 {
			if err := pause(ctx, time.Duration(in.Interval)*time.Millisecond); err != nil {
				return nil, nil, err
			}
		}
		if err := req.Session.Log(ctx, &mcp.LoggingMessageParams{Level: "info", Logger: "say", Data: fmt.Sprintf("message %d of %d", i+1, in.Count)}); err != nil {
			return nil, nil, err
		}
	}
	return text(fmt.Sprintf("said %d", in.Count)), nil, nil
}

type failInput struct {
	Message string `json:"message" jsonschema:"the error's message"`
}

func fail(_ context.Context, _ *mcp.CallToolRequest, in failInput) (*mcp.CallToolResult, any, error) {
	return nil, nil, errors.New(in.Message)
}

func panics(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
	panic("the panic tool was called")
}

func addResources(server *mcp.Server) {
	const about = "sessiond://about"
	server.AddResource(&mcp.Resource{URI: about, Name: "about", Description: "What this server shows.", MIMEType: "text/plain"},
		func(context.Context, *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
			return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{
				URI: about, MIMEType: "text/plain",
				Text: "A session of this server is kept in sessiond: any replica serves any of its requests.",
			}}}, nil
		})
	const notes = "sessiond://notes"
	server.AddResource(&mcp.Resource{URI: notes, Name: "notes", Description: "The session's notes.", MIMEType: "application/json"},
		func(ctx context.Context, _ *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
			found, err := notesOf(ctx)
			if err != nil {
				return nil, err
			}
			data, err := json.Marshal(found)
			if err != nil {
				return nil, err
			}
			return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: notes, MIMEType: "application/json", Text: string(data)}}}, nil
		})
}
