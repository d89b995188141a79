"""The definitions of the metrics: their names, types and labels, which later versions of outboxq keep."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

MetricType: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """The definition of a metric; each combination of values of its labels is a series of its own."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()


def _by_name(families: Iterable[Family]) -> Mapping[str, Family]:
    return {family.name: family for family in families}


_QUEUE, _KIND = ("queue",), ("queue", "kind")

JOBS = "outboxq_jobs_total"
WAIT, RUN = "outboxq_job_wait_seconds", "outboxq_job_run_seconds"

# Counted by relays; the last three metrics of calls are counted by producers too.
RELAY = _by_name(
    (
        Family(JOBS, "counter", "Jobs and attempts by what became of them.", (*_KIND, "outcome")),
        Family(WAIT, "histogram", "From when a job was due until it was claimed.", _KIND),
        Family(RUN, "histogram", "How long handlers ran; jobs of a batch handler have their shares.", _KIND),
        Family(
            "outboxq_job_errors_total",
            "counter",
            "Failed attempts by the type of their error.",
            (*_KIND, "error_type"),
        ),
        Family("outboxq_claims_total", "counter", "Claims that took jobs, found none, or failed.", ("queue", "result")),
        Family("outboxq_claimed_jobs_total", "counter", "Jobs that claims took.", _QUEUE),
        Family("outboxq_claim_seconds", "histogram", "The round trips of claims that took jobs.", _QUEUE),
        Family("outboxq_slots", "gauge", "Slots that have jobs, look for some, or sleep.", ("state",)),
        Family("outboxq_running_jobs", "gauge", "Jobs that slots have claimed at this moment.", _QUEUE),
        Family(
            "outboxq_calls",
            "gauge",
            "Jobs in lease mode that wait for a connection or a slot, or run.",
            ("queue", "state"),
        ),
        Family("outboxq_free_call_slots", "gauge", "Free slots in lease mode that serve the queue, or others.", _QUEUE),
        Family("outboxq_call_connections", "gauge", "Connections that jobs in lease mode share.", ("state",)),
        Family("outboxq_parked_jobs_total", "counter", "Jobs put off because the relay does not know them.", _QUEUE),
        Family("outboxq_suspected_jobs_total", "counter", "Jobs whose last claim died.", _QUEUE),
        Family("outboxq_coalesced_jobs_total", "counter", "Waiting jobs whose run was that of another.", _QUEUE),
        Family("outboxq_rolled_back_batches_total", "counter", "Batches that were rolled back as a whole.", _QUEUE),
        Family("outboxq_finished_batches_total", "counter", "Batches of jobs whose callback was added.", _QUEUE),
        Family("outboxq_fired_schedules_total", "counter", "Times that a schedule added its job.", ("schedule",)),
        Family("outboxq_lease_extension_failures_total", "counter", "Leases that could not be extended."),
        Family("outboxq_relay_database_lost", "gauge", "Whether the relay cannot reach its database."),
        Family("outboxq_hook_failures_total", "counter", "Hooks that raised."),
        Family("outboxq_stat_flush_failures_total", "counter", "Rounds of the history that failed."),
        Family("outboxq_pruned_rows_total", "counter", "Expired rows that were deleted.", ("table",)),
        Family("outboxq_index_rebuilds_total", "counter", "Bloated indexes that were built again."),
        Family("outboxq_relay_child_ends_total", "counter", "Relay processes that did not end in order.", ("reason",)),
        Family("outboxq_relay_children", "gauge", "Relay processes that run."),
        Family("outboxq_relay_info", "gauge", "A relay, and its version.", ("version", "host", "relay")),
        Family("outboxq_effect_calls_total", "counter", "Calls of once by how they ended.", ("scope", "outcome")),
        Family("outboxq_inbox_messages_total", "counter", "Messages that inboxes were given.", ("consumer", "outcome")),
        Family("outboxq_enqueued_jobs_total", "counter", "Jobs that were added, and committed.", _KIND),
    )
)

# Read from the tables by the exporter.
TABLES = _by_name(
    (
        Family("outboxq_queue_jobs", "gauge", "Jobs by their state.", ("queue", "state")),
        Family("outboxq_queue_jobs_exact", "gauge", "Whether all of the queue's jobs were counted.", _QUEUE),
        Family("outboxq_queue_oldest_seconds", "gauge", "How long the oldest ready or due job has waited.", _QUEUE),
        Family("outboxq_queue_paused", "gauge", "Whether the queue is paused.", _QUEUE),
        Family(
            "outboxq_queue_serving_slots", "gauge", "Slots of living relays that serve the queue, or others.", _QUEUE
        ),
        Family("outboxq_dead_letters", "gauge", "Dead letters.", _QUEUE),
        Family("outboxq_parked_jobs", "gauge", "Jobs whose kind no relay knows that saw them.", _KIND),
        Family("outboxq_effects", "gauge", "Effects that wait for an operator or a retry.", ("status",)),
        Family("outboxq_relays", "gauge", "Relays by their state.", ("state",)),
        Family("outboxq_oldest_snapshot_seconds", "gauge", "The age of what keeps vacuum from its work.", ("holder",)),
        Family("outboxq_oldest_snapshot_transactions", "gauge", "The same in transactions.", ("holder",)),
        Family("outboxq_table_dead_rows", "gauge", "Rows that vacuum has not removed yet.", ("table",)),
        Family("outboxq_relation_bytes", "gauge", "The size of tables and indexes.", ("relation",)),
        Family("outboxq_schedule_late_seconds", "gauge", "How long a schedule has been due.", ("schedule",)),
        Family(
            "outboxq_schedule_last_fire_timestamp_seconds", "gauge", "When it was due last and fired.", ("schedule",)
        ),
        Family("outboxq_queue_limit", "gauge", "How many jobs of the queue may run at a time.", _QUEUE),
        Family("outboxq_queue_limit_used", "gauge", "How many jobs of a queue with a limit run.", _QUEUE),
        Family("outboxq_queue_limit_waiting", "gauge", "Jobs that wait in a queue whose limit is full.", _QUEUE),
        Family("outboxq_queue_rate_per_second", "gauge", "How many jobs of the queue may begin a second.", _QUEUE),
        Family("outboxq_queue_rate_waiting", "gauge", "Jobs that wait in a queue whose rate is used up.", _QUEUE),
        Family("outboxq_groups_blocked", "gauge", "Groups whose first job is put off, before others.", _QUEUE),
        Family("outboxq_group_blocked_jobs", "gauge", "Jobs that wait for such a job.", _QUEUE),
        Family(
            "outboxq_group_blocked_seconds", "gauge", "How long the longest of these jobs is put off from now.", _QUEUE
        ),
        Family("outboxq_batches_open", "gauge", "Batches whose callback was not added yet."),
        Family("outboxq_batch_oldest_seconds", "gauge", "The age of the oldest open batch."),
        Family("outboxq_doctor_findings", "gauge", "What outboxq doctor finds.", ("code", "severity")),
        Family("outboxq_standby_delay_seconds", "gauge", "How old the data of the standby is that is looked at."),
        Family("outboxq_schema_step", "gauge", "The step of the tables."),
        Family("outboxq_exporter_up", "gauge", "Whether the last look at the database succeeded."),
        Family("outboxq_exporter_query_seconds", "gauge", "How long each part of a look took.", ("query",)),
        Family("outboxq_exporter_query_ok", "gauge", "Whether each part of a look was answered.", ("query",)),
    )
)
FAMILIES = {**RELAY, **TABLES}
