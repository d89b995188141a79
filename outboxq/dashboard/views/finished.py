"""The list and the page of finished jobs. Only kinds that are declared to keep finished jobs have any."""

from dataclasses import dataclass
from typing import Literal

from outboxq.admin.browse import Found, find_done
from outboxq.admin.finished import OUTCOMES, DoneFilter, show_finished
from outboxq.dashboard.parameters import Name, OfJob, Paged
from outboxq.dashboard.view import Look, View
from outboxq.dashboard.views.jobs import done_view


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedDone(Paged):
    """The parameters of the list of finished jobs."""

    queue: Name | None = None
    kind: Name | None = None
    outcome: Literal["done", "discarded", "cancelled", "expired"] | None = None


def show_done_jobs(look: Look, asked: AskedDone) -> View:
    """Return the list of the finished jobs that match the filter, the last added first."""
    wanted = DoneFilter(queue=asked.queue, kind=asked.kind, outcome=asked.outcome)
    found = look.at("finished jobs", lambda c: find_done(c, wanted, before=asked.before, limit=asked.limit)) or Found(
        ()
    )
    data = {"done": found.rows, "more": found.before is not None, "next_before": found.before}
    extra = {"found": found, "outcomes": OUTCOMES, "is_filtered": wanted != DoneFilter()}
    return View("done.html", "Finished jobs", data, extra)


def show_done_job(look: Look, asked: OfJob) -> View:
    """Return the page of one finished job."""
    return done_view(look, show_finished(look.connection, asked.job_id))
