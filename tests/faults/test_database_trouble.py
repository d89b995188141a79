"""The server stops, crashes, changes its mind, or takes no more connections: the relay waits, says so, and goes on."""

import os
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig, SlotGroup
from outboxq.database.engines import make_engine
from outboxq.database.errors import outage_reason
from outboxq.errors import ConfigError
from outboxq.events import DatabaseBack, DatabaseLost, JobDone, JobRetried
from outboxq.postgres import Database, Server
from outboxq.relay.startup import check_durability
from tests.conftest import StartRelay
from tests.support import app
from tests.support.app import Effect
from tests.support.ledger import dead, enqueue, ledger, waiting
from tests.support.own_server import own_database, own_server, stop_fast
from tests.support.waiting import wait_until

JOBS = 300
# As many as a relay with one slot takes: the slot's, and one for the leases.
CONNECTIONS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with own_server() as server:
        yield server


def stop_and_start(server: Server, engine: Engine) -> None:
    """An operator's restart."""
    stop_fast(server)
    server.start_again()


def crash_and_start(server: Server, engine: Engine) -> None:
    """The whole server dies at once."""
    server.stop_immediately()
    server.start_again()


def kill_a_backend(server: Server, engine: Engine) -> None:
    """One backend dies in its transaction: the server ends all others, and recovers."""
    query = text("SELECT pid FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()")

    def at_work() -> int | None:
        with engine.connect() as connection:
            return connection.execute(query).scalars().first()

    pid = wait_until(at_work, "a backend at work")
    engine.dispose()
    os.kill(pid, signal.SIGKILL)


@pytest.mark.large
@pytest.mark.parametrize("trouble", [stop_and_start, crash_and_start, kill_a_backend])
def test_a_server_that_goes_and_comes_back_costs_no_job_and_doubles_none(
    server: Server, start_relay: StartRelay, trouble: Callable[[Server, Engine], None]
) -> None:
    """Two troubles in the middle of the work, sync and async slots, batches of five: one effect each, none charged."""
    with own_database(server) as (database, engine):
        names = enqueue(engine, (f"job-{number}" for number in range(JOBS)))
        with start_relay(engine=database.url, config=RelayConfig(batch_size=5)) as relay:
            for share in (1, 2):
                done = share * JOBS // 4
                wait_until(lambda done=done: _found(engine, ledger, Counter()).total() >= done, f"{share} of 4 parts")
                engine.dispose()
                trouble(server, engine)
                wait_until(lambda share=share: len(relay.of(DatabaseLost)) >= share, "the relay to notice")
            wait_until(lambda: _found(engine, waiting, JOBS) == 0, "the queue to empty")
            wait_until(lambda: relay.of(DatabaseBack), "the relay to say that it is back")
        assert ledger(engine) == dict.fromkeys(names, 1)
        assert dead(engine) == 0
        assert {event.job.attempt for event in relay.of(JobDone)} == {1}


@pytest.mark.parametrize("batch_size", [1, 5])
def test_serialization_failures_are_repeated_for_free_and_boundedly(
    start_relay: StartRelay, engine: Engine, sessions: sessionmaker[OutboxSession], batch_size: int
) -> None:
    """40001 is nobody's fault five times in a row; after that it counts, so that no job holds a slot for ever."""
    jobs = Jobs()
    calls: list[str] = []

    @jobs.handler(queue="conflicts", retry=Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0))
    def conflict(ctx: Context, name: str, times: int) -> None:
        calls.append(name)
        ctx.session.add(Effect(name=name))
        ctx.session.flush()
        if calls.count(name) <= times:
            ctx.session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$"))

    with sessions.begin() as session:
        session.add_job(conflict, name="free", times=5)
        session.add_job(conflict, name="charged", times=6)
        session.add_job(conflict, name="hopeless", times=100)
    with start_relay(jobs, RelayConfig(batch_size=batch_size)) as relay:
        wait_until(lambda: waiting(engine) == 0, "the queue to empty")
    assert ledger(engine) == {"free": 1, "charged": 1}
    assert dead(engine) == 1
    assert {name: calls.count(name) for name in set(calls)} == {"free": 6, "charged": 7, "hopeless": 12}
    wait_until(lambda: len(relay.of(JobDone)) == 2, "both to be reported")
    assert sorted(event.job.attempt for event in relay.of(JobDone)) == [1, 2]


@pytest.fixture
def limited_role(outboxq_server: Server) -> Iterator[str]:
    """A role that may do a relay's work over `CONNECTIONS` connections."""
    name = f"outboxq_limited_{secrets.token_hex(4)}"
    admin = create_engine(outboxq_server.url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD '{name}' CONNECTION LIMIT {CONNECTIONS}"))
        connection.execute(text(f"GRANT pg_read_all_data, pg_write_all_data TO {name}"))
    yield name
    with admin.connect() as connection:
        end = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = :name")
        connection.execute(end, {"name": name})
        connection.execute(text(f"DROP ROLE {name}"))
    admin.dispose()


@pytest.mark.large
def test_a_relay_waits_for_a_free_connection_and_says_so(
    start_relay: StartRelay, engine: Engine, outboxq_database: Database, limited_role: str
) -> None:
    """Over the role's limit the relay neither ends nor spins: it tells its hooks, and works as soon as it may."""
    url = make_url(outboxq_database.url).set(username=limited_role, password=limited_role)
    names = enqueue(engine, ["patient-1", "patient-2"], both_flavours=False)
    holder = make_engine(url)
    occupied = [holder.connect() for _ in range(CONNECTIONS)]
    with pytest.raises(OperationalError) as refusal:
        holder.connect()
    assert outage_reason(refusal.value) == "too many connections"
    with start_relay(engine=url, config=RelayConfig(groups=(SlotGroup(("ledger",)),), listen=False)) as relay:
        wait_until(lambda: len(relay.of(DatabaseLost)) >= 2, "the relay to say that it waits")
        pauses = [event.retry_seconds for event in relay.of(DatabaseLost)]
        assert min(pauses) > 0
        for connection in occupied:
            connection.close()
        wait_until(lambda: waiting(engine) == 0, "the relay to go on")
    assert ledger(engine) == dict.fromkeys(names, 1)
    assert not relay.of(JobRetried)
    holder.dispose()


@pytest.mark.parametrize("level", ["role", "database", "url"])
def test_asynchronous_commit_is_refused_wherever_it_is_set(
    engine: Engine, outboxq_database: Database, limited_role: str, level: str
) -> None:
    """A relay whose COMMIT is answered before it is on the disk does not start unless it is asked to by name."""
    url = make_url(outboxq_database.url).set(username=limited_role, password=limited_role)
    with engine.begin() as connection:
        if level == "role":
            connection.execute(text(f"ALTER ROLE {limited_role} SET synchronous_commit = off"))
        elif level == "database":
            connection.execute(text(f'ALTER DATABASE "{outboxq_database.name}" SET synchronous_commit = off'))
        else:
            url = url.update_query_dict({"options": "-c synchronous_commit=off"})
    relays = make_engine(url)
    with relays.connect() as connection:
        with pytest.raises(ConfigError, match=r"synchronous_commit is off.*allow_asynchronous_commit=True"):
            check_durability(connection, allowed=False)
        check_durability(connection, allowed=True)
    with pytest.raises(ConfigError, match="synchronous_commit is off"):
        Relay(url, app.jobs, hooks=()).drain()
    relays.dispose()


@pytest.mark.parametrize("value", ["on", "local", "remote_write", "remote_apply"])
def test_every_other_level_of_commit_is_accepted(outboxq_database: Database, value: str) -> None:
    """They differ in what a standby has; all of them are on this server's disk."""
    given = make_engine(make_url(outboxq_database.url).update_query_dict({"options": f"-c synchronous_commit={value}"}))
    with given.connect() as connection:
        check_durability(connection, allowed=False)
    given.dispose()


def test_keepalives_reach_both_ends_of_a_connection(outboxq_database: Database) -> None:
    """The server's own settings too: it is the server that keeps the job of a vanished host."""
    made = make_engine(outboxq_database.url)
    names = ["idle", "interval", "count"]
    with made.connect() as connection:
        shown = [connection.execute(text(f"SHOW tcp_keepalives_{name}")).scalar_one() for name in names]
        assert shown == ["10", "5", "3"]
        assert connection.execute(text("SHOW tcp_user_timeout")).scalar_one() in ("25s", "25000")
        assert connection.execute(text("SHOW client_connection_check_interval")).scalar_one() == "10s"
    made.dispose()


def _found(engine: Engine, look: Callable[[Engine], Any], meanwhile: object) -> Any:
    """What a look finds; `meanwhile` if the server goes just now, or recovers."""
    try:
        return look(engine)
    except (SQLAlchemyError, psycopg.Error):
        engine.dispose()
        return meanwhile
