"""The relay's login: refused for long, it ends the relay, whose next start may bring the new password."""

import time

from outboxq.database.errors import is_refused, outage_reason
from outboxq.errors import LoginRefused


class Login:
    """Since when the database refuses the relay's login; shared by its slots.

    Args:
        patience_seconds: How long it may be refused.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._refused_since: float | None = None

    def succeeded(self) -> None:
        """Record that a connection was opened."""
        self._refused_since = None

    def failed(self, error: BaseException) -> None:
        """Record that none was.

        Raises:
            LoginRefused: the server knows no such role, password or database, and that for too long.
        """
        if not is_refused(error):
            self._refused_since = None
            return
        now = time.monotonic()
        self._refused_since = since = self._refused_since or now
        if now - since >= self._patience_seconds:
            raise LoginRefused(outage_reason(error) or type(error).__name__, now - since) from error
