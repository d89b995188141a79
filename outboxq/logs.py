"""The default logging of events: a constant message each, fields in `extra` and behind the message, no payload."""

import logging
from dataclasses import fields

from outboxq.events import (
    BatchRolledBack,
    ChildDied,
    DatabaseBack,
    DatabaseLost,
    Event,
    JobDied,
    JobDiscarded,
    JobDone,
    JobRetried,
    JobSnoozed,
    JobsParked,
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
    RelayStarted: (logging.INFO, "relay started"),
    RelayStopping: (logging.INFO, "relay is stopping"),
    RelayStopped: (logging.INFO, "relay stopped"),
    DatabaseLost: (logging.WARNING, "database cannot be reached, trying again"),
    DatabaseBack: (logging.INFO, "database is back"),
    BatchRolledBack: (logging.ERROR, "batch was rolled back, its jobs wait again"),
    ChildDied: (logging.ERROR, "relay process died, starting another"),
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
