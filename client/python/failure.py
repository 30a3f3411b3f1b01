"""What a failed call says about itself. Copy this file: every program needs it."""

from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2, status_pb2
from sessiond.v1 import error_pb2


@dataclass
class Failure:
    # The kind of error: decide by it, never by the message. Unspecified if no node made the error: it could not be
    # reached, or the connection broke, or the deadline passed.
    reason: int
    code: grpc.StatusCode
    message: str
    # Facts that go with the reason, such as "limit_bytes": see ErrorReason in error.proto.
    metadata: dict[str, str] = field(default_factory=dict)
    # What is wrong with the request, as (field, description), if the reason is INVALID_ARGUMENT.
    violations: list[tuple[str, str]] = field(default_factory=list)
    # When another try may help, in seconds; None if the node did not say.
    retry_after: float | None = None

    @property
    def name(self) -> str:
        return reason_name(self.reason)


def reason_name(reason: int) -> str:
    """The name of a reason as ErrorInfo has it: without the enum's prefix."""
    return error_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")


def failure_of(error: grpc.RpcError) -> Failure:
    """Decodes what a call has raised."""
    failure = Failure(error_pb2.ERROR_REASON_UNSPECIFIED, error.code(), error.details())
    # The details travel in this trailer. (With the package grpcio-status: rpc_status.from_call(error).details.)
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status.ParseFromString(value)
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(info) and info.domain == "sessiond":
            failure.reason = _reason(info.reason)
            failure.metadata = dict(info.metadata)
        elif detail.Unpack(retry):
            failure.retry_after = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Unpack(bad):
            failure.violations = [(v.field, v.description) for v in bad.field_violations]
    return failure


def _reason(name: str) -> int:
    try:
        return error_pb2.ErrorReason.Value("ERROR_REASON_" + name)
    except ValueError:  # from a node that is newer than these stubs
        return error_pb2.ERROR_REASON_UNSPECIFIED
