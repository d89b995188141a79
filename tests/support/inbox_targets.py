"""Whatever a message may be accepted in: every driver and kind of session, driven one step at a time."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outboxq.inbox import Acceptance, AcceptedBatch, Inbox

inbox = Inbox("orders", retention=timedelta(days=7))
Stored = dict[str, bytes | None]


def stored(engine: Engine) -> Stored:
    """The committed messages and their fingerprints."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT message_id, fingerprint FROM outboxq.inbox"))
        return {message_id: None if digest is None else bytes(digest) for message_id, digest in rows}


def waiting_for_a_transaction(engine: Engine) -> int:
    """How many backends wait for another transaction to end."""
    with engine.connect() as connection:
        return connection.execute(
            text(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event = 'transactionid'"
            )
        ).scalar_one()


@dataclass
class Target:
    """A session or a connection of any flavour, driven one step at a time, and what it sends."""

    session: Any
    runner: asyncio.Runner
    statements: list[str]

    def accept(self, *arguments: Any, **named: Any) -> bool:
        return self.wait(inbox.accept(self.session, *arguments, **named))

    def try_accept(self, *arguments: Any, **named: Any) -> Acceptance:
        return self.wait(inbox.try_accept(self.session, *arguments, **named))

    def accept_all(self, messages: Any) -> AcceptedBatch:
        return self.wait(inbox.accept_all(self.session, messages))

    def wait(self, result: Any) -> Any:
        async def awaited() -> object:
            return await result

        assert inspect.isawaitable(result) == self.is_async
        return self.runner.run(awaited()) if self.is_async else result

    def execute(self, statement: str) -> Any:
        return self.wait(self.session.execute(text(statement)))

    def commit(self) -> None:
        self.wait(self.session.commit())

    def rollback(self) -> None:
        self.wait(self.session.rollback())

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.session.commit)


FLAVOURS = {
    "session-psycopg": ("psycopg", Session),
    "session-psycopg2": ("psycopg2", Session),
    "scoped-session": ("psycopg", lambda engine: scoped_session(sessionmaker(engine), scopefunc=lambda: None)),
    "connection": ("psycopg", Engine.connect),
    "connection-psycopg2": ("psycopg2", Engine.connect),
    "async-session-asyncpg": ("asyncpg", AsyncSession),
    "async-session-psycopg": ("psycopg-async", AsyncSession),
    "async-scoped-session": (
        "asyncpg",
        lambda engine: async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: None),
    ),
    "async-connection": ("asyncpg", lambda engine: engine.connect()),
}
OneTarget = Callable[..., Target]


@contextmanager
def targets(url: str) -> Iterator[OneTarget]:
    """What opens a target of the flavour that is named, on an engine of its own."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())

        def run(result: Any) -> Any:
            async def awaited() -> object:
                return await result

            return runner.run(awaited()) if inspect.isawaitable(result) else result

        def opened(flavour: str = "session-psycopg", **options: Any) -> Target:
            driver, make = FLAVOURS[flavour]
            named = make_url(url).set(drivername=f"postgresql+{driver.removesuffix('-async')}")
            asynchronous = driver.endswith(("asyncpg", "-async"))
            engine = (create_async_engine if asynchronous else create_engine)(named)
            stack.callback(lambda: run(engine.dispose()))
            statements: list[str] = []
            sync_engine = engine.sync_engine if asynchronous else engine
            event.listen(sync_engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
            session = make(engine.execution_options(**options))
            if flavour == "async-connection":
                runner.run(session.start())  # type: ignore[arg-type]
            stack.callback(lambda: run(session.remove() if "scoped" in flavour else session.close()))
            return Target(session, runner, statements)

        yield opened
