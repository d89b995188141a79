"""Outages: a lost or refused connection, as slots, dispatchers and calls report it, and the pauses before retries."""

import asyncio
import logging
import random
import time

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from outboxq.codec.text import name_and_line
from outboxq.database.errors import (
    INSUFFICIENT_PRIVILEGE,
    NoConnection,
    describe_error,
    describe_refusal,
    is_database_unavailable,
    sqlstate_of,
)
from outboxq.events import DatabaseBack, DatabaseLost
from outboxq.execution.errors import ConnectionLost
from outboxq.relay.state import RelayState

logger = logging.getLogger("outboxq.relay")

_RECONNECT_FIRST_SECONDS = 0.1
_RECONNECT_CAP_SECONDS = 10.0
_MOST_DOUBLINGS = 10
# The errors of a connection that is lost, or on which a statement is refused.
CONNECTION_ERRORS = (psycopg.Error, SQLAlchemyError, ConnectionLost, NoConnection, OSError, asyncio.CancelledError)
_NOT_ALLOWED = ": its role lacks rights, run what `outboxq roles --sql` prints"


class Outage:
    """Reports that one slot, dispatcher or call has lost its connection, and determines the pause before each new try.

    Attributes:
        since: The time (monotonic) since which the database is unavailable; None while it is available.
        losses: The number of lost or refused connections since the last commit; each makes the pause longer.
    """

    def __init__(self, state: RelayState) -> None:
        self.since: float | None = None
        self._state = state
        self.losses = 0

    def connected(self) -> None:
        """Record that a connection was opened; if this ends an outage, emit `DatabaseBack`."""
        self._state.login.succeeded()
        if self.since is not None:
            self._state.emit(DatabaseBack(time.monotonic() - self.since))
            self.since = None

    def lost(self, error: BaseException) -> float:
        """Report a lost or refused connection, or an error that users' code raised on it; return the seconds to wait.

        Raises:
            LoginRefused: the database has refused the relay's login for too long.
        """
        self._state.login.failed(error)
        longest = min(_RECONNECT_FIRST_SECONDS * 2.0**self.losses, _RECONNECT_CAP_SECONDS)
        seconds = longest * random.uniform(0.5, 1.0)
        self.losses = min(self.losses + 1, _MOST_DOUBLINGS)
        if not isinstance(error, CONNECTION_ERRORS):
            # A user's listener on the engine raised: the connection is closed, and its transaction rolled back.
            logger.warning(
                "code on the relay's connection raised an error, trying again: %s",
                name_and_line(error),
                extra={"retry_seconds": seconds},
            )
        elif is_database_unavailable(error):
            self.since = self.since or time.monotonic()
            self._state.emit(DatabaseLost(describe_error(error), seconds))
        else:
            advice = _NOT_ALLOWED if sqlstate_of(error) == INSUFFICIENT_PRIVILEGE else ""
            logger.warning(
                "the relay's statements fail, trying again: %s%s",
                describe_refusal(error),
                advice,
                extra={"retry_seconds": seconds},
            )
        return seconds
