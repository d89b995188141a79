"""Users of the dashboard, and their roles."""

from dataclasses import dataclass
from enum import IntEnum

from outboxq.errors import ConfigError
from outboxq.names import MAX_SCOPE_BYTES, check_key


class Role(IntEnum):
    """The role of a user; each one may do what the ones before it may.

    READER reads. OPERATOR does what can be undone, or what jobs do anyway: pauses, retries, cancels. ADMIN does the
    rest: discards, forgets, resolves.
    """

    READER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """Its name, as texts and the audit have it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class User:
    """A user who has logged in.

    Raises:
        InvalidKey: a name that the audit cannot hold: empty, over 255 bytes, or with control characters.
    """

    name: str
    role: Role = Role.READER

    def __post_init__(self) -> None:
        check_key("user's name", self.name, MAX_SCOPE_BYTES)


def role_named(name: str) -> Role:
    """The role of this name.

    Raises:
        ConfigError: no role has this name.
    """
    for role in Role:
        if role.label == name:
            return role
    raise ConfigError(f"a role is reader, operator or admin, got {name!r}")
