"""The things that every scenario receives: a server, databases with jobs in them, and the sizes of this run."""

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
import sqlalchemy
from sqlalchemy import create_engine, make_url

import outboxq
from benchmarks.apps.accounts import Base
from benchmarks.figures import Series, Surroundings
from benchmarks.pgbench import pgbench_version, run_pgbench
from outboxq.migrations.runner import migrate
from outboxq.postgres import Server, find_server, start_embedded

ACCOUNTS = 100_000
CENTS = 5

# As a small server of one's own is set up: writes reach the disk. No checkpoint falls into some repeats and not others.
SETTINGS: Mapping[str, str] = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "min_wal_size": "2GB",
    "checkpoint_timeout": "30min",
    # For a relay whose slots have a connection each.
    "max_connections": "300",
}
_REPORTED = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size", "autovacuum")

# The identity of a row in the order in which jobs come, as `add_job` makes it (UUIDv7): about 50 a millisecond.
_FILL = """\
INSERT INTO outboxq.job (id, queue, kind, args, priority, state, run_at)
SELECT (lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint + n / 50), 12, '0')
    || '7' || substr(md5(n::text || random()), 1, 3) || '8' || substr(md5(n::text || random()), 5, 15))::uuid,
  'bench', 'job',
  jsonb_build_object('account', 1 + n * 7919 % %(accounts)s, 'cents', %(cents)s, 'reference', 'invoice 2026-' || n),
  %(priority)s, %(state)s, clock_timestamp() + %(delay)s::interval
FROM generate_series(1, %(count)s::bigint) AS n"""


class MeasurementFailed(Exception):
    """A measurement cannot be believed, or could not be made."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement.

    Attributes:
        seconds: How long one repeat is to measure, about.
        warm_up_seconds: How long a relay works before that.
        waiting: Jobs in a large queue.
        scheduled: Scheduled jobs of higher priority beside a small queue.
        drained: Jobs that are done while another session holds a snapshot.
    """

    name: str
    seconds: float
    warm_up_seconds: float
    waiting: int
    scheduled: int
    drained: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.seconds:g} s a repeat, {self.waiting:,} waiting, {self.scheduled:,} scheduled, "
            f"{self.drained:,} drained behind a snapshot"
        )


QUICK = Size("quick", 0.2, 0.0, 3_000, 1_000, 2_000)
DEFAULT = Size("default", 2.5, 0.5, 1_000_000, 200_000, 100_000)
FULL = Size("full", 5.0, 0.5, 10_000_000, 1_000_000, 1_000_000)


class Workbench:
    """One database with outboxq's tables and the accounts."""

    def __init__(self, url: str) -> None:
        self.url = url

    @contextmanager
    def connected(self) -> Iterator[psycopg.Connection]:
        """A connection in autocommit."""
        with psycopg.connect(conninfo(self.url), autocommit=True) as connection:
            yield connection

    def fill(self, count: int, *, scheduled: int = 0) -> None:
        """Fill the table with `count` ready jobs, `scheduled` ones of higher priority for tomorrow, and nothing else.

        Vacuumed and analyzed, as a table is that has lived for a while.
        """
        with self.connected() as connection:
            connection.execute("TRUNCATE outboxq.job")
            self._insert(connection, count, "ready", 0, "0")
            self._insert(connection, scheduled, "scheduled", 9, "1 day")
            connection.execute("VACUUM (ANALYZE) outboxq.job")
            connection.execute("VACUUM (ANALYZE) account")

    def write_out(self) -> None:
        """Write the filled pages to the disk now; later they would be written while something is measured.

        Left out where the role may not; pg_checkpoint is the right to it.
        """
        with self.connected() as connection, suppress(psycopg.errors.InsufficientPrivilege):
            connection.execute("CHECKPOINT")

    def count_jobs(self) -> int:
        """Count the jobs of all states; dead letters are an error.

        Raises:
            MeasurementFailed: jobs failed.
        """
        with self.connected() as connection:
            failed = connection.execute(
                "SELECT (SELECT count(*) FROM outboxq.dead_job) + (SELECT count(*) FROM outboxq.job WHERE attempt > 1)"
            ).fetchone()
            if failed != (0,):
                raise MeasurementFailed(f"jobs failed: {failed}")
            return self._number(connection, "SELECT count(*) FROM outboxq.job")

    def balance(self) -> int:
        """Return the sum of all accounts, in cents."""
        with self.connected() as connection:
            return self._number(connection, "SELECT sum(balance)::bigint FROM account")

    @staticmethod
    def _number(connection: psycopg.Connection, query: str) -> int:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])

    @staticmethod
    def _insert(connection: psycopg.Connection, count: int, state: str, priority: int, delay: str) -> None:
        values = {"accounts": ACCOUNTS, "cents": CENTS, "priority": priority, "state": state, "delay": delay}
        with connection.transaction():
            # No relay sleeps here, and the trigger need not look at millions of rows.
            connection.execute("SET LOCAL outboxq.notify = 'off'")
            connection.execute(_FILL.replace(" % %(", " %% %("), {**values, "count": count})


class Bench:
    """The server of a run, and the sizes of its measurements.

    Args:
        slots: The slots of relays in lease mode; None leaves it to each scenario.
    """

    def __init__(
        self,
        server: Server,
        pgbench: Path,
        size: Size,
        repeats: int,
        say: Callable[[str], None],
        slots: int | None = None,
    ) -> None:
        self.server = server
        self.pgbench = pgbench
        self.size = size
        self.repeats = repeats
        self.say = say
        self.slots = slots
        self._template: str | None = None
        self._rates: dict[str, float] = {}

    @contextmanager
    def database(self) -> Iterator[Workbench]:
        """A fresh database, dropped at the end."""
        if self._template is None:
            self._template = self.server.create_template(_prepare)
        with self.server.create_database(template=self._template) as database:
            yield Workbench(database.url)

    def limit(self, workbench: Workbench, script: str, *, batch: int, clients: int = 1) -> float:
        """Jobs a second that pgbench takes through `script`, `batch` a transaction, for about `size.seconds`."""
        if script not in self._rates:
            # How many jobs that takes is not known before a first, short try.
            self._rates[script] = self._limit(workbench, script, batch, clients, rows=20 * batch * clients)
        rows = int(self._rates[script] * self.size.seconds)
        self._rates[script] = self._limit(workbench, script, batch, clients, rows)
        return self._rates[script]

    def _limit(self, workbench: Workbench, script: str, batch: int, clients: int, rows: int) -> float:
        transactions = max(1, rows // (batch * clients))
        workbench.fill(transactions * batch * clients)
        return batch * run_pgbench(self.pgbench, workbench.url, script, clients=clients, transactions=transactions)

    def rows(self, rate: float) -> int:
        """Return the number of jobs that are worked off at `rate` in a repeat, its warm-up and its stop."""
        return int(rate * (self.size.seconds + self.size.warm_up_seconds)) + 1_000

    def alternate(self, what: Mapping[str, Callable[[], float]], unit: str) -> dict[str, Series]:
        """Measure each, one after the other, and all of that again for every repeat."""
        values: dict[str, list[float]] = {name: [] for name in what}
        for repeat in range(1, self.repeats + 1):
            for name, measure in what.items():
                values[name].append(measure())
                self.say(f"  {repeat} of {self.repeats}  {name}: {values[name][-1]:,.4g} {unit}")
        return {name: Series(tuple(found), unit) for name, found in values.items()}

    def surroundings(self) -> Surroundings:
        """Describe the machine and server of this run."""
        with psycopg.connect(conninfo(self.server.url)) as connection:
            query = "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY (%s)"
            settings: dict[str, str] = dict(connection.execute(query, [list(_REPORTED)]).fetchall())
        return Surroundings(
            outboxq=outboxq.__version__,
            python=platform.python_version(),
            sqlalchemy=sqlalchemy.__version__,
            server=f"PostgreSQL {self.server.version} from {self.server.source}",
            settings=settings,
            cores=os.cpu_count() or 1,
            pgbench=pgbench_version(self.pgbench),
            size=str(self.size),
        )


def start_server(url: str | None) -> Server:
    """The given server, else an embedded one that writes through to the disk."""
    if url is not None:
        return find_server(configured_url=url, binaries=None)
    return start_embedded(settings=SETTINGS, durable=True)


def say_on_stderr(line: str) -> None:
    """Progress is no result."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def conninfo(url: str) -> str:
    """The URL as libpq reads it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def _prepare(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        migrate(connection)
        Base.metadata.create_all(connection)
        # Room on the pages for changed rows, as tables have that are updated often.
        connection.exec_driver_sql("ALTER TABLE account SET (fillfactor = 50)")
        connection.exec_driver_sql(
            "INSERT INTO account (id, owner, balance) SELECT n, 'customer ' || n, 0 "
            f"FROM generate_series(1, {ACCOUNTS}) AS n"
        )
    engine.dispose()
