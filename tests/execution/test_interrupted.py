"""An error at the worst moment, which no statement of the handler's caused: MemoryError, cancellation, a lost backend.

Whatever it interrupts, the rows of an attempt and the end of its job are one.
"""

from collections import Counter
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, Engine, insert, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig
from outboxq.database.driver import Script, ServerSession
from outboxq.database.guard import Guard, Savepoint
from outboxq.errors import DeferError
from outboxq.events import Event, JobDied, JobDone, JobRetried
from outboxq.execution import recovery
from outboxq.execution.claim import ClaimRequest
from outboxq.execution.errors import Abandoned
from outboxq.execution.settle_many import SettleMany
from outboxq.fault_points import FaultPoint, fault_action
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.ledger import dead, ledger, waiting
from tests.support.together import together
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
QUICK = Backoff(max_attempts=3, first_seconds=0.0, jitter=0.0)
# The driver refuses it before anything is sent.
NUL = "\x00"
INSERT = "INSERT INTO effect_ledger (name) VALUES ('around')"


def errors(events: list[Event]) -> list[str]:
    return [event.error_type for event in events if isinstance(event, JobRetried)]


@pytest.mark.first_and_last
@pytest.mark.parametrize("flavour", ["transaction", "lease"])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_an_error_behind_a_handler_that_is_done_doubles_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, flavour: str, batch_size: int
) -> None:
    """Its savepoint is released by then: taken for a failure, its rows would stand and it would run again."""
    jobs, struck = Jobs(), []

    @jobs.handler(queue="q", retry=QUICK, claim=flavour)  # type: ignore[arg-type]  # one of the two modes
    def write(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))

    def strike(point: FaultPoint) -> None:
        if point == "after-handler" and not struck:
            struck.append(point)
            raise MemoryError

    with sessions.begin() as session:
        session.add_jobs(write.job(name=f"job {number}") for number in range(3))
    with fault_action(strike):
        drain(jobs, **together(flavour, batch_size))
    assert ledger(engine) == {f"job {number}": 1 for number in range(3)}
    assert (waiting(engine), dead(engine)) == (0, 0)


def test_rows_that_went_around_the_session_before_its_first_use_are_undone_with_their_attempt(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Under a lease the transaction begins late: the driver's own connection begins it as a statement does."""
    jobs = Jobs()

    @jobs.handler(queue="q", retry=Backoff(max_attempts=1), claim="lease")
    def write(ctx: Context) -> None:
        bind = ctx.session.get_bind()
        assert isinstance(bind, Connection)
        bind.connection.cursor().execute(INSERT)
        ctx.session.execute(text("SELECT 1"))
        raise ValueError

    with sessions.begin() as session:
        session.add_job(write)
    events = drain(jobs)
    assert ledger(engine) == {}
    assert dead(engine) == 1
    assert [event.error_type for event in events if isinstance(event, JobDied)] == ["ValueError"]


def test_rows_that_went_around_the_session_are_not_lost_with_their_connection(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The handler returns as if done, and nobody has noticed that its backend is gone: it is not done."""
    jobs = Jobs()

    @jobs.handler(queue="q", retry=QUICK, claim="lease")
    def write(ctx: Context) -> None:
        bind = ctx.session.get_bind()
        assert isinstance(bind, Connection)
        with bind.connection.cursor() as cursor:
            cursor.execute(INSERT)
            pid = cursor.execute("SELECT pg_backend_pid()").fetchone()[0]
        if ctx.job.crashes == 0:
            with engine.connect() as other:
                other.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})

    with sessions.begin() as session:
        session.add_job(write)
    drain(jobs)
    assert ledger(engine) == {"around": 1}
    assert (waiting(engine), dead(engine)) == (0, 0)


@pytest.mark.parametrize("error", [MemoryError, Abandoned])
def test_a_transaction_that_could_not_begin_leaves_no_handler_unguarded(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
) -> None:
    """The handler swallows the error, and goes on by the connection: what it writes is undone with its failure."""
    begin, struck, jobs = Guard.begin_savepoint, [], Jobs()

    def strike(guard: Guard, seal: str | None) -> Savepoint:
        if not struck:
            struck.append(error)
            raise error
        return begin(guard, seal)

    @jobs.handler(queue="q", retry=Backoff(max_attempts=1), claim="lease")
    def write(ctx: Context) -> None:
        with pytest.raises(error):
            ctx.session.execute(text("SELECT 1"))
        bind = ctx.session.bind
        assert isinstance(bind, Connection)
        bind.execute(text(INSERT))
        raise ValueError

    monkeypatch.setattr(Guard, "begin_savepoint", strike)
    with sessions.begin() as session:
        session.add_job(write)
    events = drain(jobs)
    assert [event.error_type for event in events if isinstance(event, JobDied)] == ["ValueError"]
    assert ledger(engine) == {}
    assert (waiting(engine), dead(engine)) == (0, 1)


def test_what_others_deferred_is_not_lost_with_an_error_that_a_neighbour_swallows(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Before a handler's query the rows of the jobs before it are sent, and an error of theirs is raised in it."""
    jobs = Jobs()

    @jobs.handler(queue="q", retry=Backoff(max_attempts=1), batchable=True)
    def write(ctx: Context, name: str) -> None:
        ctx.defer(insert(Effect), {"name": name.replace("!", NUL)})

    @jobs.handler(queue="q", retry=Backoff(max_attempts=1), batchable=True)
    def look(ctx: Context) -> None:
        try:
            ctx.session.scalars(select(Effect)).all()
        except SQLAlchemyError:
            ctx.session.add(Effect(name="swallowed"))

    with sessions.begin() as session:
        session.add_job(write, name="good")
        session.add_job(write, name="bad!")
        session.add_job(look)
    drain(jobs, slots_per_queue=1, batch_size=10)
    assert ledger(engine) == {"good": 1}
    assert (waiting(engine), dead(engine)) == (0, 1)


@pytest.mark.parametrize("batchable", [True, False])
def test_what_could_not_be_sent_at_a_commit_of_the_handlers_own_fails_its_attempt(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, *, batchable: bool
) -> None:
    """It swallows the error and returns: done would be a lie."""
    jobs = Jobs()

    @jobs.handler(queue="q", retry=Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0), batchable=batchable)
    def write(ctx: Context, name: str) -> None:
        ctx.defer(insert(Effect), {"name": name.replace("!", NUL)})
        try:
            ctx.session.commit()
        except SQLAlchemyError:
            return

    with sessions.begin() as session:
        session.add_job(write, name="good")
        session.add_job(write, name="bad!")
    events = drain(jobs, slots_per_queue=1, batch_size=10)
    assert ledger(engine) == {"good": 1}
    assert (waiting(engine), dead(engine)) == (0, 1)
    assert errors(events) == [f"{DeferError.__module__}.{DeferError.__qualname__}"]


def test_an_error_between_taking_and_settling_what_has_ended_stops_no_slot(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher meets it with results in hand: they are settled later, and no handler runs again."""
    add_to, struck, ran, jobs = SettleMany.add_to, [], [], Jobs()

    def strike(settling: SettleMany, script: Script, server: ServerSession, *, keep: bool) -> str | None:
        if not struck:
            struck.append(len(settling.settlements))
            raise MemoryError
        return add_to(settling, script, server, keep=keep)

    @jobs.handler(queue="q", claim="lease")
    def work(_ctx: Context, name: str) -> None:
        ran.append(name)

    names = [f"job {number}" for number in range(10)]
    with sessions.begin() as session:
        session.add_jobs(work.job(name=name) for name in names)
    monkeypatch.setattr(SettleMany, "add_to", strike)
    with start_relay(jobs, RelayConfig(slots_per_queue=4), engine=engine):
        wait_until(lambda: waiting(engine) == 0, "every job")
    assert Counter(ran) == dict.fromkeys(names, 1)
    assert struck


@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_claim_that_fails_behind_commit_costs_no_job_that_is_done(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
) -> None:
    """The answer has COMMIT's own result in front of the failure, so that nothing is asked, and no job runs again."""
    jobs, struck, sent = Jobs(), [], ClaimRequest.add_to

    @jobs.handler(queue="q", retry=QUICK, batchable=True)
    def write(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))

    def failing(request: ClaimRequest, script: Script, *, begins: bool = False) -> None:
        if struck or not begins:
            sent(request, script, begins=begins)
        else:
            struck.append(1)
            script.add("claim", "BEGIN", "SELECT 1 / 0")

    monkeypatch.setattr(ClaimRequest, "add_to", failing)
    monkeypatch.setattr(recovery, "find_outcome", None)
    with sessions.begin() as session:
        session.add_jobs(write.job(name=f"job {number}") for number in range(10))
    events = drain(jobs, slots_per_queue=1, batch_size=batch_size)
    assert struck
    assert ledger(engine) == {f"job {number}": 1 for number in range(10)}
    assert (waiting(engine), dead(engine)) == (0, 0)
    assert len([event for event in events if isinstance(event, JobDone)]) == 10
