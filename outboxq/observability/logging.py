"""The default logging of events: constant messages, with fields in `extra` and in the text, without jobs' arguments.

Two formatters print the records, and those of the application: `LineFormatter` for people, `JsonFormatter` for
programs.
"""

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from textwrap import dedent
from types import TracebackType
from typing import TypeAlias

import msgspec

from outboxq import events
from outboxq.codec.text import escaped_json, printable
from outboxq.events import Event
from outboxq.job import Job, trace_id_of

logger = logging.getLogger("outboxq.relay")

_ExceptionInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_BARE = re.compile(r"[\w.:/@%+-]+")
# Attributes that every record has; all others of a record were given as `extra`.
_OF_EVERY_RECORD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
_EVENT, _TRACE = "outboxq_event", "trace_id"
_EVENT_MESSAGE = "%s: %s"
_INDENT = "  "
# All loggers of the package, some of which are made at their first use.
_NAMES = tuple(
    f"outboxq.{name}"
    for name in (
        "audit", "chores", "dashboard", "effects", "handler", "history", "hooks", "http", "lease", "listener",
        "metrics", "otel", "pruner", "relay", "scheduler", "upkeep",
    )
)  # fmt: skip
_MESSAGES: dict[type[Event], tuple[int, str]] = {
    events.JobDone: (logging.DEBUG, "job done"),
    events.JobRetried: (logging.WARNING, "job failed and will run again"),
    events.JobDied: (logging.ERROR, "job moved to the dead letters"),
    events.JobSnoozed: (logging.INFO, "job snoozed"),
    events.JobDiscarded: (logging.INFO, "job discarded"),
    events.JobCancelled: (logging.INFO, "job cancelled"),
    events.JobExpired: (logging.INFO, "job expired"),
    events.JobsCoalesced: (logging.DEBUG, "jobs with the same key were run as one"),
    events.FollowerSuppressed: (logging.WARNING, "job is done, the next of its chain was not added: its key is taken"),
    events.JobsClaimed: (logging.DEBUG, "jobs were claimed"),
    events.ClaimsEmpty: (logging.DEBUG, "claims found no job"),
    events.ClaimsFailed: (logging.DEBUG, "claims failed"),
    events.EffectCalled: (logging.DEBUG, "effect was requested"),
    events.MessageSeen: (logging.DEBUG, "message was seen"),
    events.JobsEnqueued: (logging.DEBUG, "jobs were enqueued"),
    events.JobsParked: (logging.WARNING, "jobs of unknown or paused kinds were put off"),
    events.JobsSuspected: (logging.WARNING, "jobs whose claim died will run alone"),
    events.JobCrashed: (logging.ERROR, "a relay died, stalled or lost its connection while it ran this job"),
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
    events.BatchFinished: (logging.INFO, "batch has ended, its callback was added"),
    events.DeadLettersPruned: (logging.INFO, "dead letters were deleted, because their time had ended"),
    events.Pruned: (logging.DEBUG, "expired messages, effects, unique keys and finished jobs were deleted"),
    events.IndexRebuilt: (logging.INFO, "index of the queue was built again"),
    events.ScheduleFired: (logging.INFO, "schedule was due and its job was added"),
    events.ChildDied: (logging.ERROR, "relay process died, starting another"),
    events.ChildStuck: (logging.ERROR, "relay process had a handler that could not be freed, starting another"),
    events.ChildUnresponsive: (logging.ERROR, "relay process shows no life, killing it"),
    events.ChildStopTimedOut: (logging.ERROR, "relay process does not come to its end, killing it"),
}


class EventLog:
    """A hook that writes a log record of each event to the logger `outboxq.relay`.

    Args:
        tracebacks: True if the record of a failed attempt has its traceback, redacted as in the database.
    """

    def __init__(self, *, tracebacks: bool = True) -> None:
        self._tracebacks = tracebacks

    def __call__(self, event: Event) -> None:
        """Log the event."""
        log_event(event, tracebacks=self._tracebacks)

    def use_of(self, kind: type[Event]) -> Callable[[], bool]:
        """Return a function; it returns True if the logger's current level lets a record of this kind of event through.

        While it returns False, the relay need not make such events.
        """
        return partial(logger.isEnabledFor, _MESSAGES[kind][0])


def log_event(event: Event, *, tracebacks: bool = True) -> None:
    """Write a log record of an event to the logger `outboxq.relay`. The function can itself be used as a hook.

    Args:
        tracebacks: True if the record of a failed attempt has its traceback, redacted as in the database.
    """
    level, message = _MESSAGES[type(event)]
    if not logger.isEnabledFor(level):
        return
    extra: dict[str, object] = {}
    said: dict[str, object] = {}
    for name, value in event_fields(event).items():
        extra[f"outboxq_{name}"] = value
        says_nothing = value in ("", ()) or (value == 0 and name.startswith(("hook_", "call_")))
        if not says_nothing:
            said[name] = value
    extra[_EVENT] = type(event).__name__
    job = getattr(event, "job", None)
    trace_id = trace_id_of(job.headers) if isinstance(job, Job) else None
    if trace_id is not None:
        extra[_TRACE] = trace_id
    record = logger.makeRecord(
        logger.name, level, __file__, 0, _EVENT_MESSAGE, (message, _shown(said)), None, "log_event", extra
    )
    if tracebacks and isinstance(event, events.JobRetried | events.JobDied) and event.record is not None:
        # Formatters print this after the message, like an exception's own traceback. Indented, so that no line of an
        # error's text can look like a line of the log.
        lines = event.record.traceback().split("\n") if event.record.chain else ()
        record.exc_text = "\n".join([f"{_INDENT}{printable(line)}".rstrip() for line in lines]) or None
    logger.handle(record)


def _in_utc(record: logging.LogRecord) -> str:
    """Format the record's time as RFC 3339 does: 2026-01-31T08:00:00.123Z."""
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def keep_loggers_enabled() -> None:
    """Keep outboxq's existing loggers from being disabled from now on; the first attempt to do so is logged.

    This is for `outboxq relay`, whose log is outboxq's own: `logging.config.fileConfig`, which Alembic's env.py calls,
    disables all loggers that it does not name.
    """
    for name in _NAMES:
        logging.getLogger(name)
    for name, found in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "outboxq" and isinstance(found, logging.Logger):
            found.disabled = False
            # A class, because `disabled` is an attribute that logging sets and reads itself.
            if not isinstance(found, _Kept):
                found.__class__ = type("KeptLogger", (_Kept, type(found)), {})


class _Kept:
    """A base class for loggers that cannot be disabled."""

    # The first attempt takes this lock and keeps it.
    _said = threading.Lock()

    @property
    def disabled(self) -> bool:
        """Always False; setting it to True is ignored, and logged once."""
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        if value and self._said.acquire(blocking=False):
            logger.warning(
                "the application configures logging so that existing loggers are disabled: outboxq's stay enabled "
                "(disable_existing_loggers=False keeps the others too)"
            )


class LineFormatter(logging.Formatter):
    """Formats a record of outboxq in one line, apart from a traceback, without characters that act on a terminal."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # the name that logging calls
        """Format the time in UTC."""
        return super().formatTime(record, datefmt) if datefmt else _in_utc(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name that logging calls
        """Make a message of outboxq printable; leave messages of other loggers unchanged.

        The job's kind and id are appended to a message that a handler has written to `ctx.log`.
        """
        if record.name.partition(".")[0] != "outboxq":
            return super().formatMessage(record)
        kind, job_id = getattr(record, "job_kind", None), getattr(record, "job_id", None)
        if kind is not None and job_id is not None:
            # A record of `ctx.log`, whose message is the handler's.
            record.message = f"{record.message}: {_shown({'kind': kind, 'id': job_id})}"
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExceptionInfo) -> str:  # noqa: N802  # the name that logging calls
        """Make each line of a traceback printable."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


class JsonFormatter(logging.Formatter):
    """Formats every record, of any logger, as one JSON object in one line.

    Its keys: `timestamp`, `level`, `logger`, `process`, `message`; `event`, the name of the class, if one of outboxq's
    events is logged; `fields`, with their types, if the record has an `extra`; `trace_id` and `traceback`, if it has
    them. A value that JSON cannot represent is written as its text.

    Args:
        database: Added as `database`, if there are several.
    """

    def __init__(self, database: str | None = None) -> None:
        super().__init__()
        self._database = database

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as a line."""
        extra = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        event, trace = extra.pop(_EVENT, None), extra.pop(_TRACE, None)
        fields = {name.removeprefix("outboxq_") if event else name: value for name, value in extra.items()}
        said = {
            "timestamp": _in_utc(record),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "database": self._database,
            "event": event,
            "message": _message_of(record),
            "fields": {name: _as_json(value) for name, value in fields.items()},
            "trace_id": trace,
            "traceback": self._traceback_of(record),
        }
        shown = {name: _as_json(value) for name, value in said.items() if value not in (None, {})}
        return escaped_json(msgspec.json.encode(shown).decode())

    def _traceback_of(self, record: logging.LogRecord) -> str | None:
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        stack = self.formatStack(record.stack_info) if record.stack_info else None
        # The text is indented for lines of text, which a message could imitate.
        return dedent("\n".join(filter(None, (record.exc_text, stack)))) or None


def _message_of(record: logging.LogRecord) -> str:
    if hasattr(record, _EVENT) and record.msg == _EVENT_MESSAGE and isinstance(record.args, tuple):
        # The details after it are in the fields.
        return str(record.args[0])
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001  # users' objects, and texts that their arguments do not fit
        return str(record.msg)


def _as_json(value: object) -> msgspec.Raw:
    """Return the JSON of a value, or of `str(value)` if JSON cannot represent the value."""
    try:
        return msgspec.Raw(msgspec.json.encode(value, enc_hook=_text_of))
    except Exception:  # noqa: BLE001  # lone surrogates, keys and depths that JSON does not know, users' objects
        return msgspec.Raw(msgspec.json.encode(_text_of(value)))


def _text_of(value: object) -> str:
    try:
        return str(value).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001  # a record is written even if users' objects raise
        return f"({type(value).__name__}, which has no text)"


def event_fields(event: Event) -> dict[str, object]:
    """Return the event's fields, with the job's kind, queue, id and attempt in place of the job, and no exception."""
    found: dict[str, object] = {}
    for field in fields(event):
        if field.name in ("exception", "record"):
            continue
        value = getattr(event, field.name)
        if isinstance(value, Job):
            found |= {"kind": value.kind, "queue": value.queue, "id": str(value.id), "attempt": value.attempt}
            found["waited_seconds"] = value.waited_seconds
        else:
            found[field.name] = value
    return found


def _shown(values: dict[str, object]) -> str:
    """Write the values in one line, as `name=value`.

    A value is quoted if it could be taken for another one, or could act on a terminal.
    """
    shown: list[str] = []
    for name, value in values.items():
        texts: list[str] = []
        for each in value if isinstance(value, tuple) else (value,):
            text = f"{each:.3g}" if isinstance(each, float) else str(each)
            texts.append(text if _BARE.fullmatch(text) else repr(text))
        shown.append(f"{name}={','.join(texts)}")
    return " ".join(shown)
