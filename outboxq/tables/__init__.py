"""The tables as this version of the code sees them; `migrations/` creates them, and a test compares the two."""

from outboxq.tables.columns import SCHEMA, Instant, JsonText, Real, StoredText, mapped_schema, metadata
from outboxq.tables.history import audit, done_job, gauge, progress, relay_status, stat
from outboxq.tables.installation import deployment, migration, relay
from outboxq.tables.job_row import JobRow, job_mapper
from outboxq.tables.jobs import JOB_CHECKS, batch, cancel_request, dead_job, job, unique_key
from outboxq.tables.memories import effect, inbox
from outboxq.tables.queues import paused_kind, queue, rate, schedule

# The migration step that this code needs. It also works without later steps, which may follow after a deployment.
NEEDED_VERSION = 9
# The newest step, which messages name as the one to migrate to.
LATEST_VERSION = 15
# The step that adds the history and the rows of relays, for code that reads them.
HISTORY_VERSION = 11
# The step that adds owners of schedules; without it the code stores them as the previous version did.
OWNERS_VERSION = 15

__all__ = [
    "HISTORY_VERSION",
    "JOB_CHECKS",
    "LATEST_VERSION",
    "NEEDED_VERSION",
    "OWNERS_VERSION",
    "SCHEMA",
    "Instant",
    "JobRow",
    "JsonText",
    "Real",
    "StoredText",
    "audit",
    "batch",
    "cancel_request",
    "dead_job",
    "deployment",
    "done_job",
    "effect",
    "gauge",
    "inbox",
    "job",
    "job_mapper",
    "mapped_schema",
    "metadata",
    "migration",
    "paused_kind",
    "progress",
    "queue",
    "rate",
    "relay",
    "relay_status",
    "schedule",
    "stat",
    "unique_key",
]
