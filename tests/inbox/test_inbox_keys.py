"""What an inbox refuses before it looks at a database, and what its answers are worth as truth values."""

import asyncio
import itertools
from collections.abc import Iterable
from datetime import timedelta

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outboxq import external
from outboxq.awaited import awaited
from outboxq.errors import ArgumentError, ConfigError, EnqueueError, InvalidKey
from outboxq.inbox import Acceptance, Inbox

inbox = Inbox("orders")
ship = external("ship", queue="depot")

BAD_KEYS = {
    "empty": ("", "takes 1 to .* bytes, got 0: it is empty"),
    "too-long": ("x" * 513, "takes 1 to .* bytes, got 513: a hash of it"),
    "too-long-in-bytes": ("é" * 257, "takes 1 to .* bytes, got 514"),
    "nul": ("a\0b", "control character"),
    "newline": ("a\nb", "control character"),
    "lone-surrogate": ("a\ud800", "lone surrogate"),
    "bytes": (b"abc", "is a string, got bytes"),
    "int": (7, "is a string, got int"),
    "none": (None, "is a string, got NoneType"),
}
BAD_IDS = pytest.mark.parametrize(("bad", "message"), BAD_KEYS.values(), ids=BAD_KEYS.keys())


@BAD_IDS
def test_a_message_id_that_cannot_be_stored_is_refused(bad: str, message: str) -> None:
    """By every way to accept, before the session is touched: this one leads nowhere."""
    session = Session()
    for accept in (
        lambda: inbox.accept(session, bad),
        lambda: inbox.try_accept(session, bad),
        lambda: inbox.accept_job(session, bad, ship.job(order_id=1)),
        lambda: inbox.accept_all(session, ["good", bad]),
        lambda: inbox.accept_all(session, {"good": 1, bad: 2}),
        lambda: inbox.accept_all(session, [("good", 1), (bad, 2)]),
        lambda: inbox.accept(AsyncSession(), bad),
    ):
        with pytest.raises(InvalidKey, match=message):
            accept()


@BAD_IDS
def test_a_consumer_that_cannot_be_stored_is_refused(bad: str, message: str) -> None:
    """When the inbox is made, and not at the first message."""
    with pytest.raises(InvalidKey, match=message):
        Inbox(bad)


def test_names_may_be_as_long_as_their_columns() -> None:
    """63 bytes for a consumer, 512 for a message id."""
    Inbox("c" * 63)
    with pytest.raises(InvalidKey, match="a consumer takes 1 to 63 bytes, got 64"):
        Inbox("c" * 64)
    with pytest.raises(EnqueueError, match="not bound"):
        inbox.accept(Session(), "é" * 256)


@pytest.mark.parametrize(
    "retention", [timedelta(0), timedelta(seconds=-1), timedelta(milliseconds=999), timedelta(days=3654), 30, None]
)
def test_a_retention_is_a_time_from_a_second_to_ten_years(retention: timedelta) -> None:
    """A number of unknown unit, or none at all, is refused when the inbox is made."""
    with pytest.raises(ConfigError, match="retention is a timedelta from 1 second to 10 years, got"):
        Inbox("orders", retention=retention)


@pytest.mark.parametrize("payload", [{"a": float("nan")}, {"a": "\0"}, {"a": "\ud800"}, object(), {1, object()}])
def test_a_content_that_json_cannot_hold_is_refused(payload: object) -> None:
    """Before the session is touched; the error does not quote it."""
    for accept in (
        lambda: inbox.accept(Session(), "id", payload=payload),
        lambda: inbox.accept_all(Session(), {"other": 1, "id": payload}),
    ):
        with pytest.raises(ArgumentError, match="payload"):
            accept()


@pytest.mark.parametrize(
    "messages", [[], {}, (), (str(n) for n in itertools.count()), {str(n): n for n in range(10_001)}]
)
def test_a_batch_has_1_to_10000_messages(messages: Iterable[str]) -> None:
    """One without an end is refused as well."""
    with pytest.raises(InvalidKey, match="accept_all takes 1 to 10,000 messages, got"):
        inbox.accept_all(Session(), messages)


@pytest.mark.parametrize("messages", ["abc", b"abc"])
def test_a_batch_is_not_the_characters_of_one_id(messages: str) -> None:
    """The slip that a type checker cannot find."""
    with pytest.raises(InvalidKey, match=r"got one (str|bytes): use accept"):
        inbox.accept_all(Session(), messages)


def test_sessions_that_lead_to_no_postgresql_are_refused() -> None:
    """None at all, one without a database, one of another database, or no session."""
    sqlite = create_engine("sqlite://")
    with sqlite.connect() as connection, Session(sqlite) as session:
        for target in (connection, session):
            with pytest.raises(EnqueueError, match="needs PostgreSQL, but this session is bound to sqlite"):
                inbox.accept(target, "id")
    sqlite.dispose()
    with pytest.raises(EnqueueError, match="not bound to a database"):
        inbox.try_accept(Session(), "id")
    with pytest.raises(EnqueueError, match=r"accept_all takes an SQLAlchemy session .*, got NoneType"):
        inbox.accept_all(None, ["id"])  # type: ignore[call-overload]


def test_a_job_for_a_message_is_made_by_its_kind() -> None:
    """The kind itself is refused before the message is accepted."""
    with pytest.raises(ArgumentError, match=r"accept_job takes a job made by kind\.job\(\.\.\.\), got JobKind"):
        inbox.accept_job(Session(), "id", ship)  # type: ignore[call-overload]


def test_only_accepted_is_true() -> None:
    """`if inbox.try_accept(...)` runs for an accepted message alone."""
    assert [acceptance.name for acceptance in Acceptance if acceptance] == ["ACCEPTED"]


@pytest.mark.parametrize("method", ["accept", "try_accept", "accept_all", "accept_job"])
def test_a_forgotten_await_never_counts_as_an_answer(method: str) -> None:
    """Neither true nor false: it raises; and what is never awaited fails the test that made it."""

    async def forgetful() -> None:
        arguments = (
            (["id"],) if method == "accept_all" else ("id", ship.job(order_id=1)) if method == "accept_job" else ("id",)
        )
        answer = getattr(inbox, method)(AsyncSession(), *arguments)
        with pytest.raises(TypeError, match=rf"`await inbox\.{method}\(\.\.\.\)`"):
            bool(answer)
        with pytest.raises(TypeError):
            assert not answer
        with pytest.raises(EnqueueError, match="not bound"):
            await answer

    asyncio.run(forgetful())
    with pytest.raises(AssertionError, match=r"inbox\.accept\(\.\.\.\): (.*) not awaited"), awaited.counting():
        inbox.accept(AsyncSession(), "id")
