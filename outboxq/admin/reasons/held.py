"""Reasons for a job that does not run now because a relay runs it already, or another session has locked its row."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Row

from outboxq.admin.reasons.looks import Looks
from outboxq.admin.reasons.reason import Reason, Value
from outboxq.admin.reasons.serving import MORE_CONNECTIONS, look_at_owner
from outboxq.admin.relays import ConnectionWait, decode_running
from outboxq.codec.text import duration, several
from outboxq.database.engines import RELAY_NAME
from outboxq.statements.doctor.sessions import prepared_transactions
from outboxq.statements.relays import DEAD_SECONDS

LEASED = ("leased", "group_leased")


def find_held(looks: Looks, job: Row[Any]) -> Iterator[Reason]:
    """Yield reasons if a relay runs the job, if the job is to be cancelled, or if a session has locked its row.

    `job` is a row of `statements.explain.job_facts`.
    """
    is_leased = job.state in LEASED
    if job.cancelling_seconds is not None and (job.is_held or is_leased):
        yield _cancelling(job)
    if job.is_held and job.holder is None:
        yield _prepared(looks, job)
    elif job.is_held and (job.application_name == RELAY_NAME or is_leased):
        yield _running(job)
    elif job.is_held:
        yield _held_by_session(job)
    if is_leased and not (job.is_held and job.holder is not None):
        yield _leased(job, look_at_owner(looks, job.lease_owner))


def _cancelling(job: Row[Any]) -> Reason:
    return Reason(
        "cancelling",
        f"it is to be cancelled while it runs: requested {duration(job.cancelling_seconds)} ago, and its relay has not "
        "ended it yet",
        {"cancelling_seconds": job.cancelling_seconds, "pid": job.holder},
        f"Relays answer within seconds. To end its session: outboxq jobs cancel {job.id} --running --force.",
    )


def _session(job: Row[Any]) -> tuple[str, dict[str, Value]]:
    """Describe the session that has locked a job's row: as a phrase, and as the details of a reason."""
    state = job.activity or "its state is hidden"
    name = f", {job.application_name!r}" if job.application_name else ""
    since = "a time that is hidden" if job.held_seconds is None else duration(job.held_seconds)
    details: dict[str, Value] = {
        "pid": job.holder,
        "application_name": job.application_name,
        "state": job.activity,
        "wait_event": None if job.wait_event is None else f"{job.wait_event_type}: {job.wait_event}",
        "seconds": job.held_seconds,
    }
    return f"session {job.holder} ({state}{name}, for {since})", details


def _running(job: Row[Any]) -> Reason:
    session, details = _session(job)
    details["attempt"] = job.attempt + (0 if job.state in LEASED else 1)
    if job.blockers:
        pids = ", ".join(map(str, job.blockers))
        return Reason(
            "running-blocked",
            f"a relay runs it in {session}, which waits for a lock that session {pids} holds",
            {**details, "blocked_by": [str(pid) for pid in job.blockers]},
            f"See what session {pids} does, and have it commit. To end it: SELECT "
            f"pg_terminate_backend({job.blockers[0]});",
        )
    return Reason(
        "running",
        f"a relay runs it in {session}",
        details,
        "Nothing, if its handler takes that long. `outboxq jobs cancel "
        f"{job.id} --running` ends it; timeout_seconds bounds every run.",
    )


def _held_by_session(job: Row[Any]) -> Reason:
    session, details = _session(job)
    return Reason(
        "held-by-session",
        f"its row is locked or deleted by {session}, which is no relay: claims pass over it",
        details,
        "Have that session commit or roll back (if it is a relay on an engine of your own, the job runs). To end it: "
        f"SELECT pg_terminate_backend({job.holder});",
    )


def _prepared(looks: Looks, job: Row[Any]) -> Reason:
    rows = looks.rows("the prepared transactions", prepared_transactions(looks.schema))
    found = next((row for row in rows if row.xid == job.xid), None)
    name = "" if found is None else f" {found.gid!r}, of {duration(found.seconds)} ago"
    return Reason(
        "held-by-prepared-transaction",
        f"its row is locked or deleted by a prepared transaction{name}: claims pass over it",
        {"gid": None if found is None else found.gid, "seconds": None if found is None else found.seconds},
        "Have its coordinator end it. By hand: COMMIT PREPARED or ROLLBACK PREPARED, with its name.",
    )


def _wait_for_connection(job: Row[Any], owner: Row[Any]) -> ConnectionWait | None:
    return next((each.waits for each in decode_running(owner.running) if each.id == job.id), None)


def _leased(job: Row[Any], owner: Row[Any] | None) -> Reason:
    seen_seconds = None if owner is None else float(owner.seen_seconds)
    where = f" ({job.host}, process {job.relay_pid})" if job.host else ""
    details: dict[str, Value] = {
        "relay": str(job.lease_owner),
        "host": job.host,
        "pid": job.relay_pid,
        "lease_seconds": job.lease_seconds,
        "seen_seconds": seen_seconds,
        "attempt": job.attempt,
    }
    lease_seconds = 0.0 if job.lease_seconds is None else float(job.lease_seconds)
    if lease_seconds > 0 and seen_seconds is not None and seen_seconds >= DEAD_SECONDS:
        return Reason(
            "lease-orphaned",
            f"it is leased to relay {job.lease_owner}{where}, which was last seen {duration(seen_seconds)} ago: it "
            f"died, or cannot reach the database; its lease ends in {duration(lease_seconds)}",
            details,
            "A running relay takes the job back when the lease has ended: see that one runs.",
        )
    waits = None if owner is None else _wait_for_connection(job, owner)
    if lease_seconds > 0 and waits is not None:
        return Reason(
            "leased",
            f"relay {job.lease_owner}{where} runs it under a lease of {duration(lease_seconds)} more, which it "
            f"extends, and {duration(seen_seconds or 0.0)} ago its handler waited for a connection: the jobs in the "
            f"slots of its queue share {waits.connections}, and {several(waits.calls, 'job', 'jobs')} of that relay "
            "waited",
            {**details, "waiting_calls": waits.calls, "call_connections": waits.connections},
            f"{MORE_CONNECTIONS} `outboxq jobs cancel {job.id} --running` ends this one.",
        )
    if lease_seconds > 0:
        return Reason(
            "leased",
            f"relay {job.lease_owner}{where} runs it under a lease of {duration(lease_seconds)} more, which it extends",
            details,
            f"Nothing, if its handler takes that long. `outboxq jobs cancel {job.id} --running` ends it.",
        )
    over = "is not known" if job.lease_seconds is None else f"ran out {duration(-job.lease_seconds)} ago"
    return Reason(
        "lease-orphaned",
        f"it is leased to relay {job.lease_owner}{where}, whose lease {over}: it died, or cannot reach the database",
        details,
        "Each running relay takes back the jobs of dead ones within seconds: see that one runs.",
    )
