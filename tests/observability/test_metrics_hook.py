"""`MetricsHook`: the same numbers, in a registry of the application's."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from outboxq import Inbox, OutboxSession, Relay
from outboxq.observability.metrics.counter import EventCounter
from outboxq.observability.metrics.exposition import expose, registry_of
from outboxq.observability.prometheus import MetricsHook
from outboxq.postgres import Database
from outboxq.relay.metrics import read_relay
from tests.support import app
from tests.support.cli import REPOSITORY, environment
from tests.support.metrics import parsed, promtool, value

FROM_BOTH = ("outboxq_jobs_total", "outboxq_job_errors_total", "outboxq_job_run_seconds", "outboxq_job_wait_seconds")


def test_a_relay_with_the_hook_counts_as_the_command_does(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """Each series that is not 0 is the same in both, sums of seconds apart, which are."""
    with sessions.begin() as session:
        for name in "abc":
            session.add_job(app.record, name=name)
            session.add_job(app.record_async, name=name)
        session.add_job(app.fail, name="d")
        session.add_job(app.end, how="discard")
        session.add_job(app.end, how="snooze")
        session.add_job(app.end, how="dead")
    registry, counter = CollectorRegistry(), EventCounter()
    relay = Relay(outboxq_database.url, app.jobs, hooks=[MetricsHook(registry, database="db"), counter])
    relay.drain()
    exposed = generate_latest(registry).decode()
    hook = {series: found for series, found in parsed(exposed).items() if found and not series[0].endswith("_created")}
    ours = parsed(expose(registry_of(lambda: {"db": read_relay(relay.look(), counter)}))[0].decode())
    assert {series for series in hook if series[0].startswith(FROM_BOTH)} == {
        series for series, found in ours.items() if found and series[0].startswith(FROM_BOTH)
    }
    assert {series: found for series, found in hook.items() if "seconds" not in series[0]} == {
        series: found for series, found in ours.items() if found and "seconds" not in series[0] and series in hook
    }
    assert value(hook, "outboxq_jobs_total", kind="record", outcome="done") == 3
    checked = promtool(
        "check", "metrics", given="\n".join(x for x in exposed.splitlines() if "_created" not in x) + "\n"
    )
    assert checked.returncode == 0, checked


def test_producers_count_what_they_have_committed(outboxq_database: Database) -> None:
    """Jobs and messages, by the engine's option; what was rolled back is not counted."""
    registry = CollectorRegistry()
    hook = MetricsHook(registry, detail="queue")
    engine = create_engine(outboxq_database.url, execution_options={"outboxq_hooks": [hook]})
    inbox = Inbox("payments", retention=timedelta(days=1))
    with sessionmaker(engine, class_=OutboxSession)() as session:
        session.add_jobs([app.record.job(name="a"), app.record.job(name="b")])
        inbox.accept(session, "m1")
        session.commit()
        session.add_job(app.record, name="c")
        session.flush()
        session.rollback()
    engine.dispose()
    found = parsed(generate_latest(registry).decode())
    assert value(found, "outboxq_enqueued_jobs_total", queue="ledger", kind="") == 2
    assert value(found, "outboxq_inbox_messages_total", consumer="payments", outcome="accepted") == 1


MULTIPROCESS = """\
import sys
from outboxq.events import JobDone
from outboxq.observability.prometheus import MetricsHook
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from tests.support.events import job
MetricsHook(database="db")(JobDone(job(), 0.004))
if len(sys.argv) > 1:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


@pytest.mark.wide
def test_it_works_with_several_processes(tmp_path: Path) -> None:
    """In the multiprocess mode of prometheus_client, as under gunicorn."""
    variables = environment(PROMETHEUS_MULTIPROC_DIR=str(tmp_path))

    def run(*more: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", MULTIPROCESS, *more],
            env=variables,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    run()
    found = parsed(run("print"))
    assert value(found, "outboxq_jobs_total", queue="q", kind="k", outcome="done", database="db") == 2
    assert value(found, "outboxq_job_run_seconds_count") == 2
    assert os.listdir(tmp_path)
