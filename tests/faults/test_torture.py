"""The proof of the proof: the checker finds every kind of broken history, and a run of real faults leaves none."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from uuid import UUID, uuid4

import psutil
import psycopg
import pytest
from sqlalchemy import Connection, Engine, text

from outboxq.errors import ConfigError
from outboxq.torture import TortureOptions
from outboxq.torture.faults import plan_run, plan_transactions
from outboxq.torture.history import CREATE, RULES, check_history
from outboxq.torture.producers import Journal
from tests.support import cli
from tests.support.fork_server import SERVER_NAME
from tests.support.waiting import PATIENCE, wait_until

BOUNDS = {"max_attempts": 5, "max_crashes": 3}


@pytest.fixture
def history(engine: Engine) -> Iterator[Connection]:
    """A database with the torture's tables and a history that is as it should be: done, dead, rolled back, unknown."""
    with engine.connect() as connection:
        connection.execute(text(CREATE))
        enqueued(connection, effects=1)
        enqueued(connection, dead=1)
        enqueued(connection, "failed", is_true=False)
        enqueued(connection, "unknown", is_true=False)
        enqueued(connection, "unknown", effects=1)
        leased = enqueued(connection, effects=1, token=2)
        for token in (1, 2):
            sighted(connection, leased, token)
            put(connection, "torture.start (job_id, token) VALUES (:id, :token)", {"id": leased, "token": token})
        connection.commit()
        assert check_history(connection, **BOUNDS).problems == ()
        yield connection


def enqueued(
    connection: Connection,
    outcome: str | None = "ok",
    *,
    is_true: bool = True,
    effects: int = 0,
    dead: int = 0,
    waiting: int = 0,
    attempt: int = 1,
    crashes: int = 0,
    token: int | None = None,
) -> UUID:
    """A job whose producer was told `outcome`, and what became of it."""
    job_id = uuid4()
    values = {"id": job_id, "attempt": attempt, "crashes": crashes, "token": token, "outcome": outcome}
    for _ in range(outcome is not None):
        put(connection, "torture.enqueue (job_id, outcome) VALUES (:id, :outcome)", values)
    for _ in range(is_true):
        put(connection, "torture.request (job_id) VALUES (:id)", values)
    for _ in range(effects):
        columns = "(job_id, attempt, crashes, token)"
        put(connection, f"torture.effect {columns} VALUES (:id, :attempt, :crashes, :token)", values)
    for _ in range(dead):
        columns = "(id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, created_at)"
        dead_values = "(:id, 'q', 'k', '{}', '{}', 0, :attempt, :crashes, '[]', 'why', now())"
        put(connection, f"outboxq.dead_job {columns} VALUES {dead_values}", values)
    for _ in range(waiting):
        columns = "(id, queue, kind, args, attempt, crashes)"
        put(connection, f"outboxq.job {columns} VALUES (:id, 'q', 'k', '{{}}', :attempt, :crashes)", values)
    return job_id


def put(connection: Connection, what: str, values: dict[str, object]) -> None:
    used = {name: value for name, value in values.items() if f":{name}" in what}
    connection.execute(text(f"INSERT INTO {what}"), used)


def sighted(connection: Connection, job_id: UUID, token: int) -> None:
    connection.execute(
        text("INSERT INTO torture.sighting (job_id, token, owner) VALUES (:id, :token, :owner)"),
        {"id": job_id, "token": token, "owner": uuid4()},
    )


def break_tokens(connection: Connection) -> UUID:
    job_id = enqueued(connection, effects=1, token=1)
    sighted(connection, job_id, 2)
    return job_id


def break_owners(connection: Connection) -> UUID:
    job_id = enqueued(connection, effects=1, token=1)
    sighted(connection, job_id, 1)
    sighted(connection, job_id, 1)
    return job_id


def ran(connection: Connection, place: int, *, effects: int = 1, **columns: object) -> UUID:
    """A job of a group or a key that came to its end, and what its effect says."""
    job_id = enqueued(connection, effects=effects)
    for table, names in (("effect", columns), ("request", {"key": columns.get("key"), "number": place})):
        changes = ", ".join(f"{name} = :{name}" for name in names)
        connection.execute(text(f"UPDATE torture.{table} SET {changes} WHERE job_id = :id"), {**names, "id": job_id})
    return job_id


def break_order(connection: Connection) -> UUID:
    ran(connection, 2, lane="g", seq=2)
    return ran(connection, 1, lane="g", seq=1)


def break_key(connection: Connection) -> UUID:
    ran(connection, 1, key="k", number=1)
    return ran(connection, 2, effects=0, key="k")


def break_batch(connection: Connection) -> UUID:
    callback = enqueued(connection, effects=1)
    ran(connection, 1, batch_id=callback)
    return callback


def saw(connection: Connection, what: str) -> UUID:
    job_id = enqueued(connection, effects=1)
    put(connection, "torture.violation (job_id, what) VALUES (:id, :what)", {"id": job_id, "what": what})
    return job_id


def break_start(connection: Connection) -> UUID:
    job_id = enqueued(connection, effects=1, token=1)
    for _ in range(2):
        put(connection, "torture.start (job_id, token) VALUES (:id, 1)", {"id": job_id})
    return job_id


def note_twice(connection: Connection) -> UUID:
    job_id = enqueued(connection, effects=1)
    connection.execute(text("INSERT INTO torture.enqueue (job_id, outcome) VALUES (:id, 'ok')"), {"id": job_id})
    return job_id


BROKEN = {
    "lost": ("lost", lambda c: enqueued(c)),
    "lost though nobody told": ("lost", lambda c: enqueued(c, "unknown")),
    "two effects": ("doubled", lambda c: enqueued(c, effects=2)),
    "an effect and a dead letter": ("doubled", lambda c: enqueued(c, effects=1, dead=1)),
    "an effect of a job that waits": ("doubled", lambda c: enqueued(c, effects=1, waiting=1)),
    "a ghost": ("ran though rolled back", lambda c: enqueued(c, "failed", is_true=False, effects=1)),
    "a ghost of which nobody told": (
        "ran though rolled back",
        lambda c: enqueued(c, "unknown", is_true=False, effects=1),
    ),
    "a dead ghost": ("ran though rolled back", lambda c: enqueued(c, "failed", is_true=False, dead=1)),
    "left": ("left", lambda c: enqueued(c, waiting=1)),
    "committed without its row": ("untrue", lambda c: enqueued(c, is_true=False, effects=1)),
    "failed with its row": ("untrue", lambda c: enqueued(c, "failed", effects=1)),
    "noted by nobody": ("untold", lambda c: enqueued(c, None, effects=1)),
    "noted twice": ("untold", note_twice),
    "an effect of attempt 6": ("over attempts", lambda c: enqueued(c, effects=1, attempt=6)),
    "dead at attempt 6": ("over attempts", lambda c: enqueued(c, dead=1, attempt=6)),
    "four crashes": ("over crashes", lambda c: enqueued(c, effects=1, crashes=4)),
    "waits with four crashes": ("over crashes", lambda c: enqueued(c, waiting=1, crashes=4)),
    "an effect under an old token": ("old token", break_tokens),
    "a token in two hands": ("two owners", break_owners),
    "a call begun twice under a token": ("begun twice", break_start),
    "the second of a group before the first": ("out of order", break_order),
    "two of a group at a time": ("not alone", lambda c: saw(c, "beside its group")),
    "two of a unique key at a time": ("twice at a time", lambda c: saw(c, "beside its key")),
    "a callback before a member of its batch": ("too early", break_batch),
    "one too many at a time": ("over limit", lambda c: saw(c, "over its limit")),
    "the newest of a key did not run": ("unseen", break_key),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_history_is_found(history: Connection, case: str) -> None:
    """Each way to break a promise is reported under its rule, with the job."""
    rule, break_it = BROKEN[case]
    job_id = break_it(history)
    history.commit()
    verdict = check_history(history, **BOUNDS)
    assert verdict.counts[rule] == 1
    assert any(problem.startswith(f"{rule}: 1 ") and str(job_id) in problem for problem in verdict.problems)


def test_every_rule_has_a_history_that_breaks_it() -> None:
    """A rule that nothing is seen to break might be one that nothing can break."""
    assert {rule for rule, _ in BROKEN.values()} == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("leave", "expected"),
    [
        ("UPDATE torture.counter SET value = 1 WHERE id = 0", "open transactions"),
        ("SELECT pg_advisory_lock(1)", "locks"),
        ("LOCK TABLE torture.effect IN ACCESS SHARE MODE", "locks"),
        ("PREPARE TRANSACTION 'left'", "prepared transactions"),
    ],
)
def test_what_is_left_open_is_found(history: Connection, outboxq_database, leave: str, expected: str) -> None:
    """A transaction, a lock or a prepared transaction of anybody else's is reported after the end."""
    with psycopg.connect(outboxq_database.url.replace("+psycopg", "")) as other:
        if leave.startswith("PREPARE") and other.execute("SHOW max_prepared_transactions").fetchone() == ("0",):
            pytest.skip("this server allows no prepared transactions")
        if leave.startswith("PREPARE"):
            other.execute("INSERT INTO torture.request (job_id) VALUES (gen_random_uuid())")
        other.execute(leave)
        problems = check_history(history, **BOUNDS).problems
        other.rollback()
    assert any(problem.endswith(f" {expected} after the end") for problem in problems), problems


def test_counters_that_are_half_done_are_found(history: Connection) -> None:
    """Rows of one handler that were committed without its effect are reported, although no job is lost or doubled."""
    history.execute(text("UPDATE torture.counter SET value = 1 WHERE id = 0"))
    history.commit()
    assert check_history(history, **BOUNDS).problems == ("counters differ by 1 from the effects that were to count",)


def test_the_journal_survives_a_flush_that_is_repeated(history: Connection) -> None:
    """What was written before the answer was lost is not in it twice."""
    journal, job_id = Journal(), enqueued(history, None, effects=1)
    journal.note([job_id], "ok")
    journal.flush(history)
    again = Journal()
    again.note([job_id], "ok")
    again.flush(history)
    assert check_history(history, **BOUNDS).problems == ()


def test_a_seed_gives_the_same_plan() -> None:
    """Faults, their parameters, the transactions and what handlers are told; another seed gives another."""

    def drawn(seed: int) -> tuple[object, ...]:
        options = TortureOptions(jobs=1_000, faults=60, seed=seed)
        plan = plan_run(options, lease_seconds=2)
        return plan, tuple(plan_transactions(options, plan, 2))

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    plan, transactions = drawn(7)
    assert len(plan.faults) + sum(plan.inside.values()) == 60
    committed = [told for planned in transactions if planned.fate != "roll back" for told in planned.behaviours]
    assert len(committed) == 1_000
    told = {told for told in committed if told not in ("plain", "give-up")}
    assert told == {"raise", "flush-raise", "exit", "deadlock-up", "deadlock-down"}


def test_a_plan_of_some_kinds_of_faults_has_no_others() -> None:
    """As many as were asked for, of processes and of handlers."""
    some = TortureOptions(jobs=1_000, faults=60, seed=7, only=("relay-killed", "handler-raise"))
    plan = plan_run(some, lease_seconds=2)
    assert {fault.kind for fault in plan.faults} == {"relay-killed"}
    assert plan.inside.keys() == {"handler-raise"}
    assert len(plan.faults) + plan.inside["handler-raise"] == 60


@pytest.mark.parametrize(
    "wrong",
    [
        {"jobs": 10},
        {"jobs": 1000, "faults": 101},
        {"mode": "both"},
        {"relays": 0},
        {"slots": 0},
        {"only": ("relay-kiled",)},
        {"minutes": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError):
        TortureOptions(**wrong)


def test_no_database_can_be_named() -> None:
    """There is no option for one, and the environment's is not looked at."""
    assert cli.call("torture", "--database-url", "postgresql://nobody@127.0.0.1:1/none").exit_code == 2


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    ("mode", "jobs", "faults", "slots"),
    [
        ("transaction", 300, 12, 2),
        pytest.param("mixed", 2_000, 60, 2, marks=pytest.mark.large),
        pytest.param("calls", 600, 40, 10, marks=pytest.mark.wide),
    ],
)
def test_jobs_survive_random_faults(mode: str, jobs: int, faults: int, slots: int) -> None:
    """Nothing lost, doubled, left or run though rolled back; the configured database is never asked."""
    seed = os.environ.get("TORTURE_SEED", "1")
    options = ("--mode", mode, "--jobs", jobs, "--faults", faults, "--slots", slots, "--seed", seed, "--minutes", 15)
    outcome = cli.run("torture", *options, "--json", url="postgresql://nobody@127.0.0.1:1/none", seconds=1_100)
    assert outcome.exit_code == 0, outcome
    report = json.loads(outcome.stdout)
    assert report["problems"] == []
    assert [report[name] for name in ("lost", "doubled", "ran_though_rolled_back", "jobs_left")] == [0, 0, 0, 0]
    assert report["jobs_enqueued"] == report["effects_applied"] + report["dead_letters"]
    # On a busy machine a relay may be gone before a fault meets it.
    assert sum(report["faults"].values()) >= faults / 2, "so many faults must have met something"
    assert report["commits_unanswered"] == report["commits_unanswered_as_promised"]
    assert report["commits_unanswered"] > 0, "no producer met an unknown commit"


@pytest.mark.large
@pytest.mark.timeout(600)
def test_calls_under_a_lease_survive_kills() -> None:
    """Each has one effect, and began again only after its relay was killed: once for each token."""
    options = ("--mode", "calls", "--slots", 10, "--relays", 2, "--only", "relay-killed", "--jobs", 300, "--faults", 3)
    url = "postgresql://nobody@127.0.0.1:1/none"
    outcome = cli.run("torture", *options, "--seed", 1, "--json", url=url, seconds=500)
    assert outcome.exit_code == 0, outcome
    report = json.loads(outcome.stdout)
    assert report["faults"] == {"relay-killed": 3}
    assert report["jobs_enqueued"] == report["effects_applied"] + report["dead_letters"]
    assert report["calls_begun"] > report["jobs_enqueued"], "no call was killed"
    assert report["jobs_of_killed_relays"] > 0


def test_an_interrupted_run_leaves_nothing() -> None:
    """Ctrl-C ends relays and server, and says so."""
    command = cli.command("torture", "--jobs", 5_000, "--faults", 0, "--seed", 3)
    process = subprocess.Popen(command, env=cli.environment(), stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "PostgreSQL" in line
        me = psutil.Process(process.pid)

        def found() -> list[psutil.Process]:
            return [child for child in me.children(recursive=True) if child.name() != SERVER_NAME]

        started = wait_until(lambda: len(children := found()) >= 5 and children, "relays and server")
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.wait(PATIENCE)
    assert process.returncode == 1
    assert "interrupted" in rest
    wait_until(lambda: not any(child.is_running() for child in started), "everything to end")
