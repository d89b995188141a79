"""The doctor names who holds jobs and who pins old snapshots."""

import secrets

import psycopg
import pytest

from outboxq.postgres import Database
from tests.support.doctor import examine, execute, named, only, open_session
from tests.support.urls import libpq_url

ADD = "SELECT outboxq.add_job('ship')"
NOW = ("--older-than", 0)


@pytest.fixture
def gid(outboxq_database: Database) -> str:
    """The name of a prepared transaction of this test's own."""
    with psycopg.connect(libpq_url(outboxq_database.url)) as connection:
        row = connection.execute("SHOW max_prepared_transactions").fetchone()
    if row == ("0",):
        pytest.skip("this server has max_prepared_transactions = 0")
    return f"it's {secrets.token_hex(6)}"


def prepare(url: str, gid: str, *statements: str) -> None:
    quoted = gid.replace("'", "''")
    execute(url, ";".join(("BEGIN", *statements, f"PREPARE TRANSACTION '{quoted}'")))


def roll_back(url: str, gid: str) -> None:
    quoted = gid.replace("'", "''")
    execute(url, f"ROLLBACK PREPARED '{quoted}'")


@pytest.mark.wide
def test_a_session_that_holds_jobs_is_named(outboxq_database: Database) -> None:
    """A transaction that has locked two jobs is named with its pid, state and name, until it ends."""
    url = outboxq_database.url
    execute(url, ADD, ADD, ADD)
    with open_session(url, "SELECT FROM outboxq.job LIMIT 2 FOR UPDATE") as session:
        found = only(url, "jobs-held-by-session", *NOW)
        assert named(url, "jobs-held-by-session", "--older-than", 3600) == []
    assert found["detail"]["pid"] == session
    assert found["detail"]["state"] == "idle in transaction"
    assert found["detail"]["application_name"] == "forgotten"
    assert found["detail"]["jobs"] == 2
    assert f"pg_terminate_backend({session})" in found["advice"]
    assert named(url, "jobs-held-by-session", *NOW) == []


def test_a_long_handler_of_a_relay_is_no_foreign_session(outboxq_database: Database) -> None:
    """Its session waits in its transaction for what the handler does elsewhere: it is no client that forgot COMMIT."""
    url = outboxq_database.url
    execute(url, ADD)
    with open_session(url, "DELETE FROM outboxq.job", name="outboxq relay"):
        found = only(url, "jobs-held-by-session", *NOW)
        pinned = only(url, "snapshot-pinned-by-session", *NOW)
    assert "of a relay has run 1 job for" in found["title"]
    assert "timeout_seconds" in found["advice"]
    assert "client" not in found["advice"]
    assert "handler of a relay" in pinned["advice"]


def test_an_insert_that_is_not_committed_is_named(outboxq_database: Database) -> None:
    """A producer that forgot its COMMIT is named, although nobody can see its job."""
    with open_session(outboxq_database.url, ADD) as session:
        found = only(outboxq_database.url, "jobs-held-by-session", *NOW)
    assert found["detail"]["pid"] == session
    assert found["detail"]["jobs"] is None


@pytest.mark.wide
def test_a_locked_table_is_named_and_not_waited_for(outboxq_database: Database) -> None:
    """Behind ACCESS EXCLUSIVE on job, the holder is named, and the looks at jobs are given up."""
    url = outboxq_database.url
    with open_session(url, "LOCK TABLE outboxq.job IN ACCESS EXCLUSIVE MODE") as session:
        findings = examine(url, *NOW)
    (found,) = [one for one in findings if one["code"] == "table-locked"]
    not_made = [one for one in findings if one["code"] == "check-not-made"]
    assert found["severity"] == "problem"
    assert found["detail"]["pid"] == session
    assert found["detail"]["tables"] == ["job"]
    assert {"the kinds that wait", "suspects"} <= {finding["detail"]["check"] for finding in not_made}
    assert {finding["detail"]["reason"] for finding in not_made} == {"a table is locked by another session"}


def test_the_session_that_pins_the_oldest_snapshot_is_named(outboxq_database: Database) -> None:
    """Of two old snapshots the older is named, with pid, state and age."""
    url = outboxq_database.url
    look = ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT 1")
    with open_session(url, *look, name="report") as oldest:
        execute(url, ADD)
        with open_session(url, *look):
            found = only(url, "snapshot-pinned-by-session", *NOW)
    assert found["detail"]["pid"] == oldest
    assert found["detail"]["state"] == "idle in transaction"
    assert found["detail"]["application_name"] == "report"
    assert found["detail"]["seconds"] >= 0
    assert found["detail"]["transactions"] >= 1
    assert found["detail"]["others"] >= 1
    assert [one for one in named(url, "snapshot-pinned-by-session") if one["detail"]["pid"] == oldest] == []


@pytest.mark.wide
def test_a_prepared_transaction_that_holds_jobs_is_named(outboxq_database: Database, gid: str) -> None:
    """A prepared DELETE of a job is a problem, and the advice ends it."""
    url = outboxq_database.url
    execute(url, ADD)
    prepare(url, gid, "DELETE FROM outboxq.job")
    try:
        found = only(url, "jobs-held-by-prepared-transaction", *NOW)
        assert named(url, "jobs-held-by-prepared-transaction", "--older-than", 3600) == []
        assert named(url, "prepared-transaction-orphaned", *NOW) == []
        assert found["severity"] == "problem"
        assert found["detail"]["gid"] == gid
        advised = found["advice"].partition("ROLLBACK PREPARED ")[2].partition(";")[0]
    except BaseException:
        roll_back(url, gid)
        raise
    execute(url, f"ROLLBACK PREPARED {advised}")
    assert named(url, "jobs-held-by-prepared-transaction", *NOW) == []


def test_an_orphaned_prepared_transaction_is_named(outboxq_database: Database, gid: str) -> None:
    """One that touches no job is named too: it pins a snapshot for ever."""
    url = outboxq_database.url
    prepare(url, gid, "CREATE TABLE something (id integer)")
    try:
        found = only(url, "prepared-transaction-orphaned", *NOW)
        assert named(url, "jobs-held-by-prepared-transaction", *NOW) == []
    finally:
        roll_back(url, gid)
    assert found["detail"]["gid"] == gid
    assert named(url, "prepared-transaction-orphaned", *NOW) == []
