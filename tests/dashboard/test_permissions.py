"""Who may do what: every route of the table, for every role, and every way in which a form can be foreign."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from starlette.routing import Route as StarletteRoute
from starlette.testclient import TestClient

from outboxq.dashboard import Role, TokenLogin, User, create_app
from outboxq.dashboard.route import Action, Door, Route, Screen
from outboxq.dashboard.routes import ACTIONS, ROUTES
from tests.support.dashboard import (
    ACTION_FIELDS,
    ORIGIN,
    action_fields,
    action_path,
    as_user,
    checksums,
    client_of,
    path_of,
    preview_of,
    stage_actions,
    token_for,
    token_of,
)
from tests.support.matrices import sampled

_ROLES = (None, Role.OPERATOR, Role.READER, Role.ADMIN)
_OF_ACTIONS = {action.path: action for action in ACTIONS}


@pytest.fixture
def staged(engine: Engine) -> Engine:
    stage_actions(engine)
    return engine


def _path(route: Route, engine: Engine) -> str:
    if isinstance(route, Action) or (isinstance(route, Screen) and route.path in _OF_ACTIONS):
        return action_path(_OF_ACTIONS[route.path])
    if isinstance(route, Screen):
        return path_of(route, engine, "orders")
    named = {"{db}": "orders", "{page:path}": "no-such-page", "{name:path}": "none", "{version}": "0"}
    path = route.path
    for name, value in named.items():
        path = path.replace(name, value)
    return f"/{path}"


def _fields(route: Route, client: TestClient, token: str) -> dict[str, str]:
    """Fields with which a route does what it does, if it may be asked."""
    if isinstance(route, Action):
        return action_fields(route, client, token)
    return {"what": "dead.retry", "kind": "charge", "csrf": token}


def test_the_application_has_the_routes_of_the_table_and_no_others(engine: Engine) -> None:
    """What is not in the table cannot be reached."""
    app = create_app({"orders": engine}, auth=as_user(None))
    found = [
        (route.path, method)
        for route in app.routes
        if isinstance(route, StarletteRoute)
        for method in route.methods or ()
    ]
    assert len(app.routes) == len(ROUTES)
    assert {each for each in found if each[1] != "HEAD"} == {(route.whole_path, route.method) for route in ROUTES}


def test_every_action_needs_more_than_a_reader(engine: Engine) -> None:
    """Nothing changes a database by a role that only looks; and every action is tried below."""
    assert all(action.needs >= Role.OPERATOR for action in ACTIONS)
    assert {action.path for action in ACTIONS} == ACTION_FIELDS.keys()
    assert len({action.path for action in ACTIONS}) == len(ACTIONS)


def test_what_cannot_be_taken_back_needs_an_admin() -> None:
    """Discards, forgets, resolutions, arguments that are edited, and force."""
    grave = {each.path.rpartition("/")[2] for each in ACTIONS if each.needs == Role.ADMIN}
    assert grave == {"terminate", "args", "retry-with", "discard", "resolve", "forget"}


@pytest.mark.wide
@pytest.mark.parametrize(
    "role",
    sampled(_ROLES, 2),
    ids=lambda role: role.label if role else "stranger",
)
def test_each_role_reaches_what_the_table_gives_it(role: Role | None, staged: Engine) -> None:
    """A stranger gets 401, a role that is too small 403, and every other role what it asks for."""
    app = create_app({"orders": staged}, auth=as_user(role))
    with client_of(app) as client:
        for route in ROUTES:
            if isinstance(route, Action) and role is not None and role >= route.needs:
                stage_actions(staged)
            answer = _ask(client, route, staged)
            if route.needs is None:
                assert answer.status_code not in (401, 403), route
            elif role is None:
                assert answer.status_code == 401, route
            elif role < route.needs:
                assert answer.status_code == 403, route
            else:
                assert answer.status_code in (200, 303) or isinstance(route, Door), (route, answer.text)


def _ask(client: TestClient, route: Route, engine: Engine) -> Any:
    path = _path(route, engine)
    if route.method == "GET":
        return client.get(path)
    return client.post(path, data=_fields(route, client, token_for(client)), headers={"origin": ORIGIN})


Break = Callable[[dict[str, str], dict[str, str]], None]


def _without_token(form: dict[str, str], headers: dict[str, str]) -> None:
    form.pop("csrf")


def _foreign_token(form: dict[str, str], headers: dict[str, str]) -> None:
    form["csrf"] = uuid4().hex * 2


def _cross_origin(form: dict[str, str], headers: dict[str, str]) -> None:
    headers["origin"] = "http://evil.test"


def _null_origin(form: dict[str, str], headers: dict[str, str]) -> None:
    headers["origin"] = "null"


def _no_origin(form: dict[str, str], headers: dict[str, str]) -> None:
    headers.pop("origin")


def _other_port(form: dict[str, str], headers: dict[str, str]) -> None:
    headers["origin"] = f"{ORIGIN}:8080"


def _other_scheme(form: dict[str, str], headers: dict[str, str]) -> None:
    headers["origin"] = ORIGIN.replace("http:", "https:")


def _cross_site(form: dict[str, str], headers: dict[str, str]) -> None:
    headers["sec-fetch-site"] = "cross-site"


def _same_site(form: dict[str, str], headers: dict[str, str]) -> None:
    headers["sec-fetch-site"] = "same-site"


_BREAKS = (
    _without_token, _foreign_token, _cross_origin, _null_origin, _no_origin, _other_port, _other_scheme, _cross_site,
    _same_site,
)  # fmt: skip
_POSTS = [route for route in ROUTES if route.method == "POST"]


@pytest.mark.first_and_last
@pytest.mark.parametrize("make_foreign", _BREAKS, ids=lambda each: each.__name__.strip("_"))
def test_a_foreign_form_is_refused_and_changes_nothing(make_foreign: Break, staged: Engine) -> None:
    """Each of the three checks alone is enough to refuse a form, for every route that takes one."""
    app = create_app({"orders": staged}, auth=as_user(Role.ADMIN))
    with client_of(app) as client:
        before = checksums(staged)
        for route in _POSTS:
            form, headers = _fields(route, client, token_for(client)), {"origin": ORIGIN}
            make_foreign(form, headers)
            answer = client.post(_path(route, staged), data={"x": "1", **form}, headers=headers)
            assert answer.status_code == 403, route
        assert checksums(staged) == before


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "role", [None, Role.READER, Role.OPERATOR], ids=lambda role: role.label if role else "stranger"
)
def test_a_role_that_is_too_small_changes_nothing(role: Role | None, staged: Engine) -> None:
    """Also with the token of a form, and with a preview that an admin has been shown."""
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as admin:
        shown = preview_of(admin, token_for(admin), what="dead.discard", kind="charge")["intent"]
    app = create_app({"orders": staged}, auth=as_user(role))
    with client_of(app) as client:
        token, before = token_for(client), checksums(staged)
        for action in ACTIONS:
            if role is None or role < action.needs or action.path == "bulk/apply":
                form = {**ACTION_FIELDS[action.path], "csrf": token, "reason": "x", "intent": shown}
                answer = client.post(action_path(action), data=form, headers={"origin": ORIGIN})
                assert answer.status_code in (400, 401, 403), action
        assert checksums(staged) == before


def test_a_token_of_another_browser_is_refused(staged: Engine) -> None:
    """A token is bound to its session, and to its user."""
    app = create_app({"orders": staged}, auth=as_user(Role.ADMIN))
    with client_of(app) as mine, client_of(app) as other:
        mine.get("/orders/queues/accounts/pause")
        token = token_of(other.get("/orders/queues/accounts/pause"))
        form = {"csrf": token}
        assert mine.post("/orders/queues/accounts/pause", data=form, headers={"origin": ORIGIN}).status_code == 403
        assert other.post("/orders/queues/accounts/pause", data=form, headers={"origin": ORIGIN}).status_code == 303


def test_a_body_that_is_no_form_is_refused(staged: Engine) -> None:
    """JSON and multipart, which other sites can send too, are no forms here."""
    app = create_app({"orders": staged}, auth=as_user(Role.ADMIN))
    with client_of(app) as client:
        token = token_for(client)
        for arguments in ({"json": {"csrf": token}}, {"files": {"csrf": (None, token)}}, {"content": b""}):
            given: Any = arguments
            answer = client.post("/orders/queues/accounts/pause", headers={"origin": ORIGIN}, **given)
            assert answer.status_code == 415
        long = {"csrf": token, "reason": "x" * 2_000_000}
        assert client.post("/orders/queues/accounts/pause", data=long, headers={"origin": ORIGIN}).status_code == 413


def test_a_session_that_logged_out_is_over(staged: Engine) -> None:
    """The cookie of a session that logged out lets nobody in, also if a browser kept it."""
    login = TokenLogin("a token of some length")
    app = create_app({"orders": staged}, auth=login)
    with client_of(app) as client:
        token = token_of(client.get("/login"))
        form = {"csrf": token, "password": "a token of some length"}
        assert client.post("/login", data=form, headers={"origin": ORIGIN}).headers["location"] == "./"
        kept = dict(client.cookies)
        page = client.get("/orders/")
        assert page.status_code == 200
        assert client.post("/logout", data={"csrf": token_of(page)}, headers={"origin": ORIGIN}).status_code == 303
        assert client.get("/orders/").headers["location"] == "../login"
    with client_of(app) as thief:
        thief.cookies.update(kept)
        assert thief.get("/orders/").status_code == 303


def test_a_wrong_token_and_a_used_link_let_nobody_in(staged: Engine) -> None:
    """A link holds once, and HEAD does not use it up."""
    login = TokenLogin(role=Role.OPERATOR)
    app = create_app({"orders": staged}, auth=login)
    link = f"/login?token={login.link_token}"
    with client_of(app) as client, client_of(app) as late:
        assert client.head(link).status_code == 200
        token = token_of(client.get("/login"))
        wrong = client.post("/login", data={"csrf": token, "password": "wrong"}, headers={"origin": ORIGIN})
        assert wrong.status_code == 401
        assert client.get("/login?token=wrong").status_code == 200
        assert client.get(link).headers["location"] == "./"
        assert client.get("/").headers["location"] == "./orders/" or client.get("/").headers["location"] == "orders/"
        assert late.get(link).status_code == 200
        assert late.get("/orders/").status_code == 303


def test_a_session_of_a_stranger_does_not_become_the_users(staged: Engine) -> None:
    """Logging in gives the browser a session that was not there before."""
    app = create_app({"orders": staged}, auth=TokenLogin("a token of some length"))
    with client_of(app) as client:
        token = token_of(client.get("/login"))
        before = dict(client.cookies)
        client.post("/login", data={"csrf": token, "password": "a token of some length"}, headers={"origin": ORIGIN})
        assert dict(client.cookies) != before


@pytest.fixture
def mounted(engine: Engine) -> Iterator[TestClient]:
    """A dashboard for hosts of its own."""
    app = create_app({"orders": engine}, auth=as_user(Role.READER), hosts=["ops.test"])
    with client_of(app) as client:
        yield client


def test_a_host_that_is_not_served_is_refused(mounted: TestClient) -> None:
    """A name that was made to point here is not ours, whatever it asks for."""
    assert mounted.get("/orders/").status_code == 200
    for host in ("evil.test", "ops.test.evil.test", "", "127.0.0.1.evil.test:80", "[::2]"):
        assert mounted.get("/orders/", headers={"host": host}).status_code == 400
    for host in ("localhost:8484", "127.0.0.1", "[::1]:80", "OPS.test:443"):
        assert mounted.get("/orders/", headers={"host": host}).status_code == 200


def test_every_answer_keeps_to_itself(mounted: TestClient) -> None:
    """Pages, files, redirects and refusals have the headers that keep other sites out."""
    for path in ("/", "/orders/", "/orders/nothing", "/login", "/static/0/app.css", "/nowhere"):
        answer = mounted.get(path)
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


def test_the_cookie_is_for_this_site_alone(engine: Engine) -> None:
    """Scripts do not see it, other sites do not send it, and behind TLS it is not sent without."""
    app = create_app({"orders": engine}, auth=as_user(Role.READER), origins=["https://ops.test"])
    with client_of(app) as client:
        (cookie,) = client.get("/orders/").headers.get_list("set-cookie")
    assert {"HttpOnly", "Secure", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))


def test_an_async_way_to_log_in_is_awaited(engine: Engine) -> None:
    """An application's own login may ask its database."""

    async def auth(request: object) -> User | None:
        return User("anna", Role.OPERATOR)

    with client_of(create_app({"orders": engine}, auth=auth)) as client:
        assert "anna" in client.get("/orders/").text


def test_at_a_replica_everyone_is_a_reader(staged: Engine) -> None:
    """No page offers what the server would refuse, and a form that comes all the same is told why."""
    app = create_app({"orders": staged}, auth=as_user(Role.ADMIN))
    with client_of(app) as client:
        token = token_of(client.get("/orders/queues/accounts/pause"))
        with staged.begin() as connection:
            name = connection.execute(text("SELECT current_database()")).scalar_one()
            connection.execute(text(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'))
        staged.dispose()
        assert "/pause" not in client.get("/orders/queues/accounts").text
        answer = client.post("/orders/queues/accounts/pause", data={"csrf": token}, headers={"origin": ORIGIN})
    assert answer.status_code == 403
    assert "takes no changes" in answer.text
