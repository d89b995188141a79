"""The names of spans, attributes and metrics, by the semantic conventions for messaging systems, version 1.37.

The conventions are in development: only this module follows their changes. Names of outboxq's own begin with
`messaging.outboxq.`. Source: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/ and
messaging-metrics.
"""

from importlib.metadata import version
from typing import Final

from outboxq.codec.text import name_of

# The name and version of the tracer and the meter.
SCOPE: Final = ("outboxq", version("outboxq"))

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
MESSAGE_ID: Final = "messaging.message.id"
BATCH_COUNT: Final = "messaging.batch.message_count"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

KIND: Final = "messaging.outboxq.kind"
ATTEMPT: Final = "messaging.outboxq.attempt"
WAIT_SECONDS: Final = "messaging.outboxq.wait_seconds"
OUTCOME: Final = "messaging.outboxq.outcome"

PROCESS_DURATION: Final = "messaging.process.duration"
CONSUMED_MESSAGES: Final = "messaging.client.consumed.messages"
SENT_MESSAGES: Final = "messaging.client.sent.messages"
# The buckets that the conventions require for `messaging.process.duration`.
DURATION_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


def operation(name: str, queue: str) -> dict[str, str | int | float]:
    """Return the attributes of spans and metrics for an operation on a queue, "send" or "process"."""
    return {SYSTEM: "outboxq", OPERATION_NAME: name, OPERATION_TYPE: name, DESTINATION: queue}


def error_type(error: BaseException) -> str:
    """Return the name of an exception's class, and never its text, which may contain arguments of a job."""
    return name_of(error)
