"""Migrating with as few rights as it takes."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import ProgrammingError

from outboxq import migrations
from outboxq.migrations.runner import migrate
from outboxq.postgres import Server
from tests.migrations.catalog import fetch_value, is_empty, read_catalog, schema_exists
from tests.support.urls import libpq_url


@dataclass(frozen=True)
class Landscape:
    """A database, its admin's URL, and the URL of a role with no rights in it."""

    url: str
    role: str
    role_url: str

    def admin(self, statement: str, *names: str) -> None:
        with psycopg.connect(libpq_url(self.url), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def migrate(self, to: int | None = None) -> tuple[int, int]:
        engine = create_engine(self.role_url)
        try:
            with engine.begin() as connection:
                return migrate(connection, to=to)
        finally:
            engine.dispose()


@pytest.fixture
def landscape(outboxq_server: Server) -> Iterator[Landscape]:
    """A role of this test's own: it goes after the database, which holds what it owns."""
    role, password = f"outboxq_{secrets.token_hex(6)}", secrets.token_hex(12)
    with psycopg.connect(libpq_url(outboxq_server.url), autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(role), sql.Literal(password))
        )
        try:
            with outboxq_server.create_database() as database:
                role_url = make_url(database.url).set(username=role, password=password)
                yield Landscape(database.url, role, role_url.render_as_string(hide_password=False))
        finally:
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def test_the_owner_of_the_schema_needs_no_right_on_the_database(landscape: Landscape) -> None:
    """A role that may not create schemas migrates up and down in the one that an admin made for it, which stays."""
    landscape.admin("CREATE SCHEMA outboxq AUTHORIZATION {}", landscape.role)
    has_create = "SELECT has_database_privilege(current_user, current_database(), 'CREATE')"
    assert fetch_value(landscape.role_url, has_create) is False
    # PostgreSQL asks for the right even where the schema is there.
    with psycopg.connect(libpq_url(landscape.role_url)) as connection, pytest.raises(psycopg.Error, match="denied"):
        connection.execute("CREATE SCHEMA IF NOT EXISTS outboxq")

    assert landscape.migrate() == (0, migrations.LATEST)
    installed = read_catalog(landscape.url)
    assert landscape.migrate(to=0) == (migrations.LATEST, 0)
    assert schema_exists(landscape.url)
    assert is_empty(read_catalog(landscape.url))

    assert landscape.migrate() == (0, migrations.LATEST)
    assert read_catalog(landscape.url) == installed


def test_a_schema_that_we_made_goes_with_the_downgrade(landscape: Landscape) -> None:
    """A role that may create schemas leaves nothing behind."""
    database = make_url(landscape.url).database
    assert database is not None
    landscape.admin("GRANT CREATE ON DATABASE {} TO {}", database, landscape.role)
    assert landscape.migrate() == (0, migrations.LATEST)
    owner = "SELECT pg_get_userbyid(nspowner)::text FROM pg_namespace WHERE nspname = 'outboxq'"
    assert fetch_value(landscape.url, owner) == landscape.role
    assert landscape.migrate(to=0) == (migrations.LATEST, 0)
    assert not schema_exists(landscape.url)


def test_without_the_schema_and_without_the_right_nothing_is_left_half_done(landscape: Landscape) -> None:
    """PostgreSQL's refusal reaches the caller, who can read which right is missing."""
    with pytest.raises(ProgrammingError, match="permission denied for database"):
        landscape.migrate()
    assert not schema_exists(landscape.url)


def test_a_producer_needs_the_schema_and_insert_alone(landscape: Landscape) -> None:
    """A role with USAGE on the schema and INSERT on the job table can call add_job, and read nothing."""
    engine = create_engine(landscape.url)
    with engine.begin() as connection:
        migrate(connection)
    engine.dispose()
    landscape.admin("GRANT USAGE ON SCHEMA outboxq TO {}", landscape.role)
    landscape.admin("GRANT INSERT ON outboxq.job TO {}", landscape.role)
    assert fetch_value(landscape.role_url, "SELECT outboxq.add_job('greet')::text")
    assert fetch_value(landscape.url, "SELECT count(*) FROM outboxq.job") == 1
    with psycopg.connect(libpq_url(landscape.role_url)) as connection, pytest.raises(psycopg.Error, match="denied"):
        connection.execute("SELECT FROM outboxq.job")


@pytest.mark.parametrize("public", [False, True])
def test_who_may_look_jobs_up_by_their_ids_may_see_whether_they_live(landscape: Landscape, *, public: bool) -> None:
    """Producers of unique jobs had the first right from the version before, and need the others; no one else does."""
    engine = create_engine(landscape.url)
    with engine.begin() as connection:
        migrate(connection, to=14)
    may = (
        f"SELECT array_agg(has_column_privilege('{landscape.role}', 'outboxq.job', name, 'SELECT')) "
        "FROM unnest(ARRAY['state', 'expires_at', 'xmax', 'args']) AS name"
    )
    landscape.admin("GRANT SELECT (queue) ON outboxq.job TO {}", landscape.role)
    for to, granted in (15, False), (14, False), (15, True):
        if granted:
            to_public = "GRANT SELECT (id) ON outboxq.job TO PUBLIC"
            landscape.admin(to_public) if public else landscape.admin(
                "GRANT SELECT (id) ON outboxq.job TO {}", landscape.role
            )
        with engine.begin() as connection:
            migrate(connection, to=to)
        assert fetch_value(landscape.url, may) == [granted] * 3 + [False]
    engine.dispose()
