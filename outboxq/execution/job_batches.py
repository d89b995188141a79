"""The batches of claimed jobs, looked at behind the COMMIT of their members: those that are over get their callbacks.

Nothing depends on a look: if one fails, or its relay dies before it, the pruner's sweep comes to the batch.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from uuid import UUID

import msgspec
import psycopg
from sqlalchemy import Connection

from outboxq.database.driver import ScriptResult, is_lost, run_script
from outboxq.database.errors import describe_error
from outboxq.events import BatchFinished
from outboxq.job import Job
from outboxq.statements.job_batches import SETTINGS, finish_batches

logger = logging.getLogger("outboxq.relay")

_FOUND = list[tuple[UUID, str, str, int]]


def batch_ids(jobs: Iterable[Job]) -> frozenset[UUID]:
    """The batches that these jobs are members of."""
    return frozenset(job.batch_id for job in jobs if job.batch_id is not None)


def read_finished(results: Sequence[ScriptResult]) -> tuple[BatchFinished, ...]:
    """The batches that were over, by the answer of a look."""
    ((text,),) = next(result.rows for result in results if result.tag == "SHOW")
    return tuple(BatchFinished(*found) for found in msgspec.json.decode(str(text), type=_FOUND))


def look_at_batches(connection: Connection, schema: str, ids: Collection[UUID]) -> tuple[BatchFinished, ...]:
    """Add the callbacks of those of these batches that are over; the connection has no transaction open.

    An error is logged, and left to the sweep: what was committed before must not be reported as failed.
    """
    try:
        return read_finished(run_script(connection, f"{SETTINGS}{finish_batches(schema, ids)}; COMMIT"))
    except psycopg.Error as error:
        logger.debug("batches are left to the sweep: %s", describe_error(error))
        if not is_lost(connection):
            run_script(connection, "ROLLBACK")
        return ()
