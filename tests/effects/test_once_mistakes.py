"""Mistakes in the code around a call: found before the call is claimed, or shown with their text and line."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession
from outboxq.errors import ConfigError, EffectUnknown
from outboxq.events import Event
from tests.support.effects import AsyncOnce, SyncOnce, row

Drain = Callable[..., list[Event]]
SECRET = "4242424242424242"


@pytest.fixture(params=[SyncOnce, AsyncOnce], ids=["sync", "async"])
def once(request: pytest.FixtureRequest, engine: Engine) -> Iterator[SyncOnce | AsyncOnce]:
    once = request.param(engine)
    yield once
    once.dispose()


def two(first: str, second: str) -> str:
    return first + second


WRONG: dict[str, Any] = {"none": lambda: 1, "two": two, "keyword": lambda *, key: key}


@pytest.mark.parametrize("option", ["call", "already_applied", "classify"])
@pytest.mark.parametrize("wrong", ["none", "two", "keyword"])
def test_a_function_that_cannot_be_called_is_refused_before_anything_is_claimed(
    option: str, wrong: str, engine: Engine
) -> None:
    """Found out by the call it would leave an effect in doubt."""
    once = SyncOnce(engine)
    options = {"call": str, option: WRONG[wrong]}
    with pytest.raises(ConfigError, match=rf"once\({option}=\.\.\.\) takes a function of .*cannot be called with it"):
        once("charge", key="1", **options)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.effect")).scalar_one() == 0
    once.dispose()


@pytest.mark.parametrize("call", [partial(two, "a"), str, lambda *keys: keys[0], lambda key, more=1: key])
def test_any_function_of_the_provider_key_is_called(call: Callable[[str], object], engine: Engine) -> None:
    once = SyncOnce(engine)
    assert once("charge", key="1", call=call)
    once.dispose()


def test_an_error_of_a_call_is_stored_with_its_line(once, engine: Engine) -> None:
    """Without its text, which may quote what it was given: here nobody can say what that was."""

    def charge(_: str) -> None:
        raise AttributeError(f"no card {SECRET}")

    with pytest.raises(EffectUnknown):
        once("charge", key="1", call=charge)
    error = row(engine, "1")["error"]
    assert "AttributeError (tests/effects/test_once_mistakes.py:" in error
    assert SECRET not in error


@pytest.mark.first_and_last
@pytest.mark.parametrize("messages", ["redacted", "withheld"])
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_handler_s_error_of_a_call_is_stored_with_its_redacted_text(
    flavour: str, messages: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """An operator sees what went wrong, and nothing of the arguments."""
    jobs = Jobs()
    options: dict[str, Any] = {
        "queue": "q", "claim": "lease", "retry": Backoff(max_attempts=1), "messages": messages
    }  # fmt: skip

    def fail(card: str) -> None:
        raise AttributeError(f"the client has no post for {card}")

    async def fail_async(card: str) -> None:
        fail(card)

    if flavour == "sync":

        @jobs.handler(kind="charge", **options)
        def charge(ctx: Context, card: str) -> None:
            ctx.once("bank", key="1", call=lambda _: fail(card))

        sent = charge.job(card=SECRET)
    else:

        @jobs.handler(kind="charge", **options)
        async def charge_async(ctx: AsyncContext, card: str) -> None:
            await ctx.once("bank", key="1", call=lambda _: fail_async(card))

        sent = charge_async.job(card=SECRET)

    with sessions.begin() as session:
        session.add_jobs([sent])
    drain(jobs)
    error = row(engine, "1")["error"]
    told = "the client has no post for <card>" if messages == "redacted" else "message withheld"
    assert f"the call raised AttributeError: {told} (" in error
    assert "test_once_mistakes.py:" in error
    assert " in fail)" in error
    assert SECRET not in error
