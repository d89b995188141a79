"""Helpers for users' tests: assert that jobs were enqueued, run them in the test's transaction, crash relays.

The pytest fixtures `outboxq_server` and `outboxq_database` come with the package (`outboxq.pytest_plugin`).
"""

from outboxq.fault_points import EFFECT_FAULT_POINTS, FAULT_POINTS, FaultPoint, fault_action
from outboxq.postgres import Database, Server, find_server, start_embedded
from outboxq.testing.crashes import CRASH_STEPS, CrashStep, crash_at_every_step
from outboxq.testing.faults import kill_process_at
from outboxq.testing.proxy import CommitProxy, Trap
from outboxq.testing.relay_process import RelayProcess
from outboxq.testing.transaction import DrainReport, assert_enqueued, async_context, drain, sync_context

__all__ = [
    "CRASH_STEPS",
    "EFFECT_FAULT_POINTS",
    "FAULT_POINTS",
    "CommitProxy",
    "CrashStep",
    "Database",
    "DrainReport",
    "FaultPoint",
    "RelayProcess",
    "Server",
    "Trap",
    "assert_enqueued",
    "async_context",
    "crash_at_every_step",
    "drain",
    "fault_action",
    "find_server",
    "kill_process_at",
    "start_embedded",
    "sync_context",
]
