"""The shop without a server and without a relay process: as a project tests most of what it does."""

from collections.abc import Iterator
from typing import Protocol

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, text

from outboxq import Relay
from outboxq.postgres import Database
from shop.app import create_app
from shop.jobs import jobs

ORDER = {"email": "ada@example.org", "lines": {"teapot": 1}}


class Mailbox(Protocol):
    """What the fixture of this name has."""

    subjects: list[str]


@pytest.fixture
def client(outboxq_database: Database) -> Iterator[TestClient]:
    """Calls the application in this process; the block runs its lifespan."""
    with TestClient(create_app(outboxq_database.url)) as client:
        yield client


def test_the_price_of_an_order_is_that_of_its_moment(
    client: TestClient, outboxq_database: Database, engine: Engine, mailbox: Mailbox
) -> None:
    """A price that changes before the relay comes changes neither the order nor its invoice."""
    assert client.post("/orders", json=ORDER).json()["total_cents"] == 39_00
    with engine.begin() as connection:
        connection.execute(text("UPDATE product SET price_cents = 9900"))

    Relay(outboxq_database.url, jobs).drain()

    assert client.get("/orders/1").json() == {"id": 1, "status": "confirmed", "total_cents": 39_00}
    with engine.connect() as connection:
        assert connection.execute(text("SELECT total_cents FROM invoice")).scalar_one() == 39_00
    assert mailbox.subjects == ["Order 1 is confirmed"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lines": {}},
        {"lines": {"teapot": 0}},
        {"lines": {"unicorn": 1}},
    ],
    ids=["nothing", "none", "unknown"],
)
def test_what_is_wrong_with_a_body_is_said_in_one_form(client: TestClient, wrong: dict[str, object]) -> None:
    """422 with the place in the body, whether the model or the database refuses it."""
    answer = client.post("/orders", json={**ORDER, **wrong})

    assert answer.status_code == 422
    assert [problem["loc"][:2] for problem in answer.json()["detail"]] == [["body", "lines"]]


def test_an_order_that_is_not_there_is_not_found(client: TestClient) -> None:
    """404, which is about the address; 422 is about the body."""
    assert client.get("/orders/7").status_code == 404


def test_health_is_that_of_the_database(client: TestClient) -> None:
    """200 while it answers, 503 when it cannot be reached."""
    assert client.get("/health").json() == {"status": "ok"}
    with TestClient(create_app("postgresql+asyncpg://127.0.0.1:1/nowhere")) as away:
        assert away.get("/health").status_code == 503
