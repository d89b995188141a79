"""A handler that rolls its session's transaction back has failed, by whatever method, and if it sent nothing too."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select
from sqlalchemy.orm import Session, sessionmaker

from outboxq import Backoff, BatchContext, BatchItem, Context, Jobs, OutboxSession
from outboxq.events import Event, JobDied
from tests.support.app import Account, Effect
from tests.support.ledger import ledger, of
from tests.support.matrices import diagonal

Drain = Callable[..., list[Event]]
ONCE = Backoff(max_attempts=1)


def _begin_in_vain(session: Session) -> None:
    session.commit()
    try:
        with session.begin():
            session.add(Effect(name="lost"))
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


WAYS: dict[str, Callable[[Any], object]] = {
    "session": lambda session: session.rollback(),
    "transaction": lambda session: session.get_transaction().rollback(),
    "class": lambda session: Session.rollback(session),
    "begin": _begin_in_vain,
    "behind-commit": lambda session: (session.commit(), session.add(Effect(name="lost")), session.rollback()),
}
SETTINGS: dict[str, dict[str, object]] = {"alone": {}, "shared": {"batchable": True}, "lease": {"claim": "lease"}}


@dataclass
class Named:
    name: str


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize("way", WAYS),
    pytest.mark.parametrize("setting", [*SETTINGS, "batch"]),
)
def test_a_session_that_was_rolled_back_fails_its_job_although_nothing_was_sent(
    way: str, setting: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Its row was dropped by the rollback, and no savepoint says so: it would be done without it."""
    jobs = Jobs()

    def act(session: OutboxSession, name: str) -> None:
        session.add(Effect(name=name))
        if name == "bad":
            WAYS[way](session)
            session.add(Effect(name="behind"))

    if setting == "batch":

        @jobs.batch_handler(Named, queue="q", retry=ONCE)
        def work(ctx: BatchContext, items: list[BatchItem[Named]]) -> None:
            for item in items:
                act(ctx.session, item.args.name)
    else:

        @jobs.handler(queue="q", retry=ONCE, **SETTINGS[setting])  # type: ignore[arg-type]
        def work(ctx: Context, name: str) -> None:
            act(ctx.session, name)

    with sessions.begin() as session:
        session.add_jobs(work.job(name=name) for name in ("a", "bad", "c"))
    died = of(drain(jobs, batch_size=10), JobDied)
    assert [event.error_type for event in died] == ["outboxq.errors.HandlerRolledBack"]
    assert ledger(engine) == {"a": 1, "c": 1}


@pytest.mark.parametrize("batch_size", [1, 10])
def test_a_session_that_was_given_rows_has_begun_on_the_connection(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """As after the SELECT that loads them for a job alone, also if they were loaded ahead: it begins no second time."""
    jobs, begun = Jobs(), []

    @jobs.handler(queue="q", batchable=True)
    def work(ctx: Context, account: Account) -> None:
        event.listen(ctx.session, "after_begin", lambda *_: begun.append(account.id))
        ctx.session.scalar(select(func.count()))

    with sessions.begin() as session:
        accounts = [Account(id=number) for number in (1, 2, 3)]
        session.add_all(accounts)
        session.flush()
        session.add_jobs(work.job(account=account) for account in accounts)
    drain(jobs, batch_size=batch_size)
    assert begun == []
