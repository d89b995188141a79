"""Living relays, by the rows of `relay_status` that they write about themselves."""

from collections.abc import Sequence
from typing import LiteralString
from uuid import UUID

from sqlalchemy import Executable, TextClause, select, text

from outboxq.statements.builtin import pg, seconds
from outboxq.statements.doctor.sessions import qualified
from outboxq.statements.render import quote_identifier, render
from outboxq.tables import relay_status

# A relay writes its row several times a minute.
DEAD_SECONDS = 60.0
# The most rows that are read.
MOST_RELAYS = 1_000
# The most kinds that a relay names.
MOST_KINDS = 1_000

# The checks of the table `queue` on a limit: name, minimum, maximum and type.
_LIMITS = (
    ("running", "1", "10000", "int"),
    ("per_group", "1", "1000", "int"),
    ("rate_jobs", "1", "1000000", "int"),
    ("rate_seconds", "0.001", "2678400", "float8"),
    ("rate_burst", "1", "1000000", "int"),
)

_SERVED: LiteralString = """\
SELECT DISTINCT pg_catalog.unnest(queues) AS queue FROM {relay_status}
WHERE seen_at > pg_catalog.statement_timestamp() - interval '1 minute' ORDER BY queue LIMIT {limit}"""


def served_queues(schema: str, limit: int) -> str:
    """Select the queues that relays serve, one row each. Reads the small table `relay_status`; no locks."""
    return render(schema, _SERVED, limit=limit)


def select_relays(limit: int) -> Executable:
    """Select the relays that wrote their state last, up to `limit`.

    Rows older than a day are pruned. Reads the small table `relay_status`; no locks.
    """
    return (
        select(
            relay_status,
            seconds(pg.statement_timestamp() - relay_status.c.seen_at).label("seen_seconds"),
        )
        .order_by(relay_status.c.seen_at.desc(), relay_status.c.id)
        .limit(limit)
    )


def may_read_relays(schema: str) -> TextClause:
    """Select one row: true if this role may read `relay_status`; NULL if there is no such table. Catalogs only."""
    table = quote_identifier(schema, "relay_status")
    return text(
        "SELECT pg_catalog.has_table_privilege(pg_catalog.to_regclass(CAST(:relays AS text))::oid, 'SELECT')"
    ).bindparams(relays=table)


_SEEN = "extract(epoch FROM pg_catalog.statement_timestamp() - seen_at)::float8"


def relays_for(schema: str, queue: str, kind: str | None) -> TextClause:
    """Select the relays that wrote their state within a day, to show which could run jobs of this queue and kind.

    Those that serve the queue come first, then the latest write. `serves`: the relay serves the queue. `has_room`: a
    slot could have claimed from the queue when the relay last wrote its state. `knows`: the relay knows the kind, or
    may know more kinds than it names. Reads the small table `relay_status`, 1,000 rows of it at the most; no locks.
    """
    return text(
        f"""\
SELECT id, host, pid, state, queues, running::text AS running, {_SEEN} AS seen_seconds, {_SEEN} < :dead AS is_alive,
  CAST(:queue AS text) = ANY (queues) AS serves, CAST(:queue AS text) = ANY (free) AS has_room,
  CAST(:kind AS text) = ANY (kinds) OR pg_catalog.cardinality(kinds) >= :most_kinds AS knows
FROM {qualified(schema, "relay_status")}
ORDER BY CAST(:queue AS text) = ANY (queues) DESC, seen_at DESC LIMIT :most"""
    ).bindparams(queue=queue, kind=kind, dead=DEAD_SECONDS, most_kinds=MOST_KINDS, most=MOST_RELAYS)


def relay_seen(schema: str, relay: UUID) -> TextClause:
    """Select the seconds since a relay last wrote its state, and its long-running jobs; no row if it wrote none.

    Index: the primary key; no locks.
    """
    return text(
        f"SELECT {_SEEN} AS seen_seconds, running::text AS running FROM {qualified(schema, 'relay_status')} "
        "WHERE id = CAST(:relay AS uuid)"
    ).bindparams(relay=str(relay))


def serving_relays(schema: str) -> TextClause:
    """Select the relays that wrote their state within a day, with each one's queues and long-running jobs.

    The latest write comes first. Reads the small table `relay_status`, 1,000 rows of it at the most; no locks.
    """
    return text(
        "SELECT id, host, pid, state, queues, free, running::text AS running, "
        f"{_SEEN} AS seen_seconds, {_SEEN} < :dead AS is_alive "
        f"FROM {qualified(schema, 'relay_status')} ORDER BY seen_at DESC LIMIT :most"
    ).bindparams(dead=DEAD_SECONDS, most=MOST_RELAYS)


def declared_limits(schema: str) -> TextClause:
    """Select the limits of queues that the applications of living relays declare, a row for each queue.

    If relays declare different limits, those of the relay that started last are returned; invalid ones are left out.
    Reads the small table `relay_status`; no locks.
    """
    numbers = ", ".join(
        "CAST(pg_catalog.jsonb_path_query_first("
        f"given.one, CAST('$.{name} ? (@ >= {least} && @ <= {most})' AS jsonpath)) AS {type_}) AS {name}"
        for name, least, most, type_ in _LIMITS
    )
    return text(
        f"""\
SELECT DISTINCT ON (declared.name)
  declared.name, declared.running, declared.per_group, declared.rate_jobs, declared.rate_seconds, declared.rate_burst
FROM {qualified(schema, "relay_status")} AS relay
CROSS JOIN LATERAL (
  SELECT pg_catalog.jsonb_extract_path_text(given.one, 'name') AS name, {numbers}
  FROM pg_catalog.jsonb_array_elements(relay.limits) AS given (one)
  WHERE pg_catalog.jsonb_typeof(pg_catalog.jsonb_extract_path(given.one, 'name')) = 'string'
) AS declared
WHERE {_SEEN} < :dead
ORDER BY declared.name, relay.started_at DESC"""
    ).bindparams(dead=DEAD_SECONDS)


def kinds_at_relays(schema: str, pairs: Sequence[tuple[str, str]]) -> TextClause:
    """Count, for each pair (queue, kind), the living relays that serve the queue, and those that also know the kind.

    No rows if there is no living relay. Reads the small table `relay_status`, 1,000 rows of it at the most, for each
    pair; no locks.
    """
    serves = "given.queue = ANY (relay.queues)"
    knows = "(given.kind = ANY (relay.kinds) OR pg_catalog.cardinality(relay.kinds) >= :most_kinds)"
    return text(
        f"""\
SELECT given.queue, given.kind, pg_catalog.count(*) FILTER (WHERE {serves}) AS serving,
  pg_catalog.count(*) FILTER (WHERE {serves} AND {knows}) AS knowing
FROM unnest(CAST(:queues AS text[]), CAST(:kinds AS text[])) AS given (queue, kind)
CROSS JOIN (
  SELECT queues, kinds FROM {qualified(schema, "relay_status")}
  WHERE {_SEEN} < :dead AND state <> 'stopping' ORDER BY seen_at DESC LIMIT :most
) AS relay
GROUP BY 1, 2 ORDER BY 1, 2"""
    ).bindparams(
        queues=[queue for queue, _ in pairs],
        kinds=[kind for _, kind in pairs],
        dead=DEAD_SECONDS,
        most_kinds=MOST_KINDS,
        most=MOST_RELAYS,
    )
