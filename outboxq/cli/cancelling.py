"""`outboxq jobs cancel --running`: ask the relays that run the jobs to end them, wait, and report what happened."""

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
    from outboxq.admin.actions import Actions, Preview
    from outboxq.cli.database import Begin
    from outboxq.outbox.cancel import CancelOutcome

_LOOK_SECONDS = 0.2
# How long a backend that was told to end is waited for.
_FORCED_SECONDS = 10.0


class Wanted(Protocol):
    """The options that say what is to become of jobs that run."""

    @property
    def distinct_ids(self) -> tuple[UUID, ...] | None: ...
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
    """What became of the jobs; those of `over` ended by themselves before they could be cancelled."""

    cancelled: int = 0
    over: list[UUID] = field(default_factory=list)
    running: list[UUID] = field(default_factory=list)
    not_found: list[UUID] = field(default_factory=list)


def cancel_running(begin: "Begin", options: Wanted, found: "Preview") -> Became:
    """Cancel the jobs that are meant, and wait for the relays of those that run."""
    became = Became()
    actions = options.actions()
    pending: list[UUID] = []
    try:
        for some in _groups(begin, options, found):
            pending += _ask(begin, actions, some, options.outcome, became)
    except BaseException:
        if became.cancelled or pending:
            notice(f"stopped after {became.cancelled:,} cancelled, and {len(pending):,} asked for: those stand")
        raise
    pending = _await(begin, pending, options, became, options.wait_seconds)
    if pending and options.force:
        _force(begin, actions, pending, options)
        pending = _await(begin, pending, options, became, _FORCED_SECONDS)
    became.running += pending
    return became


def _groups(begin: "Begin", options: Wanted, found: "Preview") -> Iterator[Sequence[UUID]]:
    if options.distinct_ids:
        yield from in_groups(options.distinct_ids)
        return
    after: UUID | None = None
    while True:
        with begin() as connection:
            ids = found.action.find(connection, after)
        if not ids:
            return
        yield ids
        after = ids[-1]


def _ask(
    begin: "Begin", actions: "Actions", ids: Sequence[UUID], outcome: "CancelOutcome", became: Became
) -> Sequence[UUID]:
    """Cancel what waits of these jobs, and ask for the others; the ids of those that were asked for."""
    from outboxq.admin.actions import unmarked

    with unmarked(begin, ids, notice), begin() as connection:
        asked = actions.cancel_running(connection, ids, outcome)
    became.cancelled += len(asked.cancelled)
    became.not_found += asked.not_found
    return asked.requested


def _await(begin: "Begin", pending: Sequence[UUID], options: Wanted, became: Became, seconds: float) -> list[UUID]:
    """Look until each of these jobs has come to an end, or the time is over; the ids of those that run on."""
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
    # A dead letter is what was asked for, or what the job has come to by itself.
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
        with begin() as connection:
            actions.terminate(connection, job_id, options.outcome)


def _confirm(job_id: UUID) -> None:
    if not sys.stdin.isatty():
        raise WrongUsage("--force asks first, and there is no terminal to ask at: add --yes")
    typer.confirm(f"End the session that runs job {job_id}?", abort=True, err=True)


def report_cancelled(became: Became, *, as_json: bool) -> NoReturn:
    """Say what became of the jobs, and end with 1 if one runs on or was not found."""
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
        notice(f"still runs, and ends when its relay hears of it: {job_id} (--force ends its database session)")
    raise typer.Exit(1 if became.running or became.not_found else 0)


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
