"""Leases: one row per relay process, and the sweep that takes jobs from owners that are not alive.

Every time is the database's. The statements are sent as text on the lease's own connection, a transaction each.
"""

from uuid import UUID

from psycopg import sql

from outboxq.statements.aside import dead_letter_row
from outboxq.statements.numbers import next_token, one_attempt_less
from outboxq.statements.render import compose, render

# More crashes than the column can hold: no job becomes a dead letter.
NEVER = 32_768

_DIED = "its relay died or stalled while the job ran"
# The newest 24 records and this one.
_CRASH_RECORD = """\
pg_catalog.jsonb_path_query_array(job.errors, '$[last - 23 to last]')
  || pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object(
    'attempt', job.attempt, 'type', 'outboxq.RelayDied', 'message', {message}::text, 'where', '[]'::jsonb,
    'at', pg_catalog.clock_timestamp()))"""
# A new seq puts the job behind the other suspects, which a job that kills its relays would keep waiting; a new token
# keeps every other run from completing it.
_TAKE = """\
WITH lost AS MATERIALIZED (
  SELECT job.id, job.crashes >= {max_crashes} AS over FROM {job} AS job
  WHERE job.state = 'leased' AND {lost}
  LIMIT {limit} FOR UPDATE OF job SKIP LOCKED
), back AS (
  UPDATE {job} AS job SET state = 'suspect', lease_owner = NULL, lease_token = {token}, seq = DEFAULT,
    attempt = {attempt}, crashes = {crashes}, errors = {record}
  FROM lost WHERE job.id = lost.id AND NOT lost.over
  RETURNING job.id, job.queue, job.kind, job.crashes
), gone AS (
  DELETE FROM {job} AS job USING lost WHERE job.id = lost.id AND lost.over RETURNING job.*
), dead AS (
  INSERT INTO {dead} (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, unique_key, group_key,
    errors, reason, created_at)
  SELECT CASE WHEN EXISTS (SELECT FROM {dead} AS earlier WHERE earlier.id = job.id
      AND (earlier.queue, earlier.kind) <> (job.queue, job.kind)) THEN pg_catalog.gen_random_uuid() ELSE job.id END,
    job.queue, job.kind, job.args, job.headers, job.priority, {attempt},
    job.max_attempts, job.crashes, job.unique_key, job.group_key, {record},
    'crashed ' || job.crashes::text || ' of ' || {max_crashes}::text || ' times while it ran alone', job.created_at
  FROM gone AS job
  ON CONFLICT (id) DO UPDATE SET queue = excluded.queue, kind = excluded.kind, args = excluded.args,
    headers = excluded.headers, priority = excluded.priority, attempt = excluded.attempt,
    max_attempts = excluded.max_attempts, crashes = excluded.crashes, unique_key = excluded.unique_key,
    group_key = excluded.group_key, errors = excluded.errors, reason = excluded.reason,
    created_at = excluded.created_at, died_at = pg_catalog.clock_timestamp()
  RETURNING id, queue, kind, crashes
)
SELECT id, queue, kind, crashes, false FROM back UNION ALL SELECT id, queue, kind, crashes, true FROM dead"""


def extend(schema: str, owner: UUID, seconds: float, host: str, pid: int) -> str:
    """Extend the lease to `seconds` from now, or begin it. Index: the primary key; one row.

    Reviving a lease that had run out is safe: jobs that were taken from it meanwhile have other tokens.
    """
    return render(
        schema,
        "INSERT INTO {relay} AS lease (id, alive_until, host, pid) "
        "VALUES ({owner}, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => {seconds}), {host}, {pid}) "
        "ON CONFLICT (id) DO UPDATE SET alive_until = excluded.alive_until",
        owner=owner,
        seconds=seconds,
        host=host,
        pid=pid,
    )


def end(schema: str, owner: UUID) -> str:
    """Give the lease up. The next sweep of any relay reaps the jobs that are still under it."""
    return render(schema, "DELETE FROM {relay} WHERE id = {owner}", owner=owner)


def reap(schema: str, max_crashes: int, limit: int) -> str:
    """Take up to `limit` jobs whose owner is not alive: back as suspects, or to the dead letters over the limit.

    Returns id, queue, kind, crashes and whether it died, a row each. The attempt that never ended is not counted; the
    crash was counted with the claim. Index: job_leased, all of which is read: as many rows as all slots hold. Locks:
    the jobs, skipping one that is just being completed.
    """
    return _take(schema, _lost(schema), max_crashes, limit, _DIED, sql.SQL("job.crashes"))


def reap_one(schema: str, job_id: UUID) -> str:
    """Reap one job, if its owner is still not alive: as a suspect, and never as a dead letter, whatever its crashes."""
    return _take(schema, _lost_one(schema, job_id), NEVER, 1, _DIED, sql.SQL("job.crashes"))


def dead_letter_lost(schema: str, job_id: UUID, reason: str) -> str:
    """Make a dead letter of one job whose owner is not alive: its row as it stands, no numbers changed."""
    return dead_letter_row(schema, job_id, _lost_one(schema, job_id), reason)


def lost_jobs(schema: str, limit: int) -> str:
    """The ids of up to `limit` jobs whose owner is not alive, at random: none keeps the others out for ever.

    Index: job_leased, all of which is read; no locks.
    """
    return render(
        schema,
        "SELECT job.id FROM {job} AS job WHERE job.state = 'leased' AND {lost} "
        "ORDER BY pg_catalog.random() LIMIT {limit}",
        lost=_lost(schema),
        limit=limit,
    )


def _lost(schema: str) -> sql.Composable:
    return compose(
        schema,
        "NOT EXISTS (SELECT FROM {relay} AS owner WHERE owner.id = job.lease_owner "
        "AND owner.alive_until > pg_catalog.clock_timestamp())",
    )


def _lost_one(schema: str, job_id: UUID) -> sql.Composable:
    # With the state, because `dead_letter_row` has no condition on it.
    return compose(schema, "job.state = 'leased' AND job.id = {id} AND {lost}", id=job_id, lost=_lost(schema))


def take_back(schema: str, job_id: UUID, token: int, max_crashes: int, message: str) -> str:
    """Reap one job of a relay that lives, because the run of the job has died; `message` says why."""
    return _take(schema, _ours(schema, job_id, token), max_crashes, 1, message, sql.SQL("job.crashes"))


def take_back_locked(schema: str, job_id: UUID, token: int, crashes: int) -> str:
    """Take back one job whose row another transaction had locked. It did not fail: `crashes` are as before."""
    message = "another transaction held the job's row when its handler had ended"
    return _take(schema, _ours(schema, job_id, token), NEVER, 1, message, sql.Literal(crashes))


def _ours(schema: str, job_id: UUID, token: int) -> sql.Composable:
    return compose(schema, "job.id = {id} AND job.lease_token = {token}", id=job_id, token=token)


def _take(
    schema: str, lost: sql.Composable, max_crashes: int, limit: int, message: str, crashes: sql.Composable
) -> str:
    return render(
        schema,
        _TAKE,
        lost=lost,
        limit=limit,
        max_crashes=max_crashes,
        token=sql.SQL(next_token("job.lease_token")),
        attempt=sql.SQL(one_attempt_less("job.attempt")),
        record=compose(schema, _CRASH_RECORD, message=message),
        crashes=crashes,
    )


def forget_relays(schema: str) -> str:
    """Remove the rows of relays that have been dead for a day and whose lease has no jobs any more."""
    return render(
        schema,
        "WITH old AS MATERIALIZED (SELECT id FROM {relay} "
        "WHERE alive_until < pg_catalog.clock_timestamp() - interval '1 day' LIMIT 100 FOR UPDATE SKIP LOCKED) "
        "DELETE FROM {relay} AS relay USING old WHERE relay.id = old.id "
        "AND NOT EXISTS (SELECT FROM {job} WHERE state = 'leased' AND lease_owner = relay.id)",
    )


def leased_jobs(schema: str, owner: UUID) -> str:
    """The jobs under a lease and their tokens. Index: job_leased; no locks."""
    leased = "SELECT id::text, lease_token FROM {job} WHERE state = 'leased' AND lease_owner = {owner}"
    return render(schema, leased, owner=owner)


def suspect_queues(schema: str, queues: tuple[str, ...]) -> str:
    """Which of these queues have suspects. Index: job_suspect, a probe a queue; no locks."""
    return render(
        schema,
        "SELECT wanted.name FROM pg_catalog.unnest({queues}::text[]) AS wanted (name) "
        "WHERE EXISTS (SELECT FROM {job} WHERE queue = wanted.name AND state = 'suspect')",
        queues=list(queues),
    )
