"""One row that a role of ours may write, and that no code of ours does, stops no work on any other row."""

from collections.abc import Callable, Iterator

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, migrations
from outboxq.config import SlotGroup
from outboxq.dashboard import Role, create_app
from outboxq.events import Event, JobDone, ScheduleFired
from outboxq.observability.gauges import write_gauges
from outboxq.observability.history import prune, roll_up_one_hour
from outboxq.postgres import Database
from tests.support.cli import call
from tests.support.dashboard import as_user, client_of, screens
from tests.support.ledger import of
from tests.support.matrices import sampled
from tests.support.plain_rows import insert_row
from tests.support.poison import TABLES, plant

jobs = Jobs()


@jobs.handler(queue="q")
def well(ctx: Context, name: str) -> None:
    """Does nothing."""


@jobs.handler(queue="q", kind="k")
def odd(ctx: Context) -> None:
    """Does nothing either."""


LOOKS = [
    ("stats",),
    ("history",),
    ("explain", "--queue", "q"),
    *((noun, "list") for noun in ("queues", "schedules", "batches", "jobs", "kinds", "dead", "audit", "done", "inbox")),
    ("effects", "list"),
    ("relays", "list"),
    ("jobs", "list", "--running"),
    ("top", "--once"),
]
# A batch that is over, behind all others; an expired message and a schedule that is due.
BATCH = "ffffffff-0000-7000-8000-000000000000"
OTHERS = (
    insert_row("batch", {"id": f"'{BATCH}'", "callback": """'{"kind": "k", "queue": "q"}'"""}),
    insert_row("inbox", {"expires_at": "clock_timestamp() - interval '1 second'"}),
    insert_row("schedule", {"name": "'well'", "next_at": "clock_timestamp() - interval '1 second'"}),
    insert_row(
        "stat",
        {"at": "date_trunc('hour', clock_timestamp()) - interval '70 hours'", "kind": "'well'", "done": "7"},
    ),
)


@pytest.fixture
def before(engine: Engine) -> Engine:
    """Tables without the checks of steps 13 and 14, which refuse the worst."""
    with engine.begin() as connection:
        migrations.downgrade(Operations(MigrationContext.configure(connection)), to=12)
    return engine


def failures_of_looks(url: str) -> Iterator[str]:
    """Commands that do not end well."""
    for look in LOOKS:
        outcome = call(*look, url=url)
        if outcome.exit_code:
            yield f"{' '.join(look)}: {outcome.stderr}"


def failures_of_pages(engine: Engine) -> Iterator[str]:
    """Pages of lists that are not answered."""
    with client_of(create_app({"orders": engine}, auth=as_user(Role.READER))) as client:
        for screen in screens():
            if "{" not in screen.path:
                page = client.get(f"/orders/{screen.path}", headers={"accept": "application/json"})
                if page.status_code != 200:
                    yield f"/{screen.path}: {page.text}"


def unmade(url: str) -> set[str]:
    """What the doctor and the metrics could not look at; they themselves never fail."""
    doctor, metrics = call("doctor", "--json", url=url), call("metrics", "--once", url=url)
    assert metrics.exit_code == 0, metrics
    refused = {line for line in metrics.stdout.splitlines() if "query_ok" in line and line.endswith(" 0.0")}
    return refused | {each["title"] for each in doctor.json["findings"] if each["code"] == "check-not-made"}


@pytest.mark.wide
@pytest.mark.parametrize("table", sampled(TABLES, 4))
def test_every_look_goes_on(engine: Engine, outboxq_database: Database, table: str) -> None:
    """With every odd row in a table that it takes, each list, page, check and gauge is made."""
    plant(engine, table)
    failed = [*failures_of_looks(outboxq_database.url), *failures_of_pages(engine), *unmade(outboxq_database.url)]
    assert not failed, "\n".join(failed)


@pytest.mark.first_and_last
@pytest.mark.parametrize("table", TABLES)
def test_checks_and_gauges_beside_a_row_that_cannot_be_read_are_made(
    before: Engine, outboxq_database: Database, table: str
) -> None:
    """On tables of before, the doctor and the exporter say what they could not look at, and look at the rest."""
    assert plant(before, table)
    said = unmade(outboxq_database.url)
    assert len(said) <= 3, said


@pytest.mark.first_and_last
@pytest.mark.parametrize("table", TABLES)
def test_relays_go_on(before: Engine, drain: Callable[..., list[Event]], table: str) -> None:
    """Jobs, batches, schedules, pruning and the history of others, on tables that take the worst."""
    assert plant(before, table)
    with before.begin() as connection:
        for statement in OTHERS:
            connection.exec_driver_sql(statement)
    with sessionmaker(before, class_=OutboxSession).begin() as session:
        for number in range(3):
            session.add_job(well, name=str(number))
    with before.begin() as connection:
        # Their ends lead to looks at those batches.
        connection.exec_driver_sql(
            "INSERT INTO outboxq.job (id, queue, kind, args, batch_id) "
            "SELECT gen_random_uuid(), 'q', 'k', '{}', id FROM outboxq.batch"
        )
    events = drain(jobs, groups=(SlotGroup(("q",), 1),), prune_seconds=60.0)
    assert sum(event.job.kind == "well" for event in of(events, JobDone)) == 3
    assert "well" in {event.name for event in of(events, ScheduleFired)}
    assert count(before, f"batch WHERE id = '{BATCH}'") == 0
    assert count(before, "inbox WHERE expires_at < now()") == 0
    with before.begin() as connection:
        # The planted row may be of this minute, whose gauges are written once.
        assert write_gauges(connection, "outboxq") > 0 or table == "gauge"
    rolls_up = True
    while rolls_up:
        with before.begin() as connection:
            rolls_up = roll_up_one_hour(connection, "outboxq")
    with before.begin() as connection:
        prune(connection, "outboxq")
    assert count(before, "stat WHERE grain = 3600 AND kind = 'well' AND done = 7") == 1


def count(engine: Engine, rows: str) -> int:
    with engine.begin() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM outboxq.{rows}")).scalar_one())
