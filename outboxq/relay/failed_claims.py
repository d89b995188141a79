"""Claims that fail because of one row: the row is found, and its job set aside, so that no other job waits for it."""

from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.database.errors import QUERY_CANCELED, sqlstate_of
from outboxq.execution.aside import is_of_a_row, set_aside_first
from outboxq.execution.batch_state import BatchReport
from outboxq.execution.claim import AnyScript, ClaimRequest, forgive
from outboxq.relay.claim_planner import ClaimPlanner

# How many jobs of each sort are compared with one that cannot be claimed.
_COMPARED = 10


class FailedClaims:
    """What one slot does about claims that were answered with an error."""

    def __init__(self, schema: str, planner: ClaimPlanner) -> None:
        self._schema = schema
        self._planner = planner

    def recover(self, connection: Connection, request: ClaimRequest, error: BaseException) -> BatchReport | None:
        """Clear the marks of a claim that was answered with an error: no job had run. None if it would fail again.

        After a cancelled claim the next one is smaller. If one row of several made it fail, the next claims take one
        job each, until one of them fails for that row.
        """
        if sqlstate_of(error) == QUERY_CANCELED:
            self._planner.cancelled()
        # The cause may make these statements fail, too: then the claim's own error counts.
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

    def _alike(self, connection: Connection, request: ClaimRequest) -> Iterator[tuple[AnyScript, UUID]]:
        """Jobs that could be claimed in the same way as those of this claim, each with its claim."""
        for script in self._planner.taking_alike(request.script, request.queue):
            for job_id in self._forgive(connection, ClaimRequest(script, _COMPARED)):
                yield script, job_id

    def _forgive(self, connection: Connection, request: ClaimRequest) -> list[UUID]:
        with connection.begin():
            return forgive(connection, request)
