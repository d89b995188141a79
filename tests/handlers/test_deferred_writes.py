"""`ctx.defer`: Core statements of a batch's jobs, sent together after the flush and before COMMIT."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, bindparam, delete, insert, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, RelayConfig
from outboxq.errors import DeferError
from outboxq.events import BatchRolledBack, Event, JobDied, JobDone
from outboxq.handlers.deferred import checked_write, defer
from tests.conftest import StartRelay
from tests.support.app import Account, Child, Effect
from tests.support.shared_app import ADD_TO_ROW, statements
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Event]]
ONCE = Backoff(max_attempts=1)
RECORD = insert(Effect)


@pytest.fixture(autouse=True)
def _accounts(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add_all(Account(id=id_) for id_ in range(1, 101))


def names(engine: Engine) -> list[str]:
    with Session(engine) as session:
        return list(session.scalars(select(Effect.name).order_by(Effect.row)))


def total(engine: Engine) -> int:
    with Session(engine) as session:
        return sum(session.scalars(select(Account.balance)))


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_equal_statements_of_a_batch_are_sent_once_with_all_parameters(
    flavour: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Fifty jobs of one UPDATE each: one statement over arrays, and no savepoint."""
    jobs = Jobs()
    if flavour == "sync":

        @jobs.handler(queue="defer", batchable=True)
        def credit(ctx: Context, id_: int) -> None:
            ctx.defer(ADD_TO_ROW, {"account": id_, "cents": 3})
    else:

        @jobs.handler(queue="defer", batchable=True)
        async def credit(ctx: AsyncContext, id_: int) -> None:
            ctx.defer(ADD_TO_ROW, {"account": id_, "cents": 3})

    with sessions.begin() as session:
        session.add_jobs(credit.job(id_=id_) for id_ in range(1, 51))
    with statements() as seen:
        drain(jobs, slots_per_queue=1, batch_size=50)
    sent = [
        (statement.split()[0], many)
        for statement, many in seen
        if "sa_savepoint" in statement or "account" in statement
    ]
    assert sent == [("UPDATE", 1)]
    assert total(engine) == 150


def ended(events: Sequence[Event]) -> list[JobDone | JobDied]:
    """The events of jobs that have ended, also of those that should not have died."""
    return [event for event in events if isinstance(event, JobDone | JobDied)]


def test_a_deadlock_of_what_was_deferred_costs_no_attempt(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """One UPDATE over arrays takes rows in the order that the server likes: undone, its jobs run one by one."""
    jobs = Jobs()

    @jobs.handler(queue="defer", batchable=True, retry=ONCE)
    def credit(ctx: Context, id_: int) -> None:
        ctx.defer(ADD_TO_ROW, {"account": id_, "cents": 3})

    with sessions.begin() as session:
        session.add_jobs(credit.job(id_=id_) for id_ in range(1, 51))
    add = text("UPDATE account SET balance = balance + 1 WHERE id = :id")
    with (
        engine.connect() as other,
        engine.connect() as gate,
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as looking,
        ThreadPoolExecutor(1) as thread,
    ):
        pids = [connection.scalar(text("SELECT pg_backend_pid()")) for connection in (other, gate)]

        def waiting(condition: str) -> bool:
            found = f"SELECT count(*) FROM pg_stat_activity WHERE {condition}"
            return bool(looking.scalar(text(found), {"other": pids[0], "gate": pids[1]}))

        # The relay begins to wait last, so that it finds the deadlock: the other would look an hour later.
        other.exec_driver_sql("SET deadlock_timeout = '1h'")
        other.execute(add, {"id": 50})
        gate.execute(add, {"id": 25})
        with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=50)) as running:
            wait_until(lambda: waiting(":gate = ANY(pg_blocking_pids(pid))"), "the batch to wait")
            updated = thread.submit(other.execute, add, {"id": 1})
            wait_until(lambda: waiting("pid = :other AND cardinality(pg_blocking_pids(pid)) > 0"), "the other to wait")
            gate.commit()
            updated.result(PATIENCE)
            other.commit()
            wait_until(lambda: len(ended(running.events)) >= 50, "all jobs to end")
            assert {(type(event), event.job.attempt) for event in ended(running.events)} == {(JobDone, 1)}
    assert total(engine) == 153


@pytest.mark.wide
def test_a_deadlock_over_rows_of_earlier_jobs_costs_no_attempt(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """The batch keeps their rows locked until its COMMIT, so repeating the job in it meets the deadlock again."""
    jobs, may_wait, runs = Jobs(), threading.Event(), list[int]()
    add = text("UPDATE account SET balance = balance + 1 WHERE id = :id")

    @jobs.handler(queue="defer", retry=ONCE)
    def credit(ctx: Context, id_: int) -> None:
        runs.append(id_)
        if id_ == 2:
            may_wait.wait(PATIENCE)
        ctx.session.execute(add, {"id": id_})

    with sessions.begin() as session:
        session.add_jobs(credit.job(id_=id_) for id_ in (1, 2, 3))
    with (
        engine.connect() as other,
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as looking,
        ThreadPoolExecutor(1) as thread,
    ):
        other_pid = other.scalar(text("SELECT pg_backend_pid()"))
        # The relay begins to wait last, so that it finds the deadlock: the other would look an hour later.
        other.exec_driver_sql("SET deadlock_timeout = '1h'")
        other.execute(add, {"id": 2})
        with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=50)) as running:
            wait_until(lambda: 2 in runs, "the second job to run")
            updated = thread.submit(other.execute, add, {"id": 1})
            blocked = text("SELECT cardinality(pg_blocking_pids(:pid)) > 0")
            wait_until(lambda: bool(looking.scalar(blocked, {"pid": other_pid})), "the other to wait")
            may_wait.set()
            updated.result(PATIENCE)
            other.commit()
            wait_until(lambda: len(ended(running.events)) == 3, "all jobs to end")
            assert {(type(event), event.job.attempt) for event in ended(running.events)} == {(JobDone, 1)}
            assert [event.jobs for event in running.of(BatchRolledBack)] == [3]
    assert total(engine) == 5


@pytest.mark.parametrize(("batchable", "batch_size"), [(False, 1), (True, 10)])
def test_what_is_deferred_is_kept_apart_from_the_session_s_info(
    batchable: bool, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    jobs = Jobs()

    @jobs.handler(queue="defer", batchable=batchable)
    def credit(ctx: Context, id_: int) -> None:
        ctx.session.info["request"] = id_
        ctx.defer(ADD_TO_ROW, {"account": id_, "cents": 3})
        ctx.session.info.clear()

    with sessions.begin() as session:
        session.add_jobs(credit.job(id_=id_) for id_ in range(1, 11))
    drain(jobs, slots_per_queue=1, batch_size=batch_size)
    assert total(engine) == 30


@pytest.mark.parametrize(("batchable", "batch_size"), [(True, 1), (False, 1), (False, 10), (True, 10)])
def test_a_job_keeps_the_order_of_its_statements_and_sends_them_behind_its_flush(
    batchable: bool, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Alone, in a batch, and in a shared one, where those of the next job come behind all of them."""
    jobs = Jobs()

    @jobs.handler(queue="order", batchable=batchable)
    def three(ctx: Context, name: str) -> None:
        ctx.defer(insert(Effect), {"name": f"{name} 1"})
        ctx.defer(update(Effect).where(Effect.name == bindparam("old")), {"old": f"{name} 1", "name": f"{name} 2"})
        ctx.defer(insert(Effect), {"name": f"{name} 1"})
        ctx.session.add(Effect(name=f"{name} 0"))

    with sessions.begin() as session:
        session.add_jobs(three.job(name=name) for name in "ab")
    drain(jobs, slots_per_queue=1, batch_size=batch_size)
    assert names(engine) == ["a 0", "a 2", "a 1", "b 0", "b 2", "b 1"]


def test_statements_that_differ_in_a_value_of_their_own_are_not_mixed_up(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A value inside the statement is part of it."""
    jobs = Jobs()

    @jobs.handler(queue="values", batchable=True)
    def credit(ctx: Context, id_: int) -> None:
        ctx.defer(update(Account).where(Account.id == id_).values(balance=Account.balance + id_))

    with sessions.begin() as session:
        session.add_jobs(credit.job(id_=id_) for id_ in (1, 2, 3, 3))
    drain(jobs, slots_per_queue=1, batch_size=10)
    with Session(engine) as session:
        found = dict(session.execute(select(Account.id, Account.balance).where(Account.balance > 0)).all())
    assert found == {1: 1, 2: 2, 3: 6}


@pytest.mark.parametrize("batchable", [True, False])
def test_a_deferred_statement_that_fails_is_charged_to_its_own_job(
    batchable: bool, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """At once, or only when a deferred constraint is checked; the others are done once."""
    jobs = Jobs()

    @jobs.handler(queue="bad", batchable=batchable, retry=ONCE)
    def act(ctx: Context, name: str) -> None:
        ctx.defer(RECORD, {"name": name})
        if name == "taken":
            ctx.defer(insert(Account), {"id": 1})
        if name == "orphan":
            ctx.defer(insert(Child), {"parent_id": -1})

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in ("a", "taken", "b", "orphan", "c"))
    events = drain(jobs, slots_per_queue=1, batch_size=10)
    assert sorted(names(engine)) == ["a", "b", "c"]
    assert sum(isinstance(event, JobDone) for event in events) == 3
    assert sum(isinstance(event, JobDied) for event in events) == 2


def test_under_a_lease_they_are_sent_in_the_transaction_that_removes_the_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Also where the handler did nothing else; a job that failed leaves nothing."""
    jobs = Jobs()

    @jobs.handler(queue="leased", claim="lease", retry=ONCE)
    def act(ctx: Context, name: str) -> None:
        ctx.defer(RECORD, {"name": name})
        if name == "bad":
            raise ValueError(name)

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in ("good", "bad"))
    drain(jobs, slots_per_queue=1)
    assert names(engine) == ["good"]


def test_a_savepoint_of_the_handlers_does_not_send_them_early(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """One that is released may lie in one that is rolled back, and what was deferred still counts."""
    jobs = Jobs()

    @jobs.handler(queue="nested")
    def act(ctx: Context) -> None:
        outer = ctx.session.begin_nested()
        with ctx.session.begin_nested():
            ctx.defer(RECORD, {"name": "kept"})
        outer.rollback()

    with sessions.begin() as session:
        session.add_job(act)
    drain(jobs, slots_per_queue=1)
    assert names(engine) == ["kept"]


@pytest.mark.parametrize(
    ("statement", "parameters", "message"),
    [
        ("INSERT INTO t VALUES (1)", None, "wrap it in text"),
        (select(Account), None, "got Select"),
        (text("SELECT 1"), None, "begins with INSERT"),
        (text("/* x */ COMMIT"), None, "begins with INSERT"),
        (None, None, "got NoneType"),
        (Effect(name="x"), None, "got Effect"),
        (delete(Effect).returning(Effect.row), None, "RETURNING"),
        (RECORD, [{"name": "x"}], "got list"),
        (RECORD, {1: "x"}, "by name"),
        (RECORD, {"name": Account(id=1)}, "Account object"),
        (RECORD, {"name": Effect.name}, "SQL expression"),
        (RECORD, {"name": text("now()")}, "SQL expression"),
    ],
)
def test_what_cannot_be_sent_later_is_refused_at_the_call(statement: Any, parameters: Any, message: str) -> None:
    """With what was expected, and no I/O."""
    from outboxq.testing import sync_context

    with pytest.raises(DeferError, match=message):
        sync_context(OutboxSession()).defer(statement, parameters)


def test_in_a_unit_test_they_are_sent_when_the_session_commits(engine: Engine) -> None:
    """`outboxq.testing.sync_context` needs no relay."""
    from outboxq.testing import sync_context

    with OutboxSession(engine) as session:
        sync_context(session).defer(RECORD, {"name": "unit"})
        assert names(engine) == []
        session.commit()
    assert names(engine) == ["unit"]


def test_a_session_of_a_test_goes_on_after_a_commit_that_could_not_send_them(engine: Engine) -> None:
    """Rolled back, it is as good as new."""
    with OutboxSession(engine) as session:
        defer(session, checked_write(RECORD, {"name": "a\x00b"}))
        with pytest.raises(DBAPIError):
            session.commit()
        session.rollback()
        defer(session, checked_write(RECORD, {"name": "later"}))
        session.commit()
    assert names(engine) == ["later"]
