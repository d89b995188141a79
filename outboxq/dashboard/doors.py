"""Requests about no single database: logging in and out, the list of databases, and static files."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from outboxq.dashboard.errors import Refused
from outboxq.dashboard.live import find_watched
from outboxq.dashboard.origins import TOKEN_HEADER
from outboxq.dashboard.parameters import read_parameters
from outboxq.dashboard.rendering import Page, as_redirect
from outboxq.dashboard.roles import User
from outboxq.dashboard.static import TYPES, static_bytes, static_version
from outboxq.dashboard.view import as_json

if TYPE_CHECKING:
    from outboxq.dashboard.answering import Dashboard

_FOR_GOOD = "public, max-age=31536000, immutable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """The fields of the form that logs in: a name and password, or a token as `password`."""

    name: Annotated[str, Meta(max_length=255)] = ""
    password: Annotated[str, Meta(max_length=1_000)] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkToken:
    """The query parameter of a link that logs its user in: the link's token."""

    token: Annotated[str, Meta(max_length=200)] = ""


async def home(dashboard: "Dashboard", request: Request) -> Response:
    """Redirect to the only database; if there are several, show the list of them."""
    page = page_of(request)
    if len(dashboard.databases) == 1:
        (only,) = dashboard.databases
        return as_redirect(page.to(f"{only}/"))
    token = dashboard.sessions.token(page.session, page.user)
    return dashboard.renderer.other(page, "databases.html", token, title="Databases")


async def enter(dashboard: "Dashboard", request: Request) -> Response:
    """Redirect from a database's path without a slash at its end to its overview, whose path has one."""
    return as_redirect(page_of(request).to(f"{dashboard.database(request).segment}/"))


async def ask_login(dashboard: "Dashboard", request: Request) -> Response:
    """Show the form that logs in.

    If the request comes from a link with a valid token, log its user in at once instead.
    """
    page = page_of(request)
    login = dashboard.login
    if login is None:
        raise Refused(404, "One logs in at the application here.")
    token = read_parameters(LinkToken, request.query_params).token
    if token:
        user = login.take_link(token) if request.method == "GET" else None
        if user is not None:
            return _let_in(dashboard, request, page, user)
    if page.user is not None and not token:
        return as_redirect(page.to(""))
    return _login_page(
        dashboard, request, page, "This link was used before, is too old, or is none." if token else None
    )


async def log_in(dashboard: "Dashboard", request: Request) -> Response:
    """Begin a session for the user whose token, or name and password, the form sends.

    If they do not match, show the form again.
    """
    page = page_of(request)
    login = dashboard.login
    if login is None:
        raise Refused(404, "One logs in at the application here.")
    given = read_parameters(Credentials, page.form)
    address = "" if request.client is None else request.client.host
    user = await dashboard.tries.log_in(login, given.name, given.password, address)
    if user is None:
        response = _login_page(dashboard, request, page, "That did not match. Try again.")
        response.status_code = 401
        return response
    return _let_in(dashboard, request, page, user)


async def give_token(dashboard: "Dashboard", request: Request) -> Response:
    """Return the session's form token as JSON, for programs that make changes without loading a form."""
    page = page_of(request)
    body = {"token": dashboard.sessions.token(page.session, page.user), "header": TOKEN_HEADER}
    response = Response(as_json(body), media_type="application/json")
    dashboard.sessions.write(request, response, page.session)
    return response


async def log_out(dashboard: "Dashboard", request: Request) -> Response:
    """End the session, erase its cookie, and redirect to the login."""
    page = page_of(request)
    dashboard.sessions.end(page.session)
    response = as_redirect(page.to("login" if dashboard.login else ""))
    dashboard.sessions.erase(request, response)
    return response


async def send_file(dashboard: "Dashboard", request: Request) -> Response:  # noqa: ARG001  # as every door has it
    """Return a static file, which browsers may cache for a year."""
    name = request.path_params["name"]
    try:
        content = static_bytes(name)
    except KeyError:
        raise Refused(404, "There is no such file.") from None
    if request.path_params["version"] != static_version(name):
        raise Refused(404, "There is no such version of this file.")
    kind = TYPES[name[name.rindex(".") :]]
    return Response(content, media_type=kind, headers={"cache-control": _FOR_GOOD})


async def find_nothing(dashboard: "Dashboard", request: Request) -> Response:  # noqa: ARG001  # as every door has it
    """Raise `Refused` with status 404: no route has the path of this request."""
    raise Refused(404, "There is no such page.")


def page_of(request: Request) -> Page:
    """Return the `Page` (a request and the data for its answer) that `Dashboard` has stored in this request.

    For the requests of this module: those about no single database.
    """
    page = request.state.page
    assert isinstance(page, Page)
    return page


def _login_page(dashboard: "Dashboard", request: Request, page: Page, problem: str | None) -> Response:
    login = dashboard.login
    assert login is not None
    token = dashboard.sessions.token(page.session, page.user)
    response = dashboard.renderer.other(
        page, "login.html", token, title="Log in", problem=problem, asks_name=login.asks_name
    )
    dashboard.sessions.write(request, response, page.session)
    return response


def _let_in(dashboard: "Dashboard", request: Request, page: Page, user: User) -> Response:
    # A new session: a session id that an attacker may know must not become the user's.
    response = as_redirect(page.to(""))
    assert dashboard.login is not None
    dashboard.sessions.write(request, response, dashboard.sessions.begin(dashboard.login, user))
    return response


async def follow(dashboard: "Dashboard", request: Request) -> Response:
    """Return the stream of server-sent events that keeps an open page current.

    Raises:
        Refused: the page is not live, the user may not see it, or too many are open.
    """
    watched = find_watched(dashboard.routes, request.path_params["page"], request.query_params)
    if watched is None:
        raise Refused(404, "This page is not live.")
    database = dashboard.database(request)
    user = page_of(request).user
    assert user is not None
    if user.role < watched.screen.needs:
        raise Refused(403, f"This takes the role {watched.screen.needs.label}, and yours is {user.role.label}.")
    return dashboard.pollers[database.segment].stream(watched, user.name)
