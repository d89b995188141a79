"""The users of requests: the ways to log in that the dashboard has, in addition to an application's own.

An `auth` is any callable that takes a Starlette request and returns a `User`, or None for a stranger; an async one is
awaited. The classes here are such callables too. Those with a form (`Login`) keep who logged in, in the session.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from starlette.requests import Request

from outboxq.dashboard.roles import Role, User, role_named
from outboxq.errors import ConfigError, InvalidKey

Auth: TypeAlias = Callable[[Request], Awaitable[User | None] | User | None]

_SALT_BYTES = 16
_MIN_PASSWORD_CHARACTERS = 10
LINK_SECONDS = 600.0
_LINE = re.compile(
    r"(?P<name>[^:]+):(?P<role>[a-z]+):scrypt:(?P<cost>1[0-6]):(?P<block>[1-8]):(?P<parallel>[1-9]|1[0-6])"
    r":(?P<salt>[0-9a-f]{32}):(?P<hash>[0-9a-f]{64})"
)


@runtime_checkable
class Login(Protocol):
    """A way to log in with a form. The user who logged in is kept in the session."""

    @property
    def asks_name(self) -> bool:
        """Return True if the form has a field for a name, and not only for the password."""
        ...

    def log_in(self, name: str, password: str) -> User | None:
        """The user of a name and a password; None if they are wrong. Called in a thread."""
        ...

    def take_link(self, token: str) -> User | None:
        """The user of a link with a token, which may be valid once; None if it is not valid."""
        ...

    def find(self, name: str) -> tuple[User, str] | None:
        """A user as it is now, and a secret text that changes with the password; None if no user has this name.

        Called at each request: a user may have changed since the session began.
        """
        ...


class TokenLogin:
    """One token for all who have it; without one, a link that logs in once, within ten minutes.

    Args:
        token: 16 characters at least; if there is none, only the link lets in.
        name: What the audit calls them.

    Raises:
        ConfigError: a token that is too short.
    """

    asks_name = False

    def __init__(self, token: str | None = None, *, name: str = "operator", role: Role = Role.READER) -> None:
        if token is not None and len(token) < 16:
            raise ConfigError("a token has 16 characters or more; `openssl rand -hex 32` prints one")
        self._token = token or secrets.token_urlsafe(32)
        self._user = User(name, role)
        # A reader of the first lines of a log could log in by it, so it exists only if there is no token.
        self._link = secrets.token_urlsafe(32) if token is None else None
        self._link_until = time.monotonic() + LINK_SECONDS
        self._lock = threading.Lock()

    @property
    def link_token(self) -> str | None:
        """The token of the link; None if there is none, or none any more."""
        return self._link if time.monotonic() < self._link_until else None

    def log_in(self, name: str, password: str) -> User | None:  # noqa: ARG002  # as `Login` has it
        """The user, if the password is the token."""
        return self._user if _is_same(password, self._token) else None

    def take_link(self, token: str) -> User | None:
        """The user, if the link was not used before."""
        with self._lock:
            if self.link_token is None or not _is_same(token, self.link_token):
                return None
            self._link = None
        return self._user

    def find(self, name: str) -> tuple[User, str] | None:
        """The user of the token."""
        return (self._user, self._token) if name == self._user.name else None


@dataclass(frozen=True, slots=True)
class _Scrypt:
    """Parameters of a password's hash: 16 MiB, five times, which takes some 250 ms. `cost`: as a power of two."""

    cost: int = 14
    block: int = 8
    parallel: int = 5

    def hash(self, password: str, salt: bytes) -> bytes:
        given = password.encode(errors="replace")
        memory = 128 * self.block * (2**self.cost + self.parallel + 2)
        return hashlib.scrypt(
            given, salt=salt, n=2**self.cost, r=self.block, p=self.parallel, maxmem=2 * memory, dklen=32
        )


@dataclass(frozen=True, slots=True)
class _Known:
    user: User
    scrypt: _Scrypt
    salt: bytes
    hash: bytes


class PasswordLogin:
    """Users with a password each, from lines `name:role:scrypt:14:8:5:salt:hash`, as `password_line` makes them."""

    asks_name = True

    def __init__(self, lines: Sequence[str]) -> None:
        self._known: Mapping[str, _Known] = {known.user.name: known for known in map(_read_line, lines)}
        if not self._known:
            raise ConfigError("no user may log in: the file has no line")
        # A try takes 16 MiB: strangers get one at a time.
        self._lock = threading.Lock()

    @classmethod
    def from_file(cls, path: str) -> "PasswordLogin":
        """The users of a file; empty lines and those that begin with # are left out.

        Raises:
            ConfigError: it cannot be read, or has a malformed line.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the file of users cannot be read: {error}") from error
        lines = [line.strip() for line in text.splitlines()]
        return cls([line for line in lines if line and not line.startswith("#")])

    def log_in(self, name: str, password: str) -> User | None:
        """The user, if name and password belong together."""
        known = self._known.get(name)
        # A name that is not known takes as long as a wrong password.
        like = known or next(iter(self._known.values()))
        with self._lock:
            made = like.scrypt.hash(password, like.salt)
        return known.user if known is not None and hmac.compare_digest(made, known.hash) else None

    def take_link(self, token: str) -> User | None:  # noqa: ARG002  # as `Login` has it
        """Return None: there is no link."""
        return None

    def find(self, name: str) -> tuple[User, str] | None:
        """The user of a line, and its hash."""
        known = self._known.get(name)
        return None if known is None else (known.user, known.hash.hex())


class HeaderAuth:
    """Takes the name from a header, which a proxy in front has set after its own login.

    Args:
        proxies: The addresses, or networks in CIDR, that the header is believed from.

    Raises:
        ConfigError: there is no proxy, or one is not an address.
    """

    def __init__(self, header: str, proxies: Sequence[str], *, role: Role = Role.READER) -> None:
        if not proxies:
            raise ConfigError("a header is only believed from proxies: name their addresses")
        try:
            self._proxies = tuple(ipaddress.ip_network(each) for each in proxies)
        except ValueError as error:
            raise ConfigError(f"a proxy is an address or a network, such as 10.0.0.0/8: {error}") from error
        self._header = header
        self._role = role

    def __call__(self, request: Request) -> User | None:
        """The user that the proxy names; None without the header, or if the request has come past the proxy."""
        names = request.headers.getlist(self._header)
        if len(names) != 1 or request.client is None or not self._is_proxy(request.client.host):
            return None
        try:
            return User(names[0], self._role)
        except InvalidKey:
            return None

    def _is_proxy(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._proxies)


def password_line(name: str, role: Role, password: str) -> str:
    """A line for the file of `PasswordLogin`.

    Raises:
        ConfigError: a name with a colon, or a password of less than ten characters.
    """
    if len(password) < _MIN_PASSWORD_CHARACTERS:
        raise ConfigError(f"a password has {_MIN_PASSWORD_CHARACTERS} characters or more")
    if ":" in name:
        raise ConfigError(f"a user's name has no colon, got {name!r}")
    salt = secrets.token_bytes(_SALT_BYTES)
    scrypt = _Scrypt()
    numbers = f"{scrypt.cost}:{scrypt.block}:{scrypt.parallel}"
    return f"{User(name).name}:{role.label}:scrypt:{numbers}:{salt.hex()}:{scrypt.hash(password, salt).hex()}"


def _read_line(line: str) -> _Known:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ConfigError(
            "a line of the file of users is name:role:scrypt:cost:block:parallel:salt:hash, and one is not: "
            "`outboxq dashboard --hash-password` prints such lines"
        )
    user = User(found["name"], role_named(found["role"]))
    scrypt = _Scrypt(int(found["cost"]), int(found["block"]), int(found["parallel"]))
    return _Known(user, scrypt, bytes.fromhex(found["salt"]), bytes.fromhex(found["hash"]))


def _is_same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
