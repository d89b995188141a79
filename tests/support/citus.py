"""Stand-ins for Citus' catalogue and functions, and a real coordinator if there is one.

The stand-ins show detection, refusal and the guard. What Citus itself makes of the guard shows on a real one alone.
"""

import os

import psycopg
import pytest

from tests.support.urls import libpq_url

# A table comes into pg_catalog by ALTER TABLE alone.
_STAND_INS = """\
CREATE TABLE public.pg_dist_partition (logicalrelid regclass NOT NULL);
ALTER TABLE public.pg_dist_partition SET SCHEMA pg_catalog;
CREATE TABLE public.pg_dist_schema (schemaid oid NOT NULL);
ALTER TABLE public.pg_dist_schema SET SCHEMA pg_catalog;
GRANT SELECT ON pg_catalog.pg_dist_partition TO PUBLIC;
CREATE FUNCTION pg_catalog.citus_add_local_table_to_metadata(regclass) RETURNS void LANGUAGE sql
  AS 'INSERT INTO pg_catalog.pg_dist_partition VALUES ($1)'"""


def stand_in(url: str) -> None:
    """Make this database look like one of a Citus coordinator, without a distributed table."""
    with psycopg.connect(libpq_url(url)) as connection:
        row = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
        if row != (True,):
            pytest.skip("only a superuser may make stand-ins for Citus' catalogue")
        connection.execute(_STAND_INS)


def manage(url: str, table: str) -> None:
    """Have Citus manage a table, as far as its catalogue says."""
    with psycopg.connect(libpq_url(url)) as connection:
        connection.execute("INSERT INTO pg_catalog.pg_dist_partition VALUES (%s::regclass)", [table])


def distribute(url: str) -> None:
    """Make a table of the application's, and have Citus manage it."""
    with psycopg.connect(libpq_url(url)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS public.spread (n integer PRIMARY KEY)")
    manage(url, "public.spread")


def coordinator_url() -> str:
    """The URL of a real coordinator, whose role may create schemas; skips the test without one."""
    url = os.environ.get("OUTBOXQ_TEST_CITUS_URL")
    if not url:
        pytest.skip("OUTBOXQ_TEST_CITUS_URL names no Citus coordinator")
    return url
