"""Arrange: which jobs of a claimed batch run together, and in which order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from outboxq.execution.batch_state import BatchState, SegmentKind
from outboxq.execution.runtime import Runtime
from outboxq.handlers.handler import AnyHandler, BatchHandler
from outboxq.job import Job

# Each job of a shared run that fails is repeated in a savepoint of its own: with more than 64 of them that wrote, a
# backend's list of subtransactions runs over, and every snapshot elsewhere has to look them up.
SHARED_AT_ONCE = 50

_Given: TypeAlias = tuple[Job, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Segment:
    """Jobs of a batch that lie one behind the other, and how they run; with their arguments where they run together."""

    how: SegmentKind
    places: range
    arguments: Sequence[Mapping[str, object]] = ()


def plan_segments(batch: BatchState, work: Runtime) -> list[Segment]:
    """Sort the jobs by how they run, those of batchable kinds first, and within that as they were claimed.

    A job whose arguments cannot be read runs by itself, and costs the others nothing.
    """
    if len(batch.jobs) == 1:
        return [Segment("alone", range(1))]
    shared: list[_Given] = []
    groups: dict[BatchHandler[Any, Any], list[_Given]] = {}
    alone: list[Job] = []
    for job in batch.jobs:
        handler = work.handler_of(job)
        if (
            job.lease_token is not None
            or handler is None
            or not (handler.batchable or isinstance(handler, BatchHandler))
        ):
            alone.append(job)
            continue
        arguments = _arguments(handler, job)
        if arguments is None:
            alone.append(job)
        elif isinstance(handler, BatchHandler):
            groups.setdefault(handler, []).append((job, arguments))
        else:
            shared.append((job, arguments))
    return _spans(batch, shared, groups, alone)


def _spans(
    batch: BatchState, shared: list[_Given], groups: Mapping[BatchHandler[Any, Any], list[_Given]], alone: list[Job]
) -> list[Segment]:
    together: list[tuple[SegmentKind, list[_Given]]] = [("shared", some) for some in _in_parts(shared, SHARED_AT_ONCE)]
    for handler, given in groups.items():
        together.extend(("group", some) for some in _in_parts(given, handler.max_size))
    jobs: list[Job] = []
    spans: list[Segment] = []
    lone: list[Job] = []
    for how, given in together:
        if len(given) > 1:
            places = range(len(jobs), len(jobs) + len(given))
            spans.append(Segment(how, places, [arguments for _, arguments in given]))
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
        return handler.signature().decode(job.args)
    except BaseException:  # noqa: BLE001  # users' own types raise what they like; alone, it is recorded with its job
        return None
