"""`once` where two callers, a caller and its own past, or a caller and its keeper meet at the worst moment."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Effects, Jobs, OutboxSession, RelayConfig
from outboxq.clock import clock
from outboxq.effects.lock_keeper import LockKeeper
from outboxq.effects.protocol import LockExpiry, claim, once
from outboxq.effects.request import OnceOptions, Request, make_request
from outboxq.effects.runners import EffectRunner
from outboxq.effects.steps import Transact
from outboxq.effects.transactions import EngineTransactions
from outboxq.errors import EffectInProgress
from outboxq.events import JobDone, JobRetried
from outboxq.postgres import Database
from outboxq.statements import effects as statements
from outboxq.statements.effects import EffectLock
from outboxq.testing import CommitProxy, fault_action
from tests.conftest import StartRelay
from tests.support.effects import let_lock_run_out, row
from tests.support.waiting import PATIENCE, wait_until

LEASE = timedelta(seconds=30)


def make(key: str) -> Request:
    options = OnceOptions("charge", key, str, returns=object)
    return make_request(options, lease=LEASE, retention=timedelta(days=1))


def claim_of(token: UUID):
    return statements.claim(EffectLock("charge", "1", token), None, uuid4(), LEASE)


def start_call(engine: Engine) -> UUID:
    """A call that is under way; its token."""
    token = uuid4()
    with engine.begin() as connection:
        assert connection.execute(claim_of(token)).one().claimed
    return token


def somebody_waits(engine: Engine) -> bool:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with engine.connect() as connection:
        return bool(connection.execute(text(waiting)).scalar_one())


@pytest.fixture
def impatient(outboxq_database: Database) -> Iterator[tuple[Engine, Effects]]:
    """Effects whose statements fail where they have to wait for a lock."""
    engine = create_engine(make_url(outboxq_database.url).update_query_dict({"options": "-c lock_timeout=300"}))
    effects = Effects(engine, lease_seconds=5)
    yield engine, effects
    effects.dispose()
    engine.dispose()


# Askers


def test_a_caller_that_wakes_while_another_is_taking_over_does_not_call(engine: Engine) -> None:
    """A second look that waits for the take-over's COMMIT sees what that wrote, never its own old claim."""
    request, calls, slept = make("1"), [], []
    expiry = LockExpiry(request)
    transactions = EngineTransactions(engine, "outboxq")
    with ThreadPoolExecutor(1) as threads, engine.connect() as other:

        def sleep_through_a_take_over(point: str) -> None:
            if point == "before-call" and not slept:
                slept.append(point)
                expiry.renew(clock() - 3600)
                let_lock_run_out(engine, "1")
                assert other.execute(claim_of(uuid4())).one().claimed

        # Without a keeper: it stands still as well.
        runner = EffectRunner(transactions, LEASE.total_seconds())
        with fault_action(sleep_through_a_take_over):
            options = OnceOptions("charge", "1", calls.append)
            woken = threads.submit(runner._drive, once(request, expiry, uuid4()), options)
            wait_until(lambda: somebody_waits(engine), "the woken caller to wait")
            other.commit()
            with pytest.raises(EffectInProgress):
                woken.result(PATIENCE)
    transactions.dispose()
    assert calls == []


def test_an_asker_is_answered_while_a_record_is_just_being_committed(
    impatient: tuple[Engine, Effects], engine: Engine
) -> None:
    """It does not wait for the row of a call that is under way, and has its result as soon as that is committed."""
    _, effects = impatient
    token, calls = start_call(engine), []
    with engine.begin() as recording:
        recording.execute(statements.record(EffectLock("charge", "1", token), "done", result="5")).one()
        with pytest.raises(EffectInProgress):
            effects.once("charge", key="1", call=calls.append)
    assert effects.once("charge", key="1", call=calls.append) == 5
    assert calls == []


@pytest.mark.parametrize("status", ["started", "done"])
def test_an_asker_locks_nothing_and_waits_for_nobody(
    impatient: tuple[Engine, Effects], engine: Engine, status: str
) -> None:
    """What is under way, and what came to an end, is read: somebody else holds its row, and it stays as it was."""
    _, effects = impatient
    token = start_call(engine)
    if status == "done":
        with engine.begin() as connection:
            connection.execute(statements.record(EffectLock("charge", "1", token), "done", result="5"))
    version = text("SELECT xmin::text, xmax::text, ctid::text FROM outboxq.effect")

    def ask() -> None:
        if status == "done":
            assert effects.once("charge", key="1", call=str) == 5
        else:
            with pytest.raises(EffectInProgress):
                effects.once("charge", key="1", call=str)

    with engine.connect() as connection:
        before = connection.execute(version).one()
        ask()
        assert connection.execute(version).one() == before, "the row was locked or written"
        connection.execute(text("SELECT FROM outboxq.effect FOR UPDATE"))
        ask()


def test_an_asker_does_not_cost_a_long_call_its_lock(engine: Engine) -> None:
    """A lock is extended in the very moment in which others look at its row."""
    token = start_call(engine)
    with engine.begin() as asker, engine.begin() as keeper:
        assert not asker.execute(claim_of(uuid4())).one().claimed
        assert keeper.execute(statements.extend(EffectLock("charge", "1", token), LEASE)).first() is not None


# Believing in a lock


def test_a_repeated_claim_believes_in_its_lock_no_longer_than_the_first_one_lasts(engine: Engine) -> None:
    """The answer to the first claim's COMMIT was long in coming: its lock has been running ever since."""
    request = make("1")
    expiry = LockExpiry(request)
    steps = claim(request, expiry, uuid4())
    step = next(steps)
    assert isinstance(step, Transact)
    with engine.begin() as connection:
        step.run(connection)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.effect SET locked_until = clock_timestamp() + interval '10 seconds'"))
    steps.throw(OperationalError("COMMIT", None, OSError("gone"), connection_invalidated=True))
    step = steps.send(None)
    with pytest.raises(StopIteration) as end, engine.begin() as connection:
        steps.send(step.run(connection))
    assert end.value.value.claimed
    assert expiry.is_ahead
    assert expiry._until < clock() + 10


def test_a_lock_whose_extension_was_not_committed_is_not_believed_in(outboxq_database: Database) -> None:
    """Only what was committed extends anything; the next beat tries again."""
    request = make("1")
    expiry = LockExpiry(request)
    with CommitProxy(outboxq_database.url) as proxy:
        engine = create_engine(proxy.url)
        transactions = EngineTransactions(engine, "outboxq")
        transactions.run(lambda connection: connection.execute(claim_of(request.token)))
        trap = proxy.cut_before_commit(1_000, containing="UPDATE outboxq.effect")
        with LockKeeper(transactions.keeper_transaction(), 0.3).keeping(expiry):
            wait_until(lambda: trap.count >= 2, "two beats")
            assert not expiry.is_ahead
            trap.release()
            wait_until(lambda: expiry.is_ahead, "an extension that is committed")
        transactions.dispose()
        engine.dispose()


_FORKING = """\
import os, sys
from sqlalchemy import create_engine
from outboxq import Effects
from tests.support.effects import row
from tests.support.waiting import wait_until

engine = create_engine(sys.argv[1])
effects = Effects(engine, lease_seconds=1.5)
effects.once("charge", key="parent", call=lambda _: 1)
effects.dispose()

def call(provider_key):
    begun = row(engine, "child")["locked_until"]
    wait_until(lambda: row(engine, "child")["locked_until"] > begun, "its lock to be extended")

# The thread that looked after the parent's call has not noticed its end yet.
pid = os.fork()
if pid:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
effects.once("charge", key="child", call=call)
effects.dispose()
engine.dispose()
os._exit(0)
"""


@pytest.mark.large
def test_a_forked_process_keeps_its_locks(outboxq_database: Database, engine: Engine) -> None:
    """Threads do not survive a fork: the child keeps its calls with one of its own."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKING, outboxq_database.url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert row(engine, "child")["status"] == "done"


_FORKING_IN_A_CALL = """\
import os, signal, sys
from sqlalchemy import create_engine
from outboxq import Effects
from tests.support.effects import row
from tests.support.waiting import wait_until

engine = create_engine(sys.argv[1])
effects = Effects(engine, lease_seconds=1.5)

def locked_until(key):
    return row(engine, key)["locked_until"]

def fork(provider_key):
    pid = os.fork()
    if pid:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.kill(os.getppid(), signal.SIGSTOP)
    try:
        effects.once("charge", key="child", call=extended)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    finally:
        os.kill(os.getppid(), signal.SIGCONT)
    os._exit(0)

def extended(provider_key):
    parents, own = locked_until("parent"), locked_until("child")
    wait_until(lambda: locked_until("child") > own, "its lock to be extended")
    assert locked_until("parent") == parents, "the parent's lock was extended too"

effects.once("charge", key="parent", call=fork)
"""


@pytest.mark.large
def test_a_forked_process_leaves_the_locks_of_its_parent_alone(outboxq_database: Database, engine: Engine) -> None:
    """A call that was under way at the fork is the parent's: should that die, its lock runs out."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKING_IN_A_CALL, outboxq_database.url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert row(engine, "child")["status"] == "done"


# Recording


@contextmanager
def upon(engine: Engine, sqlstate: str, action) -> Iterator[list[str]]:
    """Do something when the server first refuses a statement for this reason; the refusals."""
    refusals: list[str] = []

    def on_error(context) -> None:
        if getattr(context.original_exception, "sqlstate", None) == sqlstate:
            refusals.append(sqlstate)
            if len(refusals) == 1:
                action()

    # Of the dialect, which the pools beside this engine's share.
    event.listen(engine, "handle_error", on_error)
    yield refusals


def test_a_result_outlasts_a_server_that_is_read_only_for_a_moment(outboxq_database: Database, engine: Engine) -> None:
    """A standby that is being promoted: recorded on another connection, because the old one may stay read-only."""
    beyond = create_engine(
        make_url(outboxq_database.url).update_query_dict({"options": "-c default_transaction_read_only=off"}),
        isolation_level="AUTOCOMMIT",
    )
    effects = Effects(engine, lease_seconds=2)
    name = engine.url.database

    def execute(*statements: str) -> None:
        with beyond.connect() as connection:
            for statement in statements:
                connection.execute(text(statement))

    def call(_provider_key: str) -> str:
        execute(
            f'ALTER DATABASE "{name}" SET default_transaction_read_only = on',
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        return "done"

    promote = f'ALTER DATABASE "{name}" RESET default_transaction_read_only'
    with upon(engine, "25006", lambda: execute(promote)) as refusals:
        assert effects.once("charge", key="1", call=call) == "done"
    # On a busy machine another session is made before the promotion is over.
    assert set(refusals) == {"25006"}
    effects.dispose()
    beyond.dispose()
    engine.dispose()
    assert row(engine, "1") | {"status": "done", "result": "done"} == row(engine, "1")


def test_a_result_outlasts_a_lock_timeout(impatient: tuple[Engine, Effects], engine: Engine) -> None:
    """The role's own lock_timeout does not make a known result an unknown one."""
    impatient_engine, effects = impatient
    with engine.connect() as blocker:

        def call(_provider_key: str) -> str:
            blocker.execute(text("SELECT FROM outboxq.effect FOR UPDATE"))
            return "done"

        with upon(impatient_engine, "55P03", blocker.rollback) as refusals:
            assert effects.once("charge", key="1", call=call) == "done"
    assert refusals == ["55P03"]


@pytest.mark.large
def test_a_call_that_outlives_its_handler_is_recorded_and_replayed(
    sessions: sessionmaker[OutboxSession], engine: Engine, start_relay: StartRelay
) -> None:
    """The deadline takes the job from its handler, whose thread still records; the next attempt does not call."""
    jobs = Jobs()
    calls: list[str] = []
    answered = threading.Event()

    @jobs.handler(claim="lease", timeout_seconds=0.5)
    def charge(ctx: Context) -> None:
        def call(provider_key: str) -> int:
            calls.append(provider_key)
            assert answered.wait(PATIENCE)
            return 1

        ctx.once("charge", key="1", call=call)

    with sessions.begin() as session:
        session.add_job(charge)
    with start_relay(jobs, RelayConfig(effect_lease_seconds=2)) as relay:
        wait_until(lambda: relay.of(JobRetried), "the deadline")
        answered.set()
        wait_until(lambda: row(engine, "1")["status"] == "done", "the record")
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.job SET run_at = clock_timestamp()"))
        wait_until(lambda: relay.of(JobDone), "the replay")
    assert len(calls) == 1
