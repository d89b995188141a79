"""The plan of a claimed batch: the jobs that run together, and their order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeGuard

from outboxq.execution.batch_state import BatchState
from outboxq.execution.chain import follower_of, has_follower
from outboxq.handlers.handler import AnyHandler, BatchHandler
from outboxq.job import Job

# Each failing job of a shared run is repeated in its own savepoint: with more than 64 that wrote, a backend's list of
# subtransactions overflows, and every snapshot elsewhere must look them up.
SHARED_AT_ONCE = 50

SegmentKind: TypeAlias = Literal["shared", "batch", "alone"]
# The handlers of a batch, by kind.
Handlers: TypeAlias = Mapping[str, AnyHandler | None]
_Given: TypeAlias = tuple[Job, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive jobs of a batch that run in the same way; `plan_segments` makes segments, and `run` runs them.

    Attributes:
        kind: "shared" (several handlers on one savepoint), "batch" (one call of a batch handler) or "alone" (one by
            one).
        places: The places of the jobs in the batch.
        arguments: The jobs' decoded arguments, unless they run alone.
    """

    kind: SegmentKind
    places: range
    arguments: Sequence[Mapping[str, object]] = ()


def plan_segments(batch: BatchState, handlers: Handlers) -> Sequence[Segment]:
    """Divide the batch's jobs into segments, and sort `batch.jobs` by segment.

    Jobs of batchable kinds come first, then those of batch handlers, then jobs that run alone. A job also runs alone if
    its arguments or the next job of its chain cannot be read, so that its failure does not affect the others.
    """
    if (
        batch.tries.apart
        or not any(map(_runs_together, handlers.values()))
        or ("group_key" in batch.claimed.extras and _reorders_groups(batch, handlers))
    ):
        return (Segment("alone", range(len(batch.jobs))),)
    # The jobs of each batch handler, and under None the jobs of batchable kinds.
    together: dict[BatchHandler[Any, Any] | None, list[_Given]] = {None: []}
    alone: list[Job] = []
    for job in batch.jobs:
        handler = handlers[job.kind]
        if not _runs_together(handler) or job.id in batch.decided:
            alone.append(job)
            continue
        arguments = _arguments(handler, job)
        if arguments is None:
            alone.append(job)
        else:
            caller = handler if isinstance(handler, BatchHandler) else None
            together.setdefault(caller, []).append((job, arguments))
    jobs: list[Job] = []
    segments: list[Segment] = []
    lone: list[Job] = []
    for caller, given in together.items():
        size = SHARED_AT_ONCE if caller is None else caller.max_size
        for first in range(0, len(given), size):
            part = given[first : first + size]
            if len(part) > 1:
                places = range(len(jobs), len(jobs) + len(part))
                kind: SegmentKind = "shared" if caller is None else "batch"
                segments.append(Segment(kind, places, [arguments for _, arguments in part]))
                jobs += [job for job, _ in part]
            else:
                lone += [job for job, _ in part]
    if alone := lone + alone:
        segments.append(Segment("alone", range(len(jobs), len(jobs) + len(alone))))
        jobs += alone
    batch.jobs = tuple(jobs)
    return segments


def _runs_together(handler: AnyHandler | None) -> TypeGuard[AnyHandler]:
    return handler is not None and (handler.batchable or isinstance(handler, BatchHandler))


def _reorders_groups(batch: BatchState, handlers: Handlers) -> bool:
    """Return True if running jobs together would change the order of several jobs of one group."""
    keys = [job.group_key for job in batch.jobs if job.group_key is not None]
    if len(keys) == len(set(keys)):
        return False
    # Jobs of batchable kinds run in the order of the claim; a batch handler gives each its own outcome.
    return not all(
        (handler := handlers[job.kind]) is not None and handler.batchable and _arguments(handler, job) is not None
        for job in batch.jobs
    )


def _arguments(handler: AnyHandler, job: Job) -> dict[str, object] | None:
    try:
        if has_follower(job):
            follower_of(job)
        return handler.signature().decode(job.args)
    except BaseException:  # noqa: BLE001  # users' own types raise what they like; alone, it is recorded with its job
        return None
