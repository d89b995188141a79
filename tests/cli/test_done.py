"""`outboxq done`: finished jobs of kinds that keep them are listed, shown and run again."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Discard, Jobs, OutboxSession
from outboxq.events import Event
from outboxq.postgres import Database
from tests.support.app import Effect
from tests.support.cli import call
from tests.support.ledger import ledger

jobs = Jobs()
ANY_ID = str(UUID(int=0))


@jobs.handler(queue="reports", keep=timedelta(days=7), keep_args=True, keep_result=True)
def make_report(ctx: Context, month: str) -> dict[str, str]:
    ctx.session.add(Effect(name=month))
    return {"file": f"reports/{month}.pdf"}


@jobs.handler(queue="mail", keep=timedelta(days=7))
def send(ctx: Context, address: str) -> Discard | None:
    return Discard("nobody lives there") if address == "nowhere" else None


@pytest.fixture
def finished(sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]) -> dict[str, str]:
    """The ids of four finished jobs, added one after the other."""
    found: dict[str, str] = {}
    for name, new in {
        "july": make_report.job(month="july"),
        "august": make_report.job(month="august"),
        "sent": send.job(address="a secret place"),
        "dropped": send.job(address="nowhere"),
    }.items():
        with sessions.begin() as session:
            found[name] = str(session.add_jobs([new])[0].id)
    drain(jobs)
    return found


def listed(url: str, *options: str) -> list[str]:
    return [job["id"] for job in call("done", "list", *options, "--json", url=url).ok().json["done"]]


@pytest.mark.wide
def test_jobs_are_listed_by_what_they_have_in_common(
    outboxq_database: Database, engine: Engine, finished: dict[str, str]
) -> None:
    """The last added first, a page at a time."""
    url, (july, august, sent, dropped) = outboxq_database.url, finished.values()
    assert listed(url) == [dropped, sent, august, july]
    assert listed(url, "--queue", "reports") == [august, july]
    assert listed(url, "--kind", "send", "--outcome", "discarded") == [dropped]
    assert listed(url, "--limit", "2") == [dropped, sent]
    assert listed(url, "--limit", "2", "--before", sent) == [august, july]
    with engine.begin() as connection:
        old = "UPDATE outboxq.done_job SET finished_at = finished_at - interval '2 hours' WHERE queue = 'mail'"
        connection.execute(text(old))
    assert listed(url, "--since", "1h") == [august, july]
    assert listed(url, "--since", "1d") == [dropped, sent, august, july]
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    assert listed(url, "--since", an_hour_ago.isoformat()) == [august, july]
    assert listed(url, "--since", "2026-01-31") == [dropped, sent, august, july]
    table = call("done", "list", "--queue", "reports", url=url).ok().stdout
    assert july in table
    assert "make_report" in table
    assert call("done", "list", "--outcome", "lost", url=url).exit_code == 2


def test_a_job_is_shown_with_what_is_kept_of_it(outboxq_database: Database, finished: dict[str, str]) -> None:
    """Arguments and result where its kind keeps them; without, not a word of either."""
    url = outboxq_database.url
    shown = call("done", "show", finished["july"], url=url).ok().stdout
    assert "reports/july.pdf" in shown
    assert '"month"' in shown
    assert "a secret place" not in call("done", "show", finished["sent"], url=url).ok().stdout
    told = call("jobs", "show", finished["dropped"], url=url)
    assert "discarded" in told.stdout + told.stderr
    missing = call("done", "show", str(uuid4()), url=url)
    assert missing.exit_code == 1
    assert "finished job" in missing.stderr


def test_a_job_is_run_again_as_a_new_one(
    outboxq_database: Database, engine: Engine, finished: dict[str, str], drain: Callable[..., list[Event]]
) -> None:
    """Of a kind that keeps arguments; the others are refused, and nothing is added."""
    url = outboxq_database.url
    new = call("done", "run-again", finished["july"], "--json", url=url).ok().json
    assert new["like"] == finished["july"]
    refused = call("done", "run-again", finished["sent"], url=url)
    assert refused.exit_code == 1
    assert "keep_args" in refused.stderr
    assert call("done", "run-again", ANY_ID, url=url).exit_code == 1
    drain(jobs)
    assert ledger(engine) == {"july": 2, "august": 1}
    assert listed(url, "--queue", "reports")[0] == new["added"]
