"""Explain why a job, or a queue, does not run: the reasons that hold at this moment, the most important one first.

Every query only reads one row or the first entries of an index, in a savepoint that is rolled back at once. A query
locks no row, waits 0.2 s at most for a locked table, and is given up after 2 s: then the reason `not-known` names the
missing data.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row

from outboxq.admin.reasons.absent import find_absent, find_batches_into, find_uncommitted
from outboxq.admin.reasons.held import find_held
from outboxq.admin.reasons.looks import Looks
from outboxq.admin.reasons.queue import QueueFacts, find_held_group, find_in_queue, find_locked_table, look_at_queue
from outboxq.admin.reasons.reason import CODES as CODES
from outboxq.admin.reasons.reason import Code as Code
from outboxq.admin.reasons.reason import Reason as Reason
from outboxq.admin.reasons.reason import in_order
from outboxq.admin.reasons.serving import Relays, find_missing_relay, look_at_relays
from outboxq.admin.reasons.waiting import find_blocked_in_group, find_coalesced, find_own, find_turn
from outboxq.names import check_name
from outboxq.statements import explain as statements

_THE_JOB, _THE_QUEUE = "the job", "the jobs of the queue"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons why a job or a queue does not run.

    Attributes:
        job_id: The explained job; if a queue is explained, the job that is to run next there, or None if no job waits.
        queue: The queue; None for a job that neither waits nor runs.
        kind: The kind of the job; None if the job neither waits nor runs, or if no job waits.
        reasons: All reasons that hold at this moment, at least one, the most important first (in the order of `CODES`).
            If a queue is explained, its own reasons come before those of its next job.
    """

    job_id: UUID | None
    queue: str | None
    kind: str | None
    reasons: tuple[Reason, ...]

    @property
    def verdict(self) -> Reason:
        """The most important reason."""
        return self.reasons[0]


def explain_job(connection: Connection, job_id: UUID) -> Explanation:
    """Return the reasons why a job does not run; if it runs or has ended, the reason says so."""
    looks = Looks(connection)
    job = looks.row(_THE_JOB, statements.job_facts(looks.schema, job_id))
    if job is not None:
        found = list(_of_job(looks, job))
        return Explanation(job_id, job.queue, job.kind, (*in_order(found), *looks.not_known()))
    found = list(find_locked_table(looks) if looks.is_refused(_THE_JOB) else find_absent(looks, job_id))
    return Explanation(job_id, None, None, (*in_order(found), *looks.not_known()))


def explain_queue(connection: Connection, queue: str) -> Explanation:
    """Return the reasons why a queue's jobs do not run: those of the whole queue, then those of its next job.

    Raises:
        ArgumentError: a name that no queue can have.
    """
    looks = Looks(connection)
    facts = look_at_queue(looks, check_name("queue", queue))
    next_job = looks.row(_THE_QUEUE, statements.next_job(looks.schema, queue))
    job = None if next_job is None else looks.row(_THE_JOB, statements.job_facts(looks.schema, next_job.id))
    relays = look_at_relays(looks, queue, None if job is None else job.kind)
    found = in_order(find_in_queue(looks, queue, facts, relays))
    if job is not None:
        own = in_order(_of_next_job(looks, job, facts, relays, may_run=not found))
        return Explanation(job.id, queue, job.kind, (*found, *own, *looks.not_known()))
    if not looks.is_refused(_THE_QUEUE):
        found = in_order([*_of_empty_queue(looks, queue), *found])
    return Explanation(None, queue, None, (*found, *looks.not_known()))


def _of_job(looks: Looks, job: Row[Any]) -> Iterator[Reason]:
    held = list(find_held(looks, job))
    yield from held
    if held:
        if any(reason.code == "lease-orphaned" for reason in held):
            yield from find_missing_relay(look_at_relays(looks, job.queue), job.queue)
        return
    relays = look_at_relays(looks, job.queue, job.kind)
    facts = look_at_queue(looks, job.queue)
    found = [*find_in_queue(looks, job.queue, facts, relays), *_of_waiting(looks, job, facts, relays)]
    yield from found
    yield from find_coalesced(looks, job)
    yield from find_turn(looks, job, relays, may_run=not found)


def _of_waiting(looks: Looks, job: Row[Any], facts: QueueFacts | None, relays: Relays) -> Iterator[Reason]:
    yield from find_own(looks, job, relays)
    per_group = 1 if facts is None else facts.limits.per_group or 1
    yield from find_blocked_in_group(looks, job, per_group, relays)
    yield from find_held_group(looks, job, per_group)


def _of_next_job(
    looks: Looks, job: Row[Any], facts: QueueFacts | None, relays: Relays, *, may_run: bool
) -> Iterator[Reason]:
    held = list(find_held(looks, job))
    yield from held
    if not held:
        found = list(_of_waiting(looks, job, facts, relays))
        yield from found
        yield from find_turn(looks, job, relays, may_run=may_run and not found)


def _of_empty_queue(looks: Looks, queue: str) -> Iterator[Reason]:
    yield from find_batches_into(looks, queue)
    yield from find_uncommitted(looks, None)
    yield Reason(
        "queue-empty",
        f"no job waits or runs in queue {queue!r}",
        {"queue": queue},
        "Nothing. If there should be one: see that its producer commits, and that the queue's name is that of the "
        "handler. Jobs that follow others in a chain are added when those are done.",
    )
