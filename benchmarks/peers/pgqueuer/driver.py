"""pgqueuer: the same work at its documented settings. `definitions.py` says where they are from."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import asyncpg
import uvloop
from kit import TOUCH, Meter, Options, main
from orm import crediting
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

_UPDATE = TOUCH.format("$1")
_ENQUEUE_CHUNK = 10_000


async def prepare(options: Options) -> None:
    """Install its tables with the autovacuum settings that it recommends, and enqueue in bulk."""
    connection = await asyncpg.connect(options["url"])
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()
    for start in range(0, options["jobs"], _ENQUEUE_CHUNK):
        payloads = [str(index).encode() for index in range(start, min(start + _ENQUEUE_CHUNK, options["jobs"]))]
        await queries.enqueue(["touch"] * len(payloads), payloads, [0] * len(payloads))
    await connection.close()


@asynccontextmanager
async def work(options: Options, meter: Meter) -> AsyncIterator[None]:
    """Queue managers with a connection of their own each, until the block ends."""
    settings = options["settings"]
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(
            asyncpg.create_pool(options["url"], min_size=settings["pool"], max_size=settings["pool"])
        )
        credit = await stack.enter_async_context(crediting(options, "asyncpg", meter))
        handler = _handler(options["scenario"], pool, credit, meter)
        managers = []
        for _ in range(settings["managers"]):
            manager = PgQueuer(AsyncpgDriver(await asyncpg.connect(options["url"])))
            manager.entrypoint("touch")(handler)
            managers.append(manager)
        running = [
            asyncio.create_task(
                manager.run(
                    batch_size=settings["batch_size"],
                    max_concurrent_tasks=settings["max_concurrent_tasks"],
                    dequeue_timeout=timedelta(seconds=options["stalled_seconds"]),
                    heartbeat_timeout=timedelta(seconds=options["stalled_seconds"]),
                )
            )
            for manager in managers
        ]
        yield
        for manager in managers:
            manager.shutdown.set()
        await asyncio.gather(*running)


def _handler(
    scenario: str, pool: asyncpg.Pool, credit: Callable[[int], Awaitable[None]], meter: Meter
) -> Callable[[Job], Awaitable[None]]:
    async def noop(job: Job) -> None:
        meter.executed += 1

    async def update(job: Job) -> None:
        await pool.execute(_UPDATE, int(job.payload))
        meter.executed += 1

    async def orm(job: Job) -> None:
        await credit(int(job.payload))

    async def latency(job: Job) -> None:
        meter.note_start(int(job.payload))
        meter.executed += 1

    return {"noop": noop, "update": update, "orm": orm, "kill": orm, "latency": latency}[scenario]


@asynccontextmanager
async def produce(options: Options) -> AsyncIterator[Callable[[int], Awaitable[object]]]:
    """One job a call."""
    connection = await asyncpg.connect(options["url"])
    queries = Queries(AsyncpgDriver(connection))
    yield lambda index: queries.enqueue("touch", str(index).encode())
    await connection.close()


uvloop.install()
main(prepare, work, produce)
