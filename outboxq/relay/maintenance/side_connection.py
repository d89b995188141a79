"""Short transactions of a relay apart from those of its slots, on a connection from a separate pool.

The pool is made like that of the relay's engine. Slots that hold all of the engine's connections do not delay these
transactions.
"""

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.util import greenlet_spawn

from outboxq.database.engines import Engines
from outboxq.effects.transactions import SidePool
from outboxq.relay.event_loop import LoopThread

T = TypeVar("T")

_ANSWER_SECONDS = 30.0


class SideConnection:
    """One connection for the relay's own short transactions, opened when one of them needs it.

    The connection comes from the sync engine or, without one, from the async engine. In the latter case it is used in
    the relay's event loop.
    """

    def __init__(self, engines: Engines, schema: str, loop: LoopThread) -> None:
        self._in_loop = engines.sync is None
        # True if a transaction ran since the last rest.
        self.was_used = False
        self._loop = loop
        if engines.sync is not None:
            self._pool = SidePool(engines.sync, schema)
        else:
            assert engines.asynchronous is not None
            self._pool = SidePool(engines.asynchronous.sync_engine, schema)

    def transact(self, work: Callable[[Connection], T]) -> T:
        """Run `work` with the connection, in a transaction at READ COMMITTED that is committed when `work` returns.

        Raises:
            TimeoutError: a handler blocks the event loop. The transaction is committed, or rolled back, later.
        """

        self.was_used = True

        def run() -> T:
            with self._pool.transaction() as connection:
                return work(connection)

        return self._run(run)

    def rest(self) -> None:
        """Close the connection until it is needed again."""
        self.was_used = False
        self._run(self._pool.renew)

    def _run(self, call: Callable[[], T]) -> T:
        if not self._in_loop:
            return call()
        if self._loop.is_blocked or self._loop.get() is None:
            raise TimeoutError("the event loop does not run")
        return self._loop.call(greenlet_spawn(call), _ANSWER_SECONDS)
