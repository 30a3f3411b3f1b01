package main

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

const (
	handshakeEra = "2025-11-25"
	modernEra    = "2026-07-28"
)

// heard are the notifications that a client got.
type heard struct {
	logs     chan string
	progress chan float64
	lists    chan string
}

// connect connects a client of a revision that answers every question.
func connect(t *testing.T, revision string, everything bool) (*mcp.ClientSession, heard) {
	t.Helper()
	h := heard{make(chan string, 10), make(chan float64, 10), make(chan string, 10)}
	client := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, &mcp.ClientOptions{
		ElicitationHandler: func(_ context.Context, req *mcp.ElicitRequest) (*mcp.ElicitResult, error) {
			data, err := json.Marshal(req.Params.RequestedSchema)
			if err != nil {
				return nil, err
			}
			var schema struct {
				Properties map[string]struct{ Type string }
			}
			if err := json.Unmarshal(data, &schema); err != nil {
				return nil, err
			}
			known := map[string]any{"username": "ada", "email": "ada@example.com", "name": "Ada", "color": "blue", "context": "tests", "ok": true, "age": 36, "titledMulti": []string{"value1"}}
			content := map[string]any{}
			for name := range schema.Properties {
				if value, ok := known[name]; ok {
					content[name] = value
				}
			}
			return &mcp.ElicitResult{Action: "accept", Content: content}, nil
		},
		CreateMessageHandler: func(context.Context, *mcp.CreateMessageRequest) (*mcp.CreateMessageResult, error) {
			return &mcp.CreateMessageResult{Role: "assistant", Model: "test", Content: &mcp.TextContent{Text: "Paris"}}, nil
		},
		LoggingMessageHandler: func(_ context.Context, req *mcp.LoggingMessageRequest) {
			message, _ := req.Params.Data.(string)
			h.logs <- message
		},
		ProgressNotificationHandler: func(_ context.Context, req *mcp.ProgressNotificationClientRequest) {
			h.progress <- req.Params.Progress
		},
		ToolListChangedHandler:   func(context.Context, *mcp.ToolListChangedRequest) { h.lists <- "tools" },
		PromptListChangedHandler: func(context.Context, *mcp.PromptListChangedRequest) { h.lists <- "prompts" },
	})
	client.AddRoots(&mcp.Root{URI: "file:///work", Name: "work"})
	near, far := mcp.NewInMemoryTransports()
	server, err := newServer("test", everything).Connect(t.Context(), far, nil)
	if err != nil {
		t.Fatal(err)
	}
	session, err := client.Connect(t.Context(), near, &mcp.ClientSessionOptions{ProtocolVersion: revision})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Either end may find the other closed already.
		_ = session.Close()
		_ = server.Wait()
	})
	if got := session.InitializeResult().ProtocolVersion; got != revision {
		t.Fatalf("negotiated %s, want %s", got, revision)
	}
	return session, h
}

func receive[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case value := <-from:
		return value
	case <-time.After(10 * time.Second):
		t.Fatal("nothing came within 10 s")
		panic("unreachable")
	}
}

// Every name that the suite calls is there, and none unless asked for.
func TestEverythingNames(t *testing.T) {
	want := map[string][]string{
		"tools": {
			"json_schema_2020_12_tool", "test_audio_content", "test_elicitation", "test_elicitation_sep1034_defaults",
			"test_elicitation_sep1330_enums", "test_embedded_resource", "test_error_handling", "test_image_content",
			"test_input_required_result_capabilities", "test_input_required_result_elicitation",
			"test_input_required_result_list_roots", "test_input_required_result_multi_round",
			"test_input_required_result_multiple_inputs", "test_input_required_result_request_state",
			"test_input_required_result_sampling", "test_input_required_result_tampered_state", "test_logging_tool",
			"test_missing_capability", "test_multiple_content_types", "test_reconnection", "test_sampling", "test_simple_text",
			"test_streaming_elicitation", "test_tool_with_logging", "test_tool_with_progress", "test_trigger_prompt_change",
			"test_trigger_tool_change", "test_x_mcp_header",
		},
		"prompts": {
			"test_input_required_result_prompt", "test_prompt_with_arguments", "test_prompt_with_embedded_resource",
			"test_prompt_with_image", "test_simple_prompt",
		},
		"resources": {"test://static-binary", "test://static-text", "test://watched-resource"},
		"templates": {"test://template/{id}/data"},
	}
	for _, everything := range []bool{true, false} {
		session, _ := connect(t, modernEra, everything)
		got := map[string][]string{}
		for tool, err := range session.Tools(t.Context(), nil) {
			if err != nil {
				t.Fatal(err)
			}
			got["tools"] = append(got["tools"], tool.Name)
		}
		for prompt, err := range session.Prompts(t.Context(), nil) {
			if err != nil {
				// Without prompts there is no such method.
				if everything {
					t.Fatal(err)
				}
				break
			}
			got["prompts"] = append(got["prompts"], prompt.Name)
		}
		for resource, err := range session.Resources(t.Context(), nil) {
			if err != nil {
				t.Fatal(err)
			}
			got["resources"] = append(got["resources"], resource.URI)
		}
		for template, err := range session.ResourceTemplates(t.Context(), nil) {
			if err != nil {
				t.Fatal(err)
			}
			got["templates"] = append(got["templates"], template.URITemplate)
		}
		for kind, names := range want {
			for _, name := range names {
				if slices.Contains(got[kind], name) != everything {
					t.Errorf("everything %t: %s has %q: %t, want %t", everything, kind, name, !everything, everything)
				}
			}
		}
	}
}

func textOf(t *testing.T, contents []mcp.Content) string {
	t.Helper()
	var texts []string
	for _, content := range contents {
		if said, ok := content.(*mcp.TextContent); ok {
			texts = append(texts, said.Text)
		}
	}
	return strings.Join(texts, " ")
}

// Tools answer as the suite wants; those that ask through their results are asked in both eras.
func TestEverythingTools(t *testing.T) {
	const prefix = "test_input_required_result_"
	both := []string{handshakeEra, modernEra}
	for _, c := range []struct {
		tool      string
		arguments map[string]any
		eras      []string
		want      string
		isError   bool
	}{
		{tool: "test_simple_text", eras: both, want: "This is a simple text response for testing."},
		{tool: "test_error_handling", eras: both, want: "this tool fails, for testing", isError: true},
		{tool: "test_reconnection", eras: both, want: "answered after the stream was closed"},
		{tool: "test_sampling", arguments: map[string]any{"prompt": "?"}, eras: both[:1], want: "LLM response: Paris"},
		{
			tool: "test_elicitation", arguments: map[string]any{"message": "?"}, eras: both[:1],
			want: `User response: action=accept, content={"email":"ada@example.com","username":"ada"}`,
		},
		{
			tool: "test_elicitation_sep1034_defaults", eras: both[:1],
			want: `User response: action=accept, content={"age":36,"name":"Ada","score":95.5,"status":"active","verified":true}`,
		},
		{
			tool: "test_elicitation_sep1330_enums", eras: both[:1],
			want: `User response: action=accept, content={"titledMulti":["value1"]}`,
		},
		{tool: prefix + "elicitation", eras: both, want: "Hello, Ada!"},
		{tool: prefix + "sampling", eras: both, want: "The model says: Paris"},
		{tool: prefix + "list_roots", eras: both, want: "Roots: file:///work"},
		{tool: prefix + "request_state", eras: both, want: "state-ok: true"},
		{tool: prefix + "multiple_inputs", eras: both, want: "Answers: Ada, Paris, file:///work"},
		// The SDK goes through one round only on behalf of clients of the handshake era.
		{tool: prefix + "multi_round", eras: both[1:], want: "Answers: Ada, blue"},
		{tool: prefix + "capabilities", eras: both, want: "Answers: Ada, Paris, file:///work"},
		{
			tool: "json_schema_2020_12_tool", eras: both, want: `{"contactMethod":"phone","phone":"1"}`,
			arguments: map[string]any{"contactMethod": "phone", "phone": "1"},
		},
		{tool: "test_x_mcp_header", arguments: map[string]any{"region": "eu"}, eras: both, want: `{"region":"eu","level":0}`},
	} {
		for _, era := range c.eras {
			t.Run(c.tool+" "+era, func(t *testing.T) {
				session, _ := connect(t, era, true)
				res, err := session.CallTool(t.Context(), &mcp.CallToolParams{Name: c.tool, Arguments: c.arguments})
				if err != nil {
					t.Fatal(err)
				}
				if got := textOf(t, res.Content); got != c.want || res.IsError != c.isError {
					t.Errorf("got %q (error: %t), want %q (error: %t)", got, res.IsError, c.want, c.isError)
				}
			})
		}
	}
}

func TestEverythingContents(t *testing.T) {
	session, _ := connect(t, handshakeEra, true)
	res, err := session.CallTool(t.Context(), &mcp.CallToolParams{Name: "test_multiple_content_types"})
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Content) != 3 {
		t.Fatalf("got %d contents, want 3", len(res.Content))
	}
	if image, ok := res.Content[1].(*mcp.ImageContent); !ok || string(image.Data) != redPNG {
		t.Errorf("got %#v, want the red pixel", res.Content[1])
	}
	if resource, ok := res.Content[2].(*mcp.EmbeddedResource); !ok || resource.Resource.URI != "test://mixed-content-resource" {
		t.Errorf("got %#v, want the embedded resource", res.Content[2])
	}
}

func TestEverythingNotifications(t *testing.T) {
	session, heard := connect(t, handshakeEra, true)
	if err := session.SetLoggingLevel(t.Context(), &mcp.SetLoggingLevelParams{Level: "debug"}); err != nil {
		t.Fatal(err)
	}
	call := func(params *mcp.CallToolParams) {
		t.Helper()
		if _, err := session.CallTool(t.Context(), params); err != nil {
			t.Fatal(err)
		}
	}
	call(&mcp.CallToolParams{Name: "test_tool_with_logging"})
	for _, want := range []string{"Tool execution started", "Tool processing data", "Tool execution completed"} {
		if got := receive(t, heard.logs); got != want {
			t.Errorf("got log message %q, want %q", got, want)
		}
	}
	params := &mcp.CallToolParams{Name: "test_tool_with_progress"}
	params.SetProgressToken("token")
	call(params)
	for _, want := range []float64{0, 50, 100} {
		if got := receive(t, heard.progress); got != want {
			t.Errorf("got progress %v, want %v", got, want)
		}
	}
	for _, list := range []string{"tool", "prompt"} {
		call(&mcp.CallToolParams{Name: "test_trigger_" + list + "_change"})
		if got := receive(t, heard.lists); got != list+"s" {
			t.Errorf("the list of %s changed, want %ss", got, list)
		}
	}
}

func TestEverythingPrompts(t *testing.T) {
	session, _ := connect(t, modernEra, true)
	for _, c := range []struct {
		prompt    string
		arguments map[string]string
		want      string
	}{
		{"test_prompt_with_arguments", map[string]string{"arg1": "hello", "arg2": "world"}, "Prompt with arguments: arg1='hello', arg2='world'"},
		{"test_prompt_with_embedded_resource", map[string]string{"resourceUri": "test://x"}, "Please process the embedded resource above."},
		{"test_input_required_result_prompt", nil, "Context: tests"},
	} {
		res, err := session.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: c.prompt, Arguments: c.arguments})
		if err != nil {
			t.Errorf("%s: %v", c.prompt, err)
			continue
		}
		if got := textOf(t, []mcp.Content{res.Messages[len(res.Messages)-1].Content}); got != c.want {
			t.Errorf("%s: got %q, want %q", c.prompt, got, c.want)
		}
	}
}

func TestEverythingResources(t *testing.T) {
	session, _ := connect(t, handshakeEra, true)
	for uri, want := range map[string]string{
		"test://static-text":       "This is the content of the static text resource.",
		"test://static-binary":     redPNG,
		"test://template/123/data": `{"data":"Data for ID: 123","id":"123","templateTest":true}`,
	} {
		res, err := session.ReadResource(t.Context(), &mcp.ReadResourceParams{URI: uri})
		if err != nil {
			t.Errorf("%s: %v", uri, err)
			continue
		}
		if contents := res.Contents[0]; contents.URI != uri || contents.Text+string(contents.Blob) != want {
			t.Errorf("%s: got %+v, want %q", uri, contents, want)
		}
	}
	const watched = "test://watched-resource"
	if err := session.Subscribe(t.Context(), &mcp.SubscribeParams{URI: watched}); err != nil {
		t.Error(err)
	}
	if err := session.Unsubscribe(t.Context(), &mcp.UnsubscribeParams{URI: watched}); err != nil {
		t.Error(err)
	}
}

func TestEverythingCompletion(t *testing.T) {
	session, _ := connect(t, modernEra, true)
	for typed, want := range map[string][]string{"par": {"paris", "park", "party"}, "x": {}} {
		res, err := session.Complete(t.Context(), &mcp.CompleteParams{
			Ref:      &mcp.CompleteReference{Type: "ref/prompt", Name: "test_prompt_with_arguments"},
			Argument: mcp.CompleteParamsArgument{Name: "arg1", Value: typed},
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := res.Completion.Values; got == nil || !slices.Equal(got, want) {
			t.Errorf("%q: got %#v, want %#v", typed, got, want)
		}
	}
}

// A client that cannot be asked is told so, or is asked less.
func TestInquiryCapabilities(t *testing.T) {
	name, greeting := askUser("name", "?", "name", "string"), askModel("greeting", "?", 1)
	caps := &mcp.ClientCapabilities{Sampling: &mcp.SamplingCapabilities{}}

	strict := &inquiry{rounds: [][]question{{name, greeting}}}
	_, err := strict.next(caps, nil, "")
	wire, ok := errors.AsType[*jsonrpc.Error](err)
	if !ok || wire.Code != mcp.CodeMissingRequiredClientCapabilities || string(wire.Data) != `{"requiredCapabilities":{"elicitation":{}}}` {
		t.Errorf("got %v, want that elicitation is missing", err)
	}

	lenient := &inquiry{rounds: strict.rounds, optional: true}
	turn, err := lenient.next(caps, nil, "")
	if err != nil || len(turn.asks) != 1 || turn.asks["greeting"] == nil {
		t.Errorf("got %v, %v, want one question to the model", turn, err)
	}
}

// Answers count only with a state that this program sealed, for the same inquiry; what is not answered is asked again.
func TestInquirySeal(t *testing.T) {
	rounds := [][]question{{askUser("confirm", "?", "ok", "boolean")}}
	q := &inquiry{name: "a", rounds: rounds, sealed: true, result: "%s"}
	caps := &mcp.ClientCapabilities{Elicitation: &mcp.ElicitationCapabilities{}}
	accepted := mcp.InputResponseMap{"confirm": &mcp.ElicitResult{Action: "accept", Content: map[string]any{"ok": true}}}

	first, err := q.next(caps, accepted, "")
	if err != nil || first.asks == nil || first.state == "" {
		t.Fatalf("answers without a state: got %+v, %v, want a question with a state", first, err)
	}
	for what, responses := range map[string]mcp.InputResponseMap{
		"no answer":                nil,
		"answer to something":      {"else": &mcp.ElicitResult{Action: "accept"}},
		"answer without its value": {"confirm": &mcp.ElicitResult{Action: "accept"}},
	} {
		if again, err := q.next(caps, responses, first.state); err != nil || again.asks == nil {
			t.Errorf("%s: got %+v, %v, want the question again", what, again, err)
		}
	}
	if done, err := q.next(caps, accepted, first.state); err != nil || done.asks != nil || done.result != "true" {
		t.Errorf("got %+v, %v, want the result", done, err)
	}
	if _, err := q.next(caps, mcp.InputResponseMap{"confirm": &mcp.ElicitResult{Action: "decline"}}, first.state); err == nil {
		t.Error("declined: got no error")
	}
	other := &inquiry{name: "b", rounds: rounds, sealed: true, result: "%s"}
	for what, refused := range map[string]func() (turn, error){
		"longer":            func() (turn, error) { return q.next(caps, accepted, first.state+"-TAMPERED") },
		"cut off":           func() (turn, error) { return q.next(caps, accepted, first.state[:8]) },
		"another inquiry's": func() (turn, error) { return other.next(caps, accepted, first.state) },
	} {
		_, err := refused()
		if wire, ok := errors.AsType[*jsonrpc.Error](err); !ok || wire.Code != jsonrpc.CodeInvalidParams {
			t.Errorf("state %s: got %v, want invalid params", what, err)
		}
	}
}
