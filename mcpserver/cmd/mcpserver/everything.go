package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// This file has what the official conformance suite wants of a server. Names, arguments and schemas are the suite's.

// everythingOptions are the server's settings that go with [addEverything].
func everythingOptions() *mcp.ServerOptions {
	return &mcp.ServerOptions{
		CompletionHandler: complete,
		// Nothing to refuse, and nothing to remember: who is subscribed to what is kept with the session.
		SubscribeHandler:   func(context.Context, *mcp.SubscribeRequest) error { return nil },
		UnsubscribeHandler: func(context.Context, *mcp.UnsubscribeRequest) error { return nil },
	}
}

// addEverything adds the suite's tools, prompts and resources to a server made with [everythingOptions].
func addEverything(server *mcp.Server) {
	addContents(server)
	addNotifiers(server)
	addQuestions(server)
	addInquiries(server)
	addSchemas(server)
	addListChanges(server)
	addPrompts(server)
	addTestResources(server)
	addProbes(server)
}

// The smallest files that are what their type says.
const (
	// redPNG is one red pixel.
	redPNG = "\x89PNG\r\n\x1a\n" +
		"\x00\x00\x00\x0dIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x02\x00\x00\x00\x90wS\xde" +
		"\x00\x00\x00\x0cIDATx\xdac\xf8\xcf\xc0\x00\x00\x03\x01\x01\x00\xf7\x03AC" +
		"\x00\x00\x00\x00IEND\xaeB`\x82"
	// silentWAV is one sample of silence: mono, 8 kHz, 16 bits.
	silentWAV = "RIFF\x26\x00\x00\x00WAVE" +
		"fmt \x10\x00\x00\x00\x01\x00\x01\x00\x40\x1f\x00\x00\x80\x3e\x00\x00\x02\x00\x10\x00" +
		"data\x02\x00\x00\x00\x00\x00"
)

const (
	plainText = "text/plain"
	jsonType  = "application/json"
	pngType   = "image/png"
)

func redPixel() mcp.Content { return &mcp.ImageContent{Data: []byte(redPNG), MIMEType: pngType} }

func embedded(uri, mimeType, text string) mcp.Content {
	return &mcp.EmbeddedResource{Resource: &mcp.ResourceContents{URI: uri, MIMEType: mimeType, Text: text}}
}

// addContents adds a tool for each kind of content.
func addContents(server *mcp.Server) {
	for _, tool := range []struct {
		name, description string
		content           []mcp.Content
	}{
		{"test_simple_text", "Answers a text.", []mcp.Content{
			&mcp.TextContent{Text: "This is a simple text response for testing."},
		}},
		{"test_image_content", "Answers an image.", []mcp.Content{redPixel()}},
		{"test_audio_content", "Answers a sound.", []mcp.Content{
			&mcp.AudioContent{Data: []byte(silentWAV), MIMEType: "audio/wav"},
		}},
		{"test_embedded_resource", "Answers a resource, contents included.", []mcp.Content{
			embedded("test://embedded-resource", plainText, "This is an embedded resource content."),
		}},
		{"test_multiple_content_types", "Answers a text, an image and a resource.", []mcp.Content{
			&mcp.TextContent{Text: "Multiple content types test:"},
			redPixel(),
			embedded("test://mixed-content-resource", jsonType, `{"test":"data","value":123}`),
		}},
	} {
		mcp.AddTool(server, &mcp.Tool{Name: tool.name, Description: tool.description},
			func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
				return &mcp.CallToolResult{Content: tool.content}, nil, nil
			})
	}
	mcp.AddTool(server, &mcp.Tool{Name: "test_error_handling", Description: "Fails."},
		func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
			return nil, nil, errors.New("this tool fails, for testing")
		})
}

// notifyPause parts notifications, so that a client sees them come one by one.
const notifyPause = 50 * time.Millisecond

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}

// addNotifiers adds the tools that send notifications, or break their stream, before they answer.
func addNotifiers(server *mcp.Server) {
	for _, tool := range []struct {
		name, description string
		messages          []string
	}{
		{"test_tool_with_logging", "Sends three log messages.", []string{
			"Tool execution started", "Tool processing data", "Tool execution completed",
		}},
		{"test_logging_tool", "Sends a log message.", []string{"Tool executed"}},
	} {
		mcp.AddTool(server, &mcp.Tool{Name: tool.name, Description: tool.description},
			func(ctx context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
				for i, message := range tool.messages {
					if i > 0 {
						if err := pause(ctx, notifyPause); err != nil {
							return nil, nil, err
						}
					}
					if err := req.Session.Log(ctx, &mcp.LoggingMessageParams{Level: "info", Logger: tool.name, Data: message}); err != nil {
						return nil, nil, err
					}
				}
				return text("logged"), nil, nil
			})
	}
	mcp.AddTool(server, &mcp.Tool{Name: "test_tool_with_progress", Description: "Reports progress in three steps."}, testProgress)
	mcp.AddTool(server, &mcp.Tool{Name: "test_reconnection", Description: "Closes its stream before it answers; the client gets the answer when it reconnects."}, testReconnection)
}

func testProgress(ctx context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
	const total = 100
	token := req.Params.GetProgressToken()
	for progress := 0.0; progress <= total; progress += total / 2 {
		if progress > 0 {
			if err := pause(ctx, notifyPause); err != nil {
				return nil, nil, err
			}
		}
		if token == nil {
			continue
		}
		if err := req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{
			ProgressToken: token, Progress: progress, Total: total,
		}); err != nil {
			return nil, nil, err
		}
	}
	return text("done"), nil, nil
}

func testReconnection(ctx context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
	// Not every transport can: the call is then answered on the stream it came on.
	if req.Extra != nil && req.Extra.CloseSSEStream != nil {
		req.Extra.CloseSSEStream(mcp.CloseSSEStreamArgs{RetryAfter: notifyPause})
	}
	// Long enough for the answer to come after the client is back.
	if err := pause(ctx, 3*notifyPause); err != nil {
		return nil, nil, err
	}
	return text("answered after the stream was closed"), nil, nil
}

// object is the JSON schema of an object.
func object(properties map[string]any, required ...string) map[string]any {
	schema := map[string]any{"type": "object", "properties": properties}
	if len(required) > 0 {
		schema["required"] = required
	}
	return schema
}

func property(typ string) map[string]any { return map[string]any{"type": typ} }

// titled are choices that have a title beside their value.
func titled(titles ...string) []map[string]any {
	choices := make([]map[string]any, len(titles))
	for i, title := range titles {
		choices[i] = map[string]any{"const": fmt.Sprintf("value%d", i+1), "title": title}
	}
	return choices
}

type messageInput struct {
	Message string `json:"message" jsonschema:"what to ask the user"`
}

// addQuestions adds the tools that ask the client while they run, which they can in the handshake era only.
func addQuestions(server *mcp.Server) {
	mcp.AddTool(server, &mcp.Tool{Name: "test_sampling", Description: "Has the client's model answer a prompt."},
		func(ctx context.Context, req *mcp.CallToolRequest, in sampleInput) (*mcp.CallToolResult, any, error) {
			res, out, err := sample(ctx, req, in)
			if err == nil {
				res.Content = append([]mcp.Content{&mcp.TextContent{Text: "LLM response:"}}, res.Content...)
			}
			return res, out, err
		})
	mcp.AddTool(server, &mcp.Tool{Name: "test_elicitation", Description: "Asks the user for a name and an address."},
		func(ctx context.Context, req *mcp.CallToolRequest, in messageInput) (*mcp.CallToolResult, any, error) {
			return elicit(ctx, req, in.Message, object(map[string]any{
				"username": property("string"), "email": property("string"),
			}, "username", "email"))
		})
	options := []string{"option1", "option2", "option3"}
	for _, tool := range []struct {
		name, description string
		properties        map[string]any
	}{
		{"test_elicitation_sep1034_defaults", "Asks for a value of each type, with defaults.", map[string]any{
			"name":     map[string]any{"type": "string", "default": "John Doe"},
			"age":      map[string]any{"type": "integer", "default": 30},
			"score":    map[string]any{"type": "number", "default": 95.5},
			"status":   map[string]any{"type": "string", "default": "active", "enum": []string{"active", "inactive", "pending"}},
			"verified": map[string]any{"type": "boolean", "default": true},
		}},
		{"test_elicitation_sep1330_enums", "Asks for a choice in each way that a schema can state one.", map[string]any{
			"untitledSingle": map[string]any{"type": "string", "enum": options},
			"titledSingle":   map[string]any{"type": "string", "oneOf": titled("First Option", "Second Option", "Third Option")},
			"legacyEnum": map[string]any{
				"type": "string", "enum": []string{"opt1", "opt2", "opt3"},
				"enumNames": []string{"Option One", "Option Two", "Option Three"},
			},
			"untitledMulti": map[string]any{"type": "array", "items": map[string]any{"type": "string", "enum": options}},
			"titledMulti":   map[string]any{"type": "array", "items": map[string]any{"anyOf": titled("First Choice", "Second Choice", "Third Choice")}},
		}},
	} {
		mcp.AddTool(server, &mcp.Tool{Name: tool.name, Description: tool.description},
			func(ctx context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
				return elicit(ctx, req, "Please fill in", object(tool.properties))
			})
	}
}

func elicit(ctx context.Context, req *mcp.CallToolRequest, message string, schema map[string]any) (*mcp.CallToolResult, any, error) {
	res, err := req.Session.Elicit(ctx, &mcp.ElicitParams{Message: message, RequestedSchema: schema})
	if err != nil {
		return nil, nil, err
	}
	content, err := json.Marshal(res.Content)
	if err != nil {
		return nil, nil, err
	}
	return text(fmt.Sprintf("User response: action=%s, content=%s", res.Action, content)), nil, nil
}

// inquiry asks the client by its results, as the modern era has it: each says what to ask, and the client calls again with
// the answers. The calls may each go to another replica.
type inquiry struct {
	name, description string
	// rounds are what to ask, round by round. Only a sealed inquiry may have more than one.
	rounds [][]question
	// sealed: the round and the answers so far travel with the client, who must bring them back unchanged.
	sealed bool
	// optional: what the client cannot be asked is left out. Otherwise it is an error.
	optional bool
	// result is a format for all the answers.
	result string
}

type question struct {
	id      string
	request mcp.InputRequest
	field   string // of the answer to an elicitation
}

func askUser(id, message, field, typ string) question {
	return question{id: id, field: field, request: &mcp.ElicitParams{
		Message: message, RequestedSchema: object(map[string]any{field: property(typ)}, field),
	}}
}

func askModel(id, prompt string, maxTokens int64) question {
	return question{id: id, request: &mcp.CreateMessageParams{
		Messages:  []*mcp.SamplingMessage{{Role: "user", Content: &mcp.TextContent{Text: prompt}}},
		MaxTokens: maxTokens,
	}}
}

func askRoots(id string) question { return question{id: id, request: &mcp.ListRootsParams{}} }

// answer reads the answer to the question. ok is false if it is not among the responses or is not of the kind that
// was asked for: the client is asked again. Errors: the user did not want to answer.
func (q question) answer(responses mcp.InputResponseMap) (answer string, ok bool, err error) {
	switch response := responses[q.id].(type) {
	case *mcp.ElicitResult:
		if response.Action != "accept" {
			return "", true, fmt.Errorf("the user answered %q to %q", response.Action, q.id)
		}
		if value, ok := response.Content[q.field]; ok {
			return fmt.Sprint(value), true, nil
		}
	case *mcp.CreateMessageWithToolsResult:
		for _, content := range response.Content {
			if said, ok := content.(*mcp.TextContent); ok {
				return said.Text, true, nil
			}
		}
	case *mcp.ListRootsResult:
		uris := make([]string, len(response.Roots))
		for i, root := range response.Roots {
			uris[i] = root.URI
		}
		return strings.Join(uris, " "), true, nil
	}
	return "", false, nil
}

// capability names the capability that a client must have declared to be asked.
func (q question) capability() string {
	switch q.request.(type) {
	case *mcp.CreateMessageParams:
		return "sampling"
	case *mcp.ListRootsParams:
		return "roots"
	default:
		return "elicitation"
	}
}

func declares(caps *mcp.ClientCapabilities, capability string) bool {
	switch {
	case caps == nil:
		return false
	case capability == "sampling":
		return caps.Sampling != nil
	case capability == "roots":
		return caps.RootsV2 != nil || caps.Roots.ListChanged
	default:
		return caps.Elicitation != nil
	}
}

func errUndeclared(capability string) error {
	// The SDK's type for this would name "roots" too, whether missing or not.
	data, err := json.Marshal(map[string]any{"requiredCapabilities": map[string]any{capability: struct{}{}}})
	if err != nil {
		return err
	}
	return &jsonrpc.Error{Code: mcp.CodeMissingRequiredClientCapabilities, Message: "the client did not declare " + capability, Data: data}
}

// progress is how far an inquiry has come.
type progress struct {
	Round   int      `json:"round"`
	Answers []string `json:"answers"`
}

// turn is an inquiry's next step: what to ask, with the state to send along, or if that is nil the result.
type turn struct {
	asks   mcp.InputRequestMap
	state  string
	result string
}

// next takes what the client sent. Errors are the client's (*jsonrpc.Error) or the user's.
func (q *inquiry) next(caps *mcp.ClientCapabilities, responses mcp.InputResponseMap, state string) (turn, error) {
	var at progress
	switch {
	case !q.sealed:
	case state == "":
		responses = nil // They answer nothing that was asked.
	default:
		var err error
		if at, err = q.unseal(state); err != nil {
			return turn{}, err
		}
	}
	asks := mcp.InputRequestMap{}
	var answers []string
	for _, question := range q.rounds[at.Round] {
		if capability := question.capability(); !declares(caps, capability) {
			if q.optional {
				continue
			}
			return turn{}, errUndeclared(capability)
		}
		asks[question.id] = question.request
		answer, ok, err := question.answer(responses)
		if err != nil {
			return turn{}, err
		}
		if ok {
			answers = append(answers, answer)
		}
	}
	switch {
	case len(answers) == len(asks):
		at.Round, at.Answers = at.Round+1, append(at.Answers, answers...)
		if at.Round == len(q.rounds) {
			return turn{result: fmt.Sprintf(q.result, strings.Join(at.Answers, ", "))}, nil
		}
		return q.next(caps, nil, q.seal(at))
	case q.sealed:
		return turn{asks: asks, state: q.seal(at)}, nil
	default:
		return turn{asks: asks}, nil
	}
}

// sealKey is the same in all replicas, or one could not go on where another asked. It is no secret and keeps off mistakes
// only: a server that does more than pass tests takes its key from its configuration.
const sealKey = "sessiond conformance"

// mac binds a state to its inquiry: one of another's would count other rounds.
func (q *inquiry) mac(data []byte) []byte {
	mac := hmac.New(sha256.New, []byte(sealKey))
	mac.Write([]byte(q.name + "\n"))
	mac.Write(data)
	return mac.Sum(nil)
}

func (q *inquiry) seal(at progress) string {
	data, err := json.Marshal(at)
	if err != nil {
		panic(err) // Numbers and strings are always JSON.
	}
	return base64.RawURLEncoding.EncodeToString(append(q.mac(data), data...))
}

func (q *inquiry) unseal(state string) (progress, error) {
	var at progress
	data, err := base64.RawURLEncoding.DecodeString(state)
	if err != nil || len(data) < sha256.Size || !hmac.Equal(data[:sha256.Size], q.mac(data[sha256.Size:])) ||
		json.Unmarshal(data[sha256.Size:], &at) != nil {
		return at, &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: "requestState is not what this server sent"}
	}
	return at, nil
}

func (q *inquiry) callTool(_ context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
	turn, err := q.next(req.ClientCapabilities(), req.Params.InputResponses, req.Params.RequestState)
	switch {
	case err != nil:
		return nil, nil, err
	case turn.asks != nil:
		return &mcp.CallToolResult{InputRequests: turn.asks, RequestState: turn.state}, nil, nil
	default:
		return text(turn.result), nil, nil
	}
}

func (q *inquiry) getPrompt(_ context.Context, req *mcp.GetPromptRequest) (*mcp.GetPromptResult, error) {
	turn, err := q.next(req.ClientCapabilities(), req.Params.InputResponses, req.Params.RequestState)
	switch {
	case err != nil:
		return nil, err
	case turn.asks != nil:
		return &mcp.GetPromptResult{InputRequests: turn.asks, RequestState: turn.state}, nil
	default:
		return &mcp.GetPromptResult{Messages: says(&mcp.TextContent{Text: turn.result})}, nil
	}
}

func addInquiries(server *mcp.Server) {
	const prefix = "test_input_required_result_"
	name := askUser("user_name", "What is your name?", "name", "string")
	confirm := askUser("confirm", "Please confirm", "ok", "boolean")
	for _, tool := range []inquiry{
		{
			name: prefix + "elicitation", description: "Asks for the user's name.",
			rounds: [][]question{{name}}, result: "Hello, %s!",
		},
		{
			name: prefix + "sampling", description: "Asks the model for a capital.",
			rounds: [][]question{{askModel("capital_question", "What is the capital of France?", 100)}}, result: "The model says: %s",
		},
		{
			name: prefix + "list_roots", description: "Asks for the client's roots.",
			rounds: [][]question{{askRoots("client_roots")}}, result: "Roots: %s",
		},
		{
			name: prefix + "request_state", description: "Asks for consent and has the client carry its state.",
			rounds: [][]question{{confirm}}, sealed: true, result: "state-ok: %s",
		},
		{
			name: prefix + "tampered_state", description: "Asks for consent and refuses a state that was changed.",
			rounds: [][]question{{confirm}}, sealed: true, result: "state-ok: %s",
		},
		{
			name: prefix + "multiple_inputs", description: "Asks the user, the model and the client at once.",
			rounds: [][]question{{name, askModel("greeting", "Generate a greeting", 50), askRoots("client_roots")}},
			sealed: true, result: "Answers: %s",
		},
		{
			name: prefix + "multi_round", description: "Asks for a name, then for a color.",
			rounds: [][]question{
				{askUser("step1", "Step 1: What is your name?", "name", "string")},
				{askUser("step2", "Step 2: What is your favorite color?", "color", "string")},
			},
			sealed: true, result: "Answers: %s",
		},
		{
			name: prefix + "capabilities", description: "Asks what the client can be asked.",
			rounds:   [][]question{{name, askModel("greeting", "Generate a greeting", 50), askRoots("client_roots")}},
			optional: true, result: "Answers: %s",
		},
		{
			name: "test_streaming_elicitation", description: "Asks the user by its result, never by a request on its stream.",
			rounds: [][]question{{confirm}}, result: "confirmed: %s",
		},
		{
			name: "test_missing_capability", description: "Refuses clients that cannot be asked for their model's answer.",
			rounds: [][]question{{askModel("greeting", "Generate a greeting", 50)}}, result: "The model says: %s",
		},
	} {
		mcp.AddTool(server, &mcp.Tool{Name: tool.name, Description: tool.description}, tool.callTool)
	}
	prompt := inquiry{
		name: prefix + "prompt", description: "Asks for the prompt's context.",
		rounds: [][]question{{askUser("user_context", "What context should the prompt use?", "context", "string")}}, result: "Context: %s",
	}
	server.AddPrompt(&mcp.Prompt{Name: prompt.name, Description: prompt.description}, prompt.getPrompt)
}

type regionInput struct {
	Region string `json:"region"`
	Level  int    `json:"level"`
}

// addSchemas adds the tools whose input schema says more than Go types can.
func addSchemas(server *mcp.Server) {
	mcp.AddTool(server, &mcp.Tool{
		Name: "json_schema_2020_12_tool", Description: "Has a schema with the keywords of JSON Schema 2020-12.",
		InputSchema: json.RawMessage(`{
			"$schema": "https://json-schema.org/draft/2020-12/schema",
			"$defs": {"address": {
				"$anchor": "addressDef", "type": "object",
				"properties": {"street": {"type": "string"}, "city": {"type": "string"}}
			}},
			"type": "object",
			"properties": {
				"name": {"type": "string"},
				"address": {"$ref": "#/$defs/address"},
				"contactMethod": {"type": "string", "enum": ["phone", "email"]},
				"phone": {"type": "string"},
				"email": {"type": "string"}
			},
			"additionalProperties": false,
			"allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
			"if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
			"then": {"required": ["phone"]},
			"else": {"required": ["email"]}
		}`),
	}, func(_ context.Context, _ *mcp.CallToolRequest, in map[string]any) (*mcp.CallToolResult, any, error) {
		return jsonText(in)
	})
	mcp.AddTool(server, &mcp.Tool{
		Name: "test_x_mcp_header", Description: "Has an argument that clients repeat in a header.",
		InputSchema: json.RawMessage(`{
			"type": "object",
			"properties": {"region": {"type": "string", "x-mcp-header": "Region"}, "level": {"type": "integer"}}
		}`),
	}, func(_ context.Context, _ *mcp.CallToolRequest, in regionInput) (*mcp.CallToolResult, any, error) {
		return jsonText(in)
	})
}

// addListChanges adds tools that change the lists of tools and of prompts: each adds one again that is there already. The
// SDK tells clients so all the same, and the lists of all replicas stay alike.
func addListChanges(server *mcp.Server) {
	addTool := func() {
		mcp.AddTool(server, &mcp.Tool{Name: "test_added_again", Description: "Does nothing."},
			func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
				return text("ok"), nil, nil
			})
	}
	addPrompt := func() {
		server.AddPrompt(&mcp.Prompt{Name: "test_added_again", Description: "Says nothing."},
			func(context.Context, *mcp.GetPromptRequest) (*mcp.GetPromptResult, error) {
				return &mcp.GetPromptResult{Messages: says(&mcp.TextContent{Text: "ok"})}, nil
			})
	}
	for _, tool := range []struct {
		name, description string
		change            func()
	}{
		{"test_trigger_tool_change", "Changes the list of tools.", addTool},
		{"test_trigger_prompt_change", "Changes the list of prompts.", addPrompt},
	} {
		tool.change()
		mcp.AddTool(server, &mcp.Tool{Name: tool.name, Description: tool.description},
			func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
				tool.change()
				return text("changed"), nil, nil
			})
	}
}

// says makes each content a message of the user.
func says(contents ...mcp.Content) []*mcp.PromptMessage {
	messages := make([]*mcp.PromptMessage, len(contents))
	for i, content := range contents {
		messages[i] = &mcp.PromptMessage{Role: "user", Content: content}
	}
	return messages
}

func addPrompts(server *mcp.Server) {
	for _, prompt := range []struct {
		name, description string
		arguments         []string
		messages          func(arguments map[string]string) []*mcp.PromptMessage
	}{
		{"test_simple_prompt", "A text.", nil, func(map[string]string) []*mcp.PromptMessage {
			return says(&mcp.TextContent{Text: "This is a simple prompt for testing."})
		}},
		{"test_prompt_with_arguments", "A text with two arguments in it.", []string{"arg1", "arg2"}, func(arguments map[string]string) []*mcp.PromptMessage {
			return says(&mcp.TextContent{Text: fmt.Sprintf("Prompt with arguments: arg1='%s', arg2='%s'", arguments["arg1"], arguments["arg2"])})
		}},
		{"test_prompt_with_embedded_resource", "A resource and a text.", []string{"resourceUri"}, func(arguments map[string]string) []*mcp.PromptMessage {
			return says(
				embedded(arguments["resourceUri"], plainText, "Embedded resource content for testing."),
				&mcp.TextContent{Text: "Please process the embedded resource above."},
			)
		}},
		{"test_prompt_with_image", "An image and a text.", nil, func(map[string]string) []*mcp.PromptMessage {
			return says(redPixel(), &mcp.TextContent{Text: "Please analyze the image above."})
		}},
	} {
		var arguments []*mcp.PromptArgument
		for _, name := range prompt.arguments {
			arguments = append(arguments, &mcp.PromptArgument{Name: name, Required: true})
		}
		server.AddPrompt(&mcp.Prompt{Name: prompt.name, Description: prompt.description, Arguments: arguments},
			func(_ context.Context, req *mcp.GetPromptRequest) (*mcp.GetPromptResult, error) {
				return &mcp.GetPromptResult{Messages: prompt.messages(req.Params.Arguments)}, nil
			})
	}
}

// complete suggests the words that begin with what was typed, for any argument.
func complete(_ context.Context, req *mcp.CompleteRequest) (*mcp.CompleteResult, error) {
	values := []string{} // Never null on the wire.
	for _, word := range []string{"paris", "park", "party", "test", "testing"} {
		if strings.HasPrefix(word, req.Params.Argument.Value) {
			values = append(values, word)
		}
	}
	return &mcp.CompleteResult{Completion: mcp.CompletionResultDetails{Values: values, Total: len(values)}}, nil
}

// The parts of the template's URIs around the id.
const (
	templatePrefix = "test://template/"
	templateSuffix = "/data"
)

func addTestResources(server *mcp.Server) {
	for _, resource := range []struct {
		uri, name, description string
		contents               mcp.ResourceContents
	}{
		{"test://static-text", "static-text", "A text.", mcp.ResourceContents{MIMEType: plainText, Text: "This is the content of the static text resource."}},
		{"test://static-binary", "static-binary", "An image.", mcp.ResourceContents{MIMEType: pngType, Blob: []byte(redPNG)}},
		{"test://watched-resource", "watched-resource", "A text to subscribe to.", mcp.ResourceContents{MIMEType: plainText, Text: "Watched resource content"}},
	} {
		resource.contents.URI = resource.uri
		server.AddResource(&mcp.Resource{URI: resource.uri, Name: resource.name, Description: resource.description, MIMEType: resource.contents.MIMEType},
			func(context.Context, *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
				return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{&resource.contents}}, nil
			})
	}
	server.AddResourceTemplate(&mcp.ResourceTemplate{
		URITemplate: templatePrefix + "{id}" + templateSuffix, Name: "template", Description: "Data of an id.", MIMEType: jsonType,
	}, func(_ context.Context, req *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
		id := strings.TrimSuffix(strings.TrimPrefix(req.Params.URI, templatePrefix), templateSuffix)
		data, err := json.Marshal(map[string]any{"id": id, "templateTest": true, "data": "Data for ID: " + id})
		if err != nil {
			return nil, err
		}
		return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: req.Params.URI, MIMEType: jsonType, Text: string(data)}}}, nil
	})
}
