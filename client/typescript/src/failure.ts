// What a failed call says about itself. Copy this file: every program needs it.

import { Code, ConnectError } from "@connectrpc/connect";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { ErrorReason } from "./gen/sessiond/v1/error_pb.js";

export interface Failure {
  // The kind of error: decide by it, never by the message. UNSPECIFIED if no node made the error: it could not be reached,
  // or the connection broke, or the deadline passed.
  reason: ErrorReason;
  code: Code;
  message: string;
  // Facts that go with the reason, such as "limit_bytes": see ErrorReason in error.proto.
  metadata: Record<string, string>;
  // What is wrong with the request, if the reason is INVALID_ARGUMENT.
  violations: { field: string; description: string }[];
  // When another try may help; undefined if the node did not say.
  retryAfterMs: number | undefined;
}

// failureOf decodes what a call has thrown.
export function failureOf(thrown: unknown): Failure {
  // Connect throws nothing else; from() wraps what other code may have thrown, with Code.Unknown.
  const error = ConnectError.from(thrown);
  // The details travel in the trailer grpc-status-details-bin, as google.rpc.Status; Connect has unpacked it.
  const info = error.findDetails(ErrorInfoSchema).find((detail) => detail.domain === "sessiond");
  const retry = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
  return {
    // A node that is newer than these stubs may give reasons that they do not know.
    reason: ErrorReason[(info?.reason ?? "") as keyof typeof ErrorReason] ?? ErrorReason.UNSPECIFIED,
    code: error.code,
    message: error.rawMessage,
    metadata: info?.metadata ?? {},
    violations: error.findDetails(BadRequestSchema).flatMap((detail) => detail.fieldViolations),
    retryAfterMs: retry && durationMs(retry),
  };
}
