"""The tokens of one slot: those that its last claim has taken, if the queue has a rate."""

from dataclasses import replace

from outboxq.relay.admission import Admission
from outboxq.relay.rates import Taken


class SlotTokens:
    """The tokens that a slot's last claim has taken, until it is known whether jobs have used them."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._held: tuple[str, Taken] | None = None
        # Their claim has found nothing, a moment ago: the next one of the queue has them.
        self._are_left = False

    def take(self, queue: str, limit: int) -> int:
        """Take tokens for up to `limit` jobs, if the queue has a rate; returns how many jobs may be claimed."""
        held = self._held
        if held is None and not self._admission.has_rate(queue):
            return limit
        if held is not None and self.are_left_to(queue) and held[1].tokens <= limit:
            self._are_left = False
            return held[1].tokens
        self.return_unused()
        if not self._admission.has_rate(queue):
            return limit
        taken = self._admission.hands.take(queue, limit)
        self._held = (queue, taken) if taken.tokens else None
        return taken.tokens

    def leave(self) -> None:
        """Leave the tokens to the next claim: the last one has found nothing."""
        self._are_left = True

    def are_left_to(self, queue: str) -> bool:
        """Whether a claim of this queue, in this round, has left its tokens to the next one."""
        return self._are_left and self._held is not None and self._held[0] == queue

    def return_unused(self, used: int = 0) -> None:
        """Give the tokens of the last claim back that no job has used."""
        if self._held is not None:
            queue, taken = self._held
            self._held, self._are_left = None, False
            if used < taken.tokens:
                self._admission.hands.give_back(queue, replace(taken, tokens=taken.tokens - used))
