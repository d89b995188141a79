"""The short transactions of `ctx.once` in a test: savepoints of the test's own transaction, undone with it."""

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outboxq.effects.lock_keeper import Transaction
from outboxq.effects.runners import AsyncEffectRunner, EffectRunner

_LEASE_SECONDS = 30.0

T = TypeVar("T")


def effect_runner(session: Session) -> EffectRunner:
    """Makes the calls of `ctx.once`, recorded in savepoints of the session's transaction."""
    return EffectRunner(SavepointTransactions(session), _LEASE_SECONDS)


def async_effect_runner(session: AsyncSession) -> AsyncEffectRunner:
    """Makes the awaited calls of `ctx.once`, recorded in savepoints of the session's transaction."""
    return AsyncEffectRunner(AsyncSavepointTransactions(session), _LEASE_SECONDS)


class SavepointTransactions:
    """Runs each short transaction in a savepoint of the session's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:  # noqa: ARG002  # one connection
        """Run `work` in a savepoint, released when it returns."""
        connection = self._session.connection()
        with connection.begin_nested():
            return work(connection)

    def keeper_transaction(self) -> Transaction:
        """Does nothing: no other session sees these rows, so no lock has to be kept."""
        return lambda _: None


class AsyncSavepointTransactions:
    """Runs each short transaction in a savepoint of the async session's transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:  # noqa: ARG002  # one connection
        """Run `work` in a savepoint, released when it returns."""
        connection = await self._session.connection()
        async with connection.begin_nested():
            return await connection.run_sync(work)

    def keeper_transaction(self) -> Transaction:
        """Does nothing: no other session sees these rows, so no lock has to be kept."""
        return lambda _: None
