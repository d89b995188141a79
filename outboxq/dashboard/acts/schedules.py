"""Actions on schedules."""

from outboxq.admin.schedules import show_schedule
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.forms import About, Form
from outboxq.dashboard.parameters import OfSchedule, ReasonedSchedule
from outboxq.dashboard.route import Done, Work
from outboxq.dashboard.segments import as_segment
from outboxq.dashboard.view import Look


def about_schedule(look: Look, asked: OfSchedule) -> About:
    """Return the name of a schedule and the path of its page, for forms about the schedule."""
    found = show_schedule(look.connection, asked.name).schedule
    return About(name=found.name, back=f"schedules/{as_segment(found.name)}")


PAUSE = Form(
    title="Pause this schedule",
    means="It adds no job, and its times pass by, until it is resumed.",
    button="Pause",
    about=about_schedule,
)
RESUME = Form(
    title="Resume this schedule",
    means="It adds jobs again from its next time on. What was due while it was paused is not made up for.",
    button="Resume",
    about=about_schedule,
)
RUN_NOW = Form(
    title="Run this schedule now",
    means="Its job is added once more, now, also if it is paused. When it is due next stays as it is.",
    button="Run now",
    about=about_schedule,
)


def pause_schedule(work: Work, asked: ReasonedSchedule) -> Done:
    """Pause a schedule: it adds no jobs until it is resumed."""
    with work.begin() as connection:
        changed = work.actions.pause_schedules(connection, [asked.name])
    return Done("It is paused." if changed else "It was paused already.", _page_of(asked), {"paused": changed})


def resume_schedule(work: Work, asked: ReasonedSchedule) -> Done:
    """Resume a paused schedule."""
    with work.begin() as connection:
        changed = work.actions.resume_schedules(connection, [asked.name])
    return Done("It runs again." if changed else "It was not paused.", _page_of(asked), {"resumed": changed})


def run_schedule(work: Work, asked: ReasonedSchedule) -> Done:
    """Add the job of a schedule now, in addition to the jobs that the schedule adds at its times.

    Raises:
        Refused: a job with the same unique key waits or runs.
    """
    with work.begin() as connection:
        added = work.actions.run_schedule(connection, asked.name)
    if not added.added:
        raise Refused(409, f"No job was added: the job {added.existing_id} has the same unique key, and waits or runs.")
    return Done(f"The job {added.id} was added.", f"jobs/{added.id}", {"added": added.id})


def _page_of(asked: OfSchedule) -> str:
    return f"schedules/{as_segment(asked.name)}"
