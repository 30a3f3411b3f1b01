package mcpserver

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// StateKeySize is the size of each of [Options].StateKeys, in bytes.
const StateKeySize = 32

// errState refuses a request state. It does not say what is wrong with it: that helps only who made it up.
var errState = &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: "requestState is not one that this server gave for this request, or is too old"}

// sealer keeps what a modern client carries back between the rounds of a request (requestState) secret and unchanged, and
// ties it to the request and the user it was made for. All replicas have the same keys, so any of them serves any round.
type sealer struct {
	keys []cipher.AEAD // the first one seals, all open
	ttl  time.Duration
}

func newSealer(keys [][]byte, ttl time.Duration) (*sealer, error) {
	s := &sealer{ttl: ttl}
	for i, key := range keys {
		if len(key) != StateKeySize {
			return nil, fmt.Errorf("StateKeys[%d] has %d bytes, want %d", i, len(key), StateKeySize)
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, fmt.Errorf("StateKeys[%d]: %w", i, err)
		}
		aead, err := cipher.NewGCMWithRandomNonce(block)
		if err != nil {
			return nil, fmt.Errorf("StateKeys[%d]: %w", i, err)
		}
		s.keys = append(s.keys, aead)
	}
	return s, nil
}

func (s *sealer) seal(state string, bound []byte) string {
	plain := binary.BigEndian.AppendUint64(nil, uint64(time.Now().Add(s.ttl).Unix()))
	sealed := s.keys[0].Seal(nil, nil, append(plain, state...), bound) //nolint:gosec // This AEAD makes its own random nonce.
	return base64.RawURLEncoding.EncodeToString(sealed)
}

func (s *sealer) open(sealed string, bound []byte) (string, error) {
	data, err := base64.RawURLEncoding.DecodeString(sealed)
	if err != nil {
		return "", errState
	}
	for _, key := range s.keys {
		plain, err := key.Open(nil, nil, data, bound)
		if err != nil || len(plain) < 8 {
			continue
		}
		// The one clock that is compared with another machine's: the bound is an hour, and a minute off does no harm.
		if time.Now().Unix() > int64(binary.BigEndian.Uint64(plain)) {
			return "", errState
		}
		return string(plain[8:]), nil
	}
	return "", errState
}

// around opens the state that comes with a request and seals the one that goes out with its result.
func (s *sealer) around(ctx context.Context, method string, req mcp.Request, next mcp.MethodHandler) (mcp.Result, error) {
	state, name, arguments := statefulParams(req)
	if state == nil {
		return next(ctx, method, req)
	}
	bound := boundTo(userOf(ctx), method, name, arguments)
	if *state != "" {
		opened, err := s.open(*state, bound)
		if err != nil {
			return nil, err
		}
		*state = opened
	}
	res, err := next(ctx, method, req)
	if out := statefulResult(res); err == nil && out != nil && *out != "" {
		*out = s.seal(*out, bound)
	}
	return res, err
}

// statefulParams returns where a request has its state, and what the state is bound to beside the method.
func statefulParams(req mcp.Request) (state *string, name string, arguments any) {
	switch p := req.GetParams().(type) {
	case *mcp.CallToolParamsRaw:
		return &p.RequestState, p.Name, p.Arguments
	case *mcp.GetPromptParams:
		return &p.RequestState, p.Name, p.Arguments
	case *mcp.ReadResourceParams:
		return &p.RequestState, p.URI, nil
	default:
		return nil, "", nil
	}
}

func statefulResult(res mcp.Result) *string {
	switch r := res.(type) {
	case *mcp.CallToolResult:
		if r != nil {
			return &r.RequestState
		}
	case *mcp.GetPromptResult:
		if r != nil {
			return &r.RequestState
		}
	case *mcp.ReadResourceResult:
		if r != nil {
			return &r.RequestState
		}
	}
	return nil
}

// boundTo is what a state is good for: this user's request with this name and these arguments, however they are written.
func boundTo(user identity, method, name string, arguments any) []byte {
	if raw, ok := arguments.(json.RawMessage); ok {
		var v any
		decoder := json.NewDecoder(bytes.NewReader(raw))
		decoder.UseNumber()
		if decoder.Decode(&v) == nil {
			arguments = v
		}
	}
	sum := sha256.Sum256(marshal([]any{user, method, name, arguments}))
	return sum[:]
}

// NewStateKey returns a key for [Options].StateKeys, from a cryptographic source.
func NewStateKey() []byte {
	key := make([]byte, StateKeySize)
	// It never fails (crypto/rand).
	_, _ = rand.Read(key)
	return key
}

var errStateKeys = errors.New("a state key is not base64")

// ParseStateKey reads a key as an operator writes it: standard base64 of [StateKeySize] bytes.
func ParseStateKey(text string) ([]byte, error) {
	key, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, errStateKeys
	}
	if len(key) != StateKeySize {
		return nil, fmt.Errorf("a state key has %d bytes, want %d", len(key), StateKeySize)
	}
	return key, nil
}
