"""`JsonFormatter`: every record is one JSON object in one line, whatever stands in it."""

import io
import json
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from outboxq.error_record import ErrorRecord, StoredException, StoredFrame
from outboxq.events import IndexRebuilt, JobDied, JobRetried, JobsParked, RelayStarted
from outboxq.handlers.context import JobLogger
from outboxq.job import Job
from outboxq.observability.logging import JsonFormatter, LineFormatter, log_event
from outboxq.relay.hook_thread import HookThread
from outboxq.relay.limits import HookLimits

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def job(headers: str = "{}") -> Job:
    return Job(
        id=UUID(int=7), queue="q", kind="k", args='{"secret": 1}', headers=headers, priority=0, attempt=2,
        max_attempts=None, crashes=0, parked=0, unique_key=None, group_key=None, errors="[]",
        run_at=datetime.now(UTC), created_at=datetime.now(UTC), seq=1,
    )  # fmt: skip


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What every logger writes, through the formatter."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root, before = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel("DEBUG")
    yield stream
    root.removeHandler(handler)
    root.setLevel(before)


def only(lines: io.StringIO) -> dict[str, Any]:
    """The one record that was written."""
    text = lines.getvalue()
    assert text.count("\n") == len(text.splitlines()) == 1
    assert text.rstrip("\n").isprintable()
    found: dict[str, Any] = json.loads(text)
    return found


def test_an_event_has_its_class_and_its_fields(lines: io.StringIO) -> None:
    """Each field with its type; the message is the constant one; the time is UTC."""
    log_event(JobRetried(job(), "ValueError", "boom", ("jobs.py:3 in k", "x.py:1 in y"), 1.5))
    said = only(lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said.pop("timestamp"))
    assert isinstance(said.pop("process"), int)
    assert said == {
        "level": "WARNING",
        "logger": "outboxq.relay",
        "event": "JobRetried",
        "message": "job failed and will run again",
        "fields": {
            "kind": "k", "queue": "q", "id": str(UUID(int=7)), "attempt": 2, "error_type": "ValueError",
            "message": "boom", "where": ["jobs.py:3 in k", "x.py:1 in y"], "delay_seconds": 1.5,
            "seconds": 0.0, "waited_seconds": 0.0,
        },
    }  # fmt: skip


def test_events_without_a_job_too(lines: io.StringIO) -> None:
    """Numbers are numbers, and tuples are arrays."""
    log_event(RelayStarted(("a", "b"), 4, 6))
    log_event(IndexRebuilt("job_ready", 10, 5))
    log_event(JobsParked("q", (), 1))
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [each["event"] for each in said] == ["RelayStarted", "IndexRebuilt", "JobsParked"]
    assert said[0]["fields"] == {
        "queues": ["a", "b"], "slots": 4, "connections": 6, "call_slots": 0, "call_connections": 0,
    }  # fmt: skip
    assert said[1]["fields"] == {"index": "job_ready", "bytes_before": 10, "bytes_after": 5}
    assert said[2]["fields"] == {"queue": "q", "kinds": [], "count": 1}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"traceparent": TRACEPARENT}, TRACE),
        ({"traceparent": f"cc-{TRACE}-b7ad6b7169203331-01-what-comes-later"}, TRACE),
        ({"traceparent": f"ff-{TRACE}-b7ad6b7169203331-01"}, None),
        ({"traceparent": f"00-{'0' * 32}-b7ad6b7169203331-01"}, None),
        ({"traceparent": f"00-{TRACE}-{'0' * 16}-01"}, None),
        ({"traceparent": TRACEPARENT.upper()}, None),
        ({"traceparent": "secret"}, None),
        ({"traceparent": 7}, None),
        ({"other": TRACEPARENT}, None),
    ],
)
def test_the_trace_is_that_of_the_jobs_header(
    headers: dict[str, object], expected: str | None, lines: io.StringIO
) -> None:
    """By W3C Trace Context, of events and of what the handler logs; what is not valid is left out."""
    traced = job(json.dumps(headers))
    log_event(JobDied(traced, "gave up"))
    JobLogger(traced).warning("from the handler")
    event, handlers = map(json.loads, lines.getvalue().splitlines())
    assert event.get("trace_id") == handlers.get("trace_id") == expected
    assert handlers["fields"] == {"job_id": str(UUID(int=7)), "job_kind": "k", "job_queue": "q", "job_attempt": 2}
    assert "secret" not in lines.getvalue()


def test_a_failed_attempt_has_its_traceback_as_a_field(lines: io.StringIO) -> None:
    """As it is stored: redacted, with the files and lines of each frame."""
    chain = (StoredException(type="ValueError", message="boom <name>", frames=(StoredFrame("jobs.py", 3, "k"),)),)
    log_event(JobDied(job(), "gave up", record=ErrorRecord(2, "ValueError", "boom <name>", chain=chain)))
    assert only(lines)["traceback"] == (
        'Traceback (most recent call last):\n  File "jobs.py", line 3, in k\nValueError: boom <name>'
    )


def test_the_applications_records_are_json_too(lines: io.StringIO) -> None:
    """With what they were given as extra, and their exception."""
    try:
        raise KeyError("setting")
    except KeyError:
        logging.getLogger("myapp").exception("paid %d of %s", 5, "order", extra={"order_id": 7, "tags": {"a", "b"}})
    said = only(lines)
    assert (said["logger"], said["level"], said["message"]) == ("myapp", "ERROR", "paid 5 of order")
    assert said["fields"]["order_id"] == 7
    assert sorted(said["fields"]["tags"]) == ["a", "b"]
    assert said["traceback"].endswith("KeyError: 'setting'")
    assert "event" not in said


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (2**80, 2**80),
        (UUID(int=1), str(UUID(int=1))),
        (object, "<class 'object'>"),
        ("\ud800", "\\ud800"),
        ({1: "one"}, {"1": "one"}),
        (Unprintable(), "(Unprintable, which has no text)"),
        ("a\nb\x1b[31m\x9b\u2028", "a\nb\x1b[31m\x9b\u2028"),
        ("größe 漢字", "größe 漢字"),
    ],
    ids=["nan", "big", "uuid", "class", "surrogate", "int key", "no text", "controls", "letters"],
)
def test_whatever_json_does_not_know_is_text(value: object, expected: object, lines: io.StringIO) -> None:
    """A record is written as one printable line, whatever its extra holds."""
    logging.getLogger("myapp").info("said", extra={"value": value})
    assert only(lines)["fields"] == {"value": expected}


def test_a_message_whose_arguments_do_not_fit_is_written() -> None:
    """As it stands, without them."""
    record = logging.LogRecord("myapp", logging.INFO, __file__, 1, "paid %d of %d", (1,), None)
    assert json.loads(JsonFormatter().format(record))["message"] == "paid %d of %d"


def test_a_deep_value_is_text(lines: io.StringIO) -> None:
    """One that refers to itself, too."""
    deep: list[object] = []
    deep.append(deep)
    logging.getLogger("myapp").info("said", extra={"value": deep})
    assert only(lines)["fields"] == {"value": "[[...]]"}


def test_a_line_of_the_contexts_log_names_its_job_in_the_text_too(lines: io.StringIO) -> None:
    """Behind the handler's own message, which cannot pass for it; a line of the application's own stays as it is."""
    root = logging.getLogger()
    (handler,) = [each for each in root.handlers if isinstance(each.formatter, JsonFormatter)]
    handler.setFormatter(LineFormatter("%(levelname)s %(message)s"))
    JobLogger(job()).info("sent %d\nmails", 3)
    logging.getLogger("app").info("sent", extra={"job_kind": "k", "job_id": "7"})
    assert lines.getvalue().splitlines() == [f"INFO sent 3\\nmails: kind=k id={UUID(int=7)}", "INFO sent"]


def test_times_of_text_lines_are_utc_with_a_zone() -> None:
    """Whatever the machine's zone is."""
    record = logging.makeLogRecord({"created": 1_769_860_800.25, "msg": "x", "levelname": "INFO", "name": "a"})
    assert LineFormatter("%(asctime)s %(levelname)s").format(record) == "2026-01-31T12:00:00.250Z INFO"


def test_a_hook_that_failed_is_logged_and_counts_as_no_event(lines: io.StringIO) -> None:
    """The hook, the event that it was told, and its traceback; what counts lines by `event` does not count it twice."""
    try:
        raise ValueError("in a hook")
    except ValueError:
        HookThread((), HookLimits()).report(only, IndexRebuilt("job_ready", 10, 5))
    said = only(lines)
    assert said["message"] == f"a hook failed: hook={__name__}.only event=IndexRebuilt"
    assert "event" not in said
    assert said["fields"] == {"outboxq_hook": f"{__name__}.only", "outboxq_hook_event": "IndexRebuilt"}
    assert said["traceback"].endswith("ValueError: in a hook")


def test_a_record_with_the_name_of_our_field_is_written_as_well(lines: io.StringIO) -> None:
    """Also without arguments behind its message."""
    logging.getLogger("app").info("all is well", extra={"outboxq_event": "Mine"})
    assert only(lines)["message"] == "all is well"
