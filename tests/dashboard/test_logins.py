"""Ways in that the dashboard brings along: who is believed, and who is not."""

import time
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from outboxq.dashboard import HeaderAuth, Role, TokenLogin, create_app
from outboxq.dashboard.seals import Seal
from outboxq.dashboard.sessions import Session, Sessions
from outboxq.errors import ConfigError
from tests.support.dashboard import as_user, client_of


class _Client:
    def __init__(self, host: str) -> None:
        self.host = host


class _Headers(dict[str, list[str]]):
    def getlist(self, name: str) -> list[str]:
        return self.get(name, [])


class _Request:
    """The parts of a request that a header's way in looks at."""

    def __init__(self, host: str, *names: str) -> None:
        self.client = _Client(host)
        self.headers = _Headers({"x-user": list(names)})


def test_a_header_is_believed_from_a_proxy_alone() -> None:
    """A client that comes past the proxy names nobody, and neither does one that sends two names."""
    auth: Any = HeaderAuth("x-user", ["10.0.0.0/8", "::1"], role=Role.OPERATOR)
    user = auth(_Request("10.1.2.3", "anna"))
    assert (user.name, user.role) == ("anna", Role.OPERATOR)
    for request in (
        _Request("192.0.2.1", "anna"), _Request("10.1.2.3"), _Request("10.1.2.3", "anna", "admin"),
        _Request("10.1.2.3", ""), _Request("testclient", "anna"),
    ):  # fmt: skip
        assert auth(request) is None


@pytest.mark.parametrize("make", [
    lambda: HeaderAuth("x-user", []), lambda: HeaderAuth("x-user", ["nowhere"]), lambda: TokenLogin("short"),
    lambda: Seal(b"short"),
])  # fmt: skip
def test_what_would_be_weak_is_refused(make: Any) -> None:
    """A header without proxies, a token and a secret that can be guessed."""
    with pytest.raises(ConfigError):
        make()


def test_a_session_that_was_changed_or_is_old_is_none() -> None:
    """A cookie is taken as it was given, for twelve hours, and by those who have the secret."""
    sessions, others = Sessions(Seal()), Sessions(Seal())

    class Request:
        def __init__(self, cookie: str) -> None:
            self.cookies = {sessions.cookie: cookie}

    seal = sessions._seal
    good = Session("id", time.time() + 60, "anna", 1)
    text = seal.close("session", good)
    read: Any = sessions.read
    assert read(Request(text)) == good
    assert read(Request(text[:-1] + ("0" if text[-1] != "0" else "1"))) is None
    assert read(Request("A" + text[1:])) is None
    assert read(Request(seal.close("flash", good))) is None
    assert read(Request(others._seal.close("session", good))) is None
    assert read(Request(seal.close("session", Session("id", time.time() - 1, "anna", 3)))) is None
    assert read(Request("")) is None


def test_nothing_is_open_by_default(engine: Engine) -> None:
    """Without a way to log in there is no dashboard."""
    make: Any = create_app
    with pytest.raises(TypeError):
        make(engine)
    with pytest.raises(TypeError):
        make(engine, auth=None)


def test_a_database_that_is_down_is_said_so() -> None:
    """The page says it with 503, and not how the database is reached."""
    engine = create_engine("postgresql+psycopg://someone:hunter2@127.0.0.1:1/shop")
    with client_of(create_app(engine, auth=as_user(Role.READER))) as client:
        page = client.get("/shop/")
        document = client.get("/shop/", headers={"accept": "application/json"})
    assert (page.status_code, document.status_code) == (503, 503)
    assert "The database did not answer" in page.text
    for secret in ("hunter2", "someone", "127.0.0.1"):
        assert secret not in page.text + document.text


def test_another_driver_is_refused() -> None:
    """The message says how to make the engine."""
    with pytest.raises(ConfigError, match=r"psycopg 3"):
        create_app(create_engine("postgresql+psycopg2://127.0.0.1/shop"), auth=as_user(Role.READER))
