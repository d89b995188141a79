"""Functions that remove secrets from texts about jobs, such as notes and reasons, which may repeat payloads."""

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
    """Return the hidden values in the arguments and headers of jobs, by id, to remove them from texts about the jobs.

    Jobs with long arguments are left out, and their texts are masked whole.

    Args:
        of: The table that the jobs are in, `job` or `dead_job`.
    """
    wanted = list(ids)
    if look.payloads.mode != "redacted" or not wanted:
        return {}
    found = look.at("what is hidden of jobs", lambda c: read_documents(c, of, wanted)) or {}
    return {job_id: look.payloads.secrets_of(*documents) for job_id, documents in found.items()}


def seen_note(look: Look, job_id: UUID, note: str | None, secrets: Mapping[UUID, Sequence[str]]) -> str | None:
    """Return the note of a job without secrets.

    If `secrets` does not have the hidden values of the job, return a mask.
    """
    if note is None or look.payloads.mode != "redacted" or job_id in secrets:
        return look.payloads.text(note, secrets.get(job_id, ()))
    return MASK


def seen_jobs(look: Look, jobs: Sequence[WaitingJob]) -> list[WaitingJob]:
    """Return the same jobs with secrets removed from their notes."""
    secrets = secrets_by_id(look, "job", (each.id for each in jobs if each.note is not None))
    return [replace(each, note=seen_note(look, each.id, each.note, secrets)) for each in jobs]


def seen_relays(look: Look, relays: Iterable[RelaySummary]) -> tuple[RelaySummary, ...]:
    """Return the same relays with secrets removed from the notes of their running jobs."""
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
    """Return the same groups of dead letters with secrets removed from their errors.

    If a group has a line of code, its error is an exception's type, and stays. The error of any other group may be free
    text.
    """
    return tuple(replace(each, error=look.payloads.error(each.error)) if each.line is None else each for each in groups)


def seen_dead(look: Look, dead: Sequence[DeadJob]) -> list[DeadJob]:
    """Return the same dead letters with secrets removed from their reasons."""
    secrets = secrets_by_id(look, "dead_job", (each.id for each in dead))
    return [replace(each, reason=look.payloads.reason(each.reason, secrets.get(each.id))) for each in dead]


def seen_explanation(
    look: Look, explanation: Explanation | None, secrets: Sequence[str] | None = None
) -> Explanation | None:
    """Return the explanation why a job does not run, without secrets.

    The reasons `dead` and `retrying` in an explanation repeat the text of an error.

    Args:
        secrets: The hidden values of the job. If they are not known (None), the error's text is left out.
    """
    if explanation is None:
        return None
    return replace(explanation, reasons=tuple(_seen(look, each, secrets) for each in explanation.reasons))


def seen_explanation_of_queue(look: Look, explanation: Explanation | None) -> Explanation | None:
    """Return the explanation why a queue does not run, without secrets.

    The explanation may repeat the last error of the queue's next job.
    """
    if explanation is None or explanation.job_id is None:
        return seen_explanation(look, explanation)
    secrets = secrets_by_id(look, "job", [explanation.job_id])
    return seen_explanation(look, explanation, secrets.get(explanation.job_id))


def _seen(look: Look, reason: Reason, secrets: Sequence[str] | None) -> Reason:
    if reason.code not in ("dead", "retrying") or look.payloads.mode == "shown":
        return reason
    if secrets is not None and look.payloads.knows(secrets):
        return replace(reason, text=look.payloads.text(reason.text, secrets) or "")
    # The part before the error's text; the error's type is not secret.
    said, _, _ = reason.text.partition(" ago: " if reason.code == "dead" else " failed: ")
    kind = reason.details.get("error_type")
    return replace(reason, text=f"{said} ago" if reason.code == "dead" else f"{said} failed: {kind}")
