"""`AsyncEffects.once` when its task, or its event loop, ends at the worst moment: what was called is written."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq import AsyncEffects, CallNotApplied
from outboxq.errors import EffectUnknown
from outboxq.postgres import Database
from outboxq.statements import effects as statements
from outboxq.statements.effects import EffectLock
from tests.support.effects import SyncOnce, let_lock_run_out, row
from tests.support.waiting import wait_until

_WAITING = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@asynccontextmanager
async def opened(database: Database) -> AsyncIterator[AsyncEffects]:
    engine = create_async_engine(database.url)
    effects = AsyncEffects(engine)
    yield effects
    await effects.dispose()
    await engine.dispose()


def charge_and_block(blocker: Connection):
    """A call after which nothing can be recorded before `blocker` rolls back."""

    async def call(_provider_key: str) -> str:
        blocker.execute(text("LOCK TABLE outboxq.effect IN EXCLUSIVE MODE"))
        return "done"

    return call


async def until_it_waits(engine: Engine) -> None:
    """Until a statement of ours waits for a lock."""

    def waits() -> bool:
        with engine.connect() as connection:
            return bool(connection.execute(text(f"SELECT count(*) {_WAITING}")).scalar_one())

    await asyncio.to_thread(wait_until, waits, "a statement to wait")


async def let_others_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.first_and_last
@pytest.mark.parametrize("times", [1, 2, 3])
def test_cancellations_during_the_record_do_not_lose_the_result(
    outboxq_database: Database, engine: Engine, times: int
) -> None:
    """A deadline and a stop may both cancel: what the call came to is written all the same."""

    async def main() -> None:
        async with opened(outboxq_database) as effects:
            with engine.connect() as blocker:
                task = asyncio.ensure_future(effects.once("charge", key="1", call=charge_and_block(blocker)))
                await until_it_waits(engine)
                for _ in range(times):
                    task.cancel()
                    await let_others_run()
                assert not task.done()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert row(engine, "1") | {"status": "done", "result": "done"} == row(engine, "1")


def go_away(engine: Engine) -> None:
    """The server takes no record, and says that it is starting, until `come_back`."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TABLE public.away (); CREATE SEQUENCE public.tries; "
                "CREATE FUNCTION public.refuse() RETURNS trigger AS $$ BEGIN "
                "IF to_regclass('public.away') IS NOT NULL THEN PERFORM nextval('public.tries'); "
                "RAISE SQLSTATE '57P03'; END IF; RETURN NEW; END $$ LANGUAGE plpgsql; "
                "CREATE TRIGGER refuse BEFORE UPDATE ON outboxq.effect FOR EACH ROW EXECUTE FUNCTION public.refuse()"
            )
        )


def come_back(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE public.away"))


def tries(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT last_value FROM public.tries WHERE is_called")).scalar() or 0)


@pytest.mark.parametrize("times", [1, 3])
def test_cancellations_while_a_result_waits_for_the_database_do_not_lose_it(
    outboxq_database: Database, engine: Engine, times: int
) -> None:
    """It is tried again for as long as its lock lasts; a cancellation between two tries goes on after that."""
    go_away(engine)

    async def main() -> None:
        async with opened(outboxq_database) as effects:
            task = asyncio.ensure_future(effects.once("charge", key="1", call=lambda _: asyncio.sleep(0, "done")))
            for number in range(1, times + 1):
                await asyncio.to_thread(wait_until, lambda number=number: tries(engine) >= number, "a try")
                task.cancel()
            await let_others_run()
            assert not task.done()
            come_back(engine)
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert row(engine, "1") | {"status": "done", "result": "done"} == row(engine, "1")


def test_a_result_is_recorded_where_every_task_is_cancelled_again_and_again(
    outboxq_database: Database, engine: Engine
) -> None:
    """As after a second Ctrl-C, or by a framework that ends: also the task that writes."""

    async def main() -> None:
        async with opened(outboxq_database) as effects:
            with engine.connect() as blocker:
                task = asyncio.ensure_future(effects.once("charge", key="1", call=charge_and_block(blocker)))
                for _ in range(3):
                    await until_it_waits(engine)
                    for other in asyncio.all_tasks() - {asyncio.current_task()}:
                        other.cancel()
                    await let_others_run()
                assert not task.done()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert row(engine, "1") | {"status": "done", "result": "done"} == row(engine, "1")


class Interrupt:
    """Raises KeyboardInterrupt at the first so many statements that record, as a signal's handler may."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        if self.left and statement.startswith("UPDATE outboxq.effect"):
            self.left -= 1
            raise KeyboardInterrupt


@pytest.mark.parametrize(("times", "recorded"), [(1, "done"), (2, "started")])
def test_an_interruption_during_the_record_goes_on_when_that_is_made(engine: Engine, times: int, recorded: str) -> None:
    """In a thread too, where Ctrl-C raises at any point: recorded once more. A second one ends it."""
    once, interrupt = SyncOnce(engine), Interrupt(times)
    event.listen(Engine, "after_cursor_execute", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            once("charge", key="1", call=lambda _: "done")
    finally:
        event.remove(Engine, "after_cursor_execute", interrupt)
    once.dispose()
    assert row(engine, "1")["status"] == recorded


def test_an_interruption_between_two_tries_does_not_lose_the_result(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the thread waits for the database: tried again, then it goes on."""
    go_away(engine)

    def interrupted(_seconds: float) -> None:
        monkeypatch.undo()
        come_back(engine)
        raise KeyboardInterrupt

    once = SyncOnce(engine)
    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        once("charge", key="1", call=lambda _: "done")
    once.dispose()
    assert row(engine, "1") | {"status": "done", "result": "done"} == row(engine, "1")


def test_a_result_is_recorded_where_the_event_loop_ends_meanwhile(outboxq_database: Database, engine: Engine) -> None:
    """asyncio.run() cancels every task at its end, also the one that writes."""
    tasks: list[asyncio.Task[None]] = []
    async_engine = create_async_engine(outboxq_database.url)
    effects = AsyncEffects(async_engine)
    blocker = engine.connect()

    async def release_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            # By now every other task is cancelled too.
            blocker.close()

    async def main() -> None:
        tasks.append(asyncio.ensure_future(release_at_the_end()))
        tasks.append(asyncio.ensure_future(effects.once("charge", key="1", call=charge_and_block(blocker))))
        await until_it_waits(engine)

    asyncio.run(main())
    assert [task.cancelled() for task in tasks] == [True, True]
    asyncio.run(effects.dispose())
    asyncio.run(async_engine.dispose())
    assert row(engine, "1") | {"status": "done", "result": "done"} == row(engine, "1")


def test_a_cancellation_is_not_forgotten_where_the_claim_fails(outboxq_database: Database, engine: Engine) -> None:
    """The connection is lost just after it: nothing is called any more."""
    calls: list[str] = []

    async def call(provider_key: str) -> None:
        calls.append(provider_key)

    async def main() -> None:
        async with opened(outboxq_database) as effects:
            await effects.once("charge", key="warm", call=lambda _: asyncio.sleep(0))
            with engine.connect() as blocker:
                blocker.execute(text("LOCK TABLE outboxq.effect IN EXCLUSIVE MODE"))
                task = asyncio.ensure_future(effects.once("charge", key="1", call=call))
                await until_it_waits(engine)
                task.cancel()
                await let_others_run()
                blocker.execute(text(f"SELECT pg_terminate_backend(pid) {_WAITING}"))
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert calls == []


@pytest.mark.parametrize("in_threads", [False, True], ids=["async engine", "sync engine"])
def test_a_claim_that_waits_for_a_row_can_be_cancelled(
    outboxq_database: Database, engine: Engine, in_threads: bool
) -> None:
    """The cancellation goes on while another transaction holds the row; nothing is called, and the doubt stands."""
    leave_in_doubt(engine)

    async def main() -> None:
        async with opened(outboxq_database) as of_async:
            effects = AsyncEffects(engine) if in_threads else of_async
            with engine.connect() as holder:
                holder.execute(text("SELECT FROM outboxq.effect FOR UPDATE"))
                task = asyncio.ensure_future(effects.once("charge", key="1", call=lambda _: asyncio.sleep(0)))
                await until_it_waits(engine)
                task.cancel()
                done, _ = await asyncio.wait((task,), timeout=30)
                assert done, "it waits for the other transaction"
                assert task.cancelled()
            if in_threads:
                await effects.dispose()

    asyncio.run(main())
    assert row(engine, "1") | {"status": "started", "in_doubt": False, "attempts": 1} == row(engine, "1")


def raise_not_applied(_provider_key: str) -> None:
    raise CallNotApplied("busy")


@pytest.mark.large
def test_a_row_that_another_transaction_holds_is_waited_for(engine: Engine) -> None:
    """In tries of a second, for as long as it takes where no lock_timeout is set."""
    once, failures = SyncOnce(engine), []

    def count(failure: object) -> None:
        failures.append(failure)

    with pytest.raises(CallNotApplied):
        once("charge", key="1", call=raise_not_applied)
    event.listen(Engine, "handle_error", count)
    try:
        with engine.connect() as holder, ThreadPoolExecutor(1) as threads:
            holder.execute(text("SELECT FROM outboxq.effect FOR UPDATE"))
            caller = threads.submit(once, "charge", key="1", call=lambda _: "done")
            wait_until(lambda: len(failures) >= 2, "two tries to have waited in vain")
            assert not caller.done()
            holder.rollback()
            assert caller.result() == "done"
    finally:
        event.remove(Engine, "handle_error", count)
    once.dispose()


def leave_in_doubt(engine: Engine) -> None:
    """A caller that died calling, whose lock has run out."""
    lock = EffectLock("charge", "1", uuid4())
    with engine.begin() as connection:
        connection.execute(statements.claim(lock, None, uuid4(), timedelta(seconds=30)))
    let_lock_run_out(engine, "1")


async def begin_without_end(effects: AsyncEffects) -> asyncio.Task[object]:
    begun = asyncio.Event()

    async def hang(_provider_key: str) -> Any:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(effects.once("charge", key="1", call=hang, already_applied=hang))
    await begun.wait()
    return task


@pytest.mark.parametrize("moment", ["call", "look-up"])
def test_a_call_whose_event_loop_is_gone_is_given_up(engine: Engine, moment: str) -> None:
    """Nothing can be awaited any more: its lock is kept no longer, and the next caller finds it in doubt."""
    # Transactions in threads: they would still work, and keep the lock for ever.
    effects = AsyncEffects(engine)
    if moment == "look-up":
        leave_in_doubt(engine)
    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(begin_without_end(effects))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    held = [keeper._held for keeper in effects._access.runner._keepers.values()]
    assert [len(holds) for holds in held] == [1]
    try:
        # As the garbage collector does.
        task.get_coro().close()
        assert held == [{}]
    finally:
        for holds in held:
            holds.clear()
        task._log_destroy_pending = False
        asyncio.run(effects.dispose())
    let_lock_run_out(engine, "1")
    once = SyncOnce(engine)
    with pytest.raises(EffectUnknown):
        once("charge", key="1", call=str)
    once.dispose()
