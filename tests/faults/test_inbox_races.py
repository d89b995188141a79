"""Many deliveries of one message at the same moment, and winners that do not live to commit: accepted exactly once.

The ledger has no unique constraint: what is accepted twice shows there twice.
"""

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from outboxq.database.errors import sqlstate_of
from outboxq.inbox import Inbox
from outboxq.postgres import Database
from outboxq.testing import CommitProxy
from tests.support.app import Effect
from tests.support.inbox_targets import waiting_for_a_transaction
from tests.support.ledger import ledger
from tests.support.waiting import PATIENCE, wait_until

DELIVERIES = 16
inbox = Inbox("races")

# A consumer in a process of its own, which is killed before it commits.
CONSUMER = """
import sys, threading
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from outboxq.inbox import Inbox
from tests.support.app import Effect

with Session(create_engine(sys.argv[1])) as session:
    assert Inbox("races").accept(session, "m1", payload={"x": 1})
    session.add(Effect(name="m1"))
    session.flush()
    print("accepted", flush=True)
    threading.Event().wait()
"""


class Aborted(Exception):
    """The consumer fails after it has accepted and written."""


@pytest.fixture
def crowd(outboxq_database: Database) -> Iterator[Engine]:
    """A connection for each delivery."""
    engine = create_engine(outboxq_database.url, pool_size=DELIVERIES, max_overflow=0)
    yield engine
    engine.dispose()


def receive(engine: Engine, message_id: str, fails: Callable[[], bool] = lambda: False) -> bool:
    """One delivery, as a consumer handles it: accept, write, commit."""
    with Session(engine) as session, session.begin():
        if not inbox.accept(session, message_id, payload={"x": 1}):
            return False
        session.add(Effect(name=message_id))
        session.flush()
        if fails():
            raise Aborted
        return True


def deliver_all(engine: Engine, message_ids: list[str], deliver: Callable[[Engine, str], bool]) -> Counter[str]:
    """Deliver each message by 16 threads at the same time; how often each was accepted."""
    together = threading.Barrier(DELIVERIES)

    def deliveries() -> list[str]:
        together.wait(PATIENCE)
        return [message_id for message_id in message_ids if deliver(engine, message_id)]

    with ThreadPoolExecutor(DELIVERIES) as threads:
        futures = [threads.submit(deliveries) for _ in range(DELIVERIES)]
        return Counter(accepted for future in futures for accepted in future.result(4 * PATIENCE))


@pytest.mark.large
@pytest.mark.parametrize("messages", [50, pytest.param(200, marks=pytest.mark.large)])
def test_concurrent_deliveries_are_accepted_exactly_once(engine: Engine, crowd: Engine, messages: int) -> None:
    """16 deliveries of each of them: one is told so, and one effect stands."""
    message_ids = [f"message {number}" for number in range(messages)]
    once = dict.fromkeys(message_ids, 1)
    assert deliver_all(crowd, message_ids, receive) == once
    assert ledger(engine) == once


@pytest.mark.parametrize("messages", [25, pytest.param(100, marks=pytest.mark.large)])
def test_a_delivery_that_rolls_back_is_made_up_for_by_another(engine: Engine, crowd: Engine, messages: int) -> None:
    """Winners fail at random after they have written, and are delivered again."""
    message_ids = [f"message {number}" for number in range(messages)]
    once = dict.fromkeys(message_ids, 1)
    aborted: list[str] = []

    def deliver(engine: Engine, message_id: str) -> bool:
        while True:
            try:
                return receive(engine, message_id, lambda: random.random() < 0.7)
            except Aborted:
                aborted.append(message_id)

    assert deliver_all(crowd, message_ids, deliver) == once
    assert ledger(engine) == once
    assert aborted


@pytest.mark.each_value
@pytest.mark.parametrize("messages", [15, pytest.param(60, marks=pytest.mark.large)])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_on_stricter_levels_a_retry_of_the_transaction_is_enough(
    engine: Engine, crowd: Engine, level: str, messages: int
) -> None:
    """A serialization failure is the answer to most of the duplicates; the next transaction sees what stands."""
    once: dict[str, int] = {}
    repeated: list[str] = []

    def deliver(engine: Engine, message_id: str) -> bool:
        while True:
            try:
                return receive(engine, message_id)
            except DBAPIError as error:
                if sqlstate_of(error) != "40001":
                    raise
                repeated.append(message_id)

    strict = crowd.execution_options(isolation_level=level)
    # On a fast machine a crowd may come and go without two that meet.
    while not repeated and len(once) < 20 * messages:
        message_ids = [f"message {len(once) + number}" for number in range(messages)]
        once |= dict.fromkeys(message_ids, 1)
        assert deliver_all(strict, message_ids, deliver) == dict.fromkeys(message_ids, 1)
    assert ledger(engine) == once
    assert repeated


@pytest.fixture
def waiters(engine: Engine, crowd: Engine) -> Iterator[Callable[[], list[Future[bool]]]]:
    """Starts 15 deliveries of the message that somebody is accepting; returns when all of them wait."""
    with ThreadPoolExecutor(DELIVERIES - 1) as threads:

        def start() -> list[Future[bool]]:
            futures = [threads.submit(receive, crowd, "m1") for _ in range(DELIVERIES - 1)]
            wait_until(lambda: waiting_for_a_transaction(engine) == DELIVERIES - 1, "15 deliveries to wait")
            return futures

        yield start


def test_a_winner_whose_backend_is_terminated_is_followed_by_one_other(
    engine: Engine, outboxq_database: Database, waiters: Callable[[], list[Future[bool]]]
) -> None:
    """Its rows are gone with its connection, and 1 of 15 waiting deliveries is accepted."""
    other = create_engine(outboxq_database.url)
    with Session(other) as winner:
        assert inbox.accept(winner, "m1")
        winner.add(Effect(name="m1"))
        winner.flush()
        backend = winner.execute(text("SELECT pg_backend_pid()")).scalar_one()
        futures = waiters()
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:backend)"), {"backend": backend})
        assert sorted(future.result(PATIENCE) for future in futures) == [False] * 14 + [True]
        with pytest.raises(OperationalError):
            winner.commit()
    other.dispose()
    assert ledger(engine) == {"m1": 1}


@pytest.mark.large
def test_a_winner_whose_process_is_killed_is_followed_by_one_other(
    engine: Engine, outboxq_database: Database, waiters: Callable[[], list[Future[bool]]]
) -> None:
    """SIGKILL leaves the server to find out, and nothing half done."""
    command = [sys.executable, "-c", CONSUMER, outboxq_database.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "accepted\n"
            futures = waiters()
        finally:
            os.kill(process.pid, signal.SIGKILL)
        assert sorted(future.result(PATIENCE) for future in futures) == [False] * 14 + [True]
    assert ledger(engine) == {"m1": 1}


@pytest.mark.parametrize("arrived", [False, True], ids=["cut-before-it-arrives", "answer-lost"])
def test_a_delivery_whose_commit_is_not_answered_is_delivered_again(
    engine: Engine, outboxq_database: Database, arrived: bool
) -> None:
    """The inbox knows what the consumer cannot: accepted if and only if its rows stand."""
    with CommitProxy(outboxq_database.url) as proxy:
        other = create_engine(proxy.url)
        trap = proxy.cut_after_commit() if arrived else proxy.cut_before_commit()
        with pytest.raises(OperationalError):
            receive(other, "m1")
        assert trap.reached.wait(PATIENCE)
        other.dispose()
    assert ledger(engine) == ({"m1": 1} if arrived else {})
    assert receive(engine, "m1") is not arrived
    assert ledger(engine) == {"m1": 1}


def test_overlapping_batches_in_opposite_orders_do_not_deadlock(engine: Engine, crowd: Engine) -> None:
    """Both wait for the message in the middle; were each to hold an end, one would be refused when they go on."""
    ids = [f"message {number}" for number in range(9)]
    with Session(engine) as middle, ThreadPoolExecutor(2) as threads:
        assert inbox.accept(middle, ids[4])
        futures = [threads.submit(accept_batch, crowd, batch) for batch in (ids, ids[::-1])]
        wait_until(lambda: waiting_for_a_transaction(engine) == 2, "both batches to wait")
        middle.rollback()
        accepted = [future.result(PATIENCE) for future in futures]
    assert sorted(map(len, accepted)) == [0, 9]


@pytest.mark.parametrize("numbers", [30, pytest.param(100, marks=pytest.mark.large)])
def test_many_overlapping_batches_accept_each_message_once(engine: Engine, crowd: Engine, numbers: int) -> None:
    """Whatever their order and overlap: no deadlock, and each message is accepted by one of them."""
    ids = [f"{prefix}{number}" for prefix in ("é", "Z", "a", "-") for number in range(numbers)]
    together = threading.Barrier(DELIVERIES)

    def deliver(seed: int) -> Iterator[str]:
        order, accepted = random.Random(seed), []
        together.wait(PATIENCE)
        for _ in range(numbers // 5):
            batch = order.sample(ids, 40)
            accepted += accept_batch(crowd, batch)
        return accepted

    with ThreadPoolExecutor(DELIVERIES) as threads:
        futures = [threads.submit(deliver, seed) for seed in range(DELIVERIES)]
        accepted = Counter(message_id for future in futures for message_id in future.result(PATIENCE))
    assert accepted == dict.fromkeys(ids, 1) == ledger(engine)


def accept_batch(engine: Engine, ids: list[str]) -> tuple[str, ...]:
    """One delivery of a batch."""
    with Session(engine) as session, session.begin():
        batch = inbox.accept_all(session, ids)
        session.add_all(Effect(name=accepted) for accepted in batch.accepted)
        return batch.accepted
