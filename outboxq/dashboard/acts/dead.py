"""Actions on one dead letter."""

from dataclasses import dataclass, replace
from uuid import UUID

from outboxq.admin.actions import DiscardDead, RetryDead, Total
from outboxq.admin.dead_letters import DeadFilter, show_dead
from outboxq.dashboard.acts.given import ARGS, UNCHECKED, args_notes, args_to_edit, checked_args
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.forms import About, Form
from outboxq.dashboard.parameters import Document, OfJob, ReasonedJob
from outboxq.dashboard.route import Done, Work
from outboxq.dashboard.view import Look
from outboxq.errors import JobNotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryWith(ReasonedJob):
    """The fields of the form that retries a dead letter with other arguments.

    Attributes:
        unchecked: True if the user accepts that the arguments are not checked, for want of a registry.
    """

    args: Document
    unchecked: bool = False


def about_dead(look: Look, asked: OfJob) -> About:
    """Return the name of a dead letter and the path of its page, for the forms that retry or discard it."""
    dead = show_dead(look.connection, asked.job_id).dead
    notes = args_notes(look.kinds, dead.kind)
    return About(name=f"{dead.kind} {dead.id}", back=f"dead/{dead.id}", notes=notes)


def about_dead_args(look: Look, asked: OfJob) -> About:
    """Return a dead letter's name, page and arguments, for the form that retries it with other arguments.

    The arguments are left out if some of them are hidden.
    """
    detail = show_dead(look.connection, asked.job_id)
    shown = args_to_edit(look, look.payloads.document(detail.dead.kind, detail.args, hook=True), detail.args)
    return replace(
        about_dead(look, asked),
        values={"args": shown},
        without=frozenset({"unchecked"}) if look.kinds.is_given else frozenset(),
    )


RETRY = Form(
    title="Retry this dead letter",
    means="It becomes a job that waits, with its id, arguments and errors, and with all its attempts before it.",
    button="Retry",
    about=about_dead,
)
RETRY_WITH = Form(
    title="Retry with other arguments",
    means="It becomes a job that waits, with these arguments instead of those that it has. The audit says that they "
    "were changed, not what they were.",
    button="Retry with other arguments",
    about=about_dead_args,
    fields=(ARGS, UNCHECKED),
    is_grave=True,
)
DISCARD = Form(
    title="Discard this dead letter",
    means="It is deleted for good, with its arguments and errors.",
    button="Discard",
    about=about_dead,
    is_grave=True,
)


def retry_dead(work: Work, asked: ReasonedJob) -> Done:
    """Turn a dead letter back into a waiting job, with the same arguments."""
    total = work.actions.run(work.begin, RetryDead(_only(asked.job_id)))
    return _retried(total, asked.job_id)


def retry_dead_with(work: Work, asked: RetryWith) -> Done:
    """Turn a dead letter back into a waiting job with other arguments.

    If the dashboard has a registry, the arguments are checked against the kind's handler.
    """
    check = checked_args(asked.args, work.desk.kinds, unchecked=asked.unchecked)
    total = work.actions.run(work.begin, RetryDead(_only(asked.job_id), asked.args), check=check)
    return _retried(total, asked.job_id)


def discard_dead(work: Work, asked: ReasonedJob) -> Done:
    """Delete a dead letter."""
    _check(work.actions.run(work.begin, DiscardDead(_only(asked.job_id))), asked.job_id)
    return Done("The dead letter is gone.", "dead", {"discarded": [asked.job_id]})


def _only(job_id: UUID) -> DeadFilter:
    return DeadFilter(ids=(job_id,))


def _retried(total: Total, job_id: UUID) -> Done:
    _check(total, job_id)
    return Done("It is a job again, and waits for a relay.", f"jobs/{job_id}", {"retried": [job_id]})


def _check(total: Total, job_id: UUID) -> None:
    if total.not_found:
        raise JobNotFound(job_id, "dead letter")
    if total.held:
        raise Refused(409, "Another session has it at this moment: nothing was done. Try again in a moment.")
    if total.key_taken:
        raise Refused(409, "Another job with its unique key waits or runs: wait until that one ends, or cancel it.")
    if total.refused:
        raise Refused(409, "A job with its id waits or runs already, or no job may be as it is (too long, perhaps).")
