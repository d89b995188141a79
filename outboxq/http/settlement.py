"""What is written of a guarded request when its answer is there, and what is answered for that.

`RequestSettlement` knows nothing of what the application did: every answer is the outcome. `RecordingGuard` serves
endpoints that record in their own transaction: what they did not record did not happen, so it may be done again.
"""

import logging
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import Executable
from sqlalchemy.exc import SQLAlchemyError

from outboxq.effects.protocol import Steps
from outboxq.effects.protocol import insist as insist
from outboxq.effects.protocol import record as record
from outboxq.effects.request import Request
from outboxq.effects.runners import AsyncEffectRunner
from outboxq.errors import EffectError, EffectLockLost
from outboxq.http.endpoint import Idempotency
from outboxq.http.responses import NOT_REPLAYABLE, RECORDED_LATE, Answer, Problems, decode_answer, encode_answer
from outboxq.statements import http as statements
from outboxq.statements.effects import EffectState, Status

logger = logging.getLogger("outboxq.http")

FIRST_ERROR_STATUS = 400
_UNRECORDED = "an endpoint of in_transaction answered with success, and without idempotency.record(...)"


def standing_answer(seen: EffectState, problems: Problems) -> Answer:
    """The answer to a request whose key was used before."""
    if not seen.same_request:
        return problems.reused()
    if seen.status == "done":
        return (decode_answer(seen.result) if seen.result is not None else None) or problems.not_kept()
    if seen.status == "started":
        return problems.in_progress()
    return problems.unknown()


class RequestSettlement:
    """Settles a request of which nobody but its application knows what it did.

    Args:
        is_refused: Whether an answer of this status is the router's, which found no endpoint for the request.
        released: Statuses that mean, by convention, that the request was not processed: a retry is executed.
    """

    def __init__(
        self,
        request: Request,
        caller: AsyncEffectRunner,
        problems: Problems,
        max_bytes: int,
        is_refused: Callable[[int], bool],
        released: frozenset[int] = frozenset(),
    ) -> None:
        self._request = request
        self._caller = caller
        self._problems = problems
        self._max_bytes = max_bytes
        self._is_refused = is_refused
        self._released = released

    async def refuse_takeover(self) -> Answer:
        """The answer where an earlier request with this key never came to its end."""
        reason = f"the server stopped while it answered {self._request.scope}: nobody knows how far it came"
        return await self._write(record(self._request, "unknown", error=reason)) or self._problems.unknown()

    async def give_back(self) -> None:
        """Settle a request that was claimed, or may have been, and not executed."""
        await self._give_back(self._request.retention)

    async def _give_back(self, keep: timedelta) -> None:
        request = self._request
        await self._finds(statements.give_back(request.scope, request.key, request.token, keep=keep))

    async def settle(self, answer: Answer, *, at_end: bool) -> Answer | None:  # noqa: ARG002  # see RecordingGuard
        """Write what came of the request, before anybody is told; what to answer, or None: ask again at the end."""
        if self._is_refused(answer.status):
            # Nothing was executed, and nothing of it is worth a row: strangers could fill the table.
            await self._give_back(timedelta(0))
            return answer
        if answer.status in self._released:
            return await self._write(self._release(f"answered {answer.status}")) or answer
        result, reason = encode_answer(answer, self._max_bytes)
        is_kept = False

        def steps() -> Steps[None]:
            nonlocal is_kept
            recorded = yield from record(
                self._request, "done", result=result, error=reason, keep=self._request.retention
            )
            # The database may refuse it, too.
            is_kept = recorded.result is not None

        problem = await self._write(steps())
        return problem or (answer if is_kept else answer.marked(NOT_REPLAYABLE))

    async def settle_stream(self, status: int, reason: str) -> None:
        """The same for an answer that passes through; too late to answer otherwise."""
        if status in self._released:
            await self._write(self._release(f"answered {status}"))
        else:
            await self._write(record(self._request, "done", error=reason, keep=self._request.retention))

    async def fail(self, error: BaseException | None) -> Answer | None:
        """Write that the application raised, or never answered; what to answer, if it is ours to answer."""
        if error is None or isinstance(error, Exception):
            return await self.settle(self._problems.failed(), at_end=True)
        reason = f"the server was stopped while it answered {self._request.scope}: nobody knows how far it came"
        await self._write(record(self._request, "unknown", error=reason))
        return None

    async def _finds(self, statement: Executable) -> bool | None:
        """Whether the statement meets the row; None where the database cannot be reached."""
        lease_seconds = self._request.lease.total_seconds()
        try:
            return await self._caller.drive(
                insist(lambda connection: connection.execute(statement).first() is not None, seconds=lease_seconds)
            )
        except (SQLAlchemyError, OSError) as error:
            self._log("what came of a guarded request was not recorded", error)
            return None

    def _release(self, reason: str) -> Steps[object]:
        return record(self._request, "retryable", error=reason, keep=self._request.retention)

    async def _write(self, steps: Steps[object]) -> Answer | None:
        """Run the steps; a problem where what was to be written is not."""
        try:
            await self._caller.drive(steps)
        except EffectError as error:
            self._log("what came of a guarded request was not recorded", error)
            lost = isinstance(error, EffectLockLost)
            return self._problems.unknown() if lost else self._problems.not_recorded()
        return None

    def _log(self, message: str, error: BaseException | None = None) -> None:
        # Without the key, which is the client's, and without a text that quotes it.
        extra = {"outboxq_scope": self._request.scope}
        logger.error(message, extra=extra if error is None else {**extra, "error_type": type(error).__name__})


class RecordingGuard(RequestSettlement):
    """Settles a request whose endpoint records in its own transaction."""

    def __init__(
        self,
        request: Request,
        caller: AsyncEffectRunner,
        problems: Problems,
        max_bytes: int,
        is_refused: Callable[[int], bool],
        idempotency: Idempotency,
    ) -> None:
        super().__init__(request, caller, problems, max_bytes, is_refused)
        self._idempotency = idempotency

    async def settle(self, answer: Answer, *, at_end: bool) -> Answer | None:
        """See `RequestSettlement.settle`. None while the endpoint's transaction has not been committed."""
        recorded = self._idempotency.recorded
        if recorded is None:
            return await self._settle_unrecorded(answer)
        if not recorded.is_committed and not at_end:
            return None
        stands = await self._stands()
        if stands is None:
            return self._problems.not_recorded()
        if stands:
            return self._as_recorded(recorded.answer, answer)
        # The endpoint's rows went with it: the request may be executed again.
        is_released = await self._settle_started("retryable", None, "rolled back")
        if answer.status >= FIRST_ERROR_STATUS:
            return answer
        if not is_released:
            # Its transaction, or somebody who took over, is still at it.
            return self._problems.in_progress()
        self._log("an endpoint answered with success, and its transaction was rolled back")
        return self._problems.rolled_back()

    async def settle_stream(self, status: int, reason: str) -> None:
        """See `RequestSettlement.settle_stream`."""
        if await self._stands():
            return
        if status >= FIRST_ERROR_STATUS:
            await self._settle_started("retryable", None, f"answered {status}")
        else:
            self._log(_UNRECORDED)
            await self._settle_started("done", None, reason)

    async def fail(self, error: BaseException | None) -> Answer | None:
        """See `RequestSettlement.fail`."""
        recorded = self._idempotency.recorded
        if recorded is not None and await self._stands():
            # It raised after its commit: the retries get what it recorded, and so does this client.
            return recorded.answer
        await self._settle_started("retryable", None, "the endpoint raised")
        return self._problems.in_progress() if isinstance(error, EffectLockLost) else None

    async def _settle_unrecorded(self, answer: Answer) -> Answer:
        if self._is_refused(answer.status):
            await self._give_back(timedelta(0))
            return answer
        if answer.status >= FIRST_ERROR_STATUS:
            await self._settle_started("retryable", None, f"answered {answer.status}")
            return answer
        self._log(_UNRECORDED)
        result, reason = encode_answer(answer, self._max_bytes)
        if not await self._settle_started("done", result, reason):
            return self._problems.not_recorded()
        return (answer if reason is None else answer.marked(NOT_REPLAYABLE)).marked(RECORDED_LATE)

    def _as_recorded(self, recorded: Answer, answer: Answer) -> Answer:
        """What the retries will get; with everything that was put around it on its way here, where that is the same."""
        if not answer.says_the_same(recorded):
            self._log("an endpoint answered otherwise than it had recorded, which was answered instead")
            answer = recorded
        return answer if len(recorded.body) <= self._max_bytes else answer.marked(NOT_REPLAYABLE)

    async def _stands(self) -> bool | None:
        """Whether the endpoint's record was committed; None where the database cannot be asked."""
        recorded = self._idempotency.recorded
        if recorded is None:
            return False
        if recorded.is_committed and recorded.is_certain:
            return True
        request = self._request
        return await self._finds(statements.select_done(request.scope, request.key, request.token))

    async def _settle_started(self, status: Status, result: str | None, error: str | None) -> bool | None:
        request = self._request
        return await self._finds(
            statements.settle_started(
                request.scope, request.key, request.token, status, result=result, error=error, keep=request.retention
            )
        )
