"""Rows that a producer may write, as odd as the types let them be: jobs of others run, and relays live."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Literal

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, RelayConfig
from outboxq.config import SlotGroup
from outboxq.events import JobDone
from tests.admin.test_roles import Cast
from tests.admin.test_roles import roles as roles
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.ledger import ledger
from tests.support.matrices import sampled
from tests.support.urls import libpq_url
from tests.support.waiting import wait_until

RETRY = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)
INTEGERS = {"smallint": 2**15, "integer": 2**31, "bigint": 2**63}
TIMES = ["0001-01-03 00:00:00+00", "9999-12-29 00:00:00+00", "1970-01-01 00:00:00+00", "-infinity", "infinity", "now"]
TEXTS = ["", " ", "a\nb", "\x1b[31m", "'", '"', "%s", "{}", "\\", "ж😀", "null", "x" * 63, "ж" * 31, "y" * 100_000]
JSONS = [
    "{}", "[]", "null", "5", '"text"', "true", '{"name": null}', '{"name": 5}', '{"name": {"name": []}}', '{"": ""}',
    '{"name": 1e400}', '{"name": -1e-400}', '{"name": 123456789012345678901234567890}', '{"nobody": "asked"}',
    '{"name": "\\u2028\\ud83d\\ude00"}', '{"name": "' + "z" * 1_000_000 + '"}', "[" * 900 + "]" * 900,
    '{"name": ' + "[" * 900 + "]" * 900 + "}", "[5, null, {}]", '[{"attempt": "x", "at": 5}]', '{"a": {"b": []}}',
    json.dumps({f"key {n}": n for n in range(20_000)}),
]  # fmt: skip
MODES = ("transaction", "lease", "shared", "async")


def numbers(of: str) -> list[int]:
    end = INTEGERS[of]
    return [-end, -end + 1, -1, 0, 1, 2, end - 2, end - 1]


# What each column may be given; None leaves it out.
COLUMNS: dict[str, tuple[str, list[object]]] = {
    "seq": ("bigint", [*numbers("bigint")]),
    "kind": ("text", [*MODES, "unknown", *TEXTS]),
    "args": ("jsonb", [*JSONS]),
    "headers": ("jsonb", [*JSONS]),
    "priority": ("smallint", [*numbers("smallint")]),
    "state": ("text", ["ready", "scheduled", "leased", "suspect"]),
    "run_at": ("timestamptz", [*TIMES]),
    "attempt": ("integer", [*numbers("integer")]),
    "max_attempts": ("smallint", [*numbers("smallint")]),
    "crashes": ("smallint", [*numbers("smallint")]),
    "parked": ("smallint", [*numbers("smallint")]),
    "unique_key": ("text", [*TEXTS]),
    "group_key": ("text", [*TEXTS]),
    "lease_owner": ("uuid", ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"]),
    "lease_token": ("bigint", [*numbers("bigint")]),
    "errors": ("jsonb", [*JSONS]),
    "created_at": ("timestamptz", [*TIMES]),
}
# What the role of `outboxq roles --producer` may give a value, besides the id and the queue.
PRODUCED = ("kind", "args", "headers", "priority", "state", "run_at", "max_attempts")
Way = Literal["a producer", "a producer of before", "rows of before the checks"]
CHECKS_OF_BEFORE = [
    "queue_name_bytes", "kind_name_bytes", "job_state", "job_priority", "job_args_object", "job_times"
]  # fmt: skip


def application() -> Jobs:
    """A queue for each way to run jobs, with a handler of the same name."""
    jobs = Jobs()

    def record(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))

    async def record_async(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))

    jobs.handler(queue="transaction", kind="transaction", retry=RETRY)(record)
    jobs.handler(queue="lease", kind="lease", retry=RETRY, claim="lease")(record)
    jobs.handler(queue="shared", kind="shared", retry=RETRY, batchable=True)(record)
    jobs.handler(queue="async", kind="async", retry=RETRY)(record_async)
    return jobs


@pytest.fixture
def producer(roles: Cast, way: Way) -> Iterator[psycopg.Connection]:
    """As the producer's role, with the rights and the checks of today or of before."""
    with psycopg.connect(libpq_url(roles.database.url), autocommit=True) as owner:
        if way != "a producer":
            owner.execute(sql.SQL("GRANT INSERT ON outboxq.job TO {}").format(sql.Identifier(roles.groups["producer"])))
        if way == "rows of before the checks":
            query = (
                "SELECT conname FROM pg_constraint WHERE conrelid = 'outboxq.job'::regclass AND contype = 'c' "
                "AND conname <> ALL (%s)"
            )
            for (name,) in owner.execute(query, (CHECKS_OF_BEFORE,)).fetchall():
                owner.execute(sql.SQL("ALTER TABLE outboxq.job DROP CONSTRAINT {}").format(sql.Identifier(name)))
    with psycopg.connect(libpq_url(roles.url("producer")), autocommit=True) as connection:
        yield connection


def insert_extremes(producer: psycopg.Connection, chance: random.Random, columns: Sequence[str], count: int) -> int:
    """Try to insert so many; how many were let in."""
    inserted = 0
    for _ in range(count):
        chosen = chance.sample(columns, chance.choice([1, 1, 2, 3, 6]))
        row = {"queue": chance.choice(MODES), "kind": chance.choice(MODES), "args": '{"name": "extreme"}'}
        types = {"queue": "text", "kind": "text", "args": "jsonb"}
        for column in chosen:
            types[column], values = COLUMNS[column]
            row[column] = chance.choice(values)
        places = ", ".join(f"%s::{types[column]}" for column in row)
        names = ", ".join(("id", *row))
        overriding = "OVERRIDING SYSTEM VALUE" if "seq" in row else ""
        statement = f"INSERT INTO outboxq.job ({names}) {overriding} VALUES (gen_random_uuid(), {places})"
        try:
            producer.execute(statement, [*row.values()])
        except (psycopg.errors.IntegrityError, psycopg.errors.DataError):
            continue
        inserted += 1
    return inserted


# These seeds draw nearly every value of every column.
@pytest.mark.large
@pytest.mark.parametrize(
    ("way", "seed"),
    sampled(
        [("a producer", 1), ("a producer of before", 1), *(("rows of before the checks", seed) for seed in (2, 3, 4))],
        3,
    ),
)
def test_whatever_is_in_a_row_the_jobs_of_others_run_and_relays_live(
    way: Way,
    seed: int,
    producer: psycopg.Connection,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
) -> None:
    """Before them, between them and behind them; and jobs of a dead relay are taken back."""
    chance, jobs = random.Random(seed), application()
    columns = PRODUCED if way == "a producer" else [*COLUMNS]
    handlers = jobs.resolve().handlers
    names = [f"{mode} {number}" for mode in MODES for number in range(10)]
    inserted = 0
    for name in chance.sample(names, len(names)):
        inserted += insert_extremes(producer, chance, columns, 5)
        with sessions.begin() as session:
            session.add_job(handlers[name.split()[0]], name=name)
    of_a_dead_relay = "SET state = 'leased', lease_owner = gen_random_uuid() WHERE args ->> 'name' = 'lease 0'"
    with psycopg.connect(libpq_url(engine.url.render_as_string(hide_password=False)), autocommit=True) as connection:
        assert connection.execute(f"UPDATE outboxq.job {of_a_dead_relay}").rowcount == 1
    groups = tuple(SlotGroup((mode,), slots=1) for mode in MODES)
    config = RelayConfig(groups=groups, batch_size=chance.choice([1, 10]), lease_seconds=1, poll_seconds=0.2)
    with start_relay(jobs, config) as running:
        wait_until(lambda: set(names) <= ledger(engine).keys(), "all jobs of others to be done")
        later = [f"later {mode}" for mode in MODES]
        with sessions.begin() as session:
            session.add_jobs([handlers[name.split()[1]].job(name=name) for name in later])
        wait_until(lambda: set(later) <= ledger(engine).keys(), "those that come later")
    assert inserted > 50
    done = ledger(engine)
    assert {name: done[name] for name in [*names, *later]} == dict.fromkeys([*names, *later], 1)
    assert running.of(JobDone)
