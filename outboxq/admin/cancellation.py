"""Cancel running jobs, for operators: request it from the job's relay, see if it was done, or end the job by force.

Every function works in the caller's transaction. The relay receives a request when that transaction commits.
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
    """The number of other jobs in a running job's transaction, which are rolled back too if that job is ended by force.

    `count_sharing` returns it, to warn an operator. `is_exact`: False if there may be more, because only 10,000 jobs
    before and after the running job in the queue are read.
    """

    jobs: int
    is_exact: bool


def cancel_running(connection: Connection, ids: Sequence[UUID], outcome: CancelOutcome = "discard") -> Requested:
    """Cancel jobs by id, including running ones; pass about 200 ids in a transaction.

    Waiting jobs end in this transaction. Running jobs are ended by their relays after it commits; `progress` shows if
    that was done.

    `outcome`: "discard" to delete the cancelled jobs, "dead" to make them dead letters.
    """
    return cancel_or_request(connection, list(dict.fromkeys(ids)), outcome)


def progress(connection: Connection, ids: Sequence[UUID]) -> dict[UUID, str]:
    """Return the state of each of these jobs, whose cancellation was requested by `cancel_running`.

    `running`: the job still runs. `waiting`: the job waits again, and the relay that claims it next ends it.
    `cancelled`: the job was ended. `dead`: the job is a dead letter. `over`: the job ended by itself before its relay
    received the request, or a later job has the same id.
    """
    return {row.id: row.state for row in connection.execute(statements.progress(ids))}


def end_returned(connection: Connection, ids: Sequence[UUID], outcome: CancelOutcome) -> tuple[UUID, ...]:
    """End jobs that wait again after their cancellation was requested, without waiting for a relay to claim them.

    Such a job came back to the queue when its transaction or its relay ended. Returns the ids of the ended jobs.
    """
    return tuple(end_waiting(connection, ids, outcome, asked=True))


def count_sharing(connection: Connection, job_id: UUID) -> Sharing:
    """Count the other jobs in the transaction of a running job, which run again if the job is cancelled by force.

    Up to 10,000 jobs before the running job and 10,000 after it are read, in the order in which relays claim jobs.
    """
    ((jobs, is_exact),) = run_script(connection, statements.sharing(mapped_schema(connection), job_id))
    assert isinstance(jobs, int)
    return Sharing(jobs, bool(is_exact))


def terminate(connection: Connection, job_id: UUID, outcome: CancelOutcome = "discard") -> bool:
    """End a running job by force: end the backend of its transaction or, in lease mode, end the job's lease.

    Use it if the relay does not answer a request of `cancel_running` that was committed before. All jobs of the
    transaction are rolled back, and run again one at a time; the cancelled job is ended by the relay that claims it
    next, or by `end_returned`. The handler of a leased job goes on, and its writes are refused.

    Returns True if the backend, or the leased job, was ended.
    """
    ended = run_script(connection, statements.terminate(mapped_schema(connection), job_id))
    if ended:
        return True
    # After the request, as the relay that ends the job locks both: else each might wait for the other.
    connection.execute(statements.lock_requests([job_id]))
    return bool(end_waiting(connection, [job_id], outcome, leased=True, asked=True))
