"""The default logging of events: a constant message each, fields in `extra` and behind the message, no payload."""

import logging
import re
from dataclasses import fields
from types import TracebackType
from typing import TypeAlias

from outboxq import events
from outboxq.codec.text import printable
from outboxq.events import Event
from outboxq.job import Job

logger = logging.getLogger("outboxq.relay")

_ExceptionInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_BARE = re.compile(r"[\w.:/@%+-]+")
_MESSAGES: dict[type[Event], tuple[int, str]] = {
    events.JobDone: (logging.DEBUG, "job done"),
    events.JobRetried: (logging.WARNING, "job failed and will run again"),
    events.JobDied: (logging.ERROR, "job moved to the dead letters"),
    events.JobSnoozed: (logging.INFO, "job snoozed"),
    events.JobDiscarded: (logging.INFO, "job discarded"),
    events.JobsParked: (logging.WARNING, "jobs of unknown kinds were put off"),
    events.JobsSuspected: (logging.WARNING, "jobs whose claim died will run alone"),
    events.JobCrashed: (logging.ERROR, "job was taken from a relay that died or stalled"),
    events.JobSetAside: (logging.ERROR, "job could not be claimed and was moved to the dead letters"),
    events.JobLeaseLost: (logging.ERROR, "lease was lost while the job ran, its rows were rolled back"),
    events.JobInterrupted: (logging.WARNING, "job did not end in time and was rolled back, it waits again"),
    events.LeaseExtensionFailed: (logging.ERROR, "lease could not be extended"),
    events.RelayStarted: (logging.INFO, "relay started"),
    events.RelayStopping: (logging.INFO, "relay is stopping"),
    events.RelayStopped: (logging.INFO, "relay stopped"),
    events.DatabaseLost: (logging.WARNING, "database cannot be reached, trying again"),
    events.DatabaseBack: (logging.INFO, "database is back"),
    events.BatchRolledBack: (logging.ERROR, "batch was rolled back, its jobs wait again"),
    events.Pruned: (logging.DEBUG, "expired messages and effects were deleted"),
    events.IndexRebuilt: (logging.INFO, "index of the queue was built again"),
    events.ChildDied: (logging.ERROR, "relay process died, starting another"),
    events.ChildStuck: (logging.ERROR, "relay process had a handler that could not be freed, starting another"),
    events.ChildUnresponsive: (logging.ERROR, "relay process shows no life, killing it"),
    events.ChildStopTimedOut: (logging.ERROR, "relay process does not come to its end, killing it"),
}


def log_event(event: Event) -> None:
    """A hook: one log record per event, on the logger `outboxq.relay`."""
    level, message = _MESSAGES[type(event)]
    if not logger.isEnabledFor(level):
        return
    values = event_fields(event)
    detail = " ".join(f"{name}={_shown(value)}" for name, value in values.items() if value not in ("", ()))
    logger.log(level, "%s: %s", message, detail, extra={f"outboxq_{name}": value for name, value in values.items()})


class LineFormatter(logging.Formatter):
    """Formats a record of ours in one line, apart from a traceback, without anything that a terminal would act on."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name that logging calls
        """Make a message of ours printable; those of other loggers stay as they are."""
        text = super().formatMessage(record)
        return printable(text) if record.name.partition(".")[0] == "outboxq" else text

    def formatException(self, ei: _ExceptionInfo) -> str:  # noqa: N802  # the name that logging calls
        """Make each line of a traceback printable."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


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
        return ",".join(map(_shown, value))
    text = str(value)
    # Quoted, nothing in it can pass for another field or another line, nor act on a terminal.
    return text if _BARE.fullmatch(text) else repr(text)
