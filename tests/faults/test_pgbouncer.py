"""Behind pgbouncer in transaction mode: no LISTEN, no prepared statements, and every job once."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig
from outboxq.database.driver import PreparedStatements
from outboxq.database.engines import make_engine
from outboxq.events import DatabaseLost, JobDied, JobRetried
from outboxq.handlers.handler import AnyHandler
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from tests.conftest import StartRelay
from tests.support import faulty
from tests.support.ledger import dead, enqueue, ledger, waiting
from tests.support.matrices import diagonal
from tests.support.pgbouncer import pgbouncer
from tests.support.urls import libpq_url
from tests.support.waiting import wait_until

JOBS = 200
# What is said of a statement that was prepared in another session, or had its session taken away half-way.
REFUSED = ("DuplicatePreparedStatement", "InvalidSqlStatementName", "ProtocolViolation")
POOLED = RelayConfig(batch_size=5, listen=False, slots_per_queue=4)


# What it does with startup options by default, and what many are told to configure.
STARTUP = pytest.mark.parametrize("startup", ["refuses-options", "ignores-options"])


@pytest.fixture
def pooled_url(startup: str, outboxq_database: Database) -> Iterator[str]:
    settings = {"ignore_startup_parameters": "options"} if startup == "ignores-options" else {}
    # Fewer server connections than slots, so that transactions of one session really change connections.
    with pgbouncer(outboxq_database.url, settings={"default_pool_size": 3, **settings}) as url:
        yield url


@pytest.mark.large
@STARTUP
def test_a_relay_with_a_url_does_every_job_once(start_relay: StartRelay, engine: Engine, pooled_url: str) -> None:
    """Eight slots on three server connections, sync and async handlers, batches of five: one effect each."""
    names = enqueue(engine, (f"job-{number}" for number in range(JOBS)))
    with start_relay(engine=f"{pooled_url}?prepare_threshold=none", config=POOLED) as relay:
        wait_until(lambda: waiting(engine) == 0, "the queue to empty")
    assert ledger(engine) == dict.fromkeys(names, 1)
    assert dead(engine) == 0
    assert not relay.of(JobRetried)
    assert not relay.of(DatabaseLost)


@pytest.mark.parametrize("startup", ["refuses-options", pytest.param("ignores-options", marks=pytest.mark.large)])
def test_a_relay_with_the_users_own_engines_does_every_job_once(
    start_relay: StartRelay, engine: Engine, pooled_url: str
) -> None:
    """As the documentation tells users to make them: prepare_threshold=None."""
    names = enqueue(engine, (f"job-{number}" for number in range(JOBS)))
    arguments = {"prepare_threshold": None}
    own = create_engine(pooled_url, connect_args=arguments, pool_size=10)
    own_async = create_async_engine(pooled_url, connect_args=arguments, pool_size=10)
    with start_relay(engine=own, async_engine=own_async, config=POOLED) as relay:
        wait_until(lambda: waiting(engine) == 0, "the queue to empty")
    own.dispose()
    assert ledger(engine) == dict.fromkeys(names, 1)
    assert dead(engine) == 0
    assert not relay.of(JobRetried)


@pytest.mark.large
@diagonal(
    STARTUP,
    pytest.mark.parametrize(
        "kinds",
        [(faulty.work, faulty.work_async), (faulty.work_leased, faulty.work_leased_async)],
        ids=["transaction", "lease"],
    ),
    pytest.mark.parametrize("arguments", [{"prepare_threshold": 1_000_000}, {}], ids=["only-claims", "all-statements"]),
)
def test_a_relay_that_knows_of_no_pooler_loses_and_doubles_nothing(
    start_relay: StartRelay,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    pooled_url: str,
    kinds: tuple[AnyHandler, ...],
    arguments: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes its sessions for pinned, prepares and listens. A claim that meets another session is sent again as text;
    a handler's statement that does fails its attempt, on the record."""
    names = [f"job-{number}" for number in range(JOBS)]
    with sessions.begin() as session:
        session.add_jobs(kinds[number % 2].job(name=name) for number, name in enumerate(names))
    refused: list[bool] = []
    failed = PreparedStatements.failed
    monkeypatch.setattr(PreparedStatements, "failed", lambda *given: refused.append(failed(*given)) or refused[-1])
    own = create_engine(pooled_url, connect_args=arguments, pool_size=20)
    own_async = create_async_engine(pooled_url, connect_args=arguments, pool_size=20)
    config = replace(POOLED, listen=True, poll_seconds=0.2, lease_seconds=3)
    with start_relay(faulty.jobs, engine=own, async_engine=own_async, config=config) as relay:
        wait_until(lambda: waiting(engine) == 0, "the queue to empty")
    own.dispose()
    done = Counter(effect.partition(":")[0] for effect in ledger(engine).elements())
    died = {json.loads(event.job.args)["name"] for event in relay.of(JobDied)}
    assert (set(done.values()), set(done) & died, set(done) | died) == ({1}, set(), set(names))
    errors = {event.error_type for event in relay.of(JobRetried)}
    assert errors <= ({f"psycopg.errors.{name}" for name in REFUSED} if not arguments else set())
    assert any(refused)
    assert dead(engine) == len(died)


def test_nothing_that_a_relay_sets_stays_on_the_poolers_connections(
    start_relay: StartRelay, engine: Engine, outboxq_database: Database
) -> None:
    """The next client of a server connection finds its settings as the server has them."""
    names = ["plan_cache_mode", "datestyle", "default_transaction_isolation", "lock_timeout", "statement_timeout"]
    names += ["idle_in_transaction_session_timeout", "tcp_keepalives_idle", "client_connection_check_interval"]
    query = text("SELECT name, setting FROM pg_settings WHERE name = ANY(:names)")
    with pgbouncer(outboxq_database.url, settings={"default_pool_size": 1}) as url:
        stranger = create_engine(url, connect_args={"prepare_threshold": None})
        with stranger.connect() as connection:
            before = connection.execute(query, {"names": names}).all()
        enqueue(engine, ["one", "two"], both_flavours=False)
        with start_relay(engine=f"{url}?prepare_threshold=none", config=RelayConfig(slots_per_queue=1, listen=False)):
            wait_until(lambda: waiting(engine) == 0, "the queue to empty")
        with stranger.connect() as connection:
            after = connection.execute(query, {"names": names}).all()
        stranger.dispose()
    assert after == before


def test_startup_options_are_left_out_where_a_pooler_refuses_them(outboxq_database: Database) -> None:
    """pgbouncer refuses a session with options; ours are a precaution, so the engine connects without them."""
    with pgbouncer(outboxq_database.url) as url:
        with pytest.raises(psycopg.OperationalError, match="unsupported startup parameter: options"):
            psycopg.connect(libpq_url(url), options="-c tcp_keepalives_idle=10")
        pooled = make_engine(url)
        for _ in range(2):
            with pooled.connect() as connection:
                # Over psycopg's threshold: nothing is prepared either.
                for _ in range(10):
                    assert connection.execute(text("SELECT 1")).scalar_one() == 1
                assert connection.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar_one() == 0
        pooled.dispose()


@pytest.mark.large
@pytest.mark.relay_limits(RelayLimits(hearing_seconds=1.0))
@diagonal(STARTUP, pytest.mark.parametrize("listens", ["through the pooler", "directly"]))
def test_a_relay_says_once_that_notifications_do_not_arrive(
    start_relay: StartRelay,
    engine: Engine,
    pooled_url: str,
    outboxq_database: Database,
    caplog: pytest.LogCaptureFixture,
    listens: str,
) -> None:
    """Behind a transaction pooler it polls, and names both ways out; with a direct URL to listen on, it hears."""
    direct = outboxq_database.url if listens == "directly" else None
    config = replace(POOLED, listen=True, listen_url=direct, poll_seconds=5)
    with (
        caplog.at_level("DEBUG", logger="outboxq.listener"),
        start_relay(engine=f"{pooled_url}?prepare_threshold=none", config=config),
    ):
        if listens == "directly":
            wait_until(lambda: _sleep_flags(engine) > 0, "the relay to sleep under its flags")
        else:
            wait_until(lambda: _warnings(caplog), "the warning")
        names = enqueue(engine, ["one", "two"])
        wait_until(lambda: waiting(engine) == 0, "the queue to empty")
        if listens != "directly":
            assert _sleep_flags(engine) == 0
    assert ledger(engine) == dict.fromkeys(names, 1)
    said = _warnings(caplog)
    assert len(said) == (listens != "directly")
    assert all("polls, up to 1 s apart" in each and "--listen-url" in each and "--no-listen" in each for each in said)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def _sleep_flags(engine: Engine) -> int:
    with engine.connect() as connection:
        query = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid::int = hashtext('outboxq_outboxq') "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return connection.execute(text(query)).scalar_one()
