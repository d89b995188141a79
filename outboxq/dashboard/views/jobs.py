"""The list of jobs that wait or run, and the page of one job: its history, and the reasons why it does not run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin.browse import SHORT_BYTES, Found, Wanted, find_jobs, find_seen, read_wanted
from outboxq.admin.explain import Explanation, explain_job
from outboxq.admin.finished import FinishedDetail, show_finished
from outboxq.admin.jobs import JobDetail, JobFilter, WaitingJob, show_job
from outboxq.admin.relays import RelaySummary, list_relays
from outboxq.admin.stats import collect_stats
from outboxq.dashboard.documents import write_tree
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.parameters import Key, Name, OfJob, Paged, SearchText
from outboxq.dashboard.payloads import Payloads, at_path, hide_errors, is_secret
from outboxq.dashboard.settings import JobRef
from outboxq.dashboard.view import Look, View, flat
from outboxq.dashboard.views.dead import dead_view, find_dead_letter
from outboxq.dashboard.views.seen import seen_explanation, seen_jobs
from outboxq.dashboard.views.timeline import Step, seen_headers, timeline
from outboxq.error_record import read_attempts
from outboxq.errors import ArgumentError, JobNotFound

_MAX_CELL_CHARACTERS = 200
STATES = ("ready", "grouped", "running", "scheduled", "due", "leased", "orphaned", "suspect")


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedJobs(Paged):
    """The parameters of the list of jobs.

    Attributes:
        q: The name and value of an argument to search for, such as `order_id:7`.
        columns: Names of arguments to show as columns, separated by commas.
    """

    queue: Name | None = None
    kind: Name | None = None
    state: Literal["ready", "grouped", "running", "scheduled", "due", "leased", "orphaned", "suspect"] | None = None
    group: Key | None = None
    q: SearchText | None = None
    columns: SearchText | None = None


def show_jobs(look: Look, asked: AskedJobs) -> View:
    """Return the list of the newest jobs that match the filter and the search."""
    wanted = JobFilter(queue=asked.queue, kind=asked.kind, state=asked.state, group=asked.group)
    contains = _search(look, asked.q)
    names = _columns(look, asked.columns)
    args_bytes = SHORT_BYTES if names or contains is not None else 0
    found = look.at("the jobs", lambda c: _find(look, c, wanted, contains, asked, args_bytes)) or Found(())
    jobs = seen_jobs(look, [job for job, _ in found.rows])
    data = {"jobs": jobs, "more": found.before is not None, "next_before": found.before}
    extra = {"found": found, "columns": names, "counts": _counts(look, asked.queue), "states": STATES}
    cells = lambda: {"cells": [_cells(look.payloads, job.kind, args, names) for job, args in found.rows]}  # noqa: E731
    return View("jobs.html", "Jobs", data, extra, cells)


def _find(
    look: Look,
    connection: Connection,
    wanted: JobFilter,
    contains: Wanted | None,
    asked: AskedJobs,
    args_bytes: int,
) -> Found[tuple[WaitingJob, str | None]]:
    """Find the jobs that match the filter, each with its arguments if they were read.

    A job that has the searched value (`contains`) only in a hidden part of its arguments is left out: the search would
    reveal the value.
    """

    def find(before: UUID | None) -> Found[tuple[WaitingJob, str | None]]:
        return find_jobs(connection, wanted, contains=contains, args_bytes=args_bytes, before=before, limit=asked.limit)

    if contains is None:
        return find(asked.before)

    def sees(found: tuple[WaitingJob, str | None]) -> bool:
        job, args = found
        return args is not None and look.payloads.still_has(job.kind, args, contains.path, contains.values)

    return find_seen(connection, find, sees, "job", before=asked.before, limit=asked.limit)


def show_one_job(look: Look, asked: OfJob) -> View:
    """Return the page for a job id.

    The job may wait or run, have died or finished. If nothing is known of the job, the page says so.
    """
    explanation = look.at("why", lambda c: explain_job(c, asked.job_id))
    try:
        detail = look.at("the job", lambda c: show_job(c, asked.job_id))
    except JobNotFound:
        return _show_absent(look, asked.job_id, explanation)
    if detail is None:
        return View("absent.html", "Job", {"job_id": asked.job_id, "explanation": seen_explanation(look, explanation)})
    return _job_view(look, detail, explanation)


def _job_view(look: Look, detail: JobDetail, explanation: Explanation | None) -> View:
    job, payloads = detail.job, look.payloads
    secrets = payloads.secrets_of(detail.args, detail.headers)
    errors = hide_errors(payloads, detail.errors, secrets)
    data = flat(
        detail,
        args=payloads.document(job.kind, detail.args, hook=True),
        headers=payloads.document(job.kind, detail.headers),
        errors=payloads.document(job.kind, errors),
    )
    data["note"] = payloads.text(job.note, secrets)
    attempts = read_attempts(errors)
    relays = look.at("relays", list_relays) or []
    extra = {
        "attempts": attempts,
        "steps": timeline(job.created_at, attempts, _now_of(job, relays)),
        "job": JobRef(id=job.id, queue=job.queue, kind=job.kind, headers=seen_headers(look, job.kind, detail.headers)),
        "no_handler": look.kinds.lacks(job.kind),
    }
    data["explanation"] = seen_explanation(look, explanation, secrets)
    return View("job.html", "Job", data, extra)


def _show_absent(look: Look, job_id: UUID, explanation: Explanation | None) -> View:
    dead = find_dead_letter(look, job_id)
    if dead is not None:
        return dead_view(look, dead, explanation)
    try:
        finished = look.at("finished jobs", lambda c: show_finished(c, job_id))
    except JobNotFound:
        finished = None
    if finished is not None:
        return done_view(look, finished, explanation)
    view = View("absent.html", "Job", {"job_id": job_id, "explanation": seen_explanation(look, explanation)})
    if explanation is None:
        raise Refused(404, "There is no such job.")
    return view


def done_view(look: Look, detail: FinishedDetail, explanation: Explanation | None = None) -> View:
    """Return the page of one finished job, with everything that is kept of it."""
    kind, payloads = detail.finished.kind, look.payloads
    documents = {
        name: None if text is None else payloads.document(kind, text, hook=name == "args")
        for name, text in (("args", detail.args), ("headers", detail.headers), ("result", detail.result))
    }
    return View(
        "done_job.html",
        "Finished job",
        {**flat(detail, **documents), "explanation": seen_explanation(look, explanation)},
    )


def _now_of(job: WaitingJob, relays: Sequence[RelaySummary]) -> list[Step]:
    """Return the present state of a job in words, as the last entry of the page's timeline."""
    running = next((each for relay in relays for each in relay.running if each.id == job.id), None)
    relay = next((each for each in relays if running is not None and running in each.running), None)
    if job.state in ("running", "leased"):
        where = "" if relay is None else f" on {relay.host}, process {relay.pid}"
        backend = "" if job.pid is None else f"database backend {job.pid}"
        return [Step(None, f"attempt {job.attempt + 1} runs{where}", "good", backend or None)]
    if job.state == "scheduled":
        return [Step(job.run_at, "runs when its time comes", "wait")]
    words = {
        "ready": "waits for a relay",
        "due": "is due, and waits for a relay",
        "grouped": "waits for its turn in its group",
        "orphaned": "was leased to a relay that is gone; another one takes it back",
        "suspect": "its claim died: it runs alone next",
    }
    return [Step(None, words.get(job.state, job.state), "wait" if job.state in ("ready", "due", "grouped") else "bad")]


def _search(look: Look, text: str | None) -> Wanted | None:
    if text is None:
        return None
    if not look.payloads.may_search:
        raise ArgumentError("arguments are hidden here, and cannot be searched")
    wanted = read_wanted(text)
    if look.payloads.mode == "redacted" and any(map(is_secret, wanted.path)):
        raise ArgumentError("the values of this name are hidden here, and cannot be searched")
    return wanted


def _columns(look: Look, text: str | None) -> list[str]:
    if text is None or not look.payloads.may_search:
        return []
    return [name for each in text.split(",") if (name := each.strip().removeprefix("args."))][:6]


def _cells(payloads: Payloads, kind: str, args: str | None, names: Sequence[str]) -> list[str]:
    """Return the cells of a job's extra columns in the list: the value of each argument in `names`, without secrets."""
    if not names:
        return []
    seen = None if args is None else payloads.seen_args(kind, args)
    return [_cell(at_path(seen, name.split("."))) for name in names]


def _cell(found: object) -> str:
    if found is None:
        return ""
    try:
        return (found if isinstance(found, str) else write_tree(found))[:_MAX_CELL_CHARACTERS]
    except (TypeError, ValueError):
        # The value comes from the application's hook.
        return ""


def _counts(look: Look, queue: str | None) -> dict[str, tuple[int, bool]]:
    """Return the number of jobs in each state: `{state: (number, True if the number is an estimate)}`.

    Without a queue the jobs of all queues are counted.
    """
    stats = look.at("the counts", collect_stats)
    if stats is None:
        return {}
    counted = [each for each in stats.queues if queue in (None, each.queue)]
    return {
        state: (sum(getattr(each, state) for each in counted), any(state in each.estimated for each in counted))
        for state in STATES
    }
