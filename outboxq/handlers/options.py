"""The options of a handler: what its decorator is told about its jobs, checked as soon as it is said."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from outboxq.errors import RegistryError
from outboxq.outcomes import Backoff

ClaimMode: TypeAlias = Literal["transaction", "lease"]
Messages: TypeAlias = Literal["redacted", "withheld"]
DEFAULT_TIMEOUT_SECONDS = 300.0
MAX_TIMEOUT_SECONDS = 7 * 86_400.0
DEFAULT_MAX_SIZE = 100
LARGEST_MAX_SIZE = 10_000


@dataclass(frozen=True, slots=True)
class HandlerOptions:
    """Where a handler's jobs wait, how they are claimed, and what becomes of a failed one.

    `max_size` is of a batch handler. The others are explained at `Jobs.handler`.

    Raises:
        RegistryError: a value of another type or out of its range, or two that exclude each other.
    """

    queue: str
    aliases: Iterable[str]
    retry: Backoff
    claim: ClaimMode
    timeout_seconds: float | None
    messages: Messages
    batchable: bool = False
    max_size: int = DEFAULT_MAX_SIZE

    def __post_init__(self) -> None:
        if isinstance(self.aliases, str):
            raise RegistryError(f"aliases takes a tuple or a list of names, got the text {self.aliases!r}")
        object.__setattr__(self, "aliases", tuple(self.aliases))
        check_choice("claim", self.claim, ClaimMode)
        object.__setattr__(self, "timeout_seconds", _checked_timeout(self.timeout_seconds))
        if not isinstance(self.batchable, bool):
            raise RegistryError(f"batchable takes True or False, got {self.batchable!r}")
        if self.batchable and self.claim == "lease":
            raise RegistryError(
                'batchable=True shares the transaction that removed the jobs, and with claim="lease" each has its own: '
                "leave one of the two out"
            )
        check_choice("messages", self.messages, Messages)
        size = self.max_size
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST_MAX_SIZE:
            raise RegistryError(f"max_size takes 1 to {LARGEST_MAX_SIZE:,}, got {size!r}")


def check_choice(name: str, given: str, choices: object) -> None:
    """Refuse what is none of a Literal's values.

    Raises:
        RegistryError: it is not; `name` begins the message.
    """
    if given not in get_args(choices):
        raise RegistryError(f"{name} takes {' or '.join(map(repr, get_args(choices)))}, got {given!r}")


def _checked_timeout(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    # Not `not >`: NaN compares false either way.
    if not (is_number and 0.001 <= seconds <= MAX_TIMEOUT_SECONDS):
        raise RegistryError(
            f"timeout_seconds takes 0.001 to {MAX_TIMEOUT_SECONDS:,.0f}, or None for no deadline, got {seconds!r}"
        )
    return float(seconds)
