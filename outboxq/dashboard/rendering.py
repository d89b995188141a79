"""Pages: templates that escape everything, relative links, and values formatted for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode
from uuid import UUID

from jinja2 import BytecodeCache, Environment, PackageLoader, StrictUndefined
from jinja2.bccache import Bucket
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from outboxq.codec.display import Estimate, Latency, age, duration, in_short, moment, standby
from outboxq.codec.text import printable
from outboxq.dashboard import charts
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.roles import Role, User
from outboxq.dashboard.segments import as_segment
from outboxq.dashboard.sessions import Flash, Session
from outboxq.dashboard.settings import Settings
from outboxq.dashboard.static import static_version
from outboxq.dashboard.view import Look, View

if TYPE_CHECKING:
    from outboxq.dashboard.route import Action, Route

NAVIGATION: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    ("", (("overview", "Overview"), ("doctor", "Doctor"))),
    ("Work", (("queues", "Queues"), ("kinds", "Kinds"), ("jobs", "Jobs"), ("dead", "Dead letters"), ("done", "Done"))),
    ("Flow", (("schedules", "Schedules"), ("flow", "Limits and groups"), ("batches", "Batches"))),
    ("Once", (("effects", "Effects"), ("inbox", "Inbox"))),
    ("Operate", (("relays", "Relays"), ("bulk", "Bulk runs"), ("audit", "Audit"))),
)

# The choices of seconds between two automatic reloads of a page.
REFRESHES = ("5", "10", "30", "60")
# The letters that open a screen when typed after g.
KEYS: Mapping[str, str] = {
    "overview": "o", "doctor": "h", "queues": "q", "kinds": "k", "jobs": "j", "dead": "d", "done": "f",
    "schedules": "s", "flow": "l", "batches": "b", "effects": "e", "inbox": "i", "relays": "r", "bulk": "u",
    "audit": "a",
}  # fmt: skip


@dataclass(slots=True)
class Page:
    """One request, and the data with which its answer is rendered.

    Attributes:
        database: The database's name in paths; None if the page is about no single database.
        asked: The parameters of the screen, as an object of its dataclass.
        flash: The message about the user's last action, shown once.
        form: The fields that the request sent.
        problem: The error to show in a form.
    """

    request: Request
    session: Session
    user: User | None
    route: "Route"
    database: str | None = None
    asked: object = None
    flash: Flash | None = None
    form: Any = field(default_factory=dict)
    problem: Refused | None = None

    @property
    def refresh(self) -> int | None:
        """Return the seconds after which the browser reloads this page; None unless the user has chosen them."""
        given = self.request.query_params.get("refresh", "")
        return int(given) if given in REFRESHES else None

    def to(self, path: str) -> str:
        """Return a link from this page to a path below the dashboard.

        The link is relative, so that it is right under any mount and proxy.
        """
        root = self.request.scope.get("root_path", "")
        inner = self.request.scope["path"].removeprefix(root)
        return relative(inner, path)


def relative(inner: str, path: str) -> str:
    """Return a link from the page at `inner` to the page at `path`, both of which are paths below the dashboard."""
    return "../" * max(0, inner.count("/") - 1) + path or "./"


class _Compiled(BytecodeCache):
    """A cache of compiled templates that all dashboards of a process share, to save time in tests."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        known = self._known.get(bucket.key)
        if known is not None:
            bucket.bytecode_from_string(known)

    def dump_bytecode(self, bucket: Bucket) -> None:
        self._known[bucket.key] = bucket.bytecode_to_string()


_compiled = _Compiled()


class Renderer:
    """Makes pages from templates. All values are escaped, and an undefined name in a template raises an error."""

    def __init__(
        self, settings: Settings, databases: Mapping[str, str], actions: Sequence["Action"], *, has_login: bool
    ) -> None:
        self._settings = settings
        # The forms that pages lead to, by the paths of those pages.
        self._forms: dict[str, list[Action]] = {}
        for each in actions:
            if each.form is not None:
                self._forms.setdefault(each.path.rpartition("/")[0], []).append(each)
        self._databases = databases
        self._environment = Environment(
            loader=PackageLoader("outboxq.dashboard"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            bytecode_cache=_compiled,
        )
        self._environment.filters |= _filters()
        self._environment.globals |= {
            "navigation": NAVIGATION,
            "settings": settings,
            "databases": list(databases.items()),
            "has_login": has_login,
            "keys": KEYS,
            "forms_of": lambda path: self._forms.get(path, []),
            "asset": lambda name: f"static/{static_version(name)}/{name}",
            "charts": charts,
            "Role": Role,
        }

    def page(self, page: Page, view: View, look: Look, token: str) -> HTMLResponse:
        """Render a screen as a whole page.

        Args:
            token: The token that the page's forms send.
        """
        context = {**view.data, **view.extra, "title": view.title, "now": look.now, "not_known": look.not_known}
        context["standby_delay_seconds"] = look.standby_delay_seconds
        if look.is_read_only:
            context["my_role"] = Role.READER
        return self._response(page, view.template, token, context)

    def fragments(self, inner: str, database: str, view: View, look: Look) -> dict[str, str]:
        """Render the parts of a live page that change while it is open.

        Return `{name of the event that sends a part: HTML of the part}`. The parts are the same for all users. If the
        path shows another page by now, because the job died for example, the parts contain a link that loads it.
        """
        context = self._links(inner, database, look.now)
        template = self._environment.get_template(view.template)
        if "live" not in template.blocks:
            template = self._environment.get_template("moved.html")
        shared = template.new_context({**context, **view.data, **view.extra, "not_known": look.not_known})
        blocks = {"page": "live", "rest": "rest"}
        made = {
            event: "".join(template.blocks[name](shared)) for event, name in blocks.items() if name in template.blocks
        }
        if look.standby_delay_seconds is not None:
            delay = self._environment.get_template("standby.html")
            made["page"] += delay.render(standby_delay_seconds=look.standby_delay_seconds, is_anew=True)
        return made

    def refusal(self, page: Page, refused: Refused, token: str) -> HTMLResponse:
        """Render the page of a refusal, with its reason."""
        response = self._response(page, "refused.html", token, {"title": str(refused.status), "refused": refused})
        response.status_code = refused.status
        return response

    def other(self, page: Page, template: str, token: str, **context: Any) -> HTMLResponse:
        """Render a page about no single database, such as the login; `context` has the values for the template."""
        return self._response(page, template, token, context)

    def _response(self, page: Page, template: str, token: str, context: Mapping[str, Any]) -> HTMLResponse:
        inner = page.request.scope["path"].removeprefix(page.request.scope.get("root_path", ""))
        common = {
            **self._links(inner, page.database, context.get("now")),
            "page": page,
            "token": token,
            "my_role": page.user.role if page.user else Role.READER,
            "query": lambda **changes: _query(page, changes, page.refresh),
            "live_path": quote(inner.partition(f"/{page.database}/")[2] or "overview")
            + _query(page, {}).removesuffix("?"),
        }
        return HTMLResponse(self._environment.get_template(template).render({**common, **context}))

    def _links(self, inner: str, database: str | None, now: datetime | None) -> dict[str, Any]:
        return {
            "to": lambda path="": relative(inner, path),
            "here": lambda path="": relative(inner, f"{database}/{path}"),
            "ago": lambda value: "" if now is None else _age(value, now),
            "database": database,
            "database_name": self._databases.get(database or "", ""),
            "inner": inner,
        }


def _filters() -> dict[str, Any]:
    return {
        "segment": as_segment,
        "visible": lambda value: printable(str(value)),
        "visible_lines": lambda value: "\n".join(printable(line) for line in str(value).split("\n")),
        "combined": lambda given, more: {**given, **more},
        "number": _number,
        "latency": lambda value: "–" if value is None else in_short(Latency(value), None),
        "span": lambda value: "–" if value is None else duration(value),
        "moment": moment,
        "standby": standby,
        "clock": _clock,
        "short": _short,
        "percent": lambda value: f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}",
    }


def wants_json(request: Request) -> bool:
    """Return True if a client accepts JSON rather than a page."""
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/html" not in accepted


def as_redirect(path: str) -> Response:
    """Return an answer with status 303: the browser loads another page of the dashboard by GET."""
    return Response(status_code=303, headers={"location": path})


def templates() -> list[str]:
    """Return the file names of all templates."""
    return sorted(each.name for each in files("outboxq.dashboard").joinpath("templates").iterdir())


def _age(value: datetime, now: datetime) -> str:
    seconds = (now - value).total_seconds()
    return age(value, now) if seconds < 0 else f"{age(value, now)} ago"


def _clock(value: datetime | str) -> str:
    """Return a time as text for people, in UTC. Text that is no time stays as it is."""
    if isinstance(value, str):
        try:
            return _clock(datetime.fromisoformat(value))
        except ValueError:
            return printable(value)
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _number(value: float | None, *, estimated: bool = False) -> str:
    if value is None:
        return "–"
    if estimated:
        return in_short(Estimate(value), None)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _short(value: UUID | str) -> str:
    """Return an id cut to its last 12 characters, which identify it: the first ones are a time."""
    return f"…{str(value)[-12:]}"


def _query(page: Page, changes: dict[str, Any], refresh: int | None = None) -> str:
    """Return the query string of a link to this same page, with some of its parameters changed.

    Parameters of the path are left out; the value None removes a parameter.
    """
    given: dict[str, Any] = {} if refresh is None else {"refresh": refresh}
    asked = page.asked
    if is_dataclass(asked):
        given |= {
            each.name: getattr(asked, each.name)
            for each in fields(asked)
            if each.name not in page.request.path_params and getattr(asked, each.name) != each.default
        }
    wanted = {name: value for name, value in {**given, **changes}.items() if value not in (None, "", False)}
    return "?" + urlencode({name: "true" if value is True else str(value) for name, value in wanted.items()})
