"""The relay's login: if it is refused for long, the relay ends, as its next start may have the new password."""

import time

from outboxq.database.errors import is_refused, outage_reason
from outboxq.errors import LoginRefused


class Login:
    """The time since which the database refuses the relay's login; shared by its slots.

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
        """Record that no connection was opened.

        Raises:
            LoginRefused: the server has refused the role, password or database for too long.
        """
        if not is_refused(error):
            self._refused_since = None
            return
        now = time.monotonic()
        self._refused_since = since = self._refused_since or now
        if now - since >= self._patience_seconds:
            raise LoginRefused(outage_reason(error) or type(error).__name__, now - since) from error
