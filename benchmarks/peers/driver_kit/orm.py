"""The ORM handler of the Python drivers: an entity by its key, changed in a session and a transaction of its own."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kit import Meter, Options
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from benchmarks.apps.accounts import Account


@asynccontextmanager
async def crediting(options: Options, driver: str, meter: Meter) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """The handler, which is called with the account's number, over a pool of connections by this driver."""
    url = make_url(options["url"]).set(drivername=f"postgresql+{driver}")
    engine = create_async_engine(url, pool_size=options["settings"]["pool"], max_overflow=0)
    sessions = async_sessionmaker(engine, expire_on_commit=False)

    async def credit(index: int) -> None:
        async with sessions() as session:
            account = await session.get_one(Account, index)
            account.balance += options["cents"]
            await session.commit()
        meter.executed += 1

    yield credit
    await engine.dispose()
