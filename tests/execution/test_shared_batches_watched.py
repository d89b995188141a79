"""What watches a handler reads every statement, and no defect of it reaches the handler."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import psycopg
import pytest
from sqlalchemy import Engine, bindparam, delete, func, insert, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.types import Integer, TypeDecorator

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession
from outboxq.database import defects, sql_text
from outboxq.events import Event, JobDone
from outboxq.execution import shared_batch
from outboxq.execution.write_buffer import WriteBuffer
from outboxq.handlers import deferred, unlocked
from outboxq.handlers.row_writes import Catalog
from outboxq.handlers.unlocked import UnlockedChanges
from tests.support.app import Account, Effect
from tests.support.ledger import rows
from tests.support.matrices import diagonal

Drain = Callable[..., list[Event]]
ONCE = Backoff(max_attempts=1)
NUMBERS = range(1, 5)
# Among the runs: those in which the handler met an error.
CAUGHT = 0
ACCOUNTS: Any = Account.__table__
_UPSERT = postgresql.insert(Account).values(id=bindparam("which"), balance=5)
_ABOVE = bindparam("which", type_=Integer) + 10


def _cte(verb: Any) -> Any:
    return verb.returning(ACCOUNTS.c.id).cte("changed")


# Each changes the rows of one account, or adds one.
STATEMENTS: dict[str, Any] = {
    "upsert": _UPSERT.on_conflict_do_update(index_elements=["id"], set_={"balance": 5}),
    "upsert-where": _UPSERT.on_conflict_do_update(
        index_elements=[Account.id], set_={"balance": _UPSERT.excluded.balance}, where=Account.balance == 0
    ),
    "upsert-nothing": _UPSERT.on_conflict_do_nothing(),
    "from-select": insert(ACCOUNTS).from_select(
        ["id", "balance"], select(_ABOVE, ACCOUNTS.c.balance + 5).where(ACCOUNTS.c.id == bindparam("which"))
    ),
    "several-values": insert(ACCOUNTS).values([{"id": _ABOVE, "balance": 5}, {"id": _ABOVE + 10, "balance": 5}]),
    "returning": insert(Account).values(id=_ABOVE, balance=5).returning(Account.id),
    "update-returning": update(Account).where(Account.id == bindparam("which")).values(balance=5).returning(Account),
    "update-from": update(Account)
    .where(Account.id == select(ACCOUNTS.alias("other").c.id).where(text("other.id = :which")).scalar_subquery())
    .values(balance=5),
    "cte": select(_cte(update(ACCOUNTS).where(ACCOUNTS.c.id == bindparam("which")).values(balance=5)).c.id),
    "added-cte": update(ACCOUNTS)
    .where(ACCOUNTS.c.id == bindparam("which"))
    .values(balance=5)
    .add_cte(_cte(delete(ACCOUNTS).where(ACCOUNTS.c.id == bindparam("which", type_=Integer) + 90))),
    "text": text("INSERT INTO account (id, balance) VALUES (:which + 10, 5)"),
}
_TEXT = "UPDATE account SET balance = 5 WHERE id = "
DRIVEN: dict[str, Callable[[int], Any]] = {
    "str": lambda which: f"{_TEXT}{which}",
    "bytes": lambda which: f"{_TEXT}{which}".encode(),
    "sql": lambda which: psycopg.sql.SQL(_TEXT) + psycopg.sql.Literal(which),
}


@pytest.fixture(autouse=True)
def _accounts(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add_all(Account(id=number) for number in [*NUMBERS, *(number + 90 for number in NUMBERS)])


@pytest.fixture
def runs() -> Counter[int]:
    """How often the handler of each job was called."""
    return Counter()


def handler_of(flavour: str, act: Callable[[Any, Any, int], object], runs: Counter[int]) -> tuple[Jobs, Any]:
    """A batchable handler that catches all errors, as some do, and then says so."""
    jobs = Jobs()

    def caught(ctx: Any, session: Any, which: int) -> None:
        runs[which] += 1
        try:
            act(ctx, session, which)
        except Exception as error:  # noqa: BLE001  # as some handlers do
            runs[CAUGHT] += 1
            session.add(Effect(name=f"caught {type(error).__name__}"))

    if flavour == "sync":

        @jobs.handler(queue="q", batchable=True, retry=ONCE)
        def work(ctx: Context, which: int) -> None:
            caught(ctx, ctx.session, which)
    else:

        @jobs.handler(queue="q", batchable=True, retry=ONCE)
        async def work(ctx: AsyncContext, which: int) -> None:
            await ctx.session.run_sync(lambda session: caught(ctx, session, which))

    return jobs, work


def run(
    drain: Drain, sessions: sessionmaker[OutboxSession], made: tuple[Jobs, Any], batch_size: int = 10
) -> list[Event]:
    jobs, work = made
    with sessions.begin() as session:
        session.add_jobs(work.job(which=number) for number in NUMBERS)
    events = drain(jobs, batch_size=batch_size)
    assert sum(isinstance(event, JobDone) for event in events) == len(NUMBERS)
    return events


def found(engine: Engine) -> dict[int, int]:
    assert rows(engine, "SELECT name FROM effect_ledger") == []
    return dict(rows(engine, "SELECT id, balance FROM account"))


def expected(name: str) -> dict[int, int]:
    was = dict.fromkeys((number + 90 for number in NUMBERS), 0)
    if name == "upsert-nothing":
        return was | dict.fromkeys(NUMBERS, 0)
    if name in ("from-select", "returning", "text", "several-values"):
        more = (10, 20) if name == "several-values" else (10,)
        return was | dict.fromkeys(NUMBERS, 0) | {number + by: 5 for number in NUMBERS for by in more}
    return dict.fromkeys(NUMBERS, 5) | ({} if name == "added-cte" else was)


@pytest.mark.first_and_last
@diagonal(pytest.mark.parametrize("name", STATEMENTS), pytest.mark.parametrize("flavour", ["sync", "async"]))
def test_every_statement_is_sent_and_leaves_the_batch_shared(
    name: str, flavour: str, runs: Counter[int], engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """SQL expressions have no truth value: what reads the parts of a statement asks for none."""
    act = lambda _ctx, session, which: session.execute(STATEMENTS[name], {"which": which})  # noqa: E731
    run(drain, sessions, handler_of(flavour, act, runs))
    assert found(engine) == expected(name)
    assert runs == dict.fromkeys(NUMBERS, 1)


@pytest.mark.first_and_last
@pytest.mark.parametrize("batch_size", [1, 10])
@pytest.mark.parametrize("form", DRIVEN)
def test_what_the_driver_takes_beside_texts_is_sent(
    form: str, batch_size: int, runs: Counter[int], engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """`exec_driver_sql` hands on bytes, and the driver's own SQL objects."""

    def act(_ctx: Context, session: Session, which: int) -> None:
        assert session.connection().exec_driver_sql(DRIVEN[form](which)).rowcount == 1

    run(drain, sessions, handler_of("sync", act, runs), batch_size)
    assert found(engine) == expected("update-returning")
    assert runs == dict.fromkeys(NUMBERS, 1)


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", ["upsert", "upsert-where", "from-select", "several-values", "added-cte"])
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_every_statement_can_be_deferred(
    name: str,
    flavour: str,
    runs: Counter[int],
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that does more than write plain values into one table does not wait, and the log says so once."""
    deferred.is_fixed.cache_clear()
    with caplog.at_level(logging.DEBUG, "outboxq.relay"):
        act = lambda ctx, _session, which: ctx.defer(STATEMENTS[name], {"which": which})  # noqa: E731
        run(drain, sessions, handler_of(flavour, act, runs))
    assert found(engine) == expected(name)
    assert runs == dict.fromkeys(NUMBERS, 1)
    told = [record.getMessage() for record in caplog.records if "does not wait" in record.getMessage()]
    # SQLAlchemy 2.0 does not show the values of an upsert.
    may_wait = name.startswith("upsert") and STATEMENTS[name]._generate_cache_key() is not None
    assert len(told) == (0 if may_wait else 1)


def test_a_type_that_computes_values_computes_them_within_its_own_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Also that of a text's parameter: it may go by what its job has set."""
    running: list[int] = []

    class Running(TypeDecorator[int]):
        impl = Integer
        cache_ok = True

        def process_bind_param(self, value: Any, dialect: object) -> int:
            return running[-1] + value

    put = text("UPDATE account SET balance = :value WHERE id = :which").bindparams(bindparam("value", type_=Running))
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def work(ctx: Context, which: int) -> None:
        running.append(which)
        ctx.defer(put, {"which": which, "value": 0})

    run(drain, sessions, (jobs, work))
    assert found(engine) == {number: number if number in NUMBERS else 0 for number in found(engine)}


# Called with anything, it raises a TypeError, and no code of a user's is called in between.
# A static method, as a class would give a partial its instance one day.
_DEFECT = staticmethod(partial(bool, func.now()))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The defects that were logged."""
    defects._log.cache_clear()
    yield lambda: [record.getMessage() for record in caplog.records if "defect of outboxq" in record.getMessage()]
    defects._log.cache_clear()


def _by_statement(ctx: Any, session: Session, which: int) -> None:
    session.execute(STATEMENTS["update-returning"], {"which": which})


def _by_entity(ctx: Any, session: Session, which: int) -> None:
    account = session.get_one(Account, which)
    # As the relay does it with an entity argument.
    session.watch(UnlockedChanges("work", _by_entity), [account])  # type: ignore[attr-defined]
    account.balance += 5


def _by_defer(ctx: Any, session: Session, which: int) -> None:
    ctx.defer(update(Account).where(Account.id == bindparam("which")).values(balance=5), {"which": which})
    if which == NUMBERS[-1]:
        session.scalar(select(func.count()))


# A defect in each thing that watches, and what meets it.
PLANTED: dict[str, tuple[object, str, Callable[[Any, Session, int], None]]] = {
    "what a statement writes": (shared_batch, "row_writes", _by_statement),
    "what may end the transaction": (shared_batch, "may_end_transaction", _by_statement),
    "the verb": (sql_text, "refused_verb", _by_statement),
    "what is left": (sql_text, "left_by", _by_statement),
    "what waits": (WriteBuffer, "send", _by_defer),
    "the catalogs": (Catalog, "facts", _by_entity),
    "deferrable constraints": (Catalog, "has_deferrable", _by_statement),
    "what was deferred": (deferred, "may_wait", _by_defer),
    "what changed": (shared_batch, "row_changes", _by_entity),
    "unlocked changes": (unlocked, "_changed", _by_entity),
}


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize("name", PLANTED),
    pytest.mark.parametrize("flavour", ["sync", "async"]),
    pytest.mark.parametrize("batch_size", [10, 1]),
)
def test_a_defect_of_what_watches_is_logged_once_and_no_handler_meets_it(
    name: str,
    flavour: str,
    batch_size: int,
    told: Callable[[], list[str]],
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
) -> None:
    """Each job is done with its rows, by itself if it has to be; handlers that catch everything catch nothing."""
    module, function, act = PLANTED[name]
    runs: Counter[int] = Counter()
    # As in a process that has read no statement yet.
    with mock.patch.dict(sql_text.readings, clear=True), mock.patch.object(module, function, _DEFECT):
        run(drain, sessions, handler_of(flavour, act, runs), batch_size)
    assert found(engine) == expected("update-returning")
    assert runs[CAUGHT] == 0
    if batch_size > 1 or name in ("the verb", "what is left"):
        assert len(told()) == 1
        assert "error_type=TypeError where=outboxq." in told()[0]
