"""Relays of the version before groups, at work on the same tables while a deployment rolls."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from outboxq.database.driver import run_script
from outboxq.relay.connections import connection_options

_BLOCKS = Path(__file__).with_name("old_relay.sql").read_text().split("\n--- ")[1:]
# What these relays send, by what it is for.
STATEMENTS = dict(block.split("\n", 1) for block in _BLOCKS)
ALIVE, DEAD = "00000000-0000-0000-0000-0000000000aa", "00000000-0000-0000-0000-0000000000dd"
NAMED = "00000000-0000-0000-0000-00000000000b"
GROUP_STATES = ("grouped", "group_waiting", "group_leased", "group_suspect")
_FILL = """
INSERT INTO outboxq.job (id, queue, kind, args, state, group_key, run_at, lease_owner, lease_token)
SELECT id::uuid, 'ledger', 'book', '{}', :state, :group, now() - interval '1 minute', owner::uuid, 1
FROM (VALUES (:named, :dead), (gen_random_uuid()::text, :alive)) AS row (id, owner)
"""
_LOOK = text("SELECT job.ctid::text, job.xmin::text, job.xmax::text, job::text FROM outboxq.job AS job ORDER BY seq")


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """A connection as the relay sets it up; a relay's lease is alive."""
    with engine.connect().execution_options(**connection_options(engine, "outboxq")) as connection:
        with connection.begin():
            alive = (
                "INSERT INTO outboxq.relay (id, alive_until, host, pid) VALUES (:id, now() + interval '1 hour', '', 0)"
            )
            connection.execute(text(alive), {"id": ALIVE})
        yield connection


def fill(connection: Connection, state: str, group: str | None) -> None:
    """Two jobs that are due: one by the id that the statements name, whose lease is a dead relay's, if it has one."""
    with connection.begin():
        values = {"state": state, "group": group, "named": NAMED, "dead": DEAD, "alive": ALIVE}
        connection.execute(text(_FILL), values)


def look(connection: Connection) -> list[Any]:
    with connection.begin():
        return [tuple(row) for row in connection.execute(_LOOK)]


def returns_a_job(connection: Connection, statement: str) -> bool:
    """Whether a statement has found a job: it returns more than numbers that are zero."""
    rows = run_script(connection, statement)
    return any(str(value) != "0" for row in rows for value in row if value is not None)


@pytest.mark.parametrize("state", GROUP_STATES)
def test_an_old_relay_leaves_jobs_of_groups_alone(connection: Connection, state: str) -> None:
    """It neither claims, locks, parks nor reaps them, nor sees them waiting: whatever it sends finds no job."""
    fill(connection, state, "a")
    with connection.begin() as died:
        # As if a claim had died.
        connection.execute(text("DELETE FROM outboxq.job"))
        died.rollback()
    before = look(connection)
    for name, statement in STATEMENTS.items():
        with connection.begin():
            assert not returns_a_job(connection, statement), name
    assert look(connection) == before
    with connection.begin():
        assert connection.execute(text("SELECT count(*) FROM outboxq.dead_job")).scalar_one() == 0


def test_what_an_old_relay_sends_finds_jobs_in_the_states_of_others(connection: Connection) -> None:
    """The states of their own are what keeps jobs of groups from it: in other states, each statement finds some."""
    finds = set[str]()
    for state in ("ready", "scheduled", "leased", "suspect"):
        fill(connection, state, "a")
        for name, statement in STATEMENTS.items():
            with connection.begin() as transaction:
                finds.update([name] if returns_a_job(connection, statement) else [])
                transaction.rollback()
        with connection.begin():
            connection.execute(text("DELETE FROM outboxq.job"))
    assert finds == set(STATEMENTS)
