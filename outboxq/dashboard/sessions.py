"""Sessions: a signed cookie for each browser, to which the tokens of its forms are bound.

If the dashboard has a login of its own, the cookie also names the user. If the application has the login, the cookie
only identifies the browser.
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
    """A browser's session, and the user who has logged in there. The browser has it as a signed cookie.

    Attributes:
        until: The time at which the session ends, in seconds since 1970.
        user: The user's name; None if no user has logged in.
        mark: A value made from the user's login data. If the password changes, the value differs, and the session ends.
    """

    id: str
    until: float
    user: str | None = None
    mark: str = ""


class Flash(msgspec.Struct, frozen=True):
    """The message about an action's result, which the next page shows once."""

    text: str
    is_error: bool = False


class Sessions:
    """Reads and writes the cookies of sessions.

    The cookies' names are derived from the secret, because dashboards on several ports of one host share cookies.

    Args:
        seal: Signs the cookies.
        origins: The dashboard's origins as browsers see them, if a proxy is in front.
    """

    purpose: ClassVar[str] = "session"

    def __init__(self, seal: Seal, origins: Collection[str] = ()) -> None:
        self._seal = seal
        self._origins = origins
        suffix = seal.mac("name", "cookie")[:8]
        self.cookie, self._flash_cookie = f"outboxq_{suffix}", f"outboxq_flash_{suffix}"
        self._ended: OrderedDict[str, float] = OrderedDict()

    def read(self, request: Request) -> Session | None:
        """Return the session in the request's cookie; None if there is none, or it is not valid or has ended."""
        sealed = request.cookies.get(self.cookie)
        found = None if sealed is None else self._seal.open(self.purpose, sealed, Session)
        if not isinstance(found, Session) or found.until < time.time() or found.id in self._ended:
            return None
        return found

    def new(self) -> Session:
        """Return a new session, in which no user has logged in yet."""
        return Session(secrets.token_urlsafe(24), time.time() + LIFE_SECONDS)

    def begin(self, login: Login, user: User) -> Session:
        """Return a new session for a user who has just logged in."""
        found = login.find(user.name)
        mark = "" if found is None else self._mark(*found)
        return msgspec.structs.replace(self.new(), user=user.name, mark=mark)

    def user_of(self, login: Login, session: Session) -> User | None:
        """Return the session's user with the present role.

        Return None if no user has logged in, or the login does not know the user or the password any more.
        """
        found = None if session.user is None else login.find(session.user)
        if found is None or not secrets.compare_digest(self._mark(*found), session.mark):
            return None
        return found[0]

    def _mark(self, user: User, secret: str) -> str:
        return self._seal.mac("login", f"{user.name}\n{secret}")[:32]

    def end(self, session: Session) -> None:
        """Make a session invalid in this process, so that its cookie, if a browser still sends it, is refused."""
        now = time.time()
        self._ended[session.id] = session.until
        while self._ended and (len(self._ended) > _ENDED_MOST or next(iter(self._ended.values())) < now):
            self._ended.popitem(last=False)

    def write(self, request: Request, response: Response, session: Session) -> None:
        """Set the cookie of a session in the response."""
        self._set(request, response, self.cookie, self._seal.close(self.purpose, session), LIFE_SECONDS)

    def erase(self, request: Request, response: Response) -> None:
        """Remove the session's cookie from the browser."""
        self._set(request, response, self.cookie, "", 0)

    def write_flash(self, request: Request, response: Response, flash: Flash) -> None:
        """Set a cookie with a message in the response: the browser's next page shows it."""
        self._set(request, response, self._flash_cookie, self._seal.close("flash", flash), FLASH_SECONDS)

    def read_flash(self, request: Request) -> Flash | None:
        """Return the message that this page should show, from the request's cookie; None if there is none."""
        sealed = request.cookies.get(self._flash_cookie)
        found = None if sealed is None else self._seal.open("flash", sealed, Flash)
        return found if isinstance(found, Flash) else None

    def erase_flash(self, request: Request, response: Response) -> None:
        """Remove the message's cookie from the browser after the message was shown."""
        self._set(request, response, self._flash_cookie, "", 0)

    def token(self, session: Session, user: User | None) -> str:
        """Return the token for the forms of this session. A form that sends it was made by the dashboard."""
        return self._seal.mac("csrf", _bound(session, user))

    def is_token(self, session: Session, user: User | None, given: str) -> bool:
        """Return True if `given` is the token of this session's forms."""
        return self._seal.is_mac("csrf", _bound(session, user), given)

    def _is_secure(self, request: Request) -> bool:
        """Return True if the browser uses TLS, to this server or to a proxy: cookies are then sent only over TLS."""
        if request.url.scheme == "https" or f"https://{request.headers.get('host', '')}" in self._origins:
            return True
        # A proxy may send another Host than the browser did.
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
