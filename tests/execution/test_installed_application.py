"""A failure can be diagnosed where the application is installed: by the dead letter, by the log, and by a hook."""

import importlib
import logging
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, Relay, RelayConfig
from outboxq.events import Event, JobDied
from outboxq.observability.logging import log_event
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from outboxq.tables import dead_job
from tests.support.cli import call
from tests.support.limits import with_limits

APPLICATION = Path(__file__).parents[1] / "support" / "installed_app"
CANARY = "4111-1111-canary"
# The slice that a handler makes of it, which redaction cannot know, but PostgreSQL quotes in DETAIL only.
IN_DETAIL = CANARY[:12] + "!"

# By kind: the function that failed, the line's text, and the error.
FAILURES = {
    "plain": ("check", "shopcore/__init__.py", "ValueError: card <card> was refused"),
    "chained": ("chained", "shopworks/jobs.py", "RuntimeError: the payment failed"),
    "grouped": ("grouped", "shopworks/jobs.py", "ExceptionGroup: both cards failed (2 sub-exceptions)"),
    "awaited": ("check", "shopcore/__init__.py", "ValueError: card <card> was refused"),
    "batched": ("check", "shopcore/__init__.py", "ValueError: card <card> was refused"),
    "refused": ("refused", "shopworks/jobs.py", 'duplicate key value violates unique constraint "paid_card_key"'),
    "slow_statement": ("slow_statement", "shopworks/jobs.py", "HandlerTimedOut"),
    "stuck": ("stuck", "shopworks/jobs.py", "HandlerTimedOut"),
    "hanging": ("hanging", "shopworks/jobs.py", "HandlerTimedOut"),
}


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The application, installed by pip into a folder of the name that Python gives to it."""
    folder = tmp_path_factory.mktemp("image") / "site-packages"
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    source = tmp_path_factory.mktemp("source")
    subprocess.run(["cp", "-r", f"{APPLICATION}/.", source], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", folder, source], check=True)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("shopworks.jobs")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("shopworks", "shopcore")]:
            del sys.modules[name]


@pytest.fixture
def told() -> dict[str, str]:
    """What a service that collects errors is told of each failure, by kind."""
    return {}


@pytest.fixture
def failed(
    application: ModuleType,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    told: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> dict[str, str]:
    """Runs each handler once; the ids of their dead letters, by kind."""

    def collect(event: Event) -> None:
        if isinstance(event, JobDied):
            assert event.exception is not None
            told[event.job.kind] = "".join(traceback.format_exception(event.exception))
            assert event.error_type
            assert event.message

    with sessions.begin() as session:
        handles = [session.add_job(getattr(application, kind), card=CANARY) for kind in FAILURES]
    config = RelayConfig(slots_per_queue=1)
    relay = Relay(outboxq_database.url, application.jobs, config, hooks=(log_event, collect))
    with caplog.at_level(logging.WARNING, "outboxq"):
        with_limits(relay, RelayLimits(cut_after_seconds=0.3)).drain()
    return {handle.kind: str(handle.id) for handle in handles}


@pytest.mark.large
def test_each_failure_names_its_file_line_function_and_error(
    failed: dict[str, str],
    told: dict[str, str],
    outboxq_database: Database,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Frames of the application's own distribution count as its code, wherever it is installed; values show nowhere."""
    formatter = logging.Formatter("%(levelname)s %(message)s")
    for kind, (function, file, error) in FAILURES.items():
        shown = call("dead", "show", failed[kind], url=outboxq_database.url).ok().stdout
        (record,) = [each for each in caplog.get_records("setup") if getattr(each, "outboxq_kind", None) == kind]
        logged = formatter.format(record)
        for text in (shown.partition("\nerrors:")[2], logged):
            assert "Traceback (most recent call last):" in text, (kind, text)
            assert f'{file}", line ' in text, (kind, text)
            assert f"in {function}" in text, (kind, text)
            assert error in text, (kind, text)
            assert CANARY not in text, (kind, text)
            assert IN_DETAIL not in text, (kind, text)
        whole = told[kind]
        if kind != "stuck":
            # What was cut off from outside has raised nothing.
            assert file in whole, whole
            assert f"in {function}" in whole, whole


@pytest.mark.large
def test_no_stored_error_shows_the_payload(failed: dict[str, str], engine: Engine) -> None:
    """Neither values of arguments nor what PostgreSQL's DETAIL quotes stand in the records of attempts."""
    with engine.connect() as connection:
        stored = connection.execute(select(dead_job.c.kind, dead_job.c.errors, dead_job.c.reason)).all()
    assert {row.kind for row in stored} == set(FAILURES)
    for row in stored:
        assert CANARY not in row.errors + row.reason
        assert IN_DETAIL not in row.errors + row.reason
        assert '"where": []' not in row.errors
