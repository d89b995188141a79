"""The bank under faults: relays are killed and their connections cut while they work, then the books are counted."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import Engine, func, make_url, select, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import OutboxSession
from outboxq.postgres import Database
from outboxq.testing import drain
from transfers.bank import open_accounts, order_transfer, read_books
from transfers.jobs import jobs
from transfers.models import Account, Entry, Transfer

PROJECT = Path(__file__).parents[1]
OPENING_CENTS = 100_000
LIMIT_SECONDS = 180
SLOTS = 3

# A relay at work: a backend of its own, in a transaction that has changed something, waiting for the relay.
AT_WORK = """
SELECT pid, backend_xid::text, state_change FROM pg_stat_activity
WHERE application_name = :relay AND backend_xid IS NOT NULL AND state = 'idle in transaction'
"""


def test_money_is_conserved_while_relays_are_killed_and_connections_cut(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Each committed transfer is in the ledger once, rolled-back ones never, and no cent appears or disappears."""
    with sessions.begin() as session:
        accounts = open_accounts(session, [f"customer {number}" for number in range(8)], OPENING_CENTS)

    with ExitStack() as stack:
        first, second, _ = (stack.enter_context(relay(outboxq_database.url, f"relay {n}")) for n in (1, 2, 3))
        bank = stack.enter_context(customers(sessions, accounts))
        kill_at_work(engine, "relay 1", first)
        cut_connections_at_work(engine, "relay 2")
        kill_at_work(engine, "relay 2", second)
        cut_connections_at_work(engine, "relay 3")
        wait_until(lambda: len(bank.committed) > 50 and bool(bank.rolled_back and bank.overdrafts))
        bank.stop()
        wait_until(lambda: count(engine, "SELECT count(*) FROM outboxq.job") == 0)

    with sessions() as session:
        books = read_books(session)
        lines = dict(session.execute(select(Entry.transfer_id, func.count()).group_by(Entry.transfer_id)).all())
        transfers = set(session.scalars(select(Transfer.id)))
        assert balances(session) == balances_by_ledger(session)
    assert lines == dict.fromkeys(bank.committed, 2)
    assert transfers == bank.committed | bank.overdrafts
    assert books.money_cents == len(accounts) * OPENING_CENTS
    assert books.doubled == 0
    assert books.refused == len(bank.overdrafts)
    assert count(engine, "SELECT count(*) FROM outboxq.dead_job") == 0


def test_an_overdraft_is_refused_and_moves_nothing(sessions: sessionmaker[OutboxSession]) -> None:
    """The transfer says that it was refused, its job is done and no dead letter, and both balances stay."""
    with sessions() as session:
        poor, rich = open_accounts(session, ["poor", "rich"], cents=5_00)
        too_much = order_transfer(session, poor, rich, cents=5_01)
        enough = order_transfer(session, poor, rich, cents=1_00)

        report = drain(session, jobs)

        assert (report.done, report.others) == (2, ())
        assert (too_much.status, enough.status) == ("refused", "carried out")
        assert balances(session) == {poor: 4_00, rich: 6_00}
        session.rollback()


class Customers:
    """What was ordered so far, by the transfers' ids."""

    def __init__(self) -> None:
        self.committed: set[int] = set()
        self.overdrafts: set[int] = set()
        self.rolled_back = 0
        self.stopping = threading.Event()
        self.threads: list[threading.Thread] = []

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()


@contextmanager
def customers(sessions: sessionmaker[OutboxSession], accounts: list[int]) -> Iterator[Customers]:
    """Two threads that order transfers until they are stopped: plain, rolled back as a whole or in part, too large."""
    bank = Customers()

    def order_any(session: OutboxSession) -> Transfer:
        source_id, target_id = random.sample(accounts, 2)
        return order_transfer(session, source_id, target_id, cents=1)

    def order() -> None:
        while not bank.stopping.wait(0.05):
            with sessions() as session:
                # More than the relays can carry out at once, so that they are always at work.
                transfers = [order_any(session) for _ in range(5)]
                session.flush()
                with session.begin_nested() as savepoint:
                    order_any(session)
                    session.flush()
                    savepoint.rollback()
                if random.random() < 0.2:
                    bank.rolled_back += 1
                    continue
                ids = {transfer.id for transfer in transfers}
                session.commit()
                bank.committed.update(ids)

    with sessions.begin() as session:
        too_much = order_transfer(session, accounts[0], accounts[1], cents=OPENING_CENTS * 100)
        session.flush()
        bank.overdrafts.add(too_much.id)
    bank.threads = [threading.Thread(target=order) for _ in range(2)]
    for thread in bank.threads:
        thread.start()
    try:
        yield bank
    finally:
        bank.stop()


@contextmanager
def relay(url: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A relay as users start it; its connections carry `name`."""
    named = make_url(url).update_query_dict({"application_name": name})
    process = subprocess.Popen(  # noqa: S603  # our own command line
        [sys.executable, "-m", "outboxq", "relay", "transfers.jobs:jobs", "--queue", f"transfers={SLOTS}"],
        env={**os.environ, "OUTBOXQ_DATABASE_URL": named.render_as_string(hide_password=False)},
        cwd=PROJECT,
    )
    try:
        yield process
        if process.poll() is None:
            process.terminate()
            assert process.wait(LIMIT_SECONDS) == 0, "it stops in order"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def kill_at_work(engine: Engine, name: str, process: subprocess.Popen[bytes]) -> None:
    """SIGKILL while it has claimed jobs. It is stopped for a second look, so that what was seen is how it died."""

    def try_to_kill() -> bool:
        assert process.poll() is None, "the relay ended by itself"
        if not at_work(engine, name):
            return False
        process.send_signal(signal.SIGSTOP)
        seen = at_work(engine, name)
        # A COMMIT that was on its way when the process was stopped has arrived by now.
        time.sleep(0.05)
        if not seen & at_work(engine, name):
            process.send_signal(signal.SIGCONT)
            return False
        process.kill()
        return process.wait() == -signal.SIGKILL

    wait_until(try_to_kill)


def cut_connections_at_work(engine: Engine, name: str) -> None:
    """`pg_terminate_backend` on a relay's connections, until one was in the middle of a job."""
    cut = AT_WORK.replace("SELECT pid,", "SELECT pg_terminate_backend(pid),")

    def try_to_cut() -> bool:
        with engine.connect() as connection:
            return bool(connection.execute(text(cut), {"relay": name}).all())

    wait_until(try_to_cut)


def at_work(engine: Engine, name: str) -> set[tuple[object, ...]]:
    with engine.connect() as connection:
        return {tuple(row) for row in connection.execute(text(AT_WORK), {"relay": name})}


def balances(session: Session) -> dict[int, int]:
    return dict(session.execute(select(Account.id, Account.balance_cents)).all())


def balances_by_ledger(session: Session) -> dict[int, int]:
    """What the accounts must hold according to the ledger."""
    moved = select(Account.id, OPENING_CENTS + func.coalesce(func.sum(Entry.cents), 0)).group_by(Account.id)
    return dict(session.execute(moved.outerjoin(Entry, Entry.account_id == Account.id)).all())


def count(engine: Engine, statement: str, **values: object) -> int:
    with engine.begin() as connection:
        return int(connection.execute(text(statement), values).scalar_one())


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not reached():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)
