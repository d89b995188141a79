"""Move a job whose row makes every claim of its queue fail: to the dead letters, or to a later time.

The job is found by its id and moved unchanged: no value of its row is sent to the relay, or used in a computation,
because that value may be the reason of the failure.
"""

from uuid import UUID

from psycopg import sql

from outboxq.statements.render import render

WAITS = sql.SQL("job.state NOT IN ('leased', 'group_leased')")
# A suspect must run alone; a postponed one would be claimed together with others.
_IS_NO_SUSPECT = sql.SQL("job.state IN ('ready', 'scheduled', 'grouped')")


def dead_letter_row(schema: str, job_id: UUID, condition: sql.Composable, reason: str) -> str:
    """Return SQL that turns the job into a dead letter, if `condition` holds and no other transaction has locked it.

    It is for a job whose row makes other statements fail. It returns one row for the new dead letter: its id, queue,
    kind and crashes, and true, as `lease.reap` does. It returns no row if there is no such job. If a dead letter has
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
    """Return SQL that selects the kind of a job that waits or runs, for a log line about the job: one row.

    Index: the primary key; no locks.
    """
    return render(schema, "SELECT job.kind FROM {job} AS job WHERE job.id = {id}", id=job_id)


def postpone_row(schema: str, job_id: UUID, seconds: float) -> str:
    """Return SQL that postpones by `seconds` a job that cannot be claimed: one row (its id and kind).

    Later jobs of its group wait for it. No row is returned, and nothing changes, if the job is leased, or a suspect (it
    ran when its relay died), or if another transaction has locked it. Index: the primary key.
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
