"""The next claim goes with the COMMIT of the jobs before it, and starts behind them: nothing is passed over."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig, SlotGroup
from outboxq.database.driver import ANY_SERVER, Script, run_script
from outboxq.events import Event, JobDone, JobsSuspected
from outboxq.execution.batch_state import BatchReport, BatchState, Ended
from outboxq.execution.claim import Claimed, ClaimRequest, claim
from outboxq.postgres import Database
from outboxq.queue_limits import QueueLimits
from outboxq.relay import queue_claims
from outboxq.relay.limits import RelayLimits
from outboxq.relay.planner import Planner
from outboxq.relay.poller import Order
from outboxq.relay.queue_claims import QueueCursor, Sweep
from outboxq.relay.state import RelayState
from outboxq.relay.suspects import QuarantineTurns
from outboxq.statements.claim import ClaimScript, ClaimStatements, Cursor, Sort
from outboxq.testing.transaction import unit_test_job as _unit_test_job
from tests.conftest import StartRelay
from tests.support import app
from tests.support.app import Child
from tests.support.driver_waits import driver_waits
from tests.support.ledger import dead, ledger, waiting
from tests.support.limits import FOLLOW_NEVER, FOLLOW_ON, with_limits
from tests.support.scripts import behind_commit, change_scripts, note_scripts
from tests.support.waiting import wait_until


def enqueue(sessions: sessionmaker[OutboxSession], count: int, **options: object) -> list[str]:
    names = [f"{options.get('priority', 'job')} {number}" for number in range(count)]
    with sessions.begin() as session:
        session.add_jobs(app.record.options(**options).job(name=name) for name in names)
    return names


def drain(url: str, batch_size: int = 5, jobs: Jobs = app.jobs, limits: RelayLimits = FOLLOW_ON) -> list[Event]:
    events: list[Event] = []
    config = RelayConfig(slots_per_queue=1, batch_size=batch_size)
    with_limits(Relay(url, jobs, config, hooks=[events.append]), limits).drain()
    return events


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The strings that commit."""
    return note_scripts(monkeypatch)


def test_a_commit_brings_the_next_jobs(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine, scripts: list[str]
) -> None:
    """Full batches follow one another by COMMIT; the last one, which is short, asks for nothing."""
    names = enqueue(sessions, 23)
    events = drain(outboxq_database.url)
    assert [script.count("EXECUTE") for script in scripts if "COMMIT" in script] == [1, 1, 1, 1, 0]
    assert sum(isinstance(each, JobDone) for each in events) == 23
    assert ledger(engine) == Counter(names)


def test_a_claim_after_deadlocks_is_for_half_as_many_jobs(make_state: Callable[..., RelayState]) -> None:
    """Deadlocks grow with the locks of a batch. Later claims grow again; all are one statement, prepared once."""
    planner, requests = Planner(make_state("ledger", limits=FOLLOW_ON, batch_size=100), Order(("ledger",))), []
    request = next(each for each in sorts_of_round(planner) if each.sort is Sort.READY)
    for count, has_deadlocked in ((30, True), (15, False), (30, False), (60, False), (100, False)):
        requests.append(request)
        claimed = Claimed(request, (_unit_test_job(),) * count)
        planner.record_claim(claimed, is_called=False)
        batch = BatchState.of(claimed)
        batch.tries.has_deadlocked = has_deadlocked
        planner.after(batch)
        request = next(each for each in sorts_of_round(planner) if each.sort is Sort.READY)
    assert [request.limit for request in requests] == [100, 15, 30, 60, 100]
    assert len({request.script.text(1) for request in requests}) == 1


def sorts_of_round(planner: Planner, jobs: int = 0) -> list[ClaimRequest]:
    """The claims of a round, up to the first one, which takes so many jobs, or of which each is empty."""
    asked = []
    for each in planner.first(ANY_SERVER):
        assert isinstance(each, ClaimRequest)
        asked.append(each)
        planner.record_claim(Claimed(each, (_unit_test_job(),) * jobs), is_called=False)
        if jobs:
            break
    return asked


def test_a_slot_that_has_slept_asks_for_ready_jobs_first(make_state: Callable[..., RelayState]) -> None:
    """It is these that wake it; awake, it takes turns."""
    planner, firsts = Planner(make_state("ledger"), Order(("ledger",))), []
    for turns in (1, 2, 3):
        sorts_of_round(planner)
        firsts.append([sorts_of_round(planner, jobs=1)[0].sort is Sort.READY for _ in range(turns)])
    assert firsts == [[True], [True, False], [True, False, True]]


@pytest.mark.parametrize("goes_on", ["with no job", "with others", "elsewhere", "full"])
def test_jobs_that_end_make_room_for_another_slot_unless_their_own_takes_it(
    make_state: Callable[..., RelayState], goes_on: str
) -> None:
    """A queue that was held because it was at its limit is not held any longer than its jobs run."""
    state = make_state("ledger")
    state.flow.limits, state.flow.restricts = {"ledger": QueueLimits(running=1)}, True
    planner = Planner(state, Order(("ledger",)))
    (request, other) = (
        ClaimRequest(ClaimStatements("outboxq", name).ready, 1, queue=name) for name in ("ledger", "mail")
    )
    following = {
        "with no job": Claimed(request),
        "with others": Claimed(request, (_unit_test_job(),)),
        "elsewhere": Claimed(other, (_unit_test_job(),)),
        "full": Claimed(request, is_full=True),
    }
    state.poller.hold("ledger", 60)
    planner.record(request, Ended(BatchReport(1, ()), following[goes_on]))
    assert state.poller.is_held("ledger") == (goes_on in ("with others", "full"))
    planner.record(request, Ended(BatchReport(1, ())))
    assert not state.poller.is_held("ledger")


def test_a_batch_of_jobs_that_write_nothing_costs_one_round_trip(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Neither a savepoint nor a session for a handler that asks for none."""
    jobs, seen = Jobs(), []

    @jobs.handler(queue="idle")
    def do_nothing(ctx: Context) -> None:
        seen.append(waits.count(threading.current_thread()))

    with sessions.begin() as session:
        session.add_jobs(do_nothing.job() for _ in range(50 * 12))
    with driver_waits() as waits:
        drain(outboxq_database.url, 50, jobs)
    assert [count - seen[0] for count in seen] == [batch for batch in range(12) for _ in range(50)]


@pytest.mark.first_and_last
@pytest.mark.parametrize("what", ["earlier queue", "due"])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_slot_leaves_its_queue_for_what_comes_first(
    batch_size: int,
    what: str,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
) -> None:
    """After a while it polls all of its queues: in the earlier ones, or among the due jobs, something may wait."""
    jobs, order = Jobs(), []

    @jobs.handler(queue="first")
    def urgent(ctx: Context) -> None:
        order.append("urgent")

    @jobs.handler(queue="second")
    def usual(ctx: Context, number: int) -> None:
        order.append("due" if number < 0 else "usual")
        if number == 30 and what == "earlier queue":
            ctx.session.add_job(urgent)
        if number == 30 and what == "due":
            ctx.session.add_job(usual.options(delay=timedelta(microseconds=1)), -1)

    with sessions.begin() as session:
        session.add_jobs(usual.job(number) for number in range(100))
    config = RelayConfig(groups=(SlotGroup(("first", "second")),), batch_size=batch_size)
    with_limits(Relay(outboxq_database.url, jobs, config), RelayLimits(follow_most_seconds=0.0)).drain()
    assert order.index("urgent" if what == "earlier queue" else "due") <= 30 + 6 * batch_size


@pytest.fixture
def break_next_claim(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a statement in front of the first claim that goes with a COMMIT."""

    def arrange(statement: str) -> None:
        statements = [statement]

        def breaking(script: Script) -> None:
            if statements and (place := behind_commit(script)):
                script.parts.insert(place + 1, ("settings", statements.pop()))

        change_scripts(monkeypatch, breaking)

    return arrange


@pytest.mark.first_and_last
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("error", ["SELECT 1 / 0", "SELECT FROM nowhere", "DO $$BEGIN RAISE SQLSTATE '40P01'; END$$"])
def test_a_next_claim_that_fails_behind_commit_undoes_nothing_and_doubles_nothing(
    error: str,
    batch_size: int,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    engine: Engine,
    break_next_claim: Callable[[str], None],
) -> None:
    """What was committed before it stands and is reported once, though the string that carried it ended in an error."""
    names = enqueue(sessions, 7)
    break_next_claim(error)
    events = drain(outboxq_database.url, batch_size)
    assert ledger(engine) == Counter(names)
    assert Counter(type(each) for each in events if isinstance(each, JobDone | JobsSuspected)) == {JobDone: 7}
    assert (waiting(engine), dead(engine)) == (0, 0)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_backend_that_dies_in_the_next_claim_leaves_the_committed_jobs_done_once(
    batch_size: int,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    engine: Engine,
    break_next_claim: Callable[[str], None],
) -> None:
    """No answer at all: the server is asked what became of the transaction whose COMMIT was in that string."""
    names = enqueue(sessions, 7)
    break_next_claim("SELECT pg_terminate_backend(pg_backend_pid())")
    drain(outboxq_database.url, batch_size)
    assert ledger(engine) == Counter(names)
    assert (waiting(engine), dead(engine)) == (0, 0)


def test_a_refused_commit_takes_no_next_job(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """A deferred constraint fails in the string that holds the next claim: that one was not sent for nothing."""
    jobs = Jobs()
    jobs.include(app.jobs)

    @jobs.handler(queue=app.record.queue)
    def leave_an_orphan(ctx: Context) -> None:
        ctx.session.add(Child(parent_id=-1))

    with sessions.begin() as session:
        session.add_job(leave_an_orphan.options(max_attempts=1))
    names = enqueue(sessions, 5)
    drain(outboxq_database.url, 1, jobs)
    assert ledger(engine) == Counter(names)
    assert (waiting(engine), dead(engine)) == (0, 1)


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(queue_claims, "time", clock)
    return clock


@pytest.mark.first_and_last
@pytest.mark.parametrize("what", ["late", "urgent", "retried"])
def test_what_lies_before_the_cursor_is_run_while_claims_go_on(
    what: str,
    clock: Clock,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    engine: Engine,
) -> None:
    """A commit that came late, a higher priority, a job that came back: within a second and a batch, not at the end."""
    order: list[str] = []
    jobs = Jobs()
    late = sessions()

    @jobs.handler(queue="many")
    def count(ctx: Context, name: str) -> None:
        order.append(name)
        clock.now += 0.01
        if name == "job 50":
            add_before_the_cursor()

    @jobs.handler(queue="many", retry=Backoff(max_attempts=2, first_seconds=0.0))
    def fail_once(ctx: Context, name: str) -> None:
        order.append(name)
        if ctx.job.attempt == 1:
            raise ValueError

    def add_before_the_cursor() -> None:
        if what == "late":
            late.commit()
        elif what == "urgent":
            with sessions.begin() as session:
                session.add_job(count.options(priority=1), name="urgent")

    # Draws its place in the queue first.
    late.add_job(count, name="late")
    late.flush()
    with sessions.begin() as session:
        session.add_jobs(count.job(name=f"job {number}") for number in range(50))
        if what == "retried":
            session.add_job(fail_once, name="retried")
        session.add_jobs(count.job(name=f"job {number}") for number in range(50, 400))
    # The second attempt of one that is retried is due at once, and comes from the other index.
    drain(outboxq_database.url, 5, jobs, FOLLOW_NEVER if what == "retried" else FOLLOW_ON)
    late.close()
    assert Counter(order) == Counter([f"job {number}" for number in range(400)]) + Counter(
        {what: 2 if what == "retried" else 1}
    )
    since = order.index("job 50")
    assert (
        max(place for place, name in enumerate(order) if name == what) <= since + queue_claims.SWEEP_SECONDS / 0.01 + 5
    )
    assert waiting(engine) == 0


def test_one_slot_sweeps_for_all_and_the_more_rarely_the_more_it_costs(clock: Clock) -> None:
    """At least every second, or a twentieth of the time where what it takes longer than other claims is more."""
    sweep = Sweep()
    assert sweep.take_turn()
    assert not sweep.take_turn()
    sweep.record(0.001, swept=False)
    for seconds, pause in ((0.0011, 0.05), (0.006, 0.1), (0.031, 0.6), (0.151, 3.0), (0.001, 0.05), (5.0, 30.0)):
        sweep.record(seconds, swept=True)
        clock.now += pause - 0.001
        assert not sweep.take_turn(), seconds
        clock.now += 0.002
        assert sweep.take_turn(), seconds


def test_looking_for_due_jobs_sends_no_claim_back_to_the_start(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the claim would walk over all that was done since an old snapshot, each time that no job is due."""
    del clock
    starts: list[Cursor | None] = []
    start = QueueCursor.place

    def noted(position: QueueCursor) -> Cursor | None:
        starts.append(start(position))
        return starts[-1]

    monkeypatch.setattr(QueueCursor, "place", noted)
    monkeypatch.setattr(QuarantineTurns, "wait_in", lambda _suspects, _queues: True)
    jobs = Jobs()

    @jobs.handler(queue="many")
    def nothing(ctx: Context) -> None:
        del ctx

    with sessions.begin() as session:
        session.add_jobs(nothing.job() for _ in range(200))
    drain(outboxq_database.url, 5, jobs, FOLLOW_NEVER)
    assert waiting(engine) == 0
    # The first claim, and at the end those that find nothing.
    assert [cursor is None for cursor in starts].index(False) == 1
    assert sum(cursor is None for cursor in starts) <= 4
    assert len(starts) >= 40


def test_a_claim_behind_a_cursor_does_not_walk_over_dead_entries(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Behind an old snapshot vacuum takes nothing away: from the start each claim reads all that was done since."""
    script = ClaimStatements("outboxq", "many").ready
    with engine.begin() as connection:
        connection.execute(text(FILL), {"count": 20_100})
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as pin, engine.connect() as connection:
        pin.execute(text("SELECT 1 FROM outboxq.job LIMIT 1"))
        with connection.begin():
            done = claim(connection, ClaimRequest(script, 20_000))
        last = done.jobs[-1]
        behind = buffers(connection, script, Cursor(last.priority, last.seq))
        assert buffers(connection, script, None) > behind + 300


FILL = """
INSERT INTO outboxq.job (id, queue, kind, args)
SELECT gen_random_uuid(), 'many', 'k', '{}' FROM generate_series(1, :count)
"""


def buffers(connection: Connection, script: ClaimScript, cursor: Cursor | None) -> int:
    with connection.begin() as transaction:
        explained = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {script.text(10, cursor)}"
        plan = run_script(connection, explained)[0][0]
        transaction.rollback()
    assert isinstance(plan, list)
    return int(plan[0]["Plan"]["Shared Hit Blocks"]) + int(plan[0]["Plan"]["Shared Read Blocks"])


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_the_server_hears_of_finished_jobs_while_a_slot_never_rests(
    flavour: str,
    sessions: sessionmaker[OutboxSession],
    engine: Engine,
    start_relay: StartRelay,
) -> None:
    """Autovacuum goes by counts that a session gives away only between transactions."""
    limits = replace(FOLLOW_ON, counts_seconds=0.5)
    jobs = Jobs()

    def rest(ctx: Context) -> None:
        time.sleep(0.01)

    async def rest_async(ctx: AsyncContext) -> None:
        await asyncio.sleep(0.01)

    handler: Any = jobs.handler(kind="rest")(rest if flavour == "sync" else rest_async)
    with sessions.begin() as session:
        session.add_jobs(handler.job() for _ in range(1_500))
    with start_relay(jobs, RelayConfig(slots_per_queue=1), limits=limits):
        wait_until(lambda: _deleted(engine) > 0, "the server has counted deleted jobs")
        assert waiting(engine) > 0


def _deleted(engine: Engine) -> int:
    query = text("SELECT n_tup_del FROM pg_stat_all_tables WHERE relid = 'outboxq.job'::regclass")
    with engine.connect() as connection:
        return connection.execute(query).scalar_one()
