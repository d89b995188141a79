"""Run calls under a lease with one among them that kills its process, and count what it costs the others.

    python -m tests.faults.killer --calls 500 --slots 500              ends with 1 if a bound is exceeded
    python -m tests.faults.killer --calls 500 --slots 500 --killers 0  one SIGKILL from outside, when all are at work

One relay process, started again whenever it has died. The deaths, the innocents that began again although the first one
was not the cause, and the time until all innocents are done have bounds; the killer ends as a dead letter, charged
only for runs in which it was alone. Times are in lengths of a call, without those in which no relay ran.
"""

import argparse
import dataclasses
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.pool import NullPool

from outboxq import OutboxSession, RelayConfig, SlotGroup
from outboxq.migrations.runner import migrate
from outboxq.postgres import start_embedded
from outboxq.testing import RelayProcess
from outboxq.torture.starts import Start, read_starts
from tests.support import killer_app

_TARGET = "tests.support.killer_app:jobs"
_LOOK_SECONDS = 0.02
# Of a relay with a connection for each slot, and the others.
_OTHER_CONNECTIONS, _MOST_CONNECTIONS = 20, 1_500

_WAITING = text("SELECT EXISTS (SELECT FROM outboxq.job)")
_DONE = text("SELECT job_id, count(*), extract(epoch FROM max(at))::float FROM done GROUP BY job_id")
_DEAD = text("SELECT id, crashes FROM outboxq.dead_job")


@dataclass(frozen=True, slots=True, kw_only=True)
class KillerOptions:
    """The number of calls, the time that each waits, and the bounds.

    Args:
        company: How many suspects a relay may run at a time, which bounds the time that all take.
        killers: 1, or 0 for a process that is killed from outside, once.
    """

    calls: int = 500
    slots: int = 500
    killers: int = 1
    seconds: float = 0.5
    company: int = 16
    most_deaths: int = 6
    most_reruns: int = 30
    max_crashes: int = 3
    lease_seconds: float = 2.0
    seed: int = 1
    minutes: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KillerReport:
    """The figures of one run; `problems` is empty after a pass.

    Attributes:
        reruns: Starts of innocents beyond the first, and beyond the one that the first death costs those at work.
        lengths: From the first start after the first death to the end of the last innocent, in lengths of a call.
        beside_charged: Innocents that were at work in the killer's process in those of its runs that were charged.
    """

    deaths: int
    killed_at_work: int
    reruns: int
    lengths: float
    most_lengths: float
    beside_charged: int
    seconds: float
    problems: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a bound is exceeded, or an innocent did not come to its end once."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.killer", description=str(__doc__).splitlines()[0])
    for field in dataclasses.fields(KillerOptions):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=field.type, default=field.default, help=f"[{field.default}]")
    options = KillerOptions(**vars(parser.parse_args(arguments)))
    connections = min(options.slots + _OTHER_CONNECTIONS, _MOST_CONNECTIONS)
    with (
        start_embedded(settings={"max_connections": str(connections)}) as server,
        server.create_database() as database,
    ):
        engine = create_engine(database.url, poolclass=NullPool)
        with engine.begin() as connection:
            migrate(connection)
        report = run_killer(options, engine)
    sys.stdout.write(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return 1 if report.problems else 0


def run_killer(options: KillerOptions, engine: Engine) -> KillerReport:
    """Play it on a migrated database, from the jobs to the report."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outboxq-killer-") as directory:
        starts, deaths = Path(directory) / "starts", Path(directory) / "deaths"
        starts.mkdir()
        deaths.touch()
        with engine.begin() as connection:
            connection.execute(text(killer_app.SCHEMA))
        killer_id = _enqueue(options, engine, starts, deaths)
        problems = list(_play(options, engine, starts, deaths))
        found = list(read_starts(str(starts)))
        died_at = [float(line) for line in deaths.read_text().splitlines()]
    with engine.connect() as connection:
        done = {job_id: (int(times), at) for job_id, times, at in connection.execute(_DONE)}
        dead = {job_id: int(crashes) for job_id, crashes in connection.execute(_DEAD)}
    problems += _broken(options, killer_id, done, dead)
    figures = Figures(options, killer_id, found, died_at, {job_id: at for job_id, (_, at) in done.items()})
    problems += figures.broken()
    return KillerReport(
        deaths=len(figures.deaths),
        killed_at_work=figures.killed_at_work(),
        reruns=figures.reruns(),
        lengths=round(figures.lengths(), 1),
        most_lengths=figures.most_lengths,
        beside_charged=figures.beside_charged(),
        seconds=round(time.monotonic() - begun, 1),
        problems=problems,
    )


def _enqueue(options: KillerOptions, engine: Engine, starts: Path, deaths: Path) -> UUID | None:
    """All in one transaction, the killer at a random place; its id."""
    place = random.Random(options.seed).randrange(options.calls)
    given = {"seconds": options.seconds, "starts": str(starts)}
    with OutboxSession(engine) as session, session.begin():
        if not options.killers:
            session.add_jobs(killer_app.innocent.job(**given) for _ in range(options.calls))
            return None
        session.add_jobs(killer_app.innocent.job(**given) for _ in range(place))
        killer = session.add_job(killer_app.killer, **given, deaths=str(deaths))
        session.add_jobs(killer_app.innocent.job(**given) for _ in range(options.calls - 1 - place))
    return killer.id


def _play(options: KillerOptions, engine: Engine, starts: Path, deaths: Path) -> Iterator[str]:
    """Keep one relay at work until nothing waits."""
    config = RelayConfig(
        groups=(SlotGroup((killer_app.QUEUE,), options.slots),),
        lease_seconds=options.lease_seconds,
        max_crashes=options.max_crashes,
        poll_seconds=0.1,
    )
    deadline = time.monotonic() + options.minutes * 60
    while True:
        with RelayProcess(_TARGET, engine.url, config) as relay:
            while relay.returncode is None:
                with engine.connect() as connection:
                    if not connection.execute(_WAITING).scalar_one():
                        return
                if not options.killers and not deaths.stat().st_size:
                    _kill_at_work(options, relay, starts, deaths)
                if time.monotonic() > deadline:
                    yield f"jobs still wait after {options.minutes:g} minutes"
                    return
                relay.wait(_LOOK_SECONDS)
            if relay.returncode != -signal.SIGKILL:
                yield f"a relay ended by itself with {relay.returncode}: {relay.log[-500:]}"
                return


def _kill_at_work(options: KillerOptions, relay: RelayProcess, starts: Path, deaths: Path) -> None:
    """Kill the relay once as many calls as it has slots for are at work."""
    if sum(1 for _ in read_starts(str(starts))) >= min(options.calls, options.slots):
        deaths.write_text(f"{time.time()!r}\n")
        relay.kill()


def _broken(
    options: KillerOptions, killer_id: UUID | None, done: Mapping[UUID, tuple[int, float]], dead: Mapping[UUID, int]
) -> Iterator[str]:
    """Faults in the ends of the jobs, by the rows that the database has."""
    innocents = options.calls - options.killers
    if len(done) != innocents or killer_id in done:
        yield f"{len(done)} innocents have an effect, of {innocents}"
    if doubled := sum(times > 1 for times, _ in done.values()):
        yield f"{doubled} innocents have more than one effect"
    if dead != ({} if killer_id is None else {killer_id: options.max_crashes}):
        yield f"dead letters, with their crashes: {dead}; the killer alone is to be one, after {options.max_crashes}"


class Figures:
    """The figures of the starts, beside the ends of the innocents.

    Args:
        deaths: The times at which the killer killed, one for each of its starts.
    """

    def __init__(
        self,
        options: KillerOptions,
        killer_id: UUID | None,
        starts: Sequence[Start],
        deaths: Sequence[float],
        ends: Mapping[UUID, float],
    ) -> None:
        self._options = options
        self._ends = ends
        self._killers = sorted((each for each in starts if each.job_id == killer_id), key=lambda each: each.at)
        self._innocents = sorted((each for each in starts if each.job_id != killer_id), key=lambda each: each.at)
        self.deaths = sorted(deaths)
        # Innocents that died in company with a killer run alone, one after the other.
        self.most_lengths = 10 + options.calls / options.company + (options.company - 1) * options.killers

    def broken(self) -> Iterator[str]:
        """The bounds that were exceeded."""
        bounds = {
            "deaths": (len(self.deaths), self._options.most_deaths),
            "reruns of innocents": (self.reruns(), self._options.most_reruns),
            "lengths of a call until the innocents were done": (self.lengths(), self.most_lengths),
            "innocents beside a killer that was charged": (self.beside_charged(), 0),
        }
        for what, (number, most) in bounds.items():
            if number > most:
                yield f"{number:g} {what}, at most {most:g} are allowed"

    def killed_at_work(self) -> int:
        """Innocents that were at work when the first death came."""
        return len(self._at_work_first())

    def reruns(self) -> int:
        needed = self._at_work_first()
        return sum(
            times - 1 - (job_id in needed) for job_id, times in Counter(each.job_id for each in self._innocents).items()
        )

    def lengths(self) -> float:
        """Lengths of a call, without the times from later deaths to the next start, in which no relay has the jobs."""
        if not self.deaths or not self._ends:
            return 0.0
        last = max(self._ends.values())
        pauses = [(death, self._next_start(death)) for death in self.deaths]
        begun = pauses[0][1]
        paused = sum(min(start, last) - death for death, start in pauses[1:] if death < last)
        return max(0.0, last - begun - paused) / self._options.seconds

    def beside_charged(self) -> int:
        runs = list(zip(self._killers, self.deaths, strict=False))
        return sum(self._beside(killer, death) for killer, death in runs[-self._options.max_crashes :])

    def _at_work_first(self) -> set[UUID]:
        first = self.deaths[0] if self.deaths else 0.0
        return {each.job_id for each in self._innocents if each.at < first and not self._had_ended(each, first)}

    def _beside(self, killer: Start, death: float) -> int:
        return sum(
            each.pid == killer.pid and each.at < death and not self._had_ended(each, killer.at)
            for each in self._innocents
        )

    def _had_ended(self, start: Start, at: float) -> bool:
        return self._ends.get(start.job_id, at + 1) <= at

    def _next_start(self, after: float) -> float:
        return min((each.at for each in (*self._innocents, *self._killers) if each.at > after), default=after)


if __name__ == "__main__":
    sys.exit(main())
