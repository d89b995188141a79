"""Scripts: each result belongs to its statement's owner, and what came before a failure is kept."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq.database.driver import Answer, Script, is_lost, run_script
from outboxq.postgres import Database
from tests.support.byte_cut import ByteCut, Direction, byte_cut
from tests.support.pgbouncer import pgbouncer
from tests.support.waiting import wait_until

# Two transactions, as a batch's COMMIT and the claim behind it.
PARTS = [
    ("rows", "INSERT INTO written (number) VALUES (1), (2) RETURNING number"),
    ("check", "SET CONSTRAINTS ALL IMMEDIATE"),
    ("rows", "SELECT 3"),
    ("commit", "COMMIT"),
    ("settings", "BEGIN"),
    ("claim", "INSERT INTO written (number) VALUES (7) RETURNING number"),
]
BEFORE_COMMIT = {"rows": [(1,), (2,), (3,)]}


@pytest.fixture
def written(engine: Engine) -> Engine:
    """A database with an empty table of numbers."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE written (number integer)"))
    return engine


def numbers(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT number FROM written ORDER BY number")).scalars())


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        yield connection


def send(connection: Connection, *parts: tuple[str, str]) -> Answer:
    """Send these; what is open afterwards is rolled back."""
    answer = Script([*parts]).send(connection)
    if is_lost(connection):
        connection.invalidate()
    else:
        run_script(connection, "ROLLBACK")
    return answer


def test_each_owner_gets_the_rows_of_its_statements(written: Engine) -> None:
    """In their order, also if other statements lie between them; those without rows have no entry."""
    with written.connect() as connection:
        answer = send(connection, *PARTS)
    assert answer == Answer({**BEFORE_COMMIT, "claim": [(7,)]}, is_committed=True, error=None, failed_at="")
    assert numbers(written) == [1, 2]


@pytest.mark.usefixtures("written")
def test_an_async_connection_answers_the_same(outboxq_database: Database) -> None:
    """The same code runs on it, within `run_sync`."""

    async def answered() -> Answer:
        engine = create_async_engine(outboxq_database.url, poolclass=NullPool)
        async with engine.connect() as connection:
            answer = await connection.run_sync(lambda sync: send(sync, *PARTS))
        await engine.dispose()
        return answer

    answer = asyncio.run(answered())
    assert (answer.rows, answer.is_committed) == ({**BEFORE_COMMIT, "claim": [(7,)]}, True)


@pytest.mark.parametrize("place", range(len(PARTS) + 1))
def test_answers_before_a_failure_are_kept(written: Engine, place: int) -> None:
    """Nothing after it is executed, and COMMIT is known to be done exactly if it came first."""
    with written.connect() as connection:
        answer = send(connection, *PARTS[:place], ("failing", "SELECT 1 / 0"), *PARTS[place:])
        expected = Script([*PARTS[:place]]).parts
    assert isinstance(answer.error, psycopg.errors.DivisionByZero)
    assert answer.failed_at == "failing"
    assert answer.is_committed is (("commit", "COMMIT") in expected)
    assert set(answer.rows) == {owner for owner, _ in expected if owner in ("rows", "claim")}
    assert numbers(written) == ([1, 2] if answer.is_committed else [])


def test_a_commit_of_a_failed_transaction_is_no_commit(written: Engine) -> None:
    """PostgreSQL answers it with ROLLBACK, and with no error."""
    with written.connect() as connection, connection.begin() as transaction:
        assert Script([("failing", "SELECT 1 / 0")]).send(connection).error is not None
        answer = Script([("commit", "COMMIT")]).send(connection)
        transaction.rollback()
    assert (answer.is_committed, answer.error) == (False, None)


def test_rows_that_python_cannot_read_fail_their_owner_alone(written: Engine) -> None:
    """The server has executed what follows them: a COMMIT behind them is known to be done."""
    far = ("far", "SELECT 'infinity'::timestamptz")
    with written.connect() as connection:
        answer = send(connection, PARTS[0], far, ("commit", "COMMIT"), ("after", "SELECT 5"))
    assert isinstance(answer.error, psycopg.DataError)
    assert (answer.failed_at, answer.is_committed) == ("far", True)
    assert answer.rows == {"rows": [(1,), (2,)], "after": [(5,)]}


def test_a_part_with_two_statements_is_refused(written: Engine) -> None:
    """Its second result would be taken for that of the next owner."""
    with written.connect() as connection, connection.begin(), pytest.raises(AssertionError, match="2 statements"):
        Script([("two", "SELECT 1; SELECT 2"), ("next", "SELECT 3")]).send(connection)


def test_answers_before_a_failure_are_kept_behind_pgbouncer(written: Engine, outboxq_database: Database) -> None:
    """It hands a string on as it is, and the results as they come."""
    with pgbouncer(outboxq_database.url) as url, connected(url) as connection:
        whole = send(connection, *PARTS)
        failed = send(connection, *PARTS[:5], ("claim", "SELECT 1 / 0"))
        lost = send(connection, *PARTS[:5], ("claim", "SELECT pg_terminate_backend(pg_backend_pid())"))
    assert (whole.rows, whole.is_committed) == ({**BEFORE_COMMIT, "claim": [(7,)]}, True)
    assert (failed.rows, failed.is_committed, failed.failed_at) == (BEFORE_COMMIT, True, "claim")
    # It may cut the client off before it hands on what the server has answered: then nothing is known.
    assert lost.error is not None
    assert (lost.rows, lost.is_committed) in ((BEFORE_COMMIT, True), ({}, False))
    assert numbers(written) == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("ending", ["cancelled", "terminated"])
def test_a_claim_that_is_ended_from_outside_hides_no_commit(written: Engine, ending: str) -> None:
    """By a cancellation, or with the backend (57P01), which answers to no statement."""
    end = {"cancelled": "pg_cancel_backend", "terminated": "pg_terminate_backend"}[ending]
    sleeping = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    answers: list[Answer] = []

    def work() -> None:
        with written.connect() as connection:
            answers.append(send(connection, *PARTS[:5], ("claim", "SELECT pg_sleep(60)")))

    thread = threading.Thread(target=work)
    thread.start()
    with written.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
        pid = wait_until(lambda: other.execute(text(sleeping)).scalar(), "the claim to hang")
        other.execute(text(f"SELECT {end}({pid})"))
    thread.join(60)
    (answer,) = answers
    assert (answer.rows, answer.is_committed, answer.failed_at) == (BEFORE_COMMIT, True, "claim")
    expected = psycopg.errors.QueryCanceled if ending == "cancelled" else psycopg.errors.AdminShutdown
    assert isinstance(answer.error, expected)
    assert numbers(written) == [1, 2]


@pytest.fixture
def cut(outboxq_database: Database) -> Iterator[ByteCut]:
    with byte_cut(outboxq_database.url) as proxy:
        yield proxy


def send_cut(cut: ByteCut, direction: Direction, count: int | None) -> Answer:
    """Send the parts on a connection that is cut once `count` bytes of them, or of their answer, have passed."""
    with connected(cut.url) as connection:
        cut.arm(direction, count)
        answer = send(connection, *PARTS) if count is not None else Script([*PARTS]).send(connection)
        cut.disarm()
        connection.invalidate()
    return answer


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.parametrize("direction", ["answer", "request"])
def test_a_connection_that_is_cut_at_any_byte_shows_no_result_that_is_not_true(
    written: Engine, cut: ByteCut, direction: Direction
) -> None:
    """A COMMIT is reported only if its rows stand, and rows are those that the statements gave, or none."""
    whole = send_cut(cut, direction, None)
    assert whole.error is None
    length, seen = cut.passed, set[bool]()
    assert length > 100
    for count in range(1, length):
        with written.begin() as connection:
            connection.execute(text("TRUNCATE written"))
        answer = send_cut(cut, direction, count)
        assert answer.error is not None or count > length - 6, "ReadyForQuery, at the end, belongs to no statement"
        assert set(answer.rows) <= set(whole.rows)
        assert all(rows == whole.rows[owner][: len(rows)] for owner, rows in answer.rows.items())
        if answer.is_committed:
            assert numbers(written)[:2] == [1, 2]
        seen.add(answer.is_committed)
    assert False in seen
