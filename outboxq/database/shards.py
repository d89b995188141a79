"""Shards: which database of a `ShardedSession` the jobs of a transaction go to, which is the one of its rows."""

from collections.abc import Hashable, Mapping
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import object_mapper
from sqlalchemy.orm.attributes import instance_state

from outboxq.errors import EnqueueError
from outboxq.tables import JobRow, job_mapper


def shard_of_rows(session: ShardedSession) -> Hashable:
    """The shard of the rows that wait for the flush; without any, the one that the transaction uses already.

    The session's `shard_chooser` is asked only if that leaves none or several: it would have to know a job's shard from
    the job, and another one than the rows' would make two transactions.

    Raises:
        EnqueueError: the `shard_chooser` does not know either.
    """
    pending = (*session.new, *session.dirty, *session.deleted)
    shards = {_shard_of(session, row) for row in pending if not isinstance(row, JobRow)} or _shards_in_use(session)
    if len(shards) == 1:
        return shards.pop()
    try:
        return _shard_of(session, JobRow(0, lambda *_: None))
    except Exception as error:
        raise EnqueueError(
            f"the rows of this transaction are in {len(shards)} shards, and the session's shard_chooser does not say "
            "which of them has the jobs: let it answer for an instance of outboxq.tables.JobRow"
        ) from error


def _shard_of(session: ShardedSession, row: object) -> Hashable:
    state = instance_state(row)
    if state.key is None:
        # It asks the chooser, once, and notes the answer, as the flush will.
        mapper: Any = job_mapper() if isinstance(row, JobRow) else object_mapper(row)
        session.get_bind(mapper, instance=row)
        return state.identity_token
    return state.key[2]


def _shards_in_use(session: ShardedSession) -> set[Hashable]:
    transaction = session.get_transaction()
    if transaction is None:
        return set()
    shards: Mapping[Hashable, Engine | Connection] = session._ShardedSession__shards  # type: ignore[attr-defined]  # noqa: SLF001  # no public reading
    return {shard for shard, bind in shards.items() if bind in transaction._connections}  # noqa: SLF001  # no public reading either
