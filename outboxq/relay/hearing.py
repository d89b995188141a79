"""A proof that notifications reach the listening connection, which a transaction pooler would hand to another client.

The relay notifies itself, through the database URL, as producers do, on a channel of its own: if nothing arrives, the
pooler's connection is left listening to a channel that is never notified again.
"""

import logging
import secrets
import time
from collections.abc import Callable

from psycopg.pq.abc import PGconn

from outboxq.database.closing import finish
from outboxq.database.driver import DriverConnection, run_on_libpq
from outboxq.database.errors import describe_error
from outboxq.statements import wake as statements

logger = logging.getLogger("outboxq.listener")


class HearingCheck:
    """Checks once that notifications arrive.

    Args:
        connect: Opens a connection as producers have it, by the database URL.
        patience_seconds: A notification that takes longer is reported as missing; if it comes later, it still counts.
        poll_seconds: The longest time between two polls until then; for the message.
    """

    def __init__(self, connect: Callable[[], DriverConnection], patience_seconds: float, poll_seconds: float) -> None:
        self.passed = False
        self._connect = connect
        self._patience_seconds = patience_seconds
        self._poll_seconds = poll_seconds
        self._is_told = False
        self._channel = ""
        self._late_at = 0.0

    def begin(self, connection: PGconn) -> bool:
        """Listen on this connection, and notify through another one; False if no notification could be sent."""
        self._channel = f"outboxq_hearing_{secrets.token_hex(8)}"
        run_on_libpq(connection, statements.listen_on(self._channel))
        try:
            self._notify()
        except Exception as error:  # noqa: BLE001  # users' engines raise what they like; slots report outages
            logger.debug("notifications could not be checked: %s", describe_error(error))
            run_on_libpq(connection, statements.unlisten(self._channel))
            return False
        self._late_at = time.monotonic() + self._patience_seconds
        return True

    def _notify(self) -> None:
        other = self._connect()
        try:
            run_on_libpq(other.pgconn, statements.notify_on(self._channel))
        finally:
            finish(other)

    def is_over(self, connection: PGconn) -> bool:
        """Return True if the notification has come; warns once if it is late although the connection works."""
        is_late = time.monotonic() >= self._late_at
        if is_late:
            # An answer shows that the server is still there, and comes after its notifications.
            run_on_libpq(connection, "SELECT")
            self._late_at = time.monotonic() + self._patience_seconds
        connection.consume_input()
        while notification := connection.notifies():
            if notification.relname.decode() == self._channel:
                self._record_heard(connection)
                return True
        if is_late and not self._is_told:
            self._is_told = True
            logger.warning(
                "notifications do not arrive on the connection that listens for them, so the relay polls, up to %g s "
                "apart: behind a transaction pooler (pgbouncer) give --listen-url a direct URL of the server, or pass "
                "--no-listen",
                self._poll_seconds,
            )
        return False

    def _record_heard(self, connection: PGconn) -> None:
        self.passed = True
        run_on_libpq(connection, statements.unlisten(self._channel))
        if self._is_told:
            logger.info("notifications arrive after all: the relay listens for them")

    def wait_seconds(self) -> float:
        """The time to wait for the notification until the next call of `is_over`."""
        return max(0.0, self._late_at - time.monotonic())
