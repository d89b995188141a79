"""`outboxq batches`: what is open, and what is left of it."""

from uuid import UUID, uuid4

from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Jobs, OutboxSession, external
from outboxq.postgres import Database
from outboxq.statements.cancel import bury_waiting
from tests.support.cli import call

MEMBER = external("credit", queue="ledger")
REPORT = external("report", queue="reports")


def open_batch(sessions: sessionmaker[OutboxSession], members: int) -> UUID:
    """Open a batch of so many members; its id."""
    with sessions.begin() as session, Jobs().batch(session, on_done=REPORT.job(run=7)) as batch:
        batch.add_jobs(MEMBER.job(number=number) for number in range(members))
    return batch.id


def bury_one(engine: Engine, batch_id: UUID) -> None:
    """Make a dead letter of a member."""
    with engine.begin() as connection:
        members = connection.execute(text("SELECT id FROM outboxq.job WHERE batch_id = :id"), {"id": batch_id})
        connection.execute(text(bury_waiting("outboxq", [members.scalars().all()[0]])))


def test_open_batches_are_listed(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """The oldest first, with the callback's kind and queue, and how many members are left and dead."""
    url = outboxq_database.url
    assert call("batches", "list", "--json", url=url).ok().json["batches"] == []
    ids = [open_batch(sessions, 2), open_batch(sessions, 3)]
    bury_one(engine, ids[1])
    listed = call("batches", "list", "--json", url=url).ok().json["batches"]
    assert [each["id"] for each in listed] == [str(batch_id) for batch_id in ids]
    assert [(each["kind"], each["queue"], each["members"], each["failed"]) for each in listed] == [
        ("report", "reports", 2, 0),
        ("report", "reports", 2, 1),
    ]
    first = call("batches", "list", "--limit", "1", "--json", url=url).ok().json
    assert ([each["id"] for each in first["batches"]], first["more"]) == ([str(ids[0])], True)
    assert str(ids[0]) in call("batches", "list", url=url).ok().stdout


def test_one_batch_is_shown(outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """Its members by state, those of no other one, and the callback with its arguments."""
    batch_id, _ = open_batch(sessions, 3), open_batch(sessions, 4)
    bury_one(engine, batch_id)
    shown = call("batches", "show", batch_id, "--json", url=outboxq_database.url).ok().json
    assert (shown["members"], shown["failed"], shown["ready"]) == (2, 1, 2), shown
    assert "'run': 7" in str(shown["callback"]).replace('"', "'"), shown
    assert str(batch_id) in call("batches", "show", batch_id, url=outboxq_database.url).ok().stdout


def test_a_batch_that_is_not_there_is_named(outboxq_database: Database) -> None:
    """With an exit code of 1, and the id."""
    batch_id = uuid4()
    outcome = call("batches", "show", batch_id, url=outboxq_database.url)
    assert outcome.exit_code == 1, outcome
    assert str(batch_id) in outcome.stderr
