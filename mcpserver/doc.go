// Package mcpserver serves MCP over Streamable HTTP from any number of replicas behind a plain load balancer.
//
// # What
//
// A [Handler] takes the place of the official Go SDK's StreamableHTTPHandler. The application keeps its *mcp.Server with
// its tools, prompts, resources and middleware; sessions, their locks, and what one replica must tell another live in
// sessiond (or whatever implements [Store], [Locker] and [Messages]). A replica keeps nothing between requests, so any of
// them serves any request of any session, without affinity.
//
//	sessions, err := client.New([]string{"sessiond-1:7400", "sessiond-2:7400"}, client.Options{})
//	...
//	handler, err := mcpserver.NewHandler(getServer, &mcpserver.Options{Store: sessions})
//	...
//	defer handler.Shutdown(ctx)
//
// # How
//
// Each POST of the handshake era (MCP revisions up to 2025-11-25) reads the session's record, connects a short-lived
// session of the SDK over a transport of our own with the state from the record, feeds it the POST's messages, and
// writes what it answers. Answers never leave the POST that asked. What handlers change is saved, by key, before the
// answer is sent, so the client's next request finds it on any replica.
//
// When a handler asks the client something (elicitation, sampling, roots), the question goes out on its own POST's
// stream under an id that is unique in the world; the client's answer reaches some replica, which publishes it to the
// session's control stream in the store. Requests that ask, and those that run for longer than a moment, are subscribed
// to it, and so learn of answers, cancellations and the end of the session, wherever these arrive. A stream of the
// session does this, and not an inbox per replica, since it ends with the session, cannot be written to by other
// sessions, survives a reconnect by its position, and leaves nothing to route by or to clean up; a short request, which
// is nearly every request, subscribes to nothing.
//
// Changed lists and updated resources travel between replicas on one more stream, of a session that all replicas share: one
// commit a change, however many clients are told. See [Handler.Relay].
//
// Requests of the modern era (2026-07-28, without sessions) on the same URL go to the SDK's own stateless handler.
//
// # What changes for handlers
//
//   - A *mcp.ServerSession lives as long as its request. Do not keep it.
//   - State of the session goes through [Get], [Set] and [Delete] with the handler's context, not through variables.
//   - Without a [Locker], requests of a session run at the same time, on any replica. Changes of different keys are
//     all kept; of changes of the same key, the last wins.
//   - With one, they run one after the other, in order of arrival; a handler's context ends before its lock's TTL does,
//     and while a handler waits for the client, the lock is released and others run. Values read before the wait may have
//     changed after it.
//   - A client that disconnects does not cancel its handler (that is the protocol's rule); its notification does.
//   - A SubscribeHandler is called once more per resource on each replica, for the replica itself ([IsRelay]).
//   - A panic in a handler becomes an error answer, not the end of the process.
package mcpserver
