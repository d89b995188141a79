"""The options of handlers: those that `jobs.handler` and `jobs.batch_handler` accept, and their checks."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias, get_args

from outboxq.errors import RegistryError
from outboxq.handlers.keeping import Keeping, checked_keeping
from outboxq.outbox.options import PLAIN_OPTIONS, FlowOptions, JobOptions
from outboxq.outcomes import Backoff

ClaimMode: TypeAlias = Literal["transaction", "lease"]
OnFailure: TypeAlias = Literal["block", "pass"]
Messages: TypeAlias = Literal["redacted", "withheld", "whole"]
DEFAULT_TIMEOUT_SECONDS = 300.0
MAX_TIMEOUT_SECONDS = 7 * 86_400.0
DEFAULT_MAX_SIZE = 100
LARGEST_MAX_SIZE = 10_000


class CommonOptions(FlowOptions, total=False):
    """The keyword arguments that `jobs.handler` and `jobs.batch_handler` have in common."""

    kind: str | None
    """The stored name, by default the function's. Set it before you rename the function."""
    queue: str
    """Its jobs' queue, by default "default". A queue has handlers of one flavour, sync or async, and one claim mode."""
    aliases: Iterable[str]
    """Earlier names whose jobs this handler still runs."""
    retry: Backoff | None
    """The policy for retries of a failed job: when it runs again, and how often; by default `Backoff()`."""
    claim: ClaimMode
    """In "transaction" mode, the default, the handler runs in the transaction that removed the job. In "lease" mode,
    for handlers that are long or reach outside the database, the claim is committed first. The handler then runs in
    another transaction, which also removes the job, and whose COMMIT is refused if the job's lease was lost before. A
    batch handler in "lease" mode has no session: it runs outside any transaction.
    """
    timeout_seconds: float | None
    """The deadline of one attempt, by default 300 seconds. After it the handler's statement, then the handler itself,
    is cancelled; a handler that cannot be cancelled loses its connection, so that no late write can succeed. Up to 7
    days; None for no deadline.
    """
    messages: Messages | None
    """The part of an error's text, or of an outcome's reason, that is stored and logged; by default the registry's
    setting. "redacted": the text, with each argument's value replaced by its name; values derived from it, such as a
    slice, stay. "withheld": only the error's type, place and SQLSTATE. "whole": the unchanged text.
    """
    on_failure: OnFailure
    """The effect of a failed job on later jobs of its group: they wait for its retry ("block", the default), or they go
    on, and it comes back at the end of its group ("pass"). After a dead letter they go on in any case.
    """
    keep: timedelta | None
    """The time for which a row of the table `done_job` is kept for each of its jobs that was done, discarded, cancelled
    while it ran, or expired; the row is written in the job's own transaction. By default finished jobs leave no row.
    """
    keep_args: bool
    """True if that row also has the job's arguments and headers, so that the job can be run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOptions:
    """Options of a handler: where its jobs wait, how they are claimed, and how a failed one is treated.

    `max_size` is for batch handlers only, `batchable` for others; `CommonOptions` explains all other options.

    Raises:
        RegistryError: a value is of another type or out of its range, or two options exclude each other.
    """

    retry: Backoff
    messages: Messages
    queue: str = "default"
    aliases: Iterable[str] = ()
    claim: ClaimMode = "transaction"
    timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS
    batchable: bool = False
    max_size: int = DEFAULT_MAX_SIZE
    # The options with which its jobs are enqueued, unless `kind.options(...)` sets others.
    enqueued: JobOptions = PLAIN_OPTIONS
    on_failure: OnFailure = "block"
    keep: timedelta | None = None
    keep_args: bool = False
    keep_result: bool = False

    def __post_init__(self) -> None:
        check_text("queue", self.queue, "mail")
        object.__setattr__(self, "aliases", _checked_aliases(self.aliases))
        _check_retry(self.retry)
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
        check_choice("on_failure", self.on_failure, OnFailure)
        checked_keeping(self.keep, self.keep_args, self.keep_result)
        size = self.max_size
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST_MAX_SIZE:
            raise RegistryError(f"max_size takes 1 to {LARGEST_MAX_SIZE:,}, got {size!r}")

    @property
    def keeping(self) -> Keeping | None:
        """The parts of a finished job that are kept; None if it leaves no row."""
        return checked_keeping(self.keep, self.keep_args, self.keep_result)


def check_choice(name: str, given: str, choices: object) -> None:
    """Refuse an option's value that is not one of the `choices`, a `Literal`.

    Raises:
        RegistryError: the value is another one; the message begins with `name`.
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


def check_text(option: str, given: str, example: str) -> None:
    """Refuse an option that is not a text.

    Raises:
        RegistryError: it is no text; the message contains `example`.
    """
    if not isinstance(given, str):
        raise RegistryError(f'{option} takes a name, such as {option}="{example}", got {given!r}')


def _checked_aliases(aliases: Iterable[str]) -> tuple[str, ...]:
    if isinstance(aliases, str):
        raise RegistryError(
            f"aliases takes a tuple or a list of names, got the text {aliases!r}: aliases=({aliases!r},)"
        )
    if not isinstance(aliases, Iterable):
        raise RegistryError(f'aliases takes a tuple or a list of names, such as aliases=("old",), got {aliases!r}')
    return tuple(aliases)


def _check_retry(retry: object) -> None:
    if not isinstance(retry, Backoff):
        attempts = retry if isinstance(retry, int) and not isinstance(retry, bool) and retry > 0 else 5
        raise RegistryError(f"retry takes a Backoff: Backoff(max_attempts={attempts})")
