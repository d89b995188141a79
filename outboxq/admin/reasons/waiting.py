"""Reasons for a job that waits: for its time, for a relay that knows its kind, for its group, or for its turn."""

import shlex
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Row

from outboxq.admin.reasons.held import find_held
from outboxq.admin.reasons.looks import Looks
from outboxq.admin.reasons.reason import Reason, Value, in_order
from outboxq.admin.reasons.serving import (
    Relays,
    find_busy_slots,
    find_unknown_kind,
    known_by,
    longest_of,
    look_at_relays,
    named,
)
from outboxq.codec.text import duration, several
from outboxq.statements import explain as statements
from outboxq.statements.doctor.sessions import snapshot_holders

# Relays come to every job that may run within a sweep: a second, or this long if a snapshot is pinned.
_SWEEP_SECONDS = 30.0
_SUSPECT = ("suspect", "group_suspect")
_MOST_MESSAGE = 200


def find_own(looks: Looks, job: Row[Any], relays: Relays) -> Iterator[Reason]:
    """Yield reasons in the job itself: it expires, its relay died, its time is later, its kind is paused or unknown."""
    if job.expires_in_seconds is not None:
        yield from _expiry(job)
    if job.state in _SUSPECT:
        yield _suspect(looks, job)
    if job.kind_paused_seconds is not None:
        yield _kind_paused(job)
    elif job.parked:
        yield _kind_unknown(job, relays)
    else:
        yield from find_unknown_kind(relays, job)
    if job.due_in_seconds > 0 and not job.parked and job.state not in _SUSPECT:
        yield _retrying(job) if job.attempt and job.error_type else _scheduled(job)


def _expiry(job: Row[Any]) -> Iterator[Reason]:
    details: dict[str, Value] = {"expires_in_seconds": job.expires_in_seconds}
    if job.expires_in_seconds <= 0:
        yield Reason(
            "expired",
            f"it expired {duration(-job.expires_in_seconds)} ago: the next relay that comes to it drops it, and does "
            "not call its handler",
            details,
            "Nothing. If it was to run all the same, add it again with a later `expires`.",
        )
    elif job.due_in_seconds >= job.expires_in_seconds:
        yield Reason(
            "expires-first",
            f"it expires in {duration(job.expires_in_seconds)}, before its time in {duration(job.due_in_seconds)}: it "
            "will not run",
            {**details, "due_in_seconds": job.due_in_seconds},
            f"To run it now: outboxq jobs change {job.id} --run-now.",
        )


def _suspect(looks: Looks, job: Row[Any]) -> Reason:
    ahead = 0
    if job.group_key is None:
        ahead = looks.count("the suspects before it", statements.suspects_before(looks.schema, job.queue, job.seq))
    before = f", after {several(ahead, 'suspect', 'suspects')} before it" if ahead else ""
    crashed = f"{several(job.crashes, 'time', 'times')} since it runs alone" if job.crashes else "once, among others"
    return Reason(
        "suspect",
        f"its relay died or lost its connection while the job ran ({crashed}): it runs alone now, under a "
        f"lease{before}",
        {"crashes": job.crashes, "ahead": ahead},
        "A running relay takes suspects one at a time. If it stays a suspect, it may kill its process: look at the "
        "last lines of the relay that died.",
    )


def _kind_paused(job: Row[Any]) -> Reason:
    put_off = f"; looked at again in {duration(job.due_in_seconds)}" if job.parked and job.due_in_seconds > 0 else ""
    return Reason(
        "kind-paused",
        f"its kind {job.kind!r} has been paused in queue {job.queue!r} for "
        f"{duration(job.kind_paused_seconds)}{put_off}",
        {"kind": job.kind, "queue": job.queue, "paused_seconds": job.kind_paused_seconds},
        f"When the reason is gone: outboxq kinds resume {shlex.quote(job.kind)} --queue {shlex.quote(job.queue)}",
    )


def _kind_unknown(job: Row[Any], relays: Relays) -> Reason:
    again = f"in {duration(job.due_in_seconds)}" if job.due_in_seconds > 0 else "with the next look"
    return Reason(
        "kind-unknown",
        f"parked: no relay that looked knows its kind {job.kind!r} ({several(job.parked, 'look', 'looks')}); another "
        f"one looks {again}{known_by(relays)}",
        {
            "kind": job.kind,
            "looks": job.parked,
            "due_in_seconds": job.due_in_seconds,
            "known_by": [str(relay.id) for relay in relays.living if relay.knows],
        },
        "Start a relay whose registry has the kind, or give a renamed handler aliases=(...). Then, to save the wait: "
        f"outboxq jobs change {job.id} --run-now.",
    )


def _retrying(job: Row[Any]) -> Reason:
    most = "" if job.max_attempts is None else f" of {job.max_attempts}"
    error = f"{job.error_type}: {job.error_message}" if job.error_message else job.error_type
    if len(error) > _MOST_MESSAGE:
        error = f"{error[:_MOST_MESSAGE]}..."
    return Reason(
        "retrying",
        f"attempt {job.attempt + 1}{most} begins in {duration(job.due_in_seconds)}; attempt {job.attempt} failed: "
        f"{error}",
        {
            "due_in_seconds": job.due_in_seconds,
            "run_at": job.run_at.isoformat(),
            "attempt": job.attempt,
            "max_attempts": job.max_attempts,
            "error_type": job.error_type,
        },
        f"Look at its errors: outboxq jobs show {job.id}. To run it now: outboxq jobs change {job.id} --run-now.",
    )


def _scheduled(job: Row[Any]) -> Reason:
    return Reason(
        "scheduled",
        f"its time comes in {duration(job.due_in_seconds)}: it was added for then, or put off by its handler",
        {"due_in_seconds": job.due_in_seconds, "run_at": job.run_at.isoformat(), "attempt": job.attempt},
        f"Nothing. To run it now: outboxq jobs change {job.id} --run-now.",
    )


def find_blocked_in_group(looks: Looks, job: Row[Any], per_group: int, relays: Relays) -> Iterator[Reason]:
    """Yield a reason if other jobs of the group come first; the reason says why the first of them does not run."""
    if job.group_key is None or job.state == "group_waiting":
        return
    ahead = looks.count(
        "its group", statements.group_before(looks.schema, job.queue, job.group_key, job.seq)
    )  # fmt: skip
    if ahead < per_group:
        return
    head = looks.row("the first job of its group", statements.first_in_group(looks.schema, job.queue, job.group_key))
    if head is None:
        return
    first = looks.row("the first job of its group", statements.job_facts(looks.schema, head.id))
    found = () if first is None else in_order([*find_held(looks, first), *_own_of_head(looks, first, job, relays)])
    why = f", which does not run itself: {found[0].text}" if found else ", which is the next one to run"
    if found and found[0].code in ("running", "leased"):
        why = f", and {found[0].text}"
    yield Reason(
        "behind-in-group",
        f"{_number(ahead)} of group {job.group_key!r} {'comes' if ahead == 1 else 'come'} before it, the first of them "
        f"job {head.id}{why}",
        {"group": job.group_key, "ahead": ahead, "head": str(head.id), "head_code": found[0].code if found else None},
        f"See what that job waits for: outboxq explain {head.id}. Without it its group goes on: outboxq jobs cancel "
        f"{head.id}.",
    )


def _own_of_head(looks: Looks, head: Row[Any], job: Row[Any], relays: Relays) -> Iterator[Reason]:
    # Facts about the kind of `job` do not apply to the other job.
    return find_own(looks, head, relays if head.kind == job.kind else look_at_relays(looks, head.queue, head.kind))


def _number(ahead: int) -> str:
    more = " or more" if ahead > statements.MOST_COUNTED else ""
    return f"{min(ahead, statements.MOST_COUNTED):,}{more} {'job' if ahead == 1 else 'jobs'}"


def find_coalesced(looks: Looks, job: Row[Any]) -> Iterator[Reason]:
    """Yield a reason if a newer job with the same coalescing key exists, which runs in place of this one."""
    if job.unique_key is None:
        return
    newest = looks.row("jobs of its key", statements.newest_of_key(looks.schema, job.unique_key, job.id))
    if newest is None or newest.id == job.id:
        return
    more = " or more" if newest.jobs >= statements.MOST_LOOKED_AT else ""
    yield Reason(
        "coalesced",
        f"job {newest.id} of the same key was added later: one run with the arguments of the newest one is for all "
        f"{newest.jobs:,}{more}",
        {"newest": str(newest.id), "jobs": newest.jobs},
        f"Nothing. See what that job waits for: outboxq explain {newest.id}.",
    )


def find_turn(looks: Looks, job: Row[Any], relays: Relays, *, may_run: bool) -> Iterator[Reason]:
    """Yield reasons if all slots are busy or other jobs come first, otherwise the reason that nothing is in the way.

    Args:
        may_run: True if no other reason was found, so that the job may run now.
    """
    busy = list(find_busy_slots(relays, job)) if may_run else []
    yield from busy
    ahead = 0
    if job.state == "ready":
        before = statements.ready_before(looks.schema, job.queue, job.priority, job.seq)
        ahead = looks.count("the jobs before it", before)
    if ahead:
        yield Reason(
            "behind-others",
            f"{_number(ahead)} of queue {job.queue!r} {'comes' if ahead == 1 else 'come'} before it"
            f"{_busiest(looks, relays)}",
            {"ahead": ahead, "priority": job.priority},
            f"See whether the first of them run: outboxq explain --queue {shlex.quote(job.queue)}. More slots or "
            f"processes work faster; to go ahead: outboxq jobs change {job.id} --priority N.",
        )
    elif may_run and not busy:
        yield _overdue(looks, job, relays) if job.due_in_seconds < -_SWEEP_SECONDS else _due_now(looks, job)


def _busiest(looks: Looks, relays: Relays) -> str:
    if relays.serving:
        return longest_of(relays)
    relay = looks.row("what relays are busy with", statements.busiest_relays())
    if relay is None or relay.seconds is None:
        return ""
    return f"; of the connected relays' jobs session {relay.pid} runs for the longest, {duration(relay.seconds)}"


def _overdue(looks: Looks, job: Row[Any], relays: Relays) -> Reason:
    served = f"no connected relay serves queue {job.queue!r}, or all of their slots are busy, or they cannot work"
    if relays.serving:
        served = f"{named(relays.serving)} serves queue {job.queue!r}, has a free slot, and does not come to it"
    return Reason(
        "overdue",
        f"it could have run for {duration(-job.due_in_seconds)}, and nothing is seen in its way"
        f"{_busiest(looks, relays)}: {served}",
        {"queue": job.queue, "kind": job.kind, "due_in_seconds": job.due_in_seconds},
        f"See that a relay serves the queue (--queue {shlex.quote(job.queue + '=4')}) and read its log; then outboxq "
        "doctor MODULE:ATTRIBUTE.",
    )


def _due_now(looks: Looks, job: Row[Any]) -> Reason:
    details: dict[str, Value] = {"due_in_seconds": job.due_in_seconds}
    within = "within a second"
    pinned = looks.row("the oldest snapshot", snapshot_holders())
    if pinned is not None and (pinned.seconds or 0) >= 1:
        within = f"within 30 s at most, as session {pinned.pid} has pinned a snapshot for {duration(pinned.seconds)}"
        details |= {"snapshot_pid": pinned.pid, "snapshot_seconds": pinned.seconds}
    return Reason(
        "due-now",
        f"nothing is in its way: a relay that serves queue {job.queue!r} and has a free slot takes it {within}",
        details,
        "Ask again in a moment.",
    )
