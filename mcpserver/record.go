package mcpserver

import (
	"encoding/json"
	"fmt"
	"maps"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// recordFormat is the version of the session record that this package writes, and the newest that it reads.
const recordFormat = 1

// The record's fields. A field that this version does not know is kept as it is (S9), so that replicas of two versions can
// serve one session during an upgrade; one that must not be ignored raises the format.
const (
	fieldFormat      = "format"
	fieldInitialize  = "initialize"      // params of initialize, verbatim
	fieldInitialized = "initialized"     // params of notifications/initialized, once received
	fieldRevision    = "protocolVersion" // as negotiated
	fieldLogLevel    = "logLevel"
	fieldUser        = "user"
	fieldValues      = "values"
	fieldSince       = "since" // position of the topic when the session began
	// fieldSubscription and a URI: a resource that the client is subscribed to. Each has a field of its own, so that
	// those subscribed to at the same time are all kept.
	fieldSubscription = "subscription/"
	// fieldTopic marks the record of the topic's session, which is no client's.
	fieldTopic = "topic"
)

// record is a session as it is stored: a JSON object.
type record struct {
	fields map[string]json.RawMessage
	values map[string]json.RawMessage
}

// identity is whom a session belongs to. The zero value is nobody: a session opened without authentication.
type identity struct {
	Issuer  string `json:"iss,omitempty"`
	Subject string `json:"sub,omitempty"`
}

func newRecord(initialize json.RawMessage, revision string, user identity, since uint64) (*record, error) {
	r := &record{fields: map[string]json.RawMessage{fieldInitialize: initialize}, values: map[string]json.RawMessage{}}
	for field, value := range map[string]any{fieldFormat: recordFormat, fieldRevision: revision, fieldUser: user, fieldSince: since} {
		if err := r.set(field, value); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func decodeRecord(data []byte) (*record, error) {
	r := &record{}
	if err := json.Unmarshal(data, &r.fields); err != nil {
		return nil, fmt.Errorf("%w: %w", errRecord, err)
	}
	var format int
	if err := json.Unmarshal(r.fields[fieldFormat], &format); err != nil || format < 1 || format > recordFormat {
		return nil, fmt.Errorf("%w: format %s, this version reads 1 to %d", errRecord, r.fields[fieldFormat], recordFormat)
	}
	if values, ok := r.fields[fieldValues]; ok {
		if err := json.Unmarshal(values, &r.values); err != nil {
			return nil, fmt.Errorf("%w: values: %w", errRecord, err)
		}
		delete(r.fields, fieldValues)
	}
	if r.values == nil {
		r.values = map[string]json.RawMessage{}
	}
	return r, nil
}

func (r *record) encode() ([]byte, error) {
	fields := maps.Clone(r.fields)
	if len(r.values) > 0 {
		values, err := json.Marshal(r.values)
		if err != nil {
			return nil, fmt.Errorf("encode session values: %w", err)
		}
		fields[fieldValues] = values
	}
	data, err := json.Marshal(fields)
	if err != nil {
		return nil, fmt.Errorf("encode session record: %w", err)
	}
	return data, nil
}

func (r *record) set(field string, value any) error {
	raw, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("encode session field %s: %w", field, err)
	}
	r.fields[field] = raw
	return nil
}

func (r *record) string(field string) string {
	var s string
	// A field that is absent or of another type reads as unset.
	_ = json.Unmarshal(r.fields[field], &s)
	return s
}

func (r *record) revision() string { return r.string(fieldRevision) }

func (r *record) user() identity {
	var u identity
	_ = json.Unmarshal(r.fields[fieldUser], &u)
	return u
}

// declares reports whether the client declared a capability in initialize. It reads the stored JSON, since the SDK's type
// cannot tell an empty "roots" from none.
func (r *record) declares(capability string) bool {
	var params struct {
		Capabilities map[string]json.RawMessage `json:"capabilities"`
	}
	_ = json.Unmarshal(r.fields[fieldInitialize], &params)
	value, ok := params.Capabilities[capability]
	return ok && string(value) != "null"
}

// state is the record as the SDK wants it to go on with the session.
func (r *record) state() (*mcp.ServerSessionState, error) {
	state := &mcp.ServerSessionState{
		NegotiatedProtocolVersion: r.revision(),
		LogLevel:                  mcp.LoggingLevel(r.string(fieldLogLevel)),
	}
	if err := json.Unmarshal(r.fields[fieldInitialize], &state.InitializeParams); err != nil {
		return nil, fmt.Errorf("%w: initialize: %w", errRecord, err)
	}
	if caps := state.InitializeParams.Capabilities; caps != nil && r.declares("roots") {
		caps.RootsV2 = &mcp.RootCapabilities{ListChanged: caps.Roots.ListChanged}
	}
	// The SDK reads from this field, which holds what the client asked for, whether the session is of the modern era.
	state.InitializeParams.ProtocolVersion = r.revision()
	if raw, ok := r.fields[fieldInitialized]; ok {
		if err := json.Unmarshal(raw, &state.InitializedParams); err != nil {
			return nil, fmt.Errorf("%w: initialized: %w", errRecord, err)
		}
	}
	return state, nil
}
