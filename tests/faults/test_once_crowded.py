"""`once` where callers that wait for one effect's row hold all connections that claims may have."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq import AsyncEffects, CallNotApplied, Effects
from outboxq.postgres import Database
from tests.support.effects import SyncOnce, row
from tests.support.waiting import PATIENCE, wait_until

SMALL = {"pool_size": 2, "max_overflow": 0, "pool_timeout": 0.2}
CROWD = 4


def leave_retryable(engine: Engine, key: str) -> None:
    """A claim of this key locks its row."""
    once = SyncOnce(engine)

    def refuse(_provider_key: str) -> None:
        raise CallNotApplied("busy")

    with pytest.raises(CallNotApplied):
        once("charge", key=key, call=refuse)
    once.dispose()


def wait_for_two(engine: Engine) -> None:
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )

    def both_wait() -> bool:
        with engine.connect() as connection:
            return bool(connection.execute(waiting).scalar_one() == SMALL["pool_size"])

    wait_until(both_wait, "two claims to wait")


LOCK = text("SELECT FROM outboxq.effect WHERE key = 'contested' FOR UPDATE")


def test_a_result_is_recorded_while_all_connections_for_claims_wait_for_a_row(
    outboxq_database: Database, engine: Engine
) -> None:
    """Records have connections of their own: what another call came to is written at once."""
    leave_retryable(engine, "contested")
    small = create_engine(outboxq_database.url, **SMALL)
    effects, called, answered = Effects(small, lease_seconds=1), threading.Event(), threading.Event()

    def call(_provider_key: str) -> str:
        called.set()
        assert answered.wait(PATIENCE)
        return "done"

    def contest() -> None:
        with suppress(Exception):
            effects.once("charge", key="contested", call=str)

    with ThreadPoolExecutor(CROWD + 1) as threads, engine.connect() as operator:
        calling = threads.submit(effects.once, "charge", key="other", call=call)
        assert called.wait(PATIENCE)
        operator.execute(LOCK)
        for _ in range(CROWD):
            threads.submit(contest)
        wait_for_two(engine)
        answered.set()
        assert calling.result(PATIENCE) == "done"
        operator.rollback()
    assert row(engine, "other")["status"] == "done"
    effects.dispose()
    small.dispose()


def test_so_is_that_of_an_async_caller(outboxq_database: Database, engine: Engine) -> None:
    """The same in an event loop."""
    leave_retryable(engine, "contested")

    async def main() -> None:
        small = create_async_engine(outboxq_database.url, **SMALL)
        effects, called, answered = AsyncEffects(small, lease_seconds=1), asyncio.Event(), asyncio.Event()

        async def call(_provider_key: str) -> str:
            called.set()
            await answered.wait()
            return "done"

        with engine.connect() as operator:
            calling = asyncio.ensure_future(effects.once("charge", key="other", call=call))
            await asyncio.wait_for(called.wait(), PATIENCE)
            operator.execute(LOCK)
            crowd = [
                asyncio.ensure_future(effects.once("charge", key="contested", call=lambda _: asyncio.sleep(0)))
                for _ in range(CROWD)
            ]
            await asyncio.to_thread(wait_for_two, engine)
            answered.set()
            assert await asyncio.wait_for(calling, PATIENCE) == "done"
            operator.rollback()
        await asyncio.gather(*crowd, return_exceptions=True)
        await effects.dispose()
        await small.dispose()

    asyncio.run(main())
    assert row(engine, "other")["status"] == "done"
