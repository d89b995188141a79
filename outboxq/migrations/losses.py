"""Losses of a downgrade: the tables and columns that it drops, and the conditions for rows that must not be lost.

The SQL made here refuses a downgrade while such rows exist. Each table and column that a step adds is in `LOSSES` or in
`HARMLESS`, or is checked by `outboxq.migrations.GUARDS` for steps 1 and 4. A loss has a name, by which a user may
accept it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from outboxq.errors import ConfigError
from outboxq.migrations.step_07_checks import LOCK

# The count stops at this many rows.
_MOST = 100_000


@dataclass(frozen=True, slots=True)
class Loss:
    """A table or columns that a downgrade drops, and the condition for the rows because of which it is refused.

    Args:
        name: The name by which a user accepts the loss, in `discard`.
        what: A word for the rows, in the plural.
        parts: Tables, and columns such as `job.expires_at`; the rows of the first part's table are counted.
        counts: The SQL condition for rows that must not be lost.
    """

    name: str
    what: str
    parts: tuple[str, ...]
    counts: str = "true"

    @property
    def table(self) -> str:
        """Return the name of the table whose rows are counted."""
        return self.parts[0].partition(".")[0]


LOSSES: Mapping[int, tuple[Loss, ...]] = {
    9: (
        Loss("batches", "open batches, whose callbacks would not run", ("batch",)),
        Loss("schedules", "schedules", ("schedule",)),
        Loss(
            "groups",
            "jobs of groups, which would run out of order",
            ("job.state",),
            "state IN ('grouped', 'group_waiting', 'group_leased', 'group_suspect')",
        ),
        Loss("expiry", "jobs that expire, which would run however late", ("job.expires_at",), "expires_at IS NOT NULL"),
        Loss(
            "unique-keys",
            "unique keys that are taken, whose jobs could be added twice",
            ("unique_key",),
            "kept_until > now() OR EXISTS (SELECT FROM @schema@.job WHERE job.id = job_id)",
        ),
        Loss(
            "cancellations",
            "cancellations that are not carried out",
            ("cancel_request",),
            "EXISTS (SELECT FROM @schema@.job WHERE job.id = job_id)",
        ),
        Loss("paused-kinds", "paused kinds, which would run", ("paused_kind",)),
        Loss(
            "limits",
            "queues with limits",
            ("queue.max_running", "queue.max_per_group", "queue.rate_jobs", "queue.rate_seconds", "queue.rate_burst"),
            "num_nonnulls(max_running, max_per_group, rate_jobs) > 0",
        ),
    ),
    11: (
        Loss("finished-jobs", "finished jobs that are kept", ("done_job",), "expires_at > now()"),
        Loss("audit", "entries of the audit", ("audit",)),
        Loss("history", "minutes and hours of the history", ("stat", "gauge")),
        Loss(
            "keep-dead",
            "queues with a time for which dead letters are kept",
            ("queue.keep_dead_seconds",),
            "keep_dead_seconds IS NOT NULL",
        ),
    ),
    15: (
        Loss(
            "disabled-schedules",
            "schedules that their code has left out, which would stay paused if it declares them again",
            ("schedule.disabled_at",),
            "paused_at = disabled_at",
        ),
    ),
}
HARMLESS: Mapping[str, str] = {
    "queue": "a downgrade to 0 is refused while there are jobs for a paused queue to hold",
    "relay": "a relay that lives writes its row again",
    "deployment": "without calls that are remembered, which are guarded, no key of its making counts",
    "rate": "a queue without tokens begins with its burst",
    "job.batch_id": "the open batch that it leads to is guarded",
    "dead_job.batch_id": "the open batch that it leads to is guarded",
    "relay_status": "a relay that lives writes its row again",
    "progress": "a handler that runs notes its progress again",
    "schedule.owner": "the code that declares it owns it again; the schedule itself is guarded",
}
NAMES: tuple[str, ...] = tuple(loss.name for losses in LOSSES.values() for loss in losses)
_TABLES = (
    # First, because claims hold it for as long as their handlers run, and nothing else may be locked during the wait.
    "queue", "job", "dead_job", "unique_key", "batch", "inbox", "effect", "deployment", "relay", "schedule", "rate",
    "cancel_request", "paused_kind", "done_job", "relay_status", "stat", "gauge", "progress", "audit",
)  # fmt: skip

_NAMED = ", ".join(f"@schema_identifier_literal@ || '.{table}'" for table in _TABLES)
# Either all existing tables are locked at once, or none: a relay that holds one of them may wait for another.
LOCK_ALL = (
    LOCK.replace(
        "LOCK TABLE @schema@.job IN ACCESS EXCLUSIVE MODE;",
        "EXECUTE 'LOCK TABLE ' || array_to_string(tables, ', ') || ' IN ACCESS EXCLUSIVE MODE';",
    )
    .replace(
        "relation = to_regclass(@schema_identifier_literal@ || '.job')",
        "relation IN (SELECT to_regclass(name) FROM unnest(tables) AS given (name))",
    )
    .replace("@schema_identifier_literal@ || '.job'", "'the tables of ' || @schema_identifier_literal@")
    # Last, because the names look like the markers replaced above.
    .replace(
        "      in_use_by text;",
        "      in_use_by text;\n"
        "      tables text[] := ARRAY(\n"
        f"        SELECT name FROM unnest(ARRAY[{_NAMED}]) WITH ORDINALITY AS given (name, place)\n"
        "        WHERE to_regclass(name) IS NOT NULL ORDER BY place);",
    )
)

_COUNT = """\
      rows := (SELECT count(*) FROM (SELECT FROM @schema@.{table} WHERE {counts} LIMIT {limit}) AS counted);
      IF rows > 0 THEN
        lost := lost || (CASE WHEN rows > {most} THEN 'over {most} ' ELSE rows || ' ' END || '{what}');
        names := names || '{name}'::text;
      END IF;"""
_OF_STEP = """\
      IF newest >= {step} AND @target@ < {step} THEN
{counts}
      END IF;"""
_GUARD = """\
    DECLARE
      rows bigint;
      lost text[] := '{{}}';
      names text[] := '{{}}';
    BEGIN
{counts}
      IF cardinality(lost) > 0 THEN
        RAISE EXCEPTION USING
          ERRCODE = 'object_in_use',
          MESSAGE = 'outboxq: the downgrade would lose in schema ' || @schema_identifier_literal@ || ': '
            || array_to_string(lost, '; '),
          HINT = 'Let them end or take them back, or name what may be lost: outboxq migrate --to STEP --discard '
            || array_to_string(names, ' --discard ') || ', or discard=("' || array_to_string(names, '", "')
            || '",) of migrations.downgrade.';
      END IF;
    END;"""


def check_discard(discard: Collection[str]) -> frozenset[str]:
    """Return `discard`, names of data that a downgrade may lose, as a set, after a check that each name is known.

    Raises:
        ConfigError: there is no such loss, or a single text was given instead of a collection.
    """
    unknown = [discard] if isinstance(discard, str) else sorted(set(discard) - set(NAMES))
    if unknown:
        raise ConfigError(f"discard takes names of {', '.join(NAMES)}, got {', '.join(map(repr, unknown))}")
    return frozenset(discard)


def guard_of(step: int, discard: Collection[str] = ()) -> str:
    """Return SQL that refuses to undo one step while its tables have rows that must not be lost.

    Rows of the data named in `discard` may be lost. If no data remains to be checked, the text is empty. Earlier SQL
    has locked the tables.
    """
    counts = _counts_of(step, discard)
    return _GUARD.format(counts=counts) if counts else ""


def guard_of_all(discard: Collection[str] = ()) -> str:
    """Return SQL that refuses to undo all steps above `@target@` while their tables have rows that must not be lost.

    Rows of the data named in `discard` may be lost. Steps above `newest`, the tables' present step, are not checked.
    The SQL is part of a `DO` block that declares `newest`, and in which `@target@` is replaced.
    """
    counts = {step: _counts_of(step, discard) for step in LOSSES}
    parts = [_OF_STEP.format(step=step, counts=of_step) for step, of_step in counts.items() if of_step]
    return _GUARD.format(counts="\n".join(parts)) if parts else ""


def _counts_of(step: int, discard: Collection[str]) -> str:
    return "\n".join(
        _COUNT.format(
            table=loss.table, counts=f"({loss.counts})", limit=_MOST + 1, most=_MOST, what=loss.what, name=loss.name
        )
        for loss in LOSSES.get(step, ())
        if loss.name not in discard
    )
