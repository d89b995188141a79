"""The engines that a relay works on (the user's own, or ones made from a URL), and the connections that it opens."""

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
    """The engines of a relay: a sync one, an async one, or both.

    Attributes:
        sync: The sync engine, or None.
        asynchronous: The async engine, or None.
        owns_sync: True if outboxq made the sync engine from a URL; False if it is the user's.
        owns_asynchronous: The same for the async engine.
    """

    sync: Engine | None
    asynchronous: AsyncEngine | None
    owns_sync: bool
    owns_asynchronous: bool

    def dispose(self) -> None:
        """Close the pool of the sync engine if outboxq made it; a user's engine or an async one stays as it is."""
        if self.owns_sync and self.sync is not None:
            self.sync.dispose()


# A connection whose other end vanished silently ends after 10 + 3 * 5 seconds on both sides: the relay stops waiting
# for a dead server, and the server frees the jobs of a dead relay.
_IDLE_SECONDS, _INTERVAL_SECONDS, _PROBES = 10, 5, 3
_GIVE_UP_MILLISECONDS = (_IDLE_SECONDS + _PROBES * _INTERVAL_SECONDS) * 1000
_CONNECT_SECONDS = 10
_OPEN_SECONDS = 30.0
RELAY_NAME, LISTENER_NAME, EFFECTS_NAME = "outboxq relay", "outboxq listener", "outboxq effects"
RESULTS_NAME = "outboxq results"
# Effects use a connection only for a moment, and never while they wait for something else: many calls take turns.
_POOLED = {"pool_size": 5, "max_overflow": 15, "pool_timeout": 3600.0}
# To read hstore itself, psycopg would look up its type with an operator that PostgreSQL lacks for exactly these types:
# a user's operator in a schema of the search path would be called. SQLAlchemy reads hstore without psycopg.
_DIALECT = {"use_native_hstore": False}

_CLIENT_SETTINGS: Mapping[str, str | int] = {
    # psycopg returns the texts of an SQL_ASCII database as bytes; SQLAlchemy would fail on them before the doctor's
    # check could explain that.
    "client_encoding": "UTF8",
    "connect_timeout": _CONNECT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": _IDLE_SECONDS,
    "keepalives_interval": _INTERVAL_SECONDS,
    "keepalives_count": _PROBES,
    # Keepalives stop while sent data waits for its acknowledgement; this limit then applies.
    "tcp_user_timeout": _GIVE_UP_MILLISECONDS,
}
_SERVER_SETTINGS: Mapping[str, int | str] = {
    "tcp_keepalives_idle": _IDLE_SECONDS,
    "tcp_keepalives_interval": _INTERVAL_SECONDS,
    "tcp_keepalives_count": _PROBES,
    "tcp_user_timeout": _GIVE_UP_MILLISECONDS,
    # An executing backend does not check its socket by itself: one that waits for a lock would keep the job.
    "client_connection_check_interval": _IDLE_SECONDS * 1000,
}
# A handler that works outside the database leaves its connection idle for long; spare connections are idle too.
_RELAY_SETTINGS: Mapping[str, int | str] = {**_SERVER_SETTINGS, "idle_session_timeout": 0}
# Custom plans: a generic plan made while the table was small would read all of it, for the connection's whole life.
_EFFECTS_SETTINGS: Mapping[str, int | str] = {**_SERVER_SETTINGS, "plan_cache_mode": "force_custom_plan"}
# Handlers run on a relay's connections, with the settings of the role and the database.
_SETTINGS_BY_NAME: Mapping[str, Mapping[str, int | str]] = {
    RELAY_NAME: _RELAY_SETTINGS,
    LISTENER_NAME: {**_RELAY_SETTINGS, **OUR_SETTINGS},
    RESULTS_NAME: {**_RELAY_SETTINGS, **OUR_SETTINGS},
    EFFECTS_NAME: {**_EFFECTS_SETTINGS, **OUR_SETTINGS},
}


def make_engine(url: str | URL, *, application_name: str = "outboxq", pooled: bool = False) -> Engine:
    """Make a psycopg engine that hides parameters from error texts, and whose connections notice a vanished server.

    The connections use TCP keepalives, and fail some 25 seconds after the server has vanished. The engine has a pool
    only if `pooled`.

    Raises:
        ConfigError: not a PostgreSQL URL.
    """
    parsed, options = _engine_options(url, application_name, pooled)
    engine = create_engine(parsed, **options)
    _do_without_options_if_refused(engine, parsed)
    return engine


def make_async_engine(url: str | URL, *, application_name: str = "outboxq", pooled: bool = False) -> AsyncEngine:
    """Make an async psycopg engine that hides parameters from error texts, whose connections notice a vanished server.

    Its options are those of `make_engine`: it has a pool only if `pooled`.

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
    """Return the sync and the async engine of a relay that was given one, both, or a URL from which to make them.

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
    """Return outboxq's arguments for `psycopg.connect`, such as time-outs, without those that the URL sets itself.

    SQLAlchemy would let an argument win over the URL. Only two may repeat the URL's: in `options`, outboxq's server
    settings are put in front of the URL's, and `prepare_threshold` is converted to a number.

    Raises:
        ConfigError: a `prepare_threshold` that is neither a number nor "none".
    """
    defaults: dict[str, str | int | None] = {"application_name": application_name, **_CLIENT_SETTINGS}
    if len(host_names(url)) > 1:
        # Neither a claim nor LISTEN works on a standby.
        defaults["target_session_attrs"] = "read-write"
    chosen = {name: value for name, value in defaults.items() if name not in url.query}
    if "prepare_threshold" in url.query:
        # The only option that psycopg does not accept as text.
        chosen["prepare_threshold"] = _prepare_threshold(url.query["prepare_threshold"])
    settings = _SETTINGS_BY_NAME.get(application_name, {**_SERVER_SETTINGS, **OUR_SETTINGS})
    ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
    # A service file may contain options of its own, which these would replace.
    return chosen if "service" in url.query else {**chosen, "options": f"{ours} {_given_options(url)}".strip()}


def _prepare_threshold(given: str | tuple[str, ...]) -> int | None:
    if isinstance(given, str) and given.lower() == "none":
        return None
    if isinstance(given, str) and given.isdecimal():
        return int(given)
    raise ConfigError(f"prepare_threshold in the database URL takes a number, or none behind a pooler, got {given!r}")


def _given_options(url: URL) -> str:
    """Return the user's own startup options (`-c name=value`): those in the URL or, if it has none, in PGOPTIONS.

    Callers put them after outboxq's options, so that the user's win.
    """
    in_url = url.query.get("options")
    if in_url is not None:
        return in_url if isinstance(in_url, str) else " ".join(in_url)
    defaults = {option.keyword: option.val for option in Conninfo.get_defaults()}
    return (defaults.get(b"options") or b"").decode()


def _do_without_options_if_refused(engine: Engine, url: URL) -> None:
    """Make an engine connect without outboxq's startup options if a pooler or an old server refuses them.

    The user's own options stay.
    """
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
    # A pooler, most likely: through one, a statement prepared on one connection is executed on another.
    connection = connect(**{"prepare_threshold": None, **kept, **theirs})
    refused.set()
    return connection


def _refuses_options(error: psycopg.OperationalError) -> bool:
    # libpq reports a refused connection without an SQLSTATE. Names are not translated: pgbouncer says "unsupported
    # startup parameter: options", PostgreSQL "unrecognized configuration parameter" and its name.
    text = str(error)
    return "options" in text or any(name in text for name in _RELAY_SETTINGS)


def check_capacity(engine: Engine | AsyncEngine, connections: int) -> None:
    """Raise if the engine's pool can never have as many connections at once as a relay needs.

    Args:
        connections: The number that the relay needs: for its slots, each of which runs one job at a time, and others.

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
    """Return the function that opens the connection on which a relay listens for notifications.

    It connects to `listen_url` if that is given, otherwise by one of the relay's engines.

    Args:
        loop: Returns the event loop in which an async engine opens its connections, or None if none runs.
    """
    if listen_url is not None:
        return _url_connector(psycopg_url(listen_url), LISTENER_NAME)

    if engines.sync is not None:
        return _sync_connector(engines.sync.raw_connection)
    assert engines.asynchronous is not None
    return _async_connector(engines.asynchronous.raw_connection, loop)


def _sync_connector(take: Callable[[], PoolProxiedConnection]) -> Callable[[], DriverConnection]:
    """Return a function that takes a connection out of a pool for good, for a listening thread.

    Args:
        take: Returns a connection of the pool.
    """

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
    """Return a function that takes a connection out of an async engine's pool for good, for a listening thread.

    The function is called in a thread outside the event loop, and waits there until the loop has opened the connection.

    Args:
        take: Returns a connection of the pool, to be awaited in the loop.
        loop: Returns the running event loop, or None without one.
    """

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
    """Wait in this thread, for at most 30 seconds, for the connection that an event loop opens, and return it.

    Raises:
        OSError: the time has passed, or the loop was closed and will never open the connection.
    """
    deadline = time.monotonic() + _OPEN_SECONDS
    while not wait([opening], timeout=0.1).done:
        if loop.is_closed() or time.monotonic() >= deadline:
            opening.cancel()
            raise OSError("the event loop opened no connection")
    return opening.result()


def beside_connector(
    given: AnyEngine, loop: Callable[[], asyncio.AbstractEventLoop | None]
) -> Callable[[], DriverConnection]:
    """Return a function that opens a connection on which to wait for jobs' results, as the given engine or URL would.

    The connection is not one of the engine's pool, so that waits cannot use the pool up. If the engine's driver is not
    psycopg, psycopg connects to the engine's URL.

    Args:
        loop: Returns the event loop in which an async engine opens its connections, or None if none runs.

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
    """Open a connection outside the engine's pool, with the engine's settings, listeners and way to connect.

    The connection comes from a new pool that is made for it alone.
    """
    # Calls that wait for a result may use up the connections of the engine's pool.
    return engine.pool.recreate().connect()


def _url_connector(url: URL, application_name: str) -> Callable[[], DriverConnection]:
    """Return a function that connects to `url` by psycopg.

    No engine is used, because an engine's first queries would have no time limit.
    """
    _, in_url = PGDialect_psycopg().create_connect_args(url)  # type: ignore[no-untyped-call]  # SQLAlchemy's own
    parameters = {**in_url, **connect_arguments(url, application_name), "autocommit": True}
    refused = threading.Event()

    def connect() -> DriverConnection:
        driver = _connect(psycopg.connect, parameters, url, refused)
        cut_off_in_children(driver)
        return driver

    return connect
