"""A primary dies and its standby takes over: queue and ledger stay one, and the relay goes on."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig
from outboxq.database.driver import end_transaction
from outboxq.events import DatabaseBack, DatabaseLost
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.execution.claim import Claimed, ClaimRequest
from outboxq.execution.errors import WritesRefused
from outboxq.execution.keep import Keeper
from outboxq.execution.recovery import record_result, recover
from outboxq.outcomes import Done
from outboxq.postgres import Server
from outboxq.statements.claim import claim_by_id
from tests.conftest import StartRelay
from tests.support import app
from tests.support.ledger import dead, enqueue, ledger, rows, waiting
from tests.support.own_server import own_database, own_server
from tests.support.slots import claim_ready
from tests.support.standby import Pair, primary_and_standby
from tests.support.waiting import wait_until

pytestmark = pytest.mark.large

JOBS = 400


@pytest.fixture
def pair() -> Iterator[Pair]:
    with primary_and_standby() as pair:
        yield pair


@pytest.fixture(scope="module")
def lonely_primary() -> Iterator[Server]:
    """A server that makes those wait who ask for it, for a standby which is never there."""
    with own_server({"synchronous_standby_names": "gone", "synchronous_commit": "local"}) as server:
        yield server


def engine_on(url: str) -> Engine:
    return create_engine(url, connect_args={"connect_timeout": 5})


def test_a_synchronous_failover_loses_and_doubles_nothing(pair: Pair, start_relay: StartRelay) -> None:
    """Every job whose enqueueing was acknowledged has exactly one effect on the promoted standby."""
    with own_database(pair.primary) as (database, engine):
        pair.wait_for_replay()
        pair.make_synchronous()
        names = enqueue(engine, (f"job-{number}" for number in range(JOBS)))
        config = RelayConfig(batch_size=5)
        with start_relay(engine=pair.url(database.url), config=config) as relay:
            wait_until(lambda: ledger(engine).total() >= JOBS // 4, "a quarter of the effects")
            engine.dispose()
            pair.fail_over()
            promoted = engine_on(pair.standby_url(database.url))
            wait_until(lambda: waiting(promoted) == 0, "the promoted standby's queue to empty")
            wait_until(lambda: relay.of(DatabaseBack), "the relay to say that it is back")
        assert ledger(promoted) == dict.fromkeys(names, 1)
        assert dead(promoted) == 0
        assert relay.of(DatabaseLost)
        promoted.dispose()


def test_an_asynchronous_failover_goes_back_in_time_with_queue_and_ledger_together(
    pair: Pair, start_relay: StartRelay
) -> None:
    """What the standby had not heard of is gone, its rows and its jobs alike, and the one slot is not stuck with it."""
    with own_database(pair.primary) as (database, engine):
        names = enqueue(engine, ["early-1", "early-2"], both_flavours=False)
        pair.wait_for_replay()
        pair.cut_replication()
        enqueue(engine, ["unheard-of"], both_flavours=False)
        with sessionmaker(engine, class_=OutboxSession).begin() as session:
            session.add_job(app.record_slowly, name="in-flight", seconds=0.5)
        config = RelayConfig(slots_per_queue=1, listen=False)
        with start_relay(engine=pair.url(database.url), config=config):
            wait_until(lambda: ledger(engine).total() == 3, "the primary's effects")
            wait_until(lambda: _runs_a_job(engine), "a job to be in flight")
            engine.dispose()
            pair.fail_over()
            promoted = engine_on(pair.standby_url(database.url))
            wait_until(lambda: waiting(promoted) == 0, "the promoted standby's queue to empty")
            later = enqueue(promoted, ["late"], both_flavours=False)
            wait_until(lambda: waiting(promoted) == 0, "the relay to go on")
        assert ledger(promoted) == dict.fromkeys([*names, *later], 1)
        assert dead(promoted) == 0
        promoted.dispose()


def test_a_job_whose_transaction_begins_on_a_standby_is_not_charged(pair: Pair) -> None:
    """As behind a pooler that keeps sessions with both servers: it runs again at once, and nothing of it is counted."""
    with own_database(pair.primary) as (database, engine), engine.connect() as primary:
        enqueue(engine, ["once"], both_flavours=False)
        with primary.begin() as claiming:
            (job,) = claim_ready(primary, "ledger", 1).jobs
            claiming.rollback()
        with primary.begin():
            held = "state = 'leased', lease_owner = gen_random_uuid(), lease_token = 1, attempt = 1"
            primary.execute(text(f"UPDATE outboxq.job SET {held}"))
        job = msgspec.structs.replace(job, lease_token=1)
        pair.wait_for_replay()
        standby_engine = engine_on(pair.standby_url(database.url))
        batch = BatchState(Claimed(ClaimRequest(claim_by_id("outboxq", str(job.id)), 1)), (job,))
        nothing: Any = None
        with standby_engine.connect() as standby:
            # The handler may swallow the first error, and its next statement may reach the primary.
            for connection in (standby, primary):
                with pytest.raises(WritesRefused) as refused:
                    batch.begin(connection)
                end_transaction(connection)
            # Neither charged nor put off for minutes, which another connection might allow.
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                record_result(standby, batch, job, Done(), nothing)
        standby_engine.dispose()
        no_steps: Any = SimpleNamespace(keeper=Keeper(), guard=SimpleNamespace(added={}))
        assert recover(primary, batch, refused.value, no_steps).report == BatchReport(1, ())
        state = "SELECT state, attempt, crashes, errors, run_at <= clock_timestamp() FROM outboxq.job"
        assert rows(engine, state) == [("ready", 0, 0, [], True)]


@pytest.mark.parametrize("ended_by", ["pg_cancel_backend", "pg_terminate_backend"])
def test_a_synchronous_wait_that_is_broken_off_is_one_effect(
    lonely_primary: Server, start_relay: StartRelay, ended_by: str
) -> None:
    """COMMIT stood on the primary while it waited for its standby: the job is done once, and not run again."""
    with own_database(lonely_primary) as (database, engine):
        url = f"{database.url}?options=-c%20synchronous_commit%3Don"
        enqueue(engine, ["once"], both_flavours=False)
        with start_relay(engine=url, config=RelayConfig(slots_per_queue=1, listen=False)):
            wait_until(lambda: _end_a_wait(engine, ended_by) and not waiting(engine), "the broken off COMMIT to stand")
            # The relay asks what became of its transaction, and goes on.
            enqueue(engine, ["next"], both_flavours=False)
            wait_until(lambda: _end_a_wait(engine, "pg_cancel_backend") and not waiting(engine), "the next job")
        assert ledger(engine) == {"once": 1, "next": 1}
        assert dead(engine) == 0


def _runs_a_job(engine: Engine) -> bool:
    with engine.connect() as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND state = 'idle in transaction'"
        return connection.execute(text(query)).scalar_one() == 1


def _end_a_wait(engine: Engine, function: str) -> bool:
    """Break off whatever waits for a standby; true at each call, so that the caller goes on to look."""
    with engine.connect() as connection:
        connection.execute(text(f"SELECT {function}(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")).all()
    return True
