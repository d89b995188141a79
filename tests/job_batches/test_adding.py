"""Batches of `jobs.batch`: opened with their members in one transaction, whatever becomes of savepoints and flushes."""

from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import sessionmaker

import outboxq
from outboxq import AsyncOutboxSession, Backoff, Context, Jobs, OutboxSession, Unique
from outboxq.database.driver import Answer, Script
from outboxq.errors import ArgumentError, EnqueueError
from outboxq.events import BatchFinished, Event, JobDone
from outboxq.execution.callback_batches import FinishBatches
from outboxq.postgres import Database
from tests.support.app import Account, Effect
from tests.support.ledger import of

jobs = Jobs()
ONCE = Backoff(max_attempts=1)


@jobs.handler(queue="members")
def member(ctx: Context, name: str) -> None:
    ctx.session.add(Effect(name=name))


@jobs.handler(queue="members", retry=ONCE)
def failing(ctx: Context, name: str) -> None:
    raise ValueError(name)


@jobs.handler(queue="members")
def parent(ctx: Context, children: int) -> None:
    assert ctx.batch is not None
    ctx.batch.add_jobs(member.job(name=f"child {number}") for number in range(children))


@jobs.handler(queue="reports")
def report(ctx: Context, run: str) -> None:
    finished = ctx.finished_batch
    assert finished is not None
    ctx.session.add(Effect(name=f"{run}: {finished.failed} failed"))


@jobs.handler(queue="reports")
def report_on(ctx: Context, account: Account) -> None:
    ctx.session.add(Effect(name=f"account {account.id}"))


def names(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT name FROM effect_ledger ORDER BY name")).scalars())


def count(engine: Engine, table: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM outboxq.{table}")).scalar_one())


Drain = Callable[..., list[Event]]


def test_the_callback_runs_once_when_all_members_are_over(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Done and dead members count as over, and the callback is told how many are dead."""
    with sessions.begin() as session, jobs.batch(session, on_done=report.job(run="7")) as batch:
        session.add_jobs(batch.of(member.job(name=f"member {number}") for number in range(3)))
        batch.add_job(failing, name="bad")
    events = drain(jobs)
    assert names(engine) == ["7: 1 failed", "member 0", "member 1", "member 2"]
    (finished,) = of(events, BatchFinished)
    assert (finished.id, finished.queue, finished.kind, finished.failed) == (batch.id, "reports", "report", 1)
    assert count(engine, "batch") == 0


def test_a_leased_job_beside_members_is_settled_without_their_step(
    sessions: sessionmaker[OutboxSession], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim under a lease takes jobs in and out of callback batches, and each is committed by itself."""
    own, errors, send = Jobs(), list[object](), Script.send

    @own.handler(queue="members", claim="lease")
    def writing(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))

    def sending(script: Script, connection: Connection) -> Answer:
        answer = send(script, connection)
        errors.append(answer.error)
        return answer

    with sessions.begin() as session:
        session.add_jobs(writing.job(name=f"first {number}") for number in range(30))
        with own.batch(session, on_done=writing.job(name="all")) as batch:
            batch.add_job(writing, name="member")
        session.add_jobs(writing.job(name=f"last {number}") for number in range(4))
    monkeypatch.setattr(Script, "send", sending)
    events = drain(own, slots_per_queue=20)
    assert len(of(events, JobDone)) == 36
    assert set(errors) == {None}


def test_a_look_that_fails_hides_no_answer_of_a_unique_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to COMMIT says whether the job was added, and stands in front of the failure."""
    own, handles = Jobs(), []

    @own.handler(queue="members")
    def adding(ctx: Context, key: str) -> None:
        handles.append(ctx.session.add_job(done.options(unique=key, delay=timedelta(hours=1))))

    @own.handler(queue="reports")
    def done(ctx: Context) -> None:
        pass

    with sessions.begin() as session, own.batch(session, on_done=done.job()) as batch:
        session.add_job(done.options(unique="taken", delay=timedelta(hours=1)))
        batch.add_jobs(adding.job(key=key) for key in ("free", "taken"))
    monkeypatch.setattr(FinishBatches, "after_commit", lambda *_: ("BEGIN", "SELECT 1 / 0"))
    events = drain(own)
    assert [handle.added for handle in handles] == [True, False]
    assert [event.job.kind for event in of(events, JobDone)].count("adding") == 2
    assert of(events, BatchFinished) == []


@pytest.mark.first_and_last
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_connection_that_ends_in_the_look_hides_no_job_that_is_done(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
    claim: Literal["transaction", "lease"],
    count: int,
) -> None:
    """The answer to COMMIT came before: for jobs in a transaction, and for leased jobs that wrote nothing."""
    own, look, ended = Jobs(), FinishBatches.after_commit, []

    @own.handler(queue="members", claim=claim)
    def adding(ctx: Context) -> None:
        if claim == "transaction":
            ctx.session.add_job(done.options(unique="key", delay=timedelta(hours=1)))

    @own.handler(queue="reports")
    def done(ctx: Context) -> None:
        pass

    def cut_off(step: FinishBatches) -> tuple[str, ...]:
        if not ended:
            ended.append(1)
            return ("SELECT pg_terminate_backend(pg_backend_pid())",)
        return look(step)

    monkeypatch.setattr(FinishBatches, "after_commit", cut_off)
    with sessions.begin() as session, own.batch(session, on_done=done.job()) as batch:
        batch.add_jobs(adding.job() for _ in range(count))
    events = drain(own, batch_size=2)
    assert ended
    assert len([event for event in of(events, JobDone) if event.job.kind == "adding"]) == count


def test_an_empty_batch_adds_its_callback_at_once(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """No row of a batch is left that only a sweep would come to."""
    with sessions.begin() as session, outboxq.batch(session, on_done=report.job(run="7")):
        pass
    assert (count(engine, "batch"), count(engine, "job")) == (0, 1)
    drain(jobs)
    assert names(engine) == ["7: 0 failed"]


def test_members_that_a_handler_adds_hold_the_batch_open(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """They appear with the disappearance of the member that added them."""
    with sessions.begin() as session, jobs.batch(session, on_done=report.job(run="7")) as batch:
        batch.add_job(parent, children=3)
    events = drain(jobs)
    assert names(engine) == ["7: 0 failed", "child 0", "child 1", "child 2"]
    assert len(of(events, BatchFinished)) == 1


def test_a_nested_batch_holds_its_parent_open(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The callback of the inner one is a member of the outer one, also before it is added."""
    with sessions.begin() as session, jobs.batch(session, on_done=report.job(run="outer")) as outer:
        # It ends alone, while the inner one is open and its callback no row yet.
        outer.add_job(member, name="first")
        with jobs.batch(session, on_done=outer.of(report.job(run="inner"))) as inner:
            inner.add_job(member, name="second")
    events = drain(jobs, batch_size=1, slots_per_queue=1)
    assert [event.id for event in of(events, BatchFinished)] == [inner.id, outer.id]
    assert names(engine) == ["first", "inner: 0 failed", "outer: 0 failed", "second"]


def test_a_savepoint_that_rolls_back_takes_its_members(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The batch, and the members outside of the savepoint, stand."""
    with sessions.begin() as session, jobs.batch(session, on_done=report.job(run="7")) as batch:
        batch.add_job(member, name="kept")
        with session.begin_nested() as savepoint:
            batch.add_job(member, name="lost")
            session.flush()
            savepoint.rollback()
    drain(jobs)
    assert names(engine) == ["7: 0 failed", "kept"]


def test_a_batch_of_a_savepoint_that_rolls_back_never_was(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Neither its row nor a member is left."""
    with sessions.begin() as session:
        with session.begin_nested() as savepoint:
            with jobs.batch(session, on_done=report.job(run="7")) as batch:
                batch.add_job(member, name="lost")
            savepoint.rollback()
        session.add_job(member, name="kept")
    assert (count(engine, "batch"), count(engine, "job")) == (0, 1)


def test_a_batch_is_not_lost_by_expunging(sessions: sessionmaker[OutboxSession]) -> None:
    """A COMMIT that would lose it is refused, as for jobs."""
    with sessions() as session:
        with jobs.batch(session, on_done=report.job(run="7")) as batch:
            batch.add_job(member, name="lost")
        session.expunge_all()
        with pytest.raises(EnqueueError, match="would be lost"):
            session.commit()


def test_the_callback_may_take_an_entity_of_the_same_flush(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Its primary key is known when the batch is written."""
    with sessions.begin() as session:
        account = Account(balance=1)
        session.add(account)
        with jobs.batch(session, on_done=report_on.job(account=account)) as batch:
            batch.add_job(member, name="first")
    drain(jobs)
    assert names(engine) == ["account 1", "first"]


async def _add_in_async_session(url: str) -> None:
    engine = create_async_engine(url)
    async with AsyncOutboxSession(engine) as session, session.begin():
        with jobs.batch(session, on_done=report.job(run="7")) as batch:
            batch.add_job(member, name="first")
    async with AsyncSession(engine) as plain, plain.begin():
        with jobs.batch(plain, on_done=report.job(run="8")) as batch:
            outboxq.add_jobs(plain, batch.of([member.job(name="second")]))
    await engine.dispose()


@pytest.mark.anyio
async def test_async_sessions_open_batches_without_awaiting(outboxq_database: Database, engine: Engine) -> None:
    """Nothing of it does I/O before the flush."""
    await _add_in_async_session(outboxq_database.url)
    assert (count(engine, "batch"), count(engine, "job")) == (2, 2)


def test_what_a_batch_refuses(sessions: sessionmaker[OutboxSession]) -> None:
    """Each error says what to do instead."""
    with sessions.begin() as session:
        with pytest.raises(ArgumentError, match="on_done takes a job"):
            jobs.batch(session, on_done=report)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="no job with unique="):
            jobs.batch(session, on_done=report.options(unique=Unique("x")).job(run="7"))
        opened = jobs.batch(session, on_done=report.job(run="7"))
        with pytest.raises(EnqueueError, match="inside of its block"):
            opened.add_job(member, name="before")
        with opened as batch:
            with pytest.raises(ArgumentError, match="takes jobs made by"):
                batch.add_jobs([member])  # type: ignore[list-item]
            with pytest.raises(ArgumentError, match="in a batch already"):
                batch.of(batch.of(member.job(name="twice")))
        with pytest.raises(EnqueueError, match="inside of its block"):
            batch.add_job(member, name="behind")
    with sessions() as session, jobs.batch(session, on_done=report.job(run="8")) as batch:
        session.commit()
        with pytest.raises(EnqueueError, match="has ended"):
            batch.add_job(member, name="late")
