"""Attempts to log in: passwords are checked one at a time, in a thread.

The more attempts have failed within a minute, the later a failure is answered: guessing takes long.
"""

import logging
import time
from collections import deque

import anyio
import anyio.to_thread
from anyio import CapacityLimiter

from outboxq.dashboard.errors import Refused
from outboxq.dashboard.logins import Login
from outboxq.dashboard.roles import User

logger = logging.getLogger("outboxq.dashboard")

# Tries under way, those that wait for their answer included.
_MOST = 10
_REMEMBERED_SECONDS = 60.0
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.1, 5.0


class Tries:
    """Runs the login attempts of all browsers. Only the answers to failed attempts are delayed."""

    def __init__(self) -> None:
        self._limiter: CapacityLimiter | None = None
        self._under_way = 0
        self._failed_at: deque[float] = deque(maxlen=100)

    async def log_in(self, login: Login, name: str, password: str, address: str) -> User | None:
        """Return the user of this name and password, or None, after a delay, if they do not match.

        Args:
            address: The client's address, for the log.

        Raises:
            Refused: ten attempts to log in are under way.
        """
        if self._under_way >= _MOST:
            raise Refused(429, "Too many try to log in at this moment. Wait some seconds, and try again.")
        self._under_way += 1
        try:
            if self._limiter is None:
                self._limiter = CapacityLimiter(1)
            user = await anyio.to_thread.run_sync(login.log_in, name, password, limiter=self._limiter)
            if user is None:
                # The name is not logged: some users type their password there.
                delay = self._count_failure()
                logger.warning("a login failed: address=%s failures_in_a_minute=%d", address, len(self._failed_at))
                await anyio.sleep(delay)
        finally:
            self._under_way -= 1
        return user

    def _count_failure(self) -> float:
        """Count a failed attempt to log in; return the seconds to wait before it is answered.

        The delay is 0.1 s for the first failure, and doubles with each further failure within a minute, up to 5 s.
        """
        now = time.monotonic()
        while self._failed_at and self._failed_at[0] < now - _REMEMBERED_SECONDS:
            self._failed_at.popleft()
        self._failed_at.append(now)
        return min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2.0 ** min(len(self._failed_at) - 1, 10))
