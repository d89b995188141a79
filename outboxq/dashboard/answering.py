"""The steps from a request to its answer: identify the user, check the role and the form, then make the page or change.

The requests of all routes go through these steps in this order. The table of routes (`routes`) gives the role that each
route needs.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from starlette.datastructures import ImmutableMultiDict
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outboxq.admin.actions import Actions, Actor
from outboxq.dashboard.databases import Database, Way
from outboxq.dashboard.desk import Desk, KnownKinds
from outboxq.dashboard.errors import EXPECTED, Refused, answer_to
from outboxq.dashboard.intents import Caller, Intents
from outboxq.dashboard.live import Poller
from outboxq.dashboard.logins import Auth, Login
from outboxq.dashboard.origins import why_foreign
from outboxq.dashboard.parameters import read_parameters
from outboxq.dashboard.payloads import Payloads
from outboxq.dashboard.rendering import Page, Renderer, as_redirect, wants_json
from outboxq.dashboard.roles import Role, User
from outboxq.dashboard.route import MAX_FORM_BYTES, Action, Done, Door, Route, Screen, Work
from outboxq.dashboard.runs import Runs
from outboxq.dashboard.seals import Seal
from outboxq.dashboard.segments import names_in
from outboxq.dashboard.sessions import Flash, Session, Sessions
from outboxq.dashboard.settings import Settings
from outboxq.dashboard.tries import Tries
from outboxq.dashboard.view import Look, as_json, look_at

logger = logging.getLogger("outboxq.dashboard")

Shown = TypeVar("Shown")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_FORM = "application/x-www-form-urlencoded"
# The field that a form may have several times: the selected rows of a list.
_SEVERAL = "id"


class Dashboard:
    """The objects that all requests to a dashboard share, and the functions that answer the requests.

    Args:
        databases: The databases, by their names in paths (`Database.segment`).
        auth: The dashboard's own login, or the application's function that returns the user of a request.
        seal: Signs cookies and previews.
        kinds: The kinds with a handler, for each database.
        routes: The table of routes.
    """

    def __init__(
        self,
        databases: Mapping[str, Database],
        auth: Auth | Login,
        seal: Seal,
        settings: Settings,
        kinds: Mapping[str, KnownKinds],
        routes: Sequence[Route],
    ) -> None:
        if not callable(auth) and not isinstance(auth, Login):
            raise TypeError(f"auth takes a function of a request, or a login, got {type(auth).__name__}")
        self.databases = databases
        self.auth = auth
        self.sessions = Sessions(seal, settings.origins)
        self.settings = settings
        self.routes = routes
        payloads, intents = Payloads(settings.payloads, settings.redact), Intents(seal)
        self.desks = {segment: Desk(settings, payloads, kinds[segment], intents) for segment in databases}
        names = {segment: each.name for segment, each in databases.items()}
        actions = [each for each in routes if isinstance(each, Action)]
        self.renderer = Renderer(settings, names, actions, has_login=isinstance(auth, Login))
        self.pollers = {segment: Poller(self, each) for segment, each in databases.items()}
        self.runs = Runs()
        self.tries = Tries()

    @property
    def login(self) -> Login | None:
        """The dashboard's own login; None if a function of the application identifies the users."""
        return self.auth if isinstance(self.auth, Login) else None

    def endpoint(self, route: Route) -> Endpoint:
        """Return the function that answers the requests of a route."""
        return partial(self._answer, route)

    async def _answer(self, route: Route, request: Request) -> Response:
        session = self.sessions.read(request)
        page = Page(request, session or self.sessions.new(), None, route)
        try:
            page.user = await self._identify(request, session)
            response = await self._checked(route, request, session, page)
        except ClientDisconnect:
            return Response(status_code=400)
        except EXPECTED as error:
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
        form: ImmutableMultiDict[str, str] = ImmutableMultiDict()
        if route.method == "POST":
            form = await read_form(request, route.form_bytes if isinstance(route, Door) else MAX_FORM_BYTES)
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
        """Return the database that the path of a request names.

        Raises:
            Refused: the dashboard has no such database.
        """
        found = self.databases.get(request.path_params["db"])
        if found is None:
            raise Refused(404, "There is no such database here.")
        return found

    async def _show(self, route: Screen, database: Database, request: Request, page: Page) -> Response:
        given = page.form if route.method == "POST" else request.query_params
        several = {_SEVERAL: given.getlist(_SEVERAL)}
        asked: Any = read_parameters(route.takes, {**given, **_names(request)}, several)
        if route.examines:
            await database.examine()
        page.flash = self.sessions.read_flash(request)
        view, look = await self._look(database, page, lambda look: route.show(look, asked))
        if wants_json(request):
            data = view.data
            if look.not_known:
                data = {**data, "not_known": look.not_known}
            if look.standby_delay_seconds is not None:
                data = {**data, "standby_delay_seconds": look.standby_delay_seconds}
            return Response(as_json(data), media_type="application/json")
        page.asked = asked
        response = self.renderer.page(page, view, look, self.sessions.token(page.session, page.user))
        if page.flash is not None:
            self.sessions.erase_flash(request, response)
        return response

    async def _look(self, database: Database, page: Page, show: Callable[[Look], Shown]) -> tuple[Shown, Look]:
        desk, caller = self.desks[database.segment], _caller(page, database)
        only_looks = page.route.method == "GET" and page.route.needs == Role.READER and page.flash is None
        return await database.run(lambda way: look_at(way if only_looks else way.to_primary, desk, show, caller))

    async def _act(self, route: Action, database: Database, request: Request, page: Page) -> Response:
        try:
            done = await self._done(route, database, request, page)
        except EXPECTED as error:
            return await self._show_again(route, database, page, answer_to(error))
        if wants_json(request):
            return Response(as_json({"text": done.text, **done.data}), media_type="application/json")
        response = as_redirect(page.to(f"{database.segment}/{done.back}"))
        self.sessions.write_flash(request, response, Flash(done.text))
        return response

    async def _done(self, route: Action, database: Database, request: Request, page: Page) -> Done:
        asked: Any = read_parameters(route.takes, {**page.form, **_names(request)})
        caller = _caller(page, database)
        done = await database.run(partial(_run, route, caller, self.desks[database.segment], asked))
        if done.to_run is not None and not await self.runs.start(database, done.to_run):
            done = replace(
                done, text="It has begun, and is listed here as soon as its first page is done.", back="bulk"
            )
        logger.info("%s: user=%s database=%s", route.name, caller.user.name, database.name)
        return done

    async def _show_again(self, route: Action, database: Database, page: Page, refused: Refused) -> Response:
        """Show an action's form again as the user filled it in, with the error and its HTTP status.

        Raises:
            Refused: the error itself (`refused`), if the client wants JSON or the form cannot be shown.
        """
        if wants_json(page.request) or refused.status == 404:
            raise refused
        given = {**page.form, **_names(page.request)}
        try:
            view, look = await self._look(database, page, lambda look: route.show_again(look, given))
        except EXPECTED:
            raise refused from None
        if view is None:
            raise refused
        page.problem = refused
        response = self.renderer.page(page, view, look, self.sessions.token(page.session, page.user))
        response.status_code = refused.status
        return response

    async def _identify(self, request: Request, session: Session | None) -> User | None:
        if isinstance(self.auth, Login):
            return None if session is None else self.sessions.user_of(self.auth, session)
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


def _caller(page: Page, database: Database) -> Caller:
    assert page.user is not None
    return Caller(page.user, page.session.id, database.segment)


def _run(route: Action, caller: Caller, desk: Desk, asked: Any, way: Way) -> Done:
    reason: str | None = getattr(asked, "reason", None)
    actor = Actor(caller.user.name, caller.user.role.label, via="web")
    actions = Actions(actor, (reason or "").strip() or None)
    return route.act(Work(way.begin, actions, caller, desk, logger.warning), asked)


def _names(request: Request) -> dict[str, str]:
    """Return the names in a request's path, such as a queue's, decoded (see `as_segment`): `{parameter: name}`."""
    try:
        return names_in(request.path_params)
    except ValueError as error:
        raise Refused(404, str(error)) from None


async def read_form(request: Request, most_bytes: int) -> ImmutableMultiDict[str, str]:
    """Read the fields of a form from the request's body; if a field appears several times, the last value counts.

    Raises:
        Refused: the body is longer than `most_bytes`, or is not a form.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise Refused(415, f"A change is sent as {_FORM}.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            raise Refused(413, f"This form takes up to {most_bytes:,} bytes.")
    try:
        return ImmutableMultiDict(parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=300))
    except ValueError:
        raise Refused(400, "The form cannot be read.") from None
