"""Texts of other parts of outboxq about jobs, without secrets: they may repeat an error or a note."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from outboxq.admin.browse import Listed, read_documents
from outboxq.admin.dead_letters import DeadJob
from outboxq.admin.explain import Explanation, Reason
from outboxq.admin.jobs import WaitingJob
from outboxq.admin.relays import RelaySummary
from outboxq.admin.snapshot import DeadGroup
from outboxq.dashboard.payloads import MASK
from outboxq.dashboard.view import Look


def secrets_by_id(look: Look, of: Listed, ids: Iterable[UUID]) -> Mapping[UUID, Sequence[str]]:
    """The hidden values of the arguments and headers of jobs, whose texts may repeat them; not known of long ones."""
    wanted = list(ids)
    if look.payloads.mode != "redacted" or not wanted:
        return {}
    found = look.at("what is hidden of jobs", lambda c: read_documents(c, of, wanted)) or {}
    return {job_id: look.payloads.secrets_of(*documents) for job_id, documents in found.items()}


def seen_note(look: Look, job_id: UUID, note: str | None, secrets: Mapping[UUID, Sequence[str]]) -> str | None:
    """The note of a job; masked if the hidden values of the job are not known."""
    if note is None or look.payloads.mode != "redacted" or job_id in secrets:
        return look.payloads.text(note, secrets.get(job_id, ()))
    return MASK


def seen_jobs(look: Look, jobs: Sequence[WaitingJob]) -> list[WaitingJob]:
    """Jobs with their notes as they may be seen."""
    secrets = secrets_by_id(look, "job", (each.id for each in jobs if each.note is not None))
    return [replace(each, note=seen_note(look, each.id, each.note, secrets)) for each in jobs]


def seen_relays(look: Look, relays: Iterable[RelaySummary]) -> tuple[RelaySummary, ...]:
    """Relays with the notes of their jobs as they may be seen."""
    given = tuple(relays)
    noted = (job.id for relay in given for job in relay.running if job.note is not None)
    secrets = secrets_by_id(look, "job", noted)
    return tuple(
        replace(
            relay, running=tuple(replace(job, note=seen_note(look, job.id, job.note, secrets)) for job in relay.running)
        )
        for relay in given
    )


def seen_groups(look: Look, groups: Iterable[DeadGroup]) -> tuple[DeadGroup, ...]:
    """Groups of dead letters; one without a line of code may have a reason in place of a type."""
    return tuple(replace(each, error=look.payloads.error(each.error)) if each.line is None else each for each in groups)


def seen_dead(look: Look, dead: Sequence[DeadJob]) -> list[DeadJob]:
    """Dead letters with their reasons as they may be seen."""
    secrets = secrets_by_id(look, "dead_job", (each.id for each in dead))
    return [replace(each, reason=look.payloads.reason(each.reason, secrets.get(each.id))) for each in dead]


def seen_explanation(
    look: Look, explanation: Explanation | None, secrets: Sequence[str] | None = None
) -> Explanation | None:
    """An explanation: two of its reasons repeat the text of an error.

    Args:
        secrets: The hidden values of the job; None if they are not known, and then that text is left out.
    """
    if explanation is None:
        return None
    return replace(explanation, reasons=tuple(_seen(look, each, secrets) for each in explanation.reasons))


def seen_explanation_of_queue(look: Look, explanation: Explanation | None) -> Explanation | None:
    """The explanation of a queue, whose next job may have failed before."""
    if explanation is None or explanation.job_id is None:
        return seen_explanation(look, explanation)
    secrets = secrets_by_id(look, "job", [explanation.job_id])
    return seen_explanation(look, explanation, secrets.get(explanation.job_id))


def _seen(look: Look, reason: Reason, secrets: Sequence[str] | None) -> Reason:
    if reason.code not in ("dead", "retrying") or look.payloads.mode == "shown":
        return reason
    if secrets is not None and look.payloads.knows(secrets):
        return replace(reason, text=look.payloads.text(reason.text, secrets) or "")
    # Up to the error; its type is no payload.
    said, _, _ = reason.text.partition(" ago: " if reason.code == "dead" else " failed: ")
    kind = reason.details.get("error_type")
    return replace(reason, text=f"{said} ago" if reason.code == "dead" else f"{said} failed: {kind}")
