"""Every call of sessiond once, and every error that a client can meet once.

It prints a line a step and ends with an exit code other than 0 at the first surprise. README.md says how to start it.
"""

import argparse
import json
import queue
import sys
import uuid
from datetime import timedelta
from pathlib import Path

# The stubs import each other as sessiond.v1 and google.rpc, from the folder they were made in.
sys.path.insert(0, str(Path(__file__).parent / "gen"))

import grpc
from google.protobuf.duration_pb2 import Duration
from sessiond.v1 import error_pb2 as reasons
from sessiond.v1 import lock_pb2, lock_pb2_grpc, message_pb2, message_pb2_grpc, session_pb2, session_pb2_grpc

from failure import failure_of, reason_name

MIB = 1 << 20

# Every call needs a deadline. A node reports a failing etcd within 3 s; writes of 4 MiB may take their time.
CALL_TIMEOUT = 10


class Node:
    """The three services of one node. They share a channel, and are made once for the life of a process."""

    def __init__(self, address: str):
        self.channel = grpc.insecure_channel(  # secure_channel behind a proxy that speaks TLS
            address,
            options=[
                # Messages have up to 4 MiB, and gRPC takes 4 MiB with everything around it unless told otherwise.
                ("grpc.max_receive_message_length", 8 * MIB),
                # A node that is cut off without a word is noticed by these alone.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 2_000),
            ],
        )
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.locks = lock_pb2_grpc.LockServiceStub(self.channel)
        self.messages = message_pb2_grpc.MessageServiceStub(self.channel)


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=value))
    return duration


def step(name: str, outcome: str) -> None:
    """Prints what has been done."""
    print(f"{name:<20} {outcome}", flush=True)


def expect(condition: bool, surprise: str) -> None:
    if not condition:
        sys.exit(f"surprise: {surprise}")


def wrong(reason: int, call) -> None:
    """Makes a call that has to fail, for the reason given."""
    try:
        call()
    except grpc.RpcError as error:
        failure = failure_of(error)
    else:
        sys.exit(f"surprise: {reason_name(reason)} expected, but the call succeeded")
    expect(failure.reason == reason, f"{reason_name(reason)} expected, got {failure}")
    facts = [f"{failure.code.name}: {failure.message}"]
    facts += [f"{key}={value}" for key, value in sorted(failure.metadata.items())]
    facts += [f"{field}: {description}" for field, description in failure.violations]
    if failure.retry_after is not None:
        facts.append(f"try again after {failure.retry_after} s")
    step(failure.name, " | ".join(facts))


def acquire(node: Node, session_id: str, timeout: float, holder: str = "python") -> lock_pb2.AcquireResponse:
    """Waits for the lock and reads the session under it.

    The request id names the acquire: a retry that carries the same one, on any node, keeps its place in the queue and
    never takes the lock twice.
    """
    return node.locks.Acquire(
        lock_pb2.AcquireRequest(
            session_id=session_id,
            request_id=str(uuid.uuid4()),
            holder=holder,
            ttl=seconds(60),
            timeout=seconds(timeout),
            read_session=True,
        ),
        timeout=timeout + CALL_TIMEOUT,  # the call's deadline is later than the lock's timeout
    )


def live(node: Node) -> session_pb2.Session:
    """A session's life, up to its end. Returns the session as it was created."""
    sessions, locks = node.sessions, node.locks

    created = sessions.Create(session_pb2.CreateRequest(data=b"0", ttl=seconds(600)), timeout=CALL_TIMEOUT).session
    session_id = created.id
    step("create", f"session {session_id}, revision {created.revision}")

    first = acquire(node, session_id, timeout=5)
    expect(first.session.data == b"0", f"data is {first.session.data!r}")
    # The lock is held at least for the TTL less what the answer took, and never kept alive.
    step("acquire", f"fencing token {first.grant.fencing_token}, TTL {first.grant.ttl.ToMilliseconds()} ms")

    # A lock that somebody else holds is an answer, not an error.
    attempt = locks.TryAcquire(
        lock_pb2.TryAcquireRequest(session_id=session_id, holder="somebody-else"), timeout=CALL_TIMEOUT
    )
    expect(not attempt.acquired and attempt.holder == "python", f"tryAcquire answers {attempt}")
    step("tryAcquire", f"not acquired: {attempt.holder} holds the lock")

    # What was computed under the lock goes back with its fencing token, which makes it harmless to come too late, and with
    # release, which saves a call: acquire with read, save with release are two commits in all.
    saved = sessions.Save(
        session_pb2.SaveRequest(
            session_id=session_id,
            data=first.session.data + b"1",
            fencing_token=first.grant.fencing_token,
            request_id=first.grant.request_id,
            release=True,
        ),
        timeout=CALL_TIMEOUT,
    )
    step("save and release", f"revision {saved.revision}")

    read = sessions.Read(session_pb2.ReadRequest(session_id=session_id), timeout=CALL_TIMEOUT)
    expect(read.session.data == b"01" and read.session.revision == saved.revision, f"read answers {read}")
    step("read", f"data {json.dumps(read.session.data.decode())}, {read.session.ttl_remaining.ToMilliseconds()} ms left")

    second = acquire(node, session_id, timeout=5).grant
    expect(second.fencing_token > first.grant.fencing_token, "the fencing token did not grow")
    locks.Release(
        lock_pb2.ReleaseRequest(
            session_id=session_id, fencing_token=second.fencing_token, request_id=second.request_id
        ),
        timeout=CALL_TIMEOUT,
    )
    step("release", f"fencing token {second.fencing_token}")

    converse(node, session_id, read.position)
    return created


def converse(node: Node, session_id: str, position: int) -> None:
    """A message, from publish to subscribe."""
    # The first answer comes at once, so it tells that the subscription stands. After a break, subscribe again after the
    # last position received. A subscription lasts: it is the one call without a deadline.
    subscription = node.messages.Subscribe(
        message_pb2.SubscribeRequest(session_id=session_id, streams=["notes"], after_position=position)
    )
    for answer in subscription:
        if not answer.messages:
            published = node.messages.Publish(
                message_pb2.PublishRequest(
                    session_id=session_id,
                    stream="notes",
                    payload=b"hello",
                    request_id=str(uuid.uuid4()),  # a retry with the same one does not append again
                ),
                timeout=CALL_TIMEOUT,
            )
            step("publish", f"position {published.position}")
            continue
        message = answer.messages[0]
        expect(message.payload == b"hello", f"got {message}")
        step("subscribe", f"got {json.dumps(message.payload.decode())} at position {message.position}")
        break
    subscription.cancel()


def fail(node: Node, created: session_pb2.Session) -> None:
    """Every error that a healthy node gives."""
    locks = node.locks
    session_id = created.id

    def save(**fields):
        return node.sessions.Save(session_pb2.SaveRequest(session_id=session_id, **fields), timeout=CALL_TIMEOUT)

    def create(**fields):
        return node.sessions.Create(session_pb2.CreateRequest(**fields), timeout=CALL_TIMEOUT)

    def publish(size: int):
        return node.messages.Publish(
            message_pb2.PublishRequest(session_id=session_id, stream="big", payload=bytes(size)), timeout=CALL_TIMEOUT
        )

    wrong(
        reasons.ERROR_REASON_SESSION_NOT_FOUND,
        lambda: node.sessions.Read(session_pb2.ReadRequest(session_id="no-such-session"), timeout=CALL_TIMEOUT),
    )
    wrong(reasons.ERROR_REASON_SESSION_EXISTS, lambda: create(session_id=session_id))
    wrong(reasons.ERROR_REASON_INVALID_ARGUMENT, lambda: create(session_id="two words", ttl=seconds(0.001)))
    wrong(reasons.ERROR_REASON_SESSION_TOO_LARGE, lambda: save(data=bytes(MIB + 1)))
    wrong(reasons.ERROR_REASON_REVISION_MISMATCH, lambda: save(data=b"2", expected_revision=created.revision))

    held = acquire(node, session_id, timeout=5).grant
    # The same holder, by another request: it would wait for itself.
    wrong(reasons.ERROR_REASON_LOCK_ALREADY_HELD, lambda: acquire(node, session_id, timeout=5))
    wrong(reasons.ERROR_REASON_SESSION_LOCKED, lambda: save(data=b"2"))
    wrong(reasons.ERROR_REASON_LOCK_TIMEOUT, lambda: acquire(node, session_id, timeout=0.1, holder="impatient"))

    # On a node that lets one caller wait for a lock (--max-waiters 1), of two at most one gets to wait, and the other is
    # told at once. Who does not want to wait any more cancels the call, and leaves the queue.
    ended: queue.SimpleQueue[grpc.Future] = queue.SimpleQueue()
    crowd = [
        locks.Acquire.future(
            lock_pb2.AcquireRequest(session_id=session_id, holder=holder, timeout=seconds(5)), timeout=5 + CALL_TIMEOUT
        )
        for holder in ("left", "right")
    ]
    for call in crowd:
        call.add_done_callback(ended.put)
    wrong(reasons.ERROR_REASON_TOO_MANY_WAITERS, ended.get().result)
    for call in crowd:
        call.cancel()

    grant = {"fencing_token": held.fencing_token, "request_id": held.request_id}
    release = lock_pb2.ReleaseRequest(session_id=session_id, **grant)
    locks.Release(release, timeout=CALL_TIMEOUT)
    wrong(reasons.ERROR_REASON_LOCK_NOT_HELD, lambda: locks.Release(release, timeout=CALL_TIMEOUT))
    # Too late: the lock is gone, and what another may have saved since stays.
    wrong(reasons.ERROR_REASON_LOCK_LOST, lambda: save(data=b"2", **grant))

    wrong(reasons.ERROR_REASON_MESSAGE_TOO_LARGE, lambda: publish(4 * MIB + 1))
    for _ in range(3):
        publish(4 * MIB)
    # With "hello" the fourth is over the 16 MiB that a session may store.
    wrong(reasons.ERROR_REASON_TOO_MANY_MESSAGES, lambda: publish(4 * MIB))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--without-etcd", metavar="HOST:PORT", help="a node whose etcd cannot be reached")
    parser.add_argument("--until-shutdown", action="store_true", help="stay until the node shuts down")
    args = parser.parse_args()

    node = Node(args.address)
    created = live(node)
    fail(node, created)

    if args.without_etcd:
        # Nothing is known about the session: never take this for SESSION_NOT_FOUND.
        lonely = Node(args.without_etcd)
        request = session_pb2.ReadRequest(session_id=created.id)
        wrong(reasons.ERROR_REASON_BACKEND_UNAVAILABLE, lambda: lonely.sessions.Read(request, timeout=CALL_TIMEOUT))
        lonely.channel.close()

    gone = node.sessions.Destroy(session_pb2.DestroyRequest(session_id=created.id), timeout=CALL_TIMEOUT)
    expect(gone.destroyed, "the session was gone before it was destroyed")
    step("destroy", f"session {created.id}")

    if args.until_shutdown:
        last = node.sessions.Create(session_pb2.CreateRequest(ttl=seconds(60)), timeout=CALL_TIMEOUT).session

        def subscribed() -> None:
            for _ in node.messages.Subscribe(message_pb2.SubscribeRequest(session_id=last.id, streams=["notes"])):
                step("subscribe", "until the node shuts down")

        wrong(reasons.ERROR_REASON_SHUTTING_DOWN, subscribed)  # another node serves: connect to it and call again

    node.channel.close()


if __name__ == "__main__":
    main()
