"""Tracing of handlers in a relay: a span around each call, and metrics of the calls' outcomes."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, get_args

from opentelemetry import context as context_api
from opentelemetry import metrics, trace
from sqlalchemy.orm import Session

from outboxq.database.sessions import plain_session
from outboxq.errors import ArgumentError
from outboxq.job import Job
from outboxq.new_job import NewJob
from outboxq.observability.otel import conventions
from outboxq.observability.otel.headers import context_of
from outboxq.observability.otel.metering import EVENTS, ProcessMeter
from outboxq.observability.otel.producing import TracingSender
from outboxq.outbox.pending import change_pending
from outboxq.outbox.sending import SENDER_OF_CALL

logger = logging.getLogger("outboxq.otel")

Relation = Literal["link", "parent"]


class CallContext(Protocol):
    """The context of a handler's call, as far as tracing reads it; that of a single job also has a `job`."""

    @property
    def jobs(self) -> Sequence[Job]:
        """The jobs of the call."""
        ...


class Registry(Protocol):
    """A registry of handlers, such as `outboxq.Jobs`, as far as `instrument_jobs` uses it."""

    def around(self, function: Any, /) -> Any:
        """Register a function that wraps each call of a handler."""
        ...

    def on(self, *events: type[object]) -> Callable[[Any], Any]:
        """Return a decorator that registers a hook for these events."""
        ...


# The most links of a span: by default, SDKs keep no more.
_LINKS_MOST = 128


class ProcessTracer:
    """Makes a span for each call of a handler; `instrument_jobs` registers its method `around`."""

    def __init__(
        self, tracer: trace.Tracer, sender: TracingSender, relation: Relation, *, record_exceptions: bool
    ) -> None:
        self._tracer = tracer
        self._sender = sender
        self._relation = relation
        self._record_exceptions = record_exceptions

    def around(self, ctx: CallContext) -> AbstractContextManager[object] | None:
        """Return a context manager that runs a call in a span; None if no span can be made, which is logged."""
        try:
            span = self._start(ctx)
        except Exception:
            logger.exception("no span was made for the call of a handler")
            return None
        return self._within(span, ctx)

    @contextmanager
    def _within(self, span: trace.Span, ctx: CallContext) -> Iterator[None]:
        token = SENDER_OF_CALL.set(self._sender)
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield
                _trace_added(ctx, self._sender)
            except BaseException as error:
                span.set_attribute(conventions.ERROR_TYPE, conventions.error_type(error))
                span.set_status(trace.StatusCode.ERROR)
                if self._record_exceptions:
                    span.record_exception(error)
                raise
            finally:
                SENDER_OF_CALL.reset(token)

    def _start(self, ctx: CallContext) -> trace.Span:
        jobs = ctx.jobs
        creations = [found for job in jobs[:_LINKS_MOST] if (found := context_of(job.headers)) is not None]
        parent: context_api.Context | None = None
        if self._relation == "parent" and len(jobs) == 1 and creations:
            parent, creations = trace.set_span_in_context(trace.NonRecordingSpan(creations[0])), []
        return self._tracer.start_span(
            f"process {jobs[0].queue}",
            context=parent,
            kind=trace.SpanKind.CONSUMER,
            attributes=_attributes(ctx, jobs),
            links=[trace.Link(found) for found in creations],
        )


def _trace_added(ctx: CallContext, sender: TracingSender) -> None:
    """Write the trace context into the headers of jobs that the handler has added and no flush has inserted yet.

    The handler's span must be current: the jobs are inserted after it ends, perhaps together with other handlers' jobs.
    """

    def sent(jobs: Mapping[str, NewJob]) -> Mapping[str, NewJob]:
        with sender.sending(jobs, None) as changed:
            return changed

    try:
        session = _session_of(ctx)
        if session is not None:
            change_pending(session, sent)
    except Exception:
        logger.exception("jobs that a handler has added are not traced")


def _attributes(ctx: CallContext, jobs: Sequence[Job]) -> dict[str, str | int | float]:
    first = jobs[0]
    attributes = {**conventions.operation("process", first.queue), conventions.KIND: first.kind}
    if not _is_of_one_job(ctx):
        return {**attributes, conventions.BATCH_COUNT: len(jobs)}
    return {
        **attributes,
        conventions.MESSAGE_ID: str(first.id),
        conventions.ATTEMPT: first.attempt,
        conventions.WAIT_SECONDS: first.waited_seconds,
    }


def _session_of(ctx: CallContext) -> Session | None:
    """Return the plain (not async) session of a call; None if the call has opened no session yet."""
    found: Any = ctx
    session = vars(ctx).get("session") if _is_of_one_job(ctx) else found.session
    return None if session is None else plain_session(session, "tracing")


def _is_of_one_job(ctx: CallContext) -> bool:
    """Return True if the call is of a single job's handler, and False if it is of a batch handler."""
    return hasattr(ctx, "job")


def instrument_jobs(
    jobs: Registry,
    *,
    relation: Relation = "link",
    record_exceptions: bool = False,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Trace and measure the calls of the handlers of a registry, and of the registries that it includes.

    Each call has a span `process {queue}`, which is current while the handler runs; a batch handler has one for all
    jobs of a call. Jobs that a handler adds carry the context of a `send` span within that span. Call this before
    registering other arounds, so that these run within the span.

    Args:
        relation: The relation to the span in which the job was added: "link", in a trace of its own, or "parent", in
            the same trace. Calls with several jobs have links in any case, 128 at the most.
        record_exceptions: Record the exceptions of handlers in spans, with their texts and tracebacks, which may
            contain arguments of jobs. By default spans only have their types.
        tracer_provider: The global one by default, also if it is set later.
        meter_provider: The global one by default, also if it is set later.

    Raises:
        ArgumentError: `relation` is neither "link" nor "parent".
    """
    if relation not in get_args(Relation):
        raise ArgumentError(f"relation takes 'link' or 'parent', got {relation!r}")
    sender = TracingSender(tracer_provider, meter_provider)
    tracer = trace.get_tracer(*conventions.SCOPE, tracer_provider)
    jobs.around(ProcessTracer(tracer, sender, relation, record_exceptions=record_exceptions).around)
    meter = ProcessMeter(metrics.get_meter(*conventions.SCOPE, meter_provider))
    jobs.on(*EVENTS)(meter.record)
