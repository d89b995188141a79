"""The plan of a claimed batch: the jobs that run together, and their order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeGuard

from outboxq.execution.batch_state import BatchState
from outboxq.execution.chain import check_follower
from outboxq.handlers.handler import AnyHandler, BatchHandler
from outboxq.job import Job

# Each job of a shared run that fails is repeated in its own savepoint: with more than 64 that wrote, a backend's list
# of subtransactions overflows, and every snapshot elsewhere must look them up.
SHARED_AT_ONCE = 50

SegmentKind: TypeAlias = Literal["shared", "batch", "alone"]
# The handlers of a batch, by kind.
Handlers: TypeAlias = Mapping[str, AnyHandler | None]
_Given: TypeAlias = tuple[Job, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive jobs of a batch that run alike; with their arguments if they run together."""

    kind: SegmentKind
    places: range
    arguments: Sequence[Mapping[str, object]] = ()


def plan_segments(batch: BatchState, handlers: Handlers) -> Sequence[Segment]:
    """Sort the jobs by how they run, those of batchable kinds first, then in the order of the claim.

    A job whose arguments or follower cannot be read runs by itself, and costs the others nothing.
    """
    if (
        batch.tries.apart
        or not any(map(_runs_together, handlers.values()))
        or (not batch.claimed.is_plain and _reorders_groups(batch, handlers))
    ):
        return (Segment("alone", range(len(batch.jobs))),)
    shared: list[_Given] = []
    by_handler: dict[BatchHandler[Any, Any], list[_Given]] = {}
    alone: list[Job] = []
    for job in batch.jobs:
        handler = handlers[job.kind]
        if not _runs_together(handler) or job.id in batch.decided:
            alone.append(job)
            continue
        arguments = _arguments(handler, job)
        if arguments is None:
            alone.append(job)
        elif isinstance(handler, BatchHandler):
            by_handler.setdefault(handler, []).append((job, arguments))
        else:
            shared.append((job, arguments))
    return _spans(batch, shared, by_handler, alone)


def _runs_together(handler: AnyHandler | None) -> TypeGuard[AnyHandler]:
    return handler is not None and (handler.batchable or isinstance(handler, BatchHandler))


def _reorders_groups(batch: BatchState, handlers: Handlers) -> bool:
    """Return True if running jobs together would change the order of several jobs of a group."""
    keys = [job.group_key for job in batch.jobs if job.group_key is not None]
    if len(keys) == len(set(keys)):
        return False
    # Jobs of batchable kinds run one after the other, as they were claimed; a batch handler gives each its own outcome.
    return not all(
        (handler := handlers[job.kind]) is not None and handler.batchable and _arguments(handler, job) is not None
        for job in batch.jobs
    )


def _spans(
    batch: BatchState, shared: list[_Given], by_handler: Mapping[BatchHandler[Any, Any], list[_Given]], alone: list[Job]
) -> list[Segment]:
    together: list[tuple[SegmentKind, list[_Given]]] = [("shared", some) for some in _in_parts(shared, SHARED_AT_ONCE)]
    for handler, given in by_handler.items():
        together.extend(("batch", some) for some in _in_parts(given, handler.max_size))
    jobs: list[Job] = []
    spans: list[Segment] = []
    lone: list[Job] = []
    for kind, given in together:
        if len(given) > 1:
            places = range(len(jobs), len(jobs) + len(given))
            spans.append(Segment(kind, places, [arguments for _, arguments in given]))
            jobs += [job for job, _ in given]
        else:
            lone += [job for job, _ in given]
    if alone := lone + alone:
        spans.append(Segment("alone", range(len(jobs), len(jobs) + len(alone))))
        jobs += alone
    batch.jobs = tuple(jobs)
    return spans


def _in_parts(given: list[_Given], size: int) -> list[list[_Given]]:
    return [given[first : first + size] for first in range(0, len(given), size)]


def _arguments(handler: AnyHandler, job: Job) -> dict[str, object] | None:
    try:
        check_follower(job)
        return handler.signature.decode(job.args)
    except BaseException:  # noqa: BLE001  # users' own types raise what they like; alone, it is recorded with its job
        return None
