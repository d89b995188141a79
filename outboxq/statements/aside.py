"""A job that no claim or reaper can take, on its way to the dead letters or out of the way of its queue.

By its id, as it stands: nothing of the row comes to the relay, and nothing is reckoned with its numbers.
"""

from uuid import UUID

from psycopg import sql

WAITS = sql.SQL("job.state <> 'leased'")
# A suspect that came back with others would not run alone.
_IS_NO_SUSPECT = sql.SQL("job.state IN ('ready', 'scheduled')")


def bury_row(schema: str, job_id: UUID, condition: sql.Composable, reason: str) -> str:
    """Make a dead letter of it, if `condition` holds and no other transaction has it.

    Returns id, queue, kind, crashes and true, as a reaper does; no row where there was nothing to bury. A dead letter
    that has the id keeps it. Index: the primary keys.
    """
    return (
        sql.SQL(
            """\
WITH picked AS MATERIALIZED (
  SELECT job.id FROM {job} AS job WHERE job.id = {id} AND {condition} FOR UPDATE OF job SKIP LOCKED
), gone AS (
  DELETE FROM {job} AS job USING picked WHERE job.id = picked.id RETURNING job.*
), dead AS (
  INSERT INTO {dead} (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, unique_key, group_key,
    errors, reason, created_at)
  SELECT CASE WHEN EXISTS (SELECT FROM {dead} AS earlier WHERE earlier.id = job.id)
      THEN pg_catalog.gen_random_uuid() ELSE job.id END,
    job.queue, job.kind, job.args, job.headers, job.priority, job.attempt, job.max_attempts, job.crashes,
    job.unique_key, job.group_key, job.errors, {reason}, job.created_at
  FROM gone AS job
  RETURNING id, queue, kind, crashes
)
SELECT id, queue, kind, crashes, true FROM dead"""
        )
        .format(
            job=sql.Identifier(schema, "job"),
            dead=sql.Identifier(schema, "dead_job"),
            id=sql.Literal(job_id),
            condition=condition,
            reason=sql.Literal(reason),
        )
        .as_string(None)
    )


def put_off_row(schema: str, job_id: UUID, seconds: float) -> str:
    """Let it wait for so long; its id if so.

    Not if it is a suspect, or leased, or another transaction has it. Index: the primary key.
    """
    return (
        sql.SQL(
            "UPDATE {job} SET state = 'scheduled', "
            "run_at = pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => {seconds}) "
            "WHERE id = (SELECT job.id FROM {job} AS job WHERE job.id = {id} AND {free} FOR UPDATE SKIP LOCKED) "
            "RETURNING id"
        )
        .format(
            job=sql.Identifier(schema, "job"), id=sql.Literal(job_id), seconds=sql.Literal(seconds), free=_IS_NO_SUSPECT
        )
        .as_string(None)
    )
