"""One secret, looked for in everything that leaves the dashboard: pages, JSON, streams, log lines, addresses, audit."""

import logging
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from sqlalchemy import Engine, text

from outboxq.dashboard import Role, create_app
from tests.support.dashboard import as_user, path_of, screens, token_of
from tests.support.http_server import serve
from tests.support.matrices import sampled
from tests.support.secrets import CANARY, give_words, stage_secrets
from tests.support.waiting import PATIENCE

_LOGGERS = ("outboxq", "uvicorn", "starlette", "asyncio")


@pytest.mark.wide
@pytest.mark.parametrize("payloads", sampled(["hidden", "redacted"]))
def test_a_secret_leaves_the_dashboard_on_no_way(
    payloads: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Every page and its JSON, every stream, every address and redirect, every log line, and what is audited."""
    stage_secrets(engine)
    if payloads == "redacted":
        give_words(engine)
    for name in _LOGGERS:
        caplog.set_level(logging.DEBUG, name)
    told: list[str] = []
    app = create_app({"orders": engine}, auth=as_user(Role.ADMIN), payloads=payloads, live_seconds=2)
    with serve(app) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
        for screen in screens():
            for accept in ("text/html", "application/json"):
                answer = client.get(path_of(screen, engine, "orders"), headers={"accept": accept})
                assert answer.status_code == 200
                told += [unquote(answer.text), str(answer.headers)]
        told += [_first_event(client, path_of(screen, engine, "orders")) for screen in screens() if screen.live]
        told += _actions(client, address)
    told += [record.getMessage() + str(vars(record)) for record in caplog.records]
    with engine.connect() as connection:
        told += [str(row) for row in connection.execute(text("SELECT to_json(audit)::text FROM outboxq.audit"))]
    assert len(told) > 60
    assert [each[:200] for each in told if CANARY in each] == []


def _first_event(client: httpx.Client, path: str) -> str:
    """The page that a stream begins with."""
    found: list[str] = []
    name = path.removeprefix("/orders/") or "overview"
    with client.stream("GET", f"/orders/live/{name}") as answer:
        for line in answer.iter_lines():
            found.append(line)
            if found[-2:-1] and not line and any(each.startswith("event: page") for each in found):
                return "\n".join(found)
    raise AssertionError("the stream ended before its page")


def _actions(client: httpx.Client, address: str) -> list[str]:
    """What is told of changes: their redirects, and the pages that follow."""
    page = client.get("/orders/queues/accounts/pause")
    form = {"csrf": token_of(page), "reason": "the bank is down"}
    answer = client.post("/orders/queues/accounts/pause", data=form, headers={"origin": address})
    assert answer.status_code == 303, answer.text
    return [
        str(answer.headers),
        answer.text,
        client.get("/orders/queues/accounts").text,
        client.get("/orders/audit").text,
    ]
