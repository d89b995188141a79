"""Checks of waiting jobs: of unknown kinds, left by dead relays, or waiting for the first job of their group."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Row

from outboxq.codec.text import several
from outboxq.doctor.cancellation import paused_kinds
from outboxq.doctor.findings import CheckContext, Finding, detail_of
from outboxq.doctor.formatting import age
from outboxq.statements.doctor import work as statements

# A living relay extends its lease, and takes over those of dead relays, several times within this.
_LEASE_GRACE_SECONDS = 30.0


def waiting(context: CheckContext) -> Sequence[Row[Any]]:
    """Return rows that count the waiting jobs by queue, kind and state (ready or scheduled), for several checks.

    The query reads up to 20,000 jobs of each queue, so it is executed only once.
    """
    return context.once(
        "waiting",
        lambda: [
            *context.rows(statements.waiting_ready(context.schema)),
            *context.rows(statements.waiting_scheduled(context.schema)),
        ],
    )


def jobs_of(number: int) -> str:
    """Format a number of jobs as `1 job` or `10,000 or more jobs`."""
    more = " or more" if number >= statements.MAX_JOBS else ""
    return f"{number:,}{more} {'job' if number == 1 else 'jobs'}"


def jobs_wait(number: int) -> str:
    """Format a number of waiting jobs as `1 job waits` or `2 jobs wait`."""
    return f"{jobs_of(number)} {'waits' if number == 1 else 'wait'}"


def find_unknown_kinds(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for kinds whose jobs were put off by relays that have no handler for the kind.

    If a registry is given, also report waiting jobs without a handler in the registry, and queues that relays of
    another registry serve too.
    """
    jobs, parked = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    paused = paused_kinds(context)
    for row in waiting(context):
        jobs[row.queue, row.kind] += row.jobs
        parked[row.queue, row.kind] += 0 if (row.queue, row.kind) in paused else row.parked
    for (queue, kind), number in parked.items():
        if number:
            yield Finding(
                "kind-parked",
                "warning",
                f"{jobs_of(number)} of kind {kind!r} in queue {queue!r} put off: no relay that looked knows the kind",
                {"queue": queue, "kind": kind, "jobs": number},
                "Start a relay whose registry has the kind, give a renamed handler aliases=..., or cancel them: "
                f"outboxq jobs cancel --kind {shlex.quote(kind)}",
            )
    for (queue, kind), number in jobs.items():
        yield from _unknown_to_registry(context, queue, kind, number)
    yield from _shared_queues(context, parked)


def _unknown_to_registry(context: CheckContext, queue: str, kind: str, number: int) -> Iterator[Finding]:
    registry = context.registry
    if registry is None or kind in registry.handlers:
        return
    served = queue in registry.flavours
    yield Finding(
        "kind-unknown-to-registry",
        "warning" if served else "info",
        f"{jobs_of(number)} of kind {kind!r} in queue {queue!r}, and the registry has no handler for it"
        + ("" if served else ", nor for anything in that queue"),
        {"queue": queue, "kind": kind, "jobs": number, "queue_is_served": served},
        "Import the module that defines its handler, or give a renamed handler aliases=(...). If another service "
        "handles it, give each service queues of its own: on one queue they put off each other's jobs."
        if served
        else "Nothing, if another service handles that queue; else import the module that defines its handler.",
    )


def _shared_queues(context: CheckContext, parked: Mapping[tuple[str, str], int]) -> Iterator[Finding]:
    """Yield findings for queues that relays of another registry serve too.

    Those relays have put off jobs of kinds that the given registry has a handler for.

    `parked`: the number of jobs that were put off, by queue and kind.
    """
    registry = context.registry
    if registry is None:
        return
    known = {key: number for key, number in parked.items() if number and key[1] in registry.handlers}
    for queue in sorted({queue for queue, _ in known if queue in registry.flavours}):
        kinds = sorted(kind for name, kind in known if name == queue)
        number = sum(known[queue, kind] for kind in kinds)
        yield Finding(
            "queue-shared",
            "warning",
            f"{jobs_of(number)} in queue {queue!r} put off by relays of another registry, which does not know what "
            f"this one does ({', '.join(kinds)})",
            {"queue": queue, "kinds": kinds, "jobs": number},
            "If another service serves that queue too, give each service queues of its own. After a deployment it "
            "passes by itself once no older relay runs.",
        )


def oldest_waiting(context: CheckContext) -> dict[str, float]:
    """Return, by queue, the seconds that the oldest of the jobs to run next has waited."""
    oldest: dict[str, float] = {}
    for row in waiting(context):
        oldest[row.queue] = max(oldest.get(row.queue, 0.0), row.oldest_seconds or 0.0)
    return oldest


def find_suspects(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding if there are suspects: jobs that a relay had claimed when the relay or its transaction died.

    Suspects run alone next or, in lease mode, with a few others, to find the job that caused the death.
    """
    rows = context.rows(statements.suspects(context.schema))
    if rows:
        number = sum(row.jobs for row in rows)
        yield Finding(
            "suspects-waiting",
            "warning",
            f"{jobs_of(number)} {'was' if number == 1 else 'were'} held by a relay that died, and "
            f"{'waits' if number == 1 else 'wait'} to be run alone",
            {"jobs": number, "queues": [row.queue for row in rows]},
            "A running relay takes them, a few at a time. If they stay, or come back, one of them kills its process: "
            "outboxq jobs list --state suspect",
        )


def find_orphaned_leases(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each dead relay that still has leased jobs, because no living relay has put them back."""
    found = statements.orphaned_leases(context.schema, _LEASE_GRACE_SECONDS)
    for row in context.rows(found):
        owner = f"relay {row.owner}" + (f" ({row.host}, process {row.pid})" if row.host else "")
        since = f"has been dead for {age(row.seconds)}" if row.seconds is not None else "is not known any more"
        yield Finding(
            "lease-orphaned",
            "problem",
            f"{owner} {since} and still holds {several(row.jobs, 'leased job', 'leased jobs')}: no relay reaps them",
            detail_of(row),
            "Start a relay: each one puts back the jobs of dead ones within seconds.",
        )


def find_blocked_groups(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each queue with groups whose first job runs at a later time, so that the others wait too.

    The first job has failed, or no relay that claimed it has a handler for its kind, or the kind is paused.
    """
    by_queue: defaultdict[str, list[Row[Any]]] = defaultdict(list)
    for row in context.rows(statements.blocked_groups(context.schema)):
        by_queue[row.queue].append(row)
    for queue, rows in by_queue.items():
        first, jobs = rows[0], sum(row.jobs for row in rows)
        why = (
            f"its kind {first.kind!r} is not known to the relays that saw it, or is paused"
            if first.parked
            else f"it failed, or was put off, after {first.attempt} attempts"
        )
        yield Finding(
            "group-blocked",
            "warning",
            f"{jobs_wait(jobs)} in queue {queue!r} behind the first jobs of {len(rows):,} "
            f"{'group' if len(rows) == 1 else 'groups'}; the most, {first.jobs:,}, behind job {first.id}: {why}; it "
            f"runs again in {age(max(first.due_in_seconds, 0.0))}",
            {"queue": queue, "groups": len(rows), "jobs": jobs, "job": first.id},
            f"Look at its errors: outboxq jobs show {first.id}. Without it its group goes on: "
            f'outboxq jobs cancel {first.id}. For jobs that need not wait for one that fails: on_failure="pass".',
        )
