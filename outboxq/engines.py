"""The engines that a relay works on: the user's own, or ones made from a URL."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import psycopg
from sqlalchemy import URL, Engine, NullPool, QueuePool, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outboxq.config import psycopg_url
from outboxq.driver import DriverConnection
from outboxq.errors import ConfigError

AnyEngine = str | URL | Engine | AsyncEngine


@dataclass(frozen=True, slots=True)
class Engines:
    """A sync engine, an async one, or both."""

    sync: Engine | None
    asynchronous: AsyncEngine | None
    owned: bool

    def dispose(self) -> None:
        """Close the pools that we made; slots have closed their own connections."""
        if self.owned and self.sync is not None:
            self.sync.dispose()


def make_engine(url: str | URL, *, application_name: str = "outboxq") -> Engine:
    """A psycopg engine without a pool and with parameters hidden from error texts.

    Raises:
        ConfigError: not a PostgreSQL URL.
    """
    parsed = psycopg_url(url)
    arguments = _connect_arguments(parsed, application_name)
    return create_engine(parsed, poolclass=NullPool, hide_parameters=True, connect_args=arguments)


def resolve_engines(given: AnyEngine, async_engine: AsyncEngine | None) -> Engines:
    """Make sense of what a relay was given.

    Raises:
        ConfigError: a driver other than psycopg, or two async engines.
    """
    if isinstance(given, str | URL):
        parsed = psycopg_url(given)
        arguments = _connect_arguments(parsed, "outboxq relay")
        return Engines(
            make_engine(parsed, application_name="outboxq relay"),
            async_engine
            or create_async_engine(parsed, poolclass=NullPool, hide_parameters=True, connect_args=arguments),
            owned=True,
        )
    if isinstance(given, AsyncEngine):
        if async_engine is not None:
            raise ConfigError("Relay(...) got two async engines: give the sync one first, then async_engine=...")
        engines = Engines(None, given, owned=False)
    else:
        engines = Engines(given, async_engine, owned=False)
    for engine in (engines.sync, engines.asynchronous):
        if engine is not None and engine.dialect.driver not in ("psycopg", "psycopg_async"):
            raise ConfigError(
                f"the relay needs psycopg, and this engine uses {engine.dialect.driver}: make one with "
                "create_engine('postgresql+psycopg://...'). Producers may keep any driver"
            )
    return engines


def _connect_arguments(url: URL, application_name: str) -> dict[str, str | int]:
    """Our defaults, without what the URL itself says: SQLAlchemy would let them win over it."""
    defaults: dict[str, str | int] = {"application_name": application_name, "connect_timeout": 10}
    return {name: value for name, value in defaults.items() if name not in url.query}


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
    """How the listener opens its connection: by `listen_url`, else through whichever engine there is."""

    def by_url() -> DriverConnection:
        assert listen_url is not None
        url = psycopg_url(listen_url).set(drivername="postgresql")
        arguments = _connect_arguments(url, "outboxq listener")
        return psycopg.connect(url.render_as_string(hide_password=False), autocommit=True, **arguments)  # type: ignore[arg-type]  # libpq's own

    def by_engine() -> DriverConnection:
        assert engines.sync is not None
        raw = engines.sync.raw_connection()
        driver = raw.driver_connection
        raw.detach()
        assert isinstance(driver, psycopg.Connection)
        driver.rollback()
        return driver

    async def by_async_engine() -> DriverConnection:
        assert engines.asynchronous is not None
        raw = await engines.asynchronous.raw_connection()
        driver = raw.driver_connection
        raw.detach()
        assert isinstance(driver, psycopg.AsyncConnection)
        await driver.rollback()
        return driver

    def through_loop() -> DriverConnection:
        running = loop()
        if running is None:
            raise OSError("the relay's event loop is not running yet")
        return asyncio.run_coroutine_threadsafe(by_async_engine(), running).result(timeout=30)

    if listen_url is not None:
        return by_url
    return by_engine if engines.sync is not None else through_loop
