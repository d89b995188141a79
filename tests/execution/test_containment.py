"""What a handler does stays inside its own savepoint: all of its rows commit with its job, or none."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from psycopg.rows import dict_row
from psycopg.types.string import StrDumper
from sqlalchemy import Connection, Engine, event, select, text
from sqlalchemy.exc import InvalidRequestError, SAWarning
from sqlalchemy.orm import Session, sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, external
from outboxq.database.driver import run_script
from outboxq.events import Event, JobDied, JobDiscarded, JobDone, JobRetried, JobSnoozed, JobsParked
from outboxq.execution.batch_state import BatchState
from outboxq.execution.find_outcome import COMMITTED_BY_HANDLER, find_outcome
from outboxq.statements.lease import reap
from outboxq.statements.server import server_epoch
from tests.support import app
from tests.support.app import Account, Child, Effect
from tests.support.ledger import dead_reasons, ledger, rows
from tests.support.limits import FOLLOW_ON
from tests.support.matrices import diagonal
from tests.support.slots import claim_batch

BATCH_SIZES = pytest.mark.parametrize("batch_size", [1, 10])
Drain = Callable[..., list[Event]]


def waiting(engine: Engine) -> list[tuple[object, ...]]:
    return rows(engine, "SELECT kind, state, attempt FROM outboxq.job")


@diagonal(
    pytest.mark.parametrize("how", ["commit", "open-savepoint"]),
    BATCH_SIZES,
)
def test_a_handler_that_commits_or_leaves_a_savepoint_open_is_done_once(
    how: str, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The handler's own commit() commits nothing, and its rows commit with the job."""
    with sessions.begin() as session:
        session.add_job(app.misbehave, how=how)
        session.add_job(app.record, name="neighbour")
    drain(batch_size=batch_size, slots_per_queue=1)
    assert ledger(engine) == {how: 2 if how == "open-savepoint" else 1, "neighbour": 1}
    assert waiting(engine) == []
    assert dead_reasons(engine) == []


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize(
        ("how", "error"),
        [
            ("commit-then-raise", "ValueError"),
            ("rollback", "HandlerRolledBack"),
            ("rollback-unsent", "HandlerRolledBack"),
            ("rollback-and-go-on", "TransactionVerbRefused"),
            ("rollback-and-write-around", "ValueError"),
            ("rollback-out-of-memory", "MemoryError"),
            ("raw-commit", "TransactionVerbRefused"),
            ("raw-rollback", "TransactionVerbRefused"),
            ("connection-commit", "TransactionVerbRefused"),
            ("savepoint-commit", "TransactionEndedByHandler"),
            ("savepoint-commit-and-raise", "TransactionEndedByHandler"),
            ("driver-rollback", "TransactionEndedByHandler"),
            ("swallow", "HandlerError"),
            ("swallow-integrity-error", "HandlerRolledBack"),
            ("raise-cancelled", "CancelledError"),
            ("raise-in-str", "BrokenError"),
            ("exit", "SystemExit"),
        ],
    ),
    BATCH_SIZES,
)
def test_a_handler_that_breaks_its_transaction_fails_and_leaves_nothing(
    how: str, error: str, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Counted as failed, none of its rows stand, and its neighbours in the batch are done exactly once."""
    with sessions.begin() as session:
        session.add_job(app.record, name="before")
        session.add_job(app.misbehave, how=how)
        session.add_job(app.record, name="after")
    drain(batch_size=batch_size, slots_per_queue=1)
    assert ledger(engine) == {"before": 1, "after": 1}
    assert waiting(engine) == []
    ((kind, reason),) = dead_reasons(engine)
    assert kind == "misbehave"
    assert reason.endswith(error)


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize(
        "how",
        [
            "driver-commit",
            "driver-commit-and-go-on",
            "driver-forges-savepoint",
            "driver-forges-savepoint-and-raises",
            "savepoint-open-then-driver-commit-and-raise",
        ],
    ),
    BATCH_SIZES,
)
def test_a_commit_on_the_drivers_own_connection_is_detected_and_never_run_again(
    how: str, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """What it committed stands once; the job is dead, and no other job of the batch is lost or doubled."""
    with sessions.begin() as session:
        session.add_job(app.record, name="before")
        session.add_job(app.misbehave, how=how)
        session.add_job(app.record, name="after")
    drain(batch_size=batch_size, slots_per_queue=1)
    assert ledger(engine) == {"before": 1, how: 1, "after": 1}
    assert dead_reasons(engine) == [("misbehave", COMMITTED_BY_HANDLER)]
    assert waiting(engine) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_job_that_cannot_run_beside_a_handlers_own_commit_is_parked_and_reported_once(
    is_first: bool, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Before the commit it is parked with it; after it the job is put back, and parked by the next claim."""
    unknown = external("of another release", queue="ledger")
    with sessions.begin() as session:
        session.add_jobs([unknown.job()] if is_first else [])
        session.add_job(app.misbehave, how="driver-commit")
        session.add_jobs([] if is_first else [unknown.job()])
    events = drain(batch_size=10, slots_per_queue=1)
    assert dead_reasons(engine) == [("misbehave", COMMITTED_BY_HANDLER)]
    assert [event.count for event in events if isinstance(event, JobsParked)] == [1]
    assert rows(engine, "SELECT parked FROM outboxq.job") == [(1,)]


@pytest.mark.relay_limits(FOLLOW_ON)
@BATCH_SIZES
def test_savepoints_that_handlers_leave_open_do_not_pile_up(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """While claims follow one another, SQLAlchemy's transaction is one; what it holds of each job goes with the job."""
    jobs, depths = Jobs(), []

    @jobs.handler(queue="careless")
    def careless(ctx: Context) -> None:
        connection = ctx.session.connection()
        connection.begin_nested()
        savepoint, depth = connection.get_nested_transaction(), 0
        while savepoint is not None:
            savepoint, depth = savepoint._previous_nested, depth + 1
        depths.append(depth)

    with sessions.begin() as session:
        session.add_jobs(careless.job() for _ in range(20))
    with pytest.warns(SAWarning, match="already deassociated"):
        drain(jobs, batch_size=batch_size, slots_per_queue=1)
    assert depths == [2] * 20


@BATCH_SIZES
def test_a_deferred_constraint_that_fails_at_commit_fails_only_its_own_job(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The commit script, or the check of a shared batch, sees what COMMIT would have refused; neighbours run once."""
    app.calls.clear()
    with sessions.begin() as session:
        session.add(Account(id=1))
        session.add_job(app.orphan, parent_id=1)
        session.add_job(app.orphan, parent_id=999)
        session.add_job(app.record, name="neighbour")
    drain(batch_size=batch_size, slots_per_queue=1)
    with Session(engine) as session:
        assert session.scalars(select(Child.parent_id)).all() == [1]
    assert ledger(engine) == {"neighbour": 1}
    assert app.calls == ["neighbour"]
    ((kind, reason),) = dead_reasons(engine)
    assert (kind, reason) == ("orphan", "gave up after 3 of 3 attempts: psycopg.errors.ForeignKeyViolation")


@BATCH_SIZES
def test_a_failed_attempt_leaves_no_rows_and_its_redacted_history(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Failures are retried up to the limit, then buried with every error; payload values are left out."""
    with sessions.begin() as session:
        session.add_job(app.fail, name="secret-name")
        session.add_job(app.record, name="neighbour")
    events = drain(batch_size=batch_size, slots_per_queue=1)
    assert ledger(engine) == {"neighbour": 1}
    with engine.connect() as connection:
        (row,) = connection.execute(text("SELECT attempt, reason, errors FROM outboxq.dead_job")).all()
    assert row.attempt == 3
    assert row.reason == "gave up after 3 of 3 attempts: ValueError"
    assert [error["attempt"] for error in row.errors] == [1, 2, 3]
    assert {error["message"] for error in row.errors} == {"no luck with <name>"}
    assert all("app.py" in error["where"][-1] and error["at"] for error in row.errors)
    assert "secret-name" not in repr(events)
    assert [type(event) for event in events if isinstance(event, JobRetried | JobDied)] == [
        JobRetried,
        JobRetried,
        JobDied,
    ]


@BATCH_SIZES
def test_returned_outcomes_settle_the_job_and_undo_its_rows(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Retry counts attempts, Snooze does not, DeadLetter gives up, Discard drops."""
    with sessions.begin() as session:
        for how in ("retry", "snooze", "dead", "discard", "done"):
            session.add_job(app.end, how=how)
    events = drain(batch_size=batch_size, slots_per_queue=1)
    assert ledger(engine) == {"end-done": 1}
    assert waiting(engine) == [("end", "scheduled", 0)]
    assert sorted(reason for _, reason in dead_reasons(engine)) == [
        "cannot be done",
        "gave up after 3 of 3 attempts: outboxq.Retry",
    ]
    counted = Counter(type(event) for event in events)
    assert (counted[JobDone], counted[JobSnoozed], counted[JobDiscarded]) == (1, 1, 1)


def test_arguments_that_do_not_fit_fail_the_attempt_of_that_job_alone(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A payload that another version, or another language, wrote is a failed attempt, never a stuck queue."""
    with engine.begin() as connection:
        for args in ('{"name": 7}', '{"unknown": 1, "name": "x"}', "{}", '{"name": 1e400}'):
            connection.execute(text("SELECT outboxq.add_job('record', CAST(:args AS jsonb), 'ledger')"), {"args": args})
    with sessions.begin() as session:
        session.add_job(app.record, name="good")
    drain(batch_size=10)
    assert ledger(engine) == {"good": 1}
    assert {reason for _, reason in dead_reasons(engine)} == {
        "gave up after 3 of 3 attempts: outboxq.errors.PayloadError"
    }
    assert len(dead_reasons(engine)) == 4


def test_an_entity_argument_is_loaded_in_the_handlers_session_or_fails_when_gone(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Stored as its key; a deleted row is a failed attempt that says so."""
    with sessions.begin() as session:
        kept, gone = Account(id=1, balance=5), Account(id=2)
        session.add_all([kept, gone])
        session.add_job(app.credit, account=kept, cents=10)
        session.add_job(app.credit, account=gone, cents=10)
        session.flush()
        session.delete(gone)
    drain()
    with Session(engine) as session:
        assert session.get_one(Account, 1).balance == 15
    assert dead_reasons(engine) == [("credit", "gave up after 3 of 3 attempts: outboxq.errors.EntityGone")]


def test_async_handlers_are_contained_alike(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The same batch code runs under the event loop."""
    with sessions.begin() as session:
        session.add_jobs(app.record_async.job(name=f"a{number}") for number in range(20))
    drain(batch_size=7, slots_per_queue=3)
    assert ledger(engine) == {f"a{number}": 1 for number in range(20)}


def test_an_argument_that_looks_like_a_time_and_is_none_can_be_recorded(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Whatever a payload does to the description of an error, the attempt is settled."""
    with sessions.begin() as session:
        session.add_job(app.fail, name="2023-02-30T10:00:00")
    drain()
    assert dead_reasons(engine) == [("fail", "gave up after 3 of 3 attempts: ValueError")]


@pytest.mark.first_and_last
@pytest.mark.parametrize("how", ["close", "invalidate", "driver-close"])
def test_a_handler_that_closes_its_connection_time_after_time_is_buried(
    how: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A connection may be lost for any reason; a job that loses it whenever it runs alone is not run for ever."""
    jobs = Jobs()

    @jobs.handler(queue="ledger", retry=Backoff(max_attempts=2, first_seconds=0))
    def hang_up(ctx: Context) -> None:
        ctx.session.add(Effect(name=how))
        ctx.session.flush()
        if how == "close":
            ctx.session.connection().close()
        elif how == "invalidate":
            ctx.session.invalidate()
        else:
            ctx.session.connection().connection.driver_connection.close()

    jobs.add(app.record)
    with sessions.begin() as session:
        session.add_job(hang_up)
        session.add_job(app.record, name="behind it")
    drain(jobs, slots_per_queue=1)
    assert ledger(engine) == {"behind it": 1}
    ((kind, reason),) = dead_reasons(engine)
    assert kind == "hang_up"
    # SQLAlchemy 2.0 rolls back on close(), which the guard sees; 2.1 does not.
    assert reason in (
        "crashed 3 of 3 times while it ran alone",
        "gave up after 2 of 2 attempts: outboxq.errors.TransactionVerbRefused",
    )


def test_a_connection_lost_after_a_handlers_own_commit_costs_no_other_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """What the relay still has in memory is put back on the next connection, and the culprit is dead."""
    jobs = Jobs()

    @jobs.handler(queue="ledger")
    def commit_and_hang_up(ctx: Context) -> None:
        ctx.session.add(Effect(name="committed"))
        ctx.session.flush()
        connection = ctx.session.connection().connection
        connection.commit()
        connection.driver_connection.close()

    jobs.add(app.record)
    with sessions.begin() as session:
        session.add_job(app.record, name="before")
        session.add_job(commit_and_hang_up)
        session.add_job(app.record, name="after")
    drain(jobs, slots_per_queue=1, batch_size=5)
    assert ledger(engine) == {"before": 1, "committed": 1, "after": 1}
    assert dead_reasons(engine) == [("commit_and_hang_up", COMMITTED_BY_HANDLER)]
    assert waiting(engine) == []


def test_a_second_death_of_the_same_id_does_not_hold_up_the_queue(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A producer that repeats an id after its job died gets one dead letter, the later one."""
    for _ in range(2):
        with engine.begin() as connection:
            connection.execute(
                text(
                    "SELECT outboxq.add_job('fail', '{\"name\": \"x\"}', 'ledger', "
                    "id => '00000000-0000-7000-8000-000000000001')"
                )
            )
        drain()
    with sessions.begin() as session:
        session.add_job(app.record, name="behind it")
    drain()
    assert ledger(engine) == {"behind it": 1}
    assert len(dead_reasons(engine)) == 1


@diagonal(
    pytest.mark.parametrize("other", ["queue = 'elsewhere'", "kind = 'another'"]),
    pytest.mark.parametrize("end", ["fails", "crashes"]),
)
def test_a_job_with_the_id_of_another_dead_letter_leaves_it_as_it_is(
    other: str, end: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Any producer may choose an id: what died in another queue, or of another kind, is not its own to overwrite."""
    with sessions.begin() as session:
        first = session.add_job(app.fail.options(max_attempts=1), name="first")
    drain()
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outboxq.dead_job SET {other}"))
        same_id = "SELECT outboxq.add_job('fail', '{\"name\": \"second\"}', 'ledger', max_attempts => 1, id => :id)"
        connection.execute(text(same_id), {"id": first.id})
        if end == "crashes":
            lost = "UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid(), crashes = 9"
            connection.execute(text(lost))
            assert run_script(connection, reap("outboxq", 3, 10))[0][-1] is True
    drain()
    with engine.connect() as connection:
        found = connection.execute(text("SELECT args ->> 'name', id = :id FROM outboxq.dead_job"), {"id": first.id})
        assert sorted(tuple(row) for row in found) == [("first", True), ("second", False)]
    assert waiting(engine) == []


def test_a_row_that_cannot_be_settled_is_put_off_and_its_queue_goes_on(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A last attempt whose dead letter is refused: whatever is wrong with that table, the jobs behind it run."""
    with sessions.begin() as session:
        session.add_job(app.fail.options(max_attempts=1), name="x")
        session.add_job(app.record, name="behind it")
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.dead_job ADD CONSTRAINT broken CHECK (false)"))
    drain(slots_per_queue=1)
    assert ledger(engine) == {"behind it": 1}
    assert waiting(engine) == [("fail", "scheduled", 0)]


def test_a_context_that_outlives_its_handler_opens_no_session(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A session that is opened late would write in the transaction of another job."""
    jobs, kept = Jobs(), []

    @jobs.handler(queue="ledger")
    def keep(ctx: Context) -> None:
        kept.append(ctx)

    @jobs.handler(queue="ledger")
    def use(ctx: Context) -> None:
        with pytest.raises(InvalidRequestError, match="is over"):
            kept[0].session.execute(text("SELECT 1"))

    with sessions.begin() as session:
        session.add_job(keep)
        session.add_job(use)
    drain(jobs, slots_per_queue=1)
    assert len(kept) == 1
    assert (waiting(engine), dead_reasons(engine)) == ([], [])


def test_a_session_that_outlives_its_handler_writes_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """It is closed for good: nothing leaks into the transaction of the next job."""
    jobs, kept = Jobs(), []

    @jobs.handler(queue="ledger")
    def keep(ctx: Context) -> None:
        kept.append(ctx.session)

    @jobs.handler(queue="ledger")
    def use(ctx: Context) -> None:
        with pytest.raises(InvalidRequestError, match="permanently closed"):
            kept[0].execute(text("SELECT 1"))

    with sessions.begin() as session:
        session.add_job(keep)
        session.add_job(use)
    drain(jobs, slots_per_queue=1)
    assert dead_reasons(engine) == []
    assert waiting(engine) == []


def test_a_recovery_whose_commit_was_not_answered_is_not_repeated(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The jobs that it put back may be done by then: putting them back once more would run them twice."""
    with sessions.begin() as session:
        session.add_jobs(app.record.job(name=name) for name in ("culprit", "behind it"))
    with engine.connect() as connection:
        with connection.begin():
            batch = claim_batch(connection, "ledger", 2, epoch=server_epoch(connection))
        first = find_outcome(connection, batch)
        drain()
        assert find_outcome(connection, batch) == first
    drain()
    assert ledger(engine) == {"behind it": 1}
    assert dead_reasons(engine) == [("record", COMMITTED_BY_HANDLER)]


def batch_before_a_failover(connection: Connection) -> BatchState:
    """A batch of one job whose COMMIT was sent to the server that is gone."""
    batch = claim_batch(connection, "ledger", 1, epoch="of the server before the failover")
    batch.owner.commit_was_sent = True
    batch.events.append(JobDone(batch.job, 0.1))
    return batch


def test_a_job_that_another_relay_did_after_a_failover_is_reported_by_that_relay_alone(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """COMMIT was sent and never arrived; the job is gone because another relay has done it since."""
    with sessions.begin() as session:
        session.add_job(app.record, name="once")
    with engine.connect() as connection:
        transaction = connection.begin()
        batch = batch_before_a_failover(connection)
        transaction.rollback()
        assert find_outcome(connection, batch) is None, "it still waits"
        reported = [event for event in drain() if isinstance(event, JobDone)]
        late = find_outcome(connection, batch)
    assert late is not None
    assert [event.job.id for event in (*reported, *late.events)] == [batch.job.id]
    assert ledger(engine) == {"once": 1}


def test_a_job_whose_commit_was_made_before_a_failover_is_reported(
    engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """COMMIT arrived and its answer did not: the new server knows the transaction."""
    with sessions.begin() as session:
        session.add_job(app.record, name="once")
    with engine.connect() as connection:
        with connection.begin():
            batch = batch_before_a_failover(connection)
        late = find_outcome(connection, batch)
    assert late is not None
    assert [event.job.id for event in late.events if isinstance(event, JobDone)] == [batch.job.id]


@pytest.mark.parametrize("ahead", [1, 2**40])
def test_a_transaction_that_the_new_server_never_heard_of_is_not_reported(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, ahead: int
) -> None:
    """Its number is in the server's future."""
    with sessions.begin() as session:
        session.add_job(app.record, name="once")
    with engine.connect() as connection:
        transaction = connection.begin()
        batch = batch_before_a_failover(connection)
        transaction.rollback()
        drain()
        assert batch.transaction is not None
        batch.transaction = replace(batch.transaction, xid=str(int(batch.transaction.xid) + 1_000_000 * ahead))
        late = find_outcome(connection, batch)
    assert late is not None
    assert late.events == ()


def test_a_charge_outside_the_batch_reads_any_database(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The claim by id asks for ISO dates like every other: psycopg reads no others."""
    with engine.begin() as connection:
        connection.execute(text(f'ALTER DATABASE "{engine.url.database}" SET datestyle = German'))
    jobs = Jobs()

    @jobs.handler(queue="ledger", retry=Backoff(max_attempts=2, first_seconds=0))
    def end_transaction(ctx: Context) -> None:
        ctx.session.connection().transaction.rollback()

    with sessions.begin() as session:
        session.add_job(end_transaction)
    drain(jobs)
    ((kind, reason),) = dead_reasons(engine)
    assert kind == "end_transaction"
    assert reason.startswith("gave up after 2 of 2 attempts")


class Stop(BaseException):
    """Of the user's own."""


class Broken(StrDumper):
    """Of a type that every statement of the relay's has."""

    def dump(self, obj: str) -> bytes:
        raise Stop


def _refuse(*_: object) -> None:
    raise Stop


def driver_of(ctx: Context) -> Any:
    return ctx.session.connection().connection.driver_connection


POISONS: dict[str, Callable[[Context], object]] = {
    "a listener": lambda ctx: event.listen(ctx.session.connection(), "rollback_savepoint", _refuse),
    "a dumper": lambda ctx: driver_of(ctx).adapters.register_dumper(str, Broken),
}


@diagonal(
    pytest.mark.parametrize("how", POISONS),
    pytest.mark.parametrize("claim", ["transaction", "lease"]),
    pytest.mark.parametrize("batch_size", [1, 10]),
)
def test_what_a_handler_leaves_on_its_connection_ends_no_relay_that_records_its_failure(
    how: str, claim: Any, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The connection is closed, and the attempt is recorded on another one."""
    jobs = Jobs()

    @jobs.handler(queue="q", claim=claim, retry=Backoff(max_attempts=2, first_seconds=0, jitter=0))
    def write(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        ctx.session.flush()
        if name in POISONS:
            POISONS[name](ctx)
            raise ValueError

    with sessions.begin() as session:
        session.add_jobs(write.job(name=name) for name in ("before", how, "behind"))
    drain(jobs, slots_per_queue=1, batch_size=batch_size)
    assert ledger(engine) == {"before": 1, "behind": 1}
    assert len(dead_reasons(engine)) == 1


def test_the_factories_of_the_drivers_connection_are_the_next_jobs_own(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Else it would take the names of columns for their values, without an error."""
    jobs, found = Jobs(), []

    @jobs.handler(queue="q")
    def look(ctx: Context, sets: bool) -> None:
        found.append(tuple(ctx.session.execute(select(Account.id, Account.balance)).one()))
        if sets:
            driver_of(ctx).row_factory = dict_row

    with sessions.begin() as session:
        session.add(Account(id=1, balance=5))
        session.add_jobs(look.job(sets=sets) for sets in (True, False, False))
    drain(jobs, slots_per_queue=1, batch_size=10)
    assert found == [(1, 5)] * 3
