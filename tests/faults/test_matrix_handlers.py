"""Handlers that break their transaction, under a lease and as suspects: contained as they are in transaction mode."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import Backoff, Jobs, OutboxSession
from outboxq.events import Event
from outboxq.execution.find_outcome import COMMITTED_BY_HANDLER
from tests.support import app
from tests.support.aftermath import assert_nothing_left
from tests.support.app import Account, Child
from tests.support.ledger import ledger

Drain = Callable[..., list[Event]]
each_mode = pytest.mark.parametrize("mode", ["lease", "suspects"])


def registry(mode: str) -> Jobs:
    """The application's handlers, claimed in this mode."""
    jobs = Jobs()
    claim = "lease" if mode == "lease" else "transaction"
    for handler, retry in ((app.misbehave, Backoff(max_attempts=1)), (app.orphan, app.QUICK), (app.record, app.QUICK)):
        jobs.handler(queue="contained", claim=claim, retry=retry)(handler.function)
    return jobs


def enqueue(
    sessions: sessionmaker[OutboxSession], jobs: Jobs, mode: str, *given: tuple[str, dict[str, object]]
) -> None:
    found = jobs.resolve()
    with sessions.begin() as session:
        for kind, arguments in given:
            session.add_job(found.find(kind), **arguments)
        session.flush()
        if mode == "suspects":
            session.execute(text("UPDATE outboxq.job SET state = 'suspect'"))


def dead_letter(engine: Engine) -> tuple[object, ...]:
    with engine.connect() as connection:
        (row,) = connection.execute(text("SELECT kind, attempt, crashes, reason FROM outboxq.dead_job"))
    return tuple(row)


BEFORE, AFTER = ("record", {"name": "before"}), ("record", {"name": "after"})


@pytest.mark.first_and_last
@each_mode
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("commit-then-raise", "ValueError"),
        ("rollback", "HandlerRolledBack"),
        ("rollback-and-go-on", "TransactionVerbRefused"),
        ("raw-commit", "TransactionVerbRefused"),
        ("raw-rollback", "TransactionVerbRefused"),
        ("driver-rollback", "TransactionEndedByHandler"),
        ("swallow", "HandlerError"),
        ("swallow-integrity-error", "HandlerRolledBack"),
        ("exit", "SystemExit"),
    ],
)
def test_a_handler_that_breaks_its_transaction_fails_and_leaves_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, mode: str, how: str, error: str
) -> None:
    """An attempt is counted and no crash, none of its rows stand, and its neighbours are done once."""
    jobs = registry(mode)
    enqueue(sessions, jobs, mode, BEFORE, ("misbehave", {"how": how}), AFTER)
    drain(jobs, slots_per_queue=1)
    assert ledger(engine) == {"before": 1, "after": 1}
    kind, attempt, crashes, reason = dead_letter(engine)
    assert (kind, attempt, crashes) == ("misbehave", 1, 0)
    assert str(reason).endswith(error)
    assert_nothing_left(engine, dead_letters=1)


@pytest.mark.first_and_last
@each_mode
@pytest.mark.parametrize("how", ["commit", "open-savepoint"])
def test_a_handler_that_commits_or_leaves_a_savepoint_open_is_done_once(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, mode: str, how: str
) -> None:
    """Its own commit() commits nothing, and its rows commit with the job."""
    jobs = registry(mode)
    enqueue(sessions, jobs, mode, BEFORE, ("misbehave", {"how": how}), AFTER)
    drain(jobs, slots_per_queue=1)
    assert ledger(engine) == {"before": 1, how: 2 if how == "open-savepoint" else 1, "after": 1}
    assert_nothing_left(engine)


@pytest.mark.first_and_last
@each_mode
@pytest.mark.parametrize(
    "how",
    [
        "driver-commit",
        "driver-commit-and-go-on",
        "driver-forges-savepoint",
        "driver-forges-savepoint-and-raises",
        "savepoint-open-then-driver-commit-and-raise",
    ],
)
def test_a_commit_on_the_drivers_own_connection_is_detected_and_never_run_again(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, mode: str, how: str
) -> None:
    """What it committed stands once, and the job, which still has its row, is dead."""
    jobs = registry(mode)
    enqueue(sessions, jobs, mode, BEFORE, ("misbehave", {"how": how}), AFTER)
    drain(jobs, slots_per_queue=1)
    assert ledger(engine) == {"before": 1, how: 1, "after": 1}
    assert dead_letter(engine) == ("misbehave", 1, 0, COMMITTED_BY_HANDLER)
    assert_nothing_left(engine, dead_letters=1)


@each_mode
def test_a_deferred_constraint_that_fails_at_commit_counts_its_attempts(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, mode: str
) -> None:
    """The removal of the job is undone with the rows, and the attempt recorded, until it gives up."""
    with sessions.begin() as session:
        session.add(Account(id=1))
    jobs = registry(mode)
    enqueue(sessions, jobs, mode, ("orphan", {"parent_id": 1}), ("orphan", {"parent_id": 999}), AFTER)
    drain(jobs, slots_per_queue=1)
    with Session(engine) as session:
        assert session.scalars(select(Child.parent_id)).all() == [1]
    assert ledger(engine) == {"after": 1}
    assert dead_letter(engine) == ("orphan", 3, 0, "gave up after 3 of 3 attempts: psycopg.errors.ForeignKeyViolation")
    assert_nothing_left(engine, dead_letters=1)
