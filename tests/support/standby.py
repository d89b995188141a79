"""A streaming standby of an embedded server, run by the same keeper: gone when its owner is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from sqlalchemy import make_url

from outboxq.config import local_binaries as configured_binaries
from outboxq.postgres import Server
from outboxq.postgres.binaries import Binaries, embedded_binaries, local_binaries
from outboxq.postgres.cluster import SUPERUSER, Cluster
from tests.support.own_server import own_server
from tests.support.urls import libpq_url
from tests.support.waiting import wait_until

NAME = "outboxq_standby"

# A standby refuses to start with less than its primary has.
_NO_LESS_THAN_THE_PRIMARY = {"max_connections": "200", "max_prepared_transactions": "20"}


class _StandbyCluster(Cluster):
    """A cluster whose data is a copy of the primary's instead of a fresh one."""

    def __init__(self, primary_port: int) -> None:
        self._source = f"host=127.0.0.1 port={primary_port} user={SUPERUSER} application_name={NAME}"
        settings = {"primary_conninfo": self._source, "fsync": "off", "shared_buffers": "32MB"}
        super().__init__(_binaries(), {**settings, **_NO_LESS_THAN_THE_PRIMARY}, durable=False)

    def _initdb(self, *, durable: bool) -> None:
        # With the signal file, and without a wait for the next scheduled checkpoint.
        options = ["-D", str(self._data), "-d", self._source, "-R", "-X", "stream", "-c", "fast", "--no-sync"]
        reply = self._ask("initdb", "pg_basebackup", *options)
        if reply.get("exit_status") != 0:
            raise self._failure(f"pg_basebackup failed ({reply})")


@dataclass(frozen=True)
class Pair:
    """A primary and its standby."""

    primary: Server
    standby_port: int

    def url(self, database_url: str) -> str:
        """The database by both addresses, in libpq's form."""
        url = make_url(database_url)
        return f"postgresql://{url.username}@127.0.0.1:{url.port},127.0.0.1:{self.standby_port}/{url.database}"

    def standby_url(self, database_url: str) -> str:
        """The database on the standby alone."""
        return make_url(database_url).set(port=self.standby_port).render_as_string(hide_password=False)

    def on_primary(self, statement: str) -> object:
        """The first value that `statement` gives on the primary."""
        return _first_value(self.primary.url, statement)

    def on_standby(self, statement: str) -> object:
        """The first value that `statement` gives on the standby."""
        return _first_value(self.standby_url(self.primary.url), statement)

    def wait_for_replay(self) -> None:
        """Until the standby has everything."""
        wanted = self.on_primary("SELECT pg_current_wal_lsn()")
        statement = f"SELECT pg_last_wal_replay_lsn() >= '{wanted}'"
        wait_until(lambda: self.on_standby(statement), "the standby to catch up")

    def make_synchronous(self) -> None:
        """From now on a COMMIT is answered when the standby has it."""
        self.on_primary(f"ALTER SYSTEM SET synchronous_standby_names = '{NAME}'")
        self.on_primary("SELECT pg_reload_conf()")
        query = "SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
        wait_until(lambda: self.on_primary(query), "the standby to be synchronous")

    def cut_replication(self) -> None:
        """From now on the standby hears nothing."""
        self.on_standby("ALTER SYSTEM SET primary_conninfo = ''")
        self.on_standby("SELECT pg_reload_conf()")
        wait_until(lambda: self.on_primary("SELECT count(*) = 0 FROM pg_stat_replication"), "the standby to be cut off")

    def fail_over(self) -> float:
        """Kill the primary and promote the standby; the moment of the kill."""
        self.primary.stop_immediately()
        moment = time.monotonic()
        assert self.on_standby("SELECT pg_promote()") is True
        return moment


@contextmanager
def primary_and_standby() -> Iterator[Pair]:
    """Two servers, the second streaming from the first."""
    with own_server() as primary:
        port = make_url(primary.url).port
        assert port is not None
        standby = _StandbyCluster(port)
        try:
            pair = Pair(primary, standby.port)
            wait_until(
                lambda: pair.on_primary("SELECT count(*) = 1 FROM pg_stat_replication WHERE state = 'streaming'"),
                "the standby to stream",
            )
            yield pair
        finally:
            standby.close()


def _first_value(url: str, statement: str) -> object:
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return None if row is None else row[0]


def _binaries() -> Binaries:
    """As the primary's, see `own_server`."""
    directory = configured_binaries()
    return local_binaries(directory) if directory else embedded_binaries()
