package mcpserver

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// serveSessionless serves a handshake-era request without a session (N1): on one of its own, which is dropped. An id that
// is sent anyway is ignored.
func (h *Handler) serveSessionless(w http.ResponseWriter, r *http.Request, server *mcp.Server, in *incoming) error {
	revision := in.revision
	if revision == "" {
		revision = assumedRevision
	}
	if in.batch && revision != assumedRevision {
		return errBadRequest("batches belong to revision %s, this request has %s", assumedRevision, revision)
	}
	var rest []*message
	for _, m := range in.messages {
		switch {
		case m.isResponse(), m.method == notifyInitialized, m.method == notifyCancelled:
			// They concern a session, or a request that cannot be found.
		case m.method == methodSetLevel, m.method == methodSubscribe, m.method == methodUnsubscribe:
			// Not offered, and so not there.
			rest = append(rest, &message{id: m.id, method: m.method + " (needs a session)", params: m.params})
		default:
			rest = append(rest, m)
		}
	}
	if len(rest) == 0 {
		w.WriteHeader(statusAccepted)
		return nil
	}
	var state *mcp.ServerSessionState
	if in.single(methodInitialize) == nil {
		state = &mcp.ServerSessionState{
			InitializeParams:          &mcp.InitializeParams{ProtocolVersion: revision},
			InitializedParams:         &mcp.InitializedParams{},
			NegotiatedProtocolVersion: revision,
		}
	}
	x := h.newExchange(context.WithoutCancel(r.Context()), r, nil, "", rest)
	x.batch = in.batch
	if state == nil {
		x.result = withoutSessionFeatures
	}
	if len(x.order) > 0 {
		x.reply = newReply(w, in.streamOK, in.jsonOK, !h.opts.JSON)
	}
	if err := x.start(server, state); err != nil {
		return err
	}
	if x.reply == nil {
		w.WriteHeader(statusAccepted)
		h.running.Go(x.run)
		return nil
	}
	x.run()
	return nil
}

// withoutSessionFeatures takes out of an initialize result what needs a session.
func withoutSessionFeatures(result json.RawMessage) json.RawMessage {
	var fields, capabilities, resources map[string]json.RawMessage
	if json.Unmarshal(result, &fields) != nil || json.Unmarshal(fields["capabilities"], &capabilities) != nil {
		return result
	}
	delete(capabilities, "logging")
	if json.Unmarshal(capabilities["resources"], &resources) == nil {
		delete(resources, "subscribe")
		capabilities["resources"] = marshal(resources)
	}
	fields["capabilities"] = marshal(capabilities)
	return marshal(fields)
}
