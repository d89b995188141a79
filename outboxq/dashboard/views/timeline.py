"""The timeline on a job's page: its start, its failed attempts, and its end or present state."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from outboxq.dashboard.documents import Tree, read_tree
from outboxq.dashboard.view import Look
from outboxq.error_record import StoredAttempt


@dataclass(frozen=True, slots=True)
class Step:
    """An entry of the timeline on a job's page: one moment in the life of the job.

    Attributes:
        at: The time; None for the present.
        tone: The style in which the entry is drawn.
        detail: More about the event, such as the failed line of code.
    """

    at: datetime | None
    text: str
    tone: str = "plain"
    detail: str | None = None


def timeline(created_at: datetime, attempts: Sequence[StoredAttempt], ends: Sequence[Step]) -> list[Step]:
    """Return the timeline of a job, the oldest entry first: when it was added, each failed attempt, then `ends`.

    `ends` has the job's end, or its present state.
    """
    steps = [Step(created_at, "added")]
    for each in attempts:
        where = each.where[0] if each.where else None
        steps.append(Step(_moment(each.at), f"attempt {each.attempt} failed: {each.type}", "bad", where))
    return [*steps, *ends]


def seen_headers(look: Look, kind: str, headers: str) -> dict[str, str]:
    """Return the headers of a job without secrets; empty if headers are hidden."""
    raw = look.payloads.document(kind, headers).raw
    found: Tree = read_tree(raw)
    return {key: str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
