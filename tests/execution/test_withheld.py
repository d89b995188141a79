"""`messages="withheld"`: no text of an error is stored or told, whatever a handler made of its arguments."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import sessionmaker

from outboxq import (
    AsyncContext,
    Backoff,
    BatchContext,
    BatchItem,
    CallRefused,
    Context,
    DeadLetter,
    Discard,
    Jobs,
    OutboxSession,
    PermanentError,
    Retry,
)
from outboxq.errors import RegistryError
from outboxq.events import Event
from outboxq.observability.logging import log_event
from outboxq.tables import dead_job, job

Drain = Callable[..., list[Event]]
Act = Callable[[Any, str], Any]

SECRET = "canary-4f1d88-and-the-rest-of-it"
# What redaction cannot know: it looks for the values of arguments as they are.
SLICE = SECRET[:13]
ONE_RETRY = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)


def raises(_: Any, secret: str) -> None:
    raise ValueError(f"refused {secret[:13]}")


def chains(_: Any, secret: str) -> None:
    try:
        raise KeyError(secret[:13])
    except KeyError as error:
        raise RuntimeError(f"behind {secret[:13]}") from error


def raises_a_group(_: Any, secret: str) -> None:
    raise ExceptionGroup(f"all of {secret[:13]}", [ValueError(secret[:13])])


def raises_for_good(_: Any, secret: str) -> None:
    raise PermanentError(f"never {secret[:13]}")


def exits(_: Any, secret: str) -> None:
    raise SystemExit(f"out {secret[:13]}")


def fails_in_sql(ctx: Any, secret: str) -> None:
    ctx.session.execute(text(f'SELECT * FROM "{secret[:13]}"'))


def fails_at_commit(ctx: Any, secret: str) -> None:
    ctx.session.execute(text(f'CREATE TABLE "{secret[:13]}" (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)'))
    ctx.session.execute(text(f'INSERT INTO "{secret[:13]}" VALUES (1), (1)'))


def commits_by_itself(ctx: Any, secret: str) -> None:
    ctx.session.connection().connection.driver_connection.execute("COMMIT")
    raise ValueError(secret[:13])


def refused_by_the_other_side(ctx: Any, secret: str) -> None:
    def call(_: str) -> None:
        raise CallRefused(f"no such {secret[:13]}")

    ctx.once("withheld", key=f"of-{secret[:13]}", call=call)


def asks_for_a_retry(_: Any, secret: str) -> Retry:
    return Retry(reason=f"busy {secret[:13]}")


def gives_up(_: Any, secret: str) -> DeadLetter:
    return DeadLetter(f"useless {secret[:13]}")


def discards(_: Any, secret: str) -> Discard:
    return Discard(f"useless {secret[:13]}")


WAYS = (
    raises, chains, raises_a_group, raises_for_good, exits, fails_in_sql, fails_at_commit, commits_by_itself,
    refused_by_the_other_side, asks_for_a_retry, gives_up, discards,
)  # fmt: skip


@pytest.fixture
def told(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, caplog: pytest.LogCaptureFixture
) -> Callable[..., str]:
    """Runs a job of this handler to its end; all that is stored, emitted and logged of it, but for its arguments."""

    def run(made: tuple[Jobs, Any], **settings: Any) -> str:
        jobs, kind = made
        with sessions.begin() as session, caplog.at_level(logging.DEBUG, "outboxq"):
            session.add_job(kind, secret=SECRET)
        events = drain(jobs, **settings)
        with caplog.at_level(logging.DEBUG, "outboxq"):
            for event in events:
                log_event(event)
        with engine.connect() as connection:
            rows = [
                *connection.execute(select(dead_job.c.reason, dead_job.c.errors, dead_job.c.headers)),
                *connection.execute(select(job.c.errors, job.c.headers)),
            ]
        records = [str(vars(record)) for record in caplog.records]
        return "\n".join(map(str, (*rows, *events, *records, caplog.text)))

    return run


def one(act: Act, **options: Any) -> tuple[Jobs, Any]:
    jobs = Jobs()

    @jobs.handler(kind="act", retry=ONE_RETRY, **options)
    def handle(ctx: Context, secret: str) -> Any:
        return act(ctx, secret)

    return jobs, handle


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("claim", "act"),
    [
        *(("transaction", act) for act in WAYS),
        *(("lease", act) for act in (raises, asks_for_a_retry, gives_up, discards)),
    ],
)
def test_no_text_of_a_failure_is_kept_or_told(claim: str, act: Act, told: Callable[..., str]) -> None:
    """Jobs' errors, dead letters, events and logs have no part of the message, whatever way the handler fails."""
    said = told(one(act, claim=claim, messages="withheld"))
    assert SLICE not in said
    assert "message withheld" in said


def asynchronous(**options: Any) -> tuple[Jobs, Any]:
    jobs = Jobs()

    @jobs.handler(kind="act", retry=ONE_RETRY, **options)
    async def handle(ctx: AsyncContext, secret: str) -> None:
        raises(ctx, secret)

    return jobs, handle


def in_batches(act: Act) -> Callable[..., tuple[Jobs, Any]]:
    def make(**options: Any) -> tuple[Jobs, Any]:
        jobs = Jobs()

        @dataclass
        class Item:
            secret: str

        @jobs.batch_handler(Item, kind="act", retry=ONE_RETRY, **options)
        def handle(ctx: BatchContext, items: Sequence[BatchItem[Item]]) -> Any:
            return [act(ctx, item.args.secret) for item in items]

        return jobs, handle

    return make


def shared(**options: Any) -> tuple[Jobs, Any]:
    return one(raises, batchable=True, **options)


@pytest.mark.first_and_last
@pytest.mark.parametrize("make", [asynchronous, in_batches(raises), in_batches(gives_up), shared])
def test_other_sorts_of_handlers_withhold_too(make: Callable[..., tuple[Jobs, Any]], told: Callable[..., str]) -> None:
    """Coroutines, batch handlers and shared batches are no way around it."""
    said = told(make(messages="withheld"), batch_size=5)
    assert SLICE not in said
    assert "message withheld" in said


def test_a_slice_is_seen_where_it_is_not_withheld(told: Callable[..., str]) -> None:
    """The canary is one: redaction leaves it, in the row, in the events and in the log."""
    assert told(one(raises)).count(SLICE) > 3


def test_type_place_and_sqlstate_stay(told: Callable[..., str]) -> None:
    """What finds the fault is there: the type, the line, and of a database error the SQLSTATE."""
    said = told(one(fails_in_sql, messages="withheld"))
    assert "psycopg.errors.UndefinedTable" in said
    assert "message withheld (SQLSTATE 42P01)" in said
    assert "test_withheld.py" in said


def test_a_registry_withholds_for_its_handlers(told: Callable[..., str]) -> None:
    """`Jobs(messages=...)` is for all handlers that do not say it themselves, wherever they are included."""
    inner, jobs = Jobs(messages="withheld"), Jobs()

    @inner.handler(retry=ONE_RETRY)
    def quiet(ctx: Context, secret: str) -> None:
        raises(ctx, secret)

    jobs.include(inner)
    assert SLICE not in told((jobs, quiet))


def test_a_handler_may_differ_from_its_registry(told: Callable[..., str]) -> None:
    """Of a text that is redacted the whole value is taken out, and a slice of it is not."""
    jobs = Jobs(messages="withheld")

    @jobs.handler(retry=ONE_RETRY, messages="redacted")
    def loud(ctx: Context, secret: str) -> None:
        raise ValueError(f"{secret} begins with {secret[:13]}")

    assert "<secret> begins with canary" in told((jobs, loud))


def test_there_are_two_sorts_of_messages() -> None:
    """A misspelt option is refused when the handler is registered."""

    def nothing(ctx: Context) -> None: ...

    with pytest.raises(RegistryError, match="'redacted' or 'withheld'"):
        Jobs(messages="hidden")
    with pytest.raises(RegistryError, match="'redacted' or 'withheld'"):
        Jobs().handler(messages="none")(nothing)
