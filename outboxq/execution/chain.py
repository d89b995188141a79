"""Chains: the transaction that finishes a job also adds the next job of its chain, which is thus added exactly once."""

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
    """Receives the outcome of adding a unique job that follows the job `behind` in a chain: added, or its key is taken.

    No caller waits for it, as for a job's handle, so `suppressed_followers` makes an event of a refusal.
    """

    __slots__ = ("behind",)

    def __init__(self, behind: Job) -> None:
        super().__init__()
        self.behind = behind


def has_follower(job: Job) -> bool:
    """Return True if the job's chain goes on after it."""
    return THEN_HEADER in job.headers


def follower_of(job: Job) -> Mapping[str, NewJob]:
    """Return the next job of this job's chain as `{new id in hex: job}`, or an empty mapping if there is none.

    The job's headers contain the next job. If this job is in a callback batch, the next one is in the same batch.

    Raises:
        PayloadError: the headers or the next job cannot be read.
    """
    try:
        # Other headers may contain anything.
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
    """Yield an event for each of these refused unique jobs that is the next job of a chain; skip all others.

    The chain ends there, because another job has the key.
    """
    for new in refused:
        if isinstance(new.answer, _FollowerAnswer):
            yield FollowerSuppressed(new.answer.behind, new.kind, new.answer.existing_id)


def add_follower(connection: Connection, job: Job) -> None:
    """Insert the next job of a done job's chain, if there is one, in the transaction that holds the done job's rows."""
    if follower := follower_of(job):
        insert_all(connection, follower, wakes="by queue")
