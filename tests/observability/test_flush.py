"""What relays add to the history: each job once, whatever becomes of their connections, and nothing uncommitted."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from outboxq.clock import DatabaseClock
from outboxq.database.driver import run_on_libpq
from outboxq.events import Event, JobCrashed, JobDone
from outboxq.observability.aggregate import KINDS_MOST, OTHER, OUTCOMES, Aggregate
from outboxq.observability.flush import Flusher, RelayActivity, RelayIdentity
from outboxq.postgres import Database
from outboxq.statements.history import BUCKETS
from outboxq.statements.transaction import BEGIN
from tests.support.events import job
from tests.support.ledger import rows

Send = Callable[[str], list[tuple[str | None, ...]]]


def send(engine: Engine, script: str, end: str = "COMMIT") -> list[tuple[str | None, ...]]:
    """As the historian does."""
    connection = engine.raw_connection()
    try:
        return run_on_libpq(connection.driver_connection.pgconn, f"{BEGIN}; {script}; {end}")
    finally:
        connection.close()


def flusher(aggregate: Aggregate) -> Flusher:
    identity = RelayIdentity(
        id=uuid4(), host="h", pid=1, version="1", queues=("q",), kinds=("k",), slots=2, listens=True
    )
    return Flusher(
        "outboxq", identity, aggregate, lambda: RelayActivity("serving", 1, ("mail",), "[]"), DatabaseClock()
    )


@pytest.fixture
def transact(engine: Engine) -> Send:
    return partial(send, engine)


def totals(engine: Engine) -> dict[tuple[str, str], dict[str, int]]:
    """The sums per queue and kind; the histograms agree with the outcomes of jobs that ran."""
    sums = ", ".join(f"sum({outcome})::bigint AS {outcome}" for outcome in OUTCOMES)
    found = {}
    with engine.connect() as connection:
        for row in connection.execute(text(f"SELECT queue, kind, {sums} FROM outboxq.stat GROUP BY queue, kind")):
            found[row.queue, row.kind] = {outcome: getattr(row, outcome) for outcome in OUTCOMES}
        for name in ("wait", "run"):
            buckets = connection.execute(
                text(f"SELECT sum((SELECT sum(n) FROM unnest({name}) AS n))::bigint FROM outboxq.stat")
            ).scalar_one()
            ran = sum(each[name] for each in found.values() for name in ("done", "retried", "snoozed", "discarded"))
            died = sum(each["died"] for each in found.values())
            assert ran <= (buckets or 0) <= ran + died
    return found


def done(kind: str, count: int) -> list[Event]:
    return [JobDone(job(kind=kind), 0.004)] * count


def test_the_numbers_of_all_relays_are_added_up(engine: Engine, transact: Send) -> None:
    """In one row for each minute, queue and kind; and each relay's row says how it is."""
    ours, theirs = Aggregate(), Aggregate()
    mine, other = flusher(ours), flusher(theirs)
    ours.add([*done("a", 3), *done("b", 1), JobCrashed(uuid4(), "q", "a", 3, dead_letter=True)])
    theirs.add(done("a", 4))
    mine.flush(transact)
    other.flush(transact)
    mine.flush(transact)
    none = dict.fromkeys(OUTCOMES, 0)
    assert totals(engine) == {("q", "a"): none | {"done": 7, "crashed": 1, "died": 1}, ("q", "b"): none | {"done": 1}}
    found = rows(engine, "SELECT run[3], run_seconds, wait_seconds FROM outboxq.stat WHERE kind = 'a'")
    assert sum(row[0] for row in found) == 7
    assert sum(row[1] for row in found) == pytest.approx(0.028)
    said = rows(engine, "SELECT flush, state, busy, slots, queues, kinds FROM outboxq.relay_status ORDER BY flush")
    assert said == [(1, "serving", 1, 2, ["q"], ["k"]), (2, "serving", 1, 2, ["q"], ["k"])]
    mine.leave(transact)
    other.leave(transact)
    assert rows(engine, "SELECT * FROM outboxq.relay_status") == []


def test_a_flush_whose_answer_was_lost_is_added_once(engine: Engine, transact: Send) -> None:
    """The same if it was not committed; what was counted meanwhile comes with the next one."""
    aggregate = Aggregate()
    ours = flusher(aggregate)

    def answer_lost(script: str) -> list[tuple[str | None, ...]]:
        transact(script)
        raise ConnectionError

    def not_committed(script: str) -> list[tuple[str | None, ...]]:
        send(engine, script, "ROLLBACK")
        raise ConnectionError

    for number, way in enumerate([answer_lost, not_committed, answer_lost, answer_lost], 1):
        aggregate.add(done("a", 1))
        with pytest.raises(ConnectionError):
            ours.flush(way)
        aggregate.add(done("a", 1))
        with pytest.raises(ConnectionError):
            ours.flush(way)
        ours.flush(transact)
        ours.flush(transact)
        assert totals(engine)["q", "a"]["done"] == 2 * number


@pytest.mark.parametrize("row_is_gone", [False, True])
def test_what_was_counted_behind_a_doubt_is_flushed_at_the_end(
    engine: Engine, transact: Send, row_is_gone: bool
) -> None:
    """A relay that stops right after a flush whose answer was lost: first that one again, then the rest."""
    aggregate = Aggregate()
    ours = flusher(aggregate)
    aggregate.add(done("a", 1))
    ours.flush(transact)
    aggregate.add(done("a", 2))

    def answer_lost(script: str) -> list[tuple[str | None, ...]]:
        transact(script)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        ours.flush(answer_lost)
    if row_is_gone:
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outboxq.relay_status"))
    aggregate.add(done("a", 4))
    ours.leave(transact)
    assert totals(engine)["q", "a"]["done"] == 7
    assert rows(engine, "SELECT count(*) FROM outboxq.relay_status") == [(0,)]


def test_a_relay_whose_row_was_removed_comes_back(engine: Engine, transact: Send) -> None:
    """With what it had counted: it stood still for days, and was taken for dead."""
    aggregate = Aggregate()
    ours = flusher(aggregate)
    ours.flush(transact)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outboxq.relay_status"))
    aggregate.add(done("a", 5))
    ours.flush(transact)
    ours.flush(transact)
    assert totals(engine)["q", "a"]["done"] == 5
    assert rows(engine, "SELECT count(*) FROM outboxq.relay_status") == [(1,)]


@pytest.mark.large
def test_no_number_is_lost_or_added_twice_while_backends_are_terminated(outboxq_database: Database) -> None:
    """Eight relays that flush all the time, on the same rows, and a backend that ends every few milliseconds."""
    relays, over, deadline = 8, threading.Event(), time.monotonic() + 100
    engine = create_engine(outboxq_database.url, poolclass=NullPool, use_native_hstore=False)
    killer = create_engine(outboxq_database.url, use_native_hstore=False, isolation_level="AUTOCOMMIT")
    failures, flushes, errors = Counter(dict.fromkeys(range(relays), 0)), Counter[int](), list[BaseException]()

    def flush_all(number: int) -> None:
        aggregate = Aggregate()
        ours = flusher(aggregate)
        try:
            # Until enough flushes were struck, however seldom the killer is in time on this machine.
            while flushes[number] < 25 or (sum(failures.values()) <= 10 and time.monotonic() < deadline):
                flushes[number] += 1
                aggregate.add([*done("a", 1), *done("b", 2)])
                while True:
                    try:
                        ours.flush(partial(send, engine))
                        break
                    except (DBAPIError, psycopg.Error):
                        failures[number] += 1
        except BaseException as error:  # noqa: BLE001  # raised again by the test
            errors.append(error)

    def terminate() -> None:
        choice = random.Random(7)
        with killer.connect() as connection:
            while not over.is_set():
                query = (
                    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state <> 'idle' "
                    "AND pid <> pg_backend_pid() ORDER BY pid"
                )
                pids = connection.scalars(text(query)).all()
                if pids:
                    connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": choice.choice(pids)})
                time.sleep(0.002)

    threads = [threading.Thread(target=flush_all, args=(number,)) for number in range(relays)]
    ending = threading.Thread(target=terminate)
    for thread in (*threads, ending):
        thread.start()
    for thread in threads:
        thread.join(120)
    over.set()
    ending.join(60)
    engine.dispose()
    killer.dispose()
    if errors:
        raise errors[0]
    fresh = create_engine(outboxq_database.url, use_native_hstore=False)
    found = totals(fresh)
    fresh.dispose()
    assert sum(failures.values()) > 10, "no backend was terminated in the middle of a flush"
    assert (found["q", "a"]["done"], found["q", "b"]["done"]) == (flushes.total(), 2 * flushes.total())


def test_kinds_beyond_the_first_are_one(engine: Engine, transact: Send) -> None:
    """So that kinds that are made of customers' names do not fill the tables."""
    aggregate = Aggregate()
    for number in range(KINDS_MOST + 50):
        aggregate.add(done(f"k{number}", 1))
    flusher(aggregate).flush(transact)
    found = totals(engine)
    assert len(found) == KINDS_MOST + 1
    assert found["q", OTHER]["done"] == 50


def test_each_time_falls_into_the_bucket_of_its_bound() -> None:
    """Up to and including the bound; the last one has all that is longer."""
    aggregate = Aggregate()
    for seconds in (0.0, 0.001, 0.0011, 0.0025, 43_200.0, 43_201.0):
        aggregate.add([JobDone(job(), seconds)])
    ((_, counts),) = aggregate.take().items()
    assert [place for place in range(BUCKETS) for _ in range(counts.run[place])] == [0, 0, 1, 1, 18, 19]
    assert aggregate.take() == {}
