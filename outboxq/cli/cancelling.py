"""`outboxq jobs cancel --running`: ask relays to end running jobs, wait for the ends, and report the outcomes."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, Protocol
from uuid import UUID

import typer

from outboxq.cli.bulk import in_groups
from outboxq.cli.errors import WrongUsage
from outboxq.cli.output import notice, print_json
from outboxq.codec.text import several

if TYPE_CHECKING:
    from outboxq.admin.actions import Actions, Total
    from outboxq.cli.database import Begin
    from outboxq.outbox.cancel import CancelOutcome

_LOOK_SECONDS = 0.2
# The time to wait for a backend to end, after that was requested.
_FORCED_SECONDS = 10.0


class Wanted(Protocol):
    """The options of `outboxq jobs cancel` that this module reads; `RunningOptions` in `outboxq.cli.jobs` has them."""

    @property
    def outcome(self) -> "CancelOutcome": ...
    @property
    def force(self) -> bool: ...
    @property
    def yes(self) -> bool: ...
    @property
    def wait_seconds(self) -> float: ...
    def actions(self) -> "Actions": ...


@dataclass(slots=True)
class Became:
    """The outcomes of the jobs that were to be cancelled; `await_ends` fills them in, `report_cancelled` prints them.

    Attributes:
        cancelled: The number of jobs that were cancelled.
        over: The ids of jobs that ended by themselves before they could be cancelled.
        running: The ids of jobs that still run.
        not_found: The ids that no job has.
        is_stopped: True if an operator stopped the change before it reached all jobs.
    """

    cancelled: int = 0
    over: list[UUID] = field(default_factory=list)
    running: list[UUID] = field(default_factory=list)
    not_found: list[UUID] = field(default_factory=list)
    is_stopped: bool = False


def await_ends(begin: "Begin", options: Wanted, total: "Total") -> Became:
    """Wait until the jobs whose cancellation was requested have ended; return the outcomes of all jobs.

    With --force, end the database sessions of jobs that still run after the time to wait.
    """
    became = Became(
        cancelled=total.changed - len(total.requested), not_found=total.not_found, is_stopped=total.is_stopped
    )
    pending = _await(begin, total.requested, options, became, options.wait_seconds)
    if pending and options.force:
        _force(begin, options.actions(), pending, options)
        pending = _await(begin, pending, options, became, _FORCED_SECONDS)
    became.running += pending
    return became


def _await(begin: "Begin", pending: Sequence[UUID], options: Wanted, became: Became, seconds: float) -> list[UUID]:
    """Check the `pending` jobs until all have ended or `seconds` have passed; return the ids of those that still run.

    The outcomes of the jobs that have ended are added to `became`.
    """
    deadline = time.monotonic() + seconds
    left = list(pending)
    with _progress(len(left)) as show:
        while left:
            left = [job_id for some in in_groups(left) for job_id in _look(begin, some, options.outcome, became)]
            show(len(left))
            if time.monotonic() >= deadline:
                break
            if left:
                time.sleep(_LOOK_SECONDS)
    return left


def _look(begin: "Begin", ids: Sequence[UUID], outcome: "CancelOutcome", became: Became) -> list[UUID]:
    from outboxq.admin import cancellation
    from outboxq.admin.actions import unmarked

    with begin() as connection:
        states = cancellation.progress(connection, ids)
    returned = [job_id for job_id, state in states.items() if state == "waiting"]
    gone: tuple[UUID, ...] = ()
    if returned:
        with unmarked(begin, returned, notice), begin() as connection:
            gone = cancellation.end_returned(connection, returned, outcome)
    counted = Counter(states.values())
    became.cancelled += counted["cancelled"] + len(gone)
    # Either the dead letter was requested, or the job became one by itself.
    became.cancelled += counted["dead"] if outcome == "dead" else 0
    over = ("over",) if outcome == "dead" else ("over", "dead")
    became.over += [job_id for job_id, state in states.items() if state in over]
    return [job_id for job_id, state in states.items() if state in ("running", "waiting") and job_id not in gone]


def _force(begin: "Begin", actions: "Actions", pending: Iterable[UUID], options: Wanted) -> None:
    from outboxq.admin import cancellation

    for job_id in pending:
        with begin() as connection:
            others = cancellation.count_sharing(connection, job_id)
        if others.jobs:
            number = several(others.jobs, "other job shares", "other jobs share")
            at_least = "" if others.is_exact else "at least "
            notice(f"{job_id}: {at_least}{number} its transaction: rolled back with it, and run again, one by one")
        if not options.yes:
            _confirm(job_id)
        # The other jobs keep their marks: each of them runs alone next, as after the death of a relay.
        actions.terminate(begin, job_id, options.outcome)


def _confirm(job_id: UUID) -> None:
    if not sys.stdin.isatty():
        raise WrongUsage("--force asks first, and there is no terminal to ask at: add --yes")
    typer.confirm(f"End the session that runs job {job_id}?", abort=True, err=True)


def report_cancelled(became: Became, *, as_json: bool) -> NoReturn:
    """Print the outcomes of the jobs, and end the command.

    The exit code is 1 if a job still runs, was not found or was not reached.
    """
    if as_json:
        print_json(
            {
                "cancelled": became.cancelled,
                "over": became.over,
                "running": became.running,
                "not_found": became.not_found,
            }
        )
    else:
        typer.echo(f"cancelled {several(became.cancelled, 'job', 'jobs')}")
    for job_id in became.not_found:
        notice(f"no job {job_id}")
    for job_id in became.over:
        notice(f"came to its end before it was cancelled: {job_id}")
    for job_id in became.running:
        notice(f"still runs until its relay receives the request: {job_id} (--force ends its database session)")
    raise typer.Exit(1 if became.running or became.not_found or became.is_stopped else 0)


@contextmanager
def _progress(number: int) -> "Iterator[_Show]":
    if not number or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{number:,} running") as status:
        yield lambda left: status.update(f"{left:,} of {number:,} still running")


class _Show(Protocol):
    def __call__(self, left: int, /) -> None: ...
