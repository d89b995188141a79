"""The dashboard's own ways to log in: by a token, by name and password, or by a header that a proxy sets."""

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
    """The interface of a login with a form, such as `TokenLogin`, which `create_app` takes as `auth`.

    The session keeps the name of the user who has logged in.
    """

    @property
    def asks_name(self) -> bool:
        """Return True if the login's form has a field for the user's name in addition to the password."""
        ...

    def log_in(self, name: str, password: str) -> User | None:
        """Return the user with this name and password; None if they do not match. It is called in a thread."""
        ...

    def take_link(self, token: str) -> User | None:
        """Return the user whom a link with this token logs in; None if the token is not valid.

        A token may be valid only once.
        """
        ...

    def find(self, name: str) -> tuple[User, str] | None:
        """Return the user of this name, and a secret text that changes with the password; None if there is no user.

        The dashboard calls it at each request: a session ends if its user was removed, or if the secret text has
        changed.
        """
        ...


class TokenLogin:
    """A login by one token that all users share. Without a token, a link logs in: once, and within ten minutes.

    Args:
        token: 16 characters at least; without a token, only the link logs in.
        name: The name of all these users in the audit.
        role: The role of all these users.

    Raises:
        ConfigError: a token that is too short.
    """

    asks_name = False

    def __init__(self, token: str | None = None, *, name: str = "operator", role: Role = Role.READER) -> None:
        if token is not None and len(token) < 16:
            raise ConfigError("a token has 16 characters or more; `openssl rand -hex 32` prints one")
        self._token = token or secrets.token_urlsafe(32)
        self._user = User(name, role)
        # A reader of a log's first lines could log in by the link, so it exists only if there is no token.
        self._link = secrets.token_urlsafe(32) if token is None else None
        self._link_until = time.monotonic() + LINK_SECONDS
        self._lock = threading.Lock()

    @property
    def link_token(self) -> str | None:
        """Return the token of the link; None if there is no link, or it was used or has expired."""
        return self._link if time.monotonic() < self._link_until else None

    def log_in(self, name: str, password: str) -> User | None:  # noqa: ARG002  # as `Login` has it
        """Return the user that all share if `password` is the token; otherwise None."""
        return self._user if _is_same(password, self._token) else None

    def take_link(self, token: str) -> User | None:
        """Return the user that all share if the token is the link's, and make the link invalid.

        Return None if the token is wrong, or the link was used or has expired.
        """
        with self._lock:
            if self.link_token is None or not _is_same(token, self.link_token):
                return None
            self._link = None
        return self._user

    def find(self, name: str) -> tuple[User, str] | None:
        """Return the user that all share, with the token, if `name` is this user's name; otherwise None."""
        return (self._user, self._token) if name == self._user.name else None


@dataclass(frozen=True, slots=True)
class _Scrypt:
    """The parameters with which scrypt makes a password's hash. The defaults take 16 MiB and some 250 ms.

    Attributes:
        cost: The exponent of scrypt's N, which is a power of two.
    """

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
    """A login by name and password.

    Each user has a line `name:role:scrypt:14:8:5:salt:hash`, as `password_line` makes it.
    """

    asks_name = True

    def __init__(self, lines: Sequence[str]) -> None:
        self._known: Mapping[str, _Known] = {known.user.name: known for known in map(_read_line, lines)}
        if not self._known:
            raise ConfigError("no user may log in: the file has no line")
        # A try takes 16 MiB, so tries run one at a time.
        self._lock = threading.Lock()

    @classmethod
    def from_file(cls, path: str) -> "PasswordLogin":
        """Make the login from a file with a line for each user; empty lines and lines that begin with # are skipped.

        Raises:
            ConfigError: the file cannot be read, or has a malformed line.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the file of users cannot be read: {error}") from error
        lines = [line.strip() for line in text.splitlines()]
        return cls([line for line in lines if line and not line.startswith("#")])

    def log_in(self, name: str, password: str) -> User | None:
        """Return the user if name and password match; otherwise None.

        An unknown name takes as long as a wrong password, so that names cannot be found by the time of the answer.
        """
        known = self._known.get(name)
        # A name that is not known takes as long as a wrong password.
        like = known or next(iter(self._known.values()))
        with self._lock:
            made = like.scrypt.hash(password, like.salt)
        return known.user if known is not None and hmac.compare_digest(made, known.hash) else None

    def take_link(self, token: str) -> User | None:  # noqa: ARG002  # as `Login` has it
        """Return None: with passwords there is no link that logs in."""
        return None

    def find(self, name: str) -> tuple[User, str] | None:
        """Return the user of this name, and the hash of the password; None if no line has the name."""
        known = self._known.get(name)
        return None if known is None else (known.user, known.hash.hex())


class HeaderAuth:
    """A login that takes the user's name from a header, which a proxy in front sets after its own login.

    Args:
        header: The name of the header.
        proxies: The addresses, or networks in CIDR, of the trusted proxies.
        role: The role of all users.

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
        """Return the user that the proxy names; None without the header, or if the request bypassed the proxy."""
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
    """Return a new line for the file of `PasswordLogin`, with a hash of the password.

    Raises:
        ConfigError: the name has a colon, or the password has fewer than ten characters.
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
