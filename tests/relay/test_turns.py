"""Many queues: each has its turn, and claims are sent only to those in which a poll or a commit found something."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

import outboxq.relay.slot as slot_module
from outboxq import Backoff, BatchContext, BatchItem, Context, Jobs, OutboxSession, Relay, RelayConfig, SlotGroup
from outboxq.database.driver import Script
from outboxq.errors import ConfigError
from outboxq.events import JobDone
from outboxq.postgres import Database
from outboxq.relay.poller import Order
from tests.conftest import StartRelay
from tests.relay.test_wake import wait_until_asleep
from tests.support.app import Account, Child
from tests.support.limits import FOLLOW_ON, with_limits
from tests.support.scripts import behind_commit, change_scripts, text_of
from tests.support.waiting import PATIENCE, wait_until

MANY = 200
_CLAIMED_QUEUE = re.compile(r"EXECUTE outboxq_\w+\('([^']+)'")


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queues of the claims that are sent, by themselves or behind a COMMIT."""
    sent: list[str] = []
    change_scripts(monkeypatch, lambda script: sent.extend(_CLAIMED_QUEUE.findall(text_of(script))))
    return sent


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The polls that slots make on their own account while they work."""
    sent: list[str] = []
    original = slot_module.run_alone
    monkeypatch.setattr(slot_module, "run_alone", lambda line, script: (sent.append(script), original(line, script))[1])
    return sent


@dataclass
class Parented:
    parent_id: int


def many_queues(number: int, handler: Callable[[Context, int], None]) -> Jobs:
    jobs = Jobs()
    for place in range(number):
        jobs.handler(queue=f"queue {place:03}", kind=f"kind {place:03}")(handler)
    return jobs


def enqueue(sessions: sessionmaker[OutboxSession], jobs: Jobs, numbers: range, queues: int) -> None:
    registry = jobs.resolve()
    with sessions.begin() as session:
        session.add_jobs(registry.find(f"kind {number % queues:03}").job(number) for number in numbers)


@pytest.mark.first_and_last
@pytest.mark.parametrize("queues", [2, 10, MANY])
@pytest.mark.parametrize("group", ["*", "ordered"])
@pytest.mark.parametrize("slots", [1, 4])
def test_a_job_costs_two_claims_at_most_whatever_the_number_of_queues(
    group: str,
    queues: int,
    slots: int,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    claims: list[str],
    polls: list[str],
) -> None:
    """One slot claims from no queue in which nothing waits, and a poll serves many claims."""
    done: list[int] = []
    jobs = many_queues(MANY, lambda ctx, number: done.append(number))
    names = ("*",) if group == "*" else tuple(sorted(jobs.resolve().flavours))
    enqueue(sessions, jobs, range(MANY), queues)
    Relay(outboxq_database.url, jobs, RelayConfig(groups=(SlotGroup(names, slots),))).drain()
    assert sorted(done) == list(range(MANY))
    if slots == 1 and group == "*":
        # Where many take turns, the second claim from a queue, which would find nothing, is left out.
        assert len(claims) <= 1.5 * MANY
    # Where a job was taken, each of the other slots may claim once in vain, if it saw the job in the same poll.
    assert len(claims) <= (2 if slots == 1 else 1 + slots) * MANY
    assert len(polls) <= MANY


def test_a_sleeping_slot_claims_from_the_queue_that_it_was_called_to_and_from_no_other(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    claims: list[str],
) -> None:
    """Two queues or hundreds: the other ones cost nothing between COMMIT and the handler."""
    done: list[int] = []
    jobs = many_queues(MANY, lambda ctx, number: done.append(number))
    config = RelayConfig(groups=(SlotGroup(("*",)),), poll_seconds=600)
    called: list[int] = []
    with start_relay(jobs, config):
        for number in (170, 3, 99):
            wait_until_asleep(engine, f"queue {number:03}")
            called.append(number)
            enqueue(sessions, jobs, range(number, number + 1), MANY)
            wait_until(lambda: done == called, "the handler")
    assert set(claims) == {f"queue {number:03}" for number in called}
    assert len(claims) <= 3 * len(called)


def test_the_claim_of_the_next_queue_comes_with_the_commit_of_the_jobs_before_it(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job in a queue of its own costs one round trip to be claimed and committed, as one of many in a queue does."""
    along: list[str] = []

    def noting(script: Script) -> None:
        if behind_commit(script):
            along.extend(_CLAIMED_QUEUE.findall(text_of(script)))

    change_scripts(monkeypatch, noting)
    done: list[int] = []
    jobs = many_queues(20, lambda ctx, number: done.append(number))
    enqueue(sessions, jobs, range(20), 20)
    config = RelayConfig(groups=(SlotGroup(("*",)),), batch_size=5)
    with_limits(Relay(outboxq_database.url, jobs, config), FOLLOW_ON).drain()
    assert sorted(done) == list(range(20))
    assert len(along) == len(set(along)) == 19


def test_what_is_found_with_a_commit_in_another_queue_belongs_to_that_queue(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Jobs of unknown kinds are parked where they are, and deadlines are those of their own queue's handlers."""
    jobs, timeouts = Jobs(), dict[str, str]()

    def note(ctx: Context) -> None:
        timeouts[ctx.job.queue] = ctx.session.scalars(text("SHOW statement_timeout")).one()

    for name, seconds in (("a", 40), ("b", 50), ("c", None)):
        jobs.handler(queue=name, kind=name, timeout_seconds=seconds)(note)
    with sessions.begin() as session:
        session.add_jobs(jobs.resolve().find(name).job() for name in "abc")
        unknown = "SELECT gen_random_uuid(), unnest('{a,b,c}'::text[]), 'x', '{}'"
        session.execute(text(f"INSERT INTO outboxq.job (id, queue, kind, args) {unknown}"))
    config = RelayConfig(groups=(SlotGroup(("*",)),), batch_size=1)
    with_limits(Relay(outboxq_database.url, jobs, config), FOLLOW_ON).drain()
    assert timeouts == {"a": "40s", "b": "50s", "c": "0"}
    with engine.connect() as connection:
        left = connection.exec_driver_sql("SELECT queue FROM outboxq.job WHERE kind = 'x' AND parked = 1 ORDER BY 1")
        assert left.scalars().all() == ["a", "b", "c"]


def test_queues_of_the_star_take_turns(sessions: sessionmaker[OutboxSession], outboxq_database: Database) -> None:
    """A job of the last one runs beside a first one that is never empty."""
    order: list[str] = []
    jobs = Jobs()

    @jobs.handler(queue="a")
    def endless(ctx: Context, number: int) -> None:
        order.append("a")
        if number < 400 and "z" not in order:
            ctx.session.add_job(endless, number + 1)

    @jobs.handler(queue="z")
    def waits(ctx: Context) -> None:
        order.append("z")

    with sessions.begin() as session:
        session.add_jobs(endless.job(number) for number in range(50))
        session.add_job(waits)
    Relay(outboxq_database.url, jobs, RelayConfig(groups=(SlotGroup(("*",)),))).drain()
    assert "z" in order
    # With precedence it would be the last one, behind 20,000.
    assert order.index("z") < 15_000


@pytest.mark.large
def test_every_full_queue_of_the_star_is_served_in_each_round(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, claims: list[str]
) -> None:
    """None is empty before all have begun, and the claims go on in step."""
    order: list[int] = []
    jobs = many_queues(10, lambda ctx, number: order.append(number % 10))
    enqueue(sessions, jobs, range(3_000), 10)
    Relay(outboxq_database.url, jobs, RelayConfig(groups=(SlotGroup(("*",)),))).drain()
    half = Counter(order[:1_500])
    assert len(half) == 10
    assert len(order) == 3_000
    assert len(claims) <= 2 * 3_000


def test_queues_that_are_ordered_by_name_come_before_the_star(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """`urgent,*`: what is named has precedence, and the rest takes turns behind it."""
    order: list[str] = []
    jobs = Jobs()
    for name in ("a", "urgent", "z"):

        def note(ctx: Context, name: str = name) -> None:
            order.append(ctx.job.queue)

        jobs.handler(queue=name, kind=name)(note)
    with sessions.begin() as session:
        for name in ("a", "z", "urgent"):
            session.add_jobs(jobs.resolve().find(name).job() for _ in range(5))
    Relay(outboxq_database.url, jobs, RelayConfig(groups=(SlotGroup(("urgent", "*")),))).drain()
    assert order[:5] == ["urgent"] * 5
    assert Counter(order) == dict.fromkeys(("a", "urgent", "z"), 5)


def test_due_jobs_and_ready_ones_of_a_queue_among_many_both_run(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """A poll names both sorts, and each has its turn."""
    done: list[int] = []
    jobs = many_queues(3, lambda ctx, number: done.append(number))
    kind = jobs.resolve().find("kind 001")
    with sessions.begin() as session:
        session.add_jobs(kind.job(number) for number in range(20))
        session.add_jobs(kind.options(delay=timedelta(microseconds=1)).job(number) for number in range(20, 40))
    Relay(outboxq_database.url, jobs, RelayConfig(groups=(SlotGroup(("*",)),))).drain()
    assert sorted(done) == list(range(40))


def test_a_claim_that_was_not_sent_says_nothing_about_the_jobs_that_run(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """It was asked for in another queue, to go with a COMMIT that was refused: the next one is of the jobs' own."""
    jobs, transactions = Jobs(), []

    @jobs.batch_handler(Parented, queue="a", max_size=50, retry=Backoff(max_attempts=1))
    def adopt(ctx: BatchContext, items: Sequence[BatchItem[Parented]]) -> None:
        ctx.session.add_all(Child(parent_id=item.args.parent_id) for item in items)

    @jobs.handler(queue="b")
    def look(ctx: Context) -> None:
        transactions.append(ctx.session.scalar(text("SELECT pg_current_xact_id()::text")))

    with sessions.begin() as session:
        session.add(Account(id=1))
        # One of them breaks a constraint that is checked at COMMIT.
        session.add_jobs(adopt.job(parent_id=parent_id) for parent_id in (1, 1, 999))
        session.add_jobs(look.job() for _ in range(20))
    config = RelayConfig(groups=(SlotGroup(("a", "b")),), batch_size=1)
    with_limits(Relay(outboxq_database.url, jobs, config), FOLLOW_ON).drain()
    assert len(set(transactions)) == 20


def test_all_slots_come_to_a_burst_and_one_to_a_single_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """The slot that finds jobs calls the next one, whichever queues they sleep on."""
    together = threading.Barrier(4)

    def meet(ctx: Context, number: int) -> None:
        together.wait(PATIENCE)

    jobs = many_queues(20, meet)
    config = RelayConfig(groups=(SlotGroup(("*",), 4),), poll_seconds=10 * PATIENCE)
    with start_relay(jobs, config) as running:
        wait_until_asleep(engine, "queue 007")
        enqueue(sessions, jobs, range(7, 7 + 4 * 20, 20), 20)
        wait_until(lambda: len(running.of(JobDone)) == 4, "four jobs at the same time")


def test_the_order_of_queues() -> None:
    """Lowest rank first; of those that take turns, the next one behind the last."""
    order = Order(("urgent", "a", "b", "c", "late"), {"a", "b", "c"})
    assert order.first("b", {"a", "b", "c", "late"}) == "c"
    assert order.first("c", {"a", "b", "late"}) == "a"
    assert order.first("b", {"b", "late"}) == "b"
    assert order.first("a", {"urgent", "b"}) == "urgent"
    assert order.first("a", {"late", "elsewhere"}) == "late"
    assert order.first("a", {"elsewhere"}) is None


def test_a_group_cannot_give_turns_to_queues_that_it_does_not_have() -> None:
    """A typing mistake is named."""
    with pytest.raises(ConfigError, match="not in the group: b"):
        SlotGroup(("a",), in_turns=frozenset({"b"}))
