"""Queries of a run about its database, over a connection that no fault is aimed at."""

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
    """Queries the database, again and again while the server is away."""

    def __init__(self, url: str) -> None:
        self._engine = make_engine(url, application_name="outboxq torture", pooled=True)

    def ask(self, question: Callable[[Connection], T]) -> T:
        """Run `question` until the server answers it. It must bear repetition."""
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
        """The backlog, whether a job of it is due, and the latest ends of jobs."""
        return self.ask(lambda connection: connection.execute(_PROGRESS).one())

    def note_leases(self) -> None:
        """Record the tokens and owners of the leases that exist at this moment."""
        self.ask(lambda connection: connection.execute(_NOTE_LEASES).rowcount)

    def wait_until_connected(self, names: Callable[[], set[str]]) -> None:
        """Wait until every name has a session: a relay that is still starting would die of the signal to stop."""
        _wait(lambda: names() <= self.ask(lambda connection: set(connection.execute(_NAMES).scalars())), SERVER_SECONDS)

    def wait_until_alone(self) -> None:
        """Wait until the server has noticed that all clients are gone; a session that stays is found by the check."""
        _wait(lambda: not self.ask(lambda connection: connection.execute(_OTHERS).scalar_one()), _GONE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.dispose()


def _wait(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
