"""Pages of lists for the dashboard: the newest rows that match, among a bounded number in the order of the primary key.

Even if few rows match, a page reads at most `depth` rows of an index; the next page goes on after them. No locks.
"""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Executable,
    Subquery,
    Table,
    Text,
    cast,
    literal,
    literal_column,
    select,
    tuple_,
)

from outboxq.statements import audit as audits
from outboxq.statements import dead_letters, done, effect_admin, inbox
from outboxq.statements.audit import AuditFilter
from outboxq.statements.builtin import pg, seconds
from outboxq.statements.dead_letters import DeadFilter
from outboxq.statements.done import DoneFilter
from outboxq.statements.effect_admin import EffectFilter
from outboxq.statements.inbox import MessageFilter
from outboxq.tables import Real, StoredText, audit, dead_job, done_job, effect, gauge
from outboxq.tables import inbox as inbox_table


def newest_dead(wanted: DeadFilter, *, before: UUID | None, limit: int, depth: int) -> Executable:
    """Select the newest dead letters that match, up to `limit`, among the `depth` highest ids below `before`.

    Index: the primary key, backwards from `before`, up to `depth` rows or the first `limit` that match.
    """
    walked = _walk(dead_job, (*dead_letters.SUMMARY_COLUMNS, "errors"), before, depth)
    return (
        select(*dead_letters.summary_columns(walked))
        .where(*wanted.conditions(walked))
        .order_by(walked.c.id.desc())
        .limit(limit)
    )


def newest_done(wanted: DoneFilter, *, before: UUID | None, limit: int, depth: int) -> Executable:
    """Select the finished rows that match, the last added job first, among the `depth` highest ids below `before`.

    Index: the primary key, backwards from `before`, up to `depth` rows or the first `limit` that match.
    """
    walked = _walk(done_job, done.SUMMARY_COLUMNS, before, depth)
    shown = (walked.c[name] for name in done.SUMMARY_COLUMNS)
    return select(*shown).where(*wanted.conditions(walked)).order_by(walked.c.id.desc()).limit(limit)


def newest_entries(
    wanted: AuditFilter, actions: Sequence[str], *, before: UUID | None, limit: int, depth: int
) -> Executable:
    """Select the rows of the audit that match, the latest first, among the `depth` highest ids below `before`.

    Args:
        actions: The only actions to return; if empty, all.

    Index: the primary key, backwards from `before`, up to `depth` rows or the first `limit` that match.
    """
    walked = _walk(audit, audits.SUMMARY_COLUMNS, before, depth)
    conditions = wanted.conditions(walked)
    if actions:
        conditions.append(walked.c.action.in_(list(actions)))
    shown = (walked.c[name] for name in audits.SUMMARY_COLUMNS)
    return select(*shown).where(*conditions).order_by(walked.c.id.desc()).limit(limit)


def end_of_walk(rows: Table, *, before: UUID | None, depth: int) -> Executable:
    """Select the id at which the next page of a list begins: the last of the `depth` highest ids below `before`.

    No row if fewer rows are left. Index: the primary key, backwards.
    """
    start = [] if before is None else [rows.c.id < before]
    return select(rows.c.id).where(*start).order_by(rows.c.id.desc()).offset(depth - 1).limit(1)


def documents_of(rows: Table, ids: Sequence[UUID], *, most_bytes: int) -> Executable:
    """Select id, arguments and headers of the rows with these ids, which a list shows.

    Rows whose arguments or headers are longer than `most_bytes` are left out. Index: the primary key; no locks.
    """
    short = [pg.octet_length(cast(rows.c[name], Text())) <= most_bytes for name in ("args", "headers")]
    return select(rows.c.id, rows.c.args, rows.c.headers).where(rows.c.id.in_(list(ids)), *short)


def effects_after(wanted: EffectFilter, *, after: tuple[str, str] | None, limit: int, depth: int) -> Executable:
    """Select the effects (recorded calls of other services) that match, in the order of scope and key.

    Only the `depth` effects that follow the scope and key `after` are read. Index: the primary key, from `after`; if
    `wanted` has the status `unknown`, the index effect_unknown, all of it.
    """
    shown = effect_admin.SUMMARY_COLUMNS
    start = (
        []
        if after is None
        else [tuple_(effect.c.scope, effect.c.key) > tuple_(*(literal(each, StoredText()) for each in after))]
    )
    found = select(*(effect.c[name] for name in shown)).where(*start)
    if wanted.status == "unknown":
        found = found.where(effect.c.status == literal_column("'unknown'"))
        return found.where(*wanted.conditions()).order_by(effect.c.scope, effect.c.key).limit(limit)
    scope = [] if wanted.scope is None else [effect.c.scope == wanted.scope]
    walked = found.where(*scope).order_by(effect.c.scope, effect.c.key).limit(depth).subquery("walked")
    matching = [] if wanted.status is None else [walked.c.status == wanted.status]
    return (
        select(*(walked.c[name] for name in shown)).where(*matching).order_by(walked.c.scope, walked.c.key).limit(limit)
    )


def latest_messages(wanted: MessageFilter, *, limit: int, depth: int) -> Executable:
    """Select the messages that match, among the `depth` accepted messages that expire last; the last one first.

    For a single consumer this is the order of acceptance, the latest first. Index: inbox_expires, backwards; for a
    consumer and an id the primary key.
    """
    if wanted.consumer is not None and wanted.message_id is not None:
        return inbox.select_messages(wanted, limit=limit)
    columns = [inbox_table.c[name] for name in inbox.MESSAGE_COLUMNS]
    walked = select(*columns).order_by(inbox_table.c.expires_at.desc()).limit(depth).subquery("walked")
    conditions = []
    if wanted.consumer is not None:
        conditions.append(walked.c.consumer == wanted.consumer)
    if wanted.message_id is not None:
        conditions.append(walked.c.message_id == wanted.message_id)
    shown = (walked.c[name] for name in inbox.MESSAGE_COLUMNS)
    return select(*shown).where(*conditions).order_by(walked.c.expires_at.desc()).limit(limit)


def gauges_since(queue: str | None, *, seconds_ago: float) -> Executable:
    """Select the gauges (numbers of jobs by state, written each minute) of a queue, or their sums over all queues.

    There is a row for each of the last minutes, from `seconds_ago` before now. Its column `at` is the beginning of the
    minute, in seconds since 1970. Index: the primary key, from the first of these minutes on.
    """
    since = pg.statement_timestamp() - pg.make_interval(0, 0, 0, 0, 0, 0, seconds_ago)
    counts = ("ready", "scheduled", "due", "leased", "suspect", "dead")
    mine = [] if queue is None else [gauge.c.queue == queue]
    return (
        select(
            seconds(gauge.c.at).label("at"),
            *(cast(pg.sum(gauge.c[name]), gauge.c.dead.type).label(name) for name in counts),
            cast(pg.max(gauge.c.oldest_seconds), Real()).label("oldest_seconds"),
        )
        .where(gauge.c.at >= since, *mine)
        .group_by(gauge.c.at)
        .order_by(gauge.c.at)
    )


def _walk(rows: Table, names: Sequence[str], before: UUID | None, depth: int) -> Subquery:
    start = [] if before is None else [rows.c.id < before]
    walked = select(*(rows.c[name] for name in names)).where(*start).order_by(rows.c.id.desc()).limit(depth)
    return walked.subquery("walked")


def _as_text(value: str) -> ColumnElement[str]:
    return literal(value, StoredText())
