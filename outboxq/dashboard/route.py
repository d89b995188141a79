"""What a route is: its path, its method, and the role that it needs.

A function is reached by its route alone, so nothing can be done that the table of routes does not name.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from outboxq.dashboard.parameters import Nothing
from outboxq.dashboard.roles import Role
from outboxq.dashboard.view import Look, View

if TYPE_CHECKING:
    from outboxq.admin.actions import Actions, Begin
    from outboxq.dashboard.answering import Dashboard

Method: TypeAlias = Literal["GET", "POST"]


@dataclass(frozen=True, slots=True)
class Work:
    """What an action works with: transactions, and the actions of the user, which write the audit."""

    begin: "Begin"
    actions: "Actions"


@dataclass(frozen=True, slots=True)
class Done:
    """What an action did.

    Attributes:
        text: For the page that follows.
        back: That page, below the database's.
        data: For JSON.
    """

    text: str
    back: str
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """A page about a database: reads alone, in a READ ONLY transaction.

    Attributes:
        path: Below `/{db}/`.
        takes: The dataclass of its parameters.
        section: Which entry of the navigation it belongs to.
        live: Whether it is shown anew while it is open.
    """

    path: str
    show: Callable[[Look, Any], View]
    takes: type = Nothing
    needs: Role = Role.READER
    section: str = ""
    live: bool = False
    method: ClassVar[Method] = "GET"

    @property
    def whole_path(self) -> str:
        """The path below the dashboard."""
        return f"/{{db}}/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A change of a database, by a form.

    Attributes:
        name: That of the audit.
        takes: The dataclass of its fields; one called `reason` goes into the audit.
    """

    path: str
    name: str
    act: Callable[[Work, Any], Done]
    takes: type
    needs: Role
    method: ClassVar[Method] = "POST"

    @property
    def whole_path(self) -> str:
        """The path below the dashboard."""
        return f"/{{db}}/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What is about no single database: logging in and out, the list of databases, the files that pages load.

    Attributes:
        needs: None for strangers too.
    """

    path: str
    answer: Callable[["Dashboard", Request], Awaitable[Response]]
    needs: Role | None
    method: Method = "GET"

    @property
    def whole_path(self) -> str:
        """The path below the dashboard."""
        return f"/{self.path}"


Route: TypeAlias = Screen | Action | Door
