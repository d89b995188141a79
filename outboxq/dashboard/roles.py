"""Users of the dashboard, and their roles."""

from dataclasses import dataclass
from enum import IntEnum

from outboxq.errors import ConfigError
from outboxq.names import MAX_SCOPE_BYTES, check_key


class Role(IntEnum):
    """The role of a user; each role includes the rights of the lower ones.

    READER reads. OPERATOR makes changes that can be undone, or that happen to jobs anyway: pauses, retries, cancels.
    ADMIN makes all other changes, such as discards, forgets and resolves.
    """

    READER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """The role's name in texts and in the audit."""
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
    """Return the role with this label, such as `operator`.

    Raises:
        ConfigError: no role has this name.
    """
    for role in Role:
        if role.label == name:
            return role
    raise ConfigError(f"a role is reader, operator or admin, got {name!r}")
