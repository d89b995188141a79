"""The thread that extends the locks on calls of `once` while they are under way, so that no other caller takes over.

A lock is extended whenever a third of its time has passed. So a short call costs only an entry in a dict. The thread
ends when no lock is held any more.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

from sqlalchemy import Connection

from outboxq.clock import clock
from outboxq.database.errors import describe_error
from outboxq.effects.protocol import LockExpiry
from outboxq.forks import forget_in_children
from outboxq.statements import effects as statements

logger = logging.getLogger("outboxq.effects")

Transaction = Callable[[Callable[[Connection], object]], object]


class LockKeeper:
    """Extends, in a thread, the locks on calls that are under way, so that no other caller takes over.

    Args:
        transact: Runs a function in a short transaction; called in the keeper's thread.
        lease_seconds: How long a lock lasts; it is extended every third of that.
    """

    def __init__(self, transact: Transaction, lease_seconds: float) -> None:
        self._transact = transact
        self._beat_seconds = lease_seconds / 3
        self.forget()
        forget_in_children(self)

    def forget(self) -> None:
        """Forget all locks in a forked child: the calls under way and their thread belong to the parent."""
        self._held: dict[LockExpiry, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def keeping(self, expiry: LockExpiry) -> Iterator[None]:
        """Extend this lock whenever a third of its time has passed, while the block runs."""
        with self._changed:
            self._held[expiry] = clock() + self._beat_seconds
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="outboxq-effects", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                # The entry is gone if the call itself forked, and goes on in the child.
                self._held.pop(expiry, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._held:
                    # Still under the thread lock: a call that begins later finds no thread, and starts one.
                    self._thread = None
                    return
                due = [expiry for expiry, due_at in self._held.items() if due_at <= clock()]
                if not due:
                    self._changed.wait(max(min(self._held.values()) - clock(), 0.0))
                    continue
            self._extend(due)

    def _extend(self, due: list[LockExpiry]) -> None:
        begun = clock()
        extended = set[LockExpiry]()
        try:
            # Returned only if the transaction was committed in time: the effect of a late one is not known.
            extended = set(cast("list[LockExpiry]", self._transact(partial(_extend_all, due=due)) or ()))
        except Exception as error:  # noqa: BLE001  # any error: tried again at the next beat, and reported by the record
            logger.warning(
                "a lock on a call could not be extended: %s",
                describe_error(error),
                extra={"error_type": type(error).__name__},
            )
        with self._changed:
            for expiry in due:
                if expiry in extended:
                    expiry.renew(begun)
                if expiry in self._held:
                    self._held[expiry] = begun + self._beat_seconds


def _extend_all(connection: Connection, due: list[LockExpiry]) -> list[LockExpiry]:
    """Extend the locks in the database; return those that were extended because this process still held them."""
    return [
        expiry
        for expiry in due
        if connection.execute(statements.extend(expiry.request.lock, expiry.request.lease)).first() is not None
    ]
