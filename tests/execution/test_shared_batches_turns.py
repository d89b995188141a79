"""What a shared batch knows of its handlers' turns: who works with the session, who has the connection."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from sqlalchemy import Engine, bindparam, select, text, update
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, BatchContext, BatchItem, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.execution.find_outcome import COMMITTED_BY_HANDLER
from outboxq.postgres import Database
from tests.support.app import Account, Base, Effect
from tests.support.driver_waits import driver_waits
from tests.support.ledger import balances, ledger, rows
from tests.support.shared_app import ADD

ONCE = Backoff(max_attempts=1)
_REFUSED = "gave up after 1 of 1 attempts: outboxq.errors.TransactionVerbRefused"


@pytest.fixture(autouse=True)
def _accounts(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    Base.metadata.create_all(engine)
    with sessions.begin() as session:
        session.add_all(Account(id=number, balance=0) for number in range(1, 31))


def dead(engine: Engine) -> list[tuple[object, ...]]:
    return rows(engine, "SELECT args->>'name', reason FROM outboxq.dead_job")


@pytest.fixture
def trips() -> Iterator[list[threading.Thread]]:
    """The threads that waited for the server, one for each time."""
    with driver_waits() as waits:
        yield waits


def test_a_statement_of_a_handlers_own_is_one_round_trip(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty, trips: list[threading.Thread]
) -> None:
    """Nothing is asked or sent between two of them."""
    jobs, seen = Jobs(), []
    # Its own: what a statement writes is known to a process that has looked at it before.
    statement = update(Account).where(Account.id == bindparam("account")).values(balance=Account.balance + 1)

    @jobs.handler(queue="q", batchable=True)
    def add(ctx: Context, account_id: int) -> None:
        seen.append(trips.count(threading.current_thread()))
        ctx.session.execute(statement, {"account": account_id})

    with sessions.begin() as session:
        session.add_jobs(add.job(account_id=number) for number in range(1, 31))
    drain_fifty(jobs)
    # Between the first two the catalog is read.
    assert [behind - before for before, behind in pairwise(seen)] == [2] + [1] * 28
    assert balances(engine) == dict.fromkeys(range(1, 31), 1)


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("UPDATE account SET balance = 1 WHERE id = 30; COMMIT", COMMITTED_BY_HANDLER),
        ("/* /* */ */ COMMIT", _REFUSED),
        ("-- nothing\rCOMMIT", _REFUSED),
    ],
    ids=["script", "comment", "line"],
)
def test_a_commit_that_is_hard_to_read_costs_the_others_nothing(
    script: str, reason: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Refused if its verb comes first; else found, also if the driver has begun a transaction by then."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def act(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        if name == "bad":
            ctx.session.execute(text(script))
            ctx.session.execute(text("SELECT 1"))

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in ("a", "bad", "c", "d"))
    drain_fifty(jobs)
    done = ledger(engine)
    del done["bad"]
    assert done == Counter("acd")
    assert dead(engine) == [("bad", reason)]


def test_what_goes_over_the_connection_of_a_result_is_seen(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """As over session.connection(): the next job's row is read again."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True)
    def add(ctx: Context, account: Account) -> None:
        account.balance += 1

    @jobs.handler(queue="q", batchable=True)
    def around(ctx: Context) -> None:
        ctx.session.execute(select(Account.__table__.c.id)).connection.execute(ADD, {"id": 1, "cents": 5})

    with sessions.begin() as session:
        account = session.get_one(Account, 1)
        session.add_jobs([add.job(account=account), around.job(), add.job(account=account)])
    drain_fifty(jobs)
    assert balances(engine) == {1: 7}


def test_a_commit_on_the_drivers_connection_behind_a_result_costs_the_others_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Whoever takes it may use it unseen: the server is asked before the next job runs."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def act(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        if name == "bad":
            connection = ctx.session.execute(text("SELECT 1")).connection
            connection.connection.cursor().execute("COMMIT; BEGIN")

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in ("a", "bad", "c", "d"))
    drain_fifty(jobs)
    done = ledger(engine)
    del done["bad"]
    assert done == Counter("acd")
    assert dead(engine) == [("bad", COMMITTED_BY_HANDLER)]


@pytest.mark.first_and_last
@pytest.mark.parametrize("names", [("a", "b", "bad"), ("a", "bad", "c", "d")])
@pytest.mark.parametrize("others", [0, 1])
def test_a_transaction_that_was_ended_unseen_makes_no_job_done(
    others: int, names: tuple[str, ...], engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Found when all have run: some of their rows stand, and it is not known whose. Each has one end that is seen."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def act(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        ctx.session.flush()
        if name == "bad":
            # Nobody can see this.
            ctx.session.bind._dbapi_connection.dbapi_connection.pgconn.exec_(b"COMMIT; BEGIN")

    @jobs.handler(queue="q")
    def other(ctx: Context) -> None:
        ctx.session.add(Effect(name="other"))

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in names)
        session.add_jobs(other.job() for _ in range(others))
    report = drain_fifty(jobs)
    assert dead(engine) == [(name, COMMITTED_BY_HANDLER) for name in names]
    assert (report.done, report.died) == (others, len(names))
    assert ledger(engine) == Counter([*names[: names.index("bad") + 1], *["other"] * others])


@pytest.mark.first_and_last
@pytest.mark.parametrize("way", ["cursor", "context", "server-side"])
def test_a_commit_by_way_of_a_cursor_is_its_own_jobs(
    way: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """A result leads to its cursor, and that to the driver's connection."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def act(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        # SQLAlchemy 2.0 does not flush before a text.
        ctx.session.flush()
        if name == "bad":
            options = {"stream_results": way == "server-side"}
            result = ctx.session.execute(text("SELECT 1"), execution_options=options)
            cursor = result.context.cursor if way == "context" else result.cursor
            connection = cursor.connection
            result.close()
            connection.commit()
            connection.execute("SELECT 1")

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in ("a", "b", "bad", "c", "d"))
    drain_fifty(jobs)
    assert ledger(engine) == Counter(["a", "b", "bad", "c", "d"])
    assert dead(engine) == [("bad", COMMITTED_BY_HANDLER)]


@pytest.mark.parametrize("fails", ["group", "shared"])
def test_a_group_that_fails_leaves_the_rows_of_the_jobs_before_it(
    fails: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain_fifty
) -> None:
    """Those that shared a batch, and those that ran by themselves after they could not."""
    jobs = Jobs()

    @dataclass
    class Named:
        name: str

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def one(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        if name == "bad" and fails == "shared":
            raise ValueError(name)

    @jobs.batch_handler(Named, queue="q", retry=ONCE)
    def many(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        ctx.session.add_all(Effect(name=item.args.name) for item in items)
        ctx.session.flush()
        if any(item.args.name == "worse" for item in items):
            raise ValueError("worse")

    with sessions.begin() as session:
        session.add_jobs(one.job(name=name) for name in ("a", "bad", "c"))
        session.add_jobs(many.job(name=name) for name in ("x", "worse", "z"))
    drain_fifty(jobs)
    assert ledger(engine) == Counter(["a", "c", "x", "z", *(["bad"] if fails == "group" else [])])


def test_a_failure_repeats_the_jobs_that_shared_its_run_and_no_others(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """However large the batch: each of them takes a savepoint then, and more than 64 are a burden for others."""
    jobs, runs = Jobs(), Counter()

    @jobs.handler(queue="q", batchable=True, retry=ONCE)
    def act(ctx: Context, number: int) -> None:
        runs[number] += 1
        ctx.session.add(Effect(name=str(number)))
        if number == 70:
            raise ValueError(number)

    with sessions.begin() as session:
        session.add_jobs(act.job(number=number) for number in range(120))
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1, batch_size=200), hooks=()).drain()
    assert ledger(engine) == Counter(str(number) for number in range(120) if number != 70)
    assert [number for number, count in runs.items() if count == 2] == [*range(50, 71)]
