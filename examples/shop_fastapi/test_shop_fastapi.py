"""The example as it runs: a server, requests over HTTP, and a relay in a process of its own."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from sqlalchemy import Engine, create_engine, make_url, text

from examples.shop_fastapi.app import create_app
from examples.shop_fastapi.models import create_tables
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database, Server

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60

EMAIL = "ada@example.org"


# A project of its own overrides `outboxq_prepare`. The examples share their test session with the tests of outboxq
# itself, so each has its own template.
@pytest.fixture(scope="module")
def outboxq_template(outboxq_server: Server) -> str:
    """A database with the shop's tables and outboxq's."""

    def prepare(url: str) -> None:
        engine = create_engine(url)
        with engine.begin() as connection:
            migrate(connection)
        engine.dispose()
        asyncio.run(create_tables(url))

    return outboxq_server.create_template(prepare)


@pytest.fixture
def engine(outboxq_database: Database) -> Iterator[Engine]:
    """An engine on this test's database, to look into it."""
    engine = create_engine(outboxq_database.url)
    yield engine
    engine.dispose()


@pytest.fixture(params=["psycopg", "asyncpg"])
def client(request: pytest.FixtureRequest, outboxq_database: Database) -> Iterator[httpx.Client]:
    """A client of the shop, which runs in a server on a free port, with either driver."""
    url = make_url(outboxq_database.url).set(drivername=f"postgresql+{request.param}")
    with serve(url.render_as_string(hide_password=False)) as address, httpx.Client(base_url=address) as client:
        yield client


def test_an_order_is_accepted_at_once_and_confirmed_by_the_relay(
    client: httpx.Client, outboxq_database: Database, engine: Engine
) -> None:
    """The effects of both jobs, the second enqueued by the first, show in the API; the stock is taken once."""
    placed = client.post("/orders", json={"email": EMAIL, "lines": {"teapot": 2, "cup": 6}})
    assert placed.status_code == 201
    assert placed.json()["status"] == "accepted"
    order = f"/orders/{placed.json()['id']}"
    assert client.get(order).json()["status"] == "accepted", "there is no relay yet"

    with relay(outboxq_database.url):
        wait_until(lambda: client.get(order).json()["total_cents"] == 2 * 39_00 + 6 * 4_50)
        assert client.get(order).json()["status"] == "confirmed"

        too_many = client.post("/orders", json={"email": EMAIL, "lines": {"cup": 1, "teapot": 4}})
        refused = f"/orders/{too_many.json()['id']}"
        wait_until(lambda: client.get(refused).json()["status"] == "sold out")

    with engine.connect() as connection:
        assert dict(connection.execute(text("SELECT sku, stock FROM product")).all()) == {"teapot": 3, "cup": 94}
        assert connection.execute(text("SELECT count(*) FROM invoice")).scalar_one() == 1
        assert connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one() == 0


def test_a_failing_order_leaves_neither_rows_nor_a_job(client: httpx.Client, engine: Engine) -> None:
    """Its order and its job had been inserted; the error rolled both back."""
    answer = client.post("/orders", json={"email": EMAIL, "lines": {"teapot": 1, "unicorn": 1}})

    assert answer.status_code == 404
    assert answer.json() == {"detail": "no product 'unicorn'"}
    with engine.connect() as connection:
        # An identity does not take its numbers back.
        assert connection.execute(text("SELECT last_value, is_called FROM outboxq.job_seq_seq")).one() == (1, True)
        assert connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one() == 0
        assert connection.execute(text('SELECT count(*) FROM "order"')).scalar_one() == 0
        assert connection.execute(text("SELECT count(*) FROM order_line")).scalar_one() == 0


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
def relay(url: str) -> Iterator[None]:
    """A relay as users start it."""
    process = subprocess.Popen(  # our own command line
        [sys.executable, "-m", "outboxq", "relay", "examples.shop_fastapi.jobs:jobs"],
        env={**os.environ, "OUTBOXQ_DATABASE_URL": url},
        cwd=ROOT,
    )
    try:
        yield
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 0, "it stops in order"
    finally:
        process.kill()
        process.wait()


def wait_until(reached: Callable[[], bool]) -> None:
    """Look again until it is so."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not reached():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
