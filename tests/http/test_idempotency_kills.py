"""Server processes that are killed or stopped while they answer a guarded request."""

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import httpx
import pytest
from sqlalchemy import Engine, text

from outboxq.admin.effects import WasNotApplied, resolve_effect
from outboxq.postgres import Database
from tests.support.http_server import (
    ServerProcess,
    closed_gate,
    is_replay,
    problem,
    seen,
    serve_process,
    wait_at_gate,
)
from tests.support.ledger import ledger
from tests.support.waiting import wait_until

KEY = {"Idempotency-Key": '"order-1"'}


@pytest.mark.wide
def test_a_killed_server_leaves_an_outcome_that_nobody_knows(outboxq_database: Database, engine: Engine) -> None:
    """Killed after the endpoint's commit: refused while the lease runs, then unknown, until an operator decides."""
    with serve_process(outboxq_database.url, lease_seconds=5) as doomed:
        kill_in_the_middle(doomed, engine, "/orders?gate=1")
    with serve_process(outboxq_database.url, lease_seconds=5) as server:
        early = post(server, "/orders?gate=1")
        assert problem(early) == "in-progress" or not is_locked(engine)
        wait_until(lambda: not is_locked(engine), "the lease to run out")
        after = [post(server, "/orders?gate=1") for _ in range(2)]
        assert [problem(answer) for answer in after] == ["outcome-unknown"] * 2
        assert ledger(engine) == Counter(order=1)

        with engine.begin() as connection:
            resolve_effect(connection, "POST /orders", "order-1", WasNotApplied())
        assert post(server, "/orders?gate=1").status_code == 201
    assert ledger(engine) == Counter(order=2)


@pytest.mark.wide
@pytest.mark.parametrize("gate", ["1", "late"])
def test_a_killed_server_that_records_with_its_rows_is_executed_once(
    outboxq_database: Database, engine: Engine, gate: str
) -> None:
    """Killed before its commit, before or after its record: the retry is executed, and is the only one that counts."""
    path = f"/tx/orders?gate={gate}"
    with serve_process(outboxq_database.url, lease_seconds=2) as doomed:
        kill_in_the_middle(doomed, engine, path)
    assert ledger(engine) == Counter()
    with serve_process(outboxq_database.url, lease_seconds=2) as server:
        wait_until(lambda: not is_locked(engine), "the lease to run out")
        first, retry = post(server, path), post(server, path)

    assert first.status_code == 201
    assert is_replay(retry)
    assert seen(retry) == seen(first)
    assert ledger(engine) == Counter(order=1)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("path", "told"), [("/orders?gate=1", "outcome-unknown"), ("/tx/orders?gate=1", "in-progress")]
)
def test_a_server_that_wakes_after_it_was_taken_over_does_not_answer_with_success(
    outboxq_database: Database, engine: Engine, path: str, told: str
) -> None:
    """Stopped for longer than its lease: what it did with its rows is rolled back, what it did without is unknown."""
    with (
        serve_process(outboxq_database.url, lease_seconds=2) as sleeper,
        serve_process(outboxq_database.url, lease_seconds=2) as server,
        ThreadPoolExecutor(2) as clients,
    ):
        with closed_gate(engine):
            pending = clients.submit(post, sleeper, path)
            wait_at_gate(engine)
            os.kill(sleeper.process.pid, signal.SIGSTOP)
            try:
                wait_until(lambda: not is_locked(engine), "the lease to run out")
                taking_over = clients.submit(post_when_free, server, path)
                if path.startswith("/tx/"):
                    wait_at_gate(engine, 2)
                else:
                    assert problem(taking_over.result()) == "outcome-unknown"
            finally:
                os.kill(sleeper.process.pid, signal.SIGCONT)
        assert problem(pending.result()) == told
        retry = post(server, path)

    if path.startswith("/tx/"):
        assert taking_over.result().status_code == 201
        assert seen(retry) == seen(taking_over.result())
    else:
        assert problem(retry) == "outcome-unknown"
    assert ledger(engine) == Counter(order=1)


def post(server: ServerProcess, path: str) -> httpx.Response:
    return httpx.post(server.address + path, headers=KEY, timeout=60)


def post_when_free(server: ServerProcess, path: str) -> httpx.Response:
    """On a busy machine a lease that has run out comes back: it was being extended when its holder was stopped."""
    while True:
        answer = post(server, path)
        if answer.status_code == HTTPStatus.CREATED or problem(answer) != "in-progress":
            return answer


def kill_in_the_middle(server: ServerProcess, engine: Engine, path: str) -> None:
    with ThreadPoolExecutor(1) as clients, closed_gate(engine):
        pending = clients.submit(post, server, path)
        wait_at_gate(engine)
        server.kill()
        assert isinstance(pending.exception(), httpx.TransportError)
    wait_until(lambda: not is_connected(engine), "the server's backends to end")


def is_connected(engine: Engine) -> bool:
    """Whether somebody else is connected to this database."""
    query = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend' AND state <> 'idle'"
    )
    with engine.connect() as connection:
        return connection.execute(query).scalar_one() > 0


def is_locked(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(
            connection.execute(
                text("SELECT count(*) FROM outboxq.effect WHERE locked_until > clock_timestamp()")
            ).scalar_one()
        )
