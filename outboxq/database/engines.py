"""The engines that a relay works on: the user's own, or ones made from a URL."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg.pq import Conninfo
from sqlalchemy import URL, Dialect, Engine, NullPool, PoolProxiedConnection, QueuePool, create_engine, event
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import greenlet_spawn

from outboxq.database.driver import DriverConnection
from outboxq.database.settings import OUR_SETTINGS
from outboxq.database.urls import host_names, psycopg_url
from outboxq.errors import ConfigError
from outboxq.forks import cut_off_in_children

T = TypeVar("T")

AnyEngine = str | URL | Engine | AsyncEngine


@dataclass(frozen=True, slots=True)
class Engines:
    """A sync engine, an async one, or both, and which of them were made here."""

    sync: Engine | None
    asynchronous: AsyncEngine | None
    owns_sync: bool
    owns_asynchronous: bool

    def dispose(self) -> None:
        """Close the pools that we made; slots have closed their own connections."""
        if self.owns_sync and self.sync is not None:
            self.sync.dispose()


# A connection whose other end vanished silently is given up after 10 + 3 * 5 seconds, on both sides: the relay
# stops waiting for a server that is gone, and the server frees the jobs of a relay that is gone.
_IDLE_SECONDS, _INTERVAL_SECONDS, _PROBES = 10, 5, 3
_GIVE_UP_MILLISECONDS = (_IDLE_SECONDS + _PROBES * _INTERVAL_SECONDS) * 1000
_CONNECT_SECONDS = 10
_OPEN_SECONDS = 30.0
RELAY_NAME, LISTENER_NAME, EFFECTS_NAME = "outboxq relay", "outboxq listener", "outboxq effects"
RESULTS_NAME = "outboxq results"
# Effects take a connection for a moment, and never while they wait for something else: however many calls there are,
# they take turns.
_POOLED = {"pool_size": 5, "max_overflow": 15, "pool_timeout": 3600.0}
# To read hstore itself, psycopg would look up its type with an operator that PostgreSQL does not have for exactly those
# types: a user's, in a schema of the search path, would be called. SQLAlchemy reads hstore without psycopg.
_DIALECT = {"use_native_hstore": False}

_CLIENT_SETTINGS: Mapping[str, str | int] = {
    # psycopg gives the texts of an SQL_ASCII database as bytes, on which SQLAlchemy fails before we can say why.
    "client_encoding": "UTF8",
    "connect_timeout": _CONNECT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": _IDLE_SECONDS,
    "keepalives_interval": _INTERVAL_SECONDS,
    "keepalives_count": _PROBES,
    # The keepalives are silent while sent data waits for its acknowledgement; this is not.
    "tcp_user_timeout": _GIVE_UP_MILLISECONDS,
}
_SERVER_SETTINGS: Mapping[str, int | str] = {
    "tcp_keepalives_idle": _IDLE_SECONDS,
    "tcp_keepalives_interval": _INTERVAL_SECONDS,
    "tcp_keepalives_count": _PROBES,
    "tcp_user_timeout": _GIVE_UP_MILLISECONDS,
    # A backend that executes does not check its socket: one that waits for a lock would keep the job.
    "client_connection_check_interval": _IDLE_SECONDS * 1000,
}
# A handler that works outside the database leaves its connection idle for as long as it takes; so are spare ones.
_RELAY_SETTINGS: Mapping[str, int | str] = {**_SERVER_SETTINGS, "idle_session_timeout": 0}
# Custom plans: one that was made while the table was small would read all of it, for as long as the connection lives.
_EFFECTS_SETTINGS: Mapping[str, int | str] = {**_SERVER_SETTINGS, "plan_cache_mode": "force_custom_plan"}
# Handlers run on a relay's connections, with the settings of the role and the database.
_SETTINGS_BY_NAME: Mapping[str, Mapping[str, int | str]] = {
    RELAY_NAME: _RELAY_SETTINGS,
    LISTENER_NAME: {**_RELAY_SETTINGS, **OUR_SETTINGS},
    RESULTS_NAME: {**_RELAY_SETTINGS, **OUR_SETTINGS},
    EFFECTS_NAME: {**_EFFECTS_SETTINGS, **OUR_SETTINGS},
}


def make_engine(url: str | URL, *, application_name: str = "outboxq", pooled: bool = False) -> Engine:
    """A psycopg engine that notices a vanished server and hides parameters from error texts; no pool unless `pooled`.

    Raises:
        ConfigError: not a PostgreSQL URL.
    """
    parsed, options = _engine_options(url, application_name, pooled)
    engine = create_engine(parsed, **options)
    _do_without_options_if_refused(engine, parsed)
    return engine


def make_async_engine(url: str | URL, *, application_name: str = "outboxq", pooled: bool = False) -> AsyncEngine:
    """An async engine with the options of `make_engine`.

    Raises:
        ConfigError: not a PostgreSQL URL.
    """
    parsed, options = _engine_options(url, application_name, pooled)
    engine = create_async_engine(parsed, **options)
    _do_without_options_if_refused(engine.sync_engine, parsed)
    return engine


def _engine_options(url: str | URL, application_name: str, pooled: bool) -> tuple[URL, dict[str, Any]]:
    parsed = psycopg_url(url)
    pool: dict[str, Any] = _POOLED if pooled else {"poolclass": NullPool}
    arguments = connect_arguments(parsed, application_name)
    return parsed, {"hide_parameters": True, "connect_args": arguments, **_DIALECT, **pool}


def resolve_engines(given: AnyEngine, async_engine: AsyncEngine | None) -> Engines:
    """Sort the engines that a relay was given into a sync and an async one.

    Raises:
        ConfigError: a driver other than psycopg, or two async engines.
    """
    if isinstance(given, AsyncEngine) and async_engine is not None:
        raise ConfigError("Relay(...) got two async engines: give the sync one first, then async_engine=...")
    if isinstance(given, str | URL):
        made = async_engine or make_async_engine(given, application_name=RELAY_NAME)
        sync = make_engine(given, application_name=RELAY_NAME)
        engines = Engines(sync, made, owns_sync=True, owns_asynchronous=async_engine is None)
    elif isinstance(given, AsyncEngine):
        engines = Engines(None, given, owns_sync=False, owns_asynchronous=False)
    else:
        engines = Engines(given, async_engine, owns_sync=False, owns_asynchronous=False)
    for engine in (engines.sync, engines.asynchronous):
        if engine is not None and engine.dialect.driver not in ("psycopg", "psycopg_async"):
            raise ConfigError(
                f"the relay needs psycopg, and this engine uses {engine.dialect.driver}: make one with "
                "create_engine('postgresql+psycopg://...'). Producers may keep any driver"
            )
    return engines


def connect_arguments(url: URL, application_name: str) -> dict[str, str | int | None]:
    """Our defaults for psycopg, without those that the URL sets itself: SQLAlchemy would let ours win.

    Raises:
        ConfigError: a `prepare_threshold` that is neither a number nor "none".
    """
    defaults: dict[str, str | int | None] = {"application_name": application_name, **_CLIENT_SETTINGS}
    if len(host_names(url)) > 1:
        # Neither a claim nor LISTEN works on a standby.
        defaults["target_session_attrs"] = "read-write"
    chosen = {name: value for name, value in defaults.items() if name not in url.query}
    if "prepare_threshold" in url.query:
        # The only option that psycopg does not take as text.
        chosen["prepare_threshold"] = _prepare_threshold(url.query["prepare_threshold"])
    settings = _SETTINGS_BY_NAME.get(application_name, {**_SERVER_SETTINGS, **OUR_SETTINGS})
    ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
    # A service file may hold options of its own, which these would replace.
    return chosen if "service" in url.query else {**chosen, "options": f"{ours} {_given_options(url)}".strip()}


def _prepare_threshold(given: str | tuple[str, ...]) -> int | None:
    if isinstance(given, str) and given.lower() == "none":
        return None
    if isinstance(given, str) and given.isdecimal():
        return int(given)
    raise ConfigError(f"prepare_threshold in the database URL takes a number, or none behind a pooler, got {given!r}")


def _given_options(url: URL) -> str:
    """The user's own startup options, which follow ours and therefore win: the URL's, else those of PGOPTIONS."""
    in_url = url.query.get("options")
    if in_url is not None:
        return in_url if isinstance(in_url, str) else " ".join(in_url)
    defaults = {option.keyword: option.val for option in Conninfo.get_defaults()}
    return (defaults.get(b"options") or b"").decode()


def _do_without_options_if_refused(engine: Engine, url: URL) -> None:
    """Connect without our startup options if a pooler or an old server refuses them; the user's own stay."""
    refused = threading.Event()

    def connect(dialect: Dialect, _record: object, arguments: list[str], parameters: dict[str, Any]) -> object:
        return _connect(lambda **given: dialect.connect(*arguments, **given), parameters, url, refused)

    event.listen(engine, "do_connect", connect)


def _connect(connect: Callable[..., T], parameters: Mapping[str, Any], url: URL, refused: threading.Event) -> T:
    if not refused.is_set():
        try:
            return connect(**parameters)
        except psycopg.OperationalError as error:
            if not _refuses_options(error):
                raise
    kept = {name: value for name, value in parameters.items() if name != "options"}
    options = _given_options(url)
    theirs = {"options": options} if options else {}
    # A pooler, most likely: with one, a statement that was prepared on one connection is executed on another.
    connection = connect(**{"prepare_threshold": None, **kept, **theirs})
    refused.set()
    return connection


def _refuses_options(error: psycopg.OperationalError) -> bool:
    # A refused connection has no SQLSTATE in libpq. Names are not translated: pgbouncer says "unsupported startup
    # parameter: options", PostgreSQL "unrecognized configuration parameter" and its name.
    text = str(error)
    return "options" in text or any(name in text for name in _RELAY_SETTINGS)


def check_capacity(engine: Engine | AsyncEngine, connections: int) -> None:
    """Refuse a pool that could never serve all slots.

    Raises:
        ConfigError: the pool is too small.
    """
    pool = engine.pool
    if isinstance(pool, QueuePool) and pool._max_overflow >= 0 and pool.size() + pool._max_overflow < connections:  # noqa: SLF001  # no public reading of max_overflow
        raise ConfigError(
            f"the relay's slots need {connections} connections at once, and the engine's pool holds "
            f"{pool.size() + pool._max_overflow}: raise pool_size, or give the relay a URL"  # noqa: SLF001
        )


def listen_connector(
    engines: Engines, listen_url: str | None, loop: Callable[[], asyncio.AbstractEventLoop | None]
) -> Callable[[], DriverConnection]:
    """The function by which the listener opens its connection: by `listen_url`, else through the engine that exists."""
    if listen_url is not None:
        return _url_connector(psycopg_url(listen_url), LISTENER_NAME)

    if engines.sync is not None:
        return _sync_connector(engines.sync.raw_connection)
    assert engines.asynchronous is not None
    return _async_connector(engines.asynchronous.raw_connection, loop)


def _sync_connector(take: Callable[[], PoolProxiedConnection]) -> Callable[[], DriverConnection]:
    """Keep a connection that a pool opens: it is the pool's no longer."""

    def connect() -> DriverConnection:
        raw = take()
        driver = raw.driver_connection
        raw.detach()
        assert isinstance(driver, psycopg.Connection)
        cut_off_in_children(driver)
        driver.rollback()
        return driver

    return connect


def _async_connector(
    take: Callable[[], Awaitable[PoolProxiedConnection]], loop: Callable[[], asyncio.AbstractEventLoop | None]
) -> Callable[[], DriverConnection]:
    """`_sync_connector` for a pool that opens its connections in an event loop; called in another thread."""

    async def connect() -> DriverConnection:
        raw = await take()
        driver = raw.driver_connection
        raw.detach()
        assert isinstance(driver, psycopg.AsyncConnection)
        cut_off_in_children(driver)
        await driver.rollback()
        return driver

    def through_loop() -> DriverConnection:
        running = loop()
        if running is None:
            raise OSError("the event loop does not run")
        return _result_in(running, asyncio.run_coroutine_threadsafe(connect(), running))

    return through_loop


def _result_in(loop: asyncio.AbstractEventLoop, opening: "Future[DriverConnection]") -> DriverConnection:
    """The connection that an event loop opens, within 30 seconds. A loop that is closed before that reports nothing."""
    deadline = time.monotonic() + _OPEN_SECONDS
    while not wait([opening], timeout=0.1).done:
        if loop.is_closed() or time.monotonic() >= deadline:
            opening.cancel()
            raise OSError("the event loop opened no connection")
    return opening.result()


def beside_connector(
    given: AnyEngine, loop: Callable[[], asyncio.AbstractEventLoop | None]
) -> Callable[[], DriverConnection]:
    """The function that opens a connection beside those of a producer: as its engine opens them, or by a URL.

    It takes no place in the engine's pool. Of an engine of another driver than psycopg only the URL is used.

    Raises:
        ConfigError: not a PostgreSQL URL.
    """
    if isinstance(given, str | URL):
        return _url_connector(psycopg_url(given), RESULTS_NAME)
    if given.dialect.driver not in ("psycopg", "psycopg_async"):
        return _url_connector(psycopg_url(given.url), RESULTS_NAME)
    if isinstance(given, AsyncEngine):
        return _async_connector(partial(greenlet_spawn, _take_beside, given.sync_engine), loop)
    return _sync_connector(partial(_take_beside, given))


def _take_beside(engine: Engine) -> PoolProxiedConnection:
    """A connection from a pool for it alone, with the engine's settings, listeners and way to connect."""
    # Calls that wait for a result may hold all connections of the engine's pool.
    return engine.pool.recreate().connect()


def _url_connector(url: URL, application_name: str) -> Callable[[], DriverConnection]:
    """Connect without an engine, whose first queries on a new connection have no time limit."""
    _, in_url = PGDialect_psycopg().create_connect_args(url)  # type: ignore[no-untyped-call]  # SQLAlchemy's own
    parameters = {**in_url, **connect_arguments(url, application_name), "autocommit": True}
    refused = threading.Event()

    def connect() -> DriverConnection:
        driver = _connect(psycopg.connect, parameters, url, refused)
        cut_off_in_children(driver)
        return driver

    return connect
