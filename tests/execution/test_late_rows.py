"""On Citus a job may be seen before the rows of the transaction that added it: a young job waits for its entities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from outboxq import AsyncContext, Backoff, BatchContext, BatchItem, Context, Jobs, OutboxSession
from outboxq.events import Event, JobDied, JobDone, JobSnoozed
from outboxq.postgres import Database
from tests.support.citus import stand_in

Drain = Callable[..., list[Event]]

ONCE = Backoff(max_attempts=1)
MISSING = 2
jobs = Jobs()
given: list[int | None] = []


class LateBase(DeclarativeBase):
    pass


class Order(LateBase):
    __tablename__ = "late_order"
    id: Mapped[int] = mapped_column(primary_key=True)


@dataclass
class Bill:
    order: Order | None


def note(order: Order | None) -> None:
    given.append(None if order is None else order.id)


@jobs.handler(queue="late", retry=ONCE)
def needs(ctx: Context, order: Order) -> None:
    note(order)


@jobs.handler(queue="late", retry=ONCE)
def may_have(ctx: Context, order: Order | None) -> None:
    note(order)


@jobs.handler(queue="leased", claim="lease", retry=ONCE)
def leased(ctx: Context, order: Order | None) -> None:
    note(order)


@jobs.handler(queue="late-async", retry=ONCE)
async def awaits(ctx: AsyncContext, order: Order | None) -> None:
    note(order)


@jobs.handler(queue="late", retry=ONCE, batchable=True)
def shares(ctx: Context, order: Order | None) -> None:
    note(order)


@jobs.batch_handler(Bill, queue="late", retry=ONCE)
def together(ctx: BatchContext, items: Sequence[BatchItem[Bill]]) -> None:
    for item in items:
        note(item.args.order)


EACH = pytest.mark.parametrize("kind", [needs, may_have, leased, awaits, shares, together], ids=lambda kind: kind.kind)


@pytest.fixture(autouse=True)
def orders(engine: Engine) -> None:
    """The table of the entities, and a fresh list of what handlers were given."""
    LateBase.metadata.create_all(engine)
    given.clear()


def add(engine: Engine, kind: Any) -> None:
    """Two jobs of a producer, the row of one of which is not there."""
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        for number in (1, MISSING):
            order = Order(id=number)
            session.add(order)
            session.flush()
            session.add_job(kind, order=order)
    execute(engine, f"DELETE FROM late_order WHERE id = {MISSING}")


def execute(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))


def of(events: list[Event], kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for event in events)


DUE = "UPDATE outboxq.job SET run_at = clock_timestamp()"


@pytest.mark.first_and_last
@EACH
def test_a_young_job_waits_for_its_rows(outboxq_database: Database, engine: Engine, drain: Drain, kind: Any) -> None:
    """It is put off, and no attempt is counted: the only one is for the time when the row is there."""
    stand_in(outboxq_database.url)
    add(engine, kind)
    events = drain(jobs, batch_size=10)
    assert (of(events, JobDone), of(events, JobSnoozed)) == (1, 1)
    assert set(given) == {1}
    given.clear()
    execute(engine, f"INSERT INTO late_order VALUES ({MISSING})")
    execute(engine, DUE)
    assert [type(event) for event in drain(jobs, batch_size=10) if isinstance(event, JobDone | JobDied)] == [JobDone]
    assert given == [MISSING]


@pytest.mark.first_and_last
@EACH
def test_after_ninety_seconds_a_row_is_gone(
    outboxq_database: Database, engine: Engine, drain: Drain, kind: Any
) -> None:
    """By then Citus' recovery has looked: the handler is given None, or the attempt fails."""
    stand_in(outboxq_database.url)
    add(engine, kind)
    execute(engine, "UPDATE outboxq.job SET created_at = created_at - interval '90 s'")
    events = drain(jobs, batch_size=10)
    assert of(events, JobSnoozed) == 0
    assert of(events, JobDied) == int(kind is needs)
    assert (None in given) == (kind is not needs)


def test_a_job_of_a_time_to_come_does_not_wait_for_it(outboxq_database: Database, engine: Engine, drain: Drain) -> None:
    """A producer by SQL may have written any time."""
    stand_in(outboxq_database.url)
    add(engine, may_have)
    execute(engine, "UPDATE outboxq.job SET created_at = created_at + interval '1 day'")
    assert of(drain(jobs), JobSnoozed) == 0
    assert given == [1, None]


@pytest.mark.first_and_last
@EACH
def test_without_citus_no_job_waits(engine: Engine, drain: Drain, kind: Any) -> None:
    """There a job and the rows of its producer are seen at once."""
    add(engine, kind)
    events = drain(jobs, batch_size=10)
    assert of(events, JobSnoozed) == 0
    assert of(events, JobDied) == int(kind is needs)
