"""The dashboard as an ASGI application: its hosts, the headers of every answer, and its routes."""

from collections.abc import Mapping
from typing import Unpack

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Message, Receive, Scope, Send

from outboxq.dashboard import doors
from outboxq.dashboard.answering import Dashboard
from outboxq.dashboard.databases import AnyEngine, name_engines
from outboxq.dashboard.desk import KnownKinds
from outboxq.dashboard.logins import Auth, Login
from outboxq.dashboard.origins import is_served
from outboxq.dashboard.roles import Role
from outboxq.dashboard.route import Door
from outboxq.dashboard.routes import ROUTES
from outboxq.dashboard.seals import Seal
from outboxq.dashboard.settings import Options, Settings
from outboxq.errors import ConfigError
from outboxq.handlers.registry import Jobs

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# The referrer is not sent to other sites. With `no-referrer` browsers would leave the Origin out of the dashboard's own
# forms.
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "x-robots-tag": "noindex",
}


_NOWHERE = Door(path="", answer=doors.find_nothing, needs=Role.READER)


class DashboardApp(Starlette):
    """The dashboard as an ASGI application; `create_app` returns it."""

    def __init__(self, dashboard: Dashboard) -> None:
        async def find_nothing(request: Request, _: Exception) -> Response:
            return await dashboard.endpoint(_NOWHERE)(request)

        super().__init__(
            routes=[
                StarletteRoute(each.whole_path, dashboard.endpoint(each), methods=[each.method], name=each.whole_path)
                for each in ROUTES
            ],
            exception_handlers={404: find_nothing},
        )
        # Its redirects use the host that the server knows, which differs from the browser's if there is a proxy.
        self.router.redirect_slashes = False
        self.dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with headers that keep other sites from embedding a page.

        A request for a host that the settings do not list (`hosts`) is refused with status 400.
        """
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
                headers.add_vary_header("accept")
            await send(message)

        settings = self.dashboard.settings
        host = Headers(scope=scope).get("host", "")
        if settings.hosts is not None and not is_served(host, settings.hosts):
            refusal = PlainTextResponse("This host is not served here.\n", 400)
            await refusal(scope, receive, send_with_headers)
            return
        await super().__call__(scope, receive, send_with_headers)


def create_app(
    engine: AnyEngine | Mapping[str, AnyEngine],
    *,
    auth: Auth | Login,
    jobs: Jobs | Mapping[str, Jobs] | None = None,
    read_engine: AnyEngine | Mapping[str, AnyEngine] | None = None,
    secret: bytes | None = None,
    **options: Unpack[Options],
) -> DashboardApp:
    """Create the dashboard, to be mounted in an ASGI application or served by itself.

    Args:
        engine: A SQLAlchemy engine with psycopg 3, sync or async; or `{name: engine}` for several databases: the path
            of a database's pages begins with the name.
        auth: A function of the Starlette request, async or not, that returns a `User`, or None for an unknown user; or
            one of the login classes.
        jobs: The application's registry, or a mapping of registries by the names of databases. With it, pages describe
            kinds and name those without a handler, and edited arguments are checked.
        read_engine: The engine that pages read from, such as one of a hot standby; or a mapping of such engines by the
            names of some of the databases. Changes, the pages that lead to changes, and the doctor use `engine`.
        secret: 32 random bytes or more, the same in all processes that serve the dashboard. Without it each process
            makes its own, and sessions end with the process.
        options: See `Options`.

    Raises:
        ConfigError: an engine or another value cannot be used.
    """
    settings = Settings.of(options)
    databases = name_engines(engine, settings.schema, read_engine)
    registries = jobs if isinstance(jobs, Mapping) else dict.fromkeys((each.name for each in databases.values()), jobs)
    unknown = registries.keys() - {each.name for each in databases.values()}
    if unknown:
        raise ConfigError(f"jobs names databases that the dashboard does not have: {', '.join(sorted(unknown))}")
    kinds = {segment: KnownKinds(registries.get(each.name)) for segment, each in databases.items()}
    return DashboardApp(Dashboard(databases, auth, Seal(secret), settings, kinds, ROUTES))
