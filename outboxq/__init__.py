"""outboxq: transactional outbox, inbox and jobs for SQLAlchemy and PostgreSQL.

Names are imported when they are first used, so that `import outboxq` and `outboxq --help` stay quick.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outboxq.config import RelayConfig as RelayConfig
    from outboxq.config import SlotGroup as SlotGroup
    from outboxq.context import AsyncBatchContext as AsyncBatchContext
    from outboxq.context import AsyncContext as AsyncContext
    from outboxq.context import BatchContext as BatchContext
    from outboxq.context import BatchItem as BatchItem
    from outboxq.context import Context as Context
    from outboxq.effects import Applied as Applied
    from outboxq.effects import AsyncEffects as AsyncEffects
    from outboxq.effects import Effects as Effects
    from outboxq.effects import NotApplied as NotApplied
    from outboxq.effects import Unknown as Unknown
    from outboxq.enqueue import AsyncOutboxSession as AsyncOutboxSession
    from outboxq.enqueue import OutboxSession as OutboxSession
    from outboxq.enqueue import add_job as add_job
    from outboxq.enqueue import add_jobs as add_jobs
    from outboxq.entities import Locked as Locked
    from outboxq.errors import CallNotApplied as CallNotApplied
    from outboxq.errors import CallRefused as CallRefused
    from outboxq.errors import OutboxqError as OutboxqError
    from outboxq.errors import PermanentError as PermanentError
    from outboxq.find import FoundJob as FoundJob
    from outboxq.find import find_job as find_job
    from outboxq.handlers import BatchHandler as BatchHandler
    from outboxq.handlers import Handler as Handler
    from outboxq.inbox import Acceptance as Acceptance
    from outboxq.inbox import AcceptedBatch as AcceptedBatch
    from outboxq.inbox import Inbox as Inbox
    from outboxq.job import Job as Job
    from outboxq.kinds import JobHandle as JobHandle
    from outboxq.kinds import JobKind as JobKind
    from outboxq.kinds import NewJob as NewJob
    from outboxq.kinds import external as external
    from outboxq.registry import Jobs as Jobs
    from outboxq.relay import Relay as Relay
    from outboxq.relay_run import RelayReport as RelayReport
    from outboxq.retry import Backoff as Backoff
    from outboxq.retry import DeadLetter as DeadLetter
    from outboxq.retry import Discard as Discard
    from outboxq.retry import Done as Done
    from outboxq.retry import Outcome as Outcome
    from outboxq.retry import Retry as Retry
    from outboxq.retry import Snooze as Snooze

_HOMES = {
    "Acceptance": "inbox",
    "AcceptedBatch": "inbox",
    "Applied": "effects",
    "AsyncBatchContext": "context",
    "AsyncContext": "context",
    "AsyncEffects": "effects",
    "AsyncOutboxSession": "enqueue",
    "Backoff": "retry",
    "BatchContext": "context",
    "BatchHandler": "handlers",
    "BatchItem": "context",
    "CallNotApplied": "errors",
    "CallRefused": "errors",
    "Context": "context",
    "DeadLetter": "retry",
    "Discard": "retry",
    "Done": "retry",
    "Effects": "effects",
    "FoundJob": "find",
    "Handler": "handlers",
    "Inbox": "inbox",
    "Job": "job",
    "JobHandle": "kinds",
    "JobKind": "kinds",
    "Jobs": "registry",
    "Locked": "entities",
    "NewJob": "kinds",
    "NotApplied": "effects",
    "OutboxSession": "enqueue",
    "OutboxqError": "errors",
    "Outcome": "retry",
    "PermanentError": "errors",
    "Relay": "relay",
    "RelayConfig": "config",
    "RelayReport": "relay_run",
    "Retry": "retry",
    "SlotGroup": "config",
    "Snooze": "retry",
    "Unknown": "effects",
    "add_job": "enqueue",
    "add_jobs": "enqueue",
    "external": "kinds",
    "find_job": "find",
}

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
    "FoundJob",
    "Handler",
    "Inbox",
    "Job",
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
    "Relay",
    "RelayConfig",
    "RelayReport",
    "Retry",
    "SlotGroup",
    "Snooze",
    "Unknown",
    "__version__",
    "add_job",
    "add_jobs",
    "external",
    "find_job",
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
