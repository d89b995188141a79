"""Routes: each has a path, a method, and the role that it needs.

A function is reached only by its route, so nothing can be done that the table of routes does not name.
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
    """The tools of an action: transactions, and the actions of the user, which write the audit.

    Attributes:
        warn: Called with a sentence that says what could not be taken back.
    """

    begin: "Begin"
    actions: "Actions"
    caller: Caller
    desk: Desk
    warn: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an action.

    Attributes:
        text: For the page that follows.
        back: That page, below the database's.
        data: For JSON.
        to_run: The change that goes on in the background.
    """

    text: str
    back: str
    data: dict[str, object] = field(default_factory=dict)
    to_run: ToRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """A page about a database: only reads, in a READ ONLY transaction.

    Attributes:
        path: Below `/{db}/`.
        takes: The dataclass of its parameters.
        section: The entry of the navigation that it belongs to.
        live: True if it is shown again while it is open.
        method: POST for a page whose parameters are a form's.
        examines: True if it needs the doctor's findings, which are made before the transaction begins.
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
        """The path below the dashboard."""
        return f"/{{db}}/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A change of a database, by a form.

    Attributes:
        name: That of the audit.
        of: The dataclass of the names in its path.
        takes: The dataclass of its fields; one called `reason` goes into the audit.
        form: Its form, which is shown by GET, and again with an error.
        again: Instead of a form: makes the page that is shown after an error.
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
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def screen(self) -> Screen:
        """The page of its form."""
        assert self.form is not None
        show = partial(show_form, form=self.form, name=self.name)
        return Screen(path=self.path, show=show, takes=self.of, needs=self.needs, section=self.section)

    def show_again(self, look: Look, given: Mapping[str, str]) -> View | None:
        """The page that is shown after an error, to try once more."""
        if self.again is not None:
            return self.again(look, given)
        return None if self.form is None else self.screen.show(look, read_parameters(self.of, given))

    @property
    def whole_path(self) -> str:
        """The path below the dashboard."""
        return f"/{{db}}/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A request about no single database: logging in or out, the list of databases, a file that pages load.

    Attributes:
        needs: None for strangers too.
        form_bytes: The longest form that it takes.
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
