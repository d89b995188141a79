"""The list of all queues, and the page of one queue."""

from dataclasses import dataclass, fields
from datetime import timedelta

from outboxq.admin.browse import next_jobs, next_scheduled, read_gauges
from outboxq.admin.explain import explain_queue
from outboxq.admin.history import read_history
from outboxq.admin.queues import Queue, list_queues
from outboxq.admin.snapshot import QueueSnapshot, Snapshot, take_snapshot
from outboxq.dashboard.charts import Series
from outboxq.dashboard.parameters import Name, Nothing, Period
from outboxq.dashboard.view import Look, View
from outboxq.dashboard.views.history import failed, series_in, span_of
from outboxq.dashboard.views.seen import seen_explanation_of_queue, seen_groups, seen_jobs, seen_relays
from outboxq.queue_limits import keep_text


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedQueue:
    """The parameters of one queue's page: the queue, and how far back its charts go."""

    queue: Name
    period: Period = "1h"


def show_queues(look: Look, asked: Nothing) -> View:  # noqa: ARG001  # as every screen has it
    """Return the list of all queues, with the settings that operators have made for them."""
    snapshot = take_snapshot(look.connection)
    look.sections.refused += snapshot.not_known
    known = look.at("the settings of queues", list_queues) or []
    settings = {each.queue: _setting(each) for each in known}
    queues = _with_quiet_ones(snapshot, [each.queue for each in known])
    return View("queues.html", "Queues", {"queues": queues, "operator_settings": settings})


def show_queue(look: Look, asked: AskedQueue) -> View:
    """Return the page of one queue: the reasons why it does not run, the outcomes of its jobs, and its next jobs."""
    name, span = asked.queue, span_of(asked.period)
    snapshot = take_snapshot(look.connection, queue=name)
    look.sections.refused += snapshot.not_known
    queue = next((each for each in snapshot.queues if each.queue == name), QueueSnapshot(queue=name))
    history = look.at("the history", lambda c: read_history(c, queue=name, since=span.back, by=span.by)) or []
    kinds = look.at("the kinds", lambda c: read_history(c, queue=name, since=span.back, by="kind")) or []
    gauges = look.at("the depth", lambda c: read_gauges(c, name, seconds=min(span.back, _DAY).total_seconds())) or []
    known = next((each for each in look.at("its settings", list_queues) or [] if each.queue == name), None)
    data = {
        "queue": queue,
        "explanation": seen_explanation_of_queue(look, look.at("why", lambda c: explain_queue(c, name))),
        "operator_settings": None if known is None else _setting(known),
        "history": history,
        "kinds": kinds,
        "relays": seen_relays(look, [each for each in snapshot.relays if name in each.queues and each.state != "dead"]),
        "next": seen_jobs(look, look.at("the next jobs", lambda c: next_jobs(c, name)) or []),
        "scheduled": seen_jobs(look, look.at("the scheduled jobs", lambda c: next_scheduled(c, name)) or []),
        "dead_groups": seen_groups(look, [each for each in snapshot.dead_groups if each.queue == name]),
    }
    depth = [
        Series("waiting", [each.ready + each.due for each in gauges], "a"),
        Series("scheduled", [each.scheduled for each in gauges], "b"),
    ]
    extra = {"series": series_in(history, look.now, span), "depth": depth, "period": asked.period, "failed": failed}
    return View("queue.html", name, data, extra)


_DAY = timedelta(days=1)


def _with_quiet_ones(snapshot: Snapshot, names: list[str]) -> list[QueueSnapshot]:
    found = {each.queue: each for each in snapshot.queues}
    return [found.get(name, QueueSnapshot(queue=name)) for name in sorted({*found, *names})]


def _setting(queue: Queue) -> dict[str, object]:
    limits = queue.limits
    found: dict[str, object] = {
        "limit": limits.running,
        "per_group": limits.per_group,
        "rate": None if limits.rate is None else str(limits.rate),
        "burst": limits.rate_burst,
        "keep_dead": None if queue.keep_dead_seconds is None else keep_text(queue.keep_dead_seconds),
    }
    return {name: value for name, value in found.items() if value is not None}


STATES = tuple(
    each.name
    for each in fields(QueueSnapshot)
    if each.name in ("ready", "grouped", "running", "scheduled", "due", "leased", "orphaned", "suspect")
)
