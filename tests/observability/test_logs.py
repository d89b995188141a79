"""What the relay logs: a line for each record, whatever stands in names and messages."""

import io
import logging
from collections.abc import Iterator
from uuid import UUID

import pytest

from outboxq.events import JobDied, JobRetried, JobsParked
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


def job(kind: str) -> Job:
    rest = dict.fromkeys(set(Job.__struct_fields__) - {"id", "queue", "kind", "attempt"})
    return Job(id=UUID(int=7), queue="q", kind=kind, attempt=1, **rest)  # type: ignore[arg-type]  # the rest is not logged


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
        == "WARNING jobs of unknown kinds were put off: queue=mail-out kinds=ship.order,größe count=2\n"
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
