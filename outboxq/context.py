"""What a handler receives first: its session, its job, the process's state and a log that names the job."""

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Generic

import msgspec
from typing_extensions import TypeVar

from outboxq.enqueue import AsyncOutboxSession, OutboxSession
from outboxq.job import Job

S = TypeVar("S", default=Any)


class JobLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the job's id, kind, queue and attempt to the `extra` of each record."""

    def __init__(self, job: Job) -> None:
        extra: dict[str, object] = {
            "job_id": str(job.id),
            "job_kind": job.kind,
            "job_queue": job.queue,
            "job_attempt": job.attempt,
        }
        super().__init__(logging.getLogger("outboxq.handler"), extra)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Merge the caller's own `extra`, which the standard adapter would drop."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


@dataclass(frozen=True)
class _JobContext(Generic[S]):
    job: Job
    state: S
    log: JobLogger = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "log", JobLogger(self.job))

    @property
    def headers(self) -> dict[str, str]:
        """The strings that the producer stored next to the arguments."""
        return msgspec.json.decode(self.job.headers.encode(), type=dict[str, str])


@dataclass(frozen=True)
class Context(_JobContext[S]):
    """What a sync handler receives first.

    `session` writes in the transaction that removed the job: its rows commit with the job's disappearance, or not at
    all. Its `commit()` commits nothing, and its `rollback()` fails the attempt. `state` is what the registry's lifespan
    yielded.
    """

    session: OutboxSession


@dataclass(frozen=True)
class AsyncContext(_JobContext[S]):
    """What an async handler receives first. See `Context`."""

    session: AsyncOutboxSession
