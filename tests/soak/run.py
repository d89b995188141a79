"""One soak: a server of its own, three relay processes and a supervisor, producers, faults at random, and measurements.

`outboxq relay --processes 2` is one side: its youngest child is killed now and then, so that the other lives as long as
the supervisor. A relay inside another process (`tests.soak.embedded`) is the other side, and is never killed. The
server ends a connection of either at random.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.pool import NullPool

from outboxq import config
from outboxq.config import DATABASE_URL_VARIABLE, child_environment
from outboxq.migrations.runner import migrate
from outboxq.postgres import Server
from outboxq.postgres.binaries import embedded_binaries, local_binaries
from outboxq.postgres.sources import start_cluster
from tests.soak import app, embedded
from tests.soak.gauges import measure_backends, measure_process
from tests.soak.producers import Producers, producing
from tests.soak.slopes import Series, Slope, Subject

SUPERVISED, EMBEDDED = "soak supervised", "soak embedded"
SETTINGS = {"deadlock_timeout": "100ms", "log_min_messages": "fatal"}
_START_SECONDS = 60.0
_END_SECONDS = 120.0
_LOOK_SECONDS = 0.1
_SAY_SECONDS = 30.0

_WAITING = text("SELECT count(*) FROM outboxq.job")
_DONE = text("SELECT count(*) FROM done")
_RELAYS = text("SELECT application_name FROM pg_stat_activity WHERE application_name = ANY (:names)")
_TERMINATE = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = ANY (:names) "
    "ORDER BY random() LIMIT 1"
)
_DEADLOCKS = text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
# What each job came to, against what it was to come to.
_ENDS = """\
WITH ends AS (
  SELECT job_id, sum(requests) AS requests, sum(done) AS done, sum(dead) AS dead, max(ending) AS ending FROM (
    SELECT job_id, 1 AS requests, 0 AS done, 0 AS dead, ending FROM request
    UNION ALL SELECT job_id, 0, 1, 0, NULL FROM done
    UNION ALL SELECT id, 0, 0, 1, NULL FROM outboxq.dead_job
  ) AS every_end GROUP BY job_id
)
"""
# By what it would mean.
_RULES = {
    "committed jobs without an end": "SELECT count(*) FROM ends WHERE requests > 0 AND done + dead = 0",
    "jobs that ended more than once": "SELECT count(*) FROM ends WHERE done + dead > 1",
    "jobs that were rolled back and ran": "SELECT count(*) FROM ends WHERE requests = 0",
    "jobs with another end than told": "SELECT count(*) FROM ends WHERE done > 0 AND ending <> 'done' "
    "OR dead > 0 AND ending <> 'dead'",
    "cents that are missing, or too many": "SELECT abs((SELECT sum(balance) FROM account) - "
    "(SELECT count(*) FROM request WHERE kind = 'credit'))",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """How long, how fast, and how rough. Times are in seconds between two."""

    minutes: float = 30.0
    seed: int = 1
    jobs_a_second: float = 100.0
    sample_seconds: float = 5.0
    terminate_seconds: float = 5.0
    kill_seconds: float = 240.0
    warm_up_seconds: float = 300.0
    least_seconds: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """`problems` says what is not as promised, growth included; empty is a pass."""

    seed: int
    seconds: float
    server: str
    jobs: int
    done: int
    dead: int
    rolled_back: int
    deadlocks: int
    terminated: int
    killed: int
    slopes: list[Slope]
    problems: list[str]


def soak(options: SoakOptions, say: Callable[[str], None]) -> SoakReport:
    """Run it from the first process to the report; nothing is left behind."""
    configured = config.local_binaries()
    with (
        start_cluster(local_binaries(configured) if configured else embedded_binaries(), SETTINGS) as server,
        tempfile.TemporaryDirectory(prefix="outboxq-soak-") as directory,
    ):
        say(f"PostgreSQL {server.version} of its own (pid {server.pid}), seed {options.seed}")
        with server.create_database() as database:
            engine = create_engine(database.url, poolclass=NullPool)
            with engine.begin() as connection:
                migrate(connection)
                connection.execute(text(app.SCHEMA))
            return _Soak(options, server, engine, Path(directory), say).run()


class _Soak:
    """Everything of one run."""

    def __init__(
        self, options: SoakOptions, server: Server, engine: Engine, directory: Path, say: Callable[[str], None]
    ) -> None:
        self._options = options
        self._server = server
        self._engine = engine
        self._directory = directory
        self._say = say
        self._chance = random.Random(options.seed)
        self._series = Series()
        self._counts: Counter[str] = Counter()
        self._problems: list[str] = []
        self._objects = directory / "objects"

    def run(self) -> SoakReport:
        with ExitStack() as stack:
            self._supervisor = stack.enter_context(self._process(SUPERVISED, _supervised_command()))
            self._embedded = stack.enter_context(self._process(EMBEDDED, _embedded_command(self._objects)))
            self._producers = stack.enter_context(self._producing())
            with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                self._wait_for_relays(connection)
                self._begun = time.monotonic()
                self._go_on(connection)
                self._producers.stop()
                self._wait_until_done(connection)
                self._stop_relays()
                return self._report(connection)

    def _producing(self) -> AbstractContextManager[Producers]:
        return producing(self._engine.url, jobs_a_second=self._options.jobs_a_second, seed=self._options.seed)

    def _go_on(self, connection: Connection) -> None:
        """Measure, terminate, kill and tell, each when its time has come, until the minutes are over."""
        steps: list[tuple[float, Callable[[Connection], None]]] = [
            (self._options.sample_seconds, self._measure),
            (self._options.terminate_seconds, self._terminate),
            (self._options.kill_seconds, self._kill),
            (_SAY_SECONDS, self._tell),
        ]
        due = [self._begun + seconds for seconds, _ in steps]
        while (now := time.monotonic()) < self._begun + self._options.minutes * 60:
            for place, (seconds, step) in enumerate(steps):
                if now >= due[place]:
                    due[place] += seconds
                    step(connection)
            for process in (self._supervisor, self._embedded):
                if process.poll() is not None:
                    raise AssertionError(f"a relay ended by itself with {process.returncode}: {self._log(process)}")
            time.sleep(_LOOK_SECONDS)

    def _measure(self, connection: Connection) -> None:
        now = time.monotonic() - self._begun
        subjects = [
            Subject("producers and this tool", os.getpid()),
            Subject("supervisor", self._supervisor.pid),
            *(Subject("supervised child", child.pid) for child in self._children()),
            Subject("embedded relay", self._embedded.pid),
        ]
        for subject in subjects:
            self._series.add(now, subject, measure_process(subject.pid))
        if self._objects.exists():
            self._series.add(now, subjects[-1], {"objects": float(self._objects.read_text())})
        for name, process in ((SUPERVISED, self._supervisor), (EMBEDDED, self._embedded)):
            self._series.add(now, Subject(f"connections of {name}", process.pid), measure_backends(connection, name))

    def _children(self) -> list[psutil.Process]:
        """The supervisor's, the oldest first."""
        found = psutil.Process(self._supervisor.pid).children()
        return sorted(found, key=lambda child: child.create_time())

    def _terminate(self, connection: Connection) -> None:
        ended = connection.execute(_TERMINATE, {"names": [SUPERVISED, EMBEDDED]}).scalar()
        self._counts["terminated"] += bool(ended)

    def _kill(self, _: Connection) -> None:
        """Kill the youngest child; while one is missing, none."""
        children = self._children()
        if len(children) == 2:
            children[-1].kill()
            self._counts["killed"] += 1

    def _tell(self, connection: Connection) -> None:
        self._say(
            f"{time.monotonic() - self._begun:6.0f} s  {connection.execute(_DONE).scalar_one():,} jobs done, "
            f"{connection.execute(_WAITING).scalar_one():,} wait, "
            f"{connection.execute(_DEADLOCKS).scalar_one():,} deadlocks, "
            f"{self._counts['terminated']:,} connections terminated, {self._counts['killed']:,} children killed"
        )

    def _wait_for_relays(self, connection: Connection) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while set(connection.execute(_RELAYS, {"names": [SUPERVISED, EMBEDDED]}).scalars()) != {SUPERVISED, EMBEDDED}:
            if time.monotonic() > deadline:
                raise AssertionError(f"the relays did not come up: {self._log(self._supervisor)}")
            time.sleep(_LOOK_SECONDS)

    def _wait_until_done(self, connection: Connection) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while waiting := connection.execute(_WAITING).scalar_one():
            if time.monotonic() > deadline:
                self._problems.append(f"{waiting:,} jobs still wait {_END_SECONDS:.0f} s after the last was added")
                return
            time.sleep(_LOOK_SECONDS)

    def _stop_relays(self) -> None:
        for process in (self._supervisor, self._embedded):
            process.send_signal(signal.SIGTERM)
        for process in (self._supervisor, self._embedded):
            code = process.wait(_END_SECONDS)
            if code != 0:
                self._problems.append(f"a relay that was told to stop ended with {code}: {self._log(process)}")

    def _report(self, connection: Connection) -> SoakReport:
        for meaning, query in _RULES.items():
            if count := connection.execute(text(_ENDS + query)).scalar_one():
                self._problems.append(f"{count:,} {meaning}")
        slopes = self._series.slopes(
            warm_up_seconds=self._options.warm_up_seconds, least_seconds=self._options.least_seconds
        )
        self._problems += [
            f"{slope.measure} of {slope.subject} (pid {slope.pid}) grow by {slope.an_hour:,.1f} an hour"
            for slope in slopes
            if slope.verdict == "grows"
        ]
        return SoakReport(
            seed=self._options.seed,
            seconds=round(time.monotonic() - self._begun, 1),
            server=f"PostgreSQL {self._server.version}",
            jobs=self._producers.counts["committed"],
            done=connection.execute(_DONE).scalar_one(),
            dead=connection.execute(text("SELECT count(*) FROM outboxq.dead_job")).scalar_one(),
            rolled_back=self._producers.counts["rolled back"],
            deadlocks=connection.execute(_DEADLOCKS).scalar_one(),
            terminated=self._counts["terminated"],
            killed=self._counts["killed"],
            slopes=slopes,
            problems=self._problems,
        )

    @contextmanager
    def _process(self, name: str, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """A process on this database under this name, which ends with the block."""
        url = self._engine.url.update_query_dict({"application_name": name}).render_as_string(hide_password=False)
        with self._log_path(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                env=child_environment({DATABASE_URL_VARIABLE: url, "PYTHONPATH": os.getcwd()}),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(_END_SECONDS)
            assert process.stdin is not None
            process.stdin.close()

    def _log_path(self, name: str) -> Path:
        return self._directory / f"{name.split()[-1]}.log"

    def _log(self, process: subprocess.Popen[bytes]) -> str:
        name = SUPERVISED if process is self._supervisor else EMBEDDED
        return self._log_path(name).read_text(errors="replace")[-2_000:]


def _supervised_command() -> list[str]:
    # The command line has no way to shorten the lock of a call, for which a killed child's job would wait 30 seconds.
    served = {each.queue for each in app.jobs.resolve().handlers.values()} - {"once", "once-async"}
    queues = [f"--queue={queue}=1" for queue in sorted(served)]
    given = {
        "processes": 2,
        "batch-size": 5,
        "poll-seconds": 0.5,
        "lease-seconds": embedded.LEASE_SECONDS,
        "max-crashes": embedded.MAX_CRASHES,
        "prune-seconds": 5,
        "log-level": "error",
    }
    options = [f"--{name}={value}" for name, value in given.items()]
    return [sys.executable, "-m", "outboxq", "relay", "tests.soak.app:jobs", *queues, *options]


def _embedded_command(objects: Path) -> list[str]:
    return [sys.executable, "-m", "tests.soak.embedded", str(objects)]
