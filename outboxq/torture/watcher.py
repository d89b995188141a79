"""Queries of the torture test on its database, over a connection that the faults leave alone."""

import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import DBAPIError

from outboxq.database.engines import make_engine
from outboxq.database.errors import is_database_unavailable
from outboxq.torture.history import SCHEMA

SERVER_SECONDS = 60.0
_GONE_SECONDS = 20.0

_PROGRESS = text(
    f"""\
SELECT (SELECT count(*) FROM outboxq.job) AS backlog,
  EXISTS (
    SELECT FROM outboxq.job WHERE state NOT IN ('scheduled', 'grouped') OR run_at <= clock_timestamp()
  ) AS is_due,
  (SELECT max(row) FROM {SCHEMA}.effect) AS last_effect,
  (SELECT count(*) FROM outboxq.dead_job) AS dead"""
)
_NOTE_LEASES = text(
    f"""\
INSERT INTO {SCHEMA}.sighting (job_id, token, owner)
SELECT id, lease_token, lease_owner FROM outboxq.job AS job WHERE state IN ('leased', 'group_leased') AND NOT EXISTS (
  SELECT FROM {SCHEMA}.sighting
  WHERE job_id = job.id AND token = job.lease_token AND owner IS NOT DISTINCT FROM job.lease_owner
)"""
)
_NAMES = text("SELECT application_name FROM pg_stat_activity WHERE datname = current_database()")
_OTHERS = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)
T = TypeVar("T")


class Watcher:
    """Queries the torture test's database, and repeats a query while the server is unavailable."""

    def __init__(self, url: str) -> None:
        self._engine = make_engine(url, application_name="outboxq torture", pooled=True)

    def ask(self, question: Callable[[Connection], T]) -> T:
        """Call `question` with a connection, commit, and return its result. While the server is unavailable, try again.

        `question` may be called more than once, so a repetition must do no harm.
        """
        deadline = time.monotonic() + SERVER_SECONDS
        while True:
            try:
                with self._engine.connect() as connection:
                    answer = question(connection)
                    connection.commit()
                    return answer
            except DBAPIError as error:
                is_away = error.connection_invalidated or is_database_unavailable(error)
                if time.monotonic() > deadline or not is_away:
                    raise
                time.sleep(0.05)

    def progress(self) -> Row[Any]:
        """Return a row: `backlog` (jobs left), `is_due` (one of them is due), `last_effect`, `dead` (dead letters)."""
        return self.ask(lambda connection: connection.execute(_PROGRESS).one())

    def note_leases(self) -> None:
        """Record the leases of jobs at this moment (token and relay), for the check at the end."""
        self.ask(lambda connection: connection.execute(_NOTE_LEASES).rowcount)

    def wait_until_connected(self, names: Callable[[], set[str]]) -> None:
        """Wait until each of these relays has a session, up to `SERVER_SECONDS`.

        A relay without a session is still starting, and a signal to stop would kill it.

        Args:
            names: Returns the relays' names.
        """
        _wait(lambda: names() <= self.ask(lambda connection: set(connection.execute(_NAMES).scalars())), SERVER_SECONDS)

    def wait_until_alone(self) -> None:
        """Wait up to 20 seconds until the server has no other sessions: the check reports sessions that are left."""
        _wait(lambda: not self.ask(lambda connection: connection.execute(_OTHERS).scalar_one()), _GONE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.dispose()


def _wait(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
