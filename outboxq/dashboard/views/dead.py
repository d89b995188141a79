"""The list of dead letters, with groups by their cause, and the page of one dead letter."""

from dataclasses import dataclass, replace
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin.browse import Found, find_dead, find_seen
from outboxq.admin.dead_letters import DeadDetail, DeadFilter, DeadJob, show_dead
from outboxq.admin.explain import Explanation
from outboxq.admin.snapshot import NEWEST_DEAD, find_dead_groups
from outboxq.dashboard.parameters import ErrorText, Name, OfJob, Paged, SearchText
from outboxq.dashboard.payloads import hide_errors
from outboxq.dashboard.settings import JobRef
from outboxq.dashboard.view import Look, View, flat
from outboxq.dashboard.views.seen import seen_dead, seen_explanation, seen_groups
from outboxq.dashboard.views.timeline import Step, seen_headers, timeline
from outboxq.error_record import read_attempts
from outboxq.errors import ArgumentError, JobNotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedDead(Paged):
    """The parameters of the list of dead letters.

    Attributes:
        error: The type of the last error, as the groups of dead letters name it.
        reason: A text to search for in the reasons why jobs died.
    """

    queue: Name | None = None
    kind: Name | None = None
    error: ErrorText | None = None
    reason: SearchText | None = None


def show_dead_letters(look: Look, asked: AskedDead) -> View:
    """Return the list of dead letters that match the filter.

    Without a filter the page also groups the newest 1,000 dead letters by their cause.
    """
    if asked.reason is not None and not look.payloads.may_search:
        raise ArgumentError("texts of errors are hidden here, and cannot be searched")
    wanted = DeadFilter(queue=asked.queue, kind=asked.kind, error=asked.error, reason=asked.reason)
    found = look.at("dead letters", lambda c: _find(look, c, wanted, asked)) or Found(())
    is_filtered = wanted != DeadFilter()
    groups = [] if is_filtered else look.at("the groups", find_dead_groups) or []
    data = {
        "dead": found.rows,
        "more": found.before is not None,
        "next_before": found.before,
        "dead_groups": seen_groups(look, groups),
    }
    return View("dead.html", "Dead letters", data, {"found": found, "is_filtered": is_filtered, "newest": NEWEST_DEAD})


def _find(look: Look, connection: Connection, wanted: DeadFilter, asked: AskedDead) -> Found[DeadJob]:
    """Find the dead letters that match the filter, with secrets removed from their reasons.

    A dead letter that has the searched text only in a hidden part of its reason is left out: the search would reveal
    it.
    """

    def find(before: UUID | None) -> Found[DeadJob]:
        found = find_dead(connection, wanted, before=before, limit=asked.limit)
        return replace(found, rows=seen_dead(look, found.rows))

    if wanted.reason is None:
        return find(asked.before)
    text = wanted.reason.lower()
    sees = lambda each: text in each.reason.lower()  # noqa: E731
    return find_seen(connection, find, sees, "dead_job", before=asked.before, limit=asked.limit)


def show_dead_letter(look: Look, asked: OfJob) -> View:
    """Return the page of one dead letter."""
    return dead_view(look, show_dead(look.connection, asked.job_id), None)


def find_dead_letter(look: Look, job_id: UUID) -> DeadDetail | None:
    """Return the dead letter that this job has become; None if there is none, or dead letters cannot be read."""
    try:
        return look.at("dead letters", lambda c: show_dead(c, job_id))
    except JobNotFound:
        return None


def dead_view(look: Look, detail: DeadDetail, explanation: Explanation | None) -> View:
    """Return the page of one dead letter, with its arguments and errors."""
    dead, payloads = detail.dead, look.payloads
    secrets = payloads.secrets_of(detail.args, detail.headers)
    errors = hide_errors(payloads, detail.errors, secrets)
    data = flat(
        detail,
        args=payloads.document(dead.kind, detail.args, hook=True),
        headers=payloads.document(dead.kind, detail.headers),
        errors=payloads.document(dead.kind, errors),
    )
    data["reason"] = payloads.reason(dead.reason, secrets)
    attempts = read_attempts(errors)
    headers = seen_headers(look, dead.kind, detail.headers)
    extra = {
        "attempts": attempts,
        "steps": timeline(dead.created_at, attempts, [Step(dead.died_at, "given up", "bad")]),
        "job": JobRef(id=dead.id, queue=dead.queue, kind=dead.kind, headers=headers),
    }
    data["explanation"] = seen_explanation(look, explanation, secrets)
    return View("dead_job.html", "Dead letter", data, extra)
