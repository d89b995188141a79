"""What is around a job's session, in a batch as alone: other databases, schemas, listeners, keys, the process."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import (
    Engine,
    String,
    TypeDecorator,
    bindparam,
    create_engine,
    event,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    make_transient_to_detached,
    mapped_column,
    sessionmaker,
)
from sqlalchemy.orm.attributes import set_committed_value

from outboxq import Backoff, Context, Jobs, Locked, OutboxSession, external
from outboxq.events import Event
from outboxq.statements.wake import ALL_QUEUES
from outboxq.testing import Database
from tests.support.app import Account, Base, Effect
from tests.support.ledger import rows
from tests.support.matrices import diagonal
from tests.support.notifications import notifications

Drain = Callable[..., list[Event]]
SIZES = pytest.mark.parametrize("batch_size", [1, 50])
ONCE = Backoff(max_attempts=1)
USER = ContextVar("user", default="unknown")
TENANT = """
CREATE SCHEMA tenant CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL);
INSERT INTO tenant.account SELECT n, 0 FROM generate_series(1, 120) AS n
"""
# An account's change, in one of the schemas, adds 100 to the first branch.
TRIGGER = """
CREATE FUNCTION {schema}.add() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN UPDATE public.branch SET total = total + 100 WHERE id = 1; RETURN new; END $$;
CREATE TRIGGER add AFTER UPDATE ON {schema}.account FOR EACH ROW EXECUTE FUNCTION {schema}.add()
"""


class Own(DeclarativeBase):
    pass


class Signed(TypeDecorator[str]):
    impl = String
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: object) -> str:
        return f"{value} by {USER.get()}"


class Audit(Own):
    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True)
    what: Mapped[str]
    who: Mapped[str] = mapped_column(default=lambda: USER.get())
    signed: Mapped[str | None] = mapped_column(Signed)


class Keyed(Own):
    __tablename__ = "keyed"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)
    told: Mapped[int] = mapped_column(default=0)


class Named(Own):
    """Its keys are equal to the server whatever number of blanks they end with: a char(5)."""

    __tablename__ = "named"
    id: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)
    told: Mapped[int] = mapped_column(default=0)


class Branch(Own):
    __tablename__ = "branch"
    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int] = mapped_column(default=0)


@pytest.fixture(autouse=True)
def _tables(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    run(engine, "CREATE TABLE named (id char(5) PRIMARY KEY, balance int NOT NULL, told int NOT NULL)")
    Own.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all(Account(id=id_) for id_ in range(1, 121))
        session.add_all(Branch(id=id_) for id_ in range(1, 5))


@pytest.fixture
def elsewhere(outboxq_database: Database, engine: Engine) -> Iterator[Engine]:
    """The same tables in another place."""
    run(engine, "CREATE SCHEMA elsewhere")
    made = create_engine(outboxq_database.url, connect_args={"options": "-c search_path=elsewhere,public"})
    run(made, "CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL)")
    run(made, "CREATE TABLE effect_ledger (row serial PRIMARY KEY, name text, job_id uuid)")
    run(made, "INSERT INTO account SELECT n, 0 FROM generate_series(1, 20) AS n")
    yield made
    made.dispose()


def run(engine: Engine, sql: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(sql)


def changed(engine: Engine, table: str = "account") -> list[int]:
    """The ids of accounts with a balance."""
    return [id_ for (id_,) in rows(engine, f"SELECT id FROM {table} WHERE balance <> 0 ORDER BY id")]


def one(batch_size: int) -> dict[str, int]:
    return {"slots_per_queue": 1, "batch_size": batch_size}


@contextmanager
def listening(name: str, listener: Callable[..., object]) -> Iterator[None]:
    event.listen(Session, name, listener)
    try:
        yield
    finally:
        event.remove(Session, name, listener)


@SIZES
def test_rows_are_written_to_the_schema_that_the_job_chose(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """By the options of its connection: its own change, and nothing that the jobs before it left."""
    run(engine, TENANT)
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True)
    def credit(ctx: Context, account: Account) -> None:
        account.balance += 5

    @jobs.handler(queue="q", batchable=True)
    def credit_tenant(ctx: Context, id_: int) -> None:
        ctx.session.connection(execution_options={"schema_translate_map": {None: "tenant"}})
        ctx.session.get_one(Account, id_).balance += 5

    with sessions.begin() as session:
        for id_ in (1, 2):
            session.add_jobs([credit.job(account=session.get_one(Account, id_)), credit_tenant.job(id_=id_ + 10)])
    drain(jobs, **one(batch_size))
    assert (changed(engine, "public.account"), changed(engine, "tenant.account")) == ([1, 2], [11, 12])


@SIZES
def test_what_is_known_of_tables_is_not_of_another_jobs_schema(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A job that chose its own is the first to ask for the table; in the others' it has a trigger."""
    run(engine, TENANT)
    run(engine, TRIGGER.format(schema="public"))
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True)
    def credit_tenant(ctx: Context, id_: int) -> None:
        ctx.session.connection(execution_options={"schema_translate_map": {None: "tenant"}})
        ctx.session.execute(update(Account).where(Account.id == id_).values(balance=5))

    @jobs.handler(queue="q", batchable=True)
    def credit(ctx: Context, account: Account) -> None:
        account.balance += 5

    @jobs.handler(queue="q", batchable=True)
    def bank(ctx: Context, branch: Branch) -> None:
        branch.total += 1

    with sessions.begin() as session:
        accounts, branch = [session.get_one(Account, id_) for id_ in (1, 3)], session.get_one(Branch, 1)
        session.add_job(credit_tenant, id_=2)
        # Behind a job that sent something one row is loaded ahead, then two: the last account's with the branch.
        session.add_jobs([*(credit.job(account=account) for account in accounts), bank.job(branch=branch)])
    drain(jobs, **one(batch_size))
    assert rows(engine, "SELECT total FROM branch WHERE id = 1") == [(201,)]
    assert (changed(engine, "public.account"), changed(engine, "tenant.account")) == ([1, 3], [2])


@SIZES
def test_a_statement_that_names_its_schema_is_judged_by_that_table(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Its trigger sees each change, not all at once."""
    run(engine, TENANT)
    run(
        engine,
        "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO effect_ledger (name) "
        "SELECT sum(balance)::text FROM tenant.account; RETURN NULL; END $$; "
        "CREATE TRIGGER tell AFTER UPDATE ON tenant.account FOR EACH ROW EXECUTE FUNCTION tell()",
    )
    plain = update(Account).where(Account.id == bindparam("account"))
    adding = plain.values(balance=Account.balance + bindparam("cents"))
    add = adding.execution_options(schema_translate_map={None: "tenant"})
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True)
    def credit(ctx: Context, id_: int) -> None:
        ctx.defer(add, {"account": id_, "cents": 5})

    with sessions.begin() as session:
        session.add_jobs([credit.job(id_=id_) for id_ in range(1, 6)])
    drain(jobs, **one(batch_size))
    seen = [name for (name,) in rows(engine, "SELECT name FROM effect_ledger ORDER BY row")]
    assert seen == ["5", "10", "15", "20", "25"]


@pytest.mark.parametrize("batch_size", [1, 100])
def test_what_is_known_of_tables_is_not_of_another_search_path(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A job sets one for the rest of the transaction, and another run of its batch asks for the table first."""
    run(engine, TENANT)
    run(engine, TRIGGER.format(schema="public"))
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True)
    def move(ctx: Context) -> None:
        ctx.session.execute(text("SET LOCAL search_path = tenant, public"))

    @jobs.handler(queue="q", batchable=True)
    def idle(ctx: Context) -> None:
        pass

    @jobs.handler(queue="q", batchable=True)
    def credit(ctx: Context, account: Account) -> None:
        account.balance += 1

    @jobs.handler(queue="q", batchable=True)
    def bank(ctx: Context, branch: Branch) -> None:
        branch.total += 1

    with sessions.begin() as session:
        accounts = [session.get_one(Account, id_) for id_ in range(1, 52)]
        session.add_jobs([move.job(), *(idle.job() for _ in range(49))])
        session.add_jobs([credit.job(account=account) for account in accounts[:50]])
    with sessions.begin() as session:
        branch = session.get_one(Branch, 1)
        session.add_jobs([credit.job(account=session.get_one(Account, 51)), bank.job(branch=branch)])
    drain(jobs, **one(batch_size))
    # Alone each job has its own transaction, and all of them change the table with the trigger.
    assert rows(engine, "SELECT total FROM branch WHERE id = 1") == [(5_101 if batch_size == 1 else 101,)]


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize("call", ["set_config", "SET_CONFIG", '"set_config"', "pg_catalog.Set_Config"]),
    pytest.mark.parametrize("batchable", [False, True]),
)
def test_a_search_path_by_a_function_is_seen_however_it_is_written(
    call: str, batchable: bool, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    run(engine, TENANT)
    run(engine, TRIGGER.format(schema="tenant"))
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=batchable)
    def move(ctx: Context) -> None:
        ctx.session.execute(text(f"SELECT {call}('search_path', 'tenant, public', true)"))

    @jobs.handler(queue="q", batchable=batchable)
    def credit(ctx: Context, account: Account) -> None:
        account.balance += 1

    @jobs.handler(queue="q", batchable=batchable)
    def bank(ctx: Context, branch: Branch) -> None:
        branch.total += 1

    with sessions.begin() as session:
        first, second, third = (session.get_one(Account, id_) for id_ in (1, 2, 3))
        session.add_jobs([credit.job(account=first), move.job(), credit.job(account=second), credit.job(account=third)])
        session.add_job(bank, branch=session.get_one(Branch, 1))
    drain(jobs, **one(50))
    assert rows(engine, "SELECT total FROM branch WHERE id = 1") == [(201,)]


@SIZES
def test_rows_of_another_engine_are_committed_there(
    batch_size: int, elsewhere: Engine, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A handler binds a class of its session to it: rows that were flushed, and changes that were not."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def note(ctx: Context, name: str) -> None:
        ctx.session.bind_mapper(Effect, elsewhere)
        ctx.session.add(Effect(name=name))
        ctx.session.flush()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def credit(ctx: Context, id_: int) -> None:
        ctx.session.bind_mapper(Account, elsewhere)
        ctx.session.get_one(Account, id_).balance += 5

    with sessions.begin() as session:
        session.add_jobs([note.job(name=f"note {number}") for number in range(3)])
        session.add_jobs([credit.job(id_=id_) for id_ in (1, 2, 3)])
    drain(jobs, **one(batch_size))
    assert [name for (name,) in rows(elsewhere, "SELECT name FROM effect_ledger ORDER BY name")] == [
        "note 0",
        "note 1",
        "note 2",
    ]
    assert (changed(elsewhere), changed(engine, "public.account")) == ([1, 2, 3], [])


@diagonal(
    pytest.mark.parametrize("end", ["COMMIT", "COMMIT; BEGIN"]),
    pytest.mark.parametrize("batchable", [False, True]),
    SIZES,
)
def test_a_deferred_text_that_commits_is_its_own_jobs_end(
    end: str, batchable: bool, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Also where no constraint is deferrable, so that nothing else would have it sent before the next job."""
    run(engine, "DROP TABLE child CASCADE")
    assert rows(engine, "SELECT count(*) FROM pg_trigger WHERE tgdeferrable") == [(0,)]
    jobs, bad = Jobs(), text(f"UPDATE account SET balance = 99 WHERE id = 3; {end}")

    @jobs.handler(queue="q", batchable=batchable, retry=ONCE)
    def credit(ctx: Context, account: Account, commits: bool) -> None:
        account.balance += 5
        if commits:
            ctx.defer(bad)

    with sessions.begin() as session:
        for id_ in range(1, 6):
            session.add_job(credit, account=session.get_one(Account, id_), commits=id_ == 3)
    drain(jobs, **one(batch_size))
    ((arguments,),) = rows(engine, "SELECT args FROM outboxq.dead_job")
    assert isinstance(arguments, dict)
    assert arguments["commits"] is True
    assert [id_ for id_ in changed(engine) if id_ != 3] == [1, 2, 4, 5]


COMPUTED = {
    "default": (insert(Audit), {}),
    "type": (insert(Audit), {"who": "set", "signed": "written"}),
    "upsert": (
        upsert(Audit).on_conflict_do_update(index_elements=["id"], set_={"signed": bindparam("word", type_=Signed)}),
        {"who": "set", "word": "written"},
    ),
}


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize("how", COMPUTED),
    SIZES,
)
def test_what_the_process_computes_for_a_deferred_write_is_computed_in_its_own_job(
    how: str, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A default, a type or a value inside an upsert: of the job that deferred the write, not of the last one."""
    # Without a deferrable constraint nothing else has it sent before the next job.
    run(engine, "DROP TABLE child CASCADE")
    jobs, (statement, values) = Jobs(), COMPUTED[how]

    @jobs.handler(queue="q", batchable=True)
    def note(ctx: Context, number: int) -> None:
        USER.set(f"user {number}")
        ctx.defer(statement, {"id": number, "what": "noted", **values})

    run(engine, "INSERT INTO audit (id, what, who) SELECT n, '', '' FROM generate_series(1, 3) AS n")
    numbers = range(1, 4) if how == "upsert" else range(11, 14)
    with sessions.begin() as session:
        session.add_jobs([note.job(number=number) for number in numbers])
    drain(jobs, **one(batch_size))
    found = rows(
        engine, f"SELECT {'who' if how == 'default' else 'signed'} FROM audit WHERE id >= {numbers[0]} ORDER BY id"
    )
    expected = "user {}" if how == "default" else "written by user {}"
    assert found == [(expected.format(number),) for number in numbers]


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize("name", ["after_begin", "after_transaction_create", "after_transaction_end"]),
    SIZES,
)
def test_listeners_for_a_sessions_transaction_hear_each_jobs_own(
    name: str, batch_size: int, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    jobs, heard = Jobs(), []

    @jobs.handler(queue="q", batchable=True)
    def credit(ctx: Context, account: Account) -> None:
        account.balance += 5

    with sessions.begin() as session:
        session.add_jobs([credit.job(account=session.get_one(Account, id_)) for id_ in (1, 2, 3)])

    with listening(name, lambda *_: heard.append(name)):
        drain(jobs, **one(batch_size))
    assert len(heard) >= 3


@diagonal(
    pytest.mark.parametrize("how", ["text", "core"]),
    SIZES,
)
def test_a_function_that_breaks_a_deferred_constraint_costs_its_own_job(
    how: str, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A later job would mend it."""
    run(
        engine,
        "CREATE FUNCTION add_child(a int, b int) RETURNS int LANGUAGE sql AS "
        "'INSERT INTO child (id, parent_id) VALUES (a, b) RETURNING id'",
    )
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def breaks(ctx: Context) -> None:
        ctx.session.execute(select(func.add_child(1, 999)) if how == "core" else text("SELECT add_child(1, 999)"))

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def mends(ctx: Context) -> None:
        ctx.session.add(Account(id=999))

    with sessions.begin() as session:
        session.add_jobs([breaks.job(), mends.job()])
    drain(jobs, **one(batch_size))
    assert rows(engine, "SELECT kind FROM outboxq.dead_job") == [("breaks",)]


@SIZES
def test_a_deferred_constraint_of_the_schema_that_a_statement_chose_is_checked(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """By an option of its execution; a later job would mend it."""
    run(engine, TENANT)
    run(engine, "UPDATE tenant.account SET balance = id")
    run(engine, "ALTER TABLE tenant.account ADD UNIQUE (balance) DEFERRABLE INITIALLY DEFERRED")
    jobs, chosen = Jobs(), {"schema_translate_map": {None: "tenant"}}

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def put(ctx: Context, id_: int, cents: int) -> None:
        statement = update(Account.__table__).where(Account.id == id_).values(balance=cents)
        ctx.session.execute(statement, execution_options=chosen)

    with sessions.begin() as session:
        session.add_jobs([put.job(id_=1, cents=2), put.job(id_=1, cents=500)])
    drain(jobs, **one(batch_size))
    assert rows(engine, "SELECT args->'cents' FROM outboxq.dead_job") == [(2,)]
    assert rows(engine, "SELECT balance FROM tenant.account WHERE id = 1") == [(500,)]


@SIZES
def test_a_key_that_is_another_one_in_the_process_is_the_same_row(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A UUID as text, a text without its blanks: who has the row as an argument sees what was written by that key."""
    jobs, key, other = Jobs(), uuid.uuid4(), uuid.uuid4()

    @jobs.handler(queue="q", batchable=True)
    def put(ctx: Context, id_: str, name: str) -> None:
        for row in (Keyed(id=id_), Named(id=name)):
            make_transient_to_detached(row)
            ctx.session.add(row)
            row.balance = 50

    @jobs.handler(queue="q", batchable=True)
    def tell(ctx: Context, keyed: Keyed, named: Named) -> None:
        keyed.told = keyed.balance + 1
        named.told = named.balance + 1

    with sessions.begin() as session:
        session.add_all([Keyed(id=key), Keyed(id=other), Named(id="one"), Named(id="two")])
        session.flush()
        session.expire_all()
        first = tell.job(keyed=session.get_one(Keyed, other), named=session.get_one(Named, "two"))
        last = tell.job(keyed=session.get_one(Keyed, key), named=session.get_one(Named, "one"))
        session.add_jobs([first, put.job(id_=str(key), name="one"), last])
    drain(jobs, **one(batch_size))
    assert rows(engine, "SELECT balance, told FROM keyed ORDER BY told") == [(0, 1), (50, 51)]
    assert rows(engine, "SELECT balance, told FROM named ORDER BY told") == [(0, 1), (50, 51)]


@SIZES
def test_a_key_that_was_set_behind_sqlalchemys_back_is_where_a_flush_writes(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def credit(ctx: Context, account: Account) -> None:
        set_committed_value(account, "id", account.id + 10)
        account.balance += 5

    with sessions.begin() as session:
        session.add_jobs([credit.job(account=session.get_one(Account, id_)) for id_ in (1, 2, 3)])
    drain(jobs, **one(batch_size))
    assert changed(engine) == [11, 12, 13]


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize(
        "code",
        [
            "ALTER TABLE account ADD CHECK (allowed(balance, 0))",
            "ALTER TABLE account ADD CHECK (balance ### 0)",
            "CREATE INDEX ON account (checked(balance))",
            "CREATE INDEX ON account (balance) WHERE balance ### 0",
        ],
    ),
    SIZES,
)
def test_code_of_the_users_in_a_constraint_or_an_index_sees_each_job(
    code: str, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """It lies about what it depends on: once a branch has a total, no account can be changed."""
    run(
        engine,
        "CREATE FUNCTION checked(a int) RETURNS int IMMUTABLE LANGUAGE plpgsql SET search_path = public AS $$ BEGIN "
        "IF EXISTS (SELECT FROM branch WHERE total <> 0) THEN RAISE 'closed'; END IF; RETURN a; END $$; "
        "CREATE FUNCTION allowed(a int, b int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql SET search_path = public AS "
        "$$ BEGIN RETURN checked(a) IS NOT NULL; END $$; "
        "CREATE OPERATOR ### (LEFTARG = int, RIGHTARG = int, FUNCTION = allowed)",
    )
    run(engine, code)
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def credit(ctx: Context, account: Account) -> None:
        account.balance += 5

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def bank(ctx: Context, branch: Branch) -> None:
        branch.total += 1

    with sessions.begin() as session:
        first, second = (credit.job(account=session.get_one(Account, id_)) for id_ in (1, 2))
        session.add_jobs([first, bank.job(branch=session.get_one(Branch, 1)), second])
    drain(jobs, **one(batch_size))
    assert changed(engine) == [1]


@pytest.mark.parametrize("batchable", [False, True])
def test_a_listener_on_the_connection_hears_nothing_of_the_next_job(
    batchable: bool, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The slot goes on with another connection."""
    jobs, heard = Jobs(), []

    @jobs.handler(queue="q", batchable=batchable)
    def first(ctx: Context) -> None:
        connection = ctx.session.connection()
        event.listen(connection, "before_cursor_execute", lambda _1, _2, statement, *_: heard.append(statement))
        ctx.session.execute(text("SELECT 'of the first'"))

    @jobs.handler(queue="q", batchable=batchable)
    def second(ctx: Context) -> None:
        ctx.session.execute(text("SELECT 'of the second'"))

    with sessions.begin() as session:
        session.add_jobs([first.job(), second.job()])
    drain(jobs, **one(1))
    assert heard == ["SELECT 'of the first'"]


@diagonal(
    pytest.mark.parametrize("batchable", [False, True]),
    SIZES,
)
def test_jobs_in_many_queues_leave_the_later_ones_announced(
    batchable: bool,
    batch_size: int,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    outboxq_database: Database,
) -> None:
    """Past 64 queues one notification stands for all of them; what the job had set itself stays."""
    jobs, seen = Jobs(), []

    @jobs.handler(queue="q", batchable=batchable, retry=ONCE)
    def many(ctx: Context) -> None:
        ctx.session.add_jobs([external("told", queue=f"queue {number}").job() for number in range(70)])

    @jobs.handler(queue="q", batchable=batchable, retry=ONCE)
    def look(ctx: Context, sets: bool) -> None:
        if sets:
            ctx.session.execute(text("SET LOCAL outboxq.notify = 'off'"))
            ctx.session.add_jobs([external("told", queue=f"queue {number}").job() for number in range(70)])
            ctx.session.flush()
        seen.append(ctx.session.scalar(text("SELECT current_setting('outboxq.notify', true)")))

    with sessions.begin() as session:
        session.add_jobs([many.job(), look.job(sets=False), look.job(sets=True)])
    with notifications(outboxq_database) as heard:
        drain(jobs, **one(batch_size))
        assert heard() == [ALL_QUEUES]
    assert [setting == "off" for setting in seen] == [False, True]


class Stop(BaseException):
    """Of the user's own."""


@dataclass
class Trap:
    """An argument that cannot be read while it is set."""

    name: str
    is_set = False

    def __post_init__(self) -> None:
        if Trap.is_set and self.name == "bad":
            raise Stop


@diagonal(
    pytest.mark.parametrize("error", [ValueError, Stop]),
    pytest.mark.parametrize("batchable", [False, True]),
    SIZES,
)
def test_a_listener_that_raises_at_the_end_of_its_session_fails_its_own_job(
    error: type[BaseException],
    batchable: bool,
    batch_size: int,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
) -> None:
    """And no relay."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=batchable, retry=ONCE)
    def credit(ctx: Context, account: Account, bad: bool) -> None:
        account.balance += 5
        if bad:

            @event.listens_for(ctx.session, "after_transaction_end")
            def fail(*_: object) -> None:
                raise error("no")

    with sessions.begin() as session:
        for id_ in (1, 2, 3):
            session.add_job(credit, account=session.get_one(Account, id_), bad=id_ == 2)
    drain(jobs, **one(batch_size))
    assert len(rows(engine, "SELECT FROM outboxq.dead_job")) == 1
    assert changed(engine) == [1, 3]


@diagonal(
    pytest.mark.parametrize("error", [ValueError, Stop]),
    pytest.mark.parametrize("name", ["do_orm_execute", "after_begin"]),
    pytest.mark.parametrize("batchable", [False, True]),
    SIZES,
)
def test_a_listener_that_raises_while_rows_are_locked_ahead_fails_the_jobs(
    error: type[BaseException],
    name: str,
    batchable: bool,
    batch_size: int,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
) -> None:
    """As alone, and no relay."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=batchable, retry=ONCE)
    def credit(ctx: Context, account: Locked[Account]) -> None:
        account.balance += 5

    def fail(*_: object) -> None:
        raise error("no tenant")

    with sessions.begin() as session:
        session.add_jobs([credit.job(account=session.get_one(Account, id_)) for id_ in (1, 2, 3)])
    with listening(name, fail):
        drain(jobs, **one(batch_size))
    assert len(rows(engine, "SELECT FROM outboxq.dead_job")) == 3


@diagonal(
    pytest.mark.parametrize("batchable", [False, True]),
    SIZES,
)
def test_an_argument_that_raises_what_it_likes_fails_its_own_job(
    batchable: bool,
    batch_size: int,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=batchable, retry=ONCE)
    def credit(ctx: Context, account: Locked[Account], trap: Trap) -> None:
        account.balance += 5

    with sessions.begin() as session:
        for id_ in (1, 2, 3):
            trap = Trap("bad" if id_ == 2 else "good")
            session.add_job(credit, account=session.get_one(Account, id_), trap=trap)
    monkeypatch.setattr(Trap, "is_set", True)
    drain(jobs, **one(batch_size))
    assert len(rows(engine, "SELECT FROM outboxq.dead_job")) == 1
    assert changed(engine) == [1, 3]
