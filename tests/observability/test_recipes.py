"""The recipes of `docs/recipes-observability.md`, run as they stand there, by `outboxq relay`."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, external
from outboxq.postgres import Database
from tests.execution.test_installed_application import CANARY, FAILURES
from tests.support.cli import REPOSITORY, Outcome, run
from tests.support.ledger import waiting

PAGE = REPOSITORY / "docs/recipes-observability.md"
SHOP = REPOSITORY / "tests/support/installed_app"

# Sentry writes what it would send into a file, one line for each item.
COLLECTING = """
import json, os
import sentry_sdk
from sentry_sdk.transport import Transport
from shopworks.jobs import jobs


class Collecting(Transport):
    def capture_envelope(self, envelope):
        for item in envelope.items:
            line = json.dumps({"type": item.type, **(item.payload.json or {})}, default=str) + "\\n"
            file = os.open(os.environ["COLLECTED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line.encode())
            os.close(file)


sentry_sdk.init("https://key@localhost/1", transport=Collecting, traces_sample_rate=1.0)
"""
LOGGING = """
import asyncio, logging
import structlog
from outboxq import AsyncContext, Backoff, Context, Jobs

jobs = Jobs()


@jobs.handler(queue="q", retry=Backoff(max_attempts=1))
def charge(ctx: Context, cents: int) -> None:
    structlog.get_logger("shop").info("charging", cents=cents)
    logging.getLogger("library").warning("slow")
    raise ValueError(f"no {cents}")


@jobs.handler(queue="async-q")
async def mail(ctx: AsyncContext) -> None:
    await asyncio.sleep(0)
    logging.getLogger("library").warning("sent")
"""


def code_of(recipe: str) -> str:
    """The code of a recipe, as the page has it."""
    (found,) = re.findall(rf"<!-- recipe: {recipe} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


Application = Callable[..., Outcome]


@pytest.fixture
def application(tmp_path: Path, outboxq_database: Database, fresh_processes: None) -> Application:
    """Drains with an application of these handlers and recipes, in processes of their own."""

    def drain(jobs: str, *recipes: str, processes: int = 1, env: Mapping[str, str] | None = None) -> Outcome:
        package = tmp_path / "myapp"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "jobs.py").write_text(jobs)
        (package / "observability.py").write_text("\n\n".join(map(code_of, recipes)))
        path = ":".join(map(str, (REPOSITORY, SHOP, tmp_path)))
        return run(
            *("relay", "myapp.observability:jobs", "--drain", "--processes", processes),
            url=outboxq_database.url,
            env={"PYTHONPATH": path, **(env or {})},
        ).ok()

    return drain


@pytest.mark.wide
def test_sentry_is_told_each_failure_once_with_its_file_line_function_and_error(
    tmp_path: Path, application: Application, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """A failing handler of each sort, in two processes; and each call has a transaction with its job's tags."""
    with sessions.begin() as session:
        for kind in FAILURES:
            queue = {"awaited": "async-shop", "hanging": "async-shop", "batched": "shop-batches"}.get(kind, "shop")
            session.add_job(external(kind, queue=queue), card=CANARY)
    collected = tmp_path / "collected"
    application(COLLECTING, "sentry", "sentry-around", processes=2, env={"COLLECTED": str(collected)})
    assert waiting(engine) == 0
    items = [json.loads(line) for line in collected.read_text().splitlines()]
    errors = [item for item in items if item["type"] == "event"]
    assert sorted(error["tags"]["job.kind"] for error in errors) == sorted(FAILURES)
    for error in errors:
        function, file, text = FAILURES[error["tags"]["job.kind"]]
        assert error["level"] == "error"
        assert error["tags"]["job.attempt"] == 1
        raised = error["exception"]["values"]
        named = text.partition(": ")[0]
        assert any(named in value["type"] or text in value["value"] for value in raised)
        assert f"in {function}" in error["contexts"]["job"]["traceback"]
        assert f'{file}", line ' in error["contexts"]["job"]["traceback"]
        frames = [frame for value in raised for frame in value.get("stacktrace", {}).get("frames", ())]
        found = [frame for frame in frames if frame["function"] == function and file in frame["abs_path"]]
        # What was cut off from outside has raised nothing.
        assert all(frame["lineno"] > 0 for frame in found)
        assert found or error["tags"]["job.kind"] == "stuck"
    transactions = [item for item in items if item["type"] == "transaction"]
    assert {item["transaction"] for item in transactions} >= set(FAILURES) - {"stuck"}
    assert all(item["tags"]["job.kind"] == item["transaction"] for item in transactions)


def lines_of(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in outcome.stderr.splitlines()]


@pytest.mark.wide
def test_structlog_names_the_job_in_each_line_of_its_call(
    application: Application, sessions: sessionmaker[OutboxSession]
) -> None:
    """Also in those of the standard library; the relay's own lines have their fields, and their traceback."""
    with sessions.begin() as session:
        session.add_job(external("charge", queue="q"), cents=4711)
        session.add_job(external("mail", queue="async-q"))
    lines = lines_of(application(LOGGING, "structlog"))
    by_text = {line["event"].partition(":")[0]: line for line in lines}
    for text, kind in (("charging", "charge"), ("slow", "charge"), ("sent", "mail")):
        assert by_text[text]["job_kind"] == kind
        assert by_text[text]["job_attempt"] == 1
        assert by_text[text]["job_id"]
        assert by_text[text]["timestamp"]
    assert by_text["charging"]["cents"] == 4711
    assert by_text["charging"]["logger"] == "shop"
    died = by_text["job moved to the dead letters"]
    assert (died["outboxq_kind"], died["outboxq_error_type"], died["level"]) == ("charge", "ValueError", "error")
    assert died["outboxq_id"] == by_text["charging"]["job_id"]
    assert "ValueError: no <cents>" in died["exception"]
    # Behind the call nothing of it is bound any more.
    assert "job_kind" not in died


@pytest.mark.wide
def test_a_filter_names_the_job_in_each_line_of_its_call(
    application: Application, sessions: sessionmaker[OutboxSession]
) -> None:
    """With the standard library alone, for sync and async handlers."""
    with sessions.begin() as session:
        session.add_job(external("charge", queue="q"), cents=4711)
        session.add_job(external("mail", queue="async-q"))
    lines = application(LOGGING, "logging").stderr.splitlines()
    assert "charge: slow" in lines
    assert "mail: sent" in lines
    assert any(line.startswith("-: job moved to the dead letters") for line in lines)
