"""The claim: take waiting jobs out of the table, in the transaction that will hold their effects.

Sent as text without parameters, so that claim and savepoint are one string and one round trip, and no plan from an
empty table is ever reused.
"""

from typing import LiteralString

from psycopg import sql

# The order in which `claim.py` reads a row.
RETURNED = (
    "id", "queue", "kind", "args::text", "headers::text", "priority", "attempt", "max_attempts", "crashes", "parked",
    "unique_key", "group_key", "errors::text", "run_at", "created_at", "seq",
)  # fmt: skip

# MATERIALIZED: a bare `id IN (SELECT ... LIMIT ...)` may be planned as a join whose limited side is run again for each
# row of the other, and then takes more than it asked for. Every eligibility test stands inside.
# Locks: the picked jobs, skipping those that another transaction holds. READ COMMITTED rechecks `picked` against the
# newest version of a row, so a job that was finished a moment ago is passed over.
_CLAIM = (
    sql.SQL(
        """\
WITH picked AS MATERIALIZED (
  SELECT id FROM {job}
  WHERE queue = {queue} AND {eligible}
    AND NOT EXISTS (SELECT FROM {queue_table} WHERE name = {queue} AND paused_at IS NOT NULL)
  ORDER BY {order}
  LIMIT """
    ),
    sql.SQL(
        """
  FOR UPDATE SKIP LOCKED
)
DELETE FROM {job} AS claimed USING picked WHERE claimed.id = picked.id
RETURNING {returned}, pg_current_xact_id()::text"""
    ),
)


class ClaimStatements:
    """The claims of one queue, formatted once for a schema."""

    def __init__(self, schema: str, queue: str) -> None:
        self._schema = schema
        self._queue = queue
        # Index job_ready (queue, (-priority), seq) WHERE state = 'ready': walked in exactly this order.
        self._ready = self._format("state = 'ready'", "(-priority), seq")
        # Index job_scheduled (queue, run_at) WHERE state = 'scheduled'. statement_timestamp(), unlike
        # clock_timestamp(), is stable and can bound the index.
        self._due = self._format("state = 'scheduled' AND run_at <= statement_timestamp()", "run_at")

    def _format(self, eligible: LiteralString, order: LiteralString) -> tuple[str, str]:
        """The claim's text before and after its limit."""
        before, after = (self._format_part(part, eligible, order) for part in _CLAIM)
        return before, after

    def _format_part(self, part: sql.SQL, eligible: LiteralString, order: LiteralString) -> str:
        return part.format(
            job=sql.Identifier(self._schema, "job"),
            queue_table=sql.Identifier(self._schema, "queue"),
            queue=sql.Literal(self._queue),
            eligible=sql.SQL(eligible),
            order=sql.SQL(order),
            returned=sql.SQL(", ".join(f"claimed.{column}" for column in RETURNED)),
        ).as_string(None)

    def ready(self, limit: int) -> str:
        """Claim up to `limit` ready jobs: higher priority first, then older first."""
        return str(int(limit)).join(self._ready)

    def due(self, limit: int) -> str:
        """Claim up to `limit` scheduled jobs whose time has come, earliest first."""
        return str(int(limit)).join(self._due)


def claim_by_id(schema: str, job_id: str) -> str:
    """Claim one job by its id, whatever its state; no row where it is gone or another transaction holds it."""
    return (
        sql.SQL(
            "WITH picked AS MATERIALIZED (SELECT id FROM {job} WHERE id = {id} FOR UPDATE SKIP LOCKED) "
            "DELETE FROM {job} AS claimed USING picked WHERE claimed.id = picked.id "
            "RETURNING {returned}, pg_current_xact_id()::text"
        )
        .format(
            job=sql.Identifier(schema, "job"),
            id=sql.Literal(job_id),
            returned=sql.SQL(", ".join(f"claimed.{column}" for column in RETURNED)),
        )
        .as_string(None)
    )


def park_head(schema: str, queue: str, state: str, known_kinds: tuple[str, ...], limit: int) -> str:
    """Park the jobs of unknown kinds among the first `limit` of a queue, in one statement; returns how many.

    Walks at most `limit` entries of the claim's own index, and locks only what it parks, skipping what others hold.
    """
    order, due = ("run_at", "AND run_at <= statement_timestamp()") if state == "scheduled" else ("(-priority), seq", "")
    return (
        sql.SQL(
            """\
WITH head AS MATERIALIZED (
  SELECT id FROM {job} WHERE queue = {queue} AND state = {state} {due} ORDER BY {order} LIMIT {limit}
), picked AS MATERIALIZED (
  SELECT job.id FROM {job} AS job JOIN head USING (id)
  WHERE job.state = {state} AND NOT job.kind = ANY ({known}) FOR UPDATE OF job SKIP LOCKED
), parked AS (
  UPDATE {job} AS job SET state = 'scheduled', parked = least(job.parked + 1, 32767), run_at = {later}
  FROM picked WHERE job.id = picked.id RETURNING job.id
)
SELECT count(*) FROM parked"""
        )
        .format(
            job=sql.Identifier(schema, "job"),
            queue=sql.Literal(queue),
            state=sql.Literal(state),
            due=sql.SQL(due),
            order=sql.SQL(order),
            limit=sql.Literal(limit),
            known=sql.Literal(list(known_kinds)),
            later=sql.SQL(PARKED_UNTIL),
        )
        .as_string(None)
    )


# 5 s, 10 s, 20 s, ... to 5 min. The exponent is bounded before it is used.
PARKED_UNTIL = "clock_timestamp() + least(interval '5 minutes', interval '5 seconds' * power(2, least(parked, 6)))"
