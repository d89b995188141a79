"""A reason why a job or a queue does not run, and the order of the reasons."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

# In the order of precedence: of those that hold at the same time the first one is the verdict.
Code: TypeAlias = Literal[
    "dead",
    "kept-done",
    "waits-for-batch",
    "not-committed",
    "not-found",
    "queue-empty",
    "cancelling",
    "running-blocked",
    "running",
    "held-by-session",
    "held-by-prepared-transaction",
    "lease-orphaned",
    "leased",
    "expired",
    "expires-first",
    "suspect",
    "retrying",
    "scheduled",
    "kind-paused",
    "kind-unknown",
    "kind-not-served",
    "behind-in-group",
    "table-locked",
    "queue-paused",
    "no-relay",
    "queue-not-served",
    "turn-held",
    "queue-limited",
    "rate-limited",
    "coalesced",
    "slots-busy",
    "behind-others",
    "overdue",
    "due-now",
    "not-known",
]
CODES: tuple[Code, ...] = get_args(Code)
Value: TypeAlias = str | int | float | bool | list[str] | None


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why a job or a queue does not run.

    Attributes:
        code: The reason's name, for programs; later versions do not rename it.
        text: The reason in a sentence.
        details: The values in it, for programs: ids, pids, ages in seconds.
        advice: The steps that an operator can take, in words.
    """

    code: Code
    text: str
    details: Mapping[str, Value]
    advice: str


def in_order(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Sort reasons by importance, the most important first, in the order of `CODES`."""
    return tuple(sorted(reasons, key=lambda reason: CODES.index(reason.code)))
