"""outboxq: transactional outbox, inbox and jobs for SQLAlchemy and PostgreSQL.

Names are imported when they are first used, so that `import outboxq` and `outboxq --help` stay quick.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outboxq.codec.entities import Locked
    from outboxq.config import RelayConfig, SlotGroup
    from outboxq.effects.api import AsyncEffects, Effects
    from outboxq.effects.request import Applied, NotApplied, Unknown
    from outboxq.errors import CallNotApplied, CallRefused, OutboxqError, PermanentError
    from outboxq.handlers.context import AsyncBatchContext, AsyncContext, BatchContext, BatchItem, Context
    from outboxq.handlers.handler import BatchHandler, Handler
    from outboxq.handlers.registry import Jobs
    from outboxq.inbox import Acceptance, AcceptedBatch, Inbox
    from outboxq.job import Job
    from outboxq.new_job import NewJob
    from outboxq.outbox.callback_batch import FinishedBatch, JobBatch, batch, batch_of, finished_batch
    from outboxq.outbox.cancel import cancel
    from outboxq.outbox.find import FoundJob, find_job
    from outboxq.outbox.handle import JobHandle, wait_for_result
    from outboxq.outbox.keys import Unique
    from outboxq.outbox.kinds import JobKind, external
    from outboxq.outbox.progress import Progress
    from outboxq.outbox.session import AsyncOutboxSession, OutboxSession, add_job, add_jobs
    from outboxq.outcomes import Backoff, DeadLetter, Discard, Done, Outcome, Retry, Snooze
    from outboxq.relay.relay import Relay
    from outboxq.relay.state import RelayReport
    from outboxq.shards import shard_of

# The names that each module defines.
_MODULES = {
    "codec.entities": "Locked",
    "config": "RelayConfig SlotGroup",
    "effects.api": "AsyncEffects Effects",
    "effects.request": "Applied NotApplied Unknown",
    "errors": "CallNotApplied CallRefused OutboxqError PermanentError",
    "handlers.context": "AsyncBatchContext AsyncContext BatchContext BatchItem Context",
    "handlers.handler": "BatchHandler Handler",
    "handlers.registry": "Jobs",
    "inbox": "Acceptance AcceptedBatch Inbox",
    "job": "Job",
    "new_job": "NewJob",
    "outbox.cancel": "cancel",
    "outbox.find": "FoundJob find_job",
    "outbox.handle": "JobHandle wait_for_result",
    "outbox.callback_batch": "FinishedBatch JobBatch batch batch_of finished_batch",
    "outbox.keys": "Unique",
    "outbox.kinds": "JobKind external",
    "outbox.progress": "Progress",
    "outbox.session": "AsyncOutboxSession OutboxSession add_job add_jobs",
    "outcomes": "Backoff DeadLetter Discard Done Outcome Retry Snooze",
    "relay.relay": "Relay",
    "relay.state": "RelayReport",
    "shards": "shard_of",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Acceptance",
    "AcceptedBatch",
    "Applied",
    "AsyncBatchContext",
    "AsyncContext",
    "AsyncEffects",
    "AsyncOutboxSession",
    "Backoff",
    "BatchContext",
    "BatchHandler",
    "BatchItem",
    "CallNotApplied",
    "CallRefused",
    "Context",
    "DeadLetter",
    "Discard",
    "Done",
    "Effects",
    "FinishedBatch",
    "FoundJob",
    "Handler",
    "Inbox",
    "Job",
    "JobBatch",
    "JobHandle",
    "JobKind",
    "Jobs",
    "Locked",
    "NewJob",
    "NotApplied",
    "OutboxSession",
    "OutboxqError",
    "Outcome",
    "PermanentError",
    "Progress",
    "Relay",
    "RelayConfig",
    "RelayReport",
    "Retry",
    "SlotGroup",
    "Snooze",
    "Unique",
    "Unknown",
    "__version__",
    "add_job",
    "add_jobs",
    "batch",
    "batch_of",
    "cancel",
    "external",
    "find_job",
    "finished_batch",
    "shard_of",
    "wait_for_result",
]


def __getattr__(name: str) -> object:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'outboxq' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"outboxq.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
