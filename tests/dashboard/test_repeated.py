"""Texts that repeat what is hidden, or stand for it: errors of jobs and calls, filters in the audit, fingerprints."""

import base64
import json
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outboxq.dashboard import Role, create_app
from outboxq.dashboard.payloads import Payloads
from tests.support.dashboard import as_user, client_of, stage_dashboard
from tests.support.staged import numbered

_SECRET = "hunter2hunter2"
_JOB, _ENTRY = numbered(901), numbered(902)


@pytest.fixture
def staged(engine: Engine) -> Engine:
    stage_dashboard(engine)
    return engine


def _texts(engine: Engine, *paths: str, payloads: Any) -> list[str]:
    """These pages, and their JSON."""
    app = create_app({"orders": engine}, auth=as_user(Role.ADMIN), payloads=payloads)
    with client_of(app) as client:
        answers = [
            client.get(f"/orders/{path}", headers={"accept": accept})
            for path in paths
            for accept in ("text/html", "application/json")
        ]
    assert {each.status_code for each in answers} == {200}
    return [each.text for each in answers]


def _add_failed(engine: Engine, message: str, args: dict[str, Any]) -> None:
    """A job that waits for its next attempt, alone in its queue."""
    error = {"attempt": 1, "at": "2026-01-01T00:00:00Z", "type": "ValueError", "message": message}
    values = {"id": _JOB, "args": json.dumps(args), "errors": json.dumps([error])}
    with engine.begin() as connection:
        connection.execute(text(
            "INSERT INTO outboxq.job (id, queue, kind, args, errors, state, run_at, created_at, attempt) VALUES (:id, "
            "'lonely', 'send', CAST(:args AS jsonb), CAST(:errors AS jsonb), 'scheduled', now() + interval '1 hour', "
            "now(), 1)"), values)  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("payloads", ["redacted", "hidden"])
def test_the_error_of_the_next_job_of_a_queue_is_told_without_its_secrets(payloads: str, staged: Engine) -> None:
    """The queue's page says why its next job waits: an error may repeat a value without any word before it."""
    _add_failed(staged, f"sent {_SECRET} to the bank", {"password": _SECRET})
    told = _texts(staged, "queues/lonely", f"jobs/{_JOB}", payloads=payloads)
    assert [each for each in told if _SECRET in each] == []
    assert all("attempt 1 failed: ValueError" in each for each in told)
    assert _SECRET in "".join(_texts(staged, "queues/lonely", payloads="shown"))


def test_the_error_of_a_job_with_long_arguments_is_not_told(staged: Engine) -> None:
    """On the page of its queue, which does not read them: so what is hidden in them is not known."""
    _add_failed(staged, f"sent {_SECRET}", {"password": _SECRET, "long": "x" * 70_000})
    assert _SECRET not in "".join(_texts(staged, "queues/lonely", payloads="redacted"))


@pytest.mark.first_and_last
@pytest.mark.parametrize("kept", [4, 9, 13])
def test_a_secret_that_was_cut_with_its_text_is_hidden(kept: int, staged: Engine) -> None:
    """The beginning of a hidden value at the end of a text that was cut: of a reason, and of a stored error."""
    message = "x" * (200 - len("ValueError: ") - kept) + _SECRET + "y" * 100
    _add_failed(staged, message, {"password": _SECRET})
    told = _texts(staged, "queues/lonely", f"jobs/{_JOB}", payloads="redacted")
    assert [each for each in told if _SECRET[:4] in each] == []
    assert _SECRET[:4] not in str(Payloads().text("x" * 2_000 + _SECRET[:kept], (_SECRET,)))


def test_what_stands_in_a_url_or_behind_a_word_is_hidden_in_errors_too() -> None:
    """A value that is taken out of a string of the arguments is one of the job's secrets."""
    strings = (f"postgres://bob:{_SECRET}@host/db", f"--token={_SECRET}", f"Authorization: Bearer {_SECRET}")
    for each in (*strings, f'password="{_SECRET}"', f"key: Basic {_SECRET}"):
        assert _SECRET in Payloads().secrets_of(json.dumps({"it": each})), each


@pytest.mark.parametrize("payloads", ["redacted", "hidden"])
def test_the_audit_has_no_part_of_an_error(payloads: str, staged: Engine) -> None:
    """What an operator searched for, on the command line, is a part of a reason; types of errors are shown."""
    wanted = json.dumps({"kind": "send", "reason": f"sent {_SECRET}", "error": f"sent {_SECRET}"})
    typed = json.dumps({"error": "ValueError"})
    with staged.begin() as connection:
        for number, each in enumerate((wanted, typed)):
            connection.execute(text(
                "INSERT INTO outboxq.audit (id, at, actor, via, db_user, action, filter) VALUES (:id, now(), 'anna', "
                "'cli', 'postgres', 'dead.retry', CAST(:filter AS jsonb))"),
                {"id": numbered(902 + number), "filter": each})  # fmt: skip
    told = _texts(staged, f"audit/{_ENTRY}", "audit", "bulk", payloads=payloads)
    assert [each for each in told if _SECRET in each] == []
    assert all("ValueError" in each for each in _texts(staged, f"audit/{numbered(903)}", payloads=payloads))
    assert _SECRET in "".join(_texts(staged, f"audit/{_ENTRY}", payloads="shown"))


@pytest.mark.parametrize("payloads", ["redacted", "hidden"])
def test_a_call_tells_nothing_that_is_hidden_in_its_result(payloads: str, staged: Engine) -> None:
    """Neither by its error, nor by a fingerprint that guesses can be compared with, nor by a body in base64."""
    body = base64.b64encode(json.dumps({"password": _SECRET}).encode()).decode()
    result = json.dumps({"status": 200, "headers": [], "base64": body, "password": _SECRET})
    with staged.begin() as connection:
        connection.execute(text(
            "UPDATE outboxq.effect SET result = CAST(:result AS jsonb), error = :error, fingerprint = sha256('4711') "
            "WHERE status = 'done'"), {"result": result, "error": f"sent {_SECRET}"})  # fmt: skip
        digest = connection.execute(text("SELECT encode(sha256('4711'), 'hex')")).scalar_one()
    page = "effects/stripe-charge/order-1001"
    told = _texts(staged, page, payloads=payloads)
    assert [each for each in told if _SECRET in each or digest in each or body in each] == []
    assert digest in "".join(_texts(staged, page, payloads="shown"))
