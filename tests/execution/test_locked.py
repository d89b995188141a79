"""`Locked[Account]`: rows that are locked before a handler runs, in one order for a whole batch."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, text
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from outboxq import AsyncContext, Backoff, BatchContext, BatchItem, Context, Jobs, Locked, OutboxSession
from outboxq.errors import RegistryError
from outboxq.events import BatchRolledBack, Event, JobDied, JobDone, JobRetried
from outboxq.execution.shared_batch import _SharedRun
from tests.support.app import Account, Base
from tests.support.ledger import balances
from tests.support.shared_app import statements
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]


class Animal(Base):
    """A row of a hierarchy in joined tables."""

    __tablename__ = "animal"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column()
    age: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_on": kind, "polymorphic_identity": "animal"}  # noqa: RUF012  # SQLAlchemy's way


@pytest.fixture(autouse=True)
def _accounts(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all(Account(id=id_) for id_ in range(1, 31))


def locked_jobs(sort: str) -> tuple[Jobs, object]:
    """A handler that reads, adds and writes back, in each way of running."""
    jobs = Jobs()
    if sort == "batch handler":

        @dataclass
        class Credit:
            account: Locked[Account]

        @jobs.batch_handler(Credit, queue="locked")
        def credit_all(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> None:
            for item in items:
                item.args.account.balance += 1

        return jobs, credit_all
    if sort == "async":

        @jobs.handler(queue="locked", batchable=True)
        async def credit_async(ctx: AsyncContext, account: Locked[Account]) -> None:
            account.balance += 1

        return jobs, credit_async

    @jobs.handler(queue="locked", batchable=sort == "shared", claim="lease" if sort == "lease" else "transaction")
    def credit(ctx: Context, account: Locked[Account]) -> None:
        account.balance += 1

    return jobs, credit


SORTS = pytest.mark.parametrize("sort", ["shared", "async", "batch handler", "savepoints", "lease"])


@pytest.mark.first_and_last
@SORTS
@pytest.mark.parametrize("batch_size", [1, 20])
def test_no_update_of_two_relays_is_lost(
    batch_size: int, sort: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Reading, adding and writing back counts each time, and no two batches wait for each other in a circle."""
    jobs, credit = locked_jobs(sort)
    with sessions.begin() as session:
        rows = {number: session.get_one(Account, number) for number in (3, 1, 2)}
        session.add_jobs(credit.job(account=rows[number]) for number in (3, 1, 2, 2, 1, 3) * 20)  # type: ignore[attr-defined]
    events = drain(jobs, slots_per_queue=3, batch_size=batch_size)
    assert balances(engine) == {1: 40, 2: 40, 3: 40}
    assert not [each for each in events if isinstance(each, BatchRolledBack | JobDied | JobRetried)]


@pytest.mark.first_and_last
@pytest.mark.parametrize("sort", ["shared", "async", "batch handler", "savepoints"])
def test_the_rows_of_a_batch_are_locked_in_the_order_of_their_keys(
    sort: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A batch that waits for its first row has locked none of the others: one statement, in one order."""
    jobs, credit = locked_jobs(sort)
    with sessions.begin() as session:
        session.add_jobs(credit.job(account=session.get_one(Account, number)) for number in (9, 5, 7))  # type: ignore[attr-defined]
    done: list[Event] = []
    relay = threading.Thread(target=lambda: done.extend(drain(jobs, slots_per_queue=1, batch_size=10)))
    with engine.connect() as other:
        other.execute(text("SELECT FROM account WHERE id = 5 FOR UPDATE"))
        relay.start()
        with engine.connect() as looking:
            looking = looking.execution_options(isolation_level="AUTOCOMMIT")
            waiting = text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            wait_until(lambda: looking.execute(waiting).scalar_one() == 1, "a batch that waits for a row")
            # NOWAIT would be refused for a row that the batch has.
            looking.execute(text("SELECT FROM account WHERE id IN (7, 9) FOR UPDATE NOWAIT"))
        other.rollback()
    relay.join()
    assert sum(isinstance(each, JobDone) for each in done) == 3
    assert balances(engine) == {5: 1, 7: 1, 9: 1}


def test_a_batch_is_locked_and_loaded_by_one_statement_and_written_by_one(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """FOR NO KEY UPDATE, which inserts that refer to the rows do not wait for; then one UPDATE over arrays."""
    jobs, credit = locked_jobs("shared")
    with sessions.begin() as session:
        session.add_jobs(credit.job(account=session.get_one(Account, number)) for number in range(1, 21))  # type: ignore[attr-defined]
    with statements() as seen:
        drain(jobs, slots_per_queue=1, batch_size=50)
    sent = [statement for statement, _ in seen if "account" in statement]
    assert len(sent) == 2
    assert sent[0].endswith("ORDER BY account.id FOR NO KEY UPDATE OF account")
    assert sent[1].startswith("UPDATE account SET balance=oq_rows")
    assert balances(engine) == dict.fromkeys(range(1, 21), 1)


def test_what_came_of_a_wait_is_what_the_handler_is_given(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The row as the other transaction has left it, or None if it deleted it."""
    jobs, seen = Jobs(), []

    @jobs.handler(queue="locked", batchable=True)
    def note(ctx: Context, account: Locked[Account | None]) -> None:
        seen.append(account and account.balance)

    with sessions.begin() as session:
        session.add_jobs(note.job(account=session.get_one(Account, number)) for number in (1, 2))
    relay = threading.Thread(target=lambda: drain(jobs, slots_per_queue=1, batch_size=10))
    with engine.connect() as other:
        other.execute(text("UPDATE account SET balance = 7 WHERE id = 1"))
        other.execute(text("DELETE FROM account WHERE id = 2"))
        relay.start()
        with engine.connect() as looking:
            waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            wait_until(lambda: looking.execute(waiting).scalar_one() == 1, "a batch that waits for a row")
        other.commit()
    relay.join()
    assert seen == [7, None]


@pytest.mark.first_and_last
@pytest.mark.parametrize("batch_size", [1, 10])
@pytest.mark.parametrize("annotation", [Account, Locked[Account]])
def test_a_row_that_two_arguments_name_is_missed_if_one_of_them_needs_it(
    annotation: Any, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Also if the other one, which may do without it, comes first."""
    jobs, seen = Jobs(), list[object]()

    def look(ctx: Context, first: Account | None, second: Any) -> None:
        seen.append((first is None, second is None))

    look.__annotations__["second"] = annotation
    kind = jobs.handler(queue="locked", batchable=True, retry=Backoff(max_attempts=1))(look)
    with sessions.begin() as session:
        for account in [session.get_one(Account, number) for number in (1, 2, 3)]:
            session.add_job(kind, first=account, second=account)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM account WHERE id = 3"))
    events = drain(jobs, slots_per_queue=1, batch_size=batch_size)
    assert set(seen) == {(False, False)}
    assert [event.error_type for event in events if isinstance(event, JobDied)] == ["outboxq.errors.EntityGone"]


def test_a_row_that_is_committed_between_two_arguments_is_given_to_the_second(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job alone finds it: each argument is a statement of its own at READ COMMITTED."""
    jobs, seen, load = Jobs(), list[object](), _SharedRun._load_entity

    @jobs.handler(queue="locked", batchable=True)
    def look(ctx: Context, first: Account | None, second: Account) -> None:
        seen.append((first is None, second is None))

    def load_and_commit(run: _SharedRun, *given: Any) -> object:
        found = load(run, *given)
        if found is None:
            with engine.begin() as other:
                other.execute(text("INSERT INTO account (id, balance) VALUES (1, 0)"))
        return found

    with sessions.begin() as session:
        for account in [session.get_one(Account, number) for number in (1, 2)]:
            session.add_job(look, first=account, second=account)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM account WHERE id = 1"))
    monkeypatch.setattr(_SharedRun, "_load_entity", load_and_commit)
    drain(jobs, slots_per_queue=1, batch_size=10)
    assert seen == [(True, False), (False, False)]


def test_after_a_failure_the_locks_of_a_batch_are_taken_anew(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """All in one statement again, before the jobs run one by one."""
    jobs = Jobs()

    @jobs.handler(queue="locked", batchable=True, retry=Backoff(max_attempts=1))
    def credit(ctx: Context, account: Locked[Account], fails: bool) -> None:
        account.balance += 1
        if fails:
            raise ValueError(account.id)

    with sessions.begin() as session:
        for number in (3, 1, 2):
            session.add_job(credit, account=session.get_one(Account, number), fails=number == 1)
    with statements() as seen:
        drain(jobs, slots_per_queue=1, batch_size=10)
    locks = [statement for statement, _ in seen if "FOR NO KEY UPDATE" in statement]
    assert "= ANY (" in locks[1]
    assert "ORDER BY account.id" in locks[1]
    assert balances(engine) == {2: 1, 3: 1}


def test_an_entity_in_joined_tables_is_locked_by_its_first_table(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A class whose rows cannot be loaded ahead is locked ahead all the same."""
    jobs = Jobs()

    @jobs.handler(queue="locked", batchable=True)
    def grow(ctx: Context, animal: Locked[Animal]) -> None:
        animal.age += 1

    with sessions.begin() as session:
        session.add_all(Animal(id=number) for number in (1, 2))
        session.flush()
        session.add_jobs(grow.job(animal=session.get_one(Animal, number)) for number in (2, 1))
    with statements() as seen:
        drain(jobs, slots_per_queue=1, batch_size=10)
    locks = [statement for statement, _ in seen if "FOR NO KEY UPDATE" in statement]
    assert locks[0].startswith("SELECT animal.id FROM animal")
    with Session(engine) as session:
        assert session.scalars(select(Animal.age)).all() == [1, 1]


def test_locked_takes_an_entity() -> None:
    """And says so when the registry is resolved."""
    jobs = Jobs()

    @jobs.handler(queue="locked")
    def count(ctx: Context, number: Locked[int]) -> None: ...

    with pytest.raises(RegistryError, match=r"Locked\[\.\.\.\] takes a mapped class"):
        count.signature()


def test_listeners_of_the_users_are_asked_for_each_row(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Nothing is loaded ahead then; the rows are locked ahead all the same."""
    jobs, credit = locked_jobs("shared")
    asked: list[object] = []
    with sessions.begin() as session:
        session.add_jobs(credit.job(account=session.get_one(Account, number)) for number in (2, 1))  # type: ignore[attr-defined]

    def note(state: object) -> None:
        asked.append(state)

    event.listen(Session, "do_orm_execute", note)
    try:
        with statements() as seen:
            drain(jobs, slots_per_queue=1, batch_size=10)
    finally:
        event.remove(Session, "do_orm_execute", note)
    assert len(asked) >= 2
    assert next(statement for statement, _ in seen if "account" in statement).startswith(
        "SELECT account.id FROM account"
    )
    assert balances(engine) == {1: 1, 2: 1}
