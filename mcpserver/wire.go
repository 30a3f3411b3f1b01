package mcpserver

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
)

// The methods whose meaning the transport has to know.
const (
	methodInitialize     = "initialize"
	methodPing           = "ping"
	methodSetLevel       = "logging/setLevel"
	methodDiscover       = "server/discover"
	methodListen         = "subscriptions/listen"
	methodSubscribe      = "resources/subscribe"
	methodUnsubscribe    = "resources/unsubscribe"
	methodElicit         = "elicitation/create"
	methodCreateMessage  = "sampling/createMessage"
	methodListRoots      = "roots/list"
	notifyInitialized    = "notifications/initialized"
	notifyCancelled      = "notifications/cancelled"
	notifyToolsList      = "notifications/tools/list_changed"
	notifyPromptsList    = "notifications/prompts/list_changed"
	notifyResourcesList  = "notifications/resources/list_changed"
	notifyResourceUpdate = "notifications/resources/updated"
)

// message is a JSON-RPC message as it came: ids, params and results byte for byte (F10). The SDK's own type would turn
// the id 1.5 into 1.
type message struct {
	id     json.RawMessage // nil: none
	method string          // "": a response
	params json.RawMessage
	result json.RawMessage
	err    json.RawMessage
}

func (m *message) isCall() bool         { return m.method != "" && m.id != nil }
func (m *message) isNotification() bool { return m.method != "" && m.id == nil }
func (m *message) isResponse() bool     { return m.method == "" }

// parseBody reads one message or, in an array, a batch of them.
func parseBody(body []byte) (messages []*message, batch bool, err error) {
	body = bytes.TrimLeft(body, " \t\r\n")
	if len(body) == 0 {
		return nil, false, errors.New("it is empty")
	}
	if body[0] != '[' {
		m, err := parseMessage(body)
		return []*message{m}, false, err
	}
	var parts []json.RawMessage
	if err := json.Unmarshal(body, &parts); err != nil {
		return nil, true, err
	}
	if len(parts) == 0 {
		return nil, true, errors.New("the batch is empty")
	}
	seen := map[string]bool{}
	for _, part := range parts {
		m, err := parseMessage(part)
		if err != nil {
			return nil, true, err
		}
		if m.isCall() {
			if seen[string(m.id)] {
				return nil, true, fmt.Errorf("the batch has two requests with the id %s", m.id)
			}
			seen[string(m.id)] = true
		}
		messages = append(messages, m)
	}
	return messages, true, nil
}

func parseMessage(data []byte) (*message, error) {
	// A map, since a struct's fields would match keys of any case.
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, err
	}
	var version string
	if err := json.Unmarshal(fields["jsonrpc"], &version); err != nil || version != "2.0" {
		return nil, errors.New(`"jsonrpc" must be "2.0"`)
	}
	m := &message{params: fields["params"], result: fields["result"], err: fields["error"]}
	if id, ok := fields["id"]; ok {
		if c := id[0]; c != '"' && c != '-' && (c < '0' || c > '9') {
			return nil, errors.New(`"id" must be a string or a number`)
		}
		m.id = id
	}
	if method, ok := fields["method"]; ok {
		if err := json.Unmarshal(method, &m.method); err != nil || m.method == "" {
			return nil, errors.New(`"method" must be a string that is not empty`)
		}
		if c := firstByte(m.params); c != 0 && c != '{' && c != '[' && string(m.params) != "null" {
			return nil, errors.New(`"params" must be an object`)
		}
		return m, nil
	}
	if m.id == nil {
		return nil, errors.New(`it has neither "method" nor "id"`)
	}
	if (m.result == nil) == (m.err == nil) {
		return nil, errors.New(`a response has either "result" or "error"`)
	}
	return m, nil
}

func firstByte(b []byte) byte {
	if len(b) == 0 {
		return 0
	}
	return b[0]
}

// metaRevision is the protocol revision that a modern-era message names in its _meta.
func (m *message) metaRevision() string {
	if !bytes.Contains(m.params, []byte("/protocolVersion")) {
		return ""
	}
	var params struct {
		Meta map[string]json.RawMessage `json:"_meta"`
	}
	var revision string
	if json.Unmarshal(m.params, &params) == nil {
		_ = json.Unmarshal(params.Meta["io.modelcontextprotocol/protocolVersion"], &revision)
	}
	return revision
}

// callIDs are the ids that a refusal of the whole body goes out under: those of messages with a method (F7).
func callIDs(messages []*message) []json.RawMessage {
	var ids []json.RawMessage
	for _, m := range messages {
		if m.isCall() {
			ids = append(ids, m.id)
		}
	}
	return ids
}

// encodeResponse writes a response under the id as it came. Without an id it has none.
func encodeResponse(id, result json.RawMessage, rpcError *jsonrpc.Error) []byte {
	out := make([]byte, 0, len(id)+len(result)+64)
	out = append(out, `{"jsonrpc":"2.0"`...)
	if id != nil {
		out = append(append(out, `,"id":`...), id...)
	}
	if rpcError != nil {
		out = append(append(out, `,"error":`...), marshal(rpcError)...)
	} else {
		out = append(append(out, `,"result":`...), result...)
	}
	return append(out, '}')
}

// encodeRequest writes a request or, without an id, a notification.
func encodeRequest(id, method string, params json.RawMessage) []byte {
	out := append([]byte(`{"jsonrpc":"2.0"`), `,"method":`...)
	out = append(out, marshal(method)...)
	if id != "" {
		out = append(append(out, `,"id":`...), marshal(id)...)
	}
	if len(params) > 0 {
		out = append(append(out, `,"params":`...), params...)
	}
	return append(out, '}')
}

// marshal encodes values that cannot fail to encode. HTML escaping would change what people see.
func marshal(v any) json.RawMessage {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return json.RawMessage(`null`)
	}
	return bytes.TrimRight(b.Bytes(), "\n")
}

func joinArray(parts [][]byte) []byte {
	return append(append([]byte{'['}, bytes.Join(parts, []byte{','})...), ']')
}

// rpcErrorOf turns the error that a handler returned into a JSON-RPC error, as the SDK does on its own transports.
func rpcErrorOf(err error) *jsonrpc.Error {
	wire, ok := errors.AsType[*jsonrpc.Error](err)
	if !ok {
		return &jsonrpc.Error{Message: err.Error()}
	}
	if wire.Error() == err.Error() {
		return wire
	}
	return &jsonrpc.Error{Code: wire.Code, Message: err.Error()}
}

// randomID is an id that nobody can guess, unique in the world: 26 characters, A to Z and 2 to 7.
func randomID() string { return rand.Text() }
