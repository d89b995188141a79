"""`once(..., ask_first=True)`: asked before the first call too, for what this database may have forgotten."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Applied, AsyncContext, CallNotApplied, Context, Jobs, NotApplied, OutboxSession, Unknown
from outboxq.errors import ConfigError, EffectUnknown
from tests.support.effects import AsyncOnce, SyncOnce, row

DAY = timedelta(days=1)


@pytest.fixture(params=[SyncOnce, AsyncOnce], ids=["sync", "async"])
def once(request: pytest.FixtureRequest, engine: Engine) -> Iterator[SyncOnce | AsyncOnce]:
    once = request.param(engine)
    yield once
    once.dispose()


class Provider:
    """Does as it is told, once for each call, and can be asked."""

    def __init__(self) -> None:
        self.charges: list[str] = []
        self.asked = 0

    def charge(self, provider_key: str) -> str:
        self.charges.append(provider_key)
        return f"charge {len(self.charges)}"

    def look_up(self, provider_key: str) -> Applied[str] | NotApplied:
        self.asked += 1
        return Applied("charge 1") if provider_key in self.charges else NotApplied()

    def options(self, **more: object) -> dict[str, Any]:
        return {"key": "1", "call": self.charge, "already_applied": self.look_up, **more}


def lose(engine: Engine) -> None:
    """As a failover to an asynchronous standby, or a backup that is restored, does with the last commits."""
    with engine.begin() as connection:
        assert connection.execute(text("DELETE FROM outboxq.effect")).rowcount == 1


def put_back(engine: Engine, earlier: dict[str, Any]) -> None:
    """The row as it was earlier, which is what a backup has."""
    columns = ("status", "in_doubt", "result", "error", "lock_token", "locked_until", "expires_at")
    with engine.begin() as connection:
        changes = ", ".join(f"{name} = :{name}" for name in columns)
        connection.execute(text(f"UPDATE outboxq.effect SET {changes}"), {name: earlier[name] for name in columns})


def test_what_is_not_applied_is_called_and_replayed_without_asking_again(once) -> None:
    """One look-up and one call; a replay costs neither."""
    provider = Provider()
    assert [once("charge", **provider.options(ask_first=True)) for _ in range(3)] == ["charge 1"] * 3
    assert (provider.asked, len(provider.charges)) == (1, 1)


@pytest.mark.parametrize("ask_first", [False, True])
def test_a_call_whose_row_is_lost_is_made_again_unless_asked_for_first(once, engine: Engine, ask_first: bool) -> None:
    """The database forgot that it was made; the other side did not."""
    provider = Provider()
    once("charge", **provider.options(ask_first=ask_first))
    lose(engine)
    result = once("charge", **provider.options(ask_first=ask_first))
    assert (result, len(provider.charges)) == (("charge 1", 1) if ask_first else ("charge 2", 2))
    assert row(engine, "1") | {"status": "done", "result": result} == row(engine, "1")


def test_a_row_that_is_older_than_the_call_is_asked_for_too(once, engine: Engine) -> None:
    """It says that nothing was applied, which was true when the backup was made."""
    provider = Provider()

    def busy(_provider_key: str) -> str:
        raise CallNotApplied("busy")

    with pytest.raises(CallNotApplied):
        once("charge", **provider.options(ask_first=True, call=busy))
    earlier = row(engine, "1")
    once("charge", **provider.options(ask_first=True))
    put_back(engine, earlier)
    assert once("charge", **provider.options(ask_first=True)) == "charge 1"
    assert len(provider.charges) == 1


def test_a_look_up_that_cannot_tell_before_the_first_call_leaves_it_to_an_operator(once, engine: Engine) -> None:
    """Also where the provider honours keys: since when it would have to is unknown."""
    provider = Provider()
    options = provider.options(ask_first=True, already_applied=lambda _: Unknown(), provider_remembers=DAY)
    for _ in range(2):
        with pytest.raises(EffectUnknown, match="does not know of"):
            once("charge", **options)
    assert provider.charges == []
    assert row(engine, "1")["status"] == "unknown"


def test_a_look_up_that_raises_before_the_first_call_is_made_again(once, engine: Engine) -> None:
    """Nothing was called, so nothing is in doubt; the next caller asks first."""
    provider = Provider()

    def fail(_provider_key: str) -> NotApplied:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        once("charge", **provider.options(ask_first=True, already_applied=fail))
    assert row(engine, "1") | {"status": "retryable", "in_doubt": False} == row(engine, "1")
    assert once("charge", **provider.options(ask_first=True)) == "charge 1"
    assert (provider.asked, len(provider.charges)) == (1, 1)


def test_asking_first_takes_a_look_up(once) -> None:
    """Refused before anything is called."""
    provider = Provider()
    with pytest.raises(ConfigError, match="already_applied"):
        once("charge", key="1", call=provider.charge, ask_first=True)
    with pytest.raises(ConfigError, match="ask_first"):
        once("charge", **provider.options(ask_first="yes"))
    assert provider.charges == []


def test_handlers_ask_first(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., object]
) -> None:
    """The contexts of both flavours have it."""
    jobs, provider = Jobs(), Provider()

    @jobs.handler(queue="sync", claim="lease")
    def charge(ctx: Context) -> None:
        ctx.once("charge", **provider.options(key="sync", ask_first=True))

    @jobs.handler(queue="async", claim="lease")
    async def charge_async(ctx: AsyncContext) -> None:
        await ctx.once(
            "charge",
            key="async",
            call=lambda key: asyncio.sleep(0, provider.charge(key)),
            already_applied=lambda key: asyncio.sleep(0, provider.look_up(key)),
            ask_first=True,
        )

    for _ in range(2):
        with sessions.begin() as session:
            session.add_job(charge)
            session.add_job(charge_async)
        drain(jobs)
        with engine.begin() as connection:
            assert connection.execute(text("DELETE FROM outboxq.effect")).rowcount == 2
    assert (provider.asked, len(provider.charges)) == (4, 2)
