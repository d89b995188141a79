"""Claims that fail: what ails one row of several is found, and set aside, so that no other job waits for it."""

from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.database.errors import QUERY_CANCELED, sqlstate_of
from outboxq.execution.aside import is_of_a_row, set_aside_first
from outboxq.execution.batch_state import BatchReport
from outboxq.execution.claim import ClaimRequest, forgive
from outboxq.relay.claim_planner import ClaimPlanner
from outboxq.statements.claim import ClaimScript

# So many jobs of each sort are compared with one that cannot be claimed.
_COMPARED = 10


class FailedClaims:
    """What one slot does about claims that were answered with an error."""

    def __init__(self, schema: str, planner: ClaimPlanner) -> None:
        self._schema = schema
        self._planner = planner

    def recover(self, connection: Connection, request: ClaimRequest, error: BaseException) -> BatchReport | None:
        """Clear the marks of a claim that was answered with an error: it killed nothing. None if it would fail again.

        One that was cancelled is too large. What failed for one row of several goes on one by one, up to the row that
        is to blame.
        """
        if sqlstate_of(error) == QUERY_CANCELED:
            self._planner.cancelled()
        # Whatever it is, it may ail this too: it is the claim's error that counts.
        with suppress(psycopg.Error, SQLAlchemyError):
            picked = self._forgive(connection, request)
            if request.limit > 1 and is_of_a_row(error):
                self._planner.alone_for = request.limit
                return BatchReport(0, ())
            if picked:
                others = [other for other in self._alike(connection, request) if other[1] != picked[0]]
                events = set_aside_first(connection, self._schema, (request.script, picked[0]), others, error)
                return None if events is None else BatchReport(0, events)
        return None

    def _alike(self, connection: Connection, request: ClaimRequest) -> Iterator[tuple[ClaimScript, UUID]]:
        """Jobs that are claimed in the same way as those of this claim."""
        for script in self._planner.taking_alike(request.script, request.queue):
            for job_id in self._forgive(connection, ClaimRequest(script, _COMPARED)):
                yield script, job_id

    def _forgive(self, connection: Connection, request: ClaimRequest) -> list[UUID]:
        with connection.begin():
            return forgive(connection, request)
