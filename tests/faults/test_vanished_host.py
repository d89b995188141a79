"""A peer that vanishes without a word: the server frees its job, and the relay notices a server that is gone."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession
from outboxq.postgres import Database, Server
from tests.support.app import QUICK, Effect
from tests.support.ledger import dead, ledger, waiting
from tests.support.netns import Host, another_host
from tests.support.own_server import own_database, own_server
from tests.support.urls import libpq_url
from tests.support.waiting import wait_until

# One second of silence, then two probes a second apart: three seconds instead of the 25 by default. Without them the
# kernel asks after two hours.

# Whole programs.
pytestmark = pytest.mark.large

_SERVER_SIDE = {
    "tcp_keepalives_idle": 1,
    "tcp_keepalives_interval": 1,
    "tcp_keepalives_count": 2,
    "tcp_user_timeout": 3000,
    "client_connection_check_interval": 1000,
}
_SHORT = (
    "keepalives_idle=1&keepalives_interval=1&keepalives_count=2&tcp_user_timeout=3000&connect_timeout=2&options="
    + "%20".join(f"-c%20{name}%3D{value}" for name, value in _SERVER_SIDE.items())
)

jobs = Jobs()


@jobs.handler(queue="ledger", retry=QUICK)
def sit(ctx: Context, name: str) -> None:
    """Stay in the transaction while the gate is shut: between two statements, or within one."""
    ctx.session.add(Effect(name=name))
    ctx.session.flush()
    while ctx.session.scalar(text("SELECT gate.shut FROM gate")):
        time.sleep(1000 if ctx.session.scalar(text("SELECT gate.idle FROM gate")) else 0)
        ctx.session.execute(text("SELECT pg_sleep(1000)"))


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with another_host() as host:
        yield host


@pytest.fixture(scope="module")
def server(host: Host) -> Iterator[Server]:
    """A server that the other host reaches, and nobody else."""
    with own_server({"listen_addresses": f"127.0.0.1,{host.our_address}"}) as server:
        assert server.directory is not None
        with (server.directory / "data" / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {host.network} trust\n")
        with psycopg.connect(libpq_url(server.url)) as connection:
            connection.execute("SELECT pg_reload_conf()")
        yield server


@contextmanager
def relay_on(host: Host, database: Database, parameters: str) -> Iterator[None]:
    """A relay process on the other host, killed at the end; then the cable is in again."""
    url = f"{database.url.replace('127.0.0.1', host.our_address)}?{parameters}"
    options = ["tests.faults.test_vanished_host:jobs", "--queue", "ledger=1", "--log-level", "error"]
    process = subprocess.Popen(
        host.command(sys.executable, "-m", "outboxq", "relay", *options),
        env={**os.environ, "OUTBOXQ_DATABASE_URL": url},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()
        host.plug_in()


@pytest.mark.wide
@pytest.mark.parametrize("idle", [True, False], ids=["between-statements", "within-a-statement"])
def test_the_job_of_a_vanished_host_is_free_again_within_the_keepalive_budget(
    server: Server, host: Host, idle: bool
) -> None:
    """No FIN, no RST: the server's own probes end the session, whether it waits for the relay or executes."""
    with own_database(server) as (database, engine):
        shut_gate(engine, idle=idle)
        with sessionmaker(engine, class_=OutboxSession).begin() as session:
            session.add_job(sit, name="freed")
        with relay_on(host, database, _SHORT):
            wait_until(lambda: is_running(engine, idle=idle), "the job to run")
            assert free_jobs(engine) == 0
            host.pull_cable()
            wait_until(lambda: free_jobs(engine) == 1, "the job to be free")
        open_gate(engine)
        with relay_on(host, database, _SHORT):
            wait_until(lambda: waiting(engine) == 0, "another relay to do it")
        assert ledger(engine) == {"freed": 1}
        assert dead(engine) == 0


@pytest.mark.wide
def test_a_relay_whose_cable_was_pulled_goes_on_when_it_is_back(server: Server, host: Host) -> None:
    """The relay gives up its dead connection within the budget, and needs no help to make another."""
    with own_database(server) as (database, engine):
        shut_gate(engine, idle=False)
        with sessionmaker(engine, class_=OutboxSession).begin() as session:
            session.add_job(sit, name="resumed")
        with relay_on(host, database, _SHORT):
            wait_until(lambda: is_running(engine, idle=False), "the job to run")
            host.pull_cable()
            wait_until(lambda: free_jobs(engine) == 1, "the job to be free")
            open_gate(engine)
            # Long enough that the relay's own probes have failed: its old connection must not come back to life.
            host.plug_in()
            wait_until(lambda: waiting(engine) == 0, "the same relay to do it")
        assert ledger(engine) == {"resumed": 1}


def shut_gate(engine: Engine, *, idle: bool) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE gate (shut boolean, idle boolean)"))
        connection.execute(text("INSERT INTO gate VALUES (true, :idle)"), {"idle": idle})


def open_gate(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE gate SET shut = false"))


def is_running(engine: Engine, *, idle: bool) -> bool:
    state = "idle in transaction" if idle else "active"
    query = "SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND state = :state AND query ~ :query"
    with engine.connect() as connection:
        about = "gate.idle" if idle else "pg_sleep"
        return connection.execute(text(query), {"state": state, "query": about}).scalar_one() == 1


def free_jobs(engine: Engine) -> int:
    """Jobs that a relay could claim now."""
    with engine.begin() as connection:
        return len(connection.execute(text("SELECT id FROM outboxq.job FOR UPDATE SKIP LOCKED")).all())
