"""The trace context in the headers of jobs, as W3C Trace Context defines it: `traceparent` and `tracestate`.

OpenTelemetry's baggage is left out, because it would store values of callers with each job.
"""

from collections.abc import Mapping

import msgspec
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outboxq.codec.values import MAX_HEADERS_BYTES
from outboxq.new_job import JobEnvelope, NewJob

_PROPAGATOR = TraceContextTextMapPropagator()
_NAME = "traceparent"
_Headers = dict[str, str]


def context_of(headers: str) -> trace.SpanContext | None:
    """Return the trace context that the headers of a job, as JSON text, contain; None without a valid one."""
    if f'"{_NAME}"' not in headers:
        return None
    try:
        carrier = msgspec.json.decode(headers.encode(), type=_Headers)
    except (msgspec.DecodeError, RecursionError):
        return None
    found = trace.get_current_span(_PROPAGATOR.extract(carrier)).get_span_context()
    return found if found.is_valid else None


def has_context(new: NewJob) -> bool:
    """Return True if a new job has a `traceparent`, from its caller or from an earlier span."""
    headers = new.envelope.headers
    return f'"{_NAME}"' in headers and _NAME in msgspec.json.decode(headers.encode(), type=_Headers)


def with_context(jobs: Mapping[str, NewJob], span: trace.Span) -> dict[str, NewJob]:
    """Return the jobs, and the jobs that follow them, with the context of a span in their headers.

    A job that has a `traceparent` keeps it, and headers that would exceed the limit stay as they are. Jobs that share
    an envelope, the object with their headers and options, still share one, so that these are sent only once.
    """
    carrier: _Headers = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    if not carrier:
        return dict(jobs)
    envelopes: dict[JobEnvelope, JobEnvelope] = {}

    def changed(new: NewJob) -> NewJob:
        envelope = envelopes.get(new.envelope)
        if envelope is None:
            envelope = envelopes[new.envelope] = _with(new.envelope, carrier)
        followers = tuple(map(changed, new.followers))
        return msgspec.structs.replace(new, envelope=envelope, followers=followers)

    return {job_id: changed(new) for job_id, new in jobs.items()}


def _with(envelope: JobEnvelope, carrier: _Headers) -> JobEnvelope:
    headers = {} if envelope.headers == "{}" else msgspec.json.decode(envelope.headers.encode(), type=_Headers)
    if _NAME in headers:
        return envelope
    text = msgspec.json.encode({**headers, **carrier})
    return envelope if len(text) > MAX_HEADERS_BYTES else msgspec.structs.replace(envelope, headers=text.decode())
