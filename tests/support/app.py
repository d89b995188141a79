"""A small application that the tests and their relay processes share."""

import asyncio
import time
from datetime import timedelta
from pathlib import Path

from sqlalchemy import ForeignKey, String, create_engine, event, func, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outboxq import AsyncContext, Backoff, Context, Discard, Jobs, Retry, Snooze
from outboxq import DeadLetter as DeadLetterOutcome
from outboxq.migrations.runner import migrate


class Base(DeclarativeBase):
    pass


class Effect(Base):
    """The ledger: no unique constraint, so that a doubled effect shows."""

    __tablename__ = "effect_ledger"
    row: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String)


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


class Child(Base):
    """A row whose parent is checked only at COMMIT."""

    __tablename__ = "child"
    id: Mapped[int] = mapped_column(primary_key=True)
    parent_id: Mapped[int] = mapped_column(ForeignKey("account.id", deferrable=True, initially="DEFERRED"))


class BrokenError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


jobs = Jobs()
QUICK = Backoff(max_attempts=3, first_seconds=0.0, jitter=0.0)


# The names that `record` was called with in this process, failed and repeated calls included.
calls: list[str] = []


@jobs.handler(queue="ledger", retry=QUICK)
def record(ctx: Context, name: str) -> None:
    calls.append(name)
    ctx.session.add(Effect(name=name))


@jobs.handler(queue="ledger", retry=QUICK)
def record_beside(ctx: Context, name: str) -> None:
    """What a handler must not do: its row is committed on a connection of its own."""
    with ctx.session.connection().engine.begin() as beside:
        beside.execute(text("INSERT INTO effect_ledger (name) VALUES (:name)"), {"name": name})


@jobs.handler(queue="ledger", retry=QUICK)
def record_slowly(ctx: Context, name: str, seconds: float) -> None:
    ctx.session.add(Effect(name=name))
    ctx.session.flush()
    time.sleep(seconds)


@jobs.handler(queue="ledger", retry=QUICK)
def record_at_gate(ctx: Context, name: str, gate: str) -> None:
    """Write the row, and stay until the file `gate` is there."""
    ctx.session.add(Effect(name=name))
    ctx.session.flush()
    while not Path(gate).exists():
        time.sleep(0.02)


@jobs.handler(queue="ledger", retry=QUICK)
def fail(ctx: Context, name: str) -> None:
    ctx.session.add(Effect(name=name))
    ctx.session.flush()
    raise ValueError(f"no luck with {name}")


@jobs.handler(queue="ledger", retry=QUICK)
def orphan(ctx: Context, parent_id: int) -> None:
    ctx.session.add(Child(parent_id=parent_id))


@jobs.handler(queue="ledger", retry=QUICK)
def credit(ctx: Context, account: Account, cents: int) -> None:
    account.balance = Account.balance + cents


@jobs.handler(queue="ledger", retry=QUICK)
def end(ctx: Context, how: str) -> Retry | Snooze | DeadLetterOutcome | Discard | None:
    ctx.session.add(Effect(name=f"end-{how}"))
    ctx.session.flush()
    outcomes: dict[str, Retry | Snooze | DeadLetterOutcome | Discard] = {
        "retry": Retry(timedelta(0)),
        "snooze": Snooze(timedelta(hours=1)),
        "dead": DeadLetterOutcome("cannot be done"),
        "discard": Discard("not needed"),
    }
    return outcomes.get(how)


def _exhausted(*_: object) -> None:
    raise MemoryError


@jobs.handler(queue="ledger", retry=Backoff(max_attempts=1))
def misbehave(ctx: Context, how: str):  # it returns what it should not
    """Write a row, then do what a handler must not do."""
    session = ctx.session
    session.add(Effect(name=how))
    if how == "rollback-unsent":
        session.rollback()
        return
    session.flush()
    match how:
        case "commit":
            session.commit()
        case "commit-then-raise":
            session.commit()
            raise ValueError("after the commit")
        case "rollback":
            session.rollback()
        case "rollback-and-go-on":
            session.rollback()
            session.add(Effect(name=how))
            session.commit()
        case "rollback-and-write-around":
            connection = session.connection()
            session.rollback()
            connection.connection.cursor().execute("INSERT INTO effect_ledger (name) VALUES ('around')")
            raise ValueError(how)
        case "rollback-out-of-memory":
            event.listen(session.connection().engine, "rollback_savepoint", _exhausted, once=True)
            session.rollback()
        case "raw-commit":
            session.execute(text("/* sneaky */ COMMIT"))
        case "raw-rollback":
            session.execute(text("rollback"))
        case "connection-commit":
            session.connection().commit()
        case "savepoint-commit":
            session.connection().get_nested_transaction().commit()
        case "savepoint-commit-and-raise":
            session.connection().get_nested_transaction().commit()
            raise ValueError(how)
        case "driver-commit":
            session.connection().connection.commit()
        case "driver-commit-and-go-on":
            session.connection().connection.commit()
            session.add(Effect(name=how))
        case "driver-forges-savepoint":
            # As if nothing had happened: only the savepoint with the random name is missing.
            name = session.connection().get_nested_transaction()._savepoint
            with session.connection().connection.cursor() as cursor:
                cursor.execute(f"COMMIT; BEGIN; SAVEPOINT {name}")
        case "driver-forges-savepoint-and-raises":
            name = session.connection().get_nested_transaction()._savepoint
            with session.connection().connection.cursor() as cursor:
                cursor.execute(f"COMMIT; BEGIN; SAVEPOINT {name}")
            raise ValueError(how)
        case "savepoint-open-then-driver-commit-and-raise":
            session.begin_nested()
            session.connection().connection.commit()
            raise ValueError(how)
        case "driver-rollback":
            session.connection().connection.rollback()
        case "swallow":
            try:
                session.execute(text("SELECT 1 / 0"))
            except Exception:  # noqa: BLE001  # what the handler should not do
                return
        case "swallow-integrity-error":
            try:
                session.add(Effect(row=session.scalars(select(func.max(Effect.row))).one(), name=how))
                session.flush()
            except Exception:  # noqa: BLE001  # what the handler should not do
                return
        case "open-savepoint":
            session.begin_nested()
            session.add(Effect(name=how))
        case "raise-cancelled":
            raise asyncio.CancelledError
        case "raise-no-such-day":
            raise ValueError("2023-02-30T10:00:00")
        case "raise-in-str":
            raise BrokenError
        case "exit":
            raise SystemExit(3)
        case _:
            raise AssertionError(how)
    return


@jobs.handler(queue="ledger-async", retry=QUICK)
async def record_async(ctx: AsyncContext, name: str, seconds: float = 0.0) -> None:
    ctx.session.add(Effect(name=name))
    await ctx.session.flush()
    await asyncio.sleep(seconds)


def prepare(url: str) -> None:
    """Install outboxq's tables and the application's own."""
    engine = create_engine(url)
    with engine.begin() as connection:
        migrate(connection)
        Base.metadata.create_all(connection)
    engine.dispose()
