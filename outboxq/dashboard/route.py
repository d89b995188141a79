"""Routes of the dashboard: each has a path, a method, and the role that it needs.

Requests reach a function only by its route, so the table of routes names everything that requests can do.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from outboxq.dashboard.desk import Desk
from outboxq.dashboard.forms import Form, show_form
from outboxq.dashboard.intents import Caller
from outboxq.dashboard.parameters import Nothing, read_parameters
from outboxq.dashboard.roles import Role
from outboxq.dashboard.runs import ToRun
from outboxq.dashboard.view import Look, View

if TYPE_CHECKING:
    from outboxq.admin.actions import Actions, Begin
    from outboxq.dashboard.answering import Dashboard

Method: TypeAlias = Literal["GET", "POST"]

MAX_FORM_BYTES = 1_500_000


@dataclass(frozen=True, slots=True)
class Work:
    """The tools that an action's function receives to make its change.

    Attributes:
        begin: Begins a transaction that changes something.
        actions: The changes that an operator can make, in the name of the user; they write the audit.
        warn: Logs a sentence if a rolled back change left marks in jobs' rows that could not be cleared. Such jobs run
            one at a time once, as if a relay had died in them.
    """

    begin: "Begin"
    actions: "Actions"
    caller: Caller
    desk: Desk
    warn: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an action, which its function returns.

    Attributes:
        text: The message to show on the next page.
        back: The path of that page, below the database's path.
        data: The result for programs, which is sent as JSON.
        to_run: The change of many rows that is to go on in the background, if there is one.
    """

    text: str
    back: str
    data: dict[str, object] = field(default_factory=dict)
    to_run: ToRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """The route of a page about a database, which only reads, in a READ ONLY transaction.

    Attributes:
        path: The path below `/{db}/`.
        show: The function that makes the page.
        takes: The dataclass of the page's parameters.
        needs: The lowest role that may see the page.
        section: The entry of the navigation that the page belongs to.
        live: True if the page is kept current while a browser has it open.
        method: POST for a page whose parameters come from a form.
        examines: True if the page needs the doctor's findings, which are made before the transaction begins.
    """

    path: str
    show: Callable[[Look, Any], View]
    takes: type = Nothing
    needs: Role = Role.READER
    section: str = ""
    live: bool = False
    method: Method = "GET"
    examines: bool = False

    @property
    def whole_path(self) -> str:
        """The path below the dashboard, with `{db}` for the database."""
        return f"/{{db}}/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The route of a change of a database, which a form or a program sends.

    Attributes:
        path: The path below `/{db}/`.
        name: The action's name in the audit.
        act: The function that makes the change.
        of: The dataclass of the path's parameters.
        takes: The dataclass of the form's fields; the field `reason`, if there is one, goes into the audit.
        needs: The lowest role that may make the change.
        section: The entry of the navigation that the form's page belongs to.
        form: The action's form, which GET shows, and which is shown again after an error.
        again: For an action without a form: the function that makes the page after an error.
    """

    path: str
    name: str
    act: Callable[[Work, Any], Done]
    of: type = Nothing
    takes: type
    needs: Role
    section: str = ""
    form: Form | None = None
    again: Callable[[Look, Mapping[str, str]], View] | None = None
    method: ClassVar[Method] = "POST"

    @property
    def verb(self) -> str:
        """The last part of the action's path, such as `pause`."""
        return self.path.rpartition("/")[2]

    @property
    def screen(self) -> Screen:
        """The screen that shows the action's form."""
        assert self.form is not None
        show = partial(show_form, form=self.form, name=self.name)
        return Screen(path=self.path, show=show, takes=self.of, needs=self.needs, section=self.section)

    def show_again(self, look: Look, given: Mapping[str, str]) -> View | None:
        """Return the page that shows the user's input again after an error; None if the action has no such page."""
        if self.again is not None:
            return self.again(look, given)
        return None if self.form is None else self.screen.show(look, read_parameters(self.of, given))

    @property
    def whole_path(self) -> str:
        """The path below the dashboard, with `{db}` for the database."""
        return f"/{{db}}/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The route of a request about no single database: logging in or out, the list of databases, a static file.

    Attributes:
        answer: The function that answers the request.
        needs: The role that the user needs; None if the route needs no login.
        form_bytes: The largest size of the request's form, in bytes.
    """

    path: str
    answer: Callable[["Dashboard", Request], Awaitable[Response]]
    needs: Role | None
    method: Method = "GET"
    form_bytes: int = MAX_FORM_BYTES

    @property
    def whole_path(self) -> str:
        """The path below the dashboard."""
        return f"/{self.path}"


Route: TypeAlias = Screen | Action | Door
