"""The pages about what decides when jobs run: schedules, limits of queues, groups and callback batches."""

from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from uuid import UUID

from outboxq.admin.callback_batches import list_batches, show_batch
from outboxq.admin.flow import list_blocked_groups, list_limits, list_paused_kinds
from outboxq.admin.queues import list_queues
from outboxq.admin.schedules import Schedule, list_schedules, show_schedule
from outboxq.cron import Cron
from outboxq.dashboard.parameters import Name, Nothing, OfSchedule
from outboxq.dashboard.view import Look, View, flat
from outboxq.errors import ArgumentError

_MOST_SCHEDULES, _MOST_BATCHES, _FIRES = 500, 50, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedSchedules:
    """The parameters of the list of schedules."""

    queue: Name | None = None
    kind: Name | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedBatch:
    """The parameter of a callback batch's page: the id of the batch."""

    batch_id: UUID


def show_schedules(look: Look, asked: AskedSchedules) -> View:
    """Return the list of schedules, each with its next times."""
    find = lambda c: list_schedules(c, queue=asked.queue, kind=asked.kind, limit=_MOST_SCHEDULES + 1)  # noqa: E731
    found = look.at("the schedules", find) or []
    shown = found[:_MOST_SCHEDULES]
    data = {
        "schedules": shown,
        "more": len(found) > _MOST_SCHEDULES,
        "next_fires": {each.name: _fires_after(each) for each in shown},
    }
    is_filtered = asked != AskedSchedules()
    return View("schedules.html", "Schedules", data, {"is_filtered": is_filtered, "zone_is_known": zone_is_known})


def show_one_schedule(look: Look, asked: OfSchedule) -> View:
    """Return the page of one schedule, with its job and its next times."""
    detail = show_schedule(look.connection, asked.name)
    kind = detail.schedule.kind
    documents = {
        "args": look.payloads.document(kind, detail.args, hook=True),
        "options": look.payloads.document(kind, detail.options),
    }
    return View("schedule.html", asked.name, flat(detail, **documents))


def _fires_after(schedule: Schedule) -> list[datetime]:
    """Return the two times at which a schedule adds jobs after its next time, `next_at`.

    The list is empty if the schedule is paused, or if this machine does not know the schedule's time zone or cannot
    read its cron text.
    """
    if schedule.paused_at is not None:
        return []
    try:
        cron = Cron(schedule.cron, schedule.time_zone)
    except ArgumentError:
        return []
    return list(islice(cron.times_from(schedule.next_at), 1, _FIRES))


def zone_is_known(cron: str, time_zone: str) -> bool:
    """Return True if this machine knows a schedule's time zone, and can read its cron text."""
    try:
        Cron(cron, time_zone)
    except ArgumentError:
        return False
    return True


def show_flow(look: Look, asked: Nothing) -> View:  # noqa: ARG001  # as every screen has it
    """Return the page of queues' limits, groups whose next job is blocked, and paused queues and kinds."""
    queues = look.at("the queues", list_queues) or []
    data = {
        "limits": look.at("the limits", list_limits) or [],
        "blocked_groups": look.at("the groups", list_blocked_groups) or [],
        "paused_queues": [each for each in queues if each.paused_at is not None],
        "paused_kinds": look.at("the kinds that are paused", list_paused_kinds) or [],
    }
    return View("flow.html", "Limits and groups", data)


def show_batches(look: Look, asked: Nothing) -> View:  # noqa: ARG001  # as every screen has it
    """Return the list of the 50 oldest open callback batches: those whose jobs have not all ended."""
    found = look.at("the batches", lambda c: list_batches(c, limit=_MOST_BATCHES + 1)) or []
    return View("batches.html", "Batches", {"batches": found[:_MOST_BATCHES], "more": len(found) > _MOST_BATCHES})


def show_one_batch(look: Look, asked: AskedBatch) -> View:
    """Return the page of one open callback batch, with the numbers of its jobs by state."""
    detail = show_batch(look.connection, asked.batch_id)
    callback = look.payloads.callback(detail.batch.kind, detail.callback)
    data = {**flat(detail, callback=callback), "states": dict(detail.states)}
    return View("batch.html", "Batch", data)
