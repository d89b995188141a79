"""What became of the jobs: the ledger of `tests/support/app.py`, and what still waits."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import OutboxSession
from outboxq.events import Event
from tests.support import app
from tests.support.app import Account, Effect

EventKind = TypeVar("EventKind", bound=Event)


def enqueue(engine: Engine, names: Iterable[str], *, both_flavours: bool = True) -> list[str]:
    """Commit one job for each name, sync and async in turn."""
    kinds = (app.record, app.record_async) if both_flavours else (app.record,)
    listed = list(names)
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        for number, name in enumerate(listed):
            session.add_job(kinds[number % len(kinds)], name=name)
    return listed


def of(events: Iterable[Event], kind: type[EventKind]) -> list[EventKind]:
    """The events of a kind; a relay may go on adding to them."""
    return [event for event in list(events) if isinstance(event, kind)]


def ledger(engine: Engine) -> Counter[str]:
    """How often each effect stands."""
    with Session(engine) as session:
        return Counter(session.scalars(select(Effect.name)))


def effects(engine: Engine) -> list[str]:
    """The names of all effects, sorted."""
    with Session(engine) as session:
        return sorted(session.scalars(select(Effect.name)))


def balances(engine: Engine) -> dict[int, int]:
    """The accounts that are not at zero."""
    with Session(engine) as session:
        return {id_: balance for id_, balance in session.execute(select(Account.id, Account.balance)) if balance}


def rows(engine: Engine, query: str) -> list[tuple[object, ...]]:
    """What a query finds."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query))]


def waiting(engine: Engine) -> int:
    """Jobs in the queue."""
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one()


def dead_reasons(engine: Engine) -> list[tuple[object, ...]]:
    """The kind of each dead letter, and why it gave up."""
    return rows(engine, "SELECT kind, reason FROM outboxq.dead_job")


def dead(engine: Engine) -> int:
    """Dead letters."""
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM outboxq.dead_job")).scalar_one()


def leave_marks(engine: Engine) -> None:
    """Leave in all rows the marks of a claim that died."""
    with engine.connect() as connection:
        pid = connection.execute(text("SELECT pg_backend_pid() FROM outboxq.job FOR UPDATE")).scalars().first()
        with engine.begin() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
        connection.invalidate()
