"""oban for Python: the same work at its documented settings. `definitions.py` says where they are from."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvloop
from kit import TOUCH, Meter, Options, main
from oban import Oban, worker
from oban.schema import install
from psycopg_pool import AsyncConnectionPool

_UPDATE = TOUCH.format("%s")
_ENQUEUE_CHUNK = 5_000


@worker(queue="default")
class Touch:
    """The one kind of job; what it does is set when a process starts to work."""

    handle: Callable[[int], Awaitable[None]]

    async def process(self, job: Any) -> None:
        """Hand the index on."""
        await Touch.handle(job.args["index"])


async def prepare(options: Options) -> None:
    """Install its tables and enqueue in bulk."""
    pool = await Oban.create_pool(options["url"])
    await install(pool)
    oban = Oban(pool=pool)
    for start in range(0, options["jobs"], _ENQUEUE_CHUNK):
        chunk = range(start, min(start + _ENQUEUE_CHUNK, options["jobs"]))
        await oban.enqueue_many(Touch.new({"index": index}) for index in chunk)
    await pool.close()


@asynccontextmanager
async def work(options: Options, meter: Meter) -> AsyncIterator[None]:
    """One instance with one queue, until the block ends."""
    settings = options["settings"]
    queue = {"limit": settings["limit"], "debounce_interval": settings["debounce_interval"]}
    async with AsyncExitStack() as stack:
        size = settings["pool"]
        business = await stack.enter_async_context(
            AsyncConnectionPool(options["url"], min_size=size, max_size=size, kwargs={"autocommit": True})
        )
        Touch.handle = staticmethod(_handler(options["scenario"], business, meter))
        pool = await Oban.create_pool(options["url"], max_size=settings["pool_max_size"])
        stack.push_async_callback(pool.close)
        await stack.enter_async_context(Oban(pool=pool, queues={"default": queue}))
        yield


def _handler(scenario: str, pool: AsyncConnectionPool, meter: Meter) -> Callable[[int], Awaitable[None]]:
    async def noop(index: int) -> None:
        meter.executed += 1

    async def update(index: int) -> None:
        async with pool.connection() as connection:
            await connection.execute(_UPDATE, (index,))
        meter.executed += 1

    async def latency(index: int) -> None:
        meter.note_start(index)
        meter.executed += 1

    return {"noop": noop, "update": update, "latency": latency}[scenario]


@asynccontextmanager
async def produce(options: Options) -> AsyncIterator[Callable[[int], Awaitable[object]]]:
    """One job a call."""
    pool = await Oban.create_pool(options["url"])
    oban = Oban(pool=pool)
    yield lambda index: oban.enqueue(Touch.new({"index": index}))
    await pool.close()


uvloop.install()
main(prepare, work, produce)
