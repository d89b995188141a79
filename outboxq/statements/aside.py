"""Move one job that no claim or reaper can take: to the dead letters, or out of the way of its queue.

The job is found by its id and moved as it is: no value of its row is sent to the relay or computed with.
"""

from uuid import UUID

from psycopg import sql

from outboxq.statements.render import render

WAITS = sql.SQL("job.state NOT IN ('leased', 'group_leased')")
# A suspect must run alone; a postponed one would be claimed together with others.
_IS_NO_SUSPECT = sql.SQL("job.state IN ('ready', 'scheduled', 'grouped')")


def dead_letter_row(schema: str, job_id: UUID, condition: sql.Composable, reason: str) -> str:
    """Make a dead letter of the job, if `condition` holds and no other transaction has it.

    Returns id, queue, kind, crashes and true, as a reaper does; no row if there is no such job. If a dead letter has
    the id already, the new one gets another id. Index: the primary keys.
    """
    return render(
        schema,
        """\
WITH picked AS MATERIALIZED (
  SELECT job.id FROM {job} AS job WHERE job.id = {id} AND {condition} FOR UPDATE OF job SKIP LOCKED
), gone AS (
  DELETE FROM {job} AS job USING picked WHERE job.id = picked.id RETURNING job.*
), dead AS (
  INSERT INTO {dead} (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, unique_key, group_key,
    errors, reason, created_at, batch_id)
  SELECT CASE WHEN EXISTS (SELECT FROM {dead} AS earlier WHERE earlier.id = job.id)
      THEN pg_catalog.gen_random_uuid() ELSE job.id END,
    job.queue, job.kind, job.args, job.headers, job.priority, job.attempt, job.max_attempts, job.crashes,
    job.unique_key, job.group_key, job.errors, {reason}, job.created_at, job.batch_id
  FROM gone AS job
  RETURNING id, queue, kind, crashes
)
SELECT id, queue, kind, crashes, true FROM dead""",
        id=job_id,
        condition=condition,
        reason=reason,
    )


def select_kind(schema: str, job_id: UUID) -> str:
    """The kind of a job that waits or runs. Index: the primary key; no locks; one row."""
    return render(schema, "SELECT job.kind FROM {job} AS job WHERE job.id = {id}", id=job_id)


def postpone_row(schema: str, job_id: UUID, seconds: float) -> str:
    """Schedule the job for `seconds` from now; returns its id and kind. A job of a group holds up those after it.

    No row if it is a suspect, or leased, or another transaction has it. Index: the primary key.
    """
    return render(
        schema,
        "UPDATE {job} SET state = CASE state WHEN 'grouped' THEN 'grouped' ELSE 'scheduled' END, "
        "run_at = pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => {seconds}) "
        "WHERE id = (SELECT job.id FROM {job} AS job WHERE job.id = {id} AND {free} FOR UPDATE SKIP LOCKED) "
        "RETURNING id, kind",
        id=job_id,
        seconds=seconds,
        free=_IS_NO_SUSPECT,
    )
