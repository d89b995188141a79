"""Progress: the notes of running handlers, in a small table."""

from collections.abc import Collection, Sequence
from typing import Any, LiteralString, NamedTuple
from uuid import UUID

from sqlalchemy import Select, TextClause, select, text

from outboxq.statements.render import quote_identifier, render
from outboxq.tables import progress


class ProgressNote(NamedTuple):
    """The last note of a job's handler about its progress, in the present attempt; `fraction` is from 0 to 1."""

    job_id: UUID
    attempt: int
    fraction: float
    note: str


# The rows are short-lived, so COMMIT need not wait for the disk.
SETTINGS = "SET LOCAL client_encoding = 'UTF8'; SET LOCAL synchronous_commit = off; "
_WRITE: LiteralString = """\
WITH over AS (
  DELETE FROM {progress} WHERE job_id = ANY ({ended}::uuid[]) AND relay = {owner}::uuid
)
INSERT INTO {progress} AS known (job_id, attempt, fraction, note, relay)
SELECT noted.job_id, noted.attempt, noted.fraction, noted.note, {owner}::uuid
FROM unnest({ids}::uuid[], {attempts}::int[], {fractions}::float8[], {notes}::text[])
  AS noted (job_id, attempt, fraction, note)
ORDER BY noted.job_id
ON CONFLICT (job_id) DO UPDATE SET attempt = excluded.attempt, fraction = excluded.fraction, note = excluded.note,
  relay = excluded.relay, noted_at = pg_catalog.clock_timestamp()
  WHERE known.attempt <= excluded.attempt
    OR known.relay <> excluded.relay AND known.noted_at < pg_catalog.clock_timestamp() - interval '1 minute'"""


def write_progress(schema: str, relay: UUID, notes: Sequence[ProgressNote], ended: Collection[UUID]) -> str:
    """Return SQL that writes `notes` of running handlers, and deletes those of jobs in `ended`; no job may be in both.

    Index: the primary key. Waits only for another relay that writes a note of the same job. A note overwrites that of
    an earlier attempt, and never that of a later one. A note that another relay left more than a minute ago is always
    overwritten, because a retried dead letter counts its attempts from the start.
    """
    return render(
        schema,
        _WRITE,
        owner=str(relay),
        ended=[str(job_id) for job_id in ended],
        ids=[str(each.job_id) for each in notes],
        attempts=[each.attempt for each in notes],
        fractions=[each.fraction for each in notes],
        notes=[each.note for each in notes],
    )


def may_read_progress(schema: str) -> TextClause:
    """Select one row: true if the table `progress` exists, and this role may read it. For any driver. No locks."""
    return text(
        "SELECT coalesce("
        "pg_catalog.has_table_privilege(pg_catalog.to_regclass(CAST(:name AS text))::oid, 'SELECT'), false)"
    ).bindparams(name=quote_identifier(schema, "progress"))


def select_progress(job_ids: Collection[UUID]) -> Select[Any]:
    """Select the last notes of these jobs. Index: the primary key; no locks."""
    columns = ("job_id", "fraction", "note", "noted_at")
    return select(*(progress.c[name] for name in columns)).where(progress.c.job_id.in_(list(job_ids)))
