"""No exception, whatever its class does, ends the relay or keeps its job from being settled."""

from collections.abc import Callable
from typing import NoReturn

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.events import JobDied
from outboxq.postgres import Database
from outboxq.tables import dead_job

ONCE = Backoff(max_attempts=1)


class Untraced(Exception):
    @property
    def __traceback__(self) -> NoReturn:  # type: ignore[override]
        raise SystemExit


class Lying(Exception):
    __class__ = property(lambda _: DBAPIError)  # type: ignore[assignment]


class Classless(Exception):
    @property
    def __class__(self) -> NoReturn:  # type: ignore[override]
        raise SystemExit


class Refusing(BaseException):
    def __getattribute__(self, name: str) -> NoReturn:
        raise SystemExit

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise SystemExit

    def __str__(self) -> NoReturn:
        raise SystemExit


@pytest.mark.first_and_last
@pytest.mark.parametrize("make", [Untraced, Lying, Classless, Refusing])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_job_whose_error_cannot_be_looked_at_fails_like_any(
    make: Callable[[], BaseException],
    is_async: bool,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    engine: Engine,
) -> None:
    """It is a dead letter with its error's type and place, and the job behind it runs."""
    jobs, told, done = Jobs(), [], []

    @jobs.handler(queue="q", retry=ONCE)
    def fail(ctx: Context) -> None:
        raise make()

    @jobs.handler(queue="aq", retry=ONCE)
    async def fail_later(ctx: AsyncContext) -> None:
        raise make()

    @jobs.handler(queue="q")
    def succeed(ctx: Context) -> None:
        done.append(True)

    with sessions.begin() as session:
        session.add_job(fail_later if is_async else fail)
        session.add_job(succeed)
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=(told.append,)).drain()
    with engine.connect() as connection:
        (errors,) = connection.execute(select(dead_job.c.errors)).scalars()
    assert f"{type(make()).__name__}" in errors
    assert "in fail" in errors
    assert done == [True]
    assert [event.job.kind for event in told if isinstance(event, JobDied)] == [
        fail_later.kind if is_async else fail.kind
    ]
