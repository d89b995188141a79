"""Limits of queues that an application declares: how many jobs run at a time, and how many begin in each period."""

from outboxq.errors import ArgumentError, RegistryError
from outboxq.names import check_name, named_options
from outboxq.queue_limits import QueueLimits, make_limits


class Limited:
    """The part of a registry that declares limits of queues."""

    def __init__(self) -> None:
        super().__init__()
        self._limits: dict[str, QueueLimits] = {}

    @named_options
    def limit(
        self,
        queue: str,
        *,
        running: int | None = None,
        rate: str | None = None,
        burst: int | None = None,
        per_group: int | None = None,
    ) -> None:
        """Limit how many jobs of a queue run at a time or begin in each period, over all relays of a database.

        Limits set by `outboxq queues set` take precedence.

        Args:
            queue: A queue for which this registry has handlers.
            running: How many jobs run at a time, 1 to 10,000. The jobs that a claim takes into one transaction
                (`batch_size`) run one after the other, and count as one.
            rate: How many jobs begin in each period: `10/s`, `100/min`, `5/30s`, `20/h` or `500/day`. Each attempt
                counts.
            burst: How many jobs may begin at once after a pause; by default as many as the rate allows in a tenth of a
                second, at least 1.
            per_group: How many jobs of each group run at a time, 1 to 1,000.

        Raises:
            ArgumentError: no limit was given, a number is out of its range, or the text is no rate.
            RegistryError: other limits are declared for the queue already.
        """
        limits = make_limits(running=running, rate=rate, burst=burst, per_group=per_group)
        if limits == QueueLimits():
            raise ArgumentError(f"a limit of queue {queue!r} takes running=, rate= or per_group=, and got none of them")
        self._declare_limits(check_name("queue", queue), limits)

    def _declare_limits(self, queue: str, limits: QueueLimits) -> None:
        declared = self._limits.setdefault(queue, limits)
        if declared != limits:
            raise RegistryError(
                f"the limits of queue {queue!r} are declared twice: {declared}, and {limits}. Declare them once"
            )

    def _check_limits(self, queues: set[str]) -> None:
        for queue in sorted(self._limits.keys() - queues):
            raise RegistryError(
                f"queue {queue!r} has a limit, and no handler of this registry is for it "
                f"(known: {', '.join(sorted(queues))})"
            )
