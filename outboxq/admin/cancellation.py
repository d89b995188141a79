"""Cancel running jobs, for operators: request it, follow the request, and end the backend of a job by force.

Every function reads or changes in the caller's transaction; a request takes effect when that is committed.
"""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from outboxq.database.driver import run_script
from outboxq.outbox.cancel import CancelOutcome as CancelOutcome
from outboxq.outbox.cancel import Requested as Requested
from outboxq.outbox.cancel import cancel_or_request, end_waiting
from outboxq.statements import cancel as statements
from outboxq.tables import mapped_schema


class Sharing(NamedTuple):
    """The number of other jobs that share a transaction; if that is not exact, there may be more that are far away."""

    jobs: int
    is_exact: bool


def cancel_running(connection: Connection, ids: Sequence[UUID], outcome: CancelOutcome = "discard") -> Requested:
    """Cancel jobs by id, those that run too; 200 a transaction are a good measure.

    Waiting jobs are gone at once; running ones are ended by their relays, as `progress` reports.
    """
    return cancel_or_request(connection, list(dict.fromkeys(ids)), outcome)


def progress(connection: Connection, ids: Sequence[UUID]) -> dict[UUID, str]:
    """The state of the cancellation of each of these jobs.

    `running`: it runs on; `waiting`: it waits, and its next claim ends it; `cancelled`; `dead`: it is a dead letter;
    `over`: it ended by itself, before its relay received the request, also if a later job has its id.
    """
    return {row.id: row.state for row in connection.execute(statements.progress(ids))}


def end_returned(connection: Connection, ids: Sequence[UUID], outcome: CancelOutcome) -> tuple[UUID, ...]:
    """End jobs whose cancellation was requested and that wait now, without waiting for their next claim."""
    return tuple(end_waiting(connection, ids, outcome, asked=True))


def count_sharing(connection: Connection, job_id: UUID) -> Sharing:
    """Count the other jobs that share the transaction of this one: they are rolled back with it, and run again.

    Up to 10,000 jobs on each side of it are read, in the order of claims.
    """
    ((jobs, is_exact),) = run_script(connection, statements.sharing(mapped_schema(connection), job_id))
    assert isinstance(jobs, int)
    return Sharing(jobs, bool(is_exact))


def terminate(connection: Connection, job_id: UUID, outcome: CancelOutcome = "discard") -> bool:
    """End the backend whose transaction runs a job, or take the job from its lease; True if there was one.

    For a relay that does not answer; the request has to be committed before. All jobs of the transaction are rolled
    back, and each runs again by itself; the cancelled one is ended by its next claim, or by `end_returned`. A handler
    under a lease goes on, and what it wrote is refused.
    """
    ended = run_script(connection, statements.terminate(mapped_schema(connection), job_id))
    if ended:
        return True
    # After the request, as the relay that ends the job locks both: else each might wait for the other.
    connection.execute(statements.lock_requests([job_id]))
    return bool(end_waiting(connection, [job_id], outcome, leased=True, asked=True))
