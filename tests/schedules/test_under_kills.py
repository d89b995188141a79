"""Schedules that two relays fire at the same moment, and under kills."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import Engine, create_engine, event, text

from outboxq import Context, Jobs, RelayConfig
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.schedules import under_kills
from tests.support.scheduled import due_since, fired, put, young_minute
from tests.support.waiting import wait_until

# Those who add jobs wait for this lock.
_GATE = 7_007
_GUARD = f"""\
CREATE FUNCTION at_the_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock_shared({_GATE}); RETURN NULL; END $$;
CREATE TRIGGER gate BEFORE INSERT ON outboxq.job FOR EACH STATEMENT EXECUTE FUNCTION at_the_gate();
"""
_AT_THE_GATE = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event = 'advisory'"


def other_jobs() -> Jobs:
    jobs = Jobs()

    @jobs.handler(queue="other")
    def other(ctx: Context) -> None: ...

    return jobs


class Looks:
    """How often the relays of an engine have looked for schedules that are due."""

    def __init__(self, url: str) -> None:
        self.engine = create_engine(url)
        self.number = 0
        event.listen(self.engine, "do_execute", self._note)

    def _note(self, cursor: object, statement: str, parameters: object, context: object) -> None:
        self.number += "FROM outboxq.schedule" in statement and "next_at <=" in statement and "args" in statement


@contextmanager
def closed_gate(engine: Engine) -> Iterator[Callable[[], None]]:
    """Each transaction that adds a job waits until the gate is opened."""
    with engine.connect() as connection:
        connection.execute(text(f"SELECT pg_advisory_lock({_GATE})"))
        connection.commit()

        def open_it() -> None:
            connection.execute(text("SELECT pg_advisory_unlock_all()"))
            connection.commit()

        try:
            yield open_it
        finally:
            open_it()


def test_two_relays_at_the_same_moment_fire_once(
    outboxq_database: Database, engine: Engine, start_relay: StartRelay
) -> None:
    """While one has added the job and not committed, the other looks, and finds nothing; nor does it afterwards."""
    put(engine)
    with engine.begin() as connection:
        connection.execute(text(_GUARD))
    due = due_since(engine, "tick", timedelta(0))
    relays = [Looks(outboxq_database.url) for _ in range(2)]
    with closed_gate(engine) as open_gate, ExitStack() as stack:
        for relay in relays:
            config = RelayConfig(heartbeat_seconds=0.1, slots_per_queue=1)
            stack.enter_context(start_relay(other_jobs(), config, engine=relay.engine))
        wait_until(lambda: all(relay.number for relay in relays), "a look of each relay")
        # The other one looks again and again, or stands at the gate too.
        wait_until(lambda: waiting(engine) == 2 or max(relay.number for relay in relays) > 2, "the other relay")
        open_gate()
        wait_until(lambda: due in fired(engine), "the job")
        wait_until(lambda: waiting(engine) == 0, "both relays to have fired")
        young_minute(engine)
        put(engine, "later")
        later = due_since(engine, "later", timedelta(0))
        wait_until(lambda: later in fired(engine, "later"), "a later schedule")
    for name in ("tick", "later"):
        found = fired(engine, name)
        assert len(found) == len(set(found))
    for relay in relays:
        relay.engine.dispose()


def waiting(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(_AT_THE_GATE)).scalar_one())


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["transaction"])
def test_each_time_is_fired_once_under_kills(outboxq_database: Database, mode: str) -> None:
    """Relays are killed and backends ended while they fire: each time has one job, and each job one effect."""
    report = under_kills.run(outboxq_database.url, seconds=4, mode=mode, seed=7, relays=4)
    assert report.problems == 0, report
    assert report.due > 5
    assert report.kills > 0
