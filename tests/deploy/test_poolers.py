"""Relays behind pgbouncer, with the settings of `deploy/pgbouncer.ini`, started as docs/deploying.md says."""

import configparser

import pytest
from sqlalchemy import Engine

from outboxq import RelayConfig
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.deploy.files import DEPLOY
from tests.relay.test_wake import wait_until_asleep
from tests.support.ledger import effects, enqueue, rows, waiting
from tests.support.pgbouncer import pgbouncer
from tests.support.waiting import wait_until

# Polls that come too late for the test: what is done in time was told by NOTIFY.
NEVER = 3600.0
# Of the machine, not of the pooler: the helper sets its own.
OF_THE_MACHINE = ("listen_addr", "listen_port", "auth_type", "auth_file", "pool_mode")
HELD = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


def settings() -> dict[str, str]:
    """The lines of the file that do not depend on the machine."""
    parser = configparser.ConfigParser()
    parser.read(DEPLOY / "pgbouncer.ini")
    assert parser["pgbouncer"]["pool_mode"] == "transaction"
    return {name: value for name, value in parser["pgbouncer"].items() if name not in OF_THE_MACHINE}


def work_and_wake(engine: Engine) -> None:
    """A job that is found by the first poll; and one for a relay that sleeps, and polls no more."""
    enqueue(engine, ["first"], both_flavours=False)
    wait_until(lambda: waiting(engine) == 0, "the first job")
    wait_until_asleep(engine, "ledger")
    enqueue(engine, ["second"], both_flavours=False)
    wait_until(lambda: waiting(engine) == 0, "the second job")
    assert effects(engine) == ["first", "second"]


@pytest.mark.wide
def test_a_session_pooler_passes_listen_on(start_relay: StartRelay, engine: Engine, outboxq_database: Database) -> None:
    """Nothing else is needed: a relay that sleeps is woken through the pooler."""
    with (
        pgbouncer(outboxq_database.url, "session", settings()) as url,
        start_relay(engine=url, config=RelayConfig(poll_seconds=NEVER)),
    ):
        work_and_wake(engine)


def test_behind_a_transaction_pooler_a_direct_listen_url_wakes_the_relay(
    start_relay: StartRelay, engine: Engine, outboxq_database: Database
) -> None:
    """The jobs go through the pooler, and LISTEN around it."""
    config = RelayConfig(poll_seconds=NEVER, listen_url=outboxq_database.url)
    with (
        pgbouncer(outboxq_database.url, settings=settings()) as url,
        start_relay(engine=f"{url}?prepare_threshold=none", config=config),
    ):
        work_and_wake(engine)


def test_behind_a_transaction_pooler_a_relay_without_listen_polls(
    start_relay: StartRelay, engine: Engine, outboxq_database: Database
) -> None:
    """A second at most between two polls; it needs no other address."""
    with (
        pgbouncer(outboxq_database.url, settings=settings()) as url,
        start_relay(engine=f"{url}?prepare_threshold=none", config=RelayConfig(listen=False)),
    ):
        enqueue(engine, ["first"], both_flavours=False)
        wait_until(lambda: waiting(engine) == 0, "the first job")
        enqueue(engine, ["second"], both_flavours=False)
        wait_until(lambda: waiting(engine) == 0, "the second job")


def held(engine: Engine) -> int:
    ((number,),) = rows(engine, HELD)
    assert isinstance(number, int)
    return number


@pytest.mark.parametrize("pool", [2, 5])
def test_a_transaction_pool_may_be_smaller_than_the_slots(
    pool: int, start_relay: StartRelay, engine: Engine, outboxq_database: Database
) -> None:
    """Sixteen slots on a pool of two or five: slots wait for their turn at the pooler, and every job is done once."""
    config = RelayConfig(listen=False, slots_per_queue=8)
    names = enqueue(engine, [f"job-{number}" for number in range(40)])
    with (
        pgbouncer(outboxq_database.url, settings={**settings(), "default_pool_size": pool}) as url,
        start_relay(engine=f"{url}?prepare_threshold=none", config=config),
    ):
        wait_until(lambda: waiting(engine) == 0, "the jobs")
        # A connection that the pooler has closed is seen for a moment longer, beside the one in its place.
        wait_until(lambda: held(engine) <= pool, "no more connections than the pool has")
    assert effects(engine) == sorted(names)
