"""Keeping: the data that a kind keeps of its finished jobs, and for how long."""

from dataclasses import dataclass
from datetime import timedelta

from outboxq.errors import RegistryError
from outboxq.outcomes import MAX_DELAY


@dataclass(frozen=True, slots=True)
class Keeping:
    """The options of a kind whose finished jobs leave a row: the row is kept for `seconds`.

    `args` and `result`: True if the row also keeps the job's arguments, and the handler's result.
    """

    seconds: float
    args: bool = False
    result: bool = False


def checked_keeping(keep: object, keep_args: object, keep_result: object) -> Keeping | None:
    """Check the options `keep`, `keep_args` and `keep_result` of a handler; return None if it keeps nothing.

    Raises:
        RegistryError: a value of another type or out of its range, or something is to be kept without `keep`.
    """
    for name, given in (("keep_args", keep_args), ("keep_result", keep_result)):
        if not isinstance(given, bool):
            raise RegistryError(f"{name} takes True or False, got {given!r}")
        if given and keep is None:
            raise RegistryError(f"{name}=True needs to know for how long: add keep=timedelta(days=7)")
    if keep is None:
        return None
    if not isinstance(keep, timedelta):
        raise RegistryError(f"keep takes a timedelta, such as keep=timedelta(days=7), got {keep!r}")
    if not timedelta(0) < keep <= MAX_DELAY:
        raise RegistryError(f"keep takes more than 0 and up to {MAX_DELAY.days:,} days, got {keep}")
    return Keeping(keep.total_seconds(), bool(keep_args), bool(keep_result))
