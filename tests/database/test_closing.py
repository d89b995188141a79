"""Connections are closed by what uses them, and never beneath a statement."""

import asyncio
import threading
import time

import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.util import greenlet_spawn

from outboxq.database.closing import finish, give_up
from outboxq.database.driver import run_on_libpq
from outboxq.postgres import Database
from tests.support.urls import libpq_url


def hold_up(loop: asyncio.AbstractEventLoop, turns: int) -> None:
    """Make each of the next turns of the loop take long."""
    time.sleep(0.1)
    if turns:
        loop.call_soon(hold_up, loop, turns - 1)


async def give_up_beside_a_statement(url: str) -> list[bool]:
    """Whether the statement of another task had ended when its connection was closed, and the loop was held up."""
    engine, ended = create_async_engine(url), []
    connection = await engine.connect()
    driver = (await connection.get_raw_connection()).driver_connection
    assert isinstance(driver, psycopg.AsyncConnection)
    left_behind = asyncio.create_task(driver.execute("SELECT pg_sleep(600)"))
    while driver.pgconn.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:  # noqa: ASYNC110  # the driver's
        await asyncio.sleep(0)
    event.listen(engine.sync_engine, "invalidate", lambda *_: ended.append(left_behind.done()))
    hold_up(asyncio.get_running_loop(), 10)
    await greenlet_spawn(give_up, connection.sync_connection)
    with pytest.raises(psycopg.OperationalError):
        await left_behind
    await engine.dispose()
    return ended


def test_a_statement_of_a_loop_that_is_held_up_ends_first(outboxq_database: Database) -> None:
    """However long its task waits for its turn: else the driver goes on in freed memory."""
    assert asyncio.run(give_up_beside_a_statement(outboxq_database.url)) == [True]


async def give_up_behind_a_copy(url: str) -> None:
    engine = create_async_engine(url)
    connection = await engine.connect()
    driver = (await connection.get_raw_connection()).driver_connection
    assert isinstance(driver, psycopg.AsyncConnection)
    copy = driver.cursor().copy("COPY (SELECT generate_series(1, 100000)) TO STDOUT")
    await copy.__aenter__()
    waits = asyncio.create_task(driver.execute("SELECT 1"))
    await asyncio.sleep(0)
    await greenlet_spawn(give_up, connection.sync_connection)
    assert driver.closed
    waits.cancel()
    await asyncio.wait([waits])
    await engine.dispose()


def test_what_no_task_goes_on_with_is_not_waited_for(outboxq_database: Database) -> None:
    """An unfinished COPY holds the driver's lock for good, and a task that waits for the lock runs no statement."""
    asyncio.run(give_up_behind_a_copy(outboxq_database.url))


def test_a_thread_does_not_close_what_another_one_uses(outboxq_database: Database) -> None:
    """It is refused, before memory is freed that the other one works with."""
    connection = psycopg.connect(libpq_url(outboxq_database.url), autocommit=True)
    user = threading.Thread(target=run_on_libpq, args=(connection.pgconn, "SELECT 1"))
    user.start()
    user.join()
    with pytest.raises(AssertionError, match="another thread"):
        finish(connection)
    connection.close()
