"""The limit of jobs of a queue that run at a time: a part of the claims that keep it.

In transaction mode the limit has slots, advisory locks that a claim's transaction holds to its end: they need no row,
and end with the backend. In lease mode no transaction is open while a job runs, so one claim of the queue at a time
counts the leased jobs, and takes as many as there is room for.
"""

from typing import LiteralString
from uuid import UUID

from psycopg import sql

from outboxq.statements.by_index import NO_SCANS
from outboxq.statements.numbers import next_token, one_attempt_less
from outboxq.statements.render import compose, fill, render

# The slots are tried from a random one on: claims seldom try a taken slot. Two slots' names may have the same hash:
# then the queue runs a job less at a time, never one more.
_SLOT: LiteralString = """\
wanted (queue, most, first) AS MATERIALIZED (
  SELECT {queue}::text, {most}::integer, pg_catalog.random()
), room AS MATERIALIZED (
  SELECT FROM wanted CROSS JOIN LATERAL pg_catalog.generate_series(0, most - 1) AS place
  WHERE pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext({locks}), pg_catalog.hashtext(
    wanted.queue || pg_catalog.chr(31) || ((place + pg_catalog.floor(first * most::float8)::integer) % most)::text))
  LIMIT 1
)"""
# Index: job_leased and job_group_state, as many rows as run under leases.
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
# Without an index's statistics a walk over the table may seem as cheap to find the few leased jobs.
_BY_INDEX = (NO_SCANS, "SET LOCAL lock_timeout = '2s'")


def lock_class(schema: str) -> str:
    """The name of the advisory locks of an installation's limits; its hash is their first key."""
    return f"outboxq_{schema} limit"


def room(schema: str, queue: object, most: object, *, counts_leases: bool) -> sql.Composed:
    """The CTEs from `wanted` to `room`: a row in `room` if fewer jobs of the queue run than its limit allows.

    With `counts_leases` its column `free` is the number of jobs that there is room for.

    A slot that was free is ours until the transaction ends; it locks no rows, never waits, and tries at most as many
    locks as the limit has slots. Another claim may be about to change a count: so the count goes after `lock_claims`,
    in its own statement, whose snapshot sees the commit of the claim before.

    Args:
        queue: A name, or SQL such as `$1`; `most`, the limit, likewise.
        counts_leases: Count the jobs under leases, for a claim in lease mode, instead of taking a slot.
    """
    return compose(schema, _COUNT if counts_leases else _SLOT, queue=queue, most=most, locks=lock_class(schema))


def lock_claims(schema: str, queue: str) -> tuple[str, ...]:
    """Lock out other claims of a queue in lease mode, to count and claim; a row. Held until the claim's COMMIT.

    Waits for such claims, each of which is one string up to its COMMIT. Fails (55P03) if one hangs.
    """
    lock = "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext({locks}), pg_catalog.hashtext({queue}))"
    return *_BY_INDEX, fill(lock, locks=lock_class(schema), queue=queue)


def take_slot(schema: str, queue: str, most: int) -> str:
    """Take a slot of a limit for the rest of the transaction; one row: true if one was free."""
    slot = room(schema, queue, most, counts_leases=False)
    return render(schema, "WITH {slot}\nSELECT EXISTS (SELECT FROM room)", slot=slot)


def return_suspect(schema: str, job_id: UUID, token: int, crashes: int, *, in_group: bool = False) -> str:
    """Give back a suspect that was claimed and did not begin, in its place, with nothing counted.

    Index: the primary key. Its token fences off a reaper's changes.
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
