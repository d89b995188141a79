"""outboxq: transactional outbox, inbox and jobs for SQLAlchemy and PostgreSQL.

Names are imported when they are first used, so that `import outboxq` and `outboxq --help` stay quick.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outboxq.backoff import Backoff as Backoff
    from outboxq.codec.entities import Locked as Locked
    from outboxq.config import RelayConfig as RelayConfig
    from outboxq.config import SlotGroup as SlotGroup
    from outboxq.effects.api import AsyncEffects as AsyncEffects
    from outboxq.effects.api import Effects as Effects
    from outboxq.effects.request import Applied as Applied
    from outboxq.effects.request import NotApplied as NotApplied
    from outboxq.effects.request import Unknown as Unknown
    from outboxq.errors import CallNotApplied as CallNotApplied
    from outboxq.errors import CallRefused as CallRefused
    from outboxq.errors import OutboxqError as OutboxqError
    from outboxq.errors import PermanentError as PermanentError
    from outboxq.handlers.context import AsyncBatchContext as AsyncBatchContext
    from outboxq.handlers.context import AsyncContext as AsyncContext
    from outboxq.handlers.context import BatchContext as BatchContext
    from outboxq.handlers.context import BatchItem as BatchItem
    from outboxq.handlers.context import Context as Context
    from outboxq.handlers.handler import BatchHandler as BatchHandler
    from outboxq.handlers.handler import Handler as Handler
    from outboxq.handlers.registry import Jobs as Jobs
    from outboxq.inbox import Acceptance as Acceptance
    from outboxq.inbox import AcceptedBatch as AcceptedBatch
    from outboxq.inbox import Inbox as Inbox
    from outboxq.job import Job as Job
    from outboxq.new_job import JobHandle as JobHandle
    from outboxq.new_job import NewJob as NewJob
    from outboxq.outbox.find import FoundJob as FoundJob
    from outboxq.outbox.find import find_job as find_job
    from outboxq.outbox.kinds import JobKind as JobKind
    from outboxq.outbox.kinds import external as external
    from outboxq.outbox.session import AsyncOutboxSession as AsyncOutboxSession
    from outboxq.outbox.session import OutboxSession as OutboxSession
    from outboxq.outbox.session import add_job as add_job
    from outboxq.outbox.session import add_jobs as add_jobs
    from outboxq.outcomes import DeadLetter as DeadLetter
    from outboxq.outcomes import Discard as Discard
    from outboxq.outcomes import Done as Done
    from outboxq.outcomes import Outcome as Outcome
    from outboxq.outcomes import Retry as Retry
    from outboxq.outcomes import Snooze as Snooze
    from outboxq.relay.relay import Relay as Relay
    from outboxq.relay.run import RelayReport as RelayReport

_HOMES = {
    "Acceptance": "inbox",
    "AcceptedBatch": "inbox",
    "Applied": "effects.request",
    "AsyncBatchContext": "handlers.context",
    "AsyncContext": "handlers.context",
    "AsyncEffects": "effects.api",
    "AsyncOutboxSession": "outbox.session",
    "Backoff": "backoff",
    "BatchContext": "handlers.context",
    "BatchHandler": "handlers.handler",
    "BatchItem": "handlers.context",
    "CallNotApplied": "errors",
    "CallRefused": "errors",
    "Context": "handlers.context",
    "DeadLetter": "outcomes",
    "Discard": "outcomes",
    "Done": "outcomes",
    "Effects": "effects.api",
    "FoundJob": "outbox.find",
    "Handler": "handlers.handler",
    "Inbox": "inbox",
    "Job": "job",
    "JobHandle": "new_job",
    "JobKind": "outbox.kinds",
    "Jobs": "handlers.registry",
    "Locked": "codec.entities",
    "NewJob": "new_job",
    "NotApplied": "effects.request",
    "OutboxSession": "outbox.session",
    "OutboxqError": "errors",
    "Outcome": "outcomes",
    "PermanentError": "errors",
    "Relay": "relay.relay",
    "RelayConfig": "config",
    "RelayReport": "relay.run",
    "Retry": "outcomes",
    "SlotGroup": "config",
    "Snooze": "outcomes",
    "Unknown": "effects.request",
    "add_job": "outbox.session",
    "add_jobs": "outbox.session",
    "external": "outbox.kinds",
    "find_job": "outbox.find",
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
