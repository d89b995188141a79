"""One thing has one name, and a time one form: in tables, in `show`, in `stats` and in JSON."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, get_args

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, external
from outboxq.admin.jobs import STATES
from outboxq.cli.effects import StatusFilter
from outboxq.cli.jobs import StateFilter
from outboxq.events import Event
from outboxq.postgres import Database
from outboxq.statements.effects import Status
from tests.support import app
from tests.support.cli import call
from tests.support.leases import lease

# As RFC 3339 writes a time in UTC.
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")
LIKE_A_TIME = re.compile(r"\d{4}-\d\d-\d\d.\d\d:\d\d\S*")

LISTS = ("jobs", "dead", "effects", "messages", "queues")
COMMANDS = {"messages": "inbox"}


@pytest.fixture
def filled(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]], outboxq_database: Database
) -> Iterator[dict[str, tuple[str, ...]]]:
    """A job in each state, a dead letter, an effect and a message; the words that name one of each for `show`."""
    with sessions.begin() as session:
        dead = session.add_job(app.fail, name="dead")
    drain()
    with sessions.begin() as session:
        made = {state: session.add_job(external(state, queue="depot"), number=1).id for state in STATES}
        session.add_job(external("later", queue="depot").options(delay=timedelta(hours=1)))
        session.execute(text("INSERT INTO outboxq.queue (name, paused_at) VALUES ('depot', now())"))
    with engine.begin() as connection:
        lease(connection, made["leased"], "1 hour")
        lease(connection, made["orphaned"], "-1 second")
        put(connection, "state = 'suspect'", "suspect")
        put(connection, "state = 'grouped', group_key = 'account-7'", "grouped")
        put(connection, "state = 'scheduled', run_at = now() + interval '1 hour'", "scheduled")
        put(connection, "state = 'scheduled', run_at = now() - interval '1 hour', parked = 1", "due")
        connection.execute(
            text(
                "INSERT INTO outboxq.effect (scope, key, status, provider_key, lock_token, locked_until, result) "
                "VALUES ('payments', 'one', 'done', gen_random_uuid(), gen_random_uuid(), clock_timestamp(), '{}')"
            )
        )
        connection.execute(
            text("INSERT INTO outboxq.inbox (consumer, message_id, expires_at) VALUES ('webhooks', 'evt', now())")
        )
    with held(engine, "running"):
        yield {
            "jobs": (str(made["running"]),),
            "dead": (str(dead.id),),
            "effects": ("payments", "one"),
            "messages": ("webhooks", "evt"),
        }


def put(connection: Connection, assignments: str, kind: str) -> None:
    connection.execute(text(f"UPDATE outboxq.job SET {assignments} WHERE kind = :kind"), {"kind": kind})


@contextmanager
def held(engine: Engine, kind: str) -> Iterator[None]:
    """As a relay that runs it holds a job."""
    with engine.connect() as connection:
        connection.execute(text("DELETE FROM outboxq.job WHERE kind = :kind"), {"kind": kind})
        yield
        connection.rollback()


def columns(table: str) -> list[str]:
    """The names in the first line of a table."""
    return table.splitlines()[0].split("\t")


def choices(option: Any) -> tuple[str, ...]:
    """The words that `Annotated[Literal[...] | None, ...]` allows."""
    return get_args(get_args(get_args(option)[0])[0])


def both(*words: str, url: str) -> tuple[str, Any]:
    return call(*words, url=url).ok().stdout, call(*words, "--json", url=url).ok().json


@pytest.mark.wide
@pytest.mark.parametrize("name", LISTS)
def test_columns_are_called_as_the_keys_of_the_json(
    name: str, filled: dict[str, tuple[str, ...]], outboxq_database: Database
) -> None:
    """Every column of a list is a key of its JSON, and every value that both have is the same word."""
    table, document = both(COMMANDS.get(name, name), "list", url=outboxq_database.url)
    assert set(columns(table)) <= set(document[name][0])
    assert len(document[name]) == len(table.splitlines()) - 1


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", LISTS[:-1])
def test_show_calls_things_as_the_list_and_the_json_do(
    name: str, filled: dict[str, tuple[str, ...]], outboxq_database: Database
) -> None:
    """The fields of `show` are keys of its JSON; those of the list are among them, with the same values."""
    url, command = outboxq_database.url, COMMANDS.get(name, name)
    said, document = both(command, "show", *filled[name], url=url)
    names = {re.split(r"\s\s|:$", line)[0] for line in said.splitlines() if not line.startswith(" ")}
    assert names == {key for key, value in document.items() if value is not None}
    rows = call(command, "list", "--json", url=url).ok().json[name]
    (listed,) = [row for row in rows if set(filled[name]) <= set(map(str, row.values()))]
    assert {key: document[key] for key in listed if key != "running_seconds"} == {
        key: value for key, value in listed.items() if key != "running_seconds"
    }


@pytest.mark.wide
def test_a_job_has_one_state_wherever_it_is_named(
    filled: dict[str, tuple[str, ...]], outboxq_database: Database
) -> None:
    """The table, the JSON, the filter, `show` and the columns of the stats agree on each job's state."""
    url = outboxq_database.url
    table, document = both("jobs", "list", "--queue", "depot", url=url)
    for row in document["jobs"]:
        state = "scheduled" if row["kind"] == "later" else row["kind"]
        assert row["state"] == state
        (line,) = [line for line in table.splitlines() if row["id"] in line]
        assert line.split()[3] == state
        assert call("jobs", "show", row["id"], "--json", url=url).ok().json["state"] == state
    for state in STATES:
        found = call("jobs", "list", "--state", state, "--json", url=url).ok().json["jobs"]
        assert {row["state"] for row in found} == {state}
    stats, counted = both("stats", url=url)
    (depot,) = [row for row in counted["queues"] if row["queue"] == "depot"]
    assert {state: depot[state] for state in STATES} == {state: 1 + (state == "scheduled") for state in STATES}
    assert sum(depot[state] for state in STATES) == len(document["jobs"])
    # A terminal marks the numbers themselves.
    assert set(columns(stats)) == set(depot) - {"estimated"}


def test_a_job_of_a_dead_relay_does_not_run(filled: dict[str, tuple[str, ...]], outboxq_database: Database) -> None:
    """`--running` has what a transaction or a living relay's lease holds, and nothing of a relay that is gone."""
    table, document = both("jobs", "list", "--running", url=outboxq_database.url)
    assert {row["state"] for row in document["jobs"]} == {"running", "leased"}
    assert "orphaned" not in table


def test_cancelling_by_state_means_the_same_states(
    filled: dict[str, tuple[str, ...]], outboxq_database: Database
) -> None:
    """What a list by state shows is what goes; what a transaction has at that moment stays, and is named."""
    url = outboxq_database.url
    for state in ("due", "orphaned"):
        assert call("jobs", "cancel", "--state", state, "--json", url=url).ok().json["cancelled"] == 1
    held_back = call("jobs", "cancel", "--state", "running", "--json", url=url)
    assert (held_back.exit_code, held_back.json["running"]) == (1, [*filled["jobs"]])
    left = {row["state"] for row in call("jobs", "list", "--queue", "depot", "--json", url=url).ok().json["jobs"]}
    assert left == {"ready", "grouped", "running", "scheduled", "leased", "suspect"}


def test_the_command_line_knows_all_states() -> None:
    """What can be filtered by is what can be there."""
    assert choices(StateFilter) == STATES
    assert set(choices(StatusFilter)) == set(get_args(Status))


@pytest.mark.wide
def test_times_have_one_form(filled: dict[str, tuple[str, ...]], outboxq_database: Database, engine: Engine) -> None:
    """Every time that any of these commands prints is UTC in RFC 3339, the errors' too."""
    url = outboxq_database.url
    with engine.begin() as connection:
        # As a relay whose sessions are in another zone writes it.
        connection.execute(
            text("UPDATE outboxq.dead_job SET errors = jsonb_set(errors, '{0,at}', '\"2026-01-31T09:00:00.5+01:00\"')")
        )
    said = [text for name in LISTS for text in _printed(COMMANDS.get(name, name), "list", url=url)]
    said += [
        text for name, words in filled.items() for text in _printed(COMMANDS.get(name, name), "show", *words, url=url)
    ]
    said += _printed("stats", url=url)
    times = [found for each in said for found in LIKE_A_TIME.findall(each)]
    assert len(times) > 30
    assert [found for found in times if not TIME.fullmatch(found.rstrip('",'))] == []
    assert "2026-01-31T08:00:00.500000Z" in "".join(said)


def _printed(*words: str, url: str) -> list[str]:
    plain, document = both(*words, url=url)
    return [plain, json.dumps(document, indent=1)]
