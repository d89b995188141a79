"""What cannot be is refused at the call or at the start, by an error that says what to do; and nothing is written."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, Unique, external, schedules
from outboxq.admin.roles import roles_sql
from outboxq.errors import ArgumentError, EnqueueError, InvalidKey, OutboxqError, RegistryError
from outboxq.postgres import Database
from outboxq.queue_limits import make_limits
from outboxq.relay.admission import chunk_of
from tests.support.cli import call, run
from tests.support.ledger import rows

APP = "tests.support.app:jobs"
SECOND = timedelta(seconds=1)
KIND = external("k", queue="q")
COALESCED = KIND.options(coalesce="a").job()

Sessions = sessionmaker[OutboxSession]


def declare(**options: Any) -> object:
    """A handler with these options."""
    jobs = Jobs()

    @jobs.handler(queue="q", **options)
    def work(ctx: Context, account: int) -> None: ...

    jobs.resolve()
    return work


def declare_schedules(*names: object, cron: str = "@daily", **options: Any) -> object:
    """A registry with a schedule for each name."""
    jobs = Jobs()
    for number, name in enumerate(names):

        @jobs.schedule(cron, name=name, **options)
        @jobs.handler(queue="q", kind=f"tick-{number}")
        def tick(ctx: Context) -> None: ...

    return jobs.resolve()


def limit_twice() -> None:
    jobs = Jobs()
    jobs.limit("mail", running=1)
    jobs.limit("mail", running=2)
    jobs.resolve()


# A call, its error, and what its message says.
CASES: dict[str, tuple[Callable[[], object], type[OutboxqError], str]] = {
    "cron that never fires": (
        lambda: declare_schedules("a", cron="0 0 31 2 *"),
        ArgumentError,
        "'0 0 31 2 *' is never due: no month of '2' has a day '31'",
    ),
    "six fields": (
        lambda: declare_schedules("a", cron="0 30 2 * * *"),
        ArgumentError,
        "a cron text is due on whole minutes, so leave the seconds out: '30 2 * * *'",
    ),
    "unknown zone": (
        lambda: declare_schedules("a", time_zone="Europe/Berln"),
        ArgumentError,
        "there is no time zone 'Europe/Berln': did you mean 'Europe/Berlin'",
    ),
    "long zone": (lambda: declare_schedules("a", time_zone="x" * 5_000), ArgumentError, f"{'x' * 80!r}: did you mean"),
    "long schedule name": (
        lambda: declare_schedules("é" * 128),
        InvalidKey,
        "a schedule name takes 1 to 255 bytes, got 256",
    ),
    "empty schedule name": (lambda: declare_schedules(""), InvalidKey, "got 0: it is empty"),
    "NUL in a schedule name": (lambda: declare_schedules("a\0b"), InvalidKey, "holds a control character"),
    "two schedules of a name": (
        lambda: declare_schedules("a", "a"),
        RegistryError,
        "two schedules have the name 'a', which by default is the handler's kind: give one of them a name of its own",
    ),
    "missed": (lambda: declare_schedules("a", missed="two"), ArgumentError, "missed takes 'skip' or 'one' or 'all'"),
    "jitter": (lambda: declare_schedules("a", jitter=-SECOND), ArgumentError, "jitter takes a timedelta from 0 to 24"),
    "delay with group": (
        lambda: KIND.options(delay=SECOND, group="a"),
        ArgumentError,
        "a job of a group runs when its turn comes: leave out delay= and run_at=, or the group",
    ),
    "delay of a handler's group": (
        lambda: declare(group="a").options(delay=SECOND),  # type: ignore[attr-defined]  # a handler
        ArgumentError,
        "leave out delay= and run_at=, or the group",
    ),
    "limit 0": (
        lambda: make_limits(running=0),
        ArgumentError,
        "the limit of jobs that run at a time is 1 to 10,000, got 0: to stop a queue, pause it",
    ),
    "limit of too many": (lambda: make_limits(running=10_001), ArgumentError, "is 1 to 10,000, got 10001"),
    "limit below 0": (lambda: make_limits(running=-1), ArgumentError, "is 1 to 10,000, got -1"),
    "no whole limit": (lambda: make_limits(running=1.5), ArgumentError, "is a whole number, got 1.5"),  # type: ignore[arg-type]  # refused
    "limit of a group 0": (lambda: make_limits(per_group=0), ArgumentError, "is 1 to 1,000, got 0"),
    "two limits": (limit_twice, RegistryError, "declared twice: 1 at a time, and 2 at a time. Declare them once"),
    "rate 0/min": (
        lambda: make_limits(rate="0/min"),
        ArgumentError,
        "a rate takes 1 to 1,000,000 jobs, got '0/min': to stop a queue, pause it",
    ),
    "unknown period": (
        lambda: make_limits(rate="5/fortnight"),
        ArgumentError,
        "a rate is a number of jobs in a time, such as 10/s, 100/min, 5/30s, 20/h, got '5/fortnight'",
    ),
    "no time": (lambda: make_limits(rate="5/0s"), ArgumentError, "a time of 1 second to 31 days, got '5/0s'"),
    "rate of many digits": (
        lambda: make_limits(rate=f"{'9' * 5_000}/s"),
        ArgumentError,
        "a rate is a number of jobs in a time",
    ),
    "burst 0": (lambda: make_limits(rate="5/s", burst=0), ArgumentError, "the burst of a rate is 1 to 1,000,000"),
    "burst alone": (lambda: make_limits(burst=5), ArgumentError, "a burst needs a rate, such as 100/min"),
    "expires at once": (lambda: KIND.options(expires=timedelta(0)), ArgumentError, "expires takes more than 0"),
    "expires in the past": (lambda: KIND.options(expires=-SECOND), ArgumentError, "expires takes more than 0"),
    "expires at a time": (
        lambda: KIND.options(expires=datetime.now(UTC)),  # type: ignore[arg-type]  # refused
        ArgumentError,
        "expires takes a timedelta, got datetime",
    ),
    "expires before it runs": (
        lambda: KIND.options(expires=SECOND, delay=SECOND),
        ArgumentError,
        "would never run: both count from the moment that it is added",
    ),
    "every 0": (lambda: KIND.options(coalesce="a", every=timedelta(0)), ArgumentError, "every takes more than 0"),
    "every below 0": (lambda: KIND.options(coalesce="a", every=-SECOND), ArgumentError, "every takes more than 0"),
    "every alone": (lambda: KIND.options(every=SECOND), ArgumentError, "the same coalesce= run: give that too"),
    "every of a group": (
        lambda: KIND.options(coalesce="a", every=SECOND, group="g"),
        ArgumentError,
        "leave out delay=, run_at= and group=",
    ),
    "unique for no time": (
        lambda: Unique("a", for_=timedelta(0)),
        ArgumentError,
        "Unique(for_=...) takes more than 0",
    ),
    "coalesce with unique": (
        lambda: KIND.options(coalesce="a", unique="a"),
        ArgumentError,
        "coalesce= or unique=, not both: coalesce keeps the newest job, unique the first one",
    ),
    "unique of a coalesced handler": (
        lambda: declare(coalesce="a").options(unique="a"),  # type: ignore[attr-defined]  # a handler
        ArgumentError,
        "coalesce= or unique=, not both",
    ),
    "coalesce with expires": (
        lambda: KIND.options(coalesce="a", expires=SECOND),
        ArgumentError,
        "coalesce= or expires=, not both",
    ),
    "behind a coalesced job": (
        lambda: COALESCED.then(KIND.job()),
        ArgumentError,
        "'k' is coalesced, and cannot be followed by another job: the run of another job may stand for it",
    ),
    "behind a coalesced job of a chain": (
        lambda: KIND.job().then(COALESCED).then(KIND.job()),
        ArgumentError,
        "'k' is coalesced, and cannot be followed by another job",
    ),
    "a coalesced job of a batch": (
        lambda: COALESCED.in_batch("0" * 32),
        ArgumentError,
        "'k' is coalesced, and cannot be in a batch",
    ),
    "a coalesced job of a chain of a batch": (
        lambda: KIND.job().then(COALESCED).in_batch("0" * 32),
        ArgumentError,
        "'k' is coalesced, and cannot be in a batch",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_refused_at_the_call(case: str) -> None:
    """With what to do."""
    refused, error, says = CASES[case]
    with pytest.raises(error, match=re.escape(says)):
        refused()


@pytest.mark.parametrize("option", ["coalesce", "group", "unique"])
@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", "takes 1 to 512 bytes, got 0: it is empty"),
        ("k" * 513, "takes 1 to 512 bytes, got 513: a hash of it"),
        ("é" * 257, "takes 1 to 512 bytes, got 514: a hash of it"),
        ("a\0b", "'a\\x00b' holds a control character"),
        ("\ud800", "holds a lone surrogate"),
        (7, "is a string, got int: give str(...) of it"),
    ],
    ids=["empty", "long", "bytes", "NUL", "surrogate", "int"],
)
def test_keys_that_cannot_be_stored_are_refused(option: str, key: object, says: str) -> None:
    """At the call, also of a function that returns one; at the decorator, with the handler and its line."""
    said = rf"{option} key .*{re.escape(says)}" if says.startswith("takes") else re.escape(says)
    with pytest.raises(InvalidKey, match=said):
        KIND.options(**{option: key})  # type: ignore[arg-type]  # refused
    with pytest.raises(InvalidKey, match=said):
        declare(**{option: lambda account: key}).job(account=1)  # type: ignore[attr-defined]  # a handler
    with pytest.raises(RegistryError, match=rf"handler 'work': .*{re.escape(says)}.*defined at .*test_bad_input\.py"):
        declare(**{option: key})


def test_a_key_of_as_many_bytes_as_are_allowed_is_stored(engine: Engine, sessions: Sessions) -> None:
    """Two hundred and fifty-six characters of two bytes."""
    key = "é" * 256
    with sessions.begin() as session:
        for option in ("coalesce", "group", "unique"):
            session.add_job(KIND.options(**{option: key}))  # type: ignore[arg-type]  # a key
    assert rows(engine, "SELECT count(*) FROM outboxq.job") == [(3,)]


@pytest.mark.parametrize(("rate", "burst"), [("10000/s", 1), ("10000/s", 3), ("1/day", 1)])
def test_a_burst_below_a_chunk_asks_for_fewer_tokens_at_once(rate: str, burst: int) -> None:
    """It is no error: the chunk follows the burst."""
    found = make_limits(rate=rate, burst=burst).rate
    assert found is not None
    assert 1 <= chunk_of(found) <= burst


def test_unique_jobs_of_a_role_that_cannot_read_their_tables_name_the_right(
    outboxq_database: Database, engine: Engine
) -> None:
    """And the command that gives it."""
    role = f"bad_input_{engine.url.database}"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'p'")
        try:
            connection.exec_driver_sql(roles_sql({"producer": role}))
            limited = create_engine(engine.url.set(username=role, password="p"))
            with OutboxSession(limited) as session:
                session.add_job(KIND.options(unique="a"))
                with pytest.raises(EnqueueError, match=r"SELECT on its columns id, .*roles --sql --unique-prod"):
                    session.flush()
            limited.dispose()
        finally:
            connection.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert rows(engine, "SELECT count(*) FROM outboxq.job") == [(0,)]


def test_a_batch_whose_session_is_closed_takes_no_members(engine: Engine, sessions: Sessions) -> None:
    """Nor one whose block is over."""
    jobs = Jobs()
    with sessions() as session, jobs.batch(session, on_done=KIND.job()) as batch:
        session.close()
        with pytest.raises(EnqueueError, match="the transaction or savepoint in which the batch was opened has ended"):
            batch.add_job(KIND)
        with pytest.raises(EnqueueError, match="has ended: a batch takes all members in it"):
            session.add_jobs(batch.of([KIND.job()]))
        session.commit()
    with pytest.raises(EnqueueError, match="a batch takes members inside of its block"):
        batch.add_job(KIND)
    assert rows(engine, "SELECT count(*) FROM outboxq.job") == [(0,)]


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("queues", "set", "mail", "--limit", "0"), "1"),
        (("queues", "set", "mail", "--limit", "-1"), "1"),
        (("queues", "set", "mail", "--rate", "0/min"), "to stop a queue, pause it"),
        (("queues", "set", "mail", "--rate", "5/fortnight"), "such as 10/s, 100/min"),
        (("queues", "set", "mail", "--burst", "5"), "a burst needs a rate"),
        (("queues", "set", "mail", "--rate", "5/s", "--burst", "0"), "the burst of a rate is 1 to 1,000,000, got 0"),
        (("queues", "set", "mail", "--limit", "10001"), "is 1 to 10,000, got 10001"),
        (("queues", "set", "mail", "--per-group", "0"), "is 1 to 1,000, got 0"),
        (("schedules", "put", "a", "--kind", "k", "--cron", "0 0 31 2 *"), "never due"),
        (("schedules", "put", "a", "--kind", "k", "--cron", "0 0 1 1 * *"), "leave the seconds out"),
        (("schedules", "put", "a", "--kind", "k", "--cron", "@daily", "--time-zone", "Mars"), "no time zone 'Mars'"),
        (("schedules", "put", "é" * 128, "--kind", "k", "--cron", "@daily"), "1 to 255 bytes, got 256"),
        (("schedules", "put", "a", "--kind", "k" * 64, "--cron", "@daily"), "1 to 63 bytes, got 64"),
        (("schedules", "put", "a", "--kind", "k", "--cron", "@daily", "--args", "[1]"), "takes a JSON object"),
        (("jobs", "change", "--kind", "record", "--args", '{"nme": 1}', "--app", APP), "the arguments do not fit"),
        (("jobs", "change", "--kind", "record", "--args", "[1]", "--app", APP), "takes a JSON object"),
    ],
)
def test_commands_refuse_it_as_wrong_usage(
    outboxq_database: Database, engine: Engine, sessions: Sessions, arguments: tuple[str, ...], says: str
) -> None:
    """With exit code 2, no traceback, and nothing written."""
    with sessions.begin() as session:
        session.add_job(external("record", queue="ledger"), name="a")
    refused = call(*arguments, url=outboxq_database.url)
    assert refused.exit_code == 2, refused
    assert says in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr
    assert rows(engine, "SELECT count(*) FROM outboxq.queue") == [(0,)]
    assert rows(engine, "SELECT count(*) FROM outboxq.schedule") == [(0,)]
    assert rows(engine, "SELECT args->>'name' FROM outboxq.job") == [("a",)]


_START = """\
from outboxq import Jobs

jobs = Jobs()
"""
_DECLARED = """\
@jobs.handler(queue="q")
def nightly(ctx): ...
"""
# What a registry's module says, and what its start does.
_STARTS = {
    "cron": (f'@jobs.schedule("0 0 31 2 *")\n{_DECLARED}', "'0 0 31 2 *' is never due"),
    "zone": (f'@jobs.schedule("@daily", time_zone="Mars")\n{_DECLARED}', "there is no time zone 'Mars'"),
    "limit": ('jobs.limit("mail", running=0)\n', "is 1 to 10,000, got 0: to stop a queue, pause it"),
    "rate": ('jobs.limit("mail", rate="0/s")\n', "to stop a queue, pause it"),
    "key": (_DECLARED.replace('"q"', '"q", group="k" * 513'), "a group key takes 1 to 512 bytes, got 513"),
}


@pytest.mark.first_and_last
@pytest.mark.parametrize(("command", "case"), [*(("relay", case) for case in _STARTS), ("doctor", "cron")])
def test_a_registry_that_says_what_cannot_be_does_not_start(
    outboxq_database: Database, tmp_path: Path, command: str, case: str
) -> None:
    """The command names the module, and what is wrong in it, and ends."""
    declared, says = _STARTS[case]
    (tmp_path / "cannot_be.py").write_text(_START + declared)
    said = run(command, "cannot_be:jobs", url=outboxq_database.url, cwd=tmp_path)
    assert said.exit_code == 2, said
    assert "module 'cannot_be' failed while it was imported" in said.stderr
    assert says in said.stderr
    assert "Traceback" not in said.stderr


def test_a_schedule_of_a_kind_that_no_handler_has_is_named(outboxq_database: Database) -> None:
    """Another relay may know the kind: the command takes it, and `doctor` says what to do."""
    url = outboxq_database.url
    call("schedules", "put", "a", "--kind", "unheard", "--queue", "ledger", "--cron", "@daily", url=url).ok()
    said = call("doctor", APP, url=url).stdout
    assert "schedule-kind-unknown" in said
    assert "outboxq schedules remove a" in said


def test_a_second_put_of_a_name_changes_the_schedule(engine: Engine) -> None:
    """There is one of each name."""
    with engine.begin() as connection:
        schedules.put(connection, "a", KIND.job(), cron="@daily")
        schedules.put(connection, "a", KIND.job(), cron="@hourly")
        assert [found.cron for found in schedules.list_schedules(connection)] == ["@hourly"]
