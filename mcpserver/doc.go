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
//   - mcp.Server.Sessions lists only what is connected at that moment, on this replica: the requests under way.
//
// # What it costs
//
// In commits of the store (etcd's raft writes, about a millisecond each) and reads, for a request of a session:
//
//   - one that changes nothing: a read. One that changes the session: a read and a commit, the same commit however many keys.
//   - with the lock: two commits, changed or not; waiting for the lock costs none. ping, cancellations and answers take none.
//   - a question to the client: a commit for the answer, and one before it if the session was changed.
//   - a cancellation: a commit, and one more by the replica that runs the request; the handler hears of it some 200 ms later,
//     once it is clear that no other request in flight has the same id.
//   - a changed list or an updated resource: a commit, however many clients are told.
//   - a standalone stream (GET): a commit when it opens and two when it ends; two a notification, to keep and to remove it.
//   - [Options].History: a commit per event, the answer included.
//   - the session's TTL: at most one commit per third of it, and none if the session is saved anyhow.
//
// An idle session costs a replica nothing. A request holds what the SDK's session takes, for as long as it runs; an open
// standalone stream holds two goroutines and one subscription.
//
// # Limits
//
// A request's body: [Options].MaxBodyBytes, 4 MiB. A session's record with all its values: 1 MiB in sessiond (its
// --max-session-bytes); a request that would make it larger gets an error and the session stays as it was. Messages under way
// to a session: 1,000 and 16 MiB at a time, of which events kept for resumption and notifications kept for a standalone stream
// take at most half. Changes of lists and resources are kept for five minutes for replicas and streams that are cut off; of more
// than 500 in that time only the last 250. Lengths of waits, TTLs and their bounds are at [Options].
//
// # When not to use it
//
//   - One process is enough and may forget its sessions: the SDK's own handler has no store to ask. Nothing else is quicker.
//   - Nothing needs a session (no elicitation, sampling, roots, subscriptions, values, log levels): leave out the Store, or use the
//     SDK's stateless mode.
//   - Sessions are large. Keep the data elsewhere and its name in the session.
//   - A handler must outlive its process. Here it dies with it; the client gets a broken connection, or with History an error that
//     says so on the stream that it resumes. Nothing is ever run a second time.
//
// # What is not supported
//
//   - The transport of revision 2024-11-05 with its two endpoints (HTTP+SSE).
//   - Tools, prompts and resources of one session alone: the SDK keeps them by server. getServer may choose a server by the
//     request, on every replica alike.
//   - Asking a client outside of any request of its session.
//   - Batches in revisions other than 2025-03-26.
package mcpserver
