"""Actions on one job, which may wait, run or have finished."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta

from outboxq.admin import cancellation
from outboxq.admin.actions import CancelRunning, ChangeJobs, Total, unmarked
from outboxq.admin.finished import show_finished
from outboxq.admin.jobs import JobChange, JobFilter, WaitingJob, show_job
from outboxq.codec.text import several
from outboxq.dashboard.acts.given import ARGS, UNCHECKED, args_notes, args_to_edit, checked_args, moment_in
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.forms import About, Field, Form
from outboxq.dashboard.parameters import Document, OfJob, ReasonedJob
from outboxq.dashboard.route import Done, Work
from outboxq.dashboard.view import Look
from outboxq.errors import JobNotFound
from outboxq.outbox.options import MAX_PRIORITY


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelJob(ReasonedJob):
    """The fields of the two forms that cancel a job: one lets its relay end it, the other ends its database session.

    Attributes:
        outcome: `discard` deletes the cancelled job, `dead` makes it a dead letter.
    """

    outcome: Literal["discard", "dead"] = "discard"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewPriority(ReasonedJob):
    """The fields of the form that changes a job's priority."""

    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTime(ReasonedJob):
    """The fields of the form that changes the time at which a job runs."""

    run_at: Annotated[str, Meta(min_length=1, max_length=40)]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewArguments(ReasonedJob):
    """The fields of the form that changes a job's arguments.

    Attributes:
        unchecked: True if the user accepts that the arguments are not checked, for want of a registry.
    """

    args: Document
    unchecked: bool = False


def about_job(look: Look, asked: OfJob) -> About:
    """Return the name of a job and the path of its page, for forms that change the job."""
    return _about(show_job(look.connection, asked.job_id).job)


def about_priority(look: Look, asked: OfJob) -> About:
    """Return a job's name, page and present priority, for the form that changes the priority."""
    job = show_job(look.connection, asked.job_id).job
    return replace(_about(job), values={"priority": str(job.priority)})


def about_time(look: Look, asked: OfJob) -> About:
    """Return a job's name, page and present time, for the form that changes the time at which the job runs."""
    job = show_job(look.connection, asked.job_id).job
    return replace(_about(job), values={"run_at": job.run_at.isoformat(timespec="seconds")})


def about_args(look: Look, asked: OfJob) -> About:
    """Return a job's name, page and present arguments, for the form that changes the arguments.

    The arguments are left out if some of them are hidden.
    """
    detail = show_job(look.connection, asked.job_id)
    kind = detail.job.kind
    shown = args_to_edit(look, look.payloads.document(kind, detail.args, hook=True), detail.args)
    return replace(
        _about(detail.job),
        values={"args": shown},
        notes=args_notes(look.kinds, kind),
        without=frozenset({"unchecked"}) if look.kinds.is_given else frozenset(),
    )


def about_running(look: Look, asked: OfJob) -> About:
    """Return a running job's name and page, for the form that ends the database session which runs the job.

    A note in the form gives the number of other jobs in the same transaction, which are rolled back too.
    """
    job = show_job(look.connection, asked.job_id).job
    others = look.at("the other jobs of its transaction", lambda c: cancellation.count_sharing(c, job.id))
    notes = ["It may be done by the time that this is sent: then nothing is ended."]
    if others is not None and others.jobs:
        at_least = "" if others.is_exact else "At least "
        number = several(others.jobs, "other job shares", "other jobs share")
        notes.insert(0, f"{at_least}{number} its transaction: rolled back with it, and run again, one by one.")
    if job.state not in ("running", "leased"):
        notes.insert(0, f"It does not run at this moment: it is {job.state}. Cancel it instead.")
    return replace(_about(job), notes=tuple(notes))


def about_finished(look: Look, asked: OfJob) -> About:
    """Return a finished job's name and page, for the form that runs the job again."""
    kind = show_finished(look.connection, asked.job_id).finished.kind
    return About(name=f"{kind} {asked.job_id}", back=f"done/{asked.job_id}")


_OUTCOME = Field(
    name="outcome",
    label="What is left of it",
    kind="choice",
    options=(("discard", "nothing"), ("dead", "a dead letter")),
)
CANCEL = Form(
    title="Cancel this job",
    means="If it waits, it is gone at once. If it runs, its relay is to end it: what its handler wrote is rolled "
    "back. It may come to its end before.",
    button="Cancel",
    about=about_job,
    fields=(_OUTCOME,),
    is_grave=True,
)
TERMINATE = Form(
    title="End the session that runs this job",
    means="The second step, if its relay does not end it: the job is cancelled, and the database session of the "
    "transaction that runs it is ended. Everything that this transaction did is rolled back, also for the other jobs "
    "that share it, and no attempt is counted. Under a lease the job is taken away from its relay instead, and what "
    "its handler writes is refused.",
    button="End by force",
    about=about_running,
    fields=(_OUTCOME,),
    is_grave=True,
)
RUN_NOW = Form(
    title="Run this job now",
    means="It runs as soon as a relay is free. A job that runs already is not changed.",
    button="Run now",
    about=about_job,
)
PRIORITY = Form(
    title="Change its priority",
    means="Higher runs first, among the jobs of its queue. A job that runs, or is one of a group, is not changed.",
    button="Change priority",
    about=about_priority,
    fields=(Field(name="priority", label="Priority", kind="number", is_required=True, help="-32767 to 32767."),),
)
RUN_AT = Form(
    title="Change when it runs",
    means="It runs from this time on. A job that runs, or is one of a group, is not changed.",
    button="Change time",
    about=about_time,
    fields=(
        Field(
            name="run_at",
            label="Run at",
            is_required=True,
            max_length=40,
            help="Such as 2026-01-31T08:00:00Z; in UTC without an offset.",
        ),
    ),
)
ARGUMENTS = Form(
    title="Change its arguments",
    means="The job gets these arguments instead of those that it has. The audit says that they were changed, not what "
    "they were. A job that runs is not changed.",
    button="Change arguments",
    about=about_args,
    fields=(ARGS, UNCHECKED),
    is_grave=True,
)
RUN_AGAIN = Form(
    title="Run this job again",
    means="A new job is added with its kind, queue, arguments and headers. It has no key, group or batch, and no job "
    "follows it.",
    button="Run again",
    about=about_finished,
)


def cancel_job(work: Work, asked: CancelJob) -> Done:
    """Cancel a waiting job at once. For a running job, send its relay a request to end it, which takes some seconds."""
    total = _request(work, asked)
    back = f"jobs/{asked.job_id}"
    if total.requested:
        text = "It runs: its relay was asked to end it, which takes some seconds."
        return Done(text, back, {"requested": [asked.job_id]})
    return Done("The job is cancelled.", back, {"cancelled": [asked.job_id]})


def terminate_job(work: Work, asked: CancelJob) -> Done:
    """Cancel a running job, and end the database session that runs it.

    If the job waits again by now, it is only cancelled, and no session is ended.

    Raises:
        Refused: no session runs the job at this moment.
    """
    total = _request(work, asked)
    back = f"jobs/{asked.job_id}"
    if not total.requested:
        return Done("It had begun to wait: the job is cancelled.", back, {"cancelled": [asked.job_id]})
    ended = work.actions.terminate(work.begin, asked.job_id, asked.outcome)
    _end_if_returned(work, asked)
    if not ended:
        raise Refused(
            409, "No session runs it at this moment: it came to its end, or waits to be ended by its next claim."
        )
    return Done(
        "The session was ended. The job is ended, at the latest by its next claim.", back, {"ended": [asked.job_id]}
    )


def run_now(work: Work, asked: ReasonedJob) -> Done:
    """Make a waiting job due, so that the next free relay runs it."""
    return _change(work, asked.job_id, JobChange(run_now=True), "It runs as soon as a relay is free.")


def change_priority(work: Work, asked: NewPriority) -> Done:
    """Give a job another priority."""
    return _change(work, asked.job_id, JobChange(priority=asked.priority), f"Its priority is {asked.priority} now.")


def change_time(work: Work, asked: NewTime) -> Done:
    """Change the time at which a job runs."""
    moment = moment_in(asked.run_at)
    return _change(work, asked.job_id, JobChange(run_at=moment), f"It runs at {moment.isoformat(sep=' ')}.")


def change_args(work: Work, asked: NewArguments) -> Done:
    """Give a job other arguments, which are checked against the kind's handler if the dashboard has a registry."""
    check = checked_args(asked.args, work.desk.kinds, unchecked=asked.unchecked)
    wanted = ChangeJobs(JobFilter(ids=(asked.job_id,)), JobChange(args=asked.args))
    total = work.actions.run(work.begin, wanted, check=check)
    return _changed(total, asked.job_id, "Its arguments were changed.")


def run_again(work: Work, asked: ReasonedJob) -> Done:
    """Add a new job like a finished one: with the same kind, queue, arguments and headers."""
    with work.begin() as connection:
        added = work.actions.run_again(connection, asked.job_id)
    return Done(f"The job {added} was added.", f"jobs/{added}", {"added": added})


def _about(job: WaitingJob) -> About:
    return About(name=f"{job.kind} {job.id}", back=f"jobs/{job.id}")


def _request(work: Work, asked: CancelJob) -> Total:
    total = work.actions.run(work.begin, CancelRunning(JobFilter(ids=(asked.job_id,)), asked.outcome))
    if total.not_found:
        raise JobNotFound(asked.job_id, "job")
    return total


def _end_if_returned(work: Work, asked: CancelJob) -> None:
    """Cancel a job whose session was ended, if the job waits again already.

    Otherwise the next relay that claims the job cancels it.
    """
    with unmarked(work.begin, [asked.job_id], work.warn), work.begin() as connection:
        cancellation.end_returned(connection, [asked.job_id], asked.outcome)


def _change(work: Work, job_id: UUID, to: JobChange, text: str) -> Done:
    return _changed(work.actions.run(work.begin, ChangeJobs(JobFilter(ids=(job_id,)), to)), job_id, text)


def _changed(total: Total, job_id: UUID, text: str) -> Done:
    if total.not_found:
        raise JobNotFound(job_id, "job")
    if total.held:
        raise Refused(
            409, "It runs at this moment, so it was not changed. Cancel it, or wait until it has come to its end."
        )
    if total.refused:
        raise Refused(
            409, "It is one of a group, whose jobs run in the order in which they were added: it was not changed."
        )
    return Done(text, f"jobs/{job_id}", {"changed": [job_id]})
