"""The doctor names what Citus, or another server that only looks like PostgreSQL, does to outboxq's tables."""

import secrets

import pytest

from outboxq.postgres import Database
from outboxq.statements.citus import GUARDED
from tests.doctor.test_sessions import NOW, prepare, roll_back
from tests.support.citus import distribute, manage, stand_in
from tests.support.cli import call
from tests.support.doctor import examine, execute, named, only

RULE = "CREATE RULE away AS ON {} TO outboxq.job DO INSTEAD NOTHING"


@pytest.mark.wide
def test_commits_in_one_phase_are_named(outboxq_database: Database) -> None:
    """A warning while nothing is distributed, a problem from then on, and neither once the guard is there."""
    url = outboxq_database.url
    assert named(url, "citus-one-phase") == []
    stand_in(url)
    assert only(url, "citus-one-phase")["severity"] == "warning"
    distribute(url)
    found = only(url, "citus-one-phase")
    assert found["severity"] == "problem"
    assert found["detail"] == {"tables": sorted(GUARDED), "distributed": True}
    assert "outboxq migrate" in found["advice"]
    call("migrate", url=url).ok()
    assert [finding for finding in examine(url) if finding["severity"] == "problem"] == []
    assert named(url, "citus-one-phase") == []


def test_tables_that_citus_manages_are_named(outboxq_database: Database) -> None:
    """Every claim on them fails; the table of the guard is meant to be managed."""
    url = outboxq_database.url
    stand_in(url)
    call("migrate", url=url).ok()
    assert named(url, "citus-manages-tables") == []
    manage(url, "outboxq.job")
    found = only(url, "citus-manages-tables")
    assert found["severity"] == "problem"
    assert found["detail"] == {"tables": ["job"]}


@pytest.mark.wide
@pytest.mark.parametrize("verb", ["DELETE", "UPDATE"])
def test_a_server_that_refuses_a_claim_is_named(outboxq_database: Database, verb: str) -> None:
    """Of either mode: some claims delete, others lease. The server's own words say why."""
    url = outboxq_database.url
    assert named(url, "claim-refused") == []
    execute(url, RULE.format(verb))
    found = only(url, "claim-refused")
    assert found["severity"] == "problem"
    assert found["detail"]["sqlstate"] == "0A000"
    assert f"{verb} RETURNING" in found["detail"]["reason"]


def test_the_advice_for_a_prepared_transaction_of_citus_is_its_own_function(outboxq_database: Database) -> None:
    """To roll it back by hand could undo what Citus has committed elsewhere."""
    url, gid = outboxq_database.url, f"citus_0_{secrets.token_hex(6)}"
    prepare(url, gid, "SELECT outboxq.add_job('ship')")
    try:
        advice = only(url, "jobs-held-by-prepared-transaction", *NOW)["advice"]
    finally:
        roll_back(url, gid)
    assert "SELECT recover_prepared_transactions()" in advice
    assert "ROLLBACK" not in advice
