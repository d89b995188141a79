"""The dashboard for Grafana: eight rows of panels over the metrics of relays and of the exporter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

PanelType: TypeAlias = Literal["stat", "timeseries", "heatmap"]

_ALL = 'database=~"$database"'
_OF = 'database=~"$database",queue=~"$queue"'
_RATE = "[$__rate_interval]"
_WIDTH, _HEIGHT = 24, 7


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of the dashboard for Grafana.

    `targets`: Prometheus's expressions, by their legends. `unit` and `type` are Grafana's names.
    """

    title: str
    targets: Mapping[str, str]
    unit: str = "short"
    type: PanelType = "timeseries"


def _percentiles(metric: str, labels: str = _OF) -> Mapping[str, str]:
    return {
        f"p{percent}": f"histogram_quantile({percent / 100}, sum by (le) (rate({metric}_bucket{{{labels}}}{_RATE})))"
        for percent in (50, 95, 99)
    }


ROWS: Mapping[str, Sequence[Panel]] = {
    "Health": (
        Panel("Oldest job", {"": f"max(outboxq_queue_oldest_seconds{{{_OF}}})"}, "s", "stat"),
        Panel("Living relays", {"": f'sum(outboxq_relays{{{_ALL},state=~"serving|draining"}})'}, "short", "stat"),
        Panel("Dead letters, 1 h", {"": f"sum(delta(outboxq_dead_letters{{{_OF}}}[1h]))"}, "short", "stat"),
        Panel("Unknown effects", {"": f'sum(outboxq_effects{{{_ALL},status="unknown"}})'}, "short", "stat"),
        Panel(
            "Doctor",
            {"": f'sum(outboxq_doctor_findings{{{_ALL},severity=~"problem|warning"}}) or vector(0)'},
            "short",
            "stat",
        ),
        Panel(
            "Busy slots",
            {"": f'sum(outboxq_slots{{{_ALL},state="busy"}}) / sum(outboxq_slots{{{_ALL}}})'},
            "percentunit",
            "stat",
        ),
    ),
    "Flow": (
        Panel("Outcomes", {"{{outcome}}": f"sum by (outcome) (rate(outboxq_jobs_total{{{_OF}}}{_RATE}))"}, "ops"),
        Panel("Kinds", {"{{kind}}": f"topk(10, sum by (kind) (rate(outboxq_jobs_total{{{_OF}}}{_RATE})))"}, "ops"),
        Panel("Enqueued", {"{{queue}}": f"sum by (queue) (rate(outboxq_enqueued_jobs_total{{{_OF}}}{_RATE}))"}, "ops"),
    ),
    "Backlog": (
        Panel("Jobs by state", {"{{state}}": f"sum by (state) (outboxq_queue_jobs{{{_OF}}})"}),
        Panel("Oldest job", {"{{queue}}": f"max by (queue) (outboxq_queue_oldest_seconds{{{_OF}}})"}, "s"),
        Panel(
            "Time to empty",
            {
                "{{queue}}": f'sum by (queue) (outboxq_queue_jobs{{{_OF},state=~"ready|due"}}) / '
                f'clamp_min(sum by (queue) (rate(outboxq_jobs_total{{{_OF},outcome=~"done|dead|discarded"}}'
                f"{_RATE})), 0.001)"
            },
            "s",
        ),
        Panel(
            "Limits",
            {
                "used {{queue}}": f"outboxq_queue_limit_used{{{_OF}}} / outboxq_queue_limit{{{_OF}}}",
                "wait {{queue}}": f"outboxq_queue_limit_waiting{{{_OF}}}",
                "rate {{queue}}": f"outboxq_queue_rate_waiting{{{_OF}}}",
            },
        ),
        Panel(
            "Groups and batches",
            {
                "behind {{queue}}": f"outboxq_group_blocked_jobs{{{_OF}}}",
                "blocked {{queue}}": f"outboxq_groups_blocked{{{_OF}}}",
                "batches": f"sum(outboxq_batches_open{{{_ALL}}})",
            },
        ),
        Panel("Schedules late", {"{{schedule}}": f"outboxq_schedule_late_seconds{{{_ALL}}} > 0"}, "s"),
    ),
    "Latency": (
        Panel("Wait", _percentiles("outboxq_job_wait_seconds"), "s"),
        Panel("Run", _percentiles("outboxq_job_run_seconds"), "s"),
        Panel(
            "Wait, all",
            {"{{le}}": f"sum by (le) (increase(outboxq_job_wait_seconds_bucket{{{_OF}}}{_RATE}))"},
            "s",
            "heatmap",
        ),
    ),
    "Failures": (
        Panel(
            "By error",
            {
                "{{kind}} {{error_type}}": "topk(10, sum by (kind, error_type) "
                f"(rate(outboxq_job_errors_total{{{_OF}}}{_RATE})))"
            },
            "ops",
        ),
        Panel("Dead letters", {"{{queue}}": f"sum by (queue) (outboxq_dead_letters{{{_OF}}})"}),
        Panel(
            "Crashes and leases",
            {
                "{{outcome}}": "sum by (outcome) (increase(outboxq_jobs_total"
                f'{{{_OF},outcome=~"crashed|lease_lost|interrupted"}}{_RATE}))',
                "suspected": f"sum(increase(outboxq_suspected_jobs_total{{{_OF}}}{_RATE}))",
                "rolled back": f"sum(increase(outboxq_rolled_back_batches_total{{{_OF}}}{_RATE}))",
            },
        ),
        Panel(
            "Parked",
            {
                "{{queue}} {{kind}}": f"outboxq_parked_jobs{{{_OF}}}",
                "put off {{queue}}": f"sum by (queue) (increase(outboxq_parked_jobs_total{{{_OF}}}{_RATE}))",
            },
        ),
    ),
    "Effects and inbox": (
        Panel(
            "Calls",
            {"{{outcome}}": f"sum by (outcome) (rate(outboxq_effect_calls_total{{{_ALL}}}{_RATE}))"},
            "ops",
        ),
        Panel("To be resolved", {"{{status}}": f"sum by (status) (outboxq_effects{{{_ALL}}})"}),
        Panel(
            "Messages",
            {
                "{{consumer}} {{outcome}}": "sum by (consumer, outcome) "
                f"(rate(outboxq_inbox_messages_total{{{_ALL}}}{_RATE}))"
            },
            "ops",
        ),
    ),
    "Relays": (
        Panel("Slots", {"{{state}}": f"sum by (state) (outboxq_slots{{{_ALL}}})"}),
        Panel("Calls in lease mode", {"{{state}}": f"sum by (state) (outboxq_calls{{{_ALL}}})"}),
        Panel("Claims", {"{{result}}": f"sum by (result) (rate(outboxq_claims_total{{{_OF}}}{_RATE}))"}, "ops"),
        Panel("A claim", _percentiles("outboxq_claim_seconds"), "s"),
        Panel(
            "Ends and outages",
            {
                "{{reason}}": f"sum by (reason) (increase(outboxq_relay_child_ends_total{{{_ALL}}}{_RATE}))",
                "database lost": f"sum(outboxq_relay_database_lost{{{_ALL}}})",
                "lease not extended": f"sum(increase(outboxq_lease_extension_failures_total{{{_ALL}}}{_RATE}))",
            },
        ),
    ),
    "Database": (
        Panel("Oldest snapshot", {"{{holder}}": f"max by (holder) (outboxq_oldest_snapshot_seconds{{{_ALL}}})"}, "s"),
        Panel("Dead rows", {"{{table}}": f"sum by (table) (outboxq_table_dead_rows{{{_ALL}}})"}),
        Panel("Sizes", {"{{relation}}": f"topk(10, outboxq_relation_bytes{{{_ALL}}})"}, "bytes"),
        Panel("Looking", {"{{query}}": f"outboxq_exporter_query_seconds{{{_ALL}}}"}, "s"),
    ),
}


def dashboard() -> dict[str, object]:
    """Return the dashboard for import into Grafana; its users choose data source, databases and queues on it."""
    return {
        "title": "outboxq",
        "uid": "outboxq",
        "tags": ["outboxq"],
        "schemaVersion": 38,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source(), _variable("database"), _variable("queue")]},
        "panels": list(_panels()),
    }


def _source() -> dict[str, object]:
    return {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}


def _variable(label: str) -> dict[str, object]:
    labels = "" if label == "database" else '{database=~"$database"}'
    return {
        "name": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": f"label_values(outboxq_queue_jobs{labels}, {label})",
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _panels() -> Iterator[dict[str, object]]:
    number, top = 1, 0
    for heading, panels in ROWS.items():
        yield {"id": number, "type": "row", "title": heading, "gridPos": _place(0, top, _WIDTH, 1), "panels": []}
        number, top = number + 1, top + 1
        in_line = min(len(panels), 6 if panels[0].type == "stat" else 3)
        width = _WIDTH // in_line
        for place, panel in enumerate(panels):
            line, column = divmod(place, in_line)
            yield _panel(number, panel, _place(column * width, top + line * _HEIGHT, width, _HEIGHT))
            number += 1
        top += (len(panels) + in_line - 1) // in_line * _HEIGHT


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, object]:
    form = "heatmap" if panel.type == "heatmap" else "time_series"
    return {
        "id": number,
        "type": panel.type,
        "title": panel.title,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "format": form}
            for index, (legend, expression) in enumerate(panel.targets.items())
        ],
    }
