"""A relay's identity and activity, as its history tables and its metrics show them."""

import os
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import msgspec

from outboxq import __version__
from outboxq.observability.aggregate import Counts
from outboxq.observability.flush import RelayActivity, RelayIdentity
from outboxq.queue_limits import limits_text
from outboxq.relay.slot import Slot
from outboxq.relay.state import RelayState
from outboxq.statements.relays import MOST_KINDS

_RUNNING_MOST = 50
# Jobs that have run for at least this long are named.
_LONG_SECONDS = 1.0


SLOT_STATES: tuple[str, ...] = ("busy", "idle", "asleep")


@dataclass(frozen=True, slots=True)
class RelayLook:
    """A relay at one moment.

    Args:
        totals: The outcomes of its jobs since it began.
        slots: The number of its slots in each of `SLOT_STATES`.
        claimed: For each of its queues, the number of jobs that its slots have claimed.
        kinds: Each queue and kind that it runs.
    """

    identity: RelayIdentity
    totals: Counts
    slots: Counter[str]
    claimed: Counter[str]
    kinds: tuple[tuple[str, str], ...]
    hook_failures: int
    flush_failures: int


def look_at(
    identity: RelayIdentity, state: RelayState, slots: Iterable[Slot], hook_failures: int, flush_failures: int
) -> RelayLook:
    """Read a relay's totals and activity, as far as possible while its slots work."""
    states = Counter(dict.fromkeys(SLOT_STATES, 0))
    claimed = Counter(dict.fromkeys(identity.queues, 0))
    for slot in slots:
        running, batch, leased = slot.running, slot.batch, slot.leased_batch
        states["busy" if running else "asleep" if slot.sleep.is_asleep else "idle"] += 1
        queue = batch.queue if batch is not None else next((job.queue for job in leased.jobs), "") if leased else ""
        claimed[queue or slot.queues[0]] += running
    handlers = state.registry.handlers.values()
    kinds = tuple(dict.fromkeys((each.queue, each.kind) for each in handlers if each.queue in identity.queues))
    return RelayLook(identity, state.aggregate.totals(), states, claimed, kinds, hook_failures, flush_failures)


def leased_jobs(slots: Iterable[Slot]) -> set[tuple[str, int]]:
    """The jobs that these slots run under the lease, or will run next, with their tokens."""
    slots = list(slots)
    jobs = [batch.job for slot in slots if (batch := slot.batch) is not None]
    # All jobs of the claim: settled ones do no harm.
    jobs += [job for slot in slots if (leased := slot.leased_batch) is not None for job in leased.jobs]
    return {(str(job.id), job.lease_token) for job in jobs if job.lease_token is not None}


def identity_of(state: RelayState, queues: tuple[str, ...], slots: int) -> RelayIdentity:
    """The identity of a relay."""
    return RelayIdentity(
        id=state.lease.owner,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=__version__,
        queues=queues,
        kinds=tuple(sorted(state.registry.handlers))[:MOST_KINDS],
        slots=slots,
        listens=state.listener is not None,
        limits=limits_text(state.registry.limits),
    )


def activity_of(state: str, slots: Iterable[Slot]) -> RelayActivity:
    """The activity of these slots, as far as it can be read while they work."""
    slots = list(slots)
    busy = sum(slot.running > 0 for slot in slots)
    free = dict.fromkeys(queue for slot in slots if not slot.running for queue in slot.queues)
    running = list(islice((job for slot in slots for job in _running_on(slot)), _RUNNING_MOST))
    return RelayActivity(state, busy, tuple(free), msgspec.json.encode(running).decode())


def _running_on(slot: Slot) -> list[dict[str, object]]:
    batch = slot.batch
    seconds = None if batch is None else batch.running.seconds_now
    if batch is None or seconds is None or seconds < _LONG_SECONDS:
        return []
    transaction = batch.transaction
    pid = None if transaction is None else transaction.pid
    return [
        {"id": job.id, "queue": job.queue, "kind": job.kind, "attempt": job.attempt, "seconds": seconds, "pid": pid}
        for job in batch.running_jobs
    ]
