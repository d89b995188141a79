"""Jobs of batchable kinds share the loading and the writing of rows, and none can cost another its own."""

import asyncio
import gc
import json
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, SlotGroup
from outboxq.errors import RegistryError
from outboxq.events import Event, JobDied, JobDone
from outboxq.execution import shared_batch
from outboxq.execution.find_outcome import COMMITTED_BY_HANDLER
from tests.support import shared_app
from tests.support.app import Account, Base, Effect
from tests.support.ledger import balances, dead_reasons, ledger, waiting
from tests.support.matrices import diagonal
from tests.support.shared_app import CREDITS, ENDS, MISDEEDS, Pair, Versioned, statements

Drain = Callable[..., list[Event]]
FLAVOURS = pytest.mark.parametrize("handler", [shared_app.act, shared_app.act_async], ids=["sync", "async"])
ONE_SLOT = {"slots_per_queue": 1, "batch_size": 50}


@pytest.fixture(autouse=True)
def _accounts(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all(Account(id=id_) for id_ in range(1, 101))


def slot_of(handler) -> dict[str, object]:
    """One slot, for the queue of this handler alone."""
    return {"groups": (SlotGroup((handler.queue,), 1),)}


def enqueue(sessions: sessionmaker[OutboxSession], handler, several: list[dict[str, object]]) -> None:
    with sessions.begin() as session:
        for arguments in several:
            account = session.get_one(Account, arguments.pop("account"))
            session.add_job(handler, account=account, **arguments)


@FLAVOURS
def test_fifty_jobs_with_an_entity_each_are_loaded_locked_and_written_by_one_statement_each(
    handler, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """What a batch sends through SQLAlchemy: one SELECT per class, and the writes; no savepoint.

    One statement over arrays locks rows in the server's order, so it locks them in that of their keys before.
    """
    jobs = Jobs()

    if handler is shared_app.act:

        @jobs.handler(queue="counted", batchable=True)
        def count(ctx: Context, account: Account) -> None:
            account.balance += 5
    else:

        @jobs.handler(queue="counted", batchable=True)
        async def count(ctx: AsyncContext, account: Account) -> None:
            account.balance += 5

    enqueue(sessions, count, [{"account": id_} for id_ in range(1, 51)])
    with statements() as seen:
        drain(jobs, **ONE_SLOT)
    sent = [statement for statement, _ in seen if "sa_savepoint" in statement or "account" in statement]
    assert len(sent) == 2
    assert "ORDER BY account.id FOR NO KEY UPDATE" in sent[1]
    assert "UPDATE account SET" in sent[1]
    assert balances(engine) == dict.fromkeys(range(1, 51), 5)


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize("misdeed", MISDEEDS),
    FLAVOURS,
)
def test_whatever_one_handler_does_to_the_session_costs_no_other_its_rows(
    misdeed: str, handler, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The others of the batch, before and behind it, have their effects exactly once, whether it fails or not."""
    several = [{"name": f"job {id_}", "account": id_} for id_ in range(1, 11)]
    # Two batches of five; the culprit is the third of each.
    culprits = {3: "done", 8: "raise"}
    for number, end in culprits.items():
        several[number - 1] |= {"misdeed": misdeed, "end": end}
    enqueue(sessions, handler, several)
    events = drain(shared_app.jobs, **slot_of(handler), batch_size=5)
    done = {json.loads(event.job.args)["name"] for event in events if isinstance(event, JobDone)}
    # Whether it is done is its own affair; its row is there exactly if it is.
    others = set(range(1, 11)) - set(culprits)
    assert {f"job {id_}" for id_ in others} <= done
    assert "job 8" not in done
    assert {name: count for name, count in ledger(engine).items() if name.startswith("job")} == dict.fromkeys(done, 1)
    assert {id_: balances(engine).get(id_) for id_ in others} == dict.fromkeys(others, 1)
    assert waiting(engine) == 0
    assert len(dead_reasons(engine)) == 10 - len(done)


@pytest.mark.first_and_last
@diagonal(pytest.mark.parametrize("seed", range(4)), FLAVOURS)
def test_any_mixture_of_handlers_does_each_job_exactly_once(
    seed: int, handler, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Several jobs of the same accounts, by every way of writing, with failures and misdeeds between them."""
    chance = random.Random(seed)
    # "delete" and these write what other jobs of the same account are then to find.
    tame = [
        misdeed for misdeed in MISDEEDS if misdeed not in ("delete", "bulk-update", "nested-rollback", "merge-unloaded")
    ]
    several: list[dict[str, object]] = [
        {
            "name": f"job {number}",
            "account": chance.randint(1, 6),
            "how": chance.choice(list(CREDITS)),
            "misdeed": chance.choice(tame) if chance.random() < 0.04 * (seed % 4) else "",
            "end": chance.choice(ENDS) if chance.random() < 0.05 * (seed % 3) else "done",
        }
        for number in range(40)
    ]
    accounts = {str(given["name"]): given["account"] for given in several}
    enqueue(sessions, handler, several)
    events = drain(shared_app.jobs, **slot_of(handler), batch_size=chance.choice([7, 50]))
    assert waiting(engine) == 0
    done = {event.job.id for event in events if isinstance(event, JobDone)}
    assert len(done) == sum(isinstance(event, JobDone) for event in events)
    left = {name: count for name, count in ledger(engine).items() if name.startswith("job")}
    assert set(left.values()) <= {1}
    assert len(left) == len(done)
    credited = Counter(accounts[name] for name in left)
    # A misdeed may cost its own handler its credit, and nobody else.
    bad = Counter(given_account for name, given_account in accounts.items() if _misdeed_of(several, name))
    for account, count in credited.items():
        assert count - bad[account] <= balances(engine).get(account, 0) <= count


def _misdeed_of(several: list[dict[str, object]], name: str) -> object:
    return next(given for given in several if given["name"] == name)["misdeed"]


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize("first", CREDITS),
    FLAVOURS,
)
def test_jobs_that_change_the_same_row_all_count(
    first: str, handler, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Whichever way each of them writes: attributes, expressions, statements, the driver's cursor, deferred."""
    several = [
        {"name": f"{id_}", "account": id_, "how": how}
        for id_, second in enumerate(CREDITS, start=1)
        for how in (first, second, first)
    ]
    enqueue(sessions, handler, several)
    drain(shared_app.jobs, **slot_of(handler), batch_size=3)
    assert balances(engine) == dict.fromkeys(range(1, len(CREDITS) + 1), 3)
    assert ledger(engine) == {f"{id_}": 3 for id_ in range(1, len(CREDITS) + 1)}


def test_a_row_with_a_version_is_changed_once_by_each_job_of_a_batch(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The second job sees the first one's change, and each counts as one version, as alone."""
    jobs = Jobs()

    @jobs.handler(queue="versioned", batchable=True)
    def credit(ctx: Context, row: Versioned, cents: int) -> None:
        row.balance += cents

    with sessions.begin() as session:
        rows = [Versioned(id=1), Versioned(id=2)]
        session.add_all(rows)
        session.flush()
        for row, cents in [(rows[0], 5), (rows[1], 1), (rows[0], 7)]:
            session.add_job(credit, row=row, cents=cents)
    drain(jobs, **ONE_SLOT)
    with Session(engine) as session:
        found = {row.id: (row.balance, row.version) for row in session.scalars(select(Versioned))}
    assert found == {1: (12, 3), 2: (1, 2)}


def test_entities_with_a_key_of_two_columns_are_loaded_in_one_select(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """As those with one."""
    jobs = Jobs()

    @jobs.handler(queue="pairs", batchable=True)
    def touch(ctx: Context, pair: Pair) -> None:
        pair.value += 1

    with sessions.begin() as session:
        pairs = [Pair(left=left, right=right) for left in (1, 2) for right in "ab"]
        session.add_all(pairs)
        session.flush()
        for pair in pairs:
            session.add_job(touch, pair=pair)
    with statements() as seen:
        drain(jobs, **ONE_SLOT)
    assert [many for statement, many in seen if statement.startswith("SELECT pair")] == [1]
    with Session(engine) as session:
        assert session.scalars(select(Pair.value)).all() == [1, 1, 1, 1]


def test_a_row_that_is_gone_fails_its_own_job_only(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """And an optional one is None, also where a job before it deleted the row."""
    jobs = Jobs()
    seen: list[object] = []

    @jobs.handler(queue="gone", batchable=True, retry=Backoff(max_attempts=1))
    def need(ctx: Context, account: Account) -> None:
        account.balance += 1

    @jobs.handler(queue="gone", batchable=True)
    def may(ctx: Context, account: Account | None) -> None:
        seen.append(account and account.id)

    @jobs.handler(queue="gone", batchable=True)
    def remove(ctx: Context, account: Account) -> None:
        ctx.session.delete(account)

    with sessions.begin() as session:
        for id_ in (1, 2, 3):
            session.add_job(need, account=session.get_one(Account, id_))
        session.add_job(remove, account=session.get_one(Account, 4))
        session.add_job(may, account=session.get_one(Account, 4))
    with Session(engine) as session, session.begin():
        session.delete(session.get_one(Account, 2))
    drain(jobs, **ONE_SLOT)
    assert balances(engine) == {1: 1, 3: 1}
    assert seen[-1] is None
    assert [kind for kind, _ in dead_reasons(engine)] == ["need"]


@pytest.mark.parametrize("batch_size", [1, 50])
def test_a_handler_that_closes_its_session_fails_as_it_does_alone(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Also one to whom nothing was sent yet: its row was loaded for the whole batch, and its change would be lost."""
    jobs = Jobs()

    @jobs.handler(queue="closing", batchable=True, retry=Backoff(max_attempts=1))
    def credit(ctx: Context, account: Account, last: bool) -> None:
        account.balance += 1
        if last:
            ctx.session.close()

    enqueue(sessions, credit, [{"account": id_, "last": id_ == 3} for id_ in (1, 2, 3, 4)])
    drain(jobs, slots_per_queue=1, batch_size=batch_size)
    assert balances(engine) == {1: 1, 2: 1, 4: 1}
    ((kind, _),) = dead_reasons(engine)
    assert (kind, waiting(engine)) == ("credit", 0)


def test_a_payload_that_cannot_be_read_fails_its_own_job_and_the_others_still_share(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """It is known before the first handler runs."""
    jobs = Jobs()

    @jobs.handler(queue="read", batchable=True, retry=Backoff(max_attempts=1))
    def credit(ctx: Context, account: Account) -> None:
        account.balance += 1

    enqueue(sessions, credit, [{"account": id_} for id_ in (1, 2, 3)])
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET args = '{\"nonsense\": 1}' WHERE args->>'account' = '2'"))
    with statements() as seen:
        drain(jobs, **ONE_SLOT)
    assert balances(engine) == {1: 1, 3: 1}
    assert [many for statement, many in seen if statement.startswith("UPDATE account")] == [2]
    assert len(dead_reasons(engine)) == 1


def test_chained_jobs_are_rows_of_the_same_batch(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Also one that waits for the key of a new entity; and nothing of a job that failed is enqueued."""
    jobs = Jobs()

    @jobs.handler(queue="chain", batchable=True)
    def last(ctx: Context, name: str, effect: Effect | None) -> None:
        ctx.session.add(Effect(name=f"last {name} {effect is not None}"))

    @jobs.handler(queue="chain", batchable=True, retry=Backoff(max_attempts=1))
    def first(ctx: Context, name: str) -> None:
        ctx.session.info["mine"] = name
        effect = Effect(name=name)
        ctx.session.add(effect)
        ctx.session.add_job(last, name=name, effect=effect)
        ctx.session.info.clear() if name == "b" else None
        if name == "c":
            raise ValueError(name)

    with sessions.begin() as session:
        for name in "abcd":
            session.add_job(first, name=name)
    drain(jobs, **ONE_SLOT)
    found = ledger(engine)
    assert found["a"] == found["last a True"] == found["d"] == found["last d True"] == 1
    assert found["c"] == found["last c True"] == 0
    assert sum(found.values()) in (5, 6)


def test_chained_jobs_do_not_cost_the_batch_its_one_flush(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """add_job looks for its connection, and sends nothing."""
    jobs = Jobs()

    @jobs.handler(queue="chain", batchable=True)
    def last(ctx: Context) -> None: ...

    @jobs.handler(queue="chain", batchable=True)
    def first(ctx: Context, account: Account) -> None:
        account.balance += 1
        ctx.session.add_job(last)

    enqueue(sessions, first, [{"account": id_} for id_ in range(1, 11)])
    with statements() as seen:
        drain(jobs, **ONE_SLOT)
    assert len([statement for statement, _ in seen if "UPDATE account" in statement]) == 1
    assert balances(engine) == dict.fromkeys(range(1, 11), 1)


def test_a_commit_on_the_drivers_connection_is_never_run_again_and_costs_nobody_a_row(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """What stood at that COMMIT stands; the jobs behind it are put back."""
    jobs = Jobs()

    @jobs.handler(queue="shared", batchable=True)
    def write(ctx: Context, name: str, account: Account) -> None:
        account.balance += 1
        ctx.session.add(Effect(name=name))

    @jobs.handler(queue="shared", batchable=True)
    def defer(ctx: Context, name: str, account: Account) -> None:
        ctx.defer(shared_app.ADD, {"id": account.id, "cents": 1})

    @jobs.handler(queue="shared", batchable=True)
    def commit(ctx: Context, name: str, account: Account, how: str) -> None:
        connection = ctx.session.connection()
        driver = connection.connection
        if how == "forged":
            point = connection.get_nested_transaction()._savepoint
            driver.cursor().execute(f"COMMIT; BEGIN; SAVEPOINT {point}")
        else:
            driver.commit()

    for how in ("connection", "forged"):
        with sessions.begin() as session:
            for id_, handler, extra in [
                (1, write, {}),
                (2, write, {}),
                (3, defer, {}),
                (4, commit, {"how": how}),
                (5, write, {}),
                (6, defer, {}),
            ]:
                session.add_job(handler, name=f"{how} {id_}", account=session.get_one(Account, id_), **extra)
        drain(jobs, **ONE_SLOT)
    assert balances(engine) == {1: 2, 2: 2, 3: 2, 5: 2, 6: 2}
    assert dead_reasons(engine) == [("commit", COMMITTED_BY_HANDLER)] * 2
    assert waiting(engine) == 0


def test_a_handler_that_releases_the_batchs_savepoint_doubles_nobodys_rows(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """What it holds cannot be undone any more: all of it goes with the transaction, before any job runs again."""
    jobs, once = Jobs(), [None]

    @jobs.handler(queue="careless", batchable=True, retry=Backoff(first_seconds=0.0, jitter=0.0))
    def careless(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        if name == "2" and once:
            once.clear()
            ctx.session.connection().get_nested_transaction().commit()

    with sessions.begin() as session:
        session.add_jobs(careless.job(name=name) for name in "01234")
    drain(jobs, **ONE_SLOT)
    assert ledger(engine) == Counter("01234")
    assert waiting(engine) == 0


def test_a_task_that_outlives_its_handler_writes_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Its session is closed by then."""
    jobs = Jobs()
    runs: list[str] = []
    tasks: list[asyncio.Task[object]] = []

    @jobs.handler(queue="tasks", batchable=True)
    async def leave(ctx: AsyncContext, account: Account) -> None:
        runs.append("leave")
        account.balance += 1

        async def late() -> None:
            await asyncio.sleep(0)
            ctx.session.add(Effect(name="late"))
            await ctx.session.flush()

        tasks.append(asyncio.create_task(late()))

    @jobs.handler(queue="tasks", batchable=True)
    async def stay(ctx: AsyncContext, account: Account) -> None:
        runs.append("stay")
        account.balance += 1
        await asyncio.wait(tasks)

    with sessions.begin() as session:
        session.add_job(leave, account=session.get_one(Account, 1))
        session.add_job(stay, account=session.get_one(Account, 2))
    drain(jobs, **ONE_SLOT)
    assert runs == ["leave", "stay"]
    assert all(task.exception() is not None for task in tasks)
    assert balances(engine) == {1: 1, 2: 1}
    assert ledger(engine) == {}


def test_a_thread_of_a_handlers_own_uses_its_session_as_alone(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The session is no other job's."""
    jobs = Jobs()
    runs: list[int] = []

    def flush(session: Session) -> None:
        if len(runs) == 1:
            with suppress(Exception):
                session.flush()

    @jobs.handler(queue="threads", batchable=True)
    def use(ctx: Context, account: Account) -> None:
        runs.append(account.id)
        account.balance += 1
        thread = threading.Thread(target=flush, args=[ctx.session])
        thread.start()
        thread.join()

    enqueue(sessions, use, [{"account": 1}, {"account": 2}])
    drain(jobs, **ONE_SLOT)
    assert runs == [1, 2]
    assert balances(engine) == {1: 1, 2: 1}


@pytest.mark.large
def test_a_hanging_handler_is_cut_off_and_charged_alone(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The other jobs of its batch wait again, uncharged."""
    jobs = Jobs()
    release = threading.Event()

    @jobs.handler(queue="hang", batchable=True, timeout_seconds=0.3, retry=Backoff(max_attempts=1))
    def act(ctx: Context, account: Account, hangs: bool) -> None:
        account.balance += 1
        if hangs:
            release.wait(20)

    enqueue(sessions, act, [{"account": id_, "hangs": id_ == 3} for id_ in range(1, 6)])
    try:
        events = drain(jobs, **ONE_SLOT)
    finally:
        release.set()
    assert balances(engine) == {1: 1, 2: 1, 4: 1, 5: 1}
    assert [event.reason for event in events if isinstance(event, JobDied)] == [
        "gave up after 1 of 1 attempts: outboxq.errors.HandlerTimedOut"
    ]
    assert sum(isinstance(event, JobDone) and event.job.attempt == 1 for event in events) == 4


def test_a_deadlock_is_told_and_both_batches_are_done_once(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """40P01 undoes one of them, whose jobs run again by themselves."""
    jobs = Jobs()
    barrier = threading.Barrier(2)
    tries: Counter[str] = Counter()

    @jobs.handler(queue="locks", batchable=True)
    def lock(ctx: Context, ids: list[int], name: str) -> None:
        tries[name] += 1
        for id_ in ids:
            ctx.session.execute(shared_app.ADD, {"id": id_, "cents": 1})
            if tries[name] == 1 and id_ == ids[0]:
                barrier.wait(10)
        ctx.session.add(Effect(name=name))

    @jobs.handler(queue="locks", batchable=True)
    def idle(ctx: Context) -> None: ...

    with sessions.begin() as session:
        session.add_job(lock, ids=[1, 2], name="up")
        session.add_job(idle)
        session.add_job(lock, ids=[2, 1], name="down")
        session.add_job(idle)
    drain(jobs, slots_per_queue=2, batch_size=2)
    assert ledger(engine) == {"up": 1, "down": 1}
    assert balances(engine) == {1: 2, 2: 2}
    assert sum(tries.values()) >= 3


def test_stale_rows_are_loaded_again_after_a_handlers_own_statement(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A handler behind it sees what it wrote, as where each runs alone."""
    jobs = Jobs()

    @jobs.handler(queue="stale", batchable=True)
    def double(ctx: Context) -> None:
        ctx.session.execute(text("UPDATE account SET balance = balance * 2"))

    @jobs.handler(queue="stale", batchable=True)
    def add(ctx: Context, account: Account) -> None:
        account.balance += 5

    with sessions.begin() as session:
        account = session.get_one(Account, 1)
        for kind in (add, double, add, double):
            session.add_job(kind, account=account) if kind is add else session.add_job(double)
    drain(jobs, **ONE_SLOT)
    assert balances(engine) == {1: 30}


def test_batchable_under_a_lease_is_refused(engine: Engine) -> None:
    """Each job has a transaction of its own there."""

    def nothing(ctx: Context) -> None: ...

    with pytest.raises(RegistryError, match="leave one of the two out"):
        Jobs().handler(batchable=True, claim="lease")(nothing)
    with pytest.raises(RegistryError, match="batchable takes True or False"):
        Jobs().handler(batchable="yes")(nothing)


def test_hooks_of_the_users_own_see_each_jobs_own_flush(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Nothing waits then, and what a listener asks while a flush is under way is answered as for a job alone."""
    jobs = Jobs()
    counts: list[int] = []

    @jobs.handler(queue="hooks", batchable=True)
    def act(ctx: Context, account: Account) -> None:
        account.balance += 1

    def look(session: Session, _context: object) -> None:
        counts.append(session.connection().execute(select(func.count()).select_from(Account)).scalar_one())

    event.listen(Session, "after_flush", look)
    try:
        enqueue(sessions, act, [{"account": id_} for id_ in (1, 2, 3)])
        counts.clear()
        with statements() as seen:
            drain(jobs, **ONE_SLOT)
    finally:
        event.remove(Session, "after_flush", look)
    assert [many for statement, many in seen if statement.startswith("UPDATE account")] == [1, 1, 1]
    assert counts == [100, 100, 100]
    assert balances(engine) == {1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize(
    "how", ["SET LOCAL search_path = elsewhere, public", "SELECT set_config('search_path', 'elsewhere, public', true)"]
)
def test_a_table_of_another_schema_is_not_taken_for_the_one_that_was_looked_up(
    how: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Its trigger adds to another row, which a later job has as an argument."""
    jobs = Jobs()

    @jobs.handler(queue="moved", batchable=True)
    def move(ctx: Context) -> None:
        ctx.session.execute(text(how))

    @jobs.handler(queue="moved", batchable=True)
    def credit(ctx: Context, account: Account) -> None:
        account.balance += 1

    with engine.begin() as connection:
        connection.execute(
            text("CREATE SCHEMA elsewhere CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL)")
        )
        connection.execute(text("INSERT INTO elsewhere.account VALUES (1, 0), (2, 0), (3, 0)"))
        connection.execute(
            text(
                "CREATE FUNCTION elsewhere.add() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF new.id = 1 THEN "
                "UPDATE elsewhere.account SET balance = balance + 100 WHERE id = 2; END IF; RETURN new; END $$"
            )
        )
        connection.execute(
            text("CREATE TRIGGER add AFTER UPDATE ON elsewhere.account FOR EACH ROW EXECUTE FUNCTION elsewhere.add()")
        )
    with sessions.begin() as session:
        first, *others = (credit.job(account=session.get_one(Account, number)) for number in (1, 3, 1, 2))
        session.add_jobs([first, move.job(), *others])
    drain(jobs, **ONE_SLOT)
    with engine.connect() as connection:
        found = connection.execute(text("SELECT balance FROM elsewhere.account ORDER BY id")).scalars().all()
    assert found == [1, 101, 1]
    assert balances(engine) == {1: 1}


def test_a_batch_is_freed_without_the_garbage_collector(
    sessions: sessionmaker[OutboxSession], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A circle would keep the arguments and events of all its jobs until the collector comes by."""
    runs, init = list[weakref.ref[Any]](), shared_batch._SharedRun.__init__

    def noting(self: Any, *given: Any) -> None:
        init(self, *given)
        runs.append(weakref.ref(self))

    monkeypatch.setattr(shared_batch._SharedRun, "__init__", noting)
    jobs = Jobs()

    @jobs.handler(queue="freed", batchable=True)
    def change(ctx: Context, account: Account) -> None:
        account.balance += 1

    enqueue(sessions, change, [{"account": id_} for id_ in range(1, 11)])
    gc.disable()
    try:
        drain(jobs, **ONE_SLOT)
        assert [run() for run in runs] == [None]
    finally:
        gc.enable()
