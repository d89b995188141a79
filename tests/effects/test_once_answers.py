"""`once` and what the call, its look-up or the user's own code answers: never guessed, never lost, never quoted."""

import asyncio
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Context, Effects, Jobs, NotApplied, OutboxSession, Unknown
from outboxq.errors import ArgumentError, EffectInProgress, EffectUnknown, ResultNotStorable, SchemaError
from tests.support.effects import AsyncOnce, SyncOnce, let_lock_run_out, row
from tests.support.waiting import wait_until

DAY = timedelta(days=1)
SECRET = "4242424242424242"


@pytest.fixture(params=[SyncOnce, AsyncOnce], ids=["sync", "async"])
def once(request: pytest.FixtureRequest, engine: Engine) -> Iterator[SyncOnce | AsyncOnce]:
    once = request.param(engine)
    yield once
    once.dispose()


class Scripted:
    """Counts the calls; each raises the error, or runs and gives the answer."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.keys: list[str] = []

    def __call__(self, provider_key: str) -> Any:
        self.keys.append(provider_key)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer() if callable(self.answer) else self.answer


# Results


@pytest.mark.first_and_last
@pytest.mark.parametrize("value", [1e22, 1e16, -0.0, {"bb": 1, "a": 2}], ids=str)
def test_the_first_caller_gets_what_a_replay_gives_to_the_letter(once, value: object) -> None:
    """Types and order included: jsonb writes numbers and objects in its own way."""
    first = once("charge", key="1", call=lambda _: value)
    assert repr(first) == repr(once("charge", key="1", call=lambda _: None))


class Odd:
    """Looks like a model that writes itself, and raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def model_dump(self, **_: object) -> object:
        raise self.error


@pytest.mark.first_and_last
@pytest.mark.parametrize("error", [AttributeError(SECRET), ValueError(SECRET), TypeError(SECRET), RuntimeError(SECRET)])
def test_a_result_whose_serializer_raises_is_done_and_not_quoted(once, engine: Engine, error: Exception) -> None:
    """Whatever it raises: it was called, which is recorded without a word of that error."""
    call = Scripted(Odd(error))
    for _ in range(2):
        with pytest.raises(ResultNotStorable) as refused:
            once("charge", key="1", call=call)
        assert SECRET not in "".join(traceback.format_exception(refused.value))
    assert len(call.keys) == 1
    recorded = row(engine, "1")
    assert recorded | {"status": "done", "result": None} == recorded
    assert type(error).__name__ in recorded["error"]
    assert SECRET not in recorded["error"]


def test_a_payload_whose_serializer_raises_is_not_quoted(once) -> None:
    """Refused before the call, in words of our own."""
    call = Scripted(1)
    with pytest.raises(ArgumentError, match="refused by ValueError") as refused:
        once("charge", key="1", call=call, payload=Odd(ValueError(SECRET)))
    assert SECRET not in str(refused.value)
    assert call.keys == []


# Doubt


def test_a_task_that_runs_is_not_taken_for_a_call_that_never_began(engine: Engine) -> None:
    """A sync caller that is given one cannot know what it will do: unknown, and not called again."""
    effects, charged = Effects(engine), []

    async def charge(provider_key: str) -> None:
        charged.append(provider_key)

    async def main() -> None:
        call = Scripted(lambda: asyncio.ensure_future(charge(call.keys[-1])))
        for _ in range(2):
            with pytest.raises(EffectUnknown):
                effects.once("charge", key="1", call=call)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(main())
    effects.dispose()
    assert len(charged) == 1
    assert row(engine, "1")["status"] == "unknown"


def test_a_coroutine_that_began_is_not_taken_for_one_that_did_not(engine: Engine) -> None:
    """It has done its first steps: what they came to nobody knows."""
    effects = Effects(engine)

    async def charge() -> None:
        await asyncio.sleep(0)

    begun = charge()
    begun.send(None)
    with pytest.raises(EffectUnknown):
        effects.once("charge", key="1", call=lambda _: begun)
    begun.close()
    effects.dispose()


def test_a_classify_that_raises_leaves_the_call_in_doubt(once, engine: Engine) -> None:
    """Nobody could say what the call came to: unknown, and the call's own error is the cause."""

    def classify(error: Exception) -> Any:
        raise KeyError(SECRET)

    call = Scripted(TimeoutError())
    with pytest.raises(EffectUnknown) as unknown:
        once("charge", key="1", call=call, classify=classify)
    assert isinstance(unknown.value.__cause__, TimeoutError)
    assert SECRET not in "".join(traceback.format_exception(unknown.value))
    assert row(engine, "1")["status"] == "unknown"


def test_a_classify_that_raises_is_tried_again_where_the_provider_honours_keys(once, engine: Engine) -> None:
    """As any ambiguous error is: with the same key."""

    def classify(error: Exception) -> Any:
        raise KeyError

    with pytest.raises(TimeoutError):
        once("charge", key="1", call=Scripted(TimeoutError()), classify=classify, provider_remembers=DAY)
    assert row(engine, "1") | {"status": "retryable", "in_doubt": True} == row(engine, "1")


def test_a_look_up_waits_for_the_lock_also_where_the_provider_honours_keys(once, engine: Engine) -> None:
    """A call on its way gets as long as its lock lasts to arrive, before "not applied" is believed."""
    call, look_up = Scripted(TimeoutError()), Scripted(NotApplied())
    options = {"provider_remembers": DAY, "already_applied": look_up}
    for expected in (TimeoutError, EffectInProgress):
        with pytest.raises(expected):
            once("charge", key="1", call=call, **options)
    assert (len(call.keys), len(look_up.keys)) == (1, 0)
    let_lock_run_out(engine, "1")
    call.answer = "done"
    assert once("charge", key="1", call=call, **options) == "done"
    assert (len(call.keys), len(look_up.keys)) == (2, 1)


def test_a_provider_that_forgot_the_key_during_the_look_up_is_not_called(once, engine: Engine) -> None:
    """What is left of the provider's memory is counted at the call, not when the look-up began."""
    forgotten = text("SELECT clock_timestamp() - first_called_at > interval '1.2 seconds' FROM outboxq.effect")

    def is_forgotten() -> bool:
        with engine.connect() as connection:
            return bool(connection.execute(forgotten).scalar_one())

    def look_up(_provider_key: str) -> Unknown:
        wait_until(is_forgotten, "the provider to forget")
        return Unknown()

    call = Scripted(TimeoutError())
    options = {"provider_remembers": timedelta(seconds=1), "already_applied": look_up}
    with pytest.raises(TimeoutError):
        once("charge", key="1", call=call, **options)
    let_lock_run_out(engine, "1")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.effect SET first_called_at = clock_timestamp()"))
    with pytest.raises(EffectUnknown):
        once("charge", key="1", call=call, **options)
    assert len(call.keys) == 1
    assert row(engine, "1")["status"] == "unknown"


# The database


def test_missing_tables_are_named(once, engine: Engine) -> None:
    """Nothing is called, and the error says what to do."""
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE outboxq.deployment, outboxq.effect"))
    call = Scripted(1)
    with pytest.raises(SchemaError, match="migrate"):
        once("charge", key="1", call=call)
    assert call.keys == []


@contextmanager
def settings_at_commit(*names: str) -> Iterator[list[tuple[str, ...]]]:
    """What is set at the COMMIT of each transaction that locked or wrote a row."""
    seen: list[tuple[str, ...]] = []

    def on_commit(connection: Connection) -> None:
        if connection.exec_driver_sql("SELECT pg_current_xact_id_if_assigned()").scalar_one() is not None:
            seen.append(tuple(connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names))

    event.listen(Engine, "commit", on_commit)
    try:
        yield seen
    finally:
        event.remove(Engine, "commit", on_commit)


@pytest.mark.parametrize("flavour", [SyncOnce, AsyncOnce], ids=["sync", "async"])
@pytest.mark.parametrize(("given", "used"), [("off", "on"), ("local", "local"), ("remote_apply", "remote_apply")])
def test_a_claim_and_a_record_reach_the_disk_before_they_are_believed(
    engine: Engine, flavour, given: str, used: str
) -> None:
    """A crash of the server must not forget them, whatever the connection says; a replay writes nothing at all."""
    hasty = create_engine(engine.url.update_query_dict({"options": f"-c synchronous_commit={given}"}))
    once = flavour(hasty)
    with settings_at_commit("synchronous_commit") as seen:
        once("charge", key="1", call=lambda _: 1)
    assert seen == [(used,), (used,)]
    with settings_at_commit("synchronous_commit") as seen:
        once("charge", key="1", call=lambda _: 1)
    assert seen == []
    once.dispose()
    hasty.dispose()


def test_a_relays_calls_are_planned_for_the_table_as_it_is(
    sessions: sessionmaker[OutboxSession], drain: Callable[..., object]
) -> None:
    """A plan kept from the time when the table was empty would read all of it, once it has grown."""
    jobs = Jobs()

    @jobs.handler(queue="sync", claim="lease")
    def charge(ctx: Context) -> None:
        ctx.once("charge", key="1", call=lambda _: 1)

    @jobs.handler(queue="async", claim="lease")
    async def charge_async(ctx: AsyncContext) -> None:
        await ctx.once("charge", key="2", call=lambda _: asyncio.sleep(0, 1))

    with sessions.begin() as session:
        session.add_job(charge)
        session.add_job(charge_async)
    with settings_at_commit("application_name", "plan_cache_mode") as seen:
        drain(jobs)
    assert [mode for name, mode in seen if name == "outboxq effects"] == ["force_custom_plan"] * 4
