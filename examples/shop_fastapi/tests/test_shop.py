"""The shop with a server, requests over HTTP, and a relay in a process of its own."""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import httpx
import pytest
import uvicorn
from sqlalchemy import Engine, make_url, text

from outboxq.postgres import Database
from outboxq.testing import CommitProxy, RelayProcess
from shop.app import create_app

PROJECT = Path(__file__).parents[1]
LIMIT_SECONDS = 60

EMAIL = "ada@example.org"
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


class Mailbox(Protocol):
    """What the fixture of this name has."""

    subjects: list[str]


@pytest.fixture(params=["psycopg", "asyncpg"])
def client(request: pytest.FixtureRequest, outboxq_database: Database) -> Iterator[httpx.Client]:
    """A client of the shop, which runs in a server on a free port, with either driver."""
    url = make_url(outboxq_database.url).set(drivername=f"postgresql+{request.param}")
    with (
        serve(url.render_as_string(hide_password=False)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client


def test_an_order_is_accepted_at_once_and_confirmed_by_the_relay(
    client: httpx.Client, outboxq_database: Database, engine: Engine, mailbox: Mailbox
) -> None:
    """The relay confirms it, writes the invoice and sends one mail; the stock is taken once."""
    placed = client.post("/orders", json={"email": EMAIL, "lines": {"teapot": 2, "cup": 6}})
    assert placed.status_code == 201
    assert placed.json() == {"id": 1, "status": "accepted", "total_cents": 2 * 39_00 + 6 * 4_50}
    assert client.get("/orders/1").json()["status"] == "accepted", "there is no relay yet"

    with RelayProcess("shop.jobs:jobs", outboxq_database.url):
        wait_until(lambda: client.get("/orders/1").json()["status"] == "confirmed")
        client.post("/orders", json={"email": EMAIL, "lines": {"cup": 1, "teapot": 4}})
        wait_until(lambda: client.get("/orders/2").json()["status"] == "sold out")
        wait_until(lambda: count(engine, "SELECT count(*) FROM outboxq.job") == 0)

    assert sorted(mailbox.subjects) == ["Order 1 is confirmed", "Order 2 is sold out"]
    with engine.connect() as connection:
        assert dict(connection.execute(text("SELECT sku, stock FROM product")).all()) == {"teapot": 3, "cup": 94}
    assert count(engine, "SELECT count(*) FROM invoice") == 1
    assert count(engine, "SELECT count(*) FROM outboxq.dead_job") == 0


def test_a_failing_order_leaves_neither_rows_nor_a_job(client: httpx.Client, engine: Engine) -> None:
    """Its order and its job had been inserted; the error rolled both back."""
    answer = client.post("/orders", json={"email": EMAIL, "lines": {"teapot": 1, "unicorn": 1}})

    assert answer.status_code == 422
    (problem,) = answer.json()["detail"]
    assert (problem["loc"], problem["msg"]) == (["body", "lines", "unicorn"], "there is no product 'unicorn'")
    # An identity does not take its numbers back.
    assert count(engine, "SELECT last_value FROM outboxq.job_seq_seq WHERE is_called") == 1
    for table in ("outboxq.job", '"order"', "order_line"):
        assert count(engine, f"SELECT count(*) FROM {table}") == 0  # noqa: S608  # names of our own


def test_a_request_that_comes_again_orders_once(client: httpx.Client, engine: Engine) -> None:
    """With one Idempotency-Key: one order, one job, equal responses; another body under it is refused."""
    order = {"email": EMAIL, "lines": {"cup": 1}}
    key = {"Idempotency-Key": '"8e03978e-40d5-43e8-bc93-6894a57f9324"'}
    first = client.post("/orders", json=order, headers=key, timeout=60)
    again = client.post("/orders", json=order, headers=key, timeout=60)
    other = client.post("/orders", json={**order, "lines": {"cup": 2}}, headers=key)

    assert (first.status_code, again.status_code, other.status_code) == (201, 201, 422)
    assert again.json() == first.json()
    assert again.headers["Idempotent-Replayed"] == "true"
    assert count(engine, 'SELECT count(*) FROM "order"') == 1
    assert count(engine, "SELECT count(*) FROM outboxq.job") == 1


def test_a_server_that_dies_before_it_answers_has_ordered_once(outboxq_database: Database, engine: Engine) -> None:
    """Killed when the order was committed and nothing was answered: the same request gets the recorded answer."""
    order = {"email": EMAIL, "lines": {"cup": 1}}
    key = {"Idempotency-Key": '"8e03978e-40d5-43e8-bc93-6894a57f9324"'}
    with CommitProxy(outboxq_database.url) as proxy, ThreadPoolExecutor(1) as thread:
        with serve_in_a_process(proxy.url) as (process, address):
            with product_is_locked(engine):
                lost = thread.submit(httpx.post, f"{address}/orders", json=order, headers=key, timeout=LIMIT_SECONDS)
                wait_until(lambda: count(engine, WAITING) == 1)
                trap = proxy.hold_reply()
            assert trap.reached.wait(LIMIT_SECONDS)
            process.kill()
        with pytest.raises(httpx.TransportError):
            lost.result(LIMIT_SECONDS)

    with serve(outboxq_database.url) as address:
        again = httpx.post(f"{address}/orders", json=order, headers=key, timeout=60)

    assert (again.status_code, again.json()["id"]) == (201, 1)
    assert count(engine, 'SELECT count(*) FROM "order"') == 1
    assert count(engine, "SELECT count(*) FROM outboxq.job") == 1


def test_a_request_that_is_under_way_is_answered_when_the_server_stops(
    outboxq_database: Database, engine: Engine
) -> None:
    """SIGTERM: the server takes no more requests, answers those that it has, and ends."""
    order = {"email": EMAIL, "lines": {"cup": 1}}
    with serve_in_a_process(outboxq_database.url) as (process, address), ThreadPoolExecutor(1) as thread:
        with product_is_locked(engine):
            answer = thread.submit(httpx.post, f"{address}/orders", json=order, timeout=LIMIT_SECONDS)
            wait_until(lambda: count(engine, WAITING) == 1)
            process.terminate()
            wait_until(lambda: not is_open(address))
            assert not answer.done()
        assert answer.result(LIMIT_SECONDS).status_code == 201
        process.wait(LIMIT_SECONDS)

    assert count(engine, "SELECT count(*) FROM outboxq.job") == 1


@contextmanager
def product_is_locked(engine: Engine) -> Iterator[None]:
    """Within the block an order of cups is held up: its line refers to the product, whose row is locked."""
    with engine.begin() as connection:
        connection.execute(text("SELECT FROM product WHERE sku = 'cup' FOR UPDATE"))
        yield


@contextmanager
def serve(url: str) -> Iterator[str]:
    """The application in a uvicorn server, in a thread; its address."""
    server = uvicorn.Server(uvicorn.Config(create_app(url), host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serve_in_a_process(url: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The application as users start it, on a free port; its process and its address."""
    command = [sys.executable, "-m", "uvicorn", "--factory", "shop.app:create_app", "--port", "0"]
    environment = {**os.environ, "SHOP_DATABASE_URL": url}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(  # noqa: S603  # our own command line
            command, env=environment, cwd=PROJECT, stderr=log
        )

        def read_address() -> str | None:
            log.seek(0)
            written = log.read()
            assert process.poll() is None, written
            found = re.search(r"running on (http://\S+:\d+)", written)
            return found and found[1]

        try:
            wait_until(read_address)
            yield process, str(read_address())
        finally:
            process.kill()
            process.wait()


def is_open(address: str) -> bool:
    """Whether the server takes connections."""
    try:
        httpx.get(f"{address}/health", timeout=60)
    except httpx.TransportError:
        return False
    return True


def count(engine: Engine, statement: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(statement)).scalar_one())


def wait_until(reached: Callable[[], object]) -> None:
    """Look again until it is so."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not reached():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
