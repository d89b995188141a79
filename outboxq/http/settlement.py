"""Settlement of a guarded request: the record of its outcome in table `effect`, and the answer to the client.

`RequestSettlement` does not know what the application did: every answer counts as the outcome. `TransactionSettlement`
serves endpoints that record in their own transaction: a request without a record was not executed, and may be repeated.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import Executable
from sqlalchemy.exc import SQLAlchemyError

from outboxq.effects.protocol import Recorded, record
from outboxq.effects.request import Request
from outboxq.effects.runners import AsyncEffectRunner
from outboxq.effects.steps import insist
from outboxq.errors import EffectError, EffectLockLost
from outboxq.http import problems
from outboxq.http.endpoint import Idempotency
from outboxq.http.problems import ProblemAnswers
from outboxq.http.responses import NOT_REPLAYABLE, RECORDED_LATE, Answer, decode_answer, encode_answer
from outboxq.statements import effects as statements
from outboxq.statements.effects import EffectState, Status

logger = logging.getLogger("outboxq.http")

FIRST_ERROR_STATUS = 400
_UNRECORDED = "an endpoint of in_transaction answered with success, and without idempotency.record(...)"
_NOT_RECORDED = "what came of a guarded request was not recorded"


def standing_answer(state: EffectState, answers: ProblemAnswers) -> Answer:
    """Return the answer to a request that is not executed, because its key was used before.

    It is the stored response, or a problem such as `in-progress`.
    """
    if not state.same_request:
        return answers.answer(problems.REUSED)
    if state.status == "done":
        stored = None if state.result is None else decode_answer(state.result)
        return stored or answers.answer(problems.NOT_KEPT)
    return answers.answer(problems.IN_PROGRESS if state.status == "started" else problems.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class RequestSettlement:
    """Records the outcome of a guarded request in table `effect`, by the answer to it.

    Any answer counts as an outcome, as it is not known what the application did.

    Args:
        is_refused: Returns True if an answer of this status comes from the router, which found no endpoint.
        released: Statuses that mean, by convention, that the request was not processed: a retry is executed.
    """

    request: Request
    runner: AsyncEffectRunner
    answers: ProblemAnswers
    max_response_bytes: int
    is_refused: Callable[[int], bool]
    released: frozenset[int] = frozenset()

    async def refuse_takeover(self) -> Answer:
        """Record that the outcome of an earlier request with this key is unknown: the server stopped during it.

        Return the answer to the present request, which is not executed.
        """
        reason = f"the server stopped while it answered {self.request.scope}: it is not known how far it came"
        written = await self._record("unknown", error=reason)
        return written if isinstance(written, Answer) else self.answers.answer(problems.UNKNOWN)

    async def release(self, keep: timedelta | None = None) -> None:
        """Give up the claim of a request that was not executed, so that a retry is executed.

        If the claim was not committed, there is no row, and nothing is changed.

        Args:
            keep: How long the request's row is kept; by default as long as a response.
        """
        keep = self.request.retention if keep is None else keep
        await self._finds(statements.release(self.request.lock, keep=keep))

    async def settle(self, answer: Answer, *, at_end: bool) -> Answer | None:  # noqa: ARG002  # for TransactionSettlement
        """Record the outcome of the request before its answer is sent; return the answer to send.

        A subclass may return None while the application runs, if the outcome is not known yet. It is then called again.

        Args:
            at_end: True if the application has returned, so that this is the last call.
        """
        if self.is_refused(answer.status):
            # The request was not executed, and a row for it would let strangers fill the table.
            await self.release(timedelta(0))
            return answer
        if answer.status in self.released:
            written = await self._record_released(answer.status)
            return written if isinstance(written, Answer) else answer
        result, reason = encode_answer(answer, self.max_response_bytes)
        written = await self._record("done", result=result, error=reason, keep=self.request.retention)
        if isinstance(written, Answer):
            return written
        # The database may have refused the result.
        return answer.marked(NOT_REPLAYABLE) if written.result is None else answer

    async def settle_stream(self, status: int, reason: str) -> None:
        """Record the outcome of a request whose answer is passed on without being stored.

        The client has a part of the answer already, so no other one can take its place.

        Args:
            reason: The reason why the answer is not stored.
        """
        if status in self.released:
            await self._record_released(status)
        else:
            await self._record("done", error=reason, keep=self.request.retention)

    async def fail(self, error: BaseException | None) -> Answer | None:
        """Record that the application raised an error, or returned without an answer (`error` is None).

        Return the answer to send. If the application was cancelled, or the server stops, record an unknown outcome and
        return None.
        """
        if error is None or isinstance(error, Exception):
            return await self.settle(self.answers.answer(problems.FAILED), at_end=True)
        reason = f"the server was stopped while it answered {self.request.scope}: it is not known how far it came"
        await self._record("unknown", error=reason)
        return None

    async def _finds(self, statement: Executable) -> bool | None:
        """Execute a statement on the request's row, and try again for the length of a lease while the database is away.

        Return True if the statement found the row, False if not, and None if the database could not be reached.
        """
        lease_seconds = self.request.lease.total_seconds()
        try:
            return await self.runner.drive(
                insist(lambda connection: connection.execute(statement).first() is not None, seconds=lease_seconds)
            )
        except (SQLAlchemyError, OSError) as error:
            self._log(_NOT_RECORDED, error)
            return None

    async def _record_released(self, status: int) -> Recorded | Answer:
        return await self._record("retryable", error=f"answered {status}", keep=self.request.retention)

    async def _record(
        self, status: Status, *, result: str | None = None, error: str | None = None, keep: timedelta | None = None
    ) -> Recorded | Answer:
        """Write the outcome into the request's row.

        Return the written outcome, or the answer to send if this failed.
        """
        try:
            return await self.runner.drive(record(self.request, status, result=result, error=error, keep=keep))
        except EffectError as failure:
            self._log(_NOT_RECORDED, failure)
            lost = isinstance(failure, EffectLockLost)
            return self.answers.answer(problems.UNKNOWN if lost else problems.NOT_RECORDED)

    def _log(self, message: str, error: BaseException | None = None) -> None:
        # Without the key, which belongs to the client, and without a text that quotes it.
        extra = {"outboxq_scope": self.request.scope}
        logger.error(message, extra=extra if error is None else {**extra, "error_type": type(error).__name__})


@dataclass(frozen=True, kw_only=True)
class TransactionSettlement(RequestSettlement):
    """Settles a request whose endpoint records its response in its own transaction, by `Idempotency.record`."""

    idempotency: Idempotency

    async def settle(self, answer: Answer, *, at_end: bool) -> Answer | None:
        """Settle the request by the state of its endpoint's transaction, and return the answer to send.

        Return None if the transaction is not committed yet and the application still runs (`at_end` is False).
        """
        recorded = self.idempotency.recorded
        if recorded is None:
            return await self._settle_unrecorded(answer)
        if not recorded.is_committed and not at_end:
            return None
        stands = await self._stands()
        if stands is None:
            return self.answers.answer(problems.NOT_RECORDED)
        if stands:
            return self._as_recorded(recorded.answer, answer)
        # The endpoint's rows were rolled back with its record: the request may be executed again.
        is_released = await self._settle_started("retryable", None, "rolled back")
        if answer.status >= FIRST_ERROR_STATUS:
            return answer
        if not is_released:
            # The endpoint's transaction, or a request that took over, is still in progress.
            return self.answers.answer(problems.IN_PROGRESS)
        self._log("an endpoint answered with success, and its transaction was rolled back")
        return self.answers.answer(problems.ROLLED_BACK)

    async def settle_stream(self, status: int, reason: str) -> None:
        """Record the outcome of a request whose answer is passed on without being stored.

        Nothing is recorded if the endpoint's own record was committed.
        """
        if await self._stands():
            return
        if status >= FIRST_ERROR_STATUS:
            await self._settle_started("retryable", None, f"answered {status}")
        else:
            self._log(_UNRECORDED)
            await self._settle_started("done", None, reason)

    async def fail(self, error: BaseException | None) -> Answer | None:
        """Settle a request whose application raised an error or never answered.

        If the endpoint's response was recorded and committed, return that response. Otherwise allow a retry, and return
        None, or a problem if another request has taken over the key.
        """
        recorded = self.idempotency.recorded
        if recorded is not None and await self._stands():
            # The endpoint raised after its commit: this client gets the recorded answer, as the retries will.
            return recorded.answer
        await self._settle_started("retryable", None, "the endpoint raised")
        return self.answers.answer(problems.IN_PROGRESS) if isinstance(error, EffectLockLost) else None

    async def _settle_unrecorded(self, answer: Answer) -> Answer:
        if self.is_refused(answer.status):
            await self.release(timedelta(0))
            return answer
        if answer.status >= FIRST_ERROR_STATUS:
            await self._settle_started("retryable", None, f"answered {answer.status}")
            return answer
        self._log(_UNRECORDED)
        result, reason = encode_answer(answer, self.max_response_bytes)
        if not await self._settle_started("done", result, reason):
            return self.answers.answer(problems.NOT_RECORDED)
        return (answer if reason is None else answer.marked(NOT_REPLAYABLE)).marked(RECORDED_LATE)

    def _as_recorded(self, recorded: Answer, answer: Answer) -> Answer:
        """Return the answer to send: the recorded one, which retries get too.

        If `answer` has the same status and body, it is sent itself, with the headers that other middleware has added.
        """
        if not answer.says_the_same(recorded):
            self._log("an endpoint answered otherwise than it had recorded, which was answered instead")
            answer = recorded
        return answer if len(recorded.body) <= self.max_response_bytes else answer.marked(NOT_REPLAYABLE)

    async def _stands(self) -> bool | None:
        """Return True if the endpoint's record was committed, False if not or if there is none.

        Return None if the database cannot be reached.
        """
        recorded = self.idempotency.recorded
        if recorded is None:
            return False
        if recorded.is_committed and recorded.is_certain:
            return True
        return await self._finds(statements.select_done(self.request.lock))

    async def _settle_started(self, status: Status, result: str | None, error: str | None) -> bool | None:
        keep = self.request.retention
        return await self._finds(
            statements.settle_started(self.request.lock, status, result=result, error=error, keep=keep)
        )
