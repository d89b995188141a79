"""Ways in that the dashboard brings along: who is believed, and who is not."""

import asyncio
import hashlib
import logging
import time
from typing import Any

import anyio.to_thread
import httpx
import pytest
from sqlalchemy import Engine, create_engine

from outboxq.dashboard import HeaderAuth, PasswordLogin, Role, TokenLogin, create_app
from outboxq.dashboard.logins import password_line
from outboxq.dashboard.seals import Seal
from outboxq.dashboard.serving import announced
from outboxq.dashboard.sessions import Session, Sessions
from outboxq.errors import ConfigError
from tests.support.dashboard import ORIGIN, as_user, client_of, token_of


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
    lambda: Seal(b"short"), lambda: password_line("anna", Role.ADMIN, "nine char"),
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
    good = Session("id", time.time() + 60, "anna", "mark")
    text = seal.close("session", good)
    read: Any = sessions.read
    assert read(Request(text)) == good
    assert read(Request(text[:-1] + ("0" if text[-1] != "0" else "1"))) is None
    assert read(Request("A" + text[1:])) is None
    assert read(Request(seal.close("flash", good))) is None
    assert read(Request(others._seal.close("session", good))) is None
    assert read(Request(seal.close("session", Session("id", time.time() - 1, "anna", "mark")))) is None
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


_ENGINE = create_engine("postgresql+psycopg://127.0.0.1:1/shop")


@pytest.mark.wide
def test_tries_to_log_in_hold_up_nothing_else_and_are_few() -> None:
    """The application's own threads stay free; what comes on top is refused, and who is right gets in."""
    login = PasswordLogin([password_line("anna", Role.ADMIN, "correct horse")])
    app = create_app(_ENGINE, auth=login)

    async def run() -> tuple[list[int], int, int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ORIGIN, timeout=None) as client:
            token = token_of(await client.get("/login"))

            async def post(password: str) -> int:
                form = {"csrf": token, "name": "anna", "password": password}
                return (await client.post("/login", data=form, headers={"origin": ORIGIN})).status_code

            tries = [asyncio.create_task(post("wrong")) for _ in range(30)]
            threads = anyio.to_thread.current_default_thread_limiter()
            busy = 0
            while not all(each.done() for each in tries):
                busy = max(busy, threads.borrowed_tokens)
                await asyncio.sleep(0.005)
            return [each.result() for each in tries], busy, await post("correct horse")

    answers, busy, right = asyncio.run(run())
    assert (answers.count(401), answers.count(429)) == (10, 20)
    assert busy == 0
    assert right == 303


def test_a_login_that_fails_is_logged_and_the_next_one_takes_longer(caplog: pytest.LogCaptureFixture) -> None:
    """Neither what was typed as the name nor the password is in the log."""
    app = create_app(_ENGINE, auth=TokenLogin("a token of some length"))
    seconds = list[float]()
    with client_of(app) as client, caplog.at_level(logging.WARNING, "outboxq.dashboard"):
        form = {"csrf": token_of(client.get("/login")), "name": "hunter22", "password": "hunter23"}
        for _ in range(4):
            started = time.monotonic()
            assert client.post("/login", data=form, headers={"origin": ORIGIN}).status_code == 401
            seconds.append(time.monotonic() - started)
    assert seconds[3] >= 0.8
    assert caplog.text.count("a login failed: address=testclient") == 4
    assert "hunter" not in caplog.text


def test_a_link_is_there_only_without_a_token_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes after it was made nothing lets in by it."""
    assert TokenLogin("a token of some length").link_token is None
    assert "token=" not in announced("http://0.0.0.0:8484", TokenLogin("a token of some length"))
    login = TokenLogin()
    token = login.link_token
    assert token is not None
    assert token in announced("http://127.0.0.1:8484", login)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 601)
    assert login.take_link(token) is None
    assert login.link_token is None


@pytest.mark.wide
def test_a_session_has_the_user_as_the_login_knows_it_today() -> None:
    """With one secret for several processes: one that was removed, or has another password, is out."""
    lines = {
        "then": password_line("anna", Role.ADMIN, "correct horse"),
        "other password": password_line("anna", Role.ADMIN, "correct horse"),
        "other user": password_line("bob", Role.ADMIN, "correct horse"),
    }
    lines["other role"] = lines["then"].replace(":admin:", ":reader:")
    apps = {name: create_app(_ENGINE, auth=PasswordLogin([line]), secret=b"s" * 32) for name, line in lines.items()}
    with client_of(apps["then"]) as client:
        form = {"csrf": token_of(client.get("/login")), "name": "anna", "password": "correct horse"}
        assert client.post("/login", data=form, headers={"origin": ORIGIN}).status_code == 303
        kept = dict(client.cookies)
    seen = dict[str, int]()
    for name, app in apps.items():
        with client_of(app) as client:
            client.cookies.update(kept)
            seen[name] = client.post("/shop/bulk/preview").status_code
    # 415: the role may, and the body is no form.
    assert seen == {"then": 415, "other password": 401, "other user": 401, "other role": 403}


@pytest.mark.wide
def test_a_line_says_how_it_was_hashed() -> None:
    """Lines of other parameters go on to hold; those that would take too much memory are refused."""
    line = password_line("anna", Role.ADMIN, "correct horse")
    assert line.startswith("anna:admin:scrypt:14:8:5:")
    salt = bytes(16)
    weak = hashlib.scrypt(b"correct horse", salt=salt, n=2**12, r=8, p=1, dklen=32)
    login = PasswordLogin([line, f"bob:reader:scrypt:12:8:1:{salt.hex()}:{weak.hex()}"])
    for name in ("anna", "bob"):
        assert login.log_in(name, "correct horse") is not None
        assert login.log_in(name, "wrong") is None
    with pytest.raises(ConfigError):
        PasswordLogin([line.replace(":14:8:5:", ":20:8:5:")])


def test_the_cookie_is_secure_behind_a_proxy_that_sends_another_host() -> None:
    """If all that browsers see is TLS."""
    for origins, is_secure in ((["https://ops.example.com"], True), (["https://a.test", "http://b.test"], False)):
        with client_of(create_app(_ENGINE, auth=TokenLogin("a token of some length"), origins=origins)) as client:
            assert ("Secure" in client.get("/login").headers["set-cookie"]) is is_secure
