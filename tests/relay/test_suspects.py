"""Suspects: a job whose claim died runs alone, and one that kills its relay time after time is found out."""

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Jobs, OutboxSession, Relay, RelayConfig
from outboxq.events import Event, JobDone, JobsSuspected
from outboxq.postgres import Database
from tests.support import app
from tests.support.driver_waits import driver_waits
from tests.support.limits import FOLLOW_ON, with_limits
from tests.support.slots import claim_ready

Drain = Callable[..., list[Event]]


def enqueue(sessions: sessionmaker[OutboxSession], count: int) -> None:
    with sessions.begin() as session:
        session.add_jobs(app.record.job(name=f"job {number}") for number in range(count))


def states(engine: Engine) -> list[tuple[object, ...]]:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT state, attempt, crashes FROM outboxq.job ORDER BY seq"))
        return [tuple(row) for row in found]


def look(connection: Connection) -> tuple[int, int]:
    """What a claim of everything would run, and what it would set aside; undone without a trace."""
    with connection.begin() as transaction:
        claimed = claim_ready(connection, "ledger", 100)
        transaction.rollback()
        return len(claimed.jobs), claimed.moved


def do(connection: Connection, statement: str, *, commit: bool) -> None:
    with connection.begin() as transaction:
        connection.execute(text(statement))
        if not commit:
            transaction.rollback()


UNTOUCHED, MARKED = (1, 0), (0, 1)


@pytest.mark.parametrize(
    ("statement", "commit", "expected"),
    [
        ("DELETE FROM outboxq.job", False, MARKED),
        ("UPDATE outboxq.job SET priority = 0", True, UNTOUCHED),
        ("SELECT id FROM outboxq.job FOR UPDATE", True, UNTOUCHED),
        ("SELECT id FROM outboxq.job FOR KEY SHARE", True, UNTOUCHED),
        # A hint, never a count: these are told apart where the job runs alone.
        ("SELECT id FROM outboxq.job FOR UPDATE", False, MARKED),
        ("SELECT id FROM outboxq.job FOR KEY SHARE", False, MARKED),
    ],
)
def test_only_an_aborted_transaction_leaves_a_mark(
    engine: Engine, sessions: sessionmaker[OutboxSession], statement: str, commit: bool, expected: tuple[int, int]
) -> None:
    """A committed update, a committed lock and a fresh row read false."""
    enqueue(sessions, 1)
    with engine.connect() as connection:
        do(connection, statement, commit=commit)
        assert look(connection) == expected


def test_a_lock_that_two_hold_is_no_mark(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """A multixact is no transaction: its number says nothing, and never raises."""
    enqueue(sessions, 1)
    with engine.connect() as one, engine.connect() as other, engine.connect() as connection:
        with one.begin(), other.begin():
            one.execute(text("SELECT id FROM outboxq.job FOR KEY SHARE"))
            other.execute(text("SELECT id FROM outboxq.job FOR KEY SHARE"))
        assert look(connection) == UNTOUCHED


@pytest.mark.first_and_last
@pytest.mark.parametrize("lock", ["FOR UPDATE", "FOR KEY SHARE"])
@pytest.mark.parametrize("commit", [True, False])
def test_foreign_locks_charge_no_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, lock: str, commit: bool
) -> None:
    """Rolled back or not: every job is done at its first attempt, and no crash is counted."""
    enqueue(sessions, 5)
    with engine.connect() as connection:
        do(connection, f"SELECT id FROM outboxq.job {lock}", commit=commit)
    events = drain(batch_size=3)
    done = [event.job for event in events if isinstance(event, JobDone)]
    assert [(job.attempt, job.crashes) for job in done] == [(1, 0)] * 5
    assert sum(event.count for event in events if isinstance(event, JobsSuspected)) == (0 if commit else 5)


def test_a_batch_whose_claim_died_runs_alone_once_and_uncharged(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Its jobs are set aside by the next claim and done one by one; what came later runs as usual."""
    enqueue(sessions, 4)
    with engine.connect() as connection:
        transaction = connection.begin()
        claim_ready(connection, "ledger", 3)
        transaction.rollback()
    events = drain(batch_size=10)
    done = [event.job for event in events if isinstance(event, JobDone)]
    assert [(job.attempt, job.crashes) for job in done if job.lease_token] == [(1, 0)] * 3
    assert [job.attempt for job in done if job.lease_token is None] == [1]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM effect_ledger")).scalar_one() == 4


def test_a_suspect_that_fails_in_order_is_charged_an_attempt_and_no_crash(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The crash that was counted with the claim did not happen."""
    with sessions.begin() as session:
        session.add_job(app.fail, name="x")
    with engine.connect() as connection:
        do(connection, "DELETE FROM outboxq.job", commit=False)
    drain()
    with engine.connect() as connection:
        row = connection.execute(text("SELECT attempt, crashes FROM outboxq.dead_job")).one()
    assert tuple(row) == (3, 0)


def test_a_rollback_on_purpose_leaves_no_mark(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A relay that undoes a batch itself says so in the rows: the others of the batch are no suspects."""
    jobs = Jobs()
    jobs.add(app.record)

    @jobs.handler(queue="ledger")
    def end_transaction(ctx: app.Context) -> None:
        ctx.session.connection().connection.rollback()

    with sessions.begin() as session:
        session.add_job(app.record, name="before")
        session.add_job(end_transaction.options(max_attempts=1))
        session.add_job(app.record, name="behind")
    events = drain(jobs, batch_size=3, slots_per_queue=1)
    assert not [event for event in events if isinstance(event, JobsSuspected)]
    assert len([event for event in events if isinstance(event, JobDone)]) == 2


def test_accounting_for_crashes_costs_the_happy_path_no_statement(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """Per job in transaction mode: the handler's own, and one for all the rest; no row of a lease is written."""
    counts = {}
    for jobs in (50, 150):
        enqueue(sessions, jobs)
        counts[jobs] = statements_of_a_drain(outboxq_database.url)
    # INSERT; the commit script, BEGIN, the next claim and its savepoints. What a drain costs beside its jobs cancels
    # out.
    assert round((counts[150] - counts[50]) / 100) == 2
    with engine.connect() as connection:
        assert (
            connection.execute(text("SELECT n_tup_ins FROM pg_stat_all_tables WHERE relname = 'relay'")).scalar() == 0
        )


def statements_of_a_drain(url: str) -> int:
    """How many queries a relay sends on its slot's connection while it drains the queue, by the driver's own count."""
    with driver_waits() as waits:
        with_limits(Relay(url, app.jobs, RelayConfig(slots_per_queue=1), hooks=()), FOLLOW_ON).drain()
    return len(waits)
