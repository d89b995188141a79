"""Leases: one row per relay process, which it renews while it lives; and the sweep that takes jobs from dead relays.

A leased job has its owner's id, and its owner is dead once the row's time has passed. Every time is the database's. The
statements are sent as text on the lease's own connection, a transaction each.
"""

from typing import LiteralString
from uuid import UUID

from psycopg import sql

from outboxq.statements.added import headers_with_order
from outboxq.statements.aside import dead_letter_row
from outboxq.statements.numbers import next_token, one_attempt_less
from outboxq.statements.render import compose, render

# More crashes than the column can hold, so that no job becomes a dead letter.
NEVER = 32_768

RELAY_DIED, INTERRUPTED = "outboxq.RelayDied", "outboxq.Interrupted"
_DIED = "its relay died or stalled while the job ran"
# Keeps the newest 24 records, and this one.
_RECORD = """\
pg_catalog.jsonb_path_query_array(job.errors, '$[last - 23 to last]')
  || pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object(
    'attempt', job.attempt, 'type', {type}::text, 'message', {message}::text, 'where', '[]'::jsonb,
    'at', pg_catalog.clock_timestamp()))"""
# A new seq puts the job after the other suspects: a job that kills its relays would otherwise hold them up. A new token
# keeps every other run from completing it.
_TAKE = """\
WITH lost AS MATERIALIZED (
  SELECT job.id, job.crashes >= {max_crashes} AS over FROM {job} AS job
  WHERE job.state = {leased} AND {lost}
  LIMIT {limit} FOR UPDATE OF job SKIP LOCKED
), back AS (
  UPDATE {job} AS job SET {suspect}, lease_owner = NULL, lease_token = {token},
    attempt = {attempt}, crashes = {crashes}, errors = {record}
  FROM lost WHERE job.id = lost.id AND NOT lost.over
  RETURNING job.id, job.queue, job.kind, job.crashes
), gone AS (
  DELETE FROM {job} AS job USING lost WHERE job.id = lost.id AND lost.over RETURNING job.*
), dead AS (
  INSERT INTO {dead} (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, unique_key, group_key,
    errors, reason, created_at, batch_id)
  SELECT CASE WHEN EXISTS (SELECT FROM {dead} AS earlier WHERE earlier.id = job.id
      AND (earlier.queue, earlier.kind) <> (job.queue, job.kind)) THEN pg_catalog.gen_random_uuid() ELSE job.id END,
    job.queue, job.kind, job.args, {headers}, job.priority, {attempt},
    job.max_attempts, job.crashes, job.unique_key, job.group_key, {record},
    'crashed ' || job.crashes::text || ' of ' || {max_crashes}::text || ' times while it ran alone', job.created_at,
    job.batch_id
  FROM gone AS job
  ON CONFLICT (id) DO UPDATE SET queue = excluded.queue, kind = excluded.kind, args = excluded.args,
    headers = excluded.headers, priority = excluded.priority, attempt = excluded.attempt,
    max_attempts = excluded.max_attempts, crashes = excluded.crashes, unique_key = excluded.unique_key,
    group_key = excluded.group_key, errors = excluded.errors, reason = excluded.reason,
    created_at = excluded.created_at, batch_id = excluded.batch_id, died_at = pg_catalog.clock_timestamp()
  RETURNING id, queue, kind, crashes
)
SELECT id, queue, kind, crashes, false FROM back UNION ALL SELECT id, queue, kind, crashes, true FROM dead"""


_SUSPECT = sql.SQL(f"state = 'suspect', headers = {headers_with_order('job')}, seq = DEFAULT")
# In a group a suspect keeps its place. Its new run_at puts it after the suspects of other groups.
_GROUP_SUSPECT = sql.SQL("state = 'group_suspect', run_at = pg_catalog.clock_timestamp()")


def extend(schema: str, owner: UUID, seconds: float, host: str, pid: int) -> str:
    """Return SQL that extends a relay's lease to `seconds` from now, or begins it. Index: the primary key; one row.

    An expired lease may be extended: jobs that were taken from it have other tokens, so the relay can no longer settle
    them.
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
    """Return SQL that deletes a relay's lease; any relay's next `reap` takes back the jobs still under it."""
    return render(schema, "DELETE FROM {relay} WHERE id = {owner}", owner=owner)


def reap(schema: str, max_crashes: int, limit: int, *, in_group: bool = False) -> str:
    """Return SQL that takes back up to `limit` jobs whose relay is dead, so that other relays claim them.

    Each becomes a suspect (a job that ran when its relay died), or a dead letter if it has crashed more than
    `max_crashes` times. It returns a row each: id, queue, kind, crashes, and true if it is a dead letter now. The
    attempt that never ended is not counted; the claim counted the crash. Index: job_leased, all of it: as many rows as
    all slots hold. Locks: the jobs, skipping one that is just being completed.

    Args:
        in_group: True for grouped jobs, which keep their places. Index: job_group_state, all of its leased jobs.
    """
    return _take(schema, _lost(schema), max_crashes, limit, _DIED, sql.SQL("job.crashes"), in_group=in_group)


def reap_one(schema: str, job_id: UUID, *, in_group: bool = False) -> str:
    """Return SQL that takes back one job as `reap` does, if its relay is still dead, for use after `reap` has failed.

    The job becomes a suspect (it ran when its relay died), and never a dead letter.
    """
    lost = compose(schema, "job.id = {id} AND {lost}", id=job_id, lost=_lost(schema))
    return _take(schema, lost, NEVER, 1, _DIED, sql.SQL("job.crashes"), in_group=in_group)


def dead_letter_lost(schema: str, job_id: UUID, reason: str) -> str:
    """Return SQL that turns one job whose relay is dead into a dead letter, because `reap_one` cannot change its row.

    Its numbers, such as crashes, stay.
    """
    # With the state, because `dead_letter_row` does not test it.
    is_leased: LiteralString = "job.state IN ('leased', 'group_leased') AND job.id = {id} AND {lost}"
    return dead_letter_row(schema, job_id, compose(schema, is_leased, id=job_id, lost=_lost(schema)), reason)


def lost_jobs(schema: str, limit: int, *, in_group: bool = False) -> str:
    """Select up to `limit` random ids of jobs whose relay is dead, to take them back one by one.

    They are random, so that jobs that cannot be taken back do not hold up the others for ever. Index: job_leased, or
    job_group_state, all of it; no locks.
    """
    return render(
        schema,
        "SELECT job.id FROM {job} AS job WHERE job.state = {leased} AND {lost} "
        "ORDER BY pg_catalog.random() LIMIT {limit}",
        leased=_leased(in_group=in_group),
        lost=_lost(schema),
        limit=limit,
    )


def _lost(schema: str) -> sql.Composable:
    return compose(
        schema,
        "NOT EXISTS (SELECT FROM {relay} AS owner WHERE owner.id = job.lease_owner "
        "AND owner.alive_until > pg_catalog.clock_timestamp())",
    )


def take_back(schema: str, job_id: UUID, token: int, max_crashes: int, message: str, *, in_group: bool = False) -> str:
    """Return SQL that takes back one leased job as `reap` does, although its relay lives, because its run was lost.

    `message` becomes the message of the job's error. Nothing changes if the job's row has another token.
    """
    ours = _ours(schema, job_id, token)
    return _take(schema, ours, max_crashes, 1, message, sql.SQL("job.crashes"), in_group=in_group)


def take_back_locked(schema: str, job_id: UUID, token: int, crashes: int, *, in_group: bool = False) -> str:
    """Return SQL that takes back one leased job as a suspect, because its row was locked when its handler had ended.

    A suspect, usually a job that ran when its relay died, is claimed with care. This job did not crash: `crashes` is
    the number from before its claim, and is written back. Nothing changes if the job's row has another token.
    """
    message = "another transaction held the job's row when its handler had ended"
    return _take(schema, _ours(schema, job_id, token), NEVER, 1, message, sql.Literal(crashes), in_group=in_group)


def _ours(schema: str, job_id: UUID, token: int) -> sql.Composable:
    return compose(schema, "job.id = {id} AND job.lease_token = {token}", id=job_id, token=token)


def _leased(*, in_group: bool) -> str:
    return "group_leased" if in_group else "leased"


def _take(
    schema: str,
    lost: sql.Composable,
    max_crashes: int,
    limit: int,
    message: str,
    crashes: sql.Composable,
    *,
    in_group: bool = False,
) -> str:
    return render(
        schema,
        _TAKE,
        leased=_leased(in_group=in_group),
        suspect=_GROUP_SUSPECT if in_group else _SUSPECT,
        headers=sql.SQL(headers_with_order("job")),
        lost=lost,
        limit=limit,
        max_crashes=max_crashes,
        token=sql.SQL(next_token("job.lease_token")),
        attempt=sql.SQL(one_attempt_less("job.attempt")),
        record=compose(schema, _RECORD, type=RELAY_DIED, message=message),
        crashes=crashes,
    )


def note_interrupted(schema: str, job_ids: list[str], message: str) -> str:
    """Return SQL that records in the errors of interrupted jobs, with this message, that they were interrupted.

    Only jobs that wait again are changed. It returns no rows. Index: the primary key. Locks: the rows; skips those that
    other transactions hold.
    """
    return render(
        schema,
        "UPDATE {job} AS job SET errors = {record} WHERE id = ANY (ARRAY(SELECT id FROM {job} WHERE "
        "id = ANY ({ids}::uuid[]) AND state IN ('ready', 'scheduled', 'grouped') FOR UPDATE SKIP LOCKED))",
        ids=job_ids,
        record=compose(schema, _RECORD, type=INTERRUPTED, message=message),
    )


def forget_relays(schema: str) -> str:
    """Return SQL that removes the rows (leases) of relays that have been dead for a day and have no leased jobs."""
    return render(
        schema,
        "WITH old AS MATERIALIZED (SELECT id FROM {relay} "
        "WHERE alive_until < pg_catalog.clock_timestamp() - interval '1 day' LIMIT 100 FOR UPDATE SKIP LOCKED) "
        "DELETE FROM {relay} AS relay USING old WHERE relay.id = old.id "
        "AND NOT EXISTS (SELECT FROM {job} WHERE state = 'leased' AND lease_owner = relay.id) "
        "AND NOT EXISTS (SELECT FROM {job} WHERE state = 'group_leased' AND lease_owner = relay.id)",
    )


def leased_jobs(schema: str, owner: UUID) -> str:
    """Select the jobs that `owner` has leased: id, lease token, and true if the job belongs to a group.

    With it, a relay finds jobs that none of its slots runs. Indexes: job_leased; job_group_state, all leased jobs of
    groups; no locks.
    """
    leased: LiteralString = (
        "SELECT id::text, lease_token, false FROM {job} WHERE state = 'leased' AND lease_owner = {owner} "
        "UNION ALL "
        "SELECT id::text, lease_token, true FROM {job} WHERE state = 'group_leased' AND lease_owner = {owner}"
    )
    return render(schema, leased, owner=owner)


def look_around(schema: str, queues: tuple[str, ...]) -> str:
    """Select what a relay must know of these queues: settings, suspects, groups, cancellations, the next schedule.

    The rows have four columns: a word, a name, a second name or NULL, and JSON or NULL. A suspect is a job that ran
    when its relay died.

    - 'suspects', queue: the queue has suspects. Index: job_suspect, a probe a queue.
    - 'groups', queue: the queue has jobs of groups. Index: job_group, a probe a queue.
    - 'group_suspects', queue: it has suspects in groups. Index: job_group_state, a probe a queue.
    - 'group_leases': jobs of groups are leased, in any queue. Index: job_group_state, one probe.
    - 'limits', queue, NULL, settings: its limits and its rate, if it has any.
    - 'paused', queue, kind: jobs of this kind are not to run.
    - 'cancel', job's id, outcome: the job is to be ended. Up to 1,000, the newest first. Index: the jobs' primary key,
      a probe for each request.
    - 'schedule', its name, NULL, seconds: the schedule that is due next, and the seconds until then; negative if it is
      due. Index: schedule_next, its first entry.

    The tables of settings are small, and read whole. No locks.
    """
    return render(schema, _LOOK_AROUND, queues=list(queues))


_LOOK_AROUND: LiteralString = """\
SELECT 'suspects', wanted.name, NULL::text, NULL::text FROM pg_catalog.unnest({queues}::text[]) AS wanted (name)
WHERE EXISTS (SELECT FROM {job} WHERE queue = wanted.name AND state = 'suspect')
UNION ALL
SELECT 'groups', wanted.name, NULL, NULL FROM pg_catalog.unnest({queues}::text[]) AS wanted (name)
CROSS JOIN LATERAL (SELECT FROM {job} WHERE queue = wanted.name AND group_key COLLATE "C" > ''
  AND state <> 'group_waiting' ORDER BY group_key COLLATE "C", seq LIMIT 1) AS first
UNION ALL
SELECT 'group_suspects', wanted.name, NULL, NULL FROM pg_catalog.unnest({queues}::text[]) AS wanted (name)
WHERE EXISTS (SELECT FROM {job} WHERE queue = wanted.name AND state = 'group_suspect')
UNION ALL
SELECT 'group_leases', NULL, NULL, NULL WHERE EXISTS (SELECT FROM {job} WHERE state = 'group_leased')
UNION ALL
SELECT 'limits', name, NULL, pg_catalog.json_build_object('running', max_running, 'per_group', max_per_group,
  'rate_jobs', rate_jobs, 'rate_seconds', rate_seconds, 'rate_burst', rate_burst)::text
FROM {queue_table} WHERE name = ANY ({queues}::text[])
  AND (max_running IS NOT NULL OR max_per_group IS NOT NULL OR rate_jobs IS NOT NULL)
UNION ALL
SELECT 'paused', queue, kind, NULL FROM {paused_kind} WHERE queue = ANY ({queues}::text[])
UNION ALL
(SELECT 'cancel', job_id::text, outcome, NULL FROM {cancel_request} AS request WHERE NOT coalesce((
  SELECT job.unique_key IS NULL AND job.created_at > request.requested_at FROM {job} AS job
  WHERE job.id = request.job_id
), false) ORDER BY requested_at DESC LIMIT 1000)
UNION ALL
(SELECT 'schedule', name, NULL, extract(epoch FROM next_at - pg_catalog.clock_timestamp())::float8::text
FROM {schedule} WHERE paused_at IS NULL ORDER BY next_at LIMIT 1)"""
