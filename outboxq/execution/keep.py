"""Finished rows: rows of the table done_job, which record the finished jobs of kinds with `keep=`.

A row is written in the transaction that removes its job: in transaction mode in the same round trip as COMMIT, under a
lease by the statement that removes the job. If the table refuses a row, the job is done without it: jobs must not
depend on finished rows. Code that waits for a job's result is notified in that round trip too.
"""

import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast
from uuid import UUID

from outboxq.clock import clock
from outboxq.database.driver import NOT_PREPARED, PreparedStatements, Rows, may_be_of_prepared
from outboxq.database.errors import describe_error, sqlstate_of
from outboxq.events import Event, JobCancelled, JobDied, JobDiscarded, JobDone, JobExpired
from outboxq.execution.step import Step
from outboxq.handlers.keeping import Keeping
from outboxq.handlers.resolved import Registry
from outboxq.statements.done import FinishedColumns, execute_insert, insert_finished, prepared_insert
from outboxq.statements.enqueue import array_text
from outboxq.statements.results import tell_waiters

logger = logging.getLogger("outboxq.relay")

Over: TypeAlias = JobDone | JobDiscarded | JobCancelled | JobExpired
Ended: TypeAlias = Over | JobDied
_OUTCOMES: Mapping[type[Event], str] = {
    JobDone: "done",
    JobDiscarded: "discarded",
    JobCancelled: "cancelled",
    JobExpired: "expired",
}
_NO_OTHERS: Mapping[UUID, tuple[UUID, ...]] = {}
# Classes of errors that do not come from the rows: of the connection, of a transaction to be repeated, and of a server
# that stops. Any other error may: data, constraints, rights, no disk space, foreign locks, a role's time-out, a damaged
# page, a user's trigger.
_NO_REFUSALS = ("08", "40", "57P")
_UNIQUE_VIOLATION = "23505"
# The pause after a refusal. Otherwise every COMMIT would meet the same error, or wait for the same lock.
_PAUSE_SECONDS = 60.0


# Rows wait only a moment for the lock of an operator's forgotten session, and not as long as a handler may: slots, and
# rows that handlers have locked, wait with them.
_BRIEFLY = (
    "SELECT pg_catalog.set_config('outboxq.lock_timeout', pg_catalog.current_setting('lock_timeout'), true), "
    "pg_catalog.set_config('lock_timeout', '1s', true)"
)
# This also applies to COMMIT: a COMMIT that notifies waits for the lock of others that do.
_AS_LONG_AS_BEFORE = (
    "SELECT pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('outboxq.lock_timeout'), true)"
)


@dataclass(frozen=True, slots=True)
class FinishedRows(Step):
    """The step (statements sent with COMMIT) that writes the rows of finished jobs; COMMIT succeeds without it.

    Attributes:
        keeper: Made this step; pauses such steps after a refusal.
        jobs: The values of the rows, by column.
        prepared: The connection's prepared INSERT.
    """

    keeper: "Keeper"
    schema: str
    jobs: FinishedColumns
    prepared: PreparedStatements = NOT_PREPARED
    name = "finished rows"
    is_optional = True

    def statements(self) -> Sequence[str]:
        """Return the INSERT, with a PREPARE if that was not sent yet, and a lock_timeout of one second for both."""
        given = self.schema, self.jobs, self.keeper.relay
        if self.prepared.is_plain:
            insert = [insert_finished(*given)]
        else:
            name, definition = prepared_insert(self.schema)
            insert = [execute_insert(*given)] if name in self.prepared.names else [definition, execute_insert(*given)]
        return _BRIEFLY, *insert, _AS_LONG_AS_BEFORE

    def committed(self, rows: Rows) -> tuple[Event, ...]:  # noqa: ARG002  # the INSERT returns none
        """Record that the prepared INSERT works; return no events."""
        self.prepared.succeeded(prepared_insert(self.schema).name)
        return ()

    def refused(self, error: BaseException) -> "FinishedRows | None":
        """Return the step with an INSERT that is not prepared, if the prepared one may be the cause: it was lost, say.

        For any other error return None, and write no finished rows for `_PAUSE_SECONDS`.
        """
        if self.prepared is not NOT_PREPARED and (may_be_of_prepared(error) or sqlstate_of(error) == _UNIQUE_VIOLATION):
            self.prepared.failed(error, prepared_insert(self.schema).name)
            return replace(self, prepared=NOT_PREPARED)
        self.keeper.refused(error)
        return None


@dataclass(frozen=True, slots=True)
class TellWaiters(Step):
    """The step (statements sent with COMMIT) that notifies code waiting for jobs' results.

    It follows the INSERT of finished rows, because its advisory locks are held until COMMIT.
    """

    schema: str
    job_ids: Sequence[UUID]
    name = "waiters"

    def statements(self) -> Sequence[str]:
        """Return one statement, which notifies the code that waits for these jobs."""
        return (tell_waiters(self.schema, self.job_ids),)


@dataclass(slots=True)
class Keeper:
    """Makes the rows that a relay writes for finished jobs, by the `keep=` options of each kind and alias.

    `kinds` are these options by kind, and `relay` is the id that each row stores.
    """

    kinds: Mapping[str, Keeping] = field(default_factory=dict)
    relay: UUID | None = None
    _paused_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _has_args: bool = field(init=False)
    _has_results: bool = field(init=False)

    def __post_init__(self) -> None:
        self._has_args = any(keeping.args for keeping in self.kinds.values())
        self._has_results = any(keeping.result for keeping in self.kinds.values())

    @classmethod
    def of(cls, registry: Registry, relay: UUID | None = None) -> "Keeper":
        """Make the keeper for the handlers of a registry, from their `keep=` options."""
        kinds = {kind: handler.keeping for kind, handler in registry.handlers.items() if handler.keeping is not None}
        return cls(kinds, relay)

    def keep_nothing(self) -> None:
        """Write no finished rows until the relay ends; code waiting for results is still notified.

        For a relay whose role may not write the table.
        """
        self._paused_until = math.inf

    def finished_rows(
        self, events: Iterable[Event], others: Mapping[UUID, tuple[UUID, ...]] = _NO_OTHERS
    ) -> FinishedColumns | None:
        """Return the rows to write for jobs that ended by these events and whose kinds have `keep=`.

        Return None if there are no such jobs, or if writing rows is paused after a refusal.

        Args:
            others: By the id of a job that ran, the ids of the jobs merged into it.
        """
        kinds = self.kinds
        if not kinds or self._is_paused():
            return None
        over = [
            event for event in cast("Iterable[Over]", events) if type(event) in _OUTCOMES and event.job.kind in kinds
        ]
        return self._columns(over, others) if over else None

    def steps(
        self,
        schema: str,
        events: Sequence[Event],
        others: Mapping[UUID, tuple[UUID, ...]] = _NO_OTHERS,
        prepared: PreparedStatements = NOT_PREPARED,
    ) -> list[Step]:
        """Return the steps that write finished rows and notify waiting code, for a transaction in which jobs end.

        Args:
            events: The events by which the jobs end.
            others: By the id of a job that ran, the ids of the jobs merged into it.
            prepared: The connection's prepared INSERTs, if it may have any.
        """
        rows, ended = self.finished_rows(events, others), self.ended(events, others)
        steps: list[Step] = []
        if rows is not None:
            steps.append(FinishedRows(self, schema, rows, prepared))
        if ended:
            steps.append(TellWaiters(schema, ended))
        return steps

    def ended(self, events: Iterable[Event], others: Mapping[UUID, tuple[UUID, ...]] = _NO_OTHERS) -> list[UUID]:
        """Return the ids of jobs that ended by `events` and whose kinds keep results, to notify code waiting for them.

        Jobs merged into them are included.

        Args:
            others: By the id of a job that ran, the ids of the jobs merged into it.
        """
        if not self._has_results:
            return []
        found: list[UUID] = []
        for event in events:
            if isinstance(event, Ended):
                keeping = self.kinds.get(event.job.kind)
                if keeping is not None and keeping.result:
                    found += (event.job.id, *others.get(event.job.id, ()))
        return found

    @staticmethod
    def may_be_refusal(error: BaseException) -> bool:
        """Return True if an error may come from the table of finished rows, and would occur again at another try."""
        sqlstate = sqlstate_of(error)
        return sqlstate is not None and not sqlstate.startswith(_NO_REFUSALS)

    def refused(self, error: BaseException) -> None:
        """Write no finished rows for `_PAUSE_SECONDS`, because the table has refused some; log it once a pause."""
        with self._lock:
            # Several COMMITs may have been under way.
            is_known, self._paused_until = self._is_paused(), max(self._paused_until, clock() + _PAUSE_SECONDS)
        if is_known:
            return
        logger.warning(
            "finished jobs are not kept for %d s: the table done_job refused their rows (%s); `outboxq doctor` names "
            "rights that are missing",
            _PAUSE_SECONDS,
            describe_error(error),
            extra={"outboxq_kinds": sorted(self.kinds)},
        )

    def _is_paused(self) -> bool:
        return bool(self._paused_until) and clock() < self._paused_until

    def _columns(self, over: Sequence[Over], others: Mapping[UUID, tuple[UUID, ...]]) -> FinishedColumns:
        # Column by column, and only columns that a kind keeps, because every COMMIT waits for this.
        jobs = [event.job for event in over]
        keepings = [self.kinds[job.kind] for job in jobs]
        given = list(zip(jobs, keepings, strict=True)) if self._has_args else []
        ended = over if self._has_results else []
        taken = [others.get(job.id) for job in jobs] if others else []
        queue, claimed_at = jobs[0].queue, jobs[0].claimed_at
        of_claims = jobs if [job for job in jobs if job.claimed_at != claimed_at or job.queue != queue] else []
        return FinishedColumns(
            queue=queue,
            claimed_at=None if claimed_at is None else claimed_at.timestamp(),
            id=[job.id for job in jobs],
            kind=[job.kind for job in jobs],
            outcome=[_OUTCOMES[type(event)] for event in over],
            attempt=[job.attempt for job in jobs],
            created_at=[job.created_at.timestamp() for job in jobs],
            seconds=[event.seconds for event in over],
            args=[job.args if keeping.args else None for job, keeping in given],
            headers=[job.headers if keeping.args else None for job, keeping in given],
            result=[event.result if isinstance(event, JobDone) else None for event in ended],
            stands_for=[array_text(map(str, ids)) if ids else None for ids in taken],
            keep_seconds=[keeping.seconds for keeping in keepings],
            queues=[job.queue for job in of_claims],
            claims_at=[None if job.claimed_at is None else job.claimed_at.timestamp() for job in of_claims],
        )
