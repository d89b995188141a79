"""Reasons that concern the relays of a queue.

Relays are read from the table `relay_status`; if no living relay is in it, the database's connections show if there is
any.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from outboxq.admin.reasons.looks import Looks
from outboxq.admin.reasons.reason import Reason, Value
from outboxq.admin.relays import RunningJob, decode_running, waiting_calls
from outboxq.codec.text import duration, several
from outboxq.statements import relays as statements
from outboxq.statements.doctor import work

_THE_RELAYS = "the relays"
# The number of relays that are named in a sentence.
_MOST_NAMED = 3
_STOPPING = "stopping"
MORE_CONNECTIONS = "Have handlers use ctx.session later, or for less time, or raise --call-connections of that relay."
_UNLISTED = "Relays of a version from before step 11 of the migrations are not listed."


@dataclass(frozen=True, slots=True)
class Relays:
    """The relays that wrote into `relay_status` within a day, those that serve the explained queue first.

    `seen`: rows of `statements.relays.relays_for`. `connections`: the number of connections and leases of relays, which
    show if there are relays without a row; None if not known, or not read because a living relay has a row.
    """

    seen: Sequence[Row[Any]]
    connections: int | None = None

    @property
    def living(self) -> list[Row[Any]]:
        """The relays that are alive, including those that are stopping."""
        return [relay for relay in self.seen if relay.is_alive]

    @property
    def serving(self) -> list[Row[Any]]:
        """The relays that are alive and claim jobs from the queue; those that are stopping do not."""
        return [relay for relay in self.living if relay.serves and relay.state != _STOPPING]

    @property
    def last_dead(self) -> Row[Any] | None:
        """The dead relay that served the queue and was seen last; None if there is none.

        A relay that was stopped in order is not counted.
        """
        return next((relay for relay in self.seen if relay.serves and not relay.is_alive), None)

    @property
    def longest(self) -> tuple[Row[Any], RunningJob, float] | None:
        """The longest-running job on the relays that serve the queue, as (row of its relay, job, seconds), or None."""
        running = [
            (relay, job, job.seconds + relay.seen_seconds)
            for relay in self.serving
            for job in decode_running(relay.running)
        ]
        return max(running, key=lambda each: each[2], default=None)


def look_at_relays(looks: Looks, queue: str, kind: str | None = None) -> Relays:
    """Read the relays, with those that serve the queue first.

    `kind`: the kind that the rows' column `knows` is about: true if the relay has a handler for it.
    """
    seen: Sequence[Row[Any]] = ()
    if may_read(looks):
        seen = looks.rows(_THE_RELAYS, statements.relays_for(looks.schema, queue, kind))
    relays = Relays(seen)
    return relays if relays.living else Relays(seen, _connections(looks))


def may_read(looks: Looks) -> bool:
    """Return True if the table `relay_status` exists and this role may read it."""
    row = looks.row(_THE_RELAYS, statements.may_read_relays(looks.schema))
    return row is not None and row[0] is True


def look_at_owner(looks: Looks, owner: UUID) -> Row[Any] | None:
    """Read the row of the relay that owns a lease: when it was last seen, with its jobs then; None if not known."""
    return looks.row("the owner of the lease", statements.relay_seen(looks.schema, owner)) if may_read(looks) else None


def _connections(looks: Looks) -> int | None:
    connected = looks.row("the connections of relays", work.connected_relays())
    living = looks.row("the leases of relays", work.living_relays(looks.schema))
    return None if connected is None or living is None else connected[0] + living[0]


def find_missing_relay(relays: Relays, queue: str) -> Iterator[Reason]:
    """Yield a reason if no relay is alive, or if none of the living relays claims from the queue."""
    if relays.serving:
        return
    if relays.living or (relays.last_dead is not None and relays.connections):
        yield _not_served(relays, queue)
    elif relays.connections == 0:
        yield Reason(
            "no-relay",
            f"no relay that serves queue {queue!r} is connected to the database{_last(relays)}",
            {"queue": queue, **_last_details(relays)},
            "Start one: outboxq relay MODULE:ATTRIBUTE. (One that keeps no row of itself, as its role may not, is seen "
            "when the application_name of its connections is 'outboxq relay'.)",
        )


def _not_served(relays: Relays, queue: str) -> Reason:
    stopping = [relay for relay in relays.living if relay.serves]
    others = f": {_who_serves_what(relays.living)}" if relays.living else ""
    if stopping:
        others = f": {named(stopping)} served it, and is stopping"
    return Reason(
        "queue-not-served",
        f"no living relay serves queue {queue!r}{others}{_last(relays)}",
        {
            "queue": queue,
            "served": sorted({each for relay in relays.living for each in relay.queues}),
            "stopping": bool(stopping),
            **_last_details(relays),
        },
        f"Start a relay that does: outboxq relay MODULE:ATTRIBUTE, without --queue or with --queue "
        f"{shlex.quote(queue + '=4')}; and see that the queue's name is that of a handler. {_UNLISTED}",
    )


def named(relays: Sequence[Row[Any]]) -> str:
    """Return up to three relays by host and process, in words: `alpha (process 7), beta (process 8) and 3 more`."""
    names = [f"{relay.host} (process {relay.pid})" for relay in relays]
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _who_serves_what(relays: Sequence[Row[Any]]) -> str:
    by_queues: dict[tuple[str, ...], list[Row[Any]]] = {}
    for relay in relays:
        by_queues.setdefault(tuple(relay.queues), []).append(relay)
    said = [f"{named(each)}: {', '.join(map(repr, queues))}" for queues, each in by_queues.items()]
    more = len(said) - _MOST_NAMED
    return "; ".join(said[:_MOST_NAMED]) + (f"; and {more} other sets of queues" if more > 0 else "")


def _last(relays: Relays) -> str:
    dead = relays.last_dead
    if dead is None:
        return ""
    # A relay that ends in order removes its row: others may have served the queue since.
    return f"; one that did, {named([dead])}, was seen {duration(dead.seen_seconds)} ago and has not ended in order"


def _last_details(relays: Relays) -> dict[str, Value]:
    dead = relays.last_dead
    if dead is None:
        return {}
    return {"last_host": dead.host, "last_pid": dead.pid, "last_seen_seconds": dead.seen_seconds}


def find_unknown_kind(relays: Relays, job: Row[Any]) -> Iterator[Reason]:
    """Yield a reason if relays serve the queue, but none of them knows the job's kind.

    `job` is a row of `job_facts`.
    """
    serving = relays.serving
    if serving and not any(relay.knows for relay in serving):
        yield Reason(
            "kind-not-served",
            f"{several(len(serving), 'relay', 'relays')} {'serves' if len(serving) == 1 else 'serve'} queue "
            f"{job.queue!r}, and none knows the kind {job.kind!r}{known_by(relays)}",
            {"queue": job.queue, "kind": job.kind, "relays": len(serving)},
            f"Start a relay whose registry has the kind, or give a renamed handler aliases=(...). {_UNLISTED}",
        )


def known_by(relays: Relays) -> str:
    """Return the living relays that know the kind, as the end of a sentence; an empty text if there are none."""
    knowing = [relay for relay in relays.living if relay.knows]
    return f"; it is known to {named(knowing)}" if knowing else ""


def find_busy_slots(relays: Relays, job: Row[Any]) -> Iterator[Reason]:
    """Yield a reason if all slots of the queue's relays were busy when the relays last wrote, after the job was due."""
    serving = relays.serving
    waited_seconds = -job.due_in_seconds
    if serving and not any(relay.has_room or relay.seen_seconds >= waited_seconds for relay in serving):
        seconds = max(relay.seen_seconds for relay in serving)
        details = {"queue": job.queue, "relays": len(serving), "seen_seconds": seconds, **_longest_details(relays)}
        waiting = sum(waiting_calls(decode_running(relay.running)) for relay in serving)
        waits, todo = "", "More slots or processes work faster; timeout_seconds bounds every run."
        if waiting:
            details["waiting_calls"] = waiting
            waits = f"; {several(waiting, 'job', 'jobs')} there had begun and waited for a connection"
            todo = f"{MORE_CONNECTIONS} {todo}"
        yield Reason(
            "slots-busy",
            f"all slots that serve queue {job.queue!r} were busy {duration(seconds)} ago, when their "
            f"{'relay was' if len(serving) == 1 else 'relays were'} last seen{waits}{longest_of(relays)}",
            details,
            f"See what takes long: outboxq relays list. {todo}",
        )


def longest_of(relays: Relays) -> str:
    """Return the longest-running job on the relays that serve the queue, as the end of a sentence, or an empty text."""
    found = relays.longest
    if found is None:
        return ""
    relay, job, seconds = found
    return f"; what runs for the longest is job {job.id} of kind {job.kind!r}, {duration(seconds)} on {named([relay])}"


def _longest_details(relays: Relays) -> dict[str, Value]:
    found = relays.longest
    if found is None:
        return {}
    _, job, seconds = found
    return {"longest": str(job.id), "longest_kind": job.kind, "longest_seconds": seconds}
