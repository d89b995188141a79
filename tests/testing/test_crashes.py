"""What `outboxq.testing` offers for crashing handlers: fault points, the proxy, and every step in one call."""

import asyncio
import signal
import subprocess
import sys
import threading

import asyncpg
import psutil
import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import OutboxSession, external
from outboxq.errors import ConfigError
from outboxq.postgres import Database
from outboxq.testing import CRASH_STEPS, EFFECT_FAULT_POINTS, CommitProxy, crash_at_every_step
from outboxq.torture import app as torture_app
from outboxq.torture.history import CREATE
from tests.support import app, once_app
from tests.support.app import Effect
from tests.support.matrices import sampled
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until


def ledger_size(connection: Connection) -> int:
    return connection.execute(text("SELECT count(*) FROM effect_ledger")).scalar_one()


def insert(url: str, errors: list[BaseException], name: str = "x") -> None:
    """Commit one row through `url`; what went wrong goes to `errors`."""
    engine = create_engine(url)
    try:
        with Session(engine) as session:
            session.add(Effect(name=name))
            session.commit()
    except Exception as error:  # noqa: BLE001  # looked at by the test
        errors.append(error)
    finally:
        engine.dispose()


def rows(engine: Engine) -> int:
    with engine.connect() as connection:
        return ledger_size(connection)


@pytest.mark.wide
@pytest.mark.parametrize(
    "steps", sampled([(CRASH_STEPS[:3],), (CRASH_STEPS[3:6],), (CRASH_STEPS[6:],)]), ids=lambda steps: steps[0]
)
def test_a_handler_that_writes_through_its_session_survives_every_crash(outboxq_database: Database, steps) -> None:
    """Killed or cut off at each step of its way, the job has exactly one effect and leaves nothing."""
    crash_at_every_step(
        "tests.support.app:jobs",
        database_url=outboxq_database.url,
        enqueue=lambda session: session.add_job(app.record, name="x"),
        effects=ledger_size,
        steps=steps,
    )


@pytest.mark.wide
def test_a_handler_under_a_lease_survives_every_crash(outboxq_database: Database) -> None:
    """The same under a lease, which has to run out first: settings of the relay are passed through."""
    crash_at_every_step(
        "outboxq.torture.app:leased",
        database_url=with_torture_tables(outboxq_database.url),
        enqueue=lambda session: session.add_job(torture_app.record_leased),
        effects=lambda connection: connection.execute(text("SELECT count(*) FROM torture.effect")).scalar_one(),
        steps=["after-claim", "before-commit", "after-commit", "connection-cut-before-commit"],
        lease_seconds=1,
    )


@pytest.mark.wide
def test_a_handler_that_calls_once_survives_every_crash(outboxq_database: Database) -> None:
    """Killed before its call, after it and after its record: the steps of a call are steps like the others."""
    names = iter(EFFECT_FAULT_POINTS)
    crash_at_every_step(
        "tests.support.once_app:jobs",
        database_url=outboxq_database.url,
        enqueue=lambda session: session.add_job(once_app.record_once, name=next(names)),
        effects=ledger_size,
        steps=EFFECT_FAULT_POINTS,
        lease_seconds=1,
        effect_lease_seconds=0.5,
    )


def with_torture_tables(url: str) -> str:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(CREATE))
    engine.dispose()
    return url


def test_a_handler_that_commits_beside_its_session_is_found_out(outboxq_database: Database) -> None:
    """A second connection's row stands although the relay died: the doubled effect is reported with its step."""
    with pytest.raises(AssertionError, match="at before-commit: the job had 2 effects"):
        crash_at_every_step(
            "tests.support.app:jobs",
            database_url=outboxq_database.url,
            enqueue=lambda session: session.add_job(app.record_beside, name="x"),
            effects=ledger_size,
            steps=["before-commit"],
        )


@pytest.mark.wide
def test_a_step_that_is_never_reached_is_an_error(outboxq_database: Database) -> None:
    """A job that no relay runs proves nothing, and is not taken for a success."""
    with pytest.raises(AssertionError, match="at before-handler: the relay was to be killed there, but its end was"):
        crash_at_every_step(
            "tests.support.app:jobs",
            database_url=outboxq_database.url,
            enqueue=lambda session: session.add_job(external("ship", queue="depot"), order_id=7),
            effects=ledger_size,
            steps=["before-handler"],
            timeout_seconds=2,
        )


def test_jobs_that_wait_already_are_refused(outboxq_database: Database, sessions: sessionmaker[OutboxSession]) -> None:
    """Effects of other jobs would be counted too."""
    with sessions.begin() as session:
        session.add_job(app.record, name="already here")
    with pytest.raises(ConfigError, match="1 jobs wait already"):
        crash_at_every_step(
            "tests.support.app:jobs",
            database_url=outboxq_database.url,
            enqueue=lambda session: session.add_job(app.record, name="x"),
            effects=ledger_size,
        )


@pytest.mark.wide
def test_a_process_is_killed_at_the_passing_that_was_asked_for() -> None:
    """The second passing of the point, and no other point, ends the process."""
    script = (
        "from outboxq.fault_points import fault_point\n"
        "from outboxq.testing import kill_process_at\n"
        "with kill_process_at('after-claim', 2):\n"
        "    for name in ('after-claim', 'before-commit', 'before-commit', 'after-claim', 'after-commit'):\n"
        "        print(name, flush=True); fault_point(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["after-claim", "before-commit", "before-commit", "after-claim"]


@pytest.mark.wide
def test_a_relay_process_ends_with_its_parent(outboxq_database: Database) -> None:
    """A test run that is killed leaves no relay behind."""
    script = (
        "import os, sys, time\n"
        "from outboxq.testing import RelayProcess\n"
        "relay = RelayProcess('tests.support.app:jobs', sys.argv[1])\n"
        "print(relay.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, outboxq_database.url], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        relay_pid = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: has_ended(relay_pid), "the relay's end")


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.first_and_last
@pytest.mark.parametrize(("cut", "stands"), [("cut_before_commit", 0), ("cut_after_commit", 1)])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_cut_at_commit_is_an_error_whatever_stands(
    engine: Engine, outboxq_database: Database, cut: str, stands: int, driver: str
) -> None:
    """Cut before it, nothing is committed; cut after it, everything is; the client sees the same lost connection."""
    errors: list[BaseException] = []
    with CommitProxy(outboxq_database.url) as proxy:
        trap = getattr(proxy, cut)()
        url = proxy.url.replace("+psycopg", f"+{driver}")
        insert(url, errors)
        assert trap.reached.wait(PATIENCE)
        wait_until(lambda: sessions_in_transaction(engine) == 0, "the server to notice")
        assert [type(error).__name__ for error in errors] == ["OperationalError"]
        assert rows(engine) == stands
        insert(url, errors)
    assert len(errors) == 1, "one-shot"
    assert rows(engine) == stands + 1


async def commit_with_asyncpg(url: str) -> None:
    connection = await asyncpg.connect(url.replace("+psycopg", "").split("?")[0], ssl=False)
    try:
        async with connection.transaction():
            await connection.execute("INSERT INTO effect_ledger (name) VALUES ($1)", "x")
    finally:
        connection.terminate()


def test_a_commit_is_recognised_whoever_sends_it(engine: Engine, outboxq_database: Database) -> None:
    """asyncpg's extended protocol, and COMMIT at the end of a script or prepared as a statement."""
    url = outboxq_database.url
    with CommitProxy(url) as proxy:
        trap = proxy.cut_after_commit(3)
        with pytest.raises((asyncpg.PostgresError, ConnectionError, asyncpg.InterfaceError)):
            asyncio.run(commit_with_asyncpg(proxy.url))
        for send in (send_script, send_prepared):
            with (
                pytest.raises(psycopg.OperationalError),
                psycopg.connect(libpq_url(proxy.url), autocommit=True) as connection,
            ):
                send(connection)
        assert trap.reached.wait(PATIENCE)
    assert rows(engine) == 3


def send_script(connection: psycopg.Connection) -> None:
    connection.execute("BEGIN; SAVEPOINT oq_1; INSERT INTO effect_ledger (name) VALUES ('x')")
    connection.execute("SET CONSTRAINTS ALL IMMEDIATE; RELEASE SAVEPOINT oq_1; COMMIT")


def send_prepared(connection: psycopg.Connection) -> None:
    connection.execute("BEGIN")
    connection.execute("INSERT INTO effect_ledger (name) VALUES (%s)", ["x"], prepare=True)
    connection.execute("commit work -- now", prepare=True)


def test_only_a_commit_that_decides_something_is_caught(outboxq_database: Database) -> None:
    """Neither one of a transaction that wrote nothing, nor the word in a literal, nor one without the text."""
    with CommitProxy(outboxq_database.url) as proxy:
        trap = proxy.cut_before_commit(containing="effect_LEDGER")
        with psycopg.connect(libpq_url(proxy.url)) as connection:
            connection.execute("SELECT 1 FROM effect_ledger")
            connection.commit()
            connection.execute("INSERT INTO account (balance) VALUES (1)")
            connection.commit()
            connection.execute("INSERT INTO effect_ledger (name) VALUES ('x; COMMIT')")
            connection.execute("DO $$ BEGIN PERFORM 1; END; $$")
            assert not trap.reached.is_set()
            with pytest.raises(psycopg.OperationalError):
                connection.commit()
        assert trap.reached.wait(PATIENCE)


@pytest.mark.parametrize("arrives", [False, True])
def test_a_connection_frozen_at_commit_goes_on_when_released(
    engine: Engine, outboxq_database: Database, arrives: bool
) -> None:
    """Nothing passes meanwhile in either direction; released, everything arrives late."""
    errors: list[BaseException] = []
    with CommitProxy(outboxq_database.url) as proxy:
        trap = proxy.freeze_at_commit(arrives=arrives)
        client = threading.Thread(target=insert, args=(proxy.url, errors))
        client.start()
        assert trap.reached.wait(PATIENCE)
        assert rows(engine) == int(arrives)
        assert client.is_alive()
        trap.release()
        client.join(PATIENCE)
        assert not client.is_alive()
    assert errors == []
    assert rows(engine) == 1


def test_a_held_reply_leaves_the_client_waiting_for_what_is_committed(
    engine: Engine, outboxq_database: Database
) -> None:
    """The row stands while the client still waits; cut then, the client gets an error."""
    errors: list[BaseException] = []
    with CommitProxy(outboxq_database.url) as proxy:
        trap = proxy.hold_reply()
        client = threading.Thread(target=insert, args=(proxy.url, errors))
        client.start()
        assert trap.reached.wait(PATIENCE)
        assert rows(engine) == 1
        assert client.is_alive()
        assert proxy.cut() == 1
        client.join(PATIENCE)
    assert [type(error).__name__ for error in errors] == ["OperationalError"]


@pytest.mark.wide
def test_everything_can_be_frozen_thawed_and_cut(outboxq_database: Database) -> None:
    """A half-open connection answers nothing and reports nothing until it is cut."""
    with CommitProxy(outboxq_database.url) as proxy:
        connection = psycopg.connect(libpq_url(proxy.url), autocommit=True)
        proxy.freeze()
        answers: list[object] = []
        client = threading.Thread(target=lambda: answers.append(connection.execute("SELECT 1").fetchone()))
        client.start()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(libpq_url(proxy.url), connect_timeout=1)
        assert answers == []
        proxy.thaw()
        client.join(PATIENCE)
        assert answers == [(1,)]
        assert proxy.cut() >= 1
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        connection.close()


def test_a_closed_proxy_leaves_no_thread_and_no_port(outboxq_database: Database) -> None:
    """Also with a connection that stands still in a trap."""
    errors: list[BaseException] = []
    with CommitProxy(outboxq_database.url) as proxy:
        trap = proxy.freeze_at_commit()
        client = threading.Thread(target=insert, args=(proxy.url, errors))
        client.start()
        assert trap.reached.wait(PATIENCE)
    client.join(PATIENCE)
    assert not client.is_alive()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("outboxq-proxy")] == []
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(libpq_url(proxy.url), connect_timeout=2)


def sessions_in_transaction(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(
            text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND backend_xid IS NOT NULL AND pid <> pg_backend_pid()"
            )
        ).scalar_one()
