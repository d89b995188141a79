"""The limit of a queue's jobs that run at a time: the part of claims that enforces it.

In transaction mode the limit consists of slots: advisory locks, one for each job that may run, which a claim's
transaction holds to its end. They need no row, and disappear with the backend. In lease mode no transaction is open
while a job runs, so one claim of the queue at a time counts the leased jobs, and takes as many as there is room for.
"""

from typing import LiteralString
from uuid import UUID

from psycopg import sql

from outboxq.statements.by_index import NO_SCANS
from outboxq.statements.numbers import next_token, one_attempt_less
from outboxq.statements.render import compose, fill, render

# The slots are tried from a random one on, so that claims seldom try a taken slot. If two slots' names have the same
# hash, the queue runs one job less at a time, never one more.
_SLOT: LiteralString = """\
wanted (queue, most, first) AS MATERIALIZED (
  SELECT {queue}::text, {most}::integer, pg_catalog.random()
), room AS MATERIALIZED (
  SELECT FROM wanted CROSS JOIN LATERAL pg_catalog.generate_series(0, most - 1) AS place
  WHERE pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext({locks}), pg_catalog.hashtext(
    wanted.queue || pg_catalog.chr(31) || ((place + pg_catalog.floor(first * most::float8)::integer) % most)::text))
  LIMIT 1
)"""
# Indexes: job_leased and job_group_state, as many rows as there are leased jobs.
_COUNT: LiteralString = """\
wanted (queue, most) AS MATERIALIZED (
  SELECT {queue}::text, {most}::integer
), counted AS MATERIALIZED (
  SELECT most, (
    SELECT pg_catalog.count(*) FROM {job} AS job WHERE job.state = 'leased' AND job.queue = wanted.queue
  ) + (
    SELECT pg_catalog.count(*) FROM {job} AS job WHERE job.state = 'group_leased' AND job.queue = wanted.queue
  ) AS running FROM wanted
), room (free) AS MATERIALIZED (
  SELECT most - running FROM counted WHERE running < most
)"""
# Without an index's statistics, a walk over the table may seem as cheap for the few leased jobs.
_BY_INDEX = (NO_SCANS, "SET LOCAL lock_timeout = '2s'")


def lock_class(schema: str) -> str:
    """Return the name whose hash is the first of the two keys of this installation's advisory locks for limits."""
    return f"outboxq_{schema} limit"


def room(schema: str, queue: object, most: object, *, counts_leases: bool) -> sql.Composed:
    """Return CTEs for a claim, from `wanted` to `room`: `room` has a row if the queue's limit allows another job.

    Without `counts_leases` they take a free slot (an advisory lock) until the transaction ends; this locks no rows,
    never waits, and tries at most as many locks as the limit has slots. With `counts_leases` the column `free` of
    `room` is the number of jobs for which there is room. Because another claim may be about to change that count, the
    CTEs must follow `lock_claims` in a separate statement, whose snapshot sees the previous claim's commit.

    Args:
        queue: The queue's name, or SQL such as `$1`.
        most: The limit, as a number or as SQL.
        counts_leases: True to count leased jobs, for a claim in lease mode, instead of taking a slot.
    """
    return compose(schema, _COUNT if counts_leases else _SLOT, queue=queue, most=most, locks=lock_class(schema))


def lock_claims(schema: str, queue: str) -> tuple[str, ...]:
    """Return SQL that keeps out other claims of a queue in lease mode until COMMIT, so that one claim can count jobs.

    The statements are settings, and one that returns a row. The latter waits for such claims, each of which is one
    string up to its COMMIT, and fails (55P03) if one of them hangs.
    """
    lock = "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext({locks}), pg_catalog.hashtext({queue}))"
    return *_BY_INDEX, fill(lock, locks=lock_class(schema), queue=queue)


def take_slot(schema: str, queue: str, most: int) -> str:
    """Return SQL that takes a free slot of a queue's limit until the transaction ends.

    It returns one row, true if a slot was free. A slot is an advisory lock, one for each of the `most` jobs that may
    run at a time.
    """
    slot = room(schema, queue, most, counts_leases=False)
    return render(schema, "WITH {slot}\nSELECT EXISTS (SELECT FROM room)", slot=slot)


def return_suspect(schema: str, job_id: UUID, token: int, crashes: int, *, in_group: bool = False) -> str:
    """Return SQL that puts back a claimed suspect (a job that ran when its relay died) that found no room in the limit.

    It has not begun, so the attempt is not counted; `crashes` is the number from before the claim. Nothing changes if
    another relay has taken the job back: its row has another token then. Index: the primary key.
    """
    return render(
        schema,
        "UPDATE {job} AS job SET state = {suspect}, attempt = {attempt}, crashes = {crashes}, lease_owner = NULL, "
        "lease_token = {next_token} WHERE job.id = {id} AND job.lease_token = {token}",
        suspect="group_suspect" if in_group else "suspect",
        attempt=sql.SQL(one_attempt_less("job.attempt")),
        next_token=sql.SQL(next_token("job.lease_token")),
        id=job_id,
        token=token,
        crashes=crashes,
    )
