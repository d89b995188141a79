"""Chains: the transaction in which a job is done adds the job that follows it, once."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from sqlalchemy import Connection

from outboxq.clock import uuid7s
from outboxq.errors import PayloadError
from outboxq.events import FollowerSuppressed
from outboxq.job import THEN_HEADER, Job
from outboxq.new_job import NewJob, UniqueAnswer, UniqueJob, has_unique_key
from outboxq.outbox.insert import insert_all
from outboxq.outbox.stored_job import unfold_chain


class _FollowerAnswer(UniqueAnswer):
    """The answer for a unique job that follows another: it has no handle, so an event reports it."""

    __slots__ = ("behind",)

    def __init__(self, behind: Job) -> None:
        super().__init__()
        self.behind = behind


def has_follower(job: Job) -> bool:
    """Return True if another job follows this one."""
    return THEN_HEADER in job.headers


def follower_of(job: Job) -> Mapping[str, NewJob]:
    """Read the job that follows this one, by its id in hex, in the same callback batch; empty if none does.

    Raises:
        PayloadError: it cannot be read.
    """
    try:
        # Other headers may be anything.
        stored = msgspec.json.decode(job.headers, type=dict[str, msgspec.Raw]).get(THEN_HEADER)
        text = None if stored is None else msgspec.json.decode(stored, type=str)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PayloadError("the headers of a job that another one may follow cannot be read") from error
    if text is None:
        return {}
    follower = unfold_chain(text)
    if job.batch_id is not None:
        follower = follower.in_batch(job.batch_id.hex)
    if has_unique_key(follower):
        follower = UniqueJob(follower.envelope, follower.args, None, follower.keys, answer=_FollowerAnswer(job))
    return {uuid7s(1)[0]: follower}


def suppressed_followers(refused: Iterable[UniqueJob]) -> Iterator[FollowerSuppressed]:
    """Yield the events of those refused unique jobs that follow others in their chains."""
    for new in refused:
        if isinstance(new.answer, _FollowerAnswer):
            yield FollowerSuppressed(new.answer.behind, new.kind, new.answer.existing_id)


def add_follower(connection: Connection, job: Job) -> None:
    """Add the job that follows one that is done, if any, in the transaction of its rows."""
    if follower := follower_of(job):
        insert_all(connection, follower, wakes="by queue")
