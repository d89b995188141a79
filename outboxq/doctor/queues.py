"""Queues whose jobs are late: paused, without a relay, or with busy relays; and kinds that no relay has a handler for.

Relays write rows about themselves into `relay_status`. If none can be read, the names of connections and the leases of
jobs show if there is any relay at all.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from outboxq.admin.relays import decode_running
from outboxq.codec.text import several
from outboxq.doctor.cancellation import paused_kinds
from outboxq.doctor.findings import CheckContext, Finding, Value
from outboxq.doctor.formatting import age
from outboxq.doctor.work import jobs_of, jobs_wait, waiting
from outboxq.statements import relays as statements
from outboxq.statements.doctor import work

# The number of pairs of queue and kind that are compared with the kinds that relays know.
_MOST_PAIRS = 1_000
_STOPPING = "stopping"
_UNLISTED = "(Relays of a version from before step 11 of the migrations are not listed.)"


@dataclass(frozen=True, slots=True)
class _LateQueue:
    """A queue with waiting jobs.

    `jobs`: their number. `seconds`: how long the oldest of the jobs that are to run next has waited.
    """

    name: str
    jobs: int
    seconds: float

    @property
    def waits(self) -> str:
        return f"{jobs_wait(self.jobs)} in queue {self.name!r}, the oldest of the next for {age(self.seconds)}"

    @property
    def detail(self) -> dict[str, Value]:
        return {"queue": self.name, "jobs": self.jobs, "oldest_seconds": self.seconds}


def find_late_queues(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for queues whose next jobs have waited for `Limits.older_than_seconds`, and for paused queues.

    A paused queue is reported only if jobs wait in it.
    """
    paused = context.scalars(work.paused_queues(context.schema))
    jobs, oldest = Counter[str](), dict[str, float]()
    for row in waiting(context):
        jobs[row.queue] += row.jobs
        oldest[row.queue] = max(oldest.get(row.queue, 0.0), row.oldest_seconds or 0.0)
    relays = _relays(context)
    others = 0 if relays.living else _number_of_relays(context)
    for name, seconds in oldest.items():
        queue, is_late = _LateQueue(name, jobs[name], seconds), seconds >= context.limits.older_than_seconds
        if name in paused:
            yield _paused(queue, is_late=is_late)
        elif is_late and relays.serving(name):
            yield _late(queue, relays.serving(name))
        elif is_late and (relays.living or (others and relays.last_dead(name) is not None)):
            yield _not_served(queue, relays)
        elif is_late:
            yield _unlisted(queue, others)


@dataclass(frozen=True, slots=True)
class _Relays:
    """The relays that have written a row about themselves within a day.

    `seen`: the rows, the latest first; empty if this role may not read them.
    """

    seen: Sequence[Row[Any]]

    @property
    def living(self) -> list[Row[Any]]:
        """The relays that are alive and claim jobs. A relay that is stopping claims none."""
        return [relay for relay in self.seen if relay.is_alive and relay.state != _STOPPING]

    def serving(self, queue: str) -> list[Row[Any]]:
        return [relay for relay in self.living if queue in relay.queues]

    def last_dead(self, queue: str) -> Row[Any] | None:
        """Return the dead relay that served the queue and was seen last; None if there is none."""
        return next((relay for relay in self.seen if not relay.is_alive and queue in relay.queues), None)


def _relays(context: CheckContext) -> _Relays:
    if "relay_status" not in context.tables or not context.scalar(statements.may_read_relays(context.schema)):
        return _Relays(())
    return _Relays(context.rows(statements.serving_relays(context.schema)))


def _number_of_relays(context: CheckContext) -> int:
    connected: int = context.scalar(work.connected_relays())
    if "relay" in context.tables:
        connected += context.scalar(work.living_relays(context.schema))
    return connected


def _paused(queue: _LateQueue, *, is_late: bool) -> Finding:
    return Finding(
        "queue-paused",
        "warning" if is_late else "info",
        f"queue {queue.name!r} is paused, and {jobs_wait(queue.jobs)} there, the oldest for {age(queue.seconds)}",
        queue.detail,
        f"When the reason is gone: outboxq queues resume {shlex.quote(queue.name)}",
    )


def _not_served(queue: _LateQueue, relays: _Relays) -> Finding:
    served = sorted({name for relay in relays.living for name in relay.queues})
    others = f"; served are {', '.join(map(repr, served))}" if served else ""
    dead = relays.last_dead(queue.name)
    if dead is not None:
        seen = f"was seen {age(dead.seen_seconds)} ago and has not ended in order"
        others += f"; one that did, {dead.host} (process {dead.pid}), {seen}"
    return Finding(
        "queue-not-served",
        "problem",
        f"{queue.waits}, and no living relay serves it{others}",
        {**queue.detail, "served": served, "last_seen_seconds": None if dead is None else dead.seen_seconds},
        f"Start a relay that does: outboxq relay MODULE:ATTRIBUTE, without --queue or with --queue "
        f"{shlex.quote(queue.name + '=4')}. {_UNLISTED}",
    )


def _late(queue: _LateQueue, serving: Sequence[Row[Any]]) -> Finding:
    has_room = any(queue.name in relay.free for relay in serving)
    number = several(len(serving), "relay serves", "relays serve")
    return Finding(
        "queue-late",
        "warning",
        f"{queue.waits}, although {number} it: {'a slot is free' if has_room else 'all of their slots are busy'}"
        f"{_longest(serving)}",
        {**queue.detail, "relays": len(serving), "slots_busy": not has_room},
        f"See what keeps the relays from it: outboxq explain --queue {shlex.quote(queue.name)}, and their logs."
        if has_room
        else "Give it more slots or processes, if that is not meant; `outboxq relays list` shows what takes long.",
    )


def _longest(serving: Sequence[Row[Any]]) -> str:
    running = [
        (job.seconds + relay.seen_seconds, job, relay) for relay in serving for job in decode_running(relay.running)
    ]
    if not running:
        return ""
    seconds, job, relay = max(running, key=lambda each: each[0])
    return f"; what runs for the longest is {job.kind!r}, for {age(seconds)} on {relay.host} (process {relay.pid})"


def _unlisted(queue: _LateQueue, relays: int) -> Finding:
    if not relays:
        return Finding(
            "no-relay",
            "problem",
            f"no relay is connected, and {jobs_wait(queue.jobs)} in queue {queue.name!r}, the oldest for "
            f"{age(queue.seconds)}",
            queue.detail,
            "Start one: outboxq relay MODULE:ATTRIBUTE. (One that keeps no row of itself, as its role may not, is seen "
            "when the application_name of its connections is 'outboxq relay'.)",
        )
    return Finding(
        "queue-late",
        "warning",
        f"{queue.waits}, although relays are connected",
        {**queue.detail, "relays": None, "slots_busy": None},
        f"See that a relay serves it (--queue {shlex.quote(queue.name + '=4')}), with enough slots; `outboxq "
        "jobs list --running` shows what takes long.",
    )


def find_unserved_kinds(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for kinds of waiting jobs that no living relay of their queue has a handler for.

    Other checks report paused kinds, and kinds whose jobs a relay without a handler has already put off.
    """
    jobs, parked = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for row in waiting(context):
        jobs[row.queue, row.kind] += row.jobs
        parked[row.queue, row.kind] += row.parked
    pairs = sorted(pair for pair in jobs.keys() - paused_kinds(context) if not parked[pair])[:_MOST_PAIRS]
    for row in context.rows(statements.kinds_at_relays(context.schema, pairs)):
        if row.serving and not row.knowing:
            number = jobs[row.queue, row.kind]
            yield Finding(
                "kind-not-served",
                "warning",
                f"{jobs_of(number)} of kind {row.kind!r} in queue {row.queue!r}, and none of "
                f"{several(row.serving, 'living relay that serves', 'living relays that serve')} it knows the kind",
                {"queue": row.queue, "kind": row.kind, "jobs": number, "relays": row.serving},
                f"Start a relay whose registry has the kind, or give a renamed handler aliases=(...). {_UNLISTED}",
            )
