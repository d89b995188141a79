"""Sessions: a signed cookie for each browser, to which the tokens of its forms are bound.

It also names the user, if the dashboard has a login of its own. With a login of the application it only names the
browser.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from outboxq.dashboard.logins import Login
from outboxq.dashboard.roles import User
from outboxq.dashboard.seals import Seal

LIFE_SECONDS = 12 * 3_600
FLASH_SECONDS = 60
# The number of logged out sessions that are remembered, until they would have ended by themselves.
_ENDED_MOST = 10_000


class Session(msgspec.Struct, frozen=True):
    """A browser, and the user who has logged in there.

    Attributes:
        until: The time of its end, in seconds since 1970.
        mark: Made from the login's data of the user; it changes with the password.
    """

    id: str
    until: float
    user: str | None = None
    mark: str = ""


class Flash(msgspec.Struct, frozen=True):
    """The result of an action, to be shown on the page that follows it."""

    text: str
    is_error: bool = False


class Sessions:
    """Reads and writes the cookies of sessions.

    The cookies' names are made of the secret: dashboards on several ports of a host share its cookies.

    Args:
        origins: Those of the proxies in front, as browsers see them.
    """

    purpose: ClassVar[str] = "session"

    def __init__(self, seal: Seal, origins: Collection[str] = ()) -> None:
        self._seal = seal
        self._origins = origins
        suffix = seal.mac("name", "cookie")[:8]
        self.cookie, self._flash_cookie = f"outboxq_{suffix}", f"outboxq_flash_{suffix}"
        self._ended: OrderedDict[str, float] = OrderedDict()

    def read(self, request: Request) -> Session | None:
        """The session of a request, if it has a valid one."""
        sealed = request.cookies.get(self.cookie)
        found = None if sealed is None else self._seal.open(self.purpose, sealed, Session)
        if not isinstance(found, Session) or found.until < time.time() or found.id in self._ended:
            return None
        return found

    def new(self) -> Session:
        """A new session."""
        return Session(secrets.token_urlsafe(24), time.time() + LIFE_SECONDS)

    def begin(self, login: Login, user: User) -> Session:
        """A new session, of a user who has logged in."""
        found = login.find(user.name)
        mark = "" if found is None else self._mark(*found)
        return msgspec.structs.replace(self.new(), user=user.name, mark=mark)

    def user_of(self, login: Login, session: Session) -> User | None:
        """The user who has logged in, with the current role; None if the login does not know that user any more."""
        found = None if session.user is None else login.find(session.user)
        if found is None or not secrets.compare_digest(self._mark(*found), session.mark):
            return None
        return found[0]

    def _mark(self, user: User, secret: str) -> str:
        return self._seal.mac("login", f"{user.name}\n{secret}")[:32]

    def end(self, session: Session) -> None:
        """Forget a session in this process, also if its cookie still exists."""
        now = time.time()
        self._ended[session.id] = session.until
        while self._ended and (len(self._ended) > _ENDED_MOST or next(iter(self._ended.values())) < now):
            self._ended.popitem(last=False)

    def write(self, request: Request, response: Response, session: Session) -> None:
        """Give the browser the cookie of a session."""
        self._set(request, response, self.cookie, self._seal.close(self.purpose, session), LIFE_SECONDS)

    def erase(self, request: Request, response: Response) -> None:
        """Take the cookie away from the browser."""
        self._set(request, response, self.cookie, "", 0)

    def write_flash(self, request: Request, response: Response, flash: Flash) -> None:
        """Show a message on the next page of this browser."""
        self._set(request, response, self._flash_cookie, self._seal.close("flash", flash), FLASH_SECONDS)

    def read_flash(self, request: Request) -> Flash | None:
        """The message for this page, if there is one."""
        sealed = request.cookies.get(self._flash_cookie)
        found = None if sealed is None else self._seal.open("flash", sealed, Flash)
        return found if isinstance(found, Flash) else None

    def erase_flash(self, request: Request, response: Response) -> None:
        """Remove the message after it was shown."""
        self._set(request, response, self._flash_cookie, "", 0)

    def token(self, session: Session, user: User | None) -> str:
        """The token that the forms of this session send along."""
        return self._seal.mac("csrf", _bound(session, user))

    def is_token(self, session: Session, user: User | None, given: str) -> bool:
        """Return True if a form is one of this session's."""
        return self._seal.is_mac("csrf", _bound(session, user), given)

    def _is_secure(self, request: Request) -> bool:
        """Return True if the browser uses TLS, to this server or to the proxy in front."""
        if request.url.scheme == "https" or f"https://{request.headers.get('host', '')}" in self._origins:
            return True
        # A proxy may send another host than browsers do.
        return bool(self._origins) and all(each.startswith("https://") for each in self._origins)

    def _set(self, request: Request, response: Response, name: str, value: str, seconds: int) -> None:
        response.set_cookie(
            name,
            value,
            max_age=seconds,
            path=request.scope.get("root_path") or "/",
            secure=self._is_secure(request),
            httponly=True,
            samesite="strict",
        )


def _bound(session: Session, user: User | None) -> str:
    return f"{session.id}\n{user.name if user else ''}"
