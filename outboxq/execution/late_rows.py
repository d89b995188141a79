"""Late rows: on Citus a job may be seen before the rows of the transaction that added it.

Citus commits a transaction on its nodes one after the other. If one dies in between, the rows come only with Citus'
recovery, by default within a minute.
"""

from sqlalchemy import Connection

from outboxq.database.driver import run_script
from outboxq.job import Job
from outboxq.statements.transaction import clock_seconds

# Citus' recovery runs every 60 seconds, and takes a while.
_YOUNG_SECONDS = 90.0
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.1, 10.0


class RowsMayBeLate(Exception):
    """A row that a young job names is missing: the job is put off, without counting an attempt."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__("a row of the job's arguments is not there yet")
        self.retry_after_seconds = retry_after_seconds


def wait_while_young(connection: Connection, job: Job) -> None:
    """Put off a job that was added a moment ago, by the database's clock, each time for its present age.

    Raises:
        RowsMayBeLate: it is young.
    """
    age_seconds = float(str(run_script(connection, clock_seconds())[0][0])) - job.created_at.timestamp()
    left_seconds = _YOUNG_SECONDS - age_seconds
    # A job whose created_at is far in the future, which SQL can write, does not wait until then.
    if 0 < left_seconds < 2 * _YOUNG_SECONDS:
        raise RowsMayBeLate(min(max(age_seconds, _SHORTEST_SECONDS), _LONGEST_SECONDS, left_seconds))
