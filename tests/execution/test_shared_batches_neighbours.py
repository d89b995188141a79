"""Well-behaved and other neighbours in a shared batch: each finds the database as if the others had run before it."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, func, insert, select, text, update
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, sessionmaker

import outboxq.execution.batch_call as batch_call
import outboxq.execution.shared_batch as shared_batch
from outboxq import (
    AsyncContext,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    Jobs,
    OutboxSession,
    Relay,
    RelayConfig,
    add_job,
    external,
)
from outboxq.events import BatchRolledBack, JobDied, JobDone
from outboxq.execution.attempt import SharedSavepoint
from outboxq.postgres import Database
from tests.support.app import Account, Child, Effect
from tests.support.ledger import ledger, waiting
from tests.support.shared_app import ADD, ADD_TO_ROW, statements

ONCE = Backoff(max_attempts=1)


@pytest.fixture(autouse=True)
def accounts(sessions: sessionmaker[OutboxSession]) -> None:
    with sessions.begin() as session:
        session.add_all(Account(id=number, balance=0) for number in range(1, 11))


def balance(engine: Engine, number: int) -> int | None:
    with Session(engine) as session:
        return session.scalar(select(Account.balance).where(Account.id == number))


@pytest.mark.first_and_last
@pytest.mark.parametrize(("claim", "batchable"), [("transaction", True), ("transaction", False), ("lease", False)])
@pytest.mark.parametrize("is_opened", [True, False])
def test_a_task_that_is_left_behind_has_no_session(
    is_opened: bool, claim: Any, batchable: bool, engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """It runs before what the handler left is flushed, and would do so beside it: refused, and its job is done."""
    jobs, errors = Jobs(), []

    @jobs.handler(queue="q", claim=claim, batchable=batchable, retry=ONCE)
    async def leave(ctx: AsyncContext, name: str) -> None:
        if is_opened:
            ctx.session.add(Effect(name=name))

        async def late() -> None:
            try:
                await ctx.session.execute(text("SELECT 1"))
            except InvalidRequestError as error:
                errors.append(str(error))

        asyncio.get_running_loop().create_task(late())

    with sessions.begin() as session:
        session.add_jobs(leave.job(name=name) for name in "ab")
    drain_fifty(jobs)
    assert ledger(engine) == Counter("ab" if is_opened else "")
    assert waiting(engine) == 0
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.dead_job")).scalar_one() == 0
    assert [error.partition(":")[0] for error in errors] == ["the handler of this session has ended"] * 2


def test_a_script_that_commits_costs_the_others_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Sent through the session, it is seen before the next job runs."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def act(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        if name == "bad":
            ctx.session.execute(text("UPDATE account SET balance = 1 WHERE id = 1; COMMIT"))
            ctx.session.execute(text("SELECT 1"))

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in ("a", "bad", "c", "d"))
    drain_fifty(jobs)
    done = ledger(engine)
    del done["bad"]
    assert done == Counter("acd")


def test_a_batch_handler_that_commits_is_not_called_again_for_any_of_its_jobs(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """All of them were in the call, and nobody knows which of their rows stand."""
    jobs = Jobs()

    @dataclass
    class Named:
        name: str

    @jobs.batch_handler(Named, queue="g", retry=ONCE)
    def write_all(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        ctx.session.add_all(Effect(name=item.args.name) for item in items)
        ctx.session.flush()
        ctx.session.connection().connection.commit()

    with sessions.begin() as session:
        session.add_jobs(write_all.job(name=name) for name in "abcd")
    drain_fifty(jobs)
    assert ledger(engine) == Counter("abcd")


def test_a_deferred_write_is_not_overwritten_by_a_handler_that_loads_the_row(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Deferred by key: the next handler's entity is the row with that write, also if it queries first."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True)
    def credit(ctx: Context, account_id: int) -> None:
        ctx.defer(ADD, {"id": account_id, "cents": 5})

    @jobs.handler(queue="q", batchable=True)
    def look(ctx: Context, account: Account) -> None:
        ctx.session.scalar(select(func.count(Effect.row)))
        account.balance += 1

    @jobs.handler(queue="q", batchable=True)
    def find(ctx: Context, account_id: int) -> None:
        account = ctx.session.get_one(Account, account_id)
        before = account.balance
        ctx.session.scalar(select(func.count(Effect.row)))
        account.balance = before + 1

    with sessions.begin() as session:
        account = session.get_one(Account, 1)
        session.add_job(credit, account_id=1)
        session.add_job(look, account=account)
        session.add_job(credit, account_id=1)
        session.add_job(find, account_id=1)
    drain_fifty(jobs)
    assert balance(engine, 1) == 12


@pytest.mark.parametrize("how", ["cte", "function"])
def test_a_select_that_writes_is_seen_by_the_next_job(
    how: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Rows that were loaded before it are read again."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION credit_account(i int) RETURNS int LANGUAGE sql AS "
                "'UPDATE account SET balance = balance + 5 WHERE id = i RETURNING 1'"
            )
        )
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True)
    def write(ctx: Context, account_id: int) -> None:
        changed = update(Account).where(Account.id == account_id).values(balance=Account.balance + 5)
        cte = changed.returning(Account.id).cte()
        ctx.session.execute(select(cte.c.id) if how == "cte" else select(func.credit_account(account_id)))

    @jobs.handler(queue="q", batchable=True)
    def change(ctx: Context, account: Account) -> None:
        del ctx
        account.balance += 1

    with sessions.begin() as session:
        account = session.get_one(Account, 1)
        session.add_job(write, account_id=1)
        session.add_job(change, account=account)
    drain_fifty(jobs)
    assert balance(engine, 1) == 6


def test_a_row_that_one_job_deletes_and_the_next_inserts_is_a_new_row(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """The unit of work would make one UPDATE of them, and keep what the old row had."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True)
    def remove(ctx: Context, account: Account) -> None:
        ctx.session.delete(account)

    @jobs.handler(queue="q", batchable=True)
    def make(ctx: Context, account_id: int) -> None:
        ctx.session.add(Account(id=account_id))

    with sessions.begin() as session:
        account = session.get_one(Account, 9)
        account.balance = 500
        session.flush()
        session.add_job(remove, account=account)
        session.add_job(make, account_id=9)
    drain_fifty(jobs)
    assert balance(engine, 9) == 0


def test_deferred_writes_go_to_the_schema_of_each_statement(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Statements that lead to different schemas are not equal."""
    with engine.begin() as connection:
        for schema in ("t1", "t2"):
            connection.execute(text(f"CREATE SCHEMA {schema}"))
            connection.execute(text(f"CREATE TABLE {schema}.effect_ledger (LIKE public.effect_ledger INCLUDING ALL)"))
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True)
    def put(ctx: Context, tenant: str) -> None:
        statement = insert(Effect.__table__).execution_options(schema_translate_map={None: tenant})
        ctx.defer(statement, {"name": tenant, "row": 1})

    with sessions.begin() as session:
        session.add_jobs(put.job(tenant=tenant) for tenant in ("t1", "t2"))
    drain_fifty(jobs)
    with engine.connect() as connection:
        found = [connection.execute(text(f"SELECT name FROM {schema}.effect_ledger")).all() for schema in ("t1", "t2")]
    assert found == [[("t1",)], [("t2",)]]


STRICT: list[bool] = []


@dataclass
class Money:
    cents: int

    def __post_init__(self) -> None:
        assert not STRICT or self.cents >= 0


def test_arguments_whose_type_refuses_them_cost_their_own_job_alone(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Whatever its constructor raises."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def pay(ctx: Context, name: str, money: Money) -> None:
        del money
        ctx.session.add(Effect(name=name))

    with sessions.begin() as session:
        session.add_jobs(pay.job(name=name, money=Money(cents)) for name, cents in (("a", 1), ("b", -1), ("c", 1)))
    STRICT.append(True)
    try:
        drain_fifty(jobs)
    finally:
        STRICT.clear()
    assert ledger(engine) == Counter("ac")


def test_jobs_that_defer_with_the_same_arguments_are_sent_together(
    sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Five cents here and five cents there are not the same row."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True)
    def credit(ctx: Context, account_id: int, cents: int) -> None:
        ctx.defer(ADD_TO_ROW, {"account": account_id, "cents": cents})

    with sessions.begin() as session:
        session.add_jobs(credit.job(account_id=number, cents=5) for number in range(1, 11))
    with statements() as seen:
        drain_fifty(jobs)
    assert [count for statement, count in seen if statement.startswith("UPDATE account")] == [1]


def test_an_error_behind_the_release_of_a_savepoint_doubles_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows stand then: all goes back with the transaction, and not to a savepoint that is gone."""
    jobs, original, failed = Jobs(), batch_call.fault_point, []

    @dataclass
    class Named:
        name: str

    @jobs.batch_handler(Named, queue="g", retry=Backoff(max_attempts=3, first_seconds=0.0))
    def write_all(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        ctx.session.add_all(Effect(name=item.args.name) for item in items)

    def fail_once(name: str) -> None:
        if name == "after-handler" and not failed:
            failed.append(name)
            raise ValueError(name)
        original(name)

    monkeypatch.setattr(batch_call, "fault_point", fail_once)
    with sessions.begin() as session:
        session.add_jobs(write_all.job(name=name) for name in "abcd")
    drain_fifty(jobs)
    assert failed
    assert ledger(engine) == Counter("abcd")


@pytest.mark.first_and_last
@pytest.mark.parametrize("sort", ["batchable", "batch handler"])
@pytest.mark.parametrize("others", [0, 2])
def test_a_deferred_constraint_costs_its_own_job_alone(
    others: int,
    sort: str,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """COMMIT checks the jobs of one batch handler; else each is checked before a later one could mend it."""
    jobs, asked, events, original = Jobs(), [], [], shared_batch.check_shared

    @dataclass
    class Named:
        name: str

    def write(session: OutboxSession, name: str) -> None:
        session.add(Effect(name=name))
        if name == "bad":
            session.add(Child(parent_id=-1))

    @jobs.handler(queue="q", kind="act", batchable=True, retry=ONCE)
    def act(ctx: Context, name: str) -> None:
        write(ctx.session, name)

    @jobs.batch_handler(Named, queue="q", kind="act all", retry=ONCE)
    def act_all(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        for item in items:
            write(ctx.session, item.args.name)

    @jobs.handler(queue="q")
    def other(ctx: Context, name: str) -> None:
        write(ctx.session, name)

    def asking(connection: Connection, xid: str) -> None:
        asked.append(xid)
        original(connection, xid)

    def keeping(savepoint: SharedSavepoint) -> None:
        if not savepoint._batch.tries.together:
            asked.append(savepoint.xid)
        keep_all(savepoint)

    keep_all = SharedSavepoint.keep_all
    monkeypatch.setattr(shared_batch, "check_shared", asking)
    monkeypatch.setattr(SharedSavepoint, "keep_all", keeping)
    kind = act if sort == "batchable" else act_all
    with sessions.begin() as session:
        session.add_jobs(kind.job(name=name) for name in ("a", "bad", "b"))
        session.add_jobs(other.job(name=f"other {number}") for number in range(others))
    config = RelayConfig(slots_per_queue=1, batch_size=50)
    Relay(outboxq_database.url, jobs, config, hooks=[events.append]).drain()
    assert ledger(engine) == Counter(["a", "b", *(f"other {number}" for number in range(others))])
    assert Counter(type(event) for event in events if isinstance(event, JobDone | JobDied | BatchRolledBack)) == {
        JobDone: 2 + others,
        JobDied: 1,
    }
    assert bool(asked) is (others > 0 or sort == "batchable")


def test_a_batch_handler_that_ended_the_transaction_unseen_is_to_blame_with_all_its_jobs(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Found by the commit script: some of its rows stand, and it cannot be known of which job."""
    jobs = Jobs()

    @dataclass
    class Named:
        name: str

    @jobs.batch_handler(Named, queue="q", retry=ONCE)
    def act(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        ctx.session.add_all(Effect(name=item.args.name) for item in items)
        ctx.session.flush()
        ctx.session.connection().connection.cursor().execute("COMMIT; BEGIN")

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in "abc")
    report = drain_fifty(jobs)
    assert ledger(engine) == Counter("abc")
    assert (report.done, report.died) == (0, 3)


@pytest.mark.parametrize("batchable", [True, False])
def test_jobs_of_handlers_have_the_keys_that_entities_have_at_the_flush(
    batchable: bool, engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """A changed key counts, and a handler that deletes the entity of its job fails alone."""
    jobs, notify = Jobs(), external("notify", queue="elsewhere")

    @jobs.handler(queue="q", batchable=batchable, retry=ONCE)
    def act(ctx: Context, account: Account, what: str) -> None:
        add_job(ctx.session, notify, account=account)
        if what == "renumber":
            account.id += 100
        elif what == "delete":
            ctx.session.delete(account)
        else:
            account.balance += 1

    with sessions.begin() as session:
        accounts = session.scalars(select(Account).order_by(Account.id)).all()
        whats = ["pay", "renumber", "pay", "delete", "pay"]
        session.add_jobs(act.job(account, what) for account, what in zip(accounts, whats, strict=False))
    drain_fifty(jobs)
    with engine.connect() as connection:
        args = connection.execute(text("SELECT args ->> 'account' FROM outboxq.job ORDER BY 1")).scalars().all()
        assert sorted(map(int, args)) == [1, 3, 5, 102]
        (errors,) = connection.execute(text("SELECT errors::text FROM outboxq.dead_job")).scalars()
        assert "a Account that is deleted" in errors
    assert balance(engine, 4) == 0
