"""Explain: queries for the reason why a job or a queue does not run. They read one row, or an index's first entries.

No locks. The row of a running job was deleted by a transaction that is still open; a job that a session has locked
looks the same. In both cases the row's `xmax` is the id of the transaction, or of one of its savepoints. Each has a
lock on its own id, which leads to the session; the lock of a prepared transaction has no session.
"""

from typing import Any
from uuid import UUID

from sqlalchemy import Select, TextClause, TextualSelect, select, text

from outboxq.statements.added import added_order
from outboxq.statements.builtin import pg
from outboxq.statements.cancel import COUNTS
from outboxq.statements.coalesce import IS_TAKEN_ALONG
from outboxq.statements.doctor.sessions import qualified, schema_name
from outboxq.tables import Instant

# Counts stop at this number.
MOST_COUNTED = 10_000
# The most jobs of a coalescing key, and the most open callback batches, that are checked.
MOST_LOOKED_AT = 1_000

_OPEN = "SELECT transactionid FROM pg_catalog.pg_locks WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' "
_OPEN += "AND granted"
_DUE = "run_at <= pg_catalog.statement_timestamp()"

_JOB = """\
SELECT job.id, job.queue, job.kind, job.state, job.priority, job.seq, job.attempt, job.max_attempts, job.crashes,
  job.parked, job.unique_key, job.group_key,
  extract(epoch FROM job.run_at) AS run_at, extract(epoch FROM job.created_at) AS created_at,
  extract(epoch FROM job.expires_at) AS expires_at,
  extract(epoch FROM job.run_at - pg_catalog.statement_timestamp())::float8 AS due_in_seconds,
  extract(epoch FROM job.expires_at - pg_catalog.statement_timestamp())::float8 AS expires_in_seconds,
  pg_catalog.jsonb_extract_path_text(job.errors, '-1', 'type') AS error_type,
  pg_catalog.jsonb_extract_path_text(job.errors, '-1', 'message') AS error_message,
  holder.transactionid IS NOT NULL AS is_held, job.xmax::text AS xid, holder.pid AS holder,
  activity.application_name, activity.state AS activity, activity.wait_event_type, activity.wait_event,
  extract(epoch FROM pg_catalog.clock_timestamp() - activity.xact_start)::float8 AS held_seconds,
  CASE WHEN holder.pid IS NOT NULL THEN pg_catalog.pg_blocking_pids(holder.pid) END AS blockers,
  job.lease_owner, relay.host, relay.pid AS relay_pid,
  extract(epoch FROM relay.alive_until - pg_catalog.statement_timestamp())::float8 AS lease_seconds,
  extract(epoch FROM pg_catalog.statement_timestamp() - request.requested_at)::float8 AS cancelling_seconds,
  extract(epoch FROM pg_catalog.statement_timestamp() - paused.paused_at)::float8 AS kind_paused_seconds
FROM {job} AS job
LEFT JOIN LATERAL (
  SELECT transactionid, pid FROM pg_catalog.pg_locks
  WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted AND transactionid = job.xmax LIMIT 1
) AS holder ON true
LEFT JOIN pg_catalog.pg_stat_activity AS activity ON activity.pid = holder.pid
LEFT JOIN {relay} AS relay ON relay.id = job.lease_owner
LEFT JOIN {request} AS request ON {counts}
LEFT JOIN {paused} AS paused ON paused.queue = job.queue AND paused.kind = job.kind
WHERE job.id = CAST(:job_id AS uuid)"""


def job_facts(schema: str, job_id: UUID) -> TextualSelect:
    """Select a waiting or running job, its holder and lease, and since when its kind has been paused.

    The holder is the session whose transaction runs or locks the job. Index: the primary keys; one row.
    """
    statement = _JOB.format(
        job=qualified(schema, "job"),
        relay=qualified(schema, "relay"),
        request=qualified(schema, "cancel_request"),
        counts=COUNTS,
        paused=qualified(schema, "paused_kind"),
    )
    times = dict.fromkeys(("run_at", "created_at", "expires_at"), Instant())
    return text(statement).bindparams(job_id=str(job_id)).columns(**times)


def dead_facts(schema: str, job_id: UUID) -> TextClause:
    """Select the facts of a dead letter that `explain` shows. Index: the primary key; one row."""
    return text(
        "SELECT queue, kind, reason, attempt, "
        "extract(epoch FROM pg_catalog.statement_timestamp() - died_at)::float8 AS dead_seconds "
        f"FROM {qualified(schema, 'dead_job')} WHERE id = CAST(:job_id AS uuid)"
    ).bindparams(job_id=str(job_id))


_BATCH = """\
SELECT id, pg_catalog.jsonb_extract_path_text(callback, 'kind') AS kind,
  pg_catalog.jsonb_extract_path_text(callback, 'queue') AS queue, (
    SELECT pg_catalog.count(*) FROM (
      SELECT FROM {job} AS job WHERE job.batch_id = batch.id LIMIT :most) AS members
  ) AS members
FROM {batch} AS batch """


def batch_facts(schema: str, batch_id: UUID) -> TextClause:
    """Select the kind and queue of an open callback batch's callback job, and the number of the batch's jobs left.

    It explains why the callback job does not exist yet: that job is added, with the batch's id, when none is left.
    Index: the primary key, and job_batch; one row.
    """
    statement = _BATCH.format(job=qualified(schema, "job"), batch=qualified(schema, "batch"))
    return text(f"{statement}WHERE batch.id = CAST(:batch_id AS uuid)").bindparams(
        batch_id=str(batch_id), most=MOST_COUNTED + 1
    )


def batches_into(schema: str, queue: str) -> TextClause:
    """Select the oldest callback batch whose callback job will go to a queue, with the columns of `batch_facts`.

    Reads the first 1,000 open batches; one row.
    """
    statement = _BATCH.format(
        job=qualified(schema, "job"),
        batch=f"(SELECT id, callback FROM {qualified(schema, 'batch')} ORDER BY id LIMIT :looked_at)",
    )
    into = "WHERE pg_catalog.jsonb_extract_path_text(batch.callback, 'queue') = CAST(:queue AS text)"
    return text(f"{statement}{into} ORDER BY batch.id LIMIT 1").bindparams(
        queue=queue, most=MOST_COUNTED + 1, looked_at=MOST_LOOKED_AT
    )


def writers(schema: str) -> TextClause:
    """Select sessions whose open transaction may have added jobs, which are not visible yet, the oldest first.

    Bound: 100 rows.
    """
    return text(
        """\
SELECT activity.pid, activity.application_name, activity.state,
  extract(epoch FROM pg_catalog.clock_timestamp() - activity.xact_start)::float8 AS seconds
FROM pg_catalog.pg_stat_activity AS activity
WHERE activity.backend_xid IS NOT NULL AND activity.pid <> pg_catalog.pg_backend_pid() AND EXISTS (
  SELECT FROM pg_catalog.pg_locks AS locks JOIN pg_catalog.pg_class AS class ON class.oid = locks.relation
    JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
  WHERE locks.pid = activity.pid AND locks.locktype = 'relation' AND locks.granted
    AND locks.mode = 'RowExclusiveLock' AND namespace.nspname = :schema AND class.relname = 'job'
    AND locks.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
)
ORDER BY activity.xact_start NULLS LAST LIMIT 100"""
    ).bindparams(schema_name(schema))


def clock() -> Select[Any]:
    """Select the database's time."""
    return select(pg.clock_timestamp(type_=Instant()))


def queue_facts(schema: str, queue: str) -> TextClause:
    """Select the operators' settings of a queue, and the seconds by which its rate's tokens are reserved in advance.

    A token is the permission to begin one job. Index: primary keys; one row.
    """
    return text(
        f"""\
SELECT extract(epoch FROM pg_catalog.statement_timestamp() - queue.paused_at)::float8 AS paused_seconds,
  asked.name, queue.max_running AS running, queue.max_per_group AS per_group, queue.rate_jobs, queue.rate_seconds,
  queue.rate_burst,
  extract(epoch FROM rate.tat - pg_catalog.clock_timestamp())::float8 AS ahead_seconds
FROM (SELECT CAST(:queue AS text) AS name) AS asked
LEFT JOIN {qualified(schema, "queue")} AS queue ON queue.name = asked.name
LEFT JOIN {qualified(schema, "rate")} AS rate ON rate.name = asked.name"""
    ).bindparams(queue=queue)


_IN_GROUPS = ("group_key IS NOT NULL AND state = 'grouped'", 'group_key COLLATE "C", seq')
# Jobs that may run next, in the relays' order; then jobs that run later, and jobs that are running.
_DUE_NOW = (
    ("state = 'ready'", "(-priority), seq"),
    (f"state = 'scheduled' AND {_DUE}", "run_at"),
    (f"state = 'group_waiting' AND {_DUE}", "run_at"),
)
_LATER = (
    ("state = 'suspect'", "seq"),
    ("state = 'group_suspect'", "run_at"),
    ("state = 'scheduled'", "run_at"),
    _IN_GROUPS,
    ("state = 'group_waiting'", "run_at"),
)
_RUNNING = (
    ("state = 'leased'", "lease_owner"),
    ("state = 'group_leased'", "run_at"),
    ("state = 'ready'", "(-priority), seq"),
    ("state = 'scheduled'", "run_at"),
    _IN_GROUPS,
)
_FREE = " AND NOT xmax = ANY (ARRAY(SELECT transactionid FROM open))"
_GROUP_DUE = """\
SELECT id FROM (
  SELECT id, run_at, xmax AS holder FROM {job} WHERE queue = CAST(:queue AS text) AND group_key IS NOT NULL
    AND state = 'grouped' ORDER BY group_key COLLATE "C", seq LIMIT :looked_at) AS first
WHERE {due} AND NOT holder = ANY (ARRAY(SELECT transactionid FROM open)) LIMIT 1"""


def next_job(schema: str, queue: str) -> TextClause:
    """Select the id of the job of a queue that runs next; without one, of one that runs later, or that runs now.

    Indexes: those of the claims, one entry of each in addition to those of running jobs; of the groups, the first 1,000
    entries. All leased jobs are read.
    """
    job = qualified(schema, "job")

    def first(wanted: str, order: str, also: str) -> str:
        return f"SELECT id FROM {job} WHERE queue = CAST(:queue AS text) AND {wanted}{also} ORDER BY {order} LIMIT 1"

    looks = [
        *(first(*arm, _FREE) for arm in _DUE_NOW),
        _GROUP_DUE.format(job=job, due=_DUE),
        *(first(*arm, _FREE) for arm in _LATER),
        *(first(*arm, "") for arm in _RUNNING),
    ]
    found = "\nUNION ALL\n".join(
        f"SELECT id, {place} AS place FROM ({look}) AS l{place}" for place, look in enumerate(looks)
    )
    return text(
        f"WITH open AS MATERIALIZED ({_OPEN})\nSELECT found.id FROM (\n{found}\n) AS found ORDER BY found.place LIMIT 1"
    ).bindparams(queue=queue, looked_at=MOST_LOOKED_AT)


def ready_before(schema: str, queue: str, priority: int, seq: int) -> TextClause:
    """Count the jobs in state `ready` of a queue that come before this priority and `seq` and do not run, up to 10,001.

    Index: job_ready.
    """
    before = "((-priority), seq) < (CAST(:priority AS int), CAST(:seq AS bigint))"
    is_free = f"NOT xmax = ANY (ARRAY({_OPEN}))"
    return _count(schema, f"queue = CAST(:queue AS text) AND state = 'ready' AND {before} AND {is_free}").bindparams(
        queue=queue, priority=-priority, seq=seq
    )


def suspects_before(schema: str, queue: str, seq: int) -> TextClause:
    """Count the suspects (jobs that ran when their relay died) of a queue before this `seq`, up to 10,001.

    Index: job_suspect.
    """
    return _count(
        schema, "queue = CAST(:queue AS text) AND state = 'suspect' AND seq < CAST(:seq AS bigint)"
    ).bindparams(queue=queue, seq=seq)  # fmt: skip


def group_before(schema: str, queue: str, group: str, seq: int) -> TextClause:
    """Count the jobs of a group before this `seq`, up to 10,001. Index: job_group."""
    return _count(
        schema,
        "queue = CAST(:queue AS text) AND group_key IS NOT NULL AND state <> 'group_waiting' "
        'AND group_key COLLATE "C" = CAST(:group AS text) AND seq < CAST(:seq AS bigint)',
    ).bindparams(queue=queue, group=group, seq=seq)


def first_in_group(schema: str, queue: str, group: str) -> TextClause:
    """Select the first job of a group. Index: job_group, one entry."""
    return text(
        f"SELECT id FROM {qualified(schema, 'job')} WHERE queue = CAST(:queue AS text) AND group_key IS NOT NULL "
        "AND state <> 'group_waiting' AND group_key COLLATE \"C\" = CAST(:group AS text) "
        'ORDER BY group_key COLLATE "C", seq LIMIT 1'
    ).bindparams(queue=queue, group=group)


def _count(schema: str, condition: str) -> TextClause:
    found = f"SELECT FROM {qualified(schema, 'job')} WHERE {condition} LIMIT :most"
    return text(f"SELECT pg_catalog.count(*) FROM ({found}) AS found").bindparams(most=MOST_COUNTED + 1)


def newest_of_key(schema: str, key: str, job_id: UUID) -> TextClause:
    """Select one row about a coalescing key whose jobs one run merges: the newest of these jobs, and their number.

    No row if a run does not merge the job `job_id`, because its producer set a later time. Index: job_unique, 1,000
    entries of it.
    """
    return text(
        f"""\
SELECT id, pg_catalog.count(*) OVER () AS jobs FROM (
  SELECT id, seq, headers FROM {qualified(schema, "job")}
  WHERE unique_key = CAST(:key AS text) AND {IS_TAKEN_ALONG} LIMIT :looked_at
) AS found
WHERE EXISTS (SELECT FROM {qualified(schema, "job")} WHERE id = CAST(:job_id AS uuid) AND {IS_TAKEN_ALONG})
ORDER BY {added_order("found")} DESC, seq DESC LIMIT 1"""
    ).bindparams(key=key, job_id=str(job_id), looked_at=MOST_LOOKED_AT)


def busiest_relays() -> TextClause:
    """Select the relays' 3 connections with the oldest transactions, and the age of each in seconds.

    `explain` says by them what keeps relays busy.
    """
    return text(
        """\
SELECT pid, extract(epoch FROM pg_catalog.clock_timestamp() - xact_start)::float8 AS seconds
FROM pg_catalog.pg_stat_activity
WHERE datname = pg_catalog.current_database() AND application_name = 'outboxq relay' AND backend_xid IS NOT NULL
ORDER BY xact_start NULLS LAST LIMIT 3"""
    )
