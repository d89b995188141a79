"""Each attempt runs in a context of its own: what a handler sets in a context variable is not seen by the next job."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, create_engine, event, select
from sqlalchemy.orm import Session, SessionTransaction, sessionmaker

from outboxq import AsyncContext, Backoff, BatchContext, BatchItem, Context, Jobs, OutboxSession, RelayConfig
from outboxq.events import Event, JobDone
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.ledger import effects
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Event]]
BATCH_SIZES = pytest.mark.parametrize("batch_size", [1, 10])
TENANT = ContextVar("tenant", default="none")


@dataclass
class Named:
    name: str


def test_a_slot_that_hangs_as_it_opens_a_session_holds_up_no_other(
    sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Nothing is shared by the sessions of different jobs, not even a lock."""
    jobs, hangs, released = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="hanging")
    def hang(ctx: Context) -> None:
        assert ctx.session is not None

    @jobs.handler(queue="other")
    def work(ctx: Context) -> None:
        ctx.session.add(Effect(name="other"))

    def wait(_: object, __: str) -> None:
        # Of the jobs in a batch, all but the first send a savepoint.
        hangs.set()
        assert released.wait(PATIENCE)

    engine = create_engine(sessions.kw["bind"].url)
    event.listen(engine, "savepoint", wait)
    with sessions.begin() as session:
        session.add_jobs([hang.job(), hang.job()])
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=2), engine=engine) as relay:
        try:
            assert hangs.wait(PATIENCE)
            with sessions.begin() as session:
                session.add_job(work)
            wait_until(lambda: relay.of(JobDone), "the other queue's job")
        finally:
            released.set()
    engine.dispose()


@contextmanager
def flushes_named_by_tenant() -> Iterator[None]:
    def name(session: Session, *_: object) -> None:
        for effect in session.new:
            if isinstance(effect, Effect):
                effect.name += f", flushed for {TENANT.get()}"

    event.listen(Session, "before_flush", name)
    try:
        yield
    finally:
        event.remove(Session, "before_flush", name)


@pytest.mark.each_value
@BATCH_SIZES
@pytest.mark.parametrize("batchable", [False, True])
@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_context_variable_is_the_job_s_own(
    claim: str,
    batchable: bool,
    batch_size: int,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
) -> None:
    """Also of one that fails; and what is flushed when the handler has returned sees what it set."""
    jobs = Jobs()
    once = Backoff(max_attempts=1)

    @jobs.handler(queue="q", claim=claim, batchable=batchable and claim == "transaction", retry=once)
    def note(ctx: Context, name: str, fails: bool) -> None:
        ctx.session.add(Effect(name=f"{name} saw {TENANT.get()}"))
        TENANT.set(name)
        if fails:
            raise ValueError

    with sessions.begin() as session:
        session.add_jobs([note.job(name=name, fails=name == "b") for name in "abcd"])
    with flushes_named_by_tenant():
        drain(jobs, batch_size=batch_size, slots_per_queue=1)
    assert effects(engine) == [f"{name} saw none, flushed for {name}" for name in "acd"]


@pytest.mark.first_and_last
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@BATCH_SIZES
def test_a_context_variable_of_a_coroutine_is_the_job_s_own(
    batch_size: int, claim: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    jobs = Jobs()

    @jobs.handler(queue="q", claim=claim)
    async def note(ctx: AsyncContext, name: str) -> None:
        before = TENANT.get()
        TENANT.set(name)
        await ctx.session.execute(select(1))
        ctx.session.add(Effect(name=f"{name} saw {before}"))

    with sessions.begin() as session:
        session.add_jobs([note.job(name=name) for name in "abcd"])
    with flushes_named_by_tenant():
        drain(jobs, batch_size=1 if claim == "lease" else batch_size, slots_per_queue=1)
    assert effects(engine) == [f"{name} saw none, flushed for {name}" for name in "abcd"]


def test_a_context_variable_of_a_batch_handler_is_its_call_s_own(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    jobs = Jobs()

    @jobs.batch_handler(Named, queue="q", max_size=2)
    def note(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        before, name = TENANT.get(), "".join(item.args.name for item in items)
        TENANT.set(name)
        ctx.session.add(Effect(name=f"{name} saw {before}"))

    with sessions.begin() as session:
        session.add_jobs([note.job(name=name) for name in "abcd"])
    with flushes_named_by_tenant():
        drain(jobs, batch_size=4, slots_per_queue=1)
    assert effects(engine) == [f"{name} saw none, flushed for {name}" for name in ("ab", "cd")]


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_listener_resets_where_a_session_ends_what_it_set_where_it_began(
    flavour: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A token of a context variable is good in its own context alone: it is one for the whole attempt."""
    jobs, tokens = Jobs(), {}

    def begin(session: Session, transaction: SessionTransaction, _connection: object) -> None:
        if transaction.parent is None:
            tokens[session] = TENANT.set("in")

    def end(session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None and session in tokens:
            TENANT.reset(tokens.pop(session))

    if flavour == "sync":

        @jobs.handler(queue="q", retry=Backoff(max_attempts=1))
        def note(ctx: Context) -> None:
            ctx.session.execute(select(1))
            ctx.session.add(Effect(name=TENANT.get()))
    else:

        @jobs.handler(queue="q", retry=Backoff(max_attempts=1))
        async def note(ctx: AsyncContext) -> None:
            await ctx.session.execute(select(1))
            ctx.session.add(Effect(name=TENANT.get()))

    with sessions.begin() as session:
        session.add_jobs([note.job(), note.job()])
    event.listen(Session, "after_begin", begin)
    event.listen(Session, "after_transaction_end", end)
    try:
        drain(jobs, slots_per_queue=1)
    finally:
        event.remove(Session, "after_begin", begin)
        event.remove(Session, "after_transaction_end", end)
    # A session in a coroutine's own greenlets has them in common with it.
    assert effects(engine) == ["in", "in"]
