// Every call of sessiond once, and every error that a client can meet once. It prints a line a step and ends with an exit
// code other than 0 at the first surprise. README.md says how to start it.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { parseArgs } from "node:util";
import { Code, createClient } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { durationFromMs, durationMs } from "@bufbuild/protobuf/wkt";
import { failureOf } from "./failure.js";
import { ErrorReason } from "./gen/sessiond/v1/error_pb.js";
import { LockService } from "./gen/sessiond/v1/lock_pb.js";
import { MessageService } from "./gen/sessiond/v1/message_pb.js";
import { SessionService } from "./gen/sessiond/v1/session_pb.js";

const { positionals, values: flags } = parseArgs({
  allowPositionals: true,
  options: { "without-etcd": { type: "string" }, "until-shutdown": { type: "boolean" } },
});
if (positionals.length !== 1) {
  console.error("usage: npm start -- HOST:PORT [--without-etcd HOST:PORT] [--until-shutdown]");
  process.exit(2);
}

// connect makes the three clients of one node. They share a connection, and are made once for the life of a process.
function connect(address: string) {
  const baseUrl = `http://${address}`; // https:// behind a proxy that speaks TLS
  const connection = new Http2SessionManager(baseUrl, {
    // A node that is cut off without a word is noticed by these alone.
    pingIntervalMs: 10_000,
    pingTimeoutMs: 2_000,
  });
  const transport = createGrpcTransport({
    baseUrl,
    sessionManager: connection,
    // Every call needs a deadline. A node reports a failing etcd within 3 s; writes of 4 MiB may take their time.
    defaultTimeoutMs: 10_000,
  });
  return {
    sessions: createClient(SessionService, transport),
    locks: createClient(LockService, transport),
    messages: createClient(MessageService, transport),
    close: () => connection.abort(),
  };
}

const encode = (text: string) => new TextEncoder().encode(text);
const decode = (bytes: Uint8Array) => new TextDecoder().decode(bytes);
const MiB = 1 << 20;

// step prints what has been done.
function step(name: string, outcome: string) {
  console.log(`${name.padEnd(20)} ${outcome}`);
}

// wrong waits for a call to fail, and for the reason that it should.
async function wrong(reason: ErrorReason, call: Promise<unknown>) {
  const failure = await call.then(
    () => assert.fail(`${ErrorReason[reason]} expected, but the call succeeded`),
    failureOf,
  );
  assert.equal(ErrorReason[failure.reason], ErrorReason[reason], failure.message);
  const facts = [
    ...Object.entries(failure.metadata).map(([key, value]) => `${key}=${value}`),
    ...failure.violations.map(({ field, description }) => `${field}: ${description}`),
    ...(failure.retryAfterMs === undefined ? [] : [`try again after ${failure.retryAfterMs} ms`]),
  ];
  step(ErrorReason[reason], [`${Code[failure.code]}: ${failure.message}`, ...facts].join(" | "));
}

const node = connect(positionals[0]!);
const { sessions, locks, messages } = node;

// ---- A session's life ----

const { session: created } = await sessions.create({ data: encode("0"), ttl: durationFromMs(10 * 60_000) });
assert(created);
const sessionId = created.id;
step("create", `session ${sessionId}, revision ${created.revision}`);

// acquire waits for the lock and reads the session under it. The request id names the acquire: a retry that carries the
// same one, on any node, keeps its place in the queue and never takes the lock twice.
async function acquire(timeoutMs: number, holder = "typescript") {
  const { grant, session } = await locks.acquire(
    {
      sessionId,
      requestId: randomUUID(),
      holder,
      ttl: durationFromMs(60_000),
      timeout: durationFromMs(timeoutMs),
      readSession: true,
    },
    { timeoutMs: timeoutMs + 10_000 }, // the call's deadline is later than the lock's timeout
  );
  assert(grant && session);
  return { grant, data: decode(session.data) };
}

const first = await acquire(5_000);
assert.equal(first.data, "0");
// The lock is held at least for the TTL less what the answer took, and never kept alive.
step("acquire", `fencing token ${first.grant.fencingToken}, TTL ${durationMs(first.grant.ttl!)} ms`);

// A lock that somebody else holds is an answer, not an error.
const attempt = await locks.tryAcquire({ sessionId, holder: "somebody-else" });
assert.equal(attempt.acquired, false);
assert.equal(attempt.holder, "typescript");
step("tryAcquire", `not acquired: ${attempt.holder} holds the lock`);

// What was computed under the lock goes back with its fencing token, which makes it harmless to come too late, and with
// release, which saves a call: acquire with read, save with release are two commits in all.
const { revision } = await sessions.save({
  sessionId,
  data: encode(first.data + "1"),
  fencingToken: first.grant.fencingToken,
  requestId: first.grant.requestId,
  release: true,
});
step("save and release", `revision ${revision}`);

const { session: read, position } = await sessions.read({ sessionId });
assert(read);
assert.equal(decode(read.data), "01");
assert.equal(read.revision, revision);
step("read", `data ${JSON.stringify(decode(read.data))}, ${durationMs(read.ttlRemaining!)} ms left`);

const second = await acquire(5_000);
assert(second.grant.fencingToken > first.grant.fencingToken);
await locks.release({
  sessionId,
  fencingToken: second.grant.fencingToken,
  requestId: second.grant.requestId,
});
step("release", `fencing token ${second.grant.fencingToken}`);

// ---- Messages ----

// The first answer comes at once, so it tells that the subscription stands. After a break, subscribe again after the last
// position received. A subscription lasts: it is the one call without a deadline.
for await (const { messages: received } of messages.subscribe(
  { sessionId, streams: ["notes"], afterPosition: position },
  { timeoutMs: 0 },
)) {
  if (received.length === 0) {
    const published = await messages.publish({
      sessionId,
      stream: "notes",
      payload: encode("hello"),
      requestId: randomUUID(), // a retry with the same one does not append again
    });
    step("publish", `position ${published.position}`);
    continue;
  }
  assert.equal(decode(received[0]!.payload), "hello");
  step("subscribe", `got ${JSON.stringify(decode(received[0]!.payload))} at position ${received[0]!.position}`);
  break; // ends the call
}

// ---- Every error ----

await wrong(ErrorReason.SESSION_NOT_FOUND, sessions.read({ sessionId: "no-such-session" }));
await wrong(ErrorReason.SESSION_EXISTS, sessions.create({ sessionId }));
await wrong(ErrorReason.INVALID_ARGUMENT, sessions.create({ sessionId: "two words", ttl: durationFromMs(1) }));
await wrong(ErrorReason.SESSION_TOO_LARGE, sessions.save({ sessionId, data: new Uint8Array(MiB + 1) }));
await wrong(
  ErrorReason.REVISION_MISMATCH,
  sessions.save({ sessionId, data: encode("2"), expectedRevision: created.revision }),
);

const held = await acquire(5_000);
await wrong(ErrorReason.LOCK_ALREADY_HELD, acquire(5_000)); // the same holder, by another request: it would wait for itself
await wrong(ErrorReason.SESSION_LOCKED, sessions.save({ sessionId, data: encode("2") }));
await wrong(ErrorReason.LOCK_TIMEOUT, acquire(100, "impatient"));

// On a node that lets one caller wait for a lock (--max-waiters 1), of two at most one gets to wait, and the other is told
// at once. Who does not want to wait any more ends the call, and leaves the queue.
const leave = new AbortController();
const crowd = ["left", "right"].map((holder) =>
  locks.acquire({ sessionId, holder, timeout: durationFromMs(5_000) }, { signal: leave.signal }),
);
await wrong(ErrorReason.TOO_MANY_WAITERS, Promise.race(crowd));
leave.abort();
await Promise.allSettled(crowd);

const release = { sessionId, fencingToken: held.grant.fencingToken, requestId: held.grant.requestId };
await locks.release(release);
await wrong(ErrorReason.LOCK_NOT_HELD, locks.release(release));
// Too late: the lock is gone, and what another may have saved since stays.
await wrong(
  ErrorReason.LOCK_LOST,
  sessions.save({
    sessionId,
    data: encode("2"),
    fencingToken: held.grant.fencingToken,
    requestId: held.grant.requestId,
  }),
);

const publish = (bytes: number) => messages.publish({ sessionId, stream: "big", payload: new Uint8Array(bytes) });
await wrong(ErrorReason.MESSAGE_TOO_LARGE, publish(4 * MiB + 1));
for (let stored = 0; stored < 3; stored++) {
  await publish(4 * MiB);
}
// With "hello" the fourth is over the 16 MiB that a session may store.
await wrong(ErrorReason.TOO_MANY_MESSAGES, publish(4 * MiB));

if (flags["without-etcd"]) {
  // Nothing is known about the session: never take this for SESSION_NOT_FOUND.
  const lonely = connect(flags["without-etcd"]);
  await wrong(ErrorReason.BACKEND_UNAVAILABLE, lonely.sessions.read({ sessionId }));
  lonely.close();
}

const { destroyed } = await sessions.destroy({ sessionId });
assert(destroyed);
step("destroy", `session ${sessionId}`);

if (flags["until-shutdown"]) {
  const { session: last } = await sessions.create({ ttl: durationFromMs(60_000) });
  const subscribed = async () => {
    for await (const _ of messages.subscribe({ sessionId: last!.id, streams: ["notes"] }, { timeoutMs: 0 })) {
      step("subscribe", "until the node shuts down");
    }
  };
  await wrong(ErrorReason.SHUTTING_DOWN, subscribed()); // another node serves: connect to it and call again
}
node.close();
