"""One `AsyncEffects` in several event loops: each call keeps its own lock, whichever loop began last."""

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from sqlalchemy import Engine, select

from outboxq import AsyncEffects
from outboxq.tables import effect
from tests.support.waiting import wait_until

LEASE_SECONDS = 1.0


def test_two_event_loops_each_keep_the_locks_of_their_calls(engine: Engine) -> None:
    """Two loops in two threads by turns: both locks go on being extended after the other loop began to call."""
    effects = AsyncEffects(engine, lease_seconds=LEASE_SECONDS)
    calls: Counter[str] = Counter()
    under_way, go_on = {name: threading.Event() for name in "abc"}, threading.Event()

    def until(name: str) -> datetime | None:
        with engine.connect() as connection:
            return connection.scalar(select(effect.c.locked_until).where(effect.c.key == name))

    async def call(provider_key: str, name: str) -> str:
        calls[name] += 1
        under_way[name].set()
        await asyncio.to_thread(go_on.wait, 60)
        return provider_key

    async def once(name: str) -> str:
        return await effects.once("loops", key=name, call=lambda key: call(key, name))

    async def first_loop() -> None:
        a = asyncio.create_task(once("a"))
        await asyncio.to_thread(under_way["b"].wait, 60)
        await asyncio.gather(a, once("c"))

    def second_loop() -> None:
        under_way["a"].wait(60)
        asyncio.run(once("b"))

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(asyncio.run, first_loop()), pool.submit(second_loop)]
        assert under_way["c"].wait(60)
        before = {name: until(name) for name in "abc"}
        for name in "abc":
            wait_until(lambda name=name: until(name) > before[name], f"the lock of {name} to be extended")
        go_on.set()
        for run in runs:
            run.result(60)
    assert calls == {"a": 1, "b": 1, "c": 1}
    with engine.connect() as connection:
        assert set(connection.scalars(select(effect.c.status))) == {"done"}
    asyncio.run(effects.dispose())
