"""The default logging of events: a constant message each, fields in `extra` and behind the message, no payload."""

import logging
from dataclasses import fields

from outboxq.events import (
    BatchRolledBack,
    ChildDied,
    ChildLingers,
    ChildSilent,
    ChildStuck,
    DatabaseBack,
    DatabaseLost,
    Event,
    IndexRebuilt,
    JobCrashed,
    JobDied,
    JobDiscarded,
    JobDone,
    JobInterrupted,
    JobLeaseLost,
    JobRetried,
    JobSnoozed,
    JobsParked,
    JobsSuspected,
    LeaseExtensionFailed,
    Pruned,
    RelayStarted,
    RelayStopped,
    RelayStopping,
)
from outboxq.job import Job

logger = logging.getLogger("outboxq.relay")

_MESSAGES: dict[type[Event], tuple[int, str]] = {
    JobDone: (logging.DEBUG, "job done"),
    JobRetried: (logging.WARNING, "job failed and will run again"),
    JobDied: (logging.ERROR, "job moved to the dead letters"),
    JobSnoozed: (logging.INFO, "job snoozed"),
    JobDiscarded: (logging.INFO, "job discarded"),
    JobsParked: (logging.WARNING, "jobs of unknown kinds were put off"),
    JobsSuspected: (logging.WARNING, "jobs whose claim died will run alone"),
    JobCrashed: (logging.ERROR, "job was taken from a relay that died or stalled"),
    JobLeaseLost: (logging.ERROR, "lease was lost while the job ran, its rows were rolled back"),
    JobInterrupted: (logging.WARNING, "job did not end in time and was rolled back, it waits again"),
    LeaseExtensionFailed: (logging.ERROR, "lease could not be extended"),
    RelayStarted: (logging.INFO, "relay started"),
    RelayStopping: (logging.INFO, "relay is stopping"),
    RelayStopped: (logging.INFO, "relay stopped"),
    DatabaseLost: (logging.WARNING, "database cannot be reached, trying again"),
    DatabaseBack: (logging.INFO, "database is back"),
    BatchRolledBack: (logging.ERROR, "batch was rolled back, its jobs wait again"),
    Pruned: (logging.DEBUG, "expired messages and effects were deleted"),
    IndexRebuilt: (logging.INFO, "index of the queue was built again"),
    ChildDied: (logging.ERROR, "relay process died, starting another"),
    ChildStuck: (logging.ERROR, "relay process had a handler that could not be freed, starting another"),
    ChildSilent: (logging.ERROR, "relay process shows no life, killing it"),
    ChildLingers: (logging.ERROR, "relay process does not come to its end, killing it"),
}


def log_event(event: Event) -> None:
    """A hook: one log record per event, on the logger `outboxq.relay`."""
    level, message = _MESSAGES[type(event)]
    if not logger.isEnabledFor(level):
        return
    values = event_fields(event)
    detail = " ".join(f"{name}={_shown(value)}" for name, value in values.items() if value not in ("", ()))
    logger.log(level, "%s: %s", message, detail, extra={f"outboxq_{name}": value for name, value in values.items()})


def event_fields(event: Event) -> dict[str, object]:
    """The event's fields, its job replaced by the job's name, queue, id and attempt."""
    found: dict[str, object] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        if isinstance(value, Job):
            found |= {"kind": value.kind, "queue": value.queue, "id": str(value.id), "attempt": value.attempt}
        else:
            found[field.name] = value
    return found


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    text = str(value)
    return repr(text) if " " in text else text
