"""`outboxq jobs watch`: print each change of the states of jobs."""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import DatabaseOptions, KindFilter, QueueFilter, takes
from outboxq.cli.output import notice, print_json_line, print_wrapped
from outboxq.codec.display import age, moment
from outboxq.codec.text import printable, several

if TYPE_CHECKING:
    from sqlalchemy import Connection

EXIT_TIMED_OUT = 3
# Final states; finished jobs that are kept have their outcome.
_OVER = frozenset({"dead", "gone", "done", "discarded", "cancelled", "expired"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchOptions(DatabaseOptions):
    """The options of `outboxq jobs watch`."""

    ids: Annotated[
        list[UUID] | None,
        typer.Argument(metavar="ID", help="Ids as `list` prints them; or give filters.", show_default=False),
    ] = None
    queue: QueueFilter = None
    kind: KindFilter = None
    limit: Annotated[
        int, typer.Option("--limit", metavar="NUMBER", min=1, max=1_000, help="At most so many jobs at a time.")
    ] = 50
    every_seconds: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, max=60.0, help="How often to look.")
    ] = 1.0
    timeout_seconds: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Give up after so long.", show_default=False),
    ] = None


@dataclass(frozen=True, slots=True)
class _Watched:
    """The state of a watched job at one moment, as it is printed."""

    id: UUID
    state: str
    queue: str | None = None
    kind: str | None = None
    attempt: int | None = None
    run_at: datetime | None = None
    progress: float | None = None
    note: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state in _OVER


@takes(WatchOptions)
def watch_jobs(options: WatchOptions) -> None:
    """Print each change of the state of jobs, a line each, and of the progress of their handlers, until none is left.

    A job that is gone is done, or was cancelled: neither leaves a row, unless its kind keeps finished jobs. With
    filters, the oldest jobs that match are watched, and those that come later. A state that lasted for less than
    --every may be missed.

    Exit codes: 0 none is left; 1 a job died; 2 wrong usage; 3 --timeout came first.

    \b
    Examples:
      outboxq jobs watch 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10 --timeout 60
      outboxq jobs watch --queue mail --json
    """
    if bool(options.ids) == (options.queue is not None or options.kind is not None):
        raise WrongUsage("watch which jobs? Give ids, or --queue NAME or --kind NAME")
    end = None if options.timeout_seconds is None else time.monotonic() + options.timeout_seconds
    known: dict[UUID, _Watched | None] = dict.fromkeys(options.ids or ())
    has_died = False
    with options.open() as begin:
        while True:
            with begin() as connection:
                now, seen = _look(connection, options, known)
            for job in seen:
                if known.get(job.id) != job:
                    _print(options, job, now)
            has_died = has_died or any(job.state == "dead" for job in seen)
            known = {job.id: job for job in seen if not job.is_over}
            if not known:
                break
            if end is not None and time.monotonic() >= end:
                notice(f"{several(len(known), 'job is', 'jobs are')} left after {options.timeout_seconds:g} s")
                raise typer.Exit(EXIT_TIMED_OUT)
            time.sleep(options.every_seconds if end is None else min(options.every_seconds, end - time.monotonic()))
    if has_died:
        raise typer.Exit(1)


def _look(connection: "Connection", options: WatchOptions, known: Iterable[UUID]) -> tuple[datetime, list[_Watched]]:
    """Return the database's time, and the states of the watched jobs.

    These are the jobs that match the options, and the jobs with the ids `known`. Known jobs may no longer match, for
    example because they have died.
    """
    from outboxq.admin.jobs import JobFilter, list_jobs
    from outboxq.statements.paging import database_clock

    now = database_clock(connection)
    wanted = [JobFilter(ids=tuple(known))]
    if not options.ids:
        wanted.append(JobFilter(queue=options.queue, kind=options.kind))
    found = {
        job.id: _Watched(job.id, job.state, job.queue, job.kind, job.attempt, job.run_at, job.progress, job.note)
        for each in wanted
        for job in list_jobs(connection, each, limit=max(options.limit, len(each.ids or ())))
    }
    return now, [*found.values(), *(_missed(connection, job_id) for job_id in known if job_id not in found)]


def _missed(connection: "Connection", job_id: UUID) -> _Watched:
    """Return the state of a known job that is no longer among those that wait or run; without a trace of it, `gone`."""
    from outboxq.outbox.find import find_job

    job = find_job(connection, job_id)
    if job is None:
        return _Watched(job_id, "gone")
    # The job may have been put back in the meantime, by `dead retry` for example.
    return _Watched(job_id, job.state, job.queue, job.kind, job.attempt)


def _print(options: WatchOptions, job: _Watched, now: datetime) -> None:
    if options.as_json:
        print_json_line({"at": now, **{name: getattr(job, name) for name in _Watched.__slots__}})
        return
    said = [f"{moment(now)}  {job.id}  {job.state}"]
    if job.kind is not None:
        said.append(f"{job.kind} in {job.queue}")
    if job.attempt:
        said.append(f"attempt {job.attempt}")
    if job.run_at is not None and job.run_at > now:
        said.append(f"runs {age(job.run_at, now)}")
    if job.progress is not None:
        said.append(f"{job.progress:.0%} {job.note}".rstrip())
    print_wrapped(printable("  ".join(said)), hanging="  ")
    sys.stdout.flush()
