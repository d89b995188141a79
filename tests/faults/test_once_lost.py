"""`once` when the database, the answer to a COMMIT or the caller itself goes away at the worst moment."""

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq import AsyncEffects, Effects
from outboxq.errors import EffectInProgress, EffectNotRecorded, EffectUnknown
from outboxq.postgres import Database
from outboxq.testing import CommitProxy, fault_action
from tests.support.effects import let_lock_run_out, row
from tests.support.waiting import PATIENCE, wait_until

DAY = timedelta(days=1)


@pytest.fixture
def proxied(outboxq_database: Database) -> Iterator[tuple[CommitProxy, Effects]]:
    with CommitProxy(outboxq_database.url) as proxy:
        engine = create_engine(proxy.url)
        effects = Effects(engine, lease_seconds=2)
        yield proxy, effects
        effects.dispose()
        engine.dispose()


def call_counting(calls: list[str], result: object = "done"):
    def call(provider_key: str) -> object:
        calls.append(provider_key)
        return result

    return call


@pytest.mark.first_and_last
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("statement", ["INSERT INTO outboxq.effect", "UPDATE outboxq.effect"], ids=["claim", "record"])
def test_a_connection_that_is_cut_at_commit_costs_no_second_call(
    proxied: tuple[CommitProxy, Effects], engine: Engine, moment: str, statement: str
) -> None:
    """Claims and records are repeated on another connection: their token tells that they are the same."""
    proxy, effects = proxied
    calls: list[str] = []
    effects.once("charge", key="warm", call=call_counting([]))
    trap = (proxy.cut_before_commit if moment == "before" else proxy.cut_after_commit)(containing=statement)
    assert effects.once("charge", key="1", call=call_counting(calls)) == "done"
    assert trap.count == 1
    assert len(calls) == 1
    assert row(engine, "1") | {"status": "done", "in_doubt": False, "attempts": 1} == row(engine, "1")


def test_a_result_is_recorded_after_an_outage_that_began_during_the_call(
    proxied: tuple[CommitProxy, Effects], engine: Engine
) -> None:
    """Recording goes on for as long as the lock would last."""
    proxy, effects = proxied

    def call(provider_key: str) -> str:
        proxy.cut()
        return "done"

    assert effects.once("charge", key="1", call=call) == "done"
    assert row(engine, "1")["status"] == "done"


def test_a_result_that_cannot_be_recorded_leaves_the_effect_in_doubt(
    proxied: tuple[CommitProxy, Effects], engine: Engine
) -> None:
    """The caller is told, and nobody else calls before somebody knows."""
    proxy, effects = proxied

    def call(provider_key: str) -> str:
        proxy.close()
        return "done"

    with pytest.raises(EffectNotRecorded):
        effects.once("charge", key="1", call=call)
    calls: list[str] = []
    other = Effects(engine)
    let_lock_run_out(engine, "1")
    with pytest.raises(EffectUnknown):
        other.once("charge", key="1", call=call_counting(calls))
    assert calls == []
    other.dispose()


def test_a_database_that_is_away_at_the_claim_means_no_call(proxied: tuple[CommitProxy, Effects]) -> None:
    """What could not be claimed is not called."""
    proxy, effects = proxied
    proxy.close()
    calls: list[str] = []
    with pytest.raises(Exception, match=r"(?i)connection"):
        effects.once("charge", key="1", call=call_counting(calls))
    assert calls == []


# Cancelled


def run_cancelled(database: Database, point: str, calls: list[str]) -> None:
    """One call of `once` whose task is cancelled when it passes `point`."""

    async def main() -> None:
        engine = create_async_engine(database.url)
        effects = AsyncEffects(engine)
        called = asyncio.Event()

        async def call(provider_key: str) -> str:
            calls.append(provider_key)
            called.set()
            await asyncio.sleep(0 if point != "in-call" else 60)
            return "done"

        task = asyncio.ensure_future(effects.once("charge", key="1", call=call))
        if point == "in-call":
            await called.wait()
            task.cancel()
        with (
            fault_action(lambda name: task.cancel() if name == point else None),
            pytest.raises(asyncio.CancelledError),
        ):
            await task
        await effects.dispose()
        await engine.dispose()

    asyncio.run(main())


def test_a_cancellation_during_the_record_does_not_lose_the_result(outboxq_database: Database, engine: Engine) -> None:
    """What the call came to is written to its end; then the cancellation goes on."""
    calls: list[str] = []
    run_cancelled(outboxq_database, "after-call", calls)
    assert len(calls) == 1
    assert row(engine, "1") | {"status": "done", "result": "done"} == row(engine, "1")


def test_a_cancellation_during_the_call_is_in_doubt(outboxq_database: Database, engine: Engine) -> None:
    """The call may have been applied."""
    calls: list[str] = []
    run_cancelled(outboxq_database, "in-call", calls)
    assert row(engine, "1")["status"] == "unknown"


def test_a_cancellation_before_the_call_is_not(outboxq_database: Database, engine: Engine) -> None:
    """Nothing was called, and that is known."""

    async def main() -> None:
        blocker = engine.connect()
        async_engine = create_async_engine(outboxq_database.url)
        effects = AsyncEffects(async_engine)
        await effects.once("charge", key="warm", call=lambda _: asyncio.sleep(0))
        with blocker.begin():
            # The claim waits for this lock; the cancellation comes meanwhile.
            blocker.execute(text("LOCK TABLE outboxq.effect IN EXCLUSIVE MODE"))
            task = asyncio.ensure_future(effects.once("charge", key="1", call=lambda _: asyncio.sleep(0, calls.append)))
            await asyncio.to_thread(wait_until, lambda: claims_waiting(engine), "the claim to wait")
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        blocker.close()
        await effects.dispose()
        await async_engine.dispose()

    calls: list[str] = []
    asyncio.run(main())
    assert row(engine, "1") | {"status": "retryable", "in_doubt": False} == row(engine, "1")


def claims_waiting(engine: Engine) -> bool:
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%effect%'")
    with engine.connect() as connection:
        return bool(connection.execute(waiting).scalar_one())


def test_a_cancellation_outlives_a_record_that_failed(outboxq_database: Database, engine: Engine) -> None:
    """The database stays away under the record, the cancellation comes meanwhile: it goes on once the lock is over."""

    async def main() -> None:
        with CommitProxy(outboxq_database.url) as proxy:
            async_engine = create_async_engine(proxy.url)
            effects = AsyncEffects(async_engine, lease_seconds=1)
            await effects.once("charge", key="warm", call=lambda _: asyncio.sleep(0))
            trap = proxy.hold_reply(containing="UPDATE outboxq.effect")
            task = asyncio.ensure_future(effects.once("charge", key="1", call=lambda _: asyncio.sleep(0, "done")))
            await asyncio.to_thread(trap.reached.wait, 20)
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.to_thread(proxy.close)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(task), 20)
            await effects.dispose()
            await async_engine.dispose()

    asyncio.run(main())
    assert row(engine, "1")["status"] == "done"


# Stopped

_STALLING = """\
import os, pathlib, signal, sys
from datetime import timedelta
from sqlalchemy import create_engine
from outboxq import Effects
from outboxq.testing import fault_action

url, point, calls = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
stopped = []

def stop(name):
    if name == point and not stopped:
        stopped.append(name)
        os.kill(os.getpid(), signal.SIGSTOP)

def call(provider_key):
    with calls.open("a") as file:
        file.write("stalled\\n")
    return "stalled"

engine = create_engine(url)
effects = Effects(engine, lease_seconds=1)
with fault_action(stop):
    try:
        print("came back with", effects.once("charge", key="1", call=call, provider_remembers=timedelta(days=1)))
    except Exception as error:
        print("failed with", type(error).__name__)
effects.dispose()
engine.dispose()
"""


def run_stalled(database: Database, engine: Engine, point: str, calls: Path) -> str:
    """A process that stands still at `point` until another one has taken over; what it says when it is woken."""
    process = subprocess.Popen(
        [sys.executable, "-c", _STALLING, database.url, point, str(calls)], stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: "T" in Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0], "SIGSTOP")
        effects = Effects(engine)

        def take_over() -> str | None:
            try:
                return effects.once("charge", key="1", call=call_noting(calls), provider_remembers=DAY)
            except EffectInProgress:
                return None

        assert wait_until(take_over, "its lock to run out") == "taken over"
        effects.dispose()
        process.send_signal(signal.SIGCONT)
        return process.communicate(timeout=PATIENCE)[0].strip()
    finally:
        process.kill()
        process.wait()


def call_noting(calls: Path):
    def call(provider_key: str) -> str:
        with calls.open("a") as file:
            file.write("taken over\n")
        return "taken over"

    return call


@pytest.mark.large
def test_a_caller_that_stood_still_after_its_call_cannot_record(
    outboxq_database: Database, engine: Engine, tmp_path: Path
) -> None:
    """Woken after somebody took over: zero rows, which it says; what stands is the other's."""
    calls = tmp_path / "calls"
    assert run_stalled(outboxq_database, engine, "after-call", calls) == "failed with EffectLockLost"
    assert row(engine, "1") | {"status": "done", "result": "taken over"} == row(engine, "1")


@pytest.mark.large
def test_a_caller_that_stood_still_before_its_call_does_not_call(
    outboxq_database: Database, engine: Engine, tmp_path: Path
) -> None:
    """Woken after its lock ran out it looks again, and finds what the other's call came to."""
    calls = tmp_path / "calls"
    assert run_stalled(outboxq_database, engine, "before-call", calls) == "came back with taken over"
    assert calls.read_text() == "taken over\n"


def test_a_lock_that_cannot_be_extended_is_said(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """A warning, without what was called for; the next beat tries again."""
    effects = Effects(engine, lease_seconds=0.5)

    def call(provider_key: str) -> str:
        rename(engine, "effect", "elsewhere")
        wait_until(lambda: "could not be extended" in caplog.text, "the warning")
        rename(engine, "elsewhere", "effect")
        return "done"

    with caplog.at_level(logging.WARNING, logger="outboxq.effects"):
        assert effects.once("charge", key="order-1", call=call) == "done"
    assert "order-1" not in caplog.text
    effects.dispose()


def rename(engine: Engine, table: str, name: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE outboxq.{table} RENAME TO {name}"))
