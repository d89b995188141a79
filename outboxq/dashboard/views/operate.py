"""The pages of relays, of the doctor, and of the audit, which records operators' actions."""

from dataclasses import dataclass
from functools import partial

from outboxq.admin.audit import AuditEntry, AuditFilter, show_audit
from outboxq.admin.browse import BULK_ACTIONS, Found, find_entries
from outboxq.admin.explain import Explanation, explain_job
from outboxq.admin.relays import list_relays
from outboxq.dashboard.documents import TooDeep, read_tree, write_tree
from outboxq.dashboard.parameters import Name, Nothing, OfEntry, Paged, Scope
from outboxq.dashboard.payloads import Document, withheld
from outboxq.dashboard.view import Look, View, flat
from outboxq.dashboard.views.seen import seen_relays

# The number of longest-running jobs that are checked for what blocks them.
_EXPLAINED = 10
_MOST_RELAYS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedAudit(Paged):
    """The parameters of the list of operators' actions.

    Attributes:
        action: The name of an action, such as `dead.retry`, or its part before the dot.
    """

    actor: Scope | None = None
    action: Name | None = None


def show_relays(look: Look, asked: Nothing) -> View:  # noqa: ARG001  # as every screen has it
    """Return the list of relays that were seen within a day, with their longest-running jobs.

    If such a job waits for a lock, the page names the session that holds the lock.
    """
    relays = look.at("relays", lambda c: list_relays(c, limit=_MOST_RELAYS)) or []
    running = [job for relay in relays if relay.state != "dead" for job in relay.running]
    longest = sorted(running, key=lambda job: -job.seconds)[:_EXPLAINED]
    blocked: dict[str, Explanation] = {}
    for job in longest:
        found = look.at("what blocks jobs", partial(explain_job, job_id=job.id))
        if found is not None and found.verdict.code == "running-blocked":
            blocked[str(job.id)] = found
    return View("relays.html", "Relays", {"relays": seen_relays(look, relays)}, {"blocked": blocked})


def show_doctor(look: Look, asked: Nothing) -> View:  # noqa: ARG001  # as every screen has it
    """Return the page of the doctor's findings: conditions that keep jobs from running, or will, each with advice."""
    return View("doctor.html", "Doctor", {"findings": look.findings or ()})


def show_entries(look: Look, asked: AskedAudit) -> View:
    """Return the list of operators' actions in the audit, the latest first."""
    return _entries(look, asked, only_bulk=False)


def show_bulk_runs(look: Look, asked: AskedAudit) -> View:
    """Return the list of operators' actions on many rows, the latest first."""
    return _entries(look, asked, only_bulk=True)


def show_entry(look: Look, asked: OfEntry) -> View:
    """Return the page of one action of the audit, with the rows that it was to change, and its progress."""
    detail = show_audit(look.connection, asked.entry)
    data = flat(detail, filter=_filter(look, detail.filter), change=_document(detail.change))
    is_bulk = detail.entry.action in BULK_ACTIONS
    return View("entry.html", detail.entry.action, data, {"is_bulk": is_bulk, "state": state_of(detail.entry)})


def state_of(entry: AuditEntry) -> str:
    """Return the state of an action: `done`, `stopped`, `failed`, or `open` if it goes on or was cut off."""
    if entry.finished_at is not None:
        return "done"
    if entry.stopped_at is not None:
        return "stopped"
    return "failed" if entry.error is not None else "open"


def _entries(look: Look, asked: AskedAudit, *, only_bulk: bool) -> View:
    wanted = AuditFilter(actor=asked.actor, action=asked.action)
    found = look.at(
        "the audit",
        lambda c: find_entries(c, wanted, only_bulk=only_bulk, before=asked.before, limit=asked.limit),
    ) or Found(())
    data = {"audit": found.rows, "more": found.before is not None, "next_before": found.before}
    title = "Bulk runs" if only_bulk else "Audit"
    extra = {"found": found, "is_filtered": wanted != AuditFilter(), "state_of": state_of}
    return View("bulk.html" if only_bulk else "audit.html", title, data, extra)


def _filter(look: Look, text: str | None) -> Document | None:
    """Return the filter by which an operator's action chose rows, as a document for the page.

    Texts by which the action searched dead letters are redacted, because they may be part of an error's text.
    """
    try:
        tree = None if text is None else read_tree(text)
    except TooDeep as error:
        return withheld(str(error))
    if not isinstance(tree, dict):
        return _document(text)
    seen = {"reason": look.payloads.reason, "error": look.payloads.error}
    hidden = {name: see(said) for name, see in seen.items() if isinstance(said := tree.get(name), str)}
    try:
        return _document(write_tree({**tree, **hidden}))
    except TooDeep as error:
        return withheld(str(error))


def _document(text: str | None) -> Document | None:
    """Return a JSON text of the audit as a document for the page. The audit has no payloads to redact."""
    if text is None:
        return None
    try:
        tree = read_tree(text)
        return Document(write_tree(tree, indent=2), write_tree(tree))
    except TooDeep as error:
        return withheld(str(error))
