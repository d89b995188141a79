"""What the scenes are made of: the page's SQL, its table, workers on connections and in processes of their own."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import LiteralString, cast

import psycopg

from tests.support.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "queues-that-look-right.md"

_BLOCK = re.compile(r"```sql\n(.*?)```", re.DOTALL)

# Claims by the statement in its argument, says which job it has, and works until its standard input ends.
_WORKER = """
import sys, psycopg
with psycopg.connect(sys.argv[1], autocommit=True) as connection:
    print(connection.execute(sys.argv[2]).fetchone()[0], flush=True)
    sys.stdin.read()
"""


def page_sql(section: str) -> list[LiteralString]:
    """The SQL of a section of the page, block by block; of its beginning for an empty title."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    sections = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
    return [cast("LiteralString", block) for block in _BLOCK.findall(sections[section])]


class Crew:
    """Connections of workers to one database, which has the page's table."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self.looker = psycopg.connect(conninfo, autocommit=True)
        self.looker.execute(page_sql("")[0])

    @contextmanager
    def worker(self, *, autocommit: bool = False) -> Iterator["psycopg.Connection[tuple[object, ...]]"]:
        """A worker's connection; what it did not commit is rolled back at the end."""
        connection = psycopg.connect(self.conninfo, autocommit=autocommit)
        try:
            yield connection
        finally:
            connection.close()

    def add(self, count: int = 1, priority: int = 0) -> None:
        """Commit jobs of a priority."""
        self.looker.execute(
            "INSERT INTO task (priority) SELECT %s FROM generate_series(1, %s)",
            (priority, count),
        )

    def states(self) -> list[object]:
        """The states of all jobs, in their order."""
        return [row[0] for row in self.looker.execute("SELECT state FROM task ORDER BY id")]

    def waits_for_a_lock(self, pid: int) -> bool:
        """Whether a backend waits for a lock of another."""
        row = self.looker.execute("SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone()
        return row is not None and row[0] == "Lock"


class Asked:
    """A statement that is executed on a thread of its own, because it may have to wait."""

    def __init__(self, crew: Crew, connection: "psycopg.Connection[tuple[object, ...]]", sql: LiteralString) -> None:
        self._crew = crew
        self._connection = connection
        self._rows: list[tuple[object, ...]] = []
        self._thread = threading.Thread(target=self._ask, args=(sql,))
        self._thread.start()

    def _ask(self, sql: LiteralString) -> None:
        self._rows = self._connection.execute(sql).fetchall()

    def wait_until_blocked(self) -> None:
        """Return when the statement waits for a lock."""
        pid = self._connection.info.backend_pid
        wait_until(lambda: self._crew.waits_for_a_lock(pid), "a worker that waits for a lock")

    def is_alive(self) -> bool:
        """Whether there is no answer yet."""
        return self._thread.is_alive()

    def ids(self) -> list[object]:
        """What came of it."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the statement still waits"
        return [row[0] for row in self._rows]


def one(
    connection: "psycopg.Connection[tuple[object, ...]]",
    sql: LiteralString,
    parameters: Mapping[str, object] | None = None,
) -> tuple[object, ...] | None:
    """The first row of a statement's result."""
    return connection.execute(sql, parameters).fetchone()


def kill_a_worker_with_a_job(conninfo: str, claim: LiteralString) -> int:
    """A worker process claims a job and is killed with SIGKILL while it works; the job's id."""
    command = [sys.executable, "-c", _WORKER, conninfo, claim]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            return int(process.stdout.readline())
        finally:
            process.kill()
