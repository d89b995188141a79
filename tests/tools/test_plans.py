"""`python -m tests.tools.plans` explains statements."""

import pytest
from sqlalchemy import create_engine

from outboxq.postgres import Server
from tests.support.citus import stand_in
from tests.support.statements import all_statements
from tests.tools.plans import fill, main, plans


@pytest.mark.large
def test_a_statement_is_shown_with_its_plan(outboxq_server: Server) -> None:
    """One that goes as text and one that SQLAlchemy compiles, on filled tables: both by the index they promise."""
    with outboxq_server.create_database() as database:
        engine = create_engine(database.url)
        fill(engine, 2_000)
        claims = list(plans(engine, ["claim.ClaimStatements"]))
        assert "Index Scan using job_ready" in claims[0].plan
        assert claims[0].statement.startswith("WITH picked")
        prepared = [claim.plan for claim in claims if claim.statement.startswith("PREPARE")]
        assert prepared
        assert [plan for plan in prepared if "Index Scan using job_" not in plan or "Sort" in plan] == []
        (shown, _) = plans(engine, ["stats.count_dead", "jobs.select_job"])
        assert str(shown).startswith("== ")
        assert "job_pkey" in shown.plan
        engine.dispose()


@pytest.mark.large
def test_every_statement_can_be_explained(outboxq_server: Server) -> None:
    """A new statement needs nothing to be seen here."""
    with outboxq_server.create_database() as database:
        # Some statements are for Citus alone.
        stand_in(database.url)
        engine = create_engine(database.url)
        fill(engine, 100)
        found = list(plans(engine))
        assert {plan.name for plan in found} == {name for name, _, _ in all_statements()}
        assert [plan for plan in found if plan.plan.startswith("refused")] == []
        engine.dispose()


def test_names_are_listed_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a database."""
    assert main(["--list"]) == 0
    assert "jobs.select_jobs\n" in capsys.readouterr().out
    assert main(["jobs.select_nothing"]) == 1
    assert "jobs.select_nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "python -m tests.tools.plans --list" in capsys.readouterr().out
