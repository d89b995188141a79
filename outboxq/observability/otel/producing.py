"""Tracing of producers: a span around the INSERT of a flush, for each queue; its context is stored with the jobs."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from opentelemetry import metrics, trace
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outboxq.errors import ArgumentError
from outboxq.new_job import NewJob
from outboxq.observability.otel import conventions
from outboxq.observability.otel.headers import has_context, with_context
from outboxq.outbox.sending import set_sender

logger = logging.getLogger("outboxq.otel")

Sessions = (
    type[Session] | type[AsyncSession] | sessionmaker[Session] | async_sessionmaker[AsyncSession]
    | scoped_session[Session] | async_scoped_session[AsyncSession]
)  # fmt: skip


class TracingSender:
    """Makes spans for jobs that are added, and writes the spans' contexts into the jobs' headers."""

    def __init__(
        self, tracer_provider: trace.TracerProvider | None, meter_provider: metrics.MeterProvider | None
    ) -> None:
        self._tracer = trace.get_tracer(*conventions.SCOPE, tracer_provider)
        self._sent = metrics.get_meter(*conventions.SCOPE, meter_provider).create_counter(
            conventions.SENT_MESSAGES, "{message}", "Jobs that a flush has sent, committed or not."
        )

    @contextmanager
    def sending(self, jobs: Mapping[str, NewJob], connection: Connection | None) -> Iterator[Mapping[str, NewJob]]:
        """Wrap an INSERT in a span for each queue; yield the jobs with the spans' contexts.

        Jobs that already have a context stay unchanged, and outside the spans. An error in tracing is logged, and the
        jobs are sent without contexts.
        """
        spans: dict[str, trace.Span] = {}
        counts: dict[str, int] = {}
        try:
            sent, spans, counts = self._begin(jobs, connection)
        except Exception:
            logger.exception("no span was made for jobs that are added")
            sent = jobs
        error_type: str | None = None
        try:
            with ExitStack() as stack:
                if len(spans) == 1:
                    # Other instrumented calls in the block belong to the span.
                    (only,) = spans.values()
                    stack.enter_context(trace.use_span(only, record_exception=False, set_status_on_exception=False))
                yield sent
        except BaseException as error:
            error_type = conventions.error_type(error)
            raise
        finally:
            self._end(spans, counts, error_type)

    def _begin(
        self, jobs: Mapping[str, NewJob], connection: Connection | None
    ) -> tuple[Mapping[str, NewJob], dict[str, trace.Span], dict[str, int]]:
        by_queue: dict[str, dict[str, NewJob]] = {}
        for job_id, new in jobs.items():
            if not has_context(new):
                by_queue.setdefault(new.queue, {})[job_id] = new
        sent, spans = dict(jobs), dict[str, trace.Span]()
        for queue, its in by_queue.items():
            spans[queue] = span = self._start(queue, its, connection)
            # In their original order.
            sent.update(with_context(its, span))
        return sent, spans, {queue: len(its) for queue, its in by_queue.items()}

    def _start(self, queue: str, jobs: Mapping[str, NewJob], connection: Connection | None) -> trace.Span:
        attributes = {**conventions.operation("send", queue), **_server(connection)}
        kinds = {new.kind for new in jobs.values()}
        if len(kinds) == 1:
            attributes[conventions.KIND] = kinds.pop()
        if len(jobs) == 1:
            attributes[conventions.MESSAGE_ID] = _uuid(*jobs)
        else:
            attributes[conventions.BATCH_COUNT] = len(jobs)
        return self._tracer.start_span(f"send {queue}", kind=trace.SpanKind.PRODUCER, attributes=attributes)

    def _end(self, spans: Mapping[str, trace.Span], counts: Mapping[str, int], error_type: str | None) -> None:
        failed = {} if error_type is None else {conventions.ERROR_TYPE: error_type}
        try:
            for queue, span in spans.items():
                if failed:
                    span.set_attributes(failed)
                    span.set_status(trace.StatusCode.ERROR)
                span.end()
                self._sent.add(counts[queue], {**conventions.operation("send", queue), **failed})
        except Exception:
            logger.exception("a span of jobs that were added could not be ended")


def _server(connection: Connection | None) -> dict[str, str | int]:
    if connection is None:
        return {}
    url = connection.engine.url
    if not url.host or url.host.startswith("/"):
        return {}
    return {conventions.SERVER_ADDRESS: url.host, conventions.SERVER_PORT: url.port or 5432}


def _uuid(job_id: str) -> str:
    """Return the id of a job, given as 32 hexadecimal digits, with dashes."""
    return "-".join(job_id[begin:end] for begin, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


def instrument(
    sessions: Sessions,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Trace the jobs that sessions add: a span `send {queue}` for each flush and queue, whose context the jobs carry.

    The context is in the headers `traceparent` and `tracestate` of the jobs; a `traceparent` that the caller has given
    stays as it is. A span shows that jobs were sent, not that they were committed. The sent jobs are also counted
    (`messaging.client.sent.messages`).

    Args:
        sessions: The factory of the sessions: a `sessionmaker` or `async_sessionmaker`, a scoped session, or a class of
            sessions, with all classes derived from it.
        tracer_provider: The global one by default, also if it is set later.
        meter_provider: The global one by default, also if it is set later.

    Raises:
        ArgumentError: `sessions` is something else.
    """
    sender = TracingSender(tracer_provider, meter_provider)
    for each in _classes(sessions):
        set_sender(each, sender)


def _classes(sessions: object) -> Sequence[type[Session]]:
    """Return the plain (not async) session classes to trace, which a factory or an async class uses.

    An async factory or class first gets a plain session class of its own, so that no other sessions are traced.
    """
    if isinstance(sessions, scoped_session | async_scoped_session):
        return _classes(sessions.session_factory)
    if isinstance(sessions, sessionmaker):
        # A class for this sessionmaker only.
        return [sessions.class_]
    if isinstance(sessions, async_sessionmaker):
        given = sessions.kw.get("sync_session_class")
        if given is not None:
            sessions.kw["sync_session_class"] = own = _derived(given)
            return [own]
        return _classes(sessions.class_)
    if isinstance(sessions, type) and issubclass(sessions, AsyncSession):
        sessions.sync_session_class = own = _derived(sessions.sync_session_class)
        return [own]
    if isinstance(sessions, type) and issubclass(sessions, Session):
        return [sessions]
    raise ArgumentError(f"instrument takes a sessionmaker or a class of sessions, got {type(sessions).__name__}")


def _derived(sessions: type[Session]) -> type[Session]:
    return type(sessions.__name__, (sessions,), {})
