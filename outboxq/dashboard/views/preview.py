"""The preview of a change of many rows. It is signed, so that the change is made exactly as the preview showed it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from outboxq.admin.actions import (
    BulkAction,
    CancelJobs,
    CancelRunning,
    ChangeJobs,
    DiscardDead,
    Preview,
    RetryDead,
    preview,
)
from outboxq.admin.dead_letters import DeadFilter, DeadJob
from outboxq.admin.jobs import JobChange, JobFilter
from outboxq.codec.display import moment
from outboxq.codec.text import several
from outboxq.dashboard.acts.given import moment_in
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.intents import LIFE_SECONDS, needed_for
from outboxq.dashboard.parameters import ErrorText, Key, Name, SearchText, Selected
from outboxq.dashboard.view import Look, View
from outboxq.dashboard.views.seen import seen_dead, seen_jobs
from outboxq.database.driver import run_script
from outboxq.errors import ArgumentError
from outboxq.outbox.options import MAX_PRIORITY

What: TypeAlias = Literal[
    "dead.retry", "dead.discard", "job.cancel", "job.cancel_running", "job.run_now", "job.priority", "job.run_at"
]
State: TypeAlias = Literal["ready", "grouped", "running", "scheduled", "due", "leased", "orphaned", "suspect"]

# The time limit of the count: the user waits for it, and it locks nothing.
_PATIENTLY = "SET LOCAL statement_timeout = '10s'"
_COUNT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedPreview:
    """The parameters of a preview: the rows by their ids or by a filter, and the change of these rows.

    Attributes:
        what: The name of the change.
        of: `selected` means the rows whose ids are given, `all` those that match the filter; by default the ids, if any
            are given.
        id: The ids of the selected rows, at most a page of them.
        error: The type of the error of which dead letters died.
        contains: A text that the reason of dead letters contains.
        outcome: For a change that cancels jobs: `discard` deletes them, `dead` makes them dead letters.
    """

    what: What
    of: Literal["selected", "all"] | None = None
    id: Selected = ()
    queue: Name | None = None
    kind: Name | None = None
    error: ErrorText | None = None
    contains: SearchText | None = None
    state: State | None = None
    group: Key | None = None
    outcome: Literal["discard", "dead"] = "discard"
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    run_at: Annotated[str, Meta(max_length=40)] | None = None

    @property
    def is_selection(self) -> bool:
        """Return True if the rows to preview are given by their ids, and not by a filter."""
        return self.of == "selected" or (self.of is None and bool(self.id))

    @property
    def is_filter(self) -> bool:
        """Return True if a field that filters rows, such as a queue, is given."""
        return any((self.queue, self.kind, self.error, self.contains, self.state, self.group))


def show_preview(look: Look, asked: AskedPreview) -> View:
    """Return the preview of a change: the number of rows that it would change, some of them, and the form."""
    if asked.is_selection:
        _check_selection(asked)
    elif asked.contains is not None and look.payloads.mode != "shown":
        # The number of rows would reveal hidden values in their reasons.
        raise ArgumentError(
            "parts of reasons are hidden here: a change of many rows takes a kind, a queue or the type of an error"
        )
    return _show(look, _action(asked))


def _check_selection(asked: AskedPreview) -> None:
    if not asked.id:
        raise Refused(400, "No row is selected. Go back, and select the rows that are meant.")
    # A list sends its filter too, and says which of the two counts; a program may not know that.
    if asked.of is None and asked.is_filter:
        raise Refused(400, "Rows are meant by their ids, or by a filter: give of=selected, or of=all.")


def show_preview_again(look: Look, given: Mapping[str, str]) -> View:
    """Return the preview of the same change again, with the rows as they are now, because the form was refused.

    Args:
        given: The fields of the refused form.
    """
    assert look.caller is not None
    return _show(look, look.desk.intents.open(given.get("intent", ""), look.caller).action)


def _show(look: Look, action: BulkAction) -> View:
    assert look.caller is not None
    run_script(look.connection, _PATIENTLY)
    found = preview(look.connection, action, seconds=_COUNT_SECONDS)
    intent, sealed = look.desk.intents.close(found, look.caller)
    words = intent.words(is_production=look.desk.settings.is_production)
    is_dead = isinstance(found.action, RetryDead | DiscardDead)
    data = {
        "action": found.action.name,
        "words": in_words(found.action, look.now),
        "count": intent.count,
        "is_capped": found.is_capped,
        "kinds": found.kinds,
        "samples": _seen(look, found),
        "needs": intent.needs.label,
        "typed": words,
        "valid_seconds": LIFE_SECONDS,
        "intent": sealed,
    }
    extra = {
        "is_dead": is_dead,
        "may": look.caller.user.role >= needed_for(found.action.name, intent.expected),
        "verb": _VERBS[found.action.name],
        "back": "dead" if is_dead else "jobs",
    }
    return View("preview.html", f"{_VERBS[found.action.name]} many", data, extra)


_VERBS = {
    "dead.retry": "Retry",
    "dead.discard": "Discard",
    "job.cancel": "Cancel",
    "job.cancel_running": "Cancel",
    "job.change": "Change",
}


def in_words(action: BulkAction, now: datetime) -> str:
    """Return a sentence for people that names an action's rows and change."""
    wanted = action.wanted
    if wanted.ids is not None:
        one, many = ("dead letter", "dead letters") if isinstance(wanted, DeadFilter) else ("job", "jobs")
        which = several(len(set(wanted.ids)), f"{one} that is selected", f"{many} that are selected")
        return f"{_VERBS[action.name]} {which}{_change_in_words(action)}."
    if isinstance(wanted, DeadFilter):
        parts = _named(kind=wanted.kind, queue=wanted.queue)
        parts += [f"that died of {wanted.error}"] if wanted.error else []
        parts += [f"whose reason contains {wanted.reason!r}"] if wanted.reason else []
        things, when = "dead letters", "given up"
        until = wanted.died_before
    else:
        parts = _named(kind=wanted.kind, queue=wanted.queue, group=wanted.group)
        parts += [f"in the state {wanted.state}"] if wanted.state else []
        things, when = "jobs", "added"
        until = wanted.created_before
    which = ", ".join(parts or ["of every queue"])
    said = f"{_VERBS[action.name]} all {things} {which}, {when} until {moment(until or now)}"
    return f"{said}{_change_in_words(action)}."


def _named(**names: str | None) -> list[str]:
    words = {"kind": "of the kind", "queue": "in the queue", "group": "of the group"}
    return [f"{words[name]} {value}" for name, value in names.items() if value is not None]


def _change_in_words(action: BulkAction) -> str:
    if isinstance(action, CancelRunning):
        left = "; a dead letter is left of each" if action.outcome == "dead" else ""
        return f", also those that run{left}"
    if not isinstance(action, ChangeJobs):
        return ""
    to = action.to
    said = ["run them as soon as a relay is free"] if to.run_now else []
    said += [] if to.priority is None else [f"their priority is {to.priority} then"]
    said += [] if to.run_at is None else [f"they run at {moment(to.run_at)}"]
    return f": {', '.join(said)}"


def _action(asked: AskedPreview) -> BulkAction:
    if asked.is_selection:
        dead, jobs = DeadFilter(ids=asked.id), JobFilter(ids=asked.id)
    else:
        dead = DeadFilter(queue=asked.queue, kind=asked.kind, reason=asked.contains, error=asked.error)
        jobs = JobFilter(queue=asked.queue, kind=asked.kind, state=asked.state, group=asked.group)
    match asked.what:
        case "dead.retry":
            return RetryDead(dead)
        case "dead.discard":
            return DiscardDead(dead)
        case "job.cancel":
            return CancelJobs(jobs)
        case "job.cancel_running":
            return CancelRunning(jobs, asked.outcome)
        case _:
            return ChangeJobs(jobs, _change(asked))


def _change(asked: AskedPreview) -> JobChange:
    match asked.what, asked.priority, asked.run_at:
        case "job.run_now", _, _:
            return JobChange(run_now=True)
        case "job.priority", int() as priority, _:
            return JobChange(priority=priority)
        case "job.run_at", _, str() as text:
            return JobChange(run_at=moment_in(text))
        case _:
            raise Refused(400, "Which priority, or which time? Go back, and fill in the field beside it.")


def _seen(look: Look, found: Preview) -> Sequence[object]:
    dead = [each for each in found.samples if isinstance(each, DeadJob)]
    if dead:
        return seen_dead(look, dead)
    return seen_jobs(look, [each for each in found.samples if not isinstance(each, DeadJob)])
