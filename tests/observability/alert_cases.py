"""For each alert that is shipped: series with which it fires, and series with which it is silent.

In promtool's notation, a value a minute: `0+2x10` is 0, 2, 4, ... 20.
"""

from dataclasses import dataclass

_DB = 'database="shop"'
_Q = f'{_DB},queue="mail"'
_K = f'{_Q},kind="send"'


@dataclass(frozen=True)
class Case:
    """The values of series, and when to look."""

    firing: dict[str, str]
    silent: dict[str, str]
    at: str = "1h"


def _both(firing: str, silent: str, series: str, **others: str) -> Case:
    return Case({series: firing, **others}, {series: silent, **others})


_SERVING, _DRAINING = f'outboxq_relays{{{_DB},state="serving"}}', f'outboxq_relays{{{_DB},state="draining"}}'
_DEAD_RELAYS = f'outboxq_relays{{{_DB},state="dead"}}'
_READY, _SLOTS = f'outboxq_queue_jobs{{{_Q},state="ready"}}', f"outboxq_queue_serving_slots{{{_Q}}}"
_OLDEST, _PAUSED = f"outboxq_queue_oldest_seconds{{{_Q}}}", f"outboxq_queue_paused{{{_Q}}}"
_DONE = f'outboxq_jobs_total{{{_K},outcome="done"}}'
_UP = f"outboxq_exporter_up{{{_DB}}}"


def _jobs(outcome: str) -> str:
    return f'outboxq_jobs_total{{{_K},outcome="{outcome}"}}'


CASES: dict[str, Case] = {
    "OutboxqNoRelayAlive": Case(
        {_SERVING: "2x20 0x60", _DRAINING: "0x80", _DEAD_RELAYS: "0x20 2x60"},
        {_SERVING: "2x20 0 0x0 2x60", _DRAINING: "0x80", _DEAD_RELAYS: "2x80"},
    ),
    "OutboxqQueueNotServed": Case({_READY: "3x80", _SLOTS: "0x80"}, {_READY: "3x80", _SLOTS: "2x80"}),
    "OutboxqQueueLate": Case({_OLDEST: "301x80", _PAUSED: "0x80"}, {_OLDEST: "900x80", _PAUSED: "1x80"}),
    "OutboxqQueuePausedAndLate": Case({_OLDEST: "3601x80", _PAUSED: "1x80"}, {_OLDEST: "3601x80", _PAUSED: "0x80"}),
    "OutboxqBacklogGrows": Case({_READY: "2000+10x120"}, {_READY: "9000-10x120"}, at="100m"),
    "OutboxqDeadLetters": _both("5x50 6x30", "5x80", f"outboxq_dead_letters{{{_Q}}}"),
    "OutboxqDeadLetterRate": Case(
        {_jobs("dead"): "0+2x80", _DONE: "0+100x80"}, {_jobs("dead"): "0+1x80", _DONE: "0+200x80"}
    ),
    "OutboxqRetryRate": Case(
        {_jobs("retried"): "0+30x80", _DONE: "0+100x80"}, {_jobs("retried"): "0+20x80", _DONE: "0+100x80"}
    ),
    "OutboxqSuspects": _both("2x80", "2x45 0x30", f'outboxq_queue_jobs{{{_Q},state="suspect"}}'),
    "OutboxqCrashes": _both("0x50 1x30", "1x80", _jobs("crashed")),
    "OutboxqLeasesLost": _both("0x50 1x30", "1x80", _jobs("lease_lost")),
    "OutboxqKindsParked": _both("4x80", "0x40 4x12 0x30", f"outboxq_parked_jobs{{{_K}}}"),
    "OutboxqCallsWait": _both("3x80", "3x52 0x1 3x30", f'outboxq_calls{{{_Q},state="waiting"}}'),
    "OutboxqEffectsUnknown": _both("1x80", "0x80", f'outboxq_effects{{{_DB},status="unknown"}}'),
    "OutboxqSnapshotPinned": _both("0+60x80", "900x80", f'outboxq_oldest_snapshot_seconds{{{_DB},holder="session"}}'),
    "OutboxqDatabaseLost": _both(
        "0x50 1x30", "0x50 1x1 0x30", f'outboxq_relay_database_lost{{{_DB},instance="relay:9464"}}'
    ),
    "OutboxqRelayRestarts": _both(
        "0x40 1 2 3 4 5 6x30", "0x40 1x40", f'outboxq_relay_child_ends_total{{{_DB},reason="died"}}'
    ),
    "OutboxqDoctorProblem": Case(
        {f'outboxq_doctor_findings{{{_DB},code="table-missing",severity="problem"}}': "1x80"},
        {f'outboxq_doctor_findings{{{_DB},code="queue-late",severity="warning"}}': "1x80"},
    ),
    "OutboxqExporterDown": Case({_UP: "1x20 0x60"}, {_UP: "1x80"}),
    "OutboxqSchedulesLate": _both("301x80", "0x80", f'outboxq_schedule_late_seconds{{{_DB},schedule="nightly"}}'),
    "OutboxqLimitsWaiting": Case(
        {f"outboxq_queue_rate_waiting{{{_Q}}}": "7x80", _OLDEST: "301x80"},
        {f"outboxq_queue_limit_waiting{{{_Q}}}": "7x80", _OLDEST: "3x80"},
    ),
    "OutboxqGroupsBlocked": Case(
        {f"outboxq_group_blocked_jobs{{{_Q}}}": "3x120"}, {f"outboxq_group_blocked_jobs{{{_Q}}}": "3x40"}, at="100m"
    ),
    "OutboxqBatchesOld": _both("86401x80", "3600x80", f"outboxq_batch_oldest_seconds{{{_DB}}}"),
}
# Other ways in which an alert fires.
MORE: dict[str, dict[str, str]] = {
    "OutboxqExporterDown": {f'outboxq_exporter_query_ok{{{_DB},query="sizes"}}': "0x80", _UP: "1x80"},
    "OutboxqLimitsWaiting": {f"outboxq_queue_limit_waiting{{{_Q}}}": "7x80", _OLDEST: "301x80"},
    "OutboxqSnapshotPinned": {f'outboxq_oldest_snapshot_seconds{{{_DB},holder="prepared"}}': "9999x80"},
}
