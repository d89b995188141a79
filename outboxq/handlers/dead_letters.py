"""Declarations of the time for which dead letters of queues are kept."""

from datetime import timedelta

from outboxq.errors import ArgumentError, RegistryError
from outboxq.names import check_name
from outboxq.queue_limits import MAX_KEEP_SECONDS, MIN_KEEP_SECONDS


class KeepsDead:
    """The part of a registry that declares the time for which dead letters are kept."""

    def __init__(self) -> None:
        super().__init__()
        self._keep_dead: dict[str, timedelta] = {}

    def keep_dead_letters(self, queue: str, time: timedelta) -> None:
        """Make relays delete the dead letters of a queue after this time.

        Without this call they are kept for ever. A time set by `outboxq queues set --keep-dead` takes precedence.

        Args:
            queue: A queue for which this registry has handlers.
            time: One minute to 3,653 days.

        Raises:
            ArgumentError: a time out of its range.
            RegistryError: another time is declared for the queue already.
        """
        if not isinstance(time, timedelta) or not MIN_KEEP_SECONDS <= time.total_seconds() <= MAX_KEEP_SECONDS:
            raise ArgumentError(f"dead letters are kept for a timedelta of 1 minute to 3,653 days, got {time!r}")
        self._declare_keep_dead(check_name("queue", queue), time)

    def _declare_keep_dead(self, queue: str, time: timedelta) -> None:
        declared = self._keep_dead.setdefault(queue, time)
        if declared != time:
            raise RegistryError(
                f"how long queue {queue!r} keeps its dead letters is declared twice: {declared}, and {time}. "
                "Declare it once"
            )

    def _check_keep_dead(self, queues: set[str]) -> None:
        for queue in sorted(self._keep_dead.keys() - queues):
            raise RegistryError(
                f"queue {queue!r} keeps its dead letters for a time, and no handler of this registry is for it "
                f"(known: {', '.join(sorted(queues))})"
            )
