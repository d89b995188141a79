"""Handlers that share batches: well-behaved ones, and every way of getting at the session that others write through."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, event, insert, select, text, update
from sqlalchemy.orm import Mapped, Session, make_transient, mapped_column, object_session
from sqlalchemy.orm.attributes import set_committed_value

from outboxq import AsyncContext, Backoff, Context, Discard, Jobs, Retry
from tests.support.app import Account, Base, Child, Effect

ONCE = Backoff(max_attempts=1)


class Versioned(Base):
    """A row that counts its changes."""

    __tablename__ = "versioned"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  # SQLAlchemy's way


class Pair(Base):
    """A row with a key of two columns."""

    __tablename__ = "pair"
    left: Mapped[int] = mapped_column(primary_key=True)
    right: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


ADD = text("UPDATE account SET balance = balance + :cents WHERE id = :id")
# The same, and everybody can see which table it writes to.
ADD_TO_ROW = (
    update(Account).where(Account.id == bindparam("account")).values(balance=Account.balance + bindparam("cents"))
)


def _nested_rollback(session: Session, account: Account) -> None:
    nested = session.begin_nested()
    account.balance += 1_000
    session.add(Effect(name="never"))
    session.flush()
    nested.rollback()


def _without_autoflush(session: Session, account: Account) -> None:
    session.autoflush = False
    session.scalars(select(Account).execution_options(populate_existing=True)).all()


def _in_thread(session: Session, account: Account) -> None:
    def use() -> None:
        with suppress(Exception):
            session.execute(text("SELECT 1"))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()


def _identity_map(session: Session, account: Account) -> None:
    for state in list(session.identity_map.all_states()):
        session.identity_map.discard(state)
    session.identity_map._modified.clear()


def _forget_new(session: Session, account: Account) -> None:
    for entity in list(session.new):
        make_transient(entity)


def _detach_all(session: Session, account: Account) -> None:
    for entity in [*session.identity_map.values()]:
        make_transient(entity)


def _commit_state(session: Session, account: Account) -> None:
    for entity in list(session.dirty):
        for name in ("balance",):
            if hasattr(entity, name):
                set_committed_value(entity, name, 0)


def _close_transaction(session: Session, account: Account) -> None:
    session.get_transaction().close()


def _roll_back_transaction(session: Session, account: Account) -> None:
    session.get_transaction().rollback()


def _swallow(session: Session, account: Account) -> None:
    with suppress(Exception):
        session.execute(text("SELECT 1 / 0"))


def _merge_unloaded(session: Session, account: Account) -> None:
    with suppress(Exception):
        session.merge(Account(id=account.id, balance=-5), load=False)


def _delete(session: Session, account: Account) -> None:
    session.delete(account)


# What each does to the session; afterwards, where it is not undone, the handler credits its account as all do.
MISDEEDS: dict[str, Callable[[Session, Account], object]] = {
    "close": lambda session, _: session.close(),
    "reset": lambda session, _: session.reset(),
    "invalidate": lambda session, _: session.invalidate(),
    "rollback": lambda session, _: session.rollback(),
    "commit": lambda session, _: session.commit(),
    "commit-then-rollback": lambda session, _: (session.commit(), session.rollback()),
    "expunge": lambda session, account: session.expunge(account),
    "expunge-all": lambda session, _: session.expunge_all(),
    "expire": lambda session, account: session.expire(account),
    "expire-all": lambda session, _: session.expire_all(),
    "refresh": lambda session, account: session.refresh(account),
    "refresh-others": lambda session, _: [session.refresh(each) for each in session.identity_map.values()],
    "expire-through-entity": lambda _, account: object_session(account).expire_all(),
    "populate-existing": _without_autoflush,
    "query-populate-existing": lambda session, _: session.query(Account).populate_existing().all(),
    "get-populate-existing": lambda session, account: session.get(Account, account.id, populate_existing=True),
    "select-for-update": lambda session, _: session.scalars(select(Account).with_for_update()).all(),
    "connection-commit": lambda session, _: session.connection().commit(),
    "connection-rollback": lambda session, _: session.connection().rollback(),
    "savepoint-commit": lambda session, _: session.connection().get_nested_transaction().commit(),
    "driver-rollback": lambda session, _: session.connection().connection.rollback(),
    "nested-rollback": _nested_rollback,
    "nested-left-open": lambda session, _: session.begin_nested(),
    "close-transaction": _close_transaction,
    "roll-back-transaction": _roll_back_transaction,
    "delete": _delete,
    "merge": lambda session, account: session.merge(Account(id=account.id, balance=account.balance)),
    "merge-unloaded": _merge_unloaded,
    "bulk-update": lambda session, account: session.bulk_update_mappings(Account, [{"id": account.id, "balance": 7}]),
    "bulk-save": lambda session, _: session.bulk_save_objects([Effect(name="bulk")]),
    "flush-some": lambda session, account: session.flush([account]),
    "swallow": _swallow,
    "set-local": lambda session, _: session.execute(text("SET LOCAL work_mem = '5MB'")),
    "autoflush-off": lambda session, _: setattr(session, "autoflush", False),
    "info": lambda session, _: session.info.clear(),
    "identity-map": _identity_map,
    "forget-new": _forget_new,
    "detach-all": _detach_all,
    "commit-state": _commit_state,
    "thread": _in_thread,
}


# How a handler adds to the balance of its account.
CREDITS: dict[str, Callable[[Context[Any], Account, int], object]] = {
    "attribute": lambda _, account, cents: setattr(account, "balance", account.balance + cents),
    "expression": lambda _, account, cents: setattr(account, "balance", Account.balance + cents),
    "text": lambda ctx, account, cents: ctx.session.execute(ADD, {"id": account.id, "cents": cents}),
    "update": lambda ctx, account, cents: ctx.session.execute(
        update(Account).where(Account.id == account.id).values(balance=Account.balance + cents)
    ),
    "connection": lambda ctx, account, cents: ctx.session.connection().execute(ADD, {"id": account.id, "cents": cents}),
    "bind": lambda ctx, account, cents: ctx.session.get_bind().execute(ADD, {"id": account.id, "cents": cents}),
    "driver": lambda ctx, account, cents: (
        ctx.session.connection()
        .connection.cursor()
        .execute("UPDATE account SET balance = balance + %s WHERE id = %s", (cents, account.id))
    ),
    "defer": lambda ctx, account, cents: ctx.defer(ADD, {"id": account.id, "cents": cents}),
    "defer-absolute": lambda ctx, account, cents: ctx.defer(
        text("UPDATE account SET balance = :balance WHERE id = :id"),
        {"id": account.id, "balance": account.balance + cents},
    ),
    "get": lambda ctx, account, cents: setattr(
        ctx.session.get(Account, account.id), "balance", Account.balance + cents
    ),
    "query": lambda ctx, account, cents: setattr(
        ctx.session.scalars(select(Account).where(Account.id == account.id)).one(), "balance", account.balance + cents
    ),
}
ENDS = ("done", "raise", "retry", "discard", "integrity", "orphan", "defer-bad")


def work(ctx: Context[Any], session: Session, name: str, account: Account, how: str, misdeed: str, end: str) -> object:
    """Write a row, do something bad, credit the account by one, and end as told."""
    if misdeed:
        with suppress(Exception):
            MISDEEDS[misdeed](session, account)
    session.add(Effect(name=name))
    CREDITS[how](ctx, account, 1)
    match end:
        case "raise":
            raise ValueError(name)
        case "retry":
            return Retry()
        case "discard":
            return Discard("not needed")
        case "integrity":
            session.add(Account(id=1))
        case "orphan":
            session.add(Child(parent_id=-1))
        case "defer-bad":
            ctx.defer(insert(Child.__table__), {"parent_id": -1})
        case _:
            return None
    return None


jobs = Jobs()


@jobs.handler(queue="shared", retry=ONCE, batchable=True)
def act(
    ctx: Context, name: str, account: Account, how: str = "attribute", misdeed: str = "", end: str = "done"
):  # it returns all sorts
    return work(ctx, ctx.session, name, account, how, misdeed, end)


@jobs.handler(queue="shared-async", retry=ONCE, batchable=True)
async def act_async(
    ctx: AsyncContext, name: str, account: Account, how: str = "attribute", misdeed: str = "", end: str = "done"
):
    # Inside run_sync the session is the same one, and what it may await is awaited.
    sync = Context(ctx.job, ctx.state, ctx.session.sync_session)  # type: ignore[arg-type]
    result = await ctx.session.run_sync(lambda session: work(sync, session, name, account, how, misdeed, end))
    await asyncio.sleep(0)
    return result


@contextmanager
def statements(engine_class: type[Engine] = Engine) -> Iterator[list[tuple[str, int]]]:
    """What SQLAlchemy sends within the block: each text, and how many sets of parameters it had."""
    seen: list[tuple[str, int]] = []

    def note(_connection: Connection, _cursor: object, statement: str, parameters: Any, _context: object, many: bool):
        seen.append((" ".join(statement.split()), len(parameters) if many else 1))

    event.listen(engine_class, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine_class, "before_cursor_execute", note)
