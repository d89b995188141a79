"""What the relay logs: a line for each record, whatever stands in names and messages."""

import io
import logging
from collections.abc import Iterator
from uuid import UUID

import psycopg
import pytest

from outboxq.database.errors import describe_error
from outboxq.error_record import ErrorRecord, StoredException, StoredFrame
from outboxq.events import JobCrashed, JobDied, JobRetried, JobsParked, LeaseExtensionFailed
from outboxq.job import Job
from outboxq.observability.logging import LineFormatter, log_event

NASTY = [
    "a\nERROR",
    "a\x1b[31m",
    "a\rb",
    "\x85next",
    "\u2028next",
    "\u202etxet",
    "a b",
    "a'b",
    'a"b',
    "id=5",
    "x,y",
    "",
]


@pytest.fixture
def console() -> Iterator[io.StringIO]:
    """What a terminal would be sent."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("outboxq", "users")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel("DEBUG")
        logger.propagate = False
    yield stream
    for logger, (level, propagate) in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def job(kind: str, headers: str = "{}") -> Job:
    rest = dict.fromkeys(set(Job.__struct_fields__) - {"id", "queue", "kind", "attempt", "headers"})
    return Job(id=UUID(int=7), queue="q", kind=kind, attempt=1, headers=headers, **rest)  # type: ignore[arg-type]  # the rest is not logged


@pytest.mark.parametrize("nasty", NASTY)
def test_an_event_is_one_line_whatever_its_texts_are(nasty: str, console: io.StringIO) -> None:
    """Quoted, so that no text can pass for another field or another record; alone, and in a tuple."""
    log_event(JobRetried(job(nasty), nasty, nasty, (nasty,), 1.0))
    log_event(JobDied(job(nasty), nasty, (nasty, "plain")))
    log_event(JobsParked(nasty, (nasty, nasty), 2))
    text = console.getvalue()
    assert len(text.splitlines()) == 3
    assert all(character.isprintable() for line in text.split("\n") for character in line)
    for line in text.splitlines():
        assert not nasty or f"={nasty!r}" in line
        assert f"={nasty} " not in line


def test_plain_texts_are_not_quoted(console: io.StringIO) -> None:
    """They are read, and searched for."""
    log_event(JobsParked("mail-out", ("ship.order", "größe"), 2))
    assert (
        console.getvalue()
        == "WARNING jobs of unknown or paused kinds were put off: queue=mail-out kinds=ship.order,größe count=2\n"
    )


@pytest.mark.parametrize("nasty", [text for text in NASTY if not text.isprintable()])
def test_a_message_of_ours_is_one_line_with_its_traceback_behind_it(nasty: str, console: io.StringIO) -> None:
    """Whatever the exception says."""
    try:
        raise ValueError(nasty)
    except ValueError:
        logging.getLogger("outboxq.relay").exception("of %s", nasty)
    first, *traceback = console.getvalue().split("\n")
    escaped = nasty.encode("unicode_escape").decode()
    assert first == f"ERROR of {escaped}"
    assert traceback[0] == "Traceback (most recent call last):"
    assert all(line.isprintable() for line in traceback)


def test_messages_of_others_stay_as_they_are(console: io.StringIO) -> None:
    """They may have several lines on purpose."""
    logging.getLogger("users").warning("one\ntwo")
    assert console.getvalue() == "WARNING one\ntwo\n"


def test_no_line_of_a_traceback_can_pass_for_a_record(console: io.StringIO) -> None:
    """Its lines are indented, those of messages too, and nothing in them acts on a terminal."""
    forged = "no\nERROR job moved to the dead letters\x1b[31m\rERROR"
    error = StoredException(type="ValueError", message=forged, notes=("ERROR",), frames=(StoredFrame("a.py", 1, "f"),))
    record = ErrorRecord(1, "ValueError", forged, chain=(error,))
    log_event(JobRetried(job("pay"), "ValueError", forged, (), 1.0, record=record))
    first, *lines = console.getvalue().splitlines()
    assert first.startswith("WARNING job failed and will run again: ")
    assert lines == [
        "  Traceback (most recent call last):",
        '    File "a.py", line 1, in f',
        "  ValueError: no",
        "  ERROR job moved to the dead letters\\x1b[31m\\rERROR",
        "  ERROR",
    ]


def test_a_crash_is_told_without_contradiction(console: io.StringIO) -> None:
    """What happened to the relay, how often, and whether the job is dead now."""
    log_event(JobCrashed(UUID(int=7), "mail", "send", crashes=1, dead_letter=False))
    line = console.getvalue()
    assert "a relay died, stalled or lost its connection while it ran this job: " in line
    assert line.endswith(" crashes=1 dead_letter=False\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a connection was not answered within 30 s", "was not answered within"),
        ("consuming input failed: could not receive data from server: Connection timed out", "Connection timed out"),
        ('connection to "db.internal" as "root:hunter2" failed: SSL connection has been closed', "SSL connection has"),
        ("something with hunter2", "OperationalError"),
    ],
)
def test_an_error_of_the_database_has_its_reason_and_no_secret(text: str, said: str, console: io.StringIO) -> None:
    """In words that are known; the rest of a driver's text may hold a host, a user or a password."""
    log_event(LeaseExtensionFailed(describe_error(psycopg.OperationalError(text))))
    line = console.getvalue()
    assert said in line
    assert "hunter2" not in line
