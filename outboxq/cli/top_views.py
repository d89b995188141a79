"""The tables of `outboxq top`, each described by a `View`: its columns, and a function that returns its rows."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outboxq.cli.tables import Column
from outboxq.codec.display import Estimate, Latency, Rate

if TYPE_CHECKING:
    from outboxq.admin.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class View:
    """A table of `outboxq top`.

    Args:
        name: The table's key in the JSON.
        title: The heading of the table; the part before a comma is the name of its tab.
        key: The names of the attributes that identify a row.
        rows: Returns the table's rows from a snapshot; they have an attribute for each of `columns`.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    rows: "Callable[[Snapshot], Sequence[Any]]"


def _queues(snapshot: "Snapshot") -> list[SimpleNamespace]:
    rows = []
    for queue in snapshot.queues:
        shown = asdict(queue) | {name: Estimate(getattr(queue, name)) for name in queue.estimated}
        rates = {name: Rate(getattr(queue, name)) for name in ("done_per_minute", "failed_per_minute")}
        rows.append(SimpleNamespace(**shown | rates))
    return rows


def _kinds(snapshot: "Snapshot") -> list[SimpleNamespace]:
    rows = []
    for kind in snapshot.kinds:
        found = {name: getattr(kind, name) for name in kind.__slots__}
        rows.append(
            SimpleNamespace(
                **{name: Latency(value) if isinstance(value, float) else value for name, value in found.items()}
            )
        )
    return rows


def _running(snapshot: "Snapshot") -> list[SimpleNamespace]:
    jobs = [
        SimpleNamespace(
            id=job.id, queue=job.queue, kind=job.kind, attempt=job.attempt, running_seconds=job.seconds, pid=job.pid,
            host=relay.host, relay_pid=relay.pid, progress=job.progress, note=job.note,
            waits_for=None if job.waits is None else "a connection",
        )
        for relay in snapshot.relays
        if relay.state != "dead"
        for job in relay.running
    ]  # fmt: skip
    return sorted(jobs, key=lambda job: -job.running_seconds)


VIEWS = (
    View(
        "queues",
        "Queues",
        (
            Column("queue", "name"),
            Column("ready", if_empty=True),
            Column("oldest_waiting_seconds", rank=1),
            Column("done_per_minute", rank=1, if_empty=True),
            Column("failed_per_minute", rank=1),
            Column("running", rank=2),
            Column("scheduled", rank=3),
            Column("due", rank=3),
            Column("grouped", rank=4),
            Column("leased", rank=4),
            Column("orphaned", rank=4),
            Column("suspect", rank=4),
            Column("parked", rank=4),
            Column("dead", rank=1),
            Column("relays", rank=2, if_empty=True),
            Column("paused_at", rank=1),
        ),
        ("queue",),
        _queues,
    ),
    View(
        "kinds",
        "Kinds, in the last 5 minutes",
        (
            Column("queue", "name"),
            Column("kind", "name"),
            Column("done", if_empty=True),
            Column("retried"),
            Column("died"),
            Column("crashed", rank=2),
            Column("wait_p50_seconds", rank=3),
            Column("wait_p95_seconds", rank=2),
            Column("run_p50_seconds", rank=3),
            Column("run_p95_seconds", rank=2),
            Column("run_p99_seconds", rank=4),
        ),
        ("queue", "kind"),
        _kinds,
    ),
    View(
        "relays",
        "Relays",
        (
            Column("state"),
            Column("host", "name"),
            Column("pid", "id"),
            Column("queues", "name"),
            Column("busy", if_empty=True),
            Column("slots"),
            Column("free", rank=3),
            Column("waiting", rank=1),
            Column("longest", rank=3),
            Column("seen_at", rank=6),
            Column("started_at", rank=4),
            Column("version", rank=5),
        ),
        ("id",),
        lambda snapshot: snapshot.relays,
    ),
    View(
        "running",
        "Jobs that run for longer than a second",
        (
            Column("id", "id"),
            Column("queue", "name"),
            Column("kind", "name"),
            Column("attempt", rank=3),
            Column("running_seconds", rank=1),
            Column("progress", rank=2),
            Column("note", rank=3),
            Column("waits_for", "name", rank=2),
            Column("pid", "id", rank=2),
            Column("host", "name", rank=4),
            Column("relay_pid", "id", rank=5),
        ),
        ("id",),
        _running,
    ),
    View(
        "dead_groups",
        "Dead letters, by what they died of",
        (
            Column("queue", "name"),
            Column("kind", "name"),
            Column("error", "name"),
            Column("jobs"),
            Column("last_died_at", rank=1),
            Column("first_died_at", rank=2),
            Column("line", "text"),
        ),
        ("queue", "kind", "error", "line"),
        lambda snapshot: snapshot.dead_groups,
    ),
)
