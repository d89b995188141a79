"""What other parts of outboxq say of jobs, without what must not be seen: their words may repeat an error or a note."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from outboxq.admin.dead_letters import DeadJob
from outboxq.admin.explain import Explanation, Reason
from outboxq.admin.relays import RelaySummary
from outboxq.admin.snapshot import DeadGroup
from outboxq.dashboard.view import Look


def seen_relays(look: Look, relays: Iterable[RelaySummary]) -> tuple[RelaySummary, ...]:
    """Relays with the notes of their jobs as they may be seen."""
    return tuple(
        replace(relay, running=tuple(replace(job, note=look.payloads.text(job.note)) for job in relay.running))
        for relay in relays
    )


def seen_groups(look: Look, groups: Iterable[DeadGroup]) -> tuple[DeadGroup, ...]:
    """Groups of dead letters; one without a line of code may have a reason in place of a type."""
    return tuple(
        replace(each, error=look.payloads.reason(each.error)) if each.line is None else each for each in groups
    )


def seen_dead(look: Look, dead: Iterable[DeadJob]) -> list[DeadJob]:
    """Dead letters with their reasons as they may be seen."""
    return [replace(each, reason=look.payloads.reason(each.reason)) for each in dead]


def seen_explanation(look: Look, explanation: Explanation | None, secrets: Sequence[str] = ()) -> Explanation | None:
    """An explanation: two of its reasons repeat the text of an error."""
    if explanation is None:
        return None
    return replace(explanation, reasons=tuple(_seen(look, each, secrets) for each in explanation.reasons))


def _seen(look: Look, reason: Reason, secrets: Sequence[str]) -> Reason:
    if reason.code not in ("dead", "retrying"):
        return reason
    if look.payloads.mode != "hidden":
        return replace(reason, text=look.payloads.text(reason.text, secrets) or "")
    # Up to the error; its type is no payload.
    said, _, _ = reason.text.partition(" ago: " if reason.code == "dead" else " failed: ")
    kind = reason.details.get("error_type")
    return replace(reason, text=f"{said} ago" if reason.code == "dead" else f"{said} failed: {kind}")
