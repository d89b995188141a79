"""A handler that changes an entity from a value that it read, without a lock, is named in the log: once for a kind."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import JSON, Engine, select
from sqlalchemy.ext.mutable import MutableDict
from sqlalchemy.orm import Mapped, mapped_column, sessionmaker

from outboxq import AsyncContext, BatchContext, BatchItem, Context, Jobs, Locked, OutboxSession
from outboxq.events import Event, JobDone
from tests.support.app import Account, Base
from tests.support.together import together

Drain = Callable[..., list[Event]]
Change = Callable[[Any], None]


class Note(Base):
    __tablename__ = "unlocked_note"
    id: Mapped[int] = mapped_column(primary_key=True)
    marks: Mapped[dict[str, int]] = mapped_column(MutableDict.as_mutable(JSON), default=dict)
    length: Mapped[int] = mapped_column(default=0, deferred=True)


class Versioned(Base):
    __tablename__ = "unlocked_versioned"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  # SQLAlchemy's way


@pytest.fixture(autouse=True)
def _rows(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    Base.metadata.create_all(engine)
    with sessions.begin() as session:
        session.add_all((Account(id=1), Account(id=2), Note(id=1), Versioned(id=1)))


def handlers(sort: str, act: Callable[[Any, Any], object], annotation: Any) -> tuple[Jobs, Any]:
    """A handler with one entity, `act` by name, in each way of running."""
    jobs = Jobs()
    if sort == "batch handler":

        @dataclass
        class Row:
            row: annotation

        @jobs.batch_handler(Row, kind="act")
        def act_all(ctx: BatchContext, items: Sequence[BatchItem[Row]]) -> None:
            for item in items:
                act(ctx.session, item.args.row)

        return jobs, act_all
    if sort == "async":

        @jobs.handler(kind="act")
        async def act_async(ctx: AsyncContext, row: annotation) -> None:
            act(ctx.session, row)

        return jobs, act_async

    @jobs.handler(kind="act", batchable=sort == "shared", claim="lease" if sort == "lease" else "transaction")
    def act_alone(ctx: Context, row: annotation) -> None:
        act(ctx.session, row)

    return jobs, act_alone


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    return [
        (record.outboxq_kind, record.outboxq_entity, record.outboxq_attributes)
        for record in caplog.records
        if "row it has not locked" in record.getMessage()
    ]


def run(
    drain: Drain, sessions: sessionmaker[OutboxSession], made: tuple[Jobs, Any], entity: Any, count: int = 3
) -> None:
    jobs, kind = made
    with sessions.begin() as session:
        for number in range(count):
            session.add_job(kind, row=session.get_one(entity, number % 2 + 1 if entity is Account else 1))
    events = drain(jobs, **together(jobs.resolve().find("act").claim, 20))
    assert sum(isinstance(event, JobDone) for event in events) == count


def add(_: Any, account: Account) -> None:
    account.balance += 4711


@pytest.mark.first_and_last
@pytest.mark.parametrize("sort", ["alone", "async", "shared", "batch handler", "lease"])
def test_a_handler_that_adds_in_python_without_a_lock_is_named_once(
    sort: str, sessions: sessionmaker[OutboxSession], drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """Kind, class and attribute are said once for a kind, whatever way its jobs run; values never."""
    run(drain, sessions, handlers(sort, add, Account), Account)
    assert said(caplog) == [("act", "Account", "balance")]
    assert "Locked[Account]" in caplog.text
    assert "4711" not in caplog.text


@pytest.mark.first_and_last
@pytest.mark.parametrize("sort", ["alone", "async", "shared", "batch handler", "lease"])
def test_a_locked_entity_may_be_changed(
    sort: str, sessions: sessionmaker[OutboxSession], drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """With `Locked[Account]` there is nothing to say."""
    run(drain, sessions, handlers(sort, add, Locked[Account]), Account)
    assert said(caplog) == []


def by_expression(_: Any, account: Any) -> None:
    account.balance = Account.balance + 1


def the_same(_: Any, account: Account) -> None:
    account.balance = account.balance + 0


def after_refresh(session: Any, account: Account) -> None:
    session.refresh(account, with_for_update={"key_share": True})
    account.balance += 1


def after_select(session: Any, account: Account) -> None:
    session.scalars(select(Account).where(Account.id == account.id).with_for_update(), execution_options=POPULATE).one()
    account.balance += 1


POPULATE = {"populate_existing": True}


@pytest.mark.first_and_last
@pytest.mark.parametrize("act", [by_expression, the_same, after_refresh, after_select])
@pytest.mark.parametrize("sort", ["alone", "shared"])
def test_what_loses_no_update_is_not_named(
    sort: str,
    act: Callable[[Any, Any], object],
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An SQL expression, an equal value, and a handler that locks by itself are let be."""
    run(drain, sessions, handlers(sort, act, Account), Account)
    assert said(caplog) == []


def flushed(session: Any, account: Account) -> None:
    account.balance += 1
    session.flush()


def read_after(session: Any, account: Account) -> None:
    account.balance += 1
    session.scalars(select(Account.id)).all()


def in_savepoint(session: Any, account: Account) -> None:
    with session.begin_nested():
        account.balance += 1


@pytest.mark.first_and_last
@pytest.mark.parametrize("act", [flushed, read_after, in_savepoint])
@pytest.mark.parametrize("sort", ["alone", "shared"])
def test_a_change_is_seen_though_it_was_flushed_before_the_end(
    sort: str,
    act: Callable[[Any, Any], object],
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A flush, an autoflush or a savepoint in the handler hides nothing."""
    run(drain, sessions, handlers(sort, act, Account), Account)
    assert said(caplog) == [("act", "Account", "balance")]


def mark(_: Any, note: Note) -> None:
    note.marks["seen"] = len(note.marks) + 1


def set_unread(_: Any, note: Note) -> None:
    note.length = 5


def number(_: Any, row: Versioned) -> None:
    row.number += 1


@pytest.mark.parametrize(
    ("entity", "act", "expected"),
    [(Note, mark, [("act", "Note", "marks")]), (Note, set_unread, []), (Versioned, number, [])],
)
def test_what_was_read_decides(
    entity: Any,
    act: Callable[[Any, Any], object],
    expected: list[tuple[str, str, str]],
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A value changed in place was read; one that was never loaded was not; a version column refuses lost updates."""
    run(drain, sessions, handlers("alone", act, entity), entity, count=1)
    assert said(caplog) == expected


def test_a_value_that_was_not_read_is_not_named(
    sessions: sessionmaker[OutboxSession], drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """An attribute that the handler's own code assigns and never reads is let be; one that it looks at is named."""
    jobs = Jobs()

    @jobs.handler()
    def reset(ctx: Context, row: Account, balance: int) -> None:
        row.balance = balance

    @jobs.handler()
    def reset_once(ctx: Context, row: Account, cents: int) -> None:
        if row.balance != cents:
            row.balance = cents

    @jobs.handler()
    def by_helper(ctx: Context, row: Account) -> None:
        add(ctx, row)

    with sessions.begin() as session:
        account = session.get_one(Account, 1)
        session.add_job(reset, account, 7)
        session.add_job(reset_once, account, 8)
        session.add_job(by_helper, account)
    drain(jobs)
    assert sorted(said(caplog)) == [("by_helper", "Account", "balance"), ("reset_once", "Account", "balance")]


def test_each_kind_is_named_for_itself(
    sessions: sessionmaker[OutboxSession], drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """One kind's warning silences no other's; a row that is locked through another argument is locked."""
    jobs = Jobs()

    @jobs.handler()
    def debit(ctx: Context, row: Account | None) -> None:
        assert row is not None
        row.balance -= 1

    @jobs.handler()
    def credit(ctx: Context, row: Account) -> None:
        row.balance += 1

    @jobs.handler()
    def both(ctx: Context, row: Account, again: Locked[Account]) -> None:
        row.balance += 1

    with sessions.begin() as session:
        account = session.get_one(Account, 1)
        session.add_job(debit, account)
        session.add_job(credit, account)
        session.add_job(both, account, account)
    drain(jobs)
    assert sorted(said(caplog)) == [("credit", "Account", "balance"), ("debit", "Account", "balance")]


def test_the_warning_has_its_level(
    sessions: sessionmaker[OutboxSession], drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a warning: money may be lost."""
    run(drain, sessions, handlers("alone", add, Account), Account, count=1)
    assert [record.levelno for record in caplog.records if "not locked" in record.getMessage()] == [logging.WARNING]
