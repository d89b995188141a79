"""The trace that a job belongs to, by the header that W3C Trace Context defines."""

import re

import msgspec

# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace-id, parent-id, flags.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


class _Headers(msgspec.Struct):
    traceparent: str


def trace_id_of(headers: str) -> str | None:
    """The trace id in a job's headers, which are JSON text; None without a valid `traceparent`."""
    if '"traceparent"' not in headers:
        return None
    try:
        found = msgspec.json.decode(headers.encode(), type=_Headers).traceparent
    except (msgspec.DecodeError, RecursionError):
        return None
    match = _TRACEPARENT.fullmatch(found)
    return match[1] if match else None
