"""Hooks are told the exception of a failed attempt, and nothing of it outlives them."""

import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from sqlalchemy import text
from sqlalchemy.orm import sessionmaker

from outboxq import (
    AsyncContext,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    Jobs,
    OutboxSession,
    PermanentError,
    Relay,
    RelayConfig,
)
from outboxq.events import Event, JobDied, JobRetried
from outboxq.execution.find_outcome import COMMITTED_BY_HANDLER
from outboxq.observability.logging import log_event
from outboxq.postgres import Database
from tests.support.limits import many_at_once

TWICE = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)


@dataclass(frozen=True)
class Frozen(Exception):
    """Refuses to be changed."""

    text: str


class Held:
    """What a handler has in a variable."""


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.first_and_last
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("flavour", ["sync", "async", "deadlock", "frozen"])
def test_what_a_failed_handler_held_goes_with_its_hooks(
    flavour: str, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Its variables, files and sessions do not wait for the garbage collector; hooks see the whole traceback."""
    jobs, held, seen = Jobs(), [], []

    def fail(ctx: Context | AsyncContext) -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    @jobs.handler(queue="q", retry=TWICE)
    def sync(ctx: Context) -> None:
        fail(ctx)

    @jobs.handler(queue="aq", kind="async", retry=TWICE)
    async def asynchronous(ctx: AsyncContext) -> None:
        fail(ctx)

    @jobs.handler(queue="q", retry=TWICE)
    def deadlock(ctx: Context) -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        ctx.session.execute(text("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40P01'; END $$"))

    @jobs.handler(queue="q", retry=TWICE)
    def frozen(ctx: Context) -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        try:
            raise Frozen("first")
        except Frozen as error:
            raise Frozen("second") from error

    def look(event: Event) -> None:
        if isinstance(event, JobRetried | JobDied):
            assert event.exception is not None
            assert event.exception.__traceback__ is not None
            seen.append(held[-1]() is not None)

    with sessions.begin() as session:
        session.add_job({"sync": sync, "async": asynchronous, "deadlock": deadlock, "frozen": frozen}[flavour])
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=(log_event, look)).drain()
    assert seen == [True, True]
    assert [each() for each in held] == [None] * len(held)


def test_hooks_are_told_the_error_and_its_redacted_text(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Of a retry and of a death: the exception itself, its type, and its message as it is stored."""
    jobs, told = Jobs(), []

    @jobs.handler(queue="q", retry=TWICE)
    def fail(ctx: Context, card: str) -> None:
        raise ValueError(f"card {card}")

    @jobs.handler(queue="q")
    def give_up(ctx: Context, card: str) -> None:
        raise PermanentError(f"card {card}")

    with sessions.begin() as session:
        session.add_job(fail, card="4111-1111")
        session.add_job(give_up, card="4111-1111")
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=(told.append,)).drain()
    failures = [event for event in told if isinstance(event, JobRetried | JobDied)]
    assert [(event.job.kind, type(event).__name__) for event in failures] == [
        ("fail", "JobRetried"),
        ("give_up", "JobDied"),
        ("fail", "JobDied"),
    ]
    for event in failures:
        assert str(event.exception) == "card 4111-1111"
        assert event.message == "card <card>"
        assert event.error_type.endswith(type(event.exception).__name__)
        assert event.record is not None
        assert "card <card>" in event.record.traceback()
        assert "4111-1111" not in repr(event)
    assert failures[1].reason == "another attempt cannot help: outboxq.errors.PermanentError: card <card>"


@pytest.mark.first_and_last
@pytest.mark.parametrize("messages", ["redacted", "withheld", "whole"])
def test_the_text_of_an_error_is_kept_as_the_handler_says(
    messages: str, sessions: sessionmaker[OutboxSession], outboxq_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """In the row, in the log and in the event alike; whole also what PostgreSQL's DETAIL quotes."""
    jobs, told = Jobs(messages=messages), []  # type: ignore[arg-type]  # one of the three

    @jobs.handler(queue="q", retry=Backoff(max_attempts=1))
    def pay(ctx: Context, card: str) -> None:
        ctx.session.execute(text("CREATE TEMPORARY TABLE paid (card text UNIQUE) ON COMMIT DROP"))
        try:
            ctx.session.execute(text("INSERT INTO paid VALUES (:card), (:card)"), {"card": card})
        except Exception as error:
            error.add_note(f"with {card}")
            raise

    with sessions.begin() as session:
        session.add_job(pay, card="4111-1111")
    with caplog.at_level(logging.WARNING, "outboxq"):
        Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=(log_event, told.append)).drain()
    (event,) = [event for event in told if isinstance(event, JobDied)]
    assert event.record is not None
    for kept in (event.record.as_json() + event.message, logging.Formatter().format(caplog.records[-1])):
        assert ("Key (card)=(4111-1111) already exists" in kept) == (messages == "whole")
        assert ("4111-1111" in kept) == (messages == "whole")
        assert ("message withheld (SQLSTATE 23505)" in kept) == (messages == "withheld")
        assert "in pay" in kept


def test_tracebacks_can_be_left_out_of_the_log(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each attempt, with the line that tells of it; or with the switch not at all."""
    jobs = Jobs()

    @jobs.handler(queue="q", retry=TWICE)
    def fail(ctx: Context) -> None:
        raise ValueError("no")

    def logged(*hooks: object) -> list[str]:
        caplog.clear()
        with sessions.begin() as session:
            session.add_job(fail)
        with caplog.at_level(logging.WARNING, "outboxq"):
            Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=hooks).drain()  # type: ignore[arg-type]
        return [logging.Formatter().format(record) for record in caplog.records]

    lines = logged(log_event)
    assert [line.count("Traceback (most recent call last):") for line in lines] == [1, 1]
    assert all("error_type=ValueError message=no" in line for line in lines)
    lines = logged(lambda event: log_event(event, tracebacks=False))
    assert [line.count("Traceback") for line in lines] == [0, 0]
    assert all("error_type=ValueError message=no" in line for line in lines)


@dataclass
class Charge:
    card: str


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("kind", ["together", "shared"])
def test_what_handlers_held_that_failed_together_goes_when_each_job_runs_alone(
    kind: str, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """No hook hears of the error of their one call: the error of the job that is to blame shows when it runs alone."""
    jobs, failed, left = Jobs(), [], []

    def work(cards: Sequence[str]) -> None:
        mine = Held()
        # What the call of all of them held.
        left.extend(each() is not None for each in failed[:1])
        if "bad" in cards:
            failed.append(weakref.ref(mine))
            raise ValueError("no")

    @jobs.batch_handler(Charge, queue="q", retry=Backoff(max_attempts=1))
    def together(ctx: BatchContext, items: Sequence[BatchItem[Charge]]) -> None:
        work([item.args.card for item in items])

    @jobs.handler(queue="shared", batchable=True, retry=Backoff(max_attempts=1))
    def shared(ctx: Context, card: str) -> None:
        work([card])

    with sessions.begin() as session:
        for card in ("good", "bad", "good"):
            session.add_job({"together": together, "shared": shared}[kind], card=card)
    config = many_at_once(jobs, RelayConfig(slots_per_queue=1, batch_size=10))
    Relay(outboxq_database.url, jobs, config).drain()
    assert left == [False, False, False]


def test_hooks_are_told_the_error_of_a_handler_that_committed_by_itself(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Its job becomes a dead letter because rows of it stand; what it raised is told with that."""
    jobs, told = Jobs(), []

    @jobs.handler(queue="q")
    def commit(ctx: Context, card: str) -> None:
        ctx.session.connection().connection.driver_connection.execute("COMMIT")  # type: ignore[union-attr]
        ctx.session.execute(text("SELECT 1"))
        raise ValueError(f"card {card}")

    with sessions.begin() as session:
        session.add_job(commit, card="4111-1111")
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=(told.append,)).drain()
    (event,) = [event for event in told if isinstance(event, JobDied)]
    assert event.reason == COMMITTED_BY_HANDLER
    assert event.record is not None
    assert event.error_type == event.record.type != ""
    assert event.exception is not None
    assert "4111-1111" not in event.message
