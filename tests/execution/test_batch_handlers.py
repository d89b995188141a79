"""Batch handlers: many jobs in one call and one transaction, with an outcome for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import (
    AsyncBatchContext,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    DeadLetter,
    Discard,
    Jobs,
    OutboxSession,
    Retry,
    Snooze,
)
from outboxq.errors import ArgumentError, RegistryError
from outboxq.events import Event, JobDied, JobDiscarded, JobDone, JobRetried, JobSnoozed
from tests.support.app import Account, Child, Effect
from tests.support.ledger import balances
from tests.support.shared_app import statements

Drain = Callable[..., list[Event]]
ONCE = Backoff(max_attempts=1)
MANY = {"slots_per_queue": 1, "batch_size": 50}
CREDIT = text(
    "UPDATE account SET balance = balance + given.cents FROM (SELECT unnest(CAST(:ids AS int[])) AS id, "
    "unnest(CAST(:cents AS int[])) AS cents) AS given WHERE account.id = given.id"
)


@dataclass(frozen=True)
class Credit:
    account_id: int
    cents: int = 1


class CreditStruct(msgspec.Struct):
    account_id: int
    cents: int = 1


@dataclass
class CreditEntity:
    account: Account
    cents: int = 1


@dataclass
class Named:
    name: str


@pytest.fixture(autouse=True)
def _accounts(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add_all(Account(id=id_) for id_ in range(1, 101))


def names(engine: Engine) -> list[str]:
    with Session(engine) as session:
        return sorted(session.scalars(select(Effect.name)))


@pytest.mark.first_and_last
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("arguments", [Credit, CreditStruct])
def test_a_batch_is_one_call_and_one_statement_and_never_over_its_size(
    flavour: str, arguments: type, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """None means that all are done."""
    jobs = Jobs()
    sizes: list[int] = []

    def parameters(items: Sequence[BatchItem[Credit]]) -> dict[str, list[int]]:
        sizes.append(len(items))
        assert all(isinstance(item.args, arguments) and item.job.kind == "credit_all" for item in items)
        return {"ids": [item.args.account_id for item in items], "cents": [item.args.cents for item in items]}

    if flavour == "sync":

        @jobs.batch_handler(arguments, queue="many", max_size=20)
        def credit_all(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> None:
            ctx.session.execute(CREDIT, parameters(items))
    else:

        @jobs.batch_handler(arguments, queue="many", max_size=20)
        async def credit_all(ctx: AsyncBatchContext, items: Sequence[BatchItem[Credit]]) -> None:
            await ctx.session.execute(CREDIT, parameters(items))

    with sessions.begin() as session:
        session.add_jobs(credit_all.job(account_id=id_, cents=id_) for id_ in range(1, 51))
    with statements() as seen:
        events = drain(jobs, **MANY)
    assert sizes == [20, 20, 10]
    assert len([statement for statement, _ in seen if statement.startswith("UPDATE account")]) == 3
    assert balances(engine) == {id_: id_ for id_ in range(1, 51)}
    assert sum(isinstance(event, JobDone) for event in events) == 50


def test_each_job_has_the_outcome_that_was_returned_for_it(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """In their order; rows of those that are not done are the handler's own affair."""
    jobs = Jobs()
    outcomes = {
        "done": None,
        "retry": Retry(timedelta(hours=1)),
        "snooze": Snooze(timedelta(hours=1)),
        "dead": DeadLetter("cannot be"),
        "discard": Discard("not needed"),
    }

    @jobs.batch_handler(Named, queue="outcomes")
    def act(ctx: BatchContext, items: Sequence[BatchItem[Named]]):
        return [outcomes[item.args.name] for item in items]

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in outcomes)
    events = drain(jobs, **MANY)
    kinds = (JobDone, JobRetried, JobSnoozed, JobDied, JobDiscarded)
    assert [type(event) for event in events if isinstance(event, kinds)] == list(kinds)


def test_the_deadline_of_jobs_that_ran_alone_is_none_of_those_that_run_together(
    sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Jobs that were undone together run alone, each under its own; then the transaction has the longest again."""
    jobs, found = Jobs(), []

    @jobs.handler(queue="q", batchable=True, timeout_seconds=2, retry=ONCE)
    def short(ctx: Context, name: str) -> None:
        raise ValueError("no")

    @jobs.batch_handler(Named, queue="q", max_size=50, timeout_seconds=30)
    def long(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        found.append((len(items), ctx.session.scalar(text("SELECT current_setting('statement_timeout')"))))

    with sessions.begin() as session:
        session.add_jobs(short.job(name=name) for name in "ab")
        session.add_jobs(long.job(name=name) for name in "cd")
    drain(jobs, **MANY)
    assert found == [(2, "30s")]


@pytest.mark.first_and_last
@pytest.mark.parametrize("how", ["raise", "integrity", "orphan", "rollback", "swallow", "close", "driver"])
def test_what_fails_with_many_is_tried_with_each_alone(
    how: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """So that only the guilty job is charged, and the others are done once."""
    jobs = Jobs()

    @jobs.batch_handler(Named, queue="guilty", retry=ONCE)
    def act(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        for item in items:
            ctx.session.add(Effect(name=item.args.name))
            if item.args.name != "guilty":
                continue
            match how:
                case "raise":
                    raise ValueError(how)
                case "integrity":
                    ctx.session.add(Account(id=1))
                case "orphan":
                    ctx.session.add(Child(parent_id=-1))
                case "rollback":
                    ctx.session.rollback()
                case "close":
                    ctx.session.close()
                    raise ValueError(how)
                case "driver":
                    ctx.session.connection().connection.cursor().execute("ROLLBACK")
                case _:
                    with pytest.raises(Exception, match="division"):
                        ctx.session.execute(text("SELECT 1 / 0"))

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in ("a", "guilty", "b"))
    events = drain(jobs, **MANY)
    assert names(engine) == ["a", "b"]
    assert [event.job.args for event in events if isinstance(event, JobDied)] == ['{"name": "guilty"}']


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([], "returned 0 outcomes for 1 jobs"),
        ([None] * 7, "returned 7 outcomes for 1 jobs"),
        ([None, 5, None], "returned 3 outcomes for 1 jobs"),
        (Retry(), "returned one Retry"),
    ],
)
def test_a_wrong_answer_is_a_recorded_failure_that_says_what_was_expected(
    returned: object, expected: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """And nothing of that call stands."""
    jobs = Jobs()

    @jobs.batch_handler(Named, queue="wrong", retry=ONCE)
    def act(ctx: BatchContext, items: Sequence[BatchItem[Named]]):
        ctx.session.add(Effect(name="never"))
        return returned

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in "ab")
    drain(jobs, **MANY)
    assert names(engine) == []
    with engine.connect() as connection:
        errors = connection.execute(text("SELECT errors->-1->>'message' FROM outboxq.dead_job")).scalars().all()
    assert len(errors) == 2
    assert all(expected in error for error in errors)


def test_calls_of_one_come_in_the_order_of_their_jobs(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    jobs = Jobs()

    @jobs.batch_handler(Named, queue="ones", max_size=1)
    def act(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        ctx.session.add_all(Effect(name=item.args.name) for item in items)

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in "abcd")
    drain(jobs, **MANY)
    with Session(engine) as session:
        assert list(session.scalars(select(Effect.name).order_by(Effect.row))) == list("abcd")


def test_arguments_that_cannot_be_read_fail_their_own_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The others are still one call."""
    jobs = Jobs()
    sizes: list[int] = []

    @jobs.batch_handler(Named, queue="payload", retry=ONCE)
    def act(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        sizes.append(len(items))

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in "abc")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET args = '{\"nobody\": 1}' WHERE args->>'name' = 'b'"))
    events = drain(jobs, **MANY)
    assert sizes == [2]
    assert sum(isinstance(event, JobDone) for event in events) == 2
    assert sum(isinstance(event, JobDied) for event in events) == 1


def test_entities_are_loaded_for_the_whole_batch_in_one_select(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The class of the arguments may hold them, as a handler's signature may."""
    jobs = Jobs()

    @jobs.batch_handler(CreditEntity, queue="entities")
    def credit(ctx: BatchContext, items: Sequence[BatchItem[CreditEntity]]) -> None:
        for item in items:
            item.args.account.balance += item.args.cents

    with sessions.begin() as session:
        for id_ in range(1, 11):
            session.add_job(credit, account=session.get_one(Account, id_), cents=id_)
    with statements() as seen:
        drain(jobs, **MANY)
    assert [many for statement, many in seen if statement.startswith("SELECT account")] == [1]
    assert [many for statement, many in seen if statement.startswith("UPDATE account")] == [10]
    assert balances(engine) == {id_: id_ for id_ in range(1, 11)}


def test_kinds_of_all_sorts_in_one_claim_are_each_done_once(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Batch handlers, batchable ones, plain ones, and kinds that nobody knows: each job is named by one event."""
    jobs, known = Jobs(), Jobs()
    order: dict[str, list[str]] = {"first": [], "second": []}

    def batch(kind: str):
        def act(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
            order[kind] += [item.args.name for item in items]
            ctx.session.add_all(Effect(name=item.args.name) for item in items)

        return jobs.batch_handler(Named, queue="mixed", kind=kind, max_size=3)(act)

    def one(kind: str, batchable: bool):
        def act(ctx: Context, name: str) -> None:
            ctx.session.add(Effect(name=name))

        return jobs.handler(queue="mixed", kind=kind, batchable=batchable)(act)

    kinds = [batch("first"), batch("second"), one("shared", True), one("plain", False)]

    @known.handler(queue="mixed", kind="unknown")
    def unknown(ctx: Context, name: str) -> None: ...

    with sessions.begin() as session:
        session.add_jobs(kind.job(name=f"{number:02}") for number, kind in enumerate([*kinds, unknown] * 6))
    events = drain(jobs, slots_per_queue=1, batch_size=50)
    expected = [f"{number:02}" for number in range(30) if number % 5 != 4]
    assert names(engine) == expected
    assert len({event.job.id for event in events if isinstance(event, JobDone)}) == 24
    assert sum(isinstance(event, JobDone) for event in events) == 24
    assert order == {"first": expected[0::4], "second": expected[1::4]}


def test_what_cannot_be_a_batch_handler_is_refused_where_it_is_declared() -> None:
    """With what to do instead."""
    jobs = Jobs()

    def act(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> None: ...

    def nothing() -> None: ...

    for size in (0, 10_001, "5", True):
        with pytest.raises(RegistryError, match=r"max_size takes 1 to 10,000"):
            jobs.batch_handler(Credit, max_size=size)(act)
    with pytest.raises(RegistryError, match="names the class"):
        jobs.batch_handler(lambda name: name)
    with pytest.raises(RegistryError, match="takes no context"):
        jobs.batch_handler(Credit)(nothing)


def test_producers_are_checked_against_the_class(sessions: sessionmaker[OutboxSession]) -> None:
    """As against a handler's signature."""
    jobs = Jobs()

    @jobs.batch_handler(Credit, queue="checked", aliases=["old"])
    def credit_all(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> None: ...

    with pytest.raises(ArgumentError, match="argument 'account_id'"):
        credit_all.job(account_id="one")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        credit_all.job(cent=1)  # type: ignore[call-arg]
    assert jobs.resolve().find("old") is credit_all


def test_a_queue_claims_as_many_as_its_largest_batch_handler_takes() -> None:
    """Even if the relay is configured for fewer."""
    jobs = Jobs()
    for kind, size in [("a", 20), ("b", 300)]:

        @jobs.batch_handler(Credit, kind=kind, queue="many", max_size=size)
        def act(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> None: ...

    @jobs.handler(queue="few")
    def few(ctx: Context) -> None: ...

    registry = jobs.resolve()
    assert (registry.batch_size("many", 1), registry.batch_size("many", 500), registry.batch_size("few", 7)) == (
        300,
        500,
        7,
    )
