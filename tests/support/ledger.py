"""What became of the jobs: the ledger of `tests/support/app.py`, and what still waits."""

from collections import Counter
from collections.abc import Iterable

from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import OutboxSession
from tests.support import app
from tests.support.app import Effect


def enqueue(engine: Engine, names: Iterable[str], *, both_flavours: bool = True) -> list[str]:
    """Commit one job for each name, sync and async in turn."""
    kinds = (app.record, app.record_async) if both_flavours else (app.record,)
    listed = list(names)
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        for number, name in enumerate(listed):
            session.add_job(kinds[number % len(kinds)], name=name)
    return listed


def ledger(engine: Engine) -> Counter[str]:
    """How often each effect stands."""
    with Session(engine) as session:
        return Counter(session.scalars(select(Effect.name)))


def effects(engine: Engine) -> list[str]:
    """The names of all effects, sorted."""
    with Session(engine) as session:
        return sorted(session.scalars(select(Effect.name)))


def rows(engine: Engine, query: str) -> list[tuple[object, ...]]:
    """What a query finds."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query))]


def waiting(engine: Engine) -> int:
    """Jobs in the queue."""
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one()


def dead(engine: Engine) -> int:
    """Dead letters."""
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM outboxq.dead_job")).scalar_one()
