"""One row that SQL of users has made odd is shown all the same, by each command and page of that row."""

import os
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import Engine, text

from outboxq.dashboard import Role, create_app
from outboxq.dashboard.segments import as_segment
from outboxq.postgres import Database
from tests.support.cli import call
from tests.support.dashboard import as_user, client_of
from tests.support.plain_rows import insert_row
from tests.support.poison import DEEP, plant
from tests.support.urls import libpq_url

# By table: what names a row, the command that shows it, its page.
SHOWN = {
    "job": ("id", "jobs", "jobs"),
    "dead_job": ("id", "dead", "dead"),
    "done_job": ("id", "done", "done"),
    "effect": ("scope, key", "effects", "effects"),
    "schedule": ("name", "schedules", "schedules"),
    "batch": ("id", "batches", "batches"),
    "audit": ("id", "audit", "audit"),
}


def keys(url: str, table: str) -> list[tuple[str, ...]]:
    """Of all rows whose names a command line can carry."""
    names = SHOWN[table][0].replace(", ", "::text, ")
    with psycopg.connect(libpq_url(url)) as connection:
        found = connection.execute(f"SELECT {names}::text FROM outboxq.{table}".encode()).fetchall()
    return [row for row in found if all(name.isprintable() and name for name in row)]


def failures(engine: Engine, url: str, table: str) -> Iterator[str]:
    _, command, page = SHOWN[table]
    with client_of(create_app({"orders": engine}, auth=as_user(Role.READER))) as client:
        for key in keys(url, table):
            for given in ((), ("--json",)):
                outcome = call(command, "show", *given, *key, url=url)
                if outcome.exit_code:
                    yield f"{command} show {key}: {outcome.stderr[-200:]}"
            path = "/".join(map(as_segment, key))
            for accept in ("text/html", "application/json"):
                answer = client.get(f"/orders/{page}/{path}", headers={"accept": accept})
                if answer.status_code != 200:
                    yield f"{page}/{key}: {answer.status_code} {answer.text[-200:]}"


@pytest.mark.wide
@pytest.mark.parametrize("table", SHOWN)
def test_each_odd_row_is_shown(engine: Engine, outboxq_database: Database, table: str) -> None:
    """However deep its JSON is, and whether its times can be computed here."""
    assert plant(engine, table)
    failed = list(failures(engine, outboxq_database.url, table))
    assert not failed, os.linesep.join(failed)


@pytest.mark.first_and_last
@pytest.mark.parametrize(("table", "column"), [("job", "args"), ("audit", "filter"), ("audit", "change")])
def test_a_row_of_deep_json_is_shown(engine: Engine, outboxq_database: Database, table: str, column: str) -> None:
    """In one line by the commands, and not at all by the pages, which say so."""
    with engine.begin() as connection:
        deep = f"jsonb_build_object('a', {DEEP})"
        connection.exec_driver_sql(insert_row(table, {column: deep}))
    failed = list(failures(engine, outboxq_database.url, table))
    assert not failed, os.linesep.join(failed)


@pytest.mark.parametrize("headers", ["NULL", "'[1]'", "'1'"])
def test_a_finished_job_without_headers_is_run_again(engine: Engine, outboxq_database: Database, headers: str) -> None:
    """It has none then."""
    with engine.begin() as connection:
        connection.exec_driver_sql(insert_row("done_job", {"args": "'{}'", "headers": headers}))
        job_id = connection.execute(text("SELECT id::text FROM outboxq.done_job")).scalar_one()
    call("done", "run-again", job_id, url=outboxq_database.url).ok()
    with engine.begin() as connection:
        assert connection.execute(text("SELECT headers::text FROM outboxq.job")).scalar_one() == "{}"


def test_a_schedule_that_cannot_be_read_here_says_why(engine: Engine, outboxq_database: Database) -> None:
    """In place of its next times, with all that is known of it."""
    with engine.begin() as connection:
        connection.exec_driver_sql(insert_row("schedule", {"name": "'odd'", "time_zone": "'Nowhere/At_All'"}))
    shown = call("schedules", "show", "odd", "--json", url=outboxq_database.url).ok().json
    assert (shown["next_fires"], shown["kind"]) == ([], "k")
    assert "no time zone 'Nowhere/At_All'" in shown["unreadable"]
    with client_of(create_app({"orders": engine}, auth=as_user(Role.READER))) as client:
        assert "no time zone" in client.get("/orders/schedules/odd").text
