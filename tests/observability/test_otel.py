"""OpenTelemetry: what spans and metrics say of producers and handlers, and how one finds the other."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import UUID

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outboxq import (
    AsyncContext,
    AsyncOutboxSession,
    BatchContext,
    BatchItem,
    Context,
    DeadLetter,
    Jobs,
    OutboxSession,
    Retry,
    add_job,
)
from outboxq.errors import ArgumentError
from outboxq.events import Event, JobDied, JobDone, JobRetried
from outboxq.job import trace_id_of
from outboxq.observability.otel import instrument, instrument_jobs
from outboxq.postgres import Database
from tests.support.ledger import of

Drain = Callable[..., list[Event]]
CANARY = "s3cret-canary"
GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Recorded:
    """Where the spans and the metrics of a test go."""

    exporter: InMemorySpanExporter
    tracers: TracerProvider
    reader: InMemoryMetricReader
    meters: MeterProvider

    @property
    def given(self) -> dict[str, object]:
        return {"tracer_provider": self.tracers, "meter_provider": self.meters}

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name.split()[0] == name]

    def only(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span

    def points(self, metric: str) -> list[object]:
        data = self.reader.get_metrics_data()
        assert data is not None
        found = [each for one in data.resource_metrics for scope in one.scope_metrics for each in scope.metrics]
        return [point for each in found if each.name == metric for point in each.data.data_points]


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    yield Recorded(exporter, tracers, reader, meters)
    tracers.shutdown()
    meters.shutdown()


@pytest.fixture
def traced(engine: Engine, recorded: Recorded) -> sessionmaker[OutboxSession]:
    """Sessions whose jobs are traced."""
    maker = sessionmaker(engine, class_=OutboxSession)
    instrument(maker, **recorded.given)  # type: ignore[arg-type]
    return maker


def registry(recorded: Recorded, **options: object) -> Jobs:
    """A registry with handlers of each sort, traced."""
    jobs = Jobs()
    instrument_jobs(jobs, **recorded.given, **options)  # type: ignore[arg-type]

    @jobs.handler(queue="mail")
    def send(ctx: Context, to: str = "") -> None:
        SEEN.append(trace.get_current_span().get_span_context().span_id)

    @jobs.handler(queue="mail")
    def fail(ctx: Context, secret: str = "") -> DeadLetter:
        raise ValueError(f"no luck with {secret}")

    @jobs.handler(queue="mail")
    def retry(ctx: Context) -> Retry:
        return Retry()

    @jobs.handler(queue="mail")
    def fan_out(ctx: Context, flushes: bool) -> None:
        ctx.session.add_job(send, to="a")
        if flushes:
            ctx.session.flush()

    @jobs.handler(queue="shared", batchable=True)
    def fan_out_in_turn(ctx: Context, number: int) -> None:
        ctx.session.add_job(send, to=str(number))

    @jobs.handler(queue="async")
    async def send_async(ctx: AsyncContext) -> None:
        SEEN.append(trace.get_current_span().get_span_context().span_id)

    @jobs.batch_handler(Sending, queue="batches", max_size=200)
    def send_all(ctx: BatchContext, items: list[BatchItem[Sending]]) -> None:
        SEEN.append(trace.get_current_span().get_span_context().span_id)

    return jobs


@dataclass
class Sending:
    to: str


SEEN: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


def kind(jobs: Jobs, name: str) -> object:
    return jobs.resolve().find(name)


def add(
    maker: sessionmaker[OutboxSession], jobs: Jobs, name: str, how_many: int = 1, **arguments: object
) -> list[UUID]:
    with maker.begin() as session:
        new = [kind(jobs, name).job(**arguments) for _ in range(how_many)]  # type: ignore[attr-defined]
        return [handle.id for handle in session.add_jobs(new)]


def headers(engine: Engine) -> list[dict[str, str]]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT headers FROM outboxq.job ORDER BY seq")).scalars())


def links(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def test_a_flush_is_a_span_for_each_queue(
    engine: Engine, traced: sessionmaker[OutboxSession], recorded: Recorded
) -> None:
    """Within the caller's own, and its jobs carry its context in their headers."""
    jobs = registry(recorded)
    tracer = recorded.tracers.get_tracer("shop")
    with tracer.start_as_current_span("request") as request, traced.begin() as session:
        session.add_jobs([kind(jobs, "send").job() for _ in range(2)])  # type: ignore[attr-defined]
        session.add_job(kind(jobs, "send_async"))  # type: ignore[arg-type]
    sent = {span.name: span for span in recorded.spans("send")}
    assert set(sent) == {"send mail", "send async"}
    mail = sent["send mail"]
    assert (mail.kind, parent_id(mail)) == (SpanKind.PRODUCER, request.get_span_context().span_id)
    attributes = dict(mail.attributes or {})
    assert attributes.pop("server.address", "") == (engine.url.host or "")
    assert attributes.pop("server.port", None) == engine.url.port
    assert attributes == {
        "messaging.system": "outboxq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "mail",
        "messaging.batch.message_count": 2,
        "messaging.outboxq.kind": "send",
    }
    stored = headers(engine)
    assert [each["traceparent"].split("-")[2] for each in stored] == [
        f"{span_id(sent[name]):016x}" for name in ("send mail", "send mail", "send async")
    ]
    assert all(trace_id_of(json.dumps(each)) == f"{request.get_span_context().trace_id:032x}" for each in stored)
    one = sent["send async"].attributes or {}
    assert UUID(str(one["messaging.message.id"]))
    assert "messaging.batch.message_count" not in one


def test_a_callers_traceparent_is_never_changed(
    engine: Engine, traced: sessionmaker[OutboxSession], recorded: Recorded
) -> None:
    """Nor are its other headers; a job that has only those gets one."""
    jobs = registry(recorded)
    given = {"traceparent": GIVEN, "tenant": "a"}
    with traced.begin() as session:
        session.add_job(kind(jobs, "send").options(headers=given))  # type: ignore[attr-defined]
        session.add_job(kind(jobs, "send").options(headers={"tenant": "b"}))  # type: ignore[attr-defined]
    first, second = headers(engine)
    assert first == given
    assert (second.pop("tenant"), list(second)) == ("b", ["traceparent"])
    assert UUID(str((recorded.only("send").attributes or {})["messaging.message.id"]))


def test_headers_that_are_full_stay_as_they_are(
    engine: Engine, traced: sessionmaker[OutboxSession], recorded: Recorded
) -> None:
    """A job is worth more than its trace."""
    jobs = registry(recorded)
    full = {"note": "x" * (64 * 1024 - 20)}
    with traced.begin() as session:
        session.add_job(kind(jobs, "send").options(headers=full))  # type: ignore[attr-defined]
    assert headers(engine) == [full]


def test_a_flush_that_fails_is_an_error(traced: sessionmaker[OutboxSession], recorded: Recorded) -> None:
    """With the class of what was raised, and nothing of its text."""
    jobs = registry(recorded)
    with traced() as session:
        session.execute(text("ALTER TABLE outboxq.job ADD CONSTRAINT no_jobs CHECK (kind <> 'send') NOT VALID"))
        session.add_job(kind(jobs, "send"))  # type: ignore[arg-type]
        with pytest.raises(Exception, match="no_jobs"):
            session.flush()
        session.rollback()
    span = recorded.only("send")
    assert (span.status.status_code, span.status.description, span.events) == (StatusCode.ERROR, None, ())
    assert "IntegrityError" in str((span.attributes or {})["error.type"])


PRODUCER = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from outboxq import OutboxSession, external
from outboxq.observability.otel import instrument

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
maker = sessionmaker(create_engine(sys.argv[1], use_native_hstore=False), class_=OutboxSession)
instrument(maker)
with maker.begin() as session:
    session.add_job(external("send", queue="mail"), to="a")
(span,) = exporter.get_finished_spans()
print(span.context.trace_id, span.context.span_id)
"""


@pytest.mark.wide
@pytest.mark.parametrize("relation", ["link", "parent"])
def test_the_span_of_a_handler_leads_to_that_of_the_producer_in_another_process(
    outboxq_database: Database, recorded: Recorded, drain: Drain, relation: str
) -> None:
    """By a link, from a trace of its own; or as its parent, if that was chosen."""
    command = [sys.executable, "-c", PRODUCER, outboxq_database.url]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    trace_id, sent_id = map(int, said.split())
    assert len(of(drain(registry(recorded, relation=relation)), JobDone)) == 1
    span = recorded.only("process")
    assert (span.name, span.kind, span.status.status_code) == ("process mail", SpanKind.CONSUMER, StatusCode.UNSET)
    assert span.context is not None
    if relation == "link":
        assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [(trace_id, sent_id)]
        assert span.parent is None
        assert span.context.trace_id != trace_id
    else:
        assert (span.links, parent_id(span), span.context.trace_id) == ((), sent_id, trace_id)
    assert [span_id(span)] == SEEN
    attributes = dict(span.attributes or {})
    assert UUID(str(attributes.pop("messaging.message.id")))
    assert float(str(attributes.pop("messaging.outboxq.wait_seconds"))) >= 0
    assert attributes == {
        "messaging.system": "outboxq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "mail",
        "messaging.outboxq.kind": "send",
        "messaging.outboxq.attempt": 1,
    }


def test_a_job_of_sql_leads_to_the_trace_that_its_headers_name(
    engine: Engine, recorded: Recorded, drain: Drain
) -> None:
    """And one whose headers name none, or nonsense, has a span without a link."""
    with engine.begin() as connection:
        for given in ({"traceparent": GIVEN}, {}, {"traceparent": "nonsense"}):
            connection.execute(
                text("SELECT outboxq.add_job('send', '{}', 'mail', headers => CAST(:headers AS jsonb))"),
                {"headers": json.dumps(given)},
            )
    drain(registry(recorded))
    assert sorted(map(links, recorded.spans("process"))) == [[], [], [0xB7AD6B7169203331]]


def test_the_span_of_an_async_handler_is_current_while_it_runs(
    traced: sessionmaker[OutboxSession], recorded: Recorded, drain: Drain
) -> None:
    """In its own task."""
    jobs = registry(recorded)
    add(traced, jobs, "send_async")
    drain(jobs)
    assert [span_id(recorded.only("process"))] == SEEN
    assert links(recorded.only("process")) == [span_id(recorded.only("send"))]


@pytest.mark.wide
def test_a_batch_handler_has_one_span_with_links_to_its_jobs(
    traced: sessionmaker[OutboxSession], recorded: Recorded, drain: Drain
) -> None:
    """128 at the most."""
    jobs = registry(recorded)
    for _ in range(130):
        add(traced, jobs, "send_all", to="a")
    drain(jobs)
    span = recorded.only("process")
    assert (span.attributes or {})["messaging.batch.message_count"] == 130
    assert len(set(links(span))) == 128
    assert set(links(span)) < {span_id(sent) for sent in recorded.spans("send")}
    assert [span_id(span)] == SEEN


def test_each_job_of_a_shared_batch_has_a_span(
    engine: Engine, traced: sessionmaker[OutboxSession], recorded: Recorded, drain: Drain
) -> None:
    """And the jobs that it adds, which are sent together behind all of them, lead to it."""
    jobs = registry(recorded)
    for number in range(3):
        add(traced, jobs, "fan_out_in_turn", number=number)
    drain(jobs, batch_size=3)
    shared = [span for span in recorded.spans("process") if span.name == "process shared"]
    assert len({links(span)[0] for span in shared}) == 3
    inner = [span for span in recorded.spans("send") if span.name == "send mail"]
    assert sorted(map(parent_id, inner)) == sorted(map(span_id, shared))  # type: ignore[type-var]
    mail = [span for span in recorded.spans("process") if span.name == "process mail"]
    assert sorted(map(links, mail)) == sorted([span_id(span)] for span in inner)


@pytest.mark.parametrize("flushes", [False, True])
def test_jobs_that_a_handler_adds_lead_to_its_span(
    traced: sessionmaker[OutboxSession], recorded: Recorded, drain: Drain, flushes: bool
) -> None:
    """Whether it flushes them itself, or leaves them to the relay."""
    jobs = registry(recorded)
    add(traced, jobs, "fan_out", flushes=flushes)
    drain(jobs)
    first, second = recorded.spans("process")
    (inner,) = [span for span in recorded.spans("send") if span.parent is not None]
    assert parent_id(inner) == span_id(first)
    assert links(second) == [span_id(inner)]


def test_jobs_of_a_chain_lead_to_the_producer(
    traced: sessionmaker[OutboxSession], recorded: Recorded, drain: Drain
) -> None:
    """Also those that are added by the relay, when the one before is done."""
    jobs = registry(recorded)
    with traced.begin() as session:
        send = kind(jobs, "send")
        session.add_jobs([send.job().then(send.job()).then(kind(jobs, "send_async").job())])  # type: ignore[attr-defined]
    drain(jobs)
    sent = span_id(recorded.only("send"))
    assert [links(span) for span in recorded.spans("process")] == [[sent]] * 3


@pytest.mark.parametrize("records", [False, True])
def test_a_handler_that_fails_is_an_error_with_its_type(
    traced: sessionmaker[OutboxSession], recorded: Recorded, drain: Drain, records: bool
) -> None:
    """What it was given, and what the error says, is in no span and in no metric, unless exceptions are recorded."""
    jobs = registry(recorded, record_exceptions=records)
    with traced.begin() as session:
        new = kind(jobs, "fail").options(headers={"token": CANARY}, max_attempts=1).job(secret=CANARY)  # type: ignore[attr-defined]
        session.add_jobs([new])
    assert of(drain(jobs), JobDied)
    span = recorded.only("process")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert (span.attributes or {})["error.type"] == "ValueError"
    everything = " ".join(each.to_json() for each in recorded.exporter.get_finished_spans())
    data = recorded.reader.get_metrics_data()
    assert data is not None
    assert CANARY not in data.to_json()
    assert (CANARY in everything) is records
    assert [event.name for event in span.events] == (["exception"] if records else [])


def test_calls_are_measured(traced: sessionmaker[OutboxSession], recorded: Recorded, drain: Drain) -> None:
    """How long they took, how many jobs were consumed and sent."""
    jobs = registry(recorded)
    add(traced, jobs, "send", 3)
    add(traced, jobs, "retry")
    events = drain(jobs)
    assert of(events, JobRetried)
    durations = recorded.points("messaging.process.duration")
    found = {
        (point.attributes["messaging.outboxq.kind"], point.attributes["messaging.outboxq.outcome"]): point.count  # type: ignore[attr-defined]
        for point in durations
    }
    assert found == {("send", "done"): 3, ("retry", "retried"): 1}
    assert sum(point.sum for point in durations) == pytest.approx(  # type: ignore[attr-defined]
        sum(event.seconds for event in events if isinstance(event, JobDone | JobRetried))
    )
    assert sum(point.value for point in recorded.points("messaging.client.consumed.messages")) == 4  # type: ignore[attr-defined]
    assert [point.value for point in recorded.points("messaging.client.sent.messages")] == [4]  # type: ignore[attr-defined]


class Broken(Sampler):
    """A sampler of the user's that raises."""

    def should_sample(self, *_: object, **__: object) -> SamplingResult:
        raise RuntimeError("no decision")

    def get_description(self) -> str:
        return "broken"


def test_tracing_that_fails_holds_up_no_job(
    engine: Engine, recorded: Recorded, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, on both sides."""
    broken = TracerProvider(Broken())
    jobs = Jobs()
    instrument_jobs(jobs, tracer_provider=broken)

    @jobs.handler(queue="mail")
    def send(ctx: Context) -> None: ...

    maker = sessionmaker(engine, class_=OutboxSession)
    instrument(maker, tracer_provider=broken)
    with maker.begin() as session:
        session.add_job(send)
    assert headers(engine) == [{}]
    assert len(of(drain(jobs), JobDone)) == 1
    said = [record.getMessage() for record in caplog.records if record.name == "outboxq.otel"]
    assert said == ["no span was made for jobs that are added", "no span was made for the call of a handler"]


def test_what_is_not_sampled_is_not_recorded_and_still_leads_on(engine: Engine, recorded: Recorded) -> None:
    """The flags in the header tell the relay so."""
    maker = sessionmaker(engine, class_=OutboxSession)
    instrument(maker, tracer_provider=TracerProvider(ALWAYS_OFF))
    add(maker, registry(recorded), "send")
    (stored,) = headers(engine)
    # The lowest bit of the flags: sampled.
    assert int(stored["traceparent"].split("-")[3], 16) & 1 == 0


def test_without_an_sdk_nothing_is_stored(engine: Engine, recorded: Recorded) -> None:
    """The API alone makes no context of its own."""
    maker = sessionmaker(engine, class_=OutboxSession)
    instrument(maker, tracer_provider=trace.NoOpTracerProvider())
    add(maker, registry(recorded), "send")
    assert headers(engine) == [{}]


@pytest.mark.parametrize("how", ["maker", "given", "scoped", "class"])
def test_async_sessions_are_traced(outboxq_database: Database, recorded: Recorded, how: str) -> None:
    """Of a sessionmaker, with a class of plain sessions that was given or not, of a scoped session, and of a class."""

    class Own(AsyncOutboxSession):
        pass

    async def run(engine: AsyncEngine) -> None:
        maker: async_sessionmaker[AsyncSession] = async_sessionmaker(engine, class_=Own)
        if how == "given":
            maker = async_sessionmaker(engine, sync_session_class=OutboxSession)
        scoped = async_scoped_session(maker, lambda: 1)
        instrument({"scoped": scoped, "class": Own}.get(how, maker), **recorded.given)  # type: ignore[arg-type]
        jobs = registry(recorded)
        # A sessionmaker that is made later belongs to its class.
        session = async_sessionmaker(engine, class_=Own)() if how == "class" else maker()
        async with session, session.begin():
            add_job(session, kind(jobs, "send"))  # type: ignore[arg-type]
        await engine.dispose()

    asyncio.run(run(create_async_engine(outboxq_database.url)))
    assert recorded.only("send").name == "send mail"
    # Other sessions are as they were.
    assert OutboxSession.__dict__.get("_outboxq_sender") is None
    assert AsyncOutboxSession.sync_session_class is OutboxSession


def test_scoped_sessions_and_classes_are_traced(engine: Engine, recorded: Recorded) -> None:
    """With all that are derived from them, and no others."""
    jobs = registry(recorded)

    class Own(OutboxSession):
        pass

    class Derived(Own):
        pass

    instrument(Own, **recorded.given)  # type: ignore[arg-type]
    add(sessionmaker(engine, class_=Derived), jobs, "send")
    add(sessionmaker(engine, class_=OutboxSession), jobs, "send")
    assert len(recorded.spans("send")) == 1
    scoped = scoped_session(sessionmaker(engine))
    instrument(scoped, **recorded.given)  # type: ignore[arg-type]
    add_job(scoped, kind(jobs, "send"))  # type: ignore[arg-type]
    scoped.commit()
    scoped.remove()
    assert len(recorded.spans("send")) == 2


def test_what_cannot_be_instrumented_is_refused(recorded: Recorded) -> None:
    """With what is asked for."""
    with pytest.raises(ArgumentError, match="a sessionmaker or a class of sessions, got Session"):
        instrument(Session())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="relation takes 'link' or 'parent', got 'child'"):
        instrument_jobs(Jobs(), relation="child")  # type: ignore[arg-type]


IMPORTS_NOTHING = """
import sys
import outboxq, outboxq.__main__, outboxq.cli.app, outboxq.relay.relay, outboxq.inbox, outboxq.doctor, outboxq.testing
from outboxq.cli.relay import *
found = [name for name in sys.modules if name.startswith(("opentelemetry", "outboxq.observability.otel"))]
assert not found, found
sys.modules["opentelemetry"] = None
try:
    import outboxq.observability.otel
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.large
def test_nothing_imports_it_and_without_the_extra_it_says_what_to_install() -> None:
    """The package, its commands and its relay work without OpenTelemetry."""
    run = subprocess.run([sys.executable, "-c", IMPORTS_NOTHING], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "pip install 'outboxq[otel]'" in run.stdout
