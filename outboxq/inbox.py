"""The inbox: a message is accepted once, in the transaction of the rows that it leads to.

Accepting is one INSERT in the caller's own transaction: the message counts as accepted if and only if the caller's rows
are committed. A second delivery waits for that transaction, and takes the message over if it rolls back.
"""

from collections.abc import Coroutine, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from itertools import islice
from typing import Any, TypeAlias, overload

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outboxq.codec.values import fingerprint
from outboxq.config import DEFAULT_RETENTION, check_retention
from outboxq.database.answers import AsyncTarget, SyncTarget, run_on
from outboxq.database.errors import LOCK_NOT_AVAILABLE, missing_tables_explained, sqlstate_of
from outboxq.database.sessions import AnAsyncSession, SyncSession, outbox_connection
from outboxq.emitter import HOOKS_OPTION, hand_to_hooks
from outboxq.errors import ArgumentError, InvalidKey, MessageConflict, SchemaError
from outboxq.events import MessageSeen
from outboxq.names import check_key
from outboxq.new_job import NewJob
from outboxq.outbox.handle import JobHandle
from outboxq.outbox.sending_events import send_after_commit
from outboxq.outbox.session import add_jobs
from outboxq.statements import inbox as statements
from outboxq.statements.inbox import Outcome

Messages: TypeAlias = Mapping[str, object] | Iterable[str | tuple[str, object]]

MAX_CONSUMER_BYTES = 63
MAX_BATCH_MESSAGES = 10_000

# The second round sees messages that the first waited for; a third is for a message forgotten between the two.
_ROUNDS = 5


class Acceptance(Enum):
    """The result of `try_accept`; true only if the message was accepted."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    IN_PROGRESS = "in progress"

    def __bool__(self) -> bool:
        return self is Acceptance.ACCEPTED


@dataclass(frozen=True, slots=True)
class AcceptedBatch:
    """The ids of the messages of `accept_all` by their outcome, each in the given order.

    `accepted` are new, `duplicates` were accepted before. `conflicts` came with other content, before or in the same
    batch; they are not accepted, and the caller decides what to do about them.
    """

    accepted: tuple[str, ...]
    duplicates: tuple[str, ...]
    conflicts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inbox:
    """The messages that one consumer has accepted.

    An application that has a registry makes its inboxes with `jobs.inbox("payments")`: at its start a relay then checks
    that no handler retries after a message id was forgotten. `Inbox("payments")` is for a receiver without a registry.

    Args:
        consumer: A name of your choice that never changes, of 1 to 63 bytes: under another name every message is new.
        retention: How long an id is remembered, from 1 second to 10 years. It must be longer than the time for which
            the sender repeats.

    Raises:
        InvalidKey: the consumer's name is invalid.
        ConfigError: the retention is no time from 1 second to 10 years.
    """

    consumer: str
    retention: timedelta = DEFAULT_RETENTION

    def __post_init__(self) -> None:
        check_key("consumer", self.consumer, MAX_CONSUMER_BYTES)
        check_retention(self.retention)

    @overload
    def accept(self, session: SyncTarget, message_id: str, *, payload: object = None) -> bool: ...

    @overload
    def accept(self, session: AsyncTarget, message_id: str, *, payload: object = None) -> Coroutine[Any, Any, bool]: ...

    def accept(
        self, session: SyncTarget | AsyncTarget, message_id: str, *, payload: object = None
    ) -> bool | Coroutine[Any, Any, bool]:
        """Accept a message in this transaction; return False for a duplicate. Await it on an async session.

        Waits for a transaction that is accepting the same message: False if that commits, True if it rolls back.

        Args:
            payload: The message's content: bytes, or a value that JSON can hold. Only its fingerprint is stored. None:
                content is not compared.

        Raises:
            MessageConflict: it was accepted with other content; nothing was written.
            InvalidKey, ArgumentError: an id or a content that cannot be stored.
            EnqueueError: a session that cannot hold it (AUTOCOMMIT, or `binds` that leave the outbox out).
            SchemaError: the tables are missing.
        """
        given = _given(message_id, payload)
        return run_on(session, lambda it: self._accept(it, outbox_connection(it, "accept"), given), "inbox.accept(...)")

    @overload
    def try_accept(self, session: SyncTarget, message_id: str, *, payload: object = None) -> Acceptance: ...

    @overload
    def try_accept(
        self, session: AsyncTarget, message_id: str, *, payload: object = None
    ) -> Coroutine[Any, Any, Acceptance]: ...

    def try_accept(
        self, session: SyncTarget | AsyncTarget, message_id: str, *, payload: object = None
    ) -> Acceptance | Coroutine[Any, Any, Acceptance]:
        """Accept a message without waiting: IN_PROGRESS if another transaction is accepting the same one.

        That transaction may still roll back: let the sender deliver again.
        """
        given = _given(message_id, payload)
        return run_on(
            session,
            lambda target: self._try_accept(target, outbox_connection(target, "try_accept"), given),
            "inbox.try_accept(...)",
        )

    @overload
    def accept_all(self, session: SyncTarget, messages: Messages) -> AcceptedBatch: ...

    @overload
    def accept_all(self, session: AsyncTarget, messages: Messages) -> Coroutine[Any, Any, AcceptedBatch]: ...

    def accept_all(
        self, session: SyncTarget | AsyncTarget, messages: Messages
    ) -> AcceptedBatch | Coroutine[Any, Any, AcceptedBatch]:
        """Accept many messages by one statement; await it on an async session. All ids are checked first.

        A conflict is returned and not raised, because others of the batch may have been accepted. Overlapping batches
        do not deadlock if each has its own transaction.

        Args:
            messages: 1 to 10,000 ids, or pairs of ids and contents, or a mapping of ids to contents.

        Raises:
            InvalidKey: there are none or too many messages, or an id cannot be stored.
            ArgumentError, EnqueueError, SchemaError: as `accept`.
        """
        given, conflicts = _distinct(messages)
        return run_on(
            session,
            lambda target: self._accept_all(target, outbox_connection(target, "accept_all"), given, conflicts),
            "inbox.accept_all(...)",
        )

    @overload
    def accept_job(
        self, session: SyncSession, message_id: str, job: NewJob, *, payload: object = None
    ) -> JobHandle | None: ...

    @overload
    def accept_job(
        self, session: AnAsyncSession, message_id: str, job: NewJob, *, payload: object = None
    ) -> Coroutine[Any, Any, JobHandle | None]: ...

    def accept_job(
        self, session: SyncSession | AnAsyncSession, message_id: str, job: NewJob, *, payload: object = None
    ) -> JobHandle | Coroutine[Any, Any, JobHandle | None] | None:
        """Accept a message and add the job that handles it, made by `kind.job(...)`; None for a duplicate.

        For webhooks: commit, answer, and let a relay do the work. Await it on an async session.

        Raises:
            MessageConflict, InvalidKey, ArgumentError, EnqueueError, SchemaError: as `accept` and `add_jobs`.
        """
        given = _given(message_id, payload)
        if not isinstance(job, NewJob):
            raise ArgumentError(f"accept_job takes a job made by kind.job(...), got {type(job).__name__}")

        def work(target: Session | Connection) -> JobHandle | None:
            if isinstance(target, Connection):
                raise ArgumentError("accept_job takes a session and not a connection: the job is one of its rows")
            connection = outbox_connection(target, "accept_job")
            # A job of an entity without a key may be refused only at this point; the savepoint then undoes the
            # acceptance.
            with connection.begin_nested() if job.was_pending() else nullcontext():
                return add_jobs(target, [job])[0] if self._accept(target, connection, given) else None

        return run_on(session, work, "inbox.accept_job(...)")

    def _accept(self, target: Session | Connection, connection: Connection, given: Mapping[str, bytes | None]) -> bool:
        ((message_id, outcome),) = self._outcomes(connection, given).items()
        self._tell(target, connection, [outcome])
        if outcome == "conflict":
            raise MessageConflict(self.consumer, message_id)
        return outcome == "accepted"

    def _try_accept(
        self, target: Session | Connection, connection: Connection, given: Mapping[str, bytes | None]
    ) -> Acceptance:
        try:
            # A rollback to the savepoint also restores the lock_timeout.
            with connection.begin_nested():
                before = connection.execute(statements.shorten_lock_timeout()).scalar_one()
                accepted = self._accept(target, connection, given)
                connection.execute(statements.set_lock_timeout(before))
        except DBAPIError as error:
            if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                return Acceptance.IN_PROGRESS
            raise
        return Acceptance.ACCEPTED if accepted else Acceptance.DUPLICATE

    def _accept_all(
        self,
        target: Session | Connection,
        connection: Connection,
        given: Mapping[str, bytes | None],
        conflicts: set[str],
    ) -> AcceptedBatch:
        asked = {message_id: digest for message_id, digest in given.items() if message_id not in conflicts}
        outcomes: dict[str, Outcome] = dict.fromkeys(conflicts, "conflict")
        outcomes |= self._outcomes(connection, asked)
        self._tell(target, connection, outcomes.values())
        wanted: tuple[Outcome, ...] = ("accepted", "duplicate", "conflict")
        return AcceptedBatch(*(tuple(id_ for id_ in given if outcomes[id_] == outcome) for outcome in wanted))

    def _tell(self, target: Session | Connection, connection: Connection, outcomes: Iterable[Outcome]) -> None:
        """Send a `MessageSeen` for each outcome to the engine's hooks, if any.

        The event of a message that was accepted in a session is sent after COMMIT, that of any other message at once.
        """
        options = connection.get_execution_options()
        if not options.get(HOOKS_OPTION):
            return
        for outcome in outcomes:
            if outcome == "accepted" and isinstance(target, Session):
                send_after_commit(target, connection, [MessageSeen(self.consumer, outcome)])
            elif outcome != "unseen":
                hand_to_hooks(options, MessageSeen(self.consumer, outcome))

    def _outcomes(self, connection: Connection, given: Mapping[str, bytes | None]) -> dict[str, Outcome]:
        """Accept messages; return the outcome of each by its id.

        One statement accepts them; a second one finds the outcomes of messages for which the first had to wait.
        """
        outcomes: dict[str, Outcome] = {}
        for _ in range(_ROUNDS):
            asked = {message_id: digest for message_id, digest in given.items() if message_id not in outcomes}
            if not asked:
                return outcomes
            parameters = statements.accept_parameters(self.consumer, asked, self.retention)
            with missing_tables_explained():
                rows = connection.execute(statements.accept_messages(), parameters).all()
            outcomes |= {message_id: outcome for message_id, outcome in rows if outcome != "unseen"}
        raise SchemaError(
            "messages are in the inbox, but this role cannot see them: does a row security policy hide rows of it?"
        )


def _given(message_id: str, payload: object) -> dict[str, bytes | None]:
    return {check_key("message id", message_id): None if payload is None else fingerprint(payload)}


def _distinct(messages: Messages) -> tuple[dict[str, bytes | None], set[str]]:
    """Return the fingerprint of each id's content, in the given order, and the ids that came with several contents."""
    if isinstance(messages, str | bytes):
        raise InvalidKey(
            f"accept_all takes an iterable of ids or a mapping, got one {type(messages).__name__}: use accept"
        )
    items = messages.items() if isinstance(messages, Mapping) else messages
    # An endless generator is also refused.
    drawn = list(islice(items, MAX_BATCH_MESSAGES + 1))
    if not 1 <= len(drawn) <= MAX_BATCH_MESSAGES:
        got = "more" if drawn else "none"
        raise InvalidKey(f"accept_all takes 1 to {MAX_BATCH_MESSAGES:,} messages, got {got}: split what you have")
    given: dict[str, bytes | None] = {}
    conflicts: set[str] = set()
    for item in drawn:
        ((message_id, digest),) = _given(*_pair(item)).items()
        known = given.get(message_id)
        if digest and known and digest != known:
            conflicts.add(message_id)
        given[message_id] = known or digest
    return given, conflicts


def _pair(item: object) -> tuple[Any, object]:
    # check_key refuses values that are no ids.
    return item if isinstance(item, tuple) and len(item) == 2 else (item, None)
