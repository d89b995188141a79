"""From a request to its answer: who asks, whether that role may, whether a form is ours, then the page or the change.

Every route passes here, in this order; what a route needs stands in the table of routes.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outboxq.admin.actions import Actions, Actor
from outboxq.dashboard.databases import Database, Way
from outboxq.dashboard.errors import Refused, answer_to
from outboxq.dashboard.live import Poller
from outboxq.dashboard.logins import Auth, Login
from outboxq.dashboard.origins import why_foreign
from outboxq.dashboard.parameters import read_parameters
from outboxq.dashboard.payloads import Payloads
from outboxq.dashboard.rendering import Page, Renderer, as_redirect, wants_json
from outboxq.dashboard.roles import Role, User
from outboxq.dashboard.route import Action, Done, Door, Route, Screen, Work
from outboxq.dashboard.segments import name_in
from outboxq.dashboard.sessions import Flash, Session, Sessions
from outboxq.dashboard.settings import Settings
from outboxq.dashboard.view import as_json, look_at
from outboxq.errors import OutboxqError

logger = logging.getLogger("outboxq.dashboard")

Found = TypeVar("Found")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

MAX_BODY_BYTES = 1_500_000
_FORM = "application/x-www-form-urlencoded"


class Dashboard:
    """Everything that requests share."""

    def __init__(
        self, databases: Mapping[str, Database], auth: Auth | Login, sessions: Sessions, settings: Settings
    ) -> None:
        if not callable(auth) and not isinstance(auth, Login):
            raise TypeError(f"auth takes a function of a request, or a login, got {type(auth).__name__}")
        self.databases = databases
        self.auth = auth
        self.sessions = sessions
        self.settings = settings
        self.payloads = Payloads(settings.payloads, settings.redact)
        names = {segment: each.name for segment, each in databases.items()}
        self.renderer = Renderer(settings, names, has_login=isinstance(auth, Login))
        self.pollers = {segment: Poller(self, each) for segment, each in databases.items()}

    @property
    def login(self) -> Login | None:
        """The dashboard's own login, if it has one."""
        return self.auth if isinstance(self.auth, Login) else None

    def endpoint(self, route: Route) -> Endpoint:
        """What answers the requests of a route."""
        return partial(self._answer, route)

    async def _answer(self, route: Route, request: Request) -> Response:
        session = self.sessions.read(request)
        page = Page(request, session or self.sessions.new(), None, route)
        try:
            page.user = await self._identify(request, session)
            response = await self._checked(route, request, session, page)
        except ClientDisconnect:
            return Response(status_code=400)
        except (Refused, OutboxqError, DBAPIError, PoolTimeout) as error:
            response = self._refusal(answer_to(error), page)
        if session is None and not isinstance(route, Door):
            self.sessions.write(request, response, page.session)
        return response

    async def _checked(self, route: Route, request: Request, session: Session | None, page: Page) -> Response:
        if route.needs is not None:
            if page.user is None:
                raise Refused(401, "Log in first.")
            if page.user.role < route.needs:
                raise Refused(403, f"This takes the role {route.needs.label}, and yours is {page.user.role.label}.")
        form: Mapping[str, str] = {}
        if route.method == "POST":
            form = await read_form(request)
            why = why_foreign(request, form, self.sessions, session, page.user, self.settings.origins)
            if why is not None:
                logger.warning("a form was refused: path=%s reason=%s", route.path, why)
                raise Refused(403, f"This request was refused: {why}.")
        page.form = form
        if isinstance(route, Door):
            request.state.page = page
            return await route.answer(self, request)
        database = self.database(request)
        page.database = database.segment
        if isinstance(route, Screen):
            return await self._show(route, database, request, page)
        return await self._act(route, database, request, page)

    def database(self, request: Request) -> Database:
        """The database that a path names."""
        found = self.databases.get(request.path_params["db"])
        if found is None:
            raise Refused(404, "There is no such database here.")
        return found

    async def _show(self, route: Screen, database: Database, request: Request, page: Page) -> Response:
        asked: Any = read_parameters(route.takes, {**request.query_params, **_names(request)})
        view, look = await database.run(lambda way: look_at(way, self.payloads, lambda look: route.show(look, asked)))
        if wants_json(request):
            data = view.data
            if look.not_known:
                data = {**data, "not_known": look.not_known}
            return Response(as_json(data), media_type="application/json")
        page.asked = asked
        page.flash = self.sessions.read_flash(request)
        response = self.renderer.page(page, view, look, self.sessions.token(page.session, page.user))
        if page.flash is not None:
            self.sessions.erase_flash(request, response)
        return response

    async def _act(self, route: Action, database: Database, request: Request, page: Page) -> Response:
        assert page.user is not None
        asked: Any = read_parameters(route.takes, {**page.form, **_names(request)})
        actor = Actor(page.user.name, page.user.role.label, via="web")
        done = await database.run(partial(_run, route, actor, asked))
        logger.info("%s: user=%s database=%s", route.name, page.user.name, database.name)
        if wants_json(request):
            return Response(as_json({"text": done.text, **done.data}), media_type="application/json")
        response = as_redirect(page.to(f"{database.segment}/{done.back}"))
        self.sessions.write_flash(request, response, Flash(done.text))
        return response

    async def _identify(self, request: Request, session: Session | None) -> User | None:
        if isinstance(self.auth, Login):
            return None if session is None else session.logged_in
        found = self.auth(request)
        user: User | None = await found if inspect.isawaitable(found) else found
        return user

    def _refusal(self, refused: Refused, page: Page) -> Response:
        if refused.status >= 500:
            logger.warning("a page was not shown: path=%s status=%d", page.route.path, refused.status)
        if wants_json(page.request):
            body = as_json({"error": refused.text, "status": refused.status})
            return Response(body, refused.status, media_type="application/json")
        if refused.status == 401 and self.login is not None and page.route.method == "GET":
            return as_redirect(page.to("login"))
        return self.renderer.refusal(page, refused, self.sessions.token(page.session, page.user))


def _run(route: Action, actor: Actor, asked: Any, way: Way) -> Done:
    reason = getattr(asked, "reason", None)
    return route.act(Work(way.begin, Actions(actor, reason or None)), asked)


def _names(request: Request) -> dict[str, str]:
    """The names in a path, as they are."""
    try:
        return {key: name_in(str(value)) for key, value in request.path_params.items() if key != "db"}
    except ValueError as error:
        raise Refused(404, str(error)) from None


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form.

    Raises:
        Refused: it is too long, or no such form.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise Refused(415, f"A change is sent as {_FORM}.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise Refused(413, f"A form takes up to {MAX_BODY_BYTES:,} bytes.")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=300))
    except ValueError:
        raise Refused(400, "The form cannot be read.") from None


def role_of(user: User | None) -> Role | None:
    """A user's role."""
    return None if user is None else user.role
