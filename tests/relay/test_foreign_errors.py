"""Errors of users' code on the relay's connections do not end it; a login that is refused for long does."""

import logging
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.errors import LoginRefused
from outboxq.events import Event, JobDone
from outboxq.relay.limits import RelayLimits
from tests.conftest import RunningRelay, StartRelay
from tests.support.app import Effect, prepare
from tests.support.ledger import effects
from tests.support.limits import with_limits
from tests.support.own_server import own_server
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Event]]
EVENTS = ["begin", "savepoint", "before_cursor_execute", "rollback", "checkin", "checkout"]


def has_done(relay: RunningRelay, number: int) -> bool:
    return len(relay.of(JobDone)) == number


@pytest.mark.first_and_last
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("name", EVENTS)
def test_a_listener_of_the_engine_that_raises_does_not_end_the_relay(
    name: str,
    flavour: str,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Between two claims or at any other moment: the relay tries again, and each job is done once."""
    jobs, armed = Jobs(), threading.Event()

    def write(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))

    async def write_async(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))

    kind = jobs.handler(queue="q", kind="write")(write if flavour == "sync" else write_async)
    used = create_engine(engine.url) if flavour == "sync" else create_async_engine(engine.url)

    @event.listens_for(used if isinstance(used, Engine) else used.sync_engine, name)
    def listen(*_: object) -> None:
        if armed.is_set():
            armed.clear()
            raise LookupError("a listener's own")

    config = RelayConfig(slots_per_queue=1, batch_size=3)
    with caplog.at_level(logging.WARNING), start_relay(jobs, config, engine=used) as relay:
        for number in range(3):
            with sessions.begin() as session:
                session.add_jobs([kind.job(name=f"{number}.{each}") for each in range(3)])
            wait_until(partial(has_done, relay, 3 * (number + 1)), "the jobs")
            if number == 0:
                armed.set()
    assert effects(engine) == [f"{number}.{each}" for number in range(3) for each in range(3)]


def test_a_handler_of_no_module_works(engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain) -> None:
    """Its module is looked for as the relay starts, for the frames of its errors."""
    jobs = Jobs()

    def work(ctx: Context) -> None:
        ctx.session.add(Effect(name="done"))

    work.__module__ = None  # type: ignore[assignment]
    kind = jobs.handler(queue="q", kind="work")(work)
    with sessions.begin() as session:
        session.add_job(kind)
    drain(jobs)
    assert effects(engine) == ["done"]


@pytest.mark.large
def test_a_relay_whose_login_is_refused_for_long_ends(engine: Engine) -> None:
    """Its password was changed: who starts it again has the new one."""
    with tempfile.TemporaryDirectory(prefix="outboxq-test-") as name:
        hba = Path(name, "pg_hba.conf")
        hba.write_text("host all postgres 127.0.0.1/32 trust\nhost all worker 127.0.0.1/32 scram-sha-256\n")
        # The server's own user reads it.
        hba.parent.chmod(0o755)
        with own_server({"hba_file": str(hba)}) as server:
            prepare(server.url)
            owner = create_engine(server.url)
            with owner.begin() as connection:
                connection.exec_driver_sql("CREATE ROLE worker LOGIN SUPERUSER PASSWORD 'old'")
            url = make_url(server.url).set(username="worker", password="old")
            jobs = Jobs()

            @jobs.handler(queue="q")
            def work(ctx: Context) -> None: ...

            relay = Relay(url, jobs, RelayConfig(slots_per_queue=1, listen=False), hooks=())
            with_limits(relay, RelayLimits(refused_seconds=0.5))
            errors: list[BaseException] = []

            def run() -> None:
                try:
                    relay.run()
                except BaseException as error:  # noqa: BLE001  # looked at below
                    errors.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            try:
                # Each look has a transaction of its own, which sees the sessions of that moment.
                with owner.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                    wait_until(lambda: connection.execute(SESSIONS).scalar_one() > 0, "a session of the relay")
                    connection.exec_driver_sql("ALTER ROLE worker PASSWORD 'new'")
                    wait_until(lambda: not connection.execute(ENDED).all() and bool(errors), "the relay to end")
                thread.join(PATIENCE)
            finally:
                relay.stop()
                thread.join(PATIENCE)
                owner.dispose()
    [error] = errors
    assert isinstance(error, LoginRefused)
    assert error.reason == "authentication failed"


SESSIONS = text("SELECT count(*) FROM pg_stat_activity WHERE usename = 'worker'")
ENDED = text("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = 'worker'")
