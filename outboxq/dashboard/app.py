"""The dashboard as an ASGI application: its hosts, the headers of every answer, and its routes."""

from collections.abc import Mapping, Sequence

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.routing import Route as StarletteRoute
from starlette.types import Message, Receive, Scope, Send

from outboxq.config import check_schema
from outboxq.dashboard.answering import Dashboard
from outboxq.dashboard.databases import AnyEngine, name_engines
from outboxq.dashboard.logins import Auth, Login
from outboxq.dashboard.origins import is_served
from outboxq.dashboard.payloads import Mode, Redact
from outboxq.dashboard.routes import ROUTES
from outboxq.dashboard.seals import Seal
from outboxq.dashboard.sessions import Sessions
from outboxq.dashboard.settings import Links, Settings

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# The referrer is not sent to other sites. With `no-referrer` browsers would leave the Origin out of our own forms.
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


class DashboardApp(Starlette):
    """The ASGI application that `create_app` makes."""

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__(
            routes=[
                StarletteRoute(each.whole_path, dashboard.endpoint(each), methods=[each.method], name=each.whole_path)
                for each in ROUTES
            ]
        )
        self.dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to a host that is served, with the headers that keep a page to itself."""
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
    schema: str = "outboxq",
    title: str = "outboxq",
    environment: str | None = None,
    payloads: Mode = "redacted",
    redact: Redact | None = None,
    links: Links | None = None,
    secret: bytes | None = None,
    hosts: Sequence[str] | None = None,
    origins: Sequence[str] = (),
    live_seconds: float = 5.0,
) -> DashboardApp:
    """The dashboard, to be mounted in an ASGI application or to be served by itself.

    Args:
        engine: A SQLAlchemy engine with psycopg 3, sync or async; several by names, which their paths begin with.
        auth: A function of the Starlette request, async or not, that returns a `User` or None; or a login of ours.
        environment: Shown on every page; in `production` what changes many things is confirmed by typing.
        payloads: Hide what looks secret (`redacted`), all of arguments, headers, results and error texts, or nothing.
        redact: Called with a kind and its arguments; returns what may be seen of them.
        links: Called with the job of a page; returns links to other systems.
        secret: 32 random bytes or more, for all processes that serve it; without it sessions end with the process.
        hosts: Names that the Host header may have; without it, any: then the application around it checks.
        origins: Where browsers see it, such as `https://ops.example.com`, if a proxy changes the scheme or the host.
        live_seconds: How often pages that are open are made anew, 2 to 60.

    Raises:
        ConfigError: an engine or a value that cannot be used.
    """
    settings = Settings(
        schema=check_schema(schema),
        title=title,
        environment=environment,
        payloads=payloads,
        redact=redact,
        links=links,
        hosts=None if hosts is None else frozenset(map(str.lower, hosts)),
        origins=frozenset(origins),
        live_seconds=live_seconds,
    )
    databases = name_engines(engine, settings.schema)
    return DashboardApp(Dashboard(databases, auth, Sessions(Seal(secret), settings.origins), settings))
