"""procrastinate: the same work at its documented settings. `definitions.py` says where they are from."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from kit import TOUCH, Meter, Options, main
from orm import crediting
from procrastinate import App, PsycopgConnector
from procrastinate.tasks import Task
from psycopg_pool import AsyncConnectionPool

_UPDATE = TOUCH.format("%s")
_ENQUEUE_CHUNK = 5_000


def _app(url: str, connections: int) -> App:
    return App(connector=PsycopgConnector(conninfo=url, min_size=connections, max_size=connections))


async def _nothing(index: int) -> None:
    pass


async def prepare(options: Options) -> None:
    """Install its tables and enqueue in bulk."""
    app = _app(options["url"], 1)
    task = app.task(name="touch")(_nothing)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for start in range(0, options["jobs"], _ENQUEUE_CHUNK):
            chunk = range(start, min(start + _ENQUEUE_CHUNK, options["jobs"]))
            await task.batch_defer_async(*({"index": index} for index in chunk))


@asynccontextmanager
async def work(options: Options, meter: Meter) -> AsyncIterator[None]:
    """A worker with sub-workers, until the block ends."""
    settings = options["settings"]
    app = _app(options["url"], settings["connector_pool"])
    async with AsyncExitStack() as stack:
        size = settings["pool"]
        pool = await stack.enter_async_context(
            AsyncConnectionPool(options["url"], min_size=size, max_size=size, kwargs={"autocommit": True})
        )
        credit = await stack.enter_async_context(crediting(options, "psycopg", meter))
        app.task(name="touch")(_handler(options["scenario"], pool, credit, meter))
        if options["scenario"] == "kill":
            _retry_stalled_jobs(app, options["stalled_seconds"])
        await stack.enter_async_context(app.open_async())
        running = asyncio.create_task(
            app.run_worker_async(
                concurrency=settings["concurrency"],
                delete_jobs=settings["delete_jobs"],
                listen_notify=settings["listen_notify"],
                install_signal_handlers=False,
                update_heartbeat_interval=options["stalled_seconds"] / 3,
            )
        )
        yield
        # This is how it is stopped from code: it ends what runs, then itself.
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _retry_stalled_jobs(app: App, seconds: float) -> None:
    """The periodic task of its guide "Retry stalled jobs", once a second."""

    @app.periodic(cron="* * * * * *")
    @app.task(queueing_lock="retry_stalled_jobs")
    async def retry_stalled_jobs(timestamp: int) -> None:
        for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=seconds):
            await app.job_manager.retry_job(job)


def _handler(
    scenario: str, pool: AsyncConnectionPool, credit: Callable[[int], Awaitable[None]], meter: Meter
) -> Callable[[int], Awaitable[None]]:
    async def noop(index: int) -> None:
        meter.executed += 1

    async def update(index: int) -> None:
        async with pool.connection() as connection:
            await connection.execute(_UPDATE, (index,))
        meter.executed += 1

    async def orm(index: int) -> None:
        await credit(index)

    async def latency(index: int) -> None:
        meter.note_start(index)
        meter.executed += 1

    return {"noop": noop, "update": update, "orm": orm, "kill": orm, "latency": latency}[scenario]


@asynccontextmanager
async def produce(options: Options) -> AsyncIterator[Callable[[int], Awaitable[object]]]:
    """One job a call."""
    app = _app(options["url"], 1)
    task: Task = app.task(name="touch")(_nothing)
    async with app.open_async():
        yield lambda index: task.defer_async(index=index)


main(prepare, work, produce)
