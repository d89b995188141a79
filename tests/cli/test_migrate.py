"""`outboxq migrate` beside another migration."""

import subprocess

import psycopg
from sqlalchemy import make_url

from outboxq.migrations import LATEST
from outboxq.postgres import Database
from tests.support.cli import command, environment
from tests.support.waiting import PATIENCE


def test_a_migration_that_waits_says_for_whom(outboxq_database: Database) -> None:
    """A session may have been forgotten in the middle of one."""
    url = make_url(outboxq_database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, application_name="another deployment") as holder:
        holder.execute("SELECT pg_advisory_xact_lock(hashtext('outboxq migrations'), hashtext('outboxq'))")
        with subprocess.Popen(
            command("migrate"), env=environment(outboxq_database.url), stderr=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            said = process.stderr.readline()
            assert said.startswith(f"waiting for another migration: process {holder.info.backend_pid}, role ")
            assert ", another deployment, since 2" in said
            holder.rollback()
            out, more = process.communicate(timeout=PATIENCE)
    assert (process.returncode, more) == (0, "")
    assert out == f"schema 'outboxq' is at step {LATEST} already\n"
