"""Checks of schedules: late, wrong or long paused, no longer declared or handled by code, or with jobs that die."""

import shlex
from collections.abc import Iterator

from outboxq.admin.schedules import is_ahead
from outboxq.codec.text import several
from outboxq.cron import Cron
from outboxq.doctor.findings import CheckContext, Finding, detail_of
from outboxq.doctor.formatting import age
from outboxq.errors import ArgumentError
from outboxq.statements.doctor import schedules as statements

# A running relay fires schedules within seconds.
_LATE_SECONDS = 60.0
_LONG_PAUSED_SECONDS = 7 * 86_400.0


def find_late_schedules(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each schedule whose due time passed over a minute ago without a relay adding its job."""
    for row in context.rows(statements.late_schedules(context.schema, _LATE_SECONDS)):
        yield Finding(
            "schedule-late",
            "problem",
            f"schedule {row.name!r} has been due for {age(row.late_seconds)}, and no relay has fired it",
            detail_of(row),
            "Start a relay, of any queue. If relays run, their logs say why they cannot fire it: a time zone that they "
            "do not know, or a right that is missing.",
        )


def find_paused_schedules(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for schedules that are disabled (no code declares them any more) or paused for over a week."""
    for row in context.rows(statements.paused_schedules(context.schema, _LONG_PAUSED_SECONDS)):
        name, since = shlex.quote(row.name), age(row.paused_seconds)
        if row.owner is None:
            code, title = "schedule-paused", f"schedule {row.name!r} has been paused for {since}"
            advice = f"When the reason is gone: outboxq schedules resume {name}"
        else:
            code = "schedule-disabled"
            title = f"schedule {row.name!r} is disabled: the code of {row.owner!r} has not declared it for {since}"
            advice = f"Remove it, outboxq schedules remove {name}, or keep it: outboxq schedules adopt {name}"
        yield Finding(code, "info", title, detail_of(row), advice)


def find_schedules_ahead(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for schedules whose due time is too late: it was computed while the database's clock was ahead."""
    for row in context.rows(statements.coming_schedules()):
        try:
            cron = Cron(row.cron, row.time_zone)
        except ArgumentError:
            # This machine does not know the time zone, or runs an older version.
            continue
        if is_ahead(cron, row.next_at, row.last_at, row.now):
            expected, name = cron.after(row.now), shlex.quote(row.name)
            yield Finding(
                "schedule-ahead",
                "problem",
                f"schedule {row.name!r} is due in {age((row.next_at - row.now).total_seconds())}, and by {row.cron!r} "
                f"in {age((expected - row.now).total_seconds())}: the database's clock was ahead when it was computed",
                {
                    "name": row.name, "kind": row.kind, "queue": row.queue,
                    "next_at": row.next_at.isoformat(), "expected_at": expected.isoformat(),
                },
                "Start a relay whose code declares it, or put it again; or have its time computed again: outboxq "
                f"schedules pause {name}, then outboxq schedules resume {name}",
            )  # fmt: skip


def find_unhandled_schedules(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for schedules in the registry's queues that it has no handler for, or no longer declares."""
    registry = context.registry
    if registry is None:
        return
    declared = {new.name for new in registry.schedules}
    for row in context.rows(statements.all_schedules(context.schema)):
        if row.kind not in registry.handlers and row.queue in registry.flavours:
            yield Finding(
                "schedule-kind-unknown",
                "warning",
                f"schedule {row.name!r} adds jobs of kind {row.kind!r} to queue {row.queue!r}, and the registry has no "
                "handler for it",
                detail_of(row),
                "Import the module that defines its handler, give a renamed handler aliases=(...), or remove it: "
                f"outboxq schedules remove {shlex.quote(row.name)}",
            )
        elif row.declared and row.name not in declared and row.queue in registry.flavours:
            yield Finding(
                "schedule-not-declared",
                "warning",
                f"schedule {row.name!r} was declared in code, and this registry does not declare it any more",
                detail_of(row),
                f"It goes on until it is removed: outboxq schedules remove {shlex.quote(row.name)}",
            )


def find_dying_schedules(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each schedule that has jobs among the newest dead letters of its queue."""
    for row in context.rows(statements.dead_letters_of_schedules(context.schema)):
        yield Finding(
            "schedule-dead",
            "warning",
            f"{several(row.jobs, 'job', 'jobs')} of schedule {row.name!r} {'is' if row.jobs == 1 else 'are'} among the "
            f"newest dead letters of queue {row.queue!r}",
            detail_of(row),
            f"See why, and retry or discard them: outboxq dead list --kind {shlex.quote(row.kind)}",
        )
