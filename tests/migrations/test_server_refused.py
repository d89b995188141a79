"""A server that is too old, and a database that is not UTF8, are refused by one sentence, wherever one meets them."""

from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from psycopg import sql
from sqlalchemy import NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq import AsyncContext, Context, Jobs, Relay, migrations
from outboxq.errors import ConfigError, MigrationRefused
from outboxq.migrations import server
from outboxq.migrations.runner import migration_sql
from outboxq.postgres import Database, Server
from outboxq.statements import server as statements
from tests.support.cli import Outcome, call
from tests.support.doctor import only
from tests.support.urls import libpq_url

APP = "tests.support.app:jobs"


@pytest.fixture(params=["SQL_ASCII", "LATIN1"])
def foreign(request: pytest.FixtureRequest, outboxq_server: Server) -> Iterator[str]:
    """A database of another encoding; its URL."""
    name = f"foreign_{uuid4().hex}"
    with outboxq_server.create_database() as beside:
        url = make_url(beside.url)
        with psycopg.connect(libpq_url(beside.url), autocommit=True) as admin:
            create = "CREATE DATABASE {} TEMPLATE template0 ENCODING {} LC_COLLATE 'C' LC_CTYPE 'C'"
            admin.execute(sql.SQL(create).format(sql.Identifier(name), sql.Literal(request.param)))
            yield url.set(database=name).render_as_string(hide_password=False)
            # Waits for the ends of closed connections' sessions: DROP DATABASE itself gives up after five seconds.
            admin.execute("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = %s", (name,))
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def one_line(outcome: Outcome) -> str:
    assert outcome.exit_code == 2, outcome
    (line,) = outcome.stderr.splitlines()
    assert "Traceback" not in line
    return line


def encoding_of(url: str) -> str:
    with psycopg.connect(libpq_url(url)) as connection:
        return connection.info.parameter_status("server_encoding") or ""


@pytest.mark.first_and_last
@pytest.mark.parametrize("words", [("migrate",), ("relay", APP), ("stats",)], ids=" ".join)
def test_a_database_of_another_encoding_is_refused_by_one_sentence(foreign: str, words: tuple[str, ...]) -> None:
    """What was found, what is needed and how to get there; nothing is written."""
    said = one_line(call(*words, url=foreign))
    assert f"encoding is UTF8, and this one is {encoding_of(foreign)}" in said
    assert "CREATE DATABASE" in said
    with psycopg.connect(libpq_url(foreign), client_encoding="utf8") as connection:
        assert connection.execute("SELECT to_regnamespace('outboxq')").fetchone() == (None,)


def test_a_relay_on_an_engine_of_the_users_own_is_refused_too(foreign: str) -> None:
    """Also one whose driver gives texts as bytes, on which SQLAlchemy fails in its own first question."""
    sync_jobs, async_jobs = Jobs(), Jobs()

    @sync_jobs.handler(queue="sync")
    def run(ctx: Context) -> None: ...

    @async_jobs.handler(queue="async")
    async def arun(ctx: AsyncContext) -> None: ...

    engine = create_engine(foreign)
    for given, jobs in ((engine, sync_jobs), (create_async_engine(foreign, poolclass=NullPool), async_jobs)):
        with pytest.raises(ConfigError, match=f"this one is {encoding_of(foreign)}"):
            Relay(given, jobs).run()
    engine.dispose()


def test_a_revision_of_the_users_own_is_refused_by_the_database(foreign: str) -> None:
    """`migrations.upgrade` says the same, online and as SQL for psql."""
    engine = create_engine(foreign, connect_args={"client_encoding": "utf8"})
    with engine.connect() as connection, pytest.raises(MigrationRefused, match="encoding is UTF8, and this one is"):
        migrations.upgrade(Operations(MigrationContext.configure(connection)), to=1)
    engine.dispose()
    with psycopg.connect(libpq_url(foreign)) as connection, pytest.raises(psycopg.errors.FeatureNotSupported):
        connection.execute(migration_sql().encode())


def test_the_doctor_names_the_encoding(foreign: str) -> None:
    """As a problem, beside what else it finds."""
    found = only(foreign, "server-not-supported")
    assert found["severity"] == "problem"
    assert encoding_of(foreign) in found["title"]


def test_a_server_that_is_too_old_is_refused_by_one_sentence(
    outboxq_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `migrate`, the relay, the doctor and a revision; here the servers of today are declared too old."""
    for module in (server, statements, migrations):
        monkeypatch.setattr(module, "OLDEST_MAJOR", 90)
    url = outboxq_database.url
    for words in (("migrate",), ("relay", APP), ("stats",)):
        assert "outboxq needs PostgreSQL 90 or later, and this server is 1" in one_line(call(*words, url=url))
    assert "PostgreSQL 90" in only(url, "server-not-supported")["title"]
    engine = create_engine(url)
    with engine.connect() as connection, pytest.raises(MigrationRefused, match="outboxq needs PostgreSQL 90 or later"):
        migrations.upgrade(Operations(MigrationContext.configure(connection)), to=1)
    with engine.connect() as connection:
        # The tables were there, and a way back stays open.
        assert connection.execute(text("SELECT max(step) FROM outboxq.migration")).scalar() == migrations.LATEST
    engine.dispose()
    call("migrate", "--to", 0, url=url).ok()
