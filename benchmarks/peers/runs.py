"""One peer, one scenario: a fresh database, jobs enqueued in bulk, driver processes, and a look at what was done."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psycopg
from sqlalchemy import make_url

from benchmarks.bench import CENTS
from benchmarks.exactly_once import KILLS, Effects, effects_after_kills
from benchmarks.peers.definitions import Peer, Scenario
from benchmarks.peers.drivers import Driver, running, wait_executed
from benchmarks.peers.environments import driver_command, environment
from benchmarks.peers.statistics import LAST_PART, STEADY, Percentiles, latencies_ms, percentiles, steady_rate
from outboxq.postgres import Server

LATENCY_JOBS_PER_SECOND = 50
LATENCY_JOBS = 1_000

_DRAIN_SECONDS = 180.0
_SETTLE_SECONDS = 20.0
# An idle worker is the normal case of this scenario: the first jobs must not meet one that is still starting.
_SETTLED_IN_SECONDS = 2.0
# Until the jobs of a worker that was killed are taken back: the default of both peers, and for many kills.
_STALLED_SECONDS = 30
_STALLED_SECONDS_OF_KILLED = 5
# Jobs whose effect was committed once.
_CHANGED_ONCE = {
    Scenario.update: "SELECT count(*) FROM business_row WHERE touched = 1",
    Scenario.orm: f"SELECT count(*) FROM account WHERE balance = {CENTS}",
}


class NotExecuted(Exception):
    """A peer did not execute each job once."""


class Bench:
    """A peer with its environment on a server."""

    def __init__(self, peer: Peer, directory: Path, server: Server) -> None:
        self.peer = peer
        self._command = driver_command(peer, directory)
        self._home = environment(peer, directory)
        self._server = server

    def behind_a_snapshot(self, jobs: int) -> float:
        """Jobs per second of one process near the end of its queue, which was filled before a snapshot was taken.

        Raises: as `drain`.
        """
        return self._drain(Scenario.noop, jobs, 1, LAST_PART, _held_snapshot)

    def drain(self, scenario: Scenario, jobs: int, processes: int) -> float:
        """Jobs per second of so many processes on a queue that was filled before.

        Raises:
            DriverFailed: a driver did, or was too slow.
            NotExecuted: the jobs were not executed once each.
        """
        return self._drain(scenario, jobs, processes, STEADY, contextlib.nullcontext)

    def drain_entities(self, jobs: int) -> tuple[float, float]:
        """Jobs per second of one process with the ORM handler, and the processor time of a job in µs.

        Raises: as `drain`; MeasurementFailed if processor time cannot be read here.
        """
        cpu_us: list[float] = []
        rate = self._drain(
            Scenario.orm,
            jobs,
            1,
            STEADY,
            contextlib.nullcontext,
            lambda drivers: cpu_us.append(_cpu_us(drivers, jobs)),
        )
        return rate, cpu_us[0]

    def _drain(
        self,
        scenario: Scenario,
        jobs: int,
        processes: int,
        part: tuple[float, float],
        meanwhile: Callable[[str], contextlib.AbstractContextManager[None]],
        look: Callable[[Sequence[Driver]], None] = lambda _drivers: None,
    ) -> float:
        with self._database(jobs) as url:
            self._prepare(url, jobs)
            options = self._options(url, jobs, scenario)
            drivers = [self._driver("work", options) for _ in range(processes)]
            with meanwhile(url), running(drivers):
                look(drivers)
                wait_executed(drivers, jobs, _DRAIN_SECONDS)
                self._wait_settled(url)
                executed = self._stop(drivers)
            if executed != jobs:
                raise NotExecuted(f"{self.peer.name} ran {executed} handlers for {jobs} jobs")
            if scenario in _CHANGED_ONCE:
                _check_changed(url, _CHANGED_ONCE[scenario], jobs)
            return steady_rate([driver.samples for driver in drivers], jobs, part)

    def effects_after_kills(self, jobs: int) -> Effects:
        """Count the effects of the ORM handler's jobs, whose worker is killed again and again.

        Raises:
            MeasurementFailed: the jobs were not finished in time.
        """
        with self._database(jobs) as url:
            self._prepare(url, jobs)
            options = self._options(url, jobs, Scenario.kill) | {"stalled_seconds": _STALLED_SECONDS_OF_KILLED}
            return effects_after_kills(
                url, lambda: running([self._driver("work", options)]), self.peer.unfinished, jobs, KILLS
            )

    def latency(self, jobs: int) -> Percentiles:
        """From the commit of an enqueue to the start of its handler, of jobs that come one by one to one process.

        Raises:
            DriverFailed: a driver did, or was too slow.
            ValueError: the jobs were not executed once each.
        """
        with self._database(0) as url:
            self._prepare(url, 0)
            options = self._options(url, jobs, Scenario.latency) | {"rate": LATENCY_JOBS_PER_SECOND}
            worker = self._driver("work", options)
            with running([worker]):
                time.sleep(_SETTLED_IN_SECONDS)
                with running([self._driver("produce", options)]) as (producer,):
                    committed = producer.wait_done().committed
                wait_executed([worker], jobs, _SETTLE_SECONDS)
                worker.tell()
                started = worker.wait_done().started
        return percentiles(latencies_ms(committed, started))

    @contextlib.contextmanager
    def _database(self, rows: int) -> Iterator[str]:
        with self._server.create_database() as database:
            url = make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)
            with psycopg.connect(url) as connection:
                connection.execute("CREATE TABLE business_row (id bigint PRIMARY KEY, touched bigint NOT NULL)")
                connection.execute("INSERT INTO business_row SELECT id, 0 FROM generate_series(0, %s - 1) id", [rows])
                connection.execute(
                    "CREATE TABLE account (id integer PRIMARY KEY, owner text NOT NULL, balance bigint NOT NULL) "
                    "WITH (fillfactor = 50)"
                )
                connection.execute(
                    "INSERT INTO account SELECT id, 'customer ' || id, 0 FROM generate_series(0, %s - 1) id", [rows]
                )
            yield url

    def _prepare(self, url: str, jobs: int) -> None:
        with self._driver("prepare", self._options(url, jobs, None)) as driver:
            driver.wait_done()
        with psycopg.connect(url, autocommit=True) as connection:
            # A queue that was filled at once has no statistics yet, and its pages are to be written.
            connection.execute("VACUUM ANALYZE")
            with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
                connection.execute("CHECKPOINT")

    def _options(self, url: str, jobs: int, scenario: Scenario | None) -> dict[str, object]:
        return {
            "url": url,
            "jobs": jobs,
            "scenario": scenario,
            "settings": dict(self.peer.settings),
            "cents": CENTS,
            "stalled_seconds": _STALLED_SECONDS,
        }

    def _driver(self, action: str, options: Mapping[str, object]) -> Driver:
        return Driver(self._command, action, options, self._home)

    def _wait_settled(self, url: str) -> None:
        deadline = time.monotonic() + _SETTLE_SECONDS
        with psycopg.connect(url, autocommit=True) as connection:
            while unfinished := _value(connection, self.peer.unfinished):
                if time.monotonic() > deadline:
                    raise NotExecuted(f"{self.peer.name} executed all jobs and left {unfinished} unfinished")
                time.sleep(0.1)

    def _stop(self, drivers: Sequence[Driver]) -> int:
        for driver in drivers:
            driver.tell()
        return sum(driver.wait_done().executed for driver in drivers)


@contextlib.contextmanager
def _held_snapshot(url: str) -> Iterator[None]:
    """Hold a snapshot, so that vacuum cannot remove the rows that are deleted in this block."""
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1 FROM business_row LIMIT 1")
        yield
        connection.rollback()


def _cpu_us(drivers: Sequence[Driver], jobs: int) -> float:
    """Processor time of a job, from the end of the first one to that of the last: some claim all jobs at once."""
    (spent, executed), (spent_later, executed_later) = (_spent(drivers, count) for count in (1, jobs))
    return (spent_later - spent) / (executed_later - executed) * 1e6


def _spent(drivers: Sequence[Driver], jobs: int) -> tuple[float, int]:
    """Processor seconds of the drivers, and what they have executed, as soon as these are so many jobs."""
    wait_executed(drivers, jobs, _DRAIN_SECONDS)
    return sum(driver.processor_seconds for driver in drivers), sum(driver.executed for driver in drivers)


def _check_changed(url: str, changed_once: str, jobs: int) -> None:
    with psycopg.connect(url) as connection:
        once = _value(connection, changed_once)
    if once != jobs:
        raise NotExecuted(f"{once} of {jobs} rows were updated once")


def _value(connection: psycopg.Connection, query: str) -> int:
    row = connection.execute(query.encode()).fetchone()
    return 0 if row is None else int(row[0])
