"""`outboxq queues` and `outboxq stats`: pausing, and counting."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig, external
from outboxq.events import Event, JobDone
from outboxq.postgres import Database
from outboxq.tables import job
from tests.conftest import StartRelay
from tests.support import app
from tests.support.cli import call, run
from tests.support.leases import lease
from tests.support.ledger import rows, waiting
from tests.support.waiting import wait_until


def make_due(engine: Engine, ago: str = "0 seconds") -> None:
    """Let the time of the job named "due" come."""
    with engine.begin() as connection:
        statement = "UPDATE outboxq.job SET run_at = now() - CAST(:ago AS interval) WHERE args ->> 'name' = 'due'"
        connection.execute(text(statement), {"ago": ago})


def done(events: list[Event]) -> list[JobDone]:
    return [event for event in events if isinstance(event, JobDone)]


def test_a_paused_queue_keeps_its_jobs_until_it_is_resumed(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """Relays claim nothing from a paused queue, ready or due, and everything after it is resumed."""
    url = outboxq_database.url
    with sessions.begin() as session:
        session.add_job(app.record, name="ready")
        session.add_job(app.record.options(delay=timedelta(hours=1)), name="due")
        session.add_job(app.record_async, name="elsewhere")
    make_due(engine)
    assert run("queues", "pause", "ledger", url=url).ok().stdout == "'ledger' is paused\n"
    assert [event.job.queue for event in done(drain())] == ["ledger-async"]
    assert waiting(engine) == 2
    assert run("queues", "resume", "ledger", url=url).ok().stdout == "'ledger' is resumed\n"
    assert len(done(drain())) == 2


def test_resume_wakes_a_sleeping_relay(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, engine: Engine
) -> None:
    """A relay that sleeps for an hour on a paused queue runs its jobs as soon as it is resumed."""
    url = outboxq_database.url
    call("queues", "pause", "ledger", url=url).ok()
    with sessions.begin() as session:
        session.add_job(app.record, name="held back")
    with start_relay(config=RelayConfig(poll_seconds=3600)) as running:
        wait_until(lambda: sleeps(engine, "ledger"), "the relay to sleep")
        assert waiting(engine) == 1
        call("queues", "resume", "ledger", url=url).ok()
        wait_until(lambda: running.of(JobDone), "the job to be done")


def sleeps(engine: Engine, queue: str) -> bool:
    """Whether a relay holds the sleep flag of the queue, and has since looked once more and gone idle."""
    with engine.connect() as connection:
        return connection.execute(
            text(
                "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' "
                "AND classid = (hashtext('outboxq_outboxq')::bigint & 4294967295)::oid "
                "AND objid = (hashtext(:queue)::bigint & 4294967295)::oid "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            ),
            {"queue": queue},
        ).scalar_one()


def test_a_queue_may_be_paused_before_its_first_job(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """The name is taken as it is, with a word that nothing is known of it, in case it is misspelt."""
    url = outboxq_database.url
    said = call("queues", "pause", "ledger", "o'dd; name", url=url).ok()
    assert '"o\'dd; name"' in said.stderr
    with sessions.begin() as session:
        session.add_job(app.record, name="first")
    assert done(drain()) == []
    assert waiting(engine) == 1
    paused = call("queues", "list", "--json", url=url).ok().json["queues"]
    assert [row["queue"] for row in paused] == ["ledger", "o'dd; name"]
    assert all(row["paused_at"].endswith("Z") for row in paused)


def test_pausing_and_resuming_twice_changes_nothing(outboxq_database: Database) -> None:
    """Both can be repeated; the time of the first pause stays."""
    url = outboxq_database.url
    first = call("queues", "pause", "q", "--json", url=url).ok().json
    since = call("queues", "list", "--json", url=url).ok().json
    again = call("queues", "pause", "q", "q", "--json", url=url).ok().json
    assert first == {"paused": ["q"], "unchanged": [], "unknown": ["q"]}
    assert again == {"paused": [], "unchanged": ["q"], "unknown": ["q"]}
    assert call("queues", "list", "--json", url=url).ok().json == since
    assert call("queues", "resume", "q", "--json", url=url).ok().json == {
        "resumed": ["q"], "unchanged": [], "unknown": [],
    }  # fmt: skip
    assert call("queues", "resume", "q", "--json", url=url).ok().json == {
        "resumed": [], "unchanged": ["q"], "unknown": ["q"],
    }  # fmt: skip
    assert call("queues", "resume", "q", url=url).ok().stdout == "'q' was not paused\n"


@pytest.mark.parametrize(
    ("verb", "said"), [("pause", "'acounts' is paused\n"), ("resume", "'acounts' was not paused\n")]
)
def test_a_queue_that_nothing_is_known_of_is_named_by_both(
    verb: str, said: str, outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """Pausing and resuming do what they can for it, say what it is now, and ask whether it was meant."""
    url = outboxq_database.url
    with sessions.begin() as session:
        session.add_job(external("k", queue="accounts"))
    shown = call("queues", verb, "acounts", url=url).ok()
    assert shown.stdout == said
    assert shown.stderr == (
        "note: queue 'acounts' has no job and no dead letter, and no relay serves it (known: accounts): was it meant?\n"
    )


def test_a_mistyped_name_stays_unknown(outboxq_database: Database, sessions: sessionmaker[OutboxSession]) -> None:
    """Its pause, or a limit of it, makes no queue of it: it is asked for each time, and offered to no other name."""
    url = outboxq_database.url
    call("queues", "pause", "acounts", url=url).ok()
    call("queues", "set", "acounts", "--limit", "5", url=url).ok()
    with sessions.begin() as session:
        session.add_job(external("k", queue="accounts"))
    for command in (["pause", "acounts"], ["pause", "mial"], ["set", "acounts", "--limit", "6"]):
        said = call("queues", *command, url=url).ok().stderr
        assert said.endswith("no relay serves it (known: accounts): was it meant?\n"), command


def test_an_empty_queue_that_a_relay_serves_is_known(
    outboxq_database: Database, engine: Engine, start_relay: StartRelay
) -> None:
    """Nothing is asked: an operator may well pause it before anything waits there."""
    url = outboxq_database.url
    with start_relay():
        wait_until(lambda: rows(engine, "SELECT 1 FROM outboxq.relay_status WHERE state = 'serving'"), "the relay")
        paused = call("queues", "pause", "ledger", url=url).ok()
    assert (paused.stdout, paused.stderr) == ("'ledger' is paused\n", "")


@pytest.mark.wide
def test_the_list_has_the_limits_that_code_declares(
    outboxq_database: Database, engine: Engine, start_relay: StartRelay
) -> None:
    """Of living relays, with who has set them: what an operator sets stands before them, limit by limit."""
    url, jobs = outboxq_database.url, Jobs()
    jobs.handler(queue="mail", kind="send")(lambda ctx: None)
    jobs.limit("mail", running=5, rate="10/s")

    def listed() -> list[dict[str, object]]:
        keys = ("queue", "limit", "rate", "set_by")
        found = call("queues", "list", "--json", url=url).ok().json["queues"]
        return [{key: each[key] for key in keys} for each in found]

    assert listed() == []
    with start_relay(jobs):
        wait_until(lambda: rows(engine, "SELECT 1 FROM outboxq.relay_status WHERE state = 'serving'"), "the relay")
        assert listed() == [{"queue": "mail", "limit": 5, "rate": "10/s", "set_by": "application"}]
        assert "application" in call("queues", "list", url=url).ok().stdout
        call("queues", "set", "mail", "--limit", "2", url=url).ok()
        assert listed() == [{"queue": "mail", "limit": 2, "rate": "10/s", "set_by": "operator"}]


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_queue_that_nothing_is_known_of_is_unknown_in_the_json_of_both(verb: str, outboxq_database: Database) -> None:
    """The keys are the same: what was changed, what was so already, what nothing is known of."""
    shown = call("queues", verb, "acounts", "--json", url=outboxq_database.url).ok()
    assert list(shown.json) == [f"{verb}d", "unchanged", "unknown"]
    assert shown.json["unknown"] == ["acounts"]
    assert shown.json[f"{verb}d"] + shown.json["unchanged"] == ["acounts"]
    assert "was it meant?" in shown.stderr


def test_the_list_has_every_queue_that_is_anywhere(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]], engine: Engine
) -> None:
    """Ready, scheduled, suspect and leased jobs, dead letters and settings each make a queue known, once."""
    with sessions.begin() as session:
        session.add_job(app.end, how="dead")
    drain()
    with sessions.begin() as session:
        for queue in ("b", "a", "b"):
            session.add_job(external("k", queue=queue))
        session.add_job(external("k", queue="c").options(delay=timedelta(hours=1)))
        session.add_job(external("k", queue="d"))
        session.add_job(external("k", queue="e"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect' WHERE queue = 'd'"))
        connection.execute(
            text("UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid() WHERE queue = 'e'")
        )
    url = outboxq_database.url
    call("queues", "pause", "f", "a", url=url).ok()
    found = call("queues", "list", "--json", url=url).ok().json["queues"]
    assert [row["queue"] for row in found] == ["a", "b", "c", "d", "e", "f", "ledger"]
    assert [row["queue"] for row in found if row["paused_at"]] == ["a", "f"]
    table = run("queues", "list", url=url).ok().stdout
    assert len(table.splitlines()) == 1 + 7


def test_stats_count_every_job_once(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]], engine: Engine
) -> None:
    """Each job in its state, the parked and the dead, per queue; how long the oldest waits; the pause."""
    with sessions.begin() as session:
        session.add_job(app.end, how="dead")
        session.add_job(external("mystery", queue="ledger"))
    drain()
    with sessions.begin() as session:
        for _ in range(2):
            session.add_job(app.record, name="ready")
        session.add_job(app.record.options(delay=timedelta(hours=1)), name="due")
        session.add_job(app.record.options(delay=timedelta(hours=1)), name="later")
        for state in ("leased", "orphaned", "suspect"):
            session.add_job(external(state, queue="ledger"))
    make_due(engine, "90 seconds")
    with engine.begin() as connection:
        ids = {row.kind: row.id for row in connection.execute(select(job.c.kind, job.c.id))}
        lease(connection, ids["leased"], "1 hour")
        lease(connection, ids["orphaned"], "-1 second")
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect' WHERE kind = 'suspect'"))
        # Parked for five seconds: on a busy machine it is due by now.
        connection.execute(text("UPDATE outboxq.job SET run_at = run_at + interval '1 hour' WHERE parked > 0"))
    url = outboxq_database.url
    call("queues", "pause", "ledger", "idle", url=url).ok()
    found = run("stats", "--json", url=url).ok().json
    idle, ledger = found["queues"]
    assert list(ledger) == [
        "queue", "ready", "grouped", "running", "scheduled", "due", "parked", "leased", "orphaned", "suspect", "dead",
        "oldest_waiting_seconds", "paused_at", "exact", "estimated",
    ]  # fmt: skip
    assert 90 <= ledger.pop("oldest_waiting_seconds") < 150
    assert ledger.pop("paused_at") is not None
    assert (ledger.pop("exact"), ledger.pop("estimated")) == (True, [])
    assert ledger == {
        "queue": "ledger", "ready": 2, "grouped": 0, "running": 0, "scheduled": 2, "due": 1, "parked": 1, "leased": 1,
        "orphaned": 1, "suspect": 1, "dead": 1,
    }  # fmt: skip
    assert (idle["queue"], idle["ready"], idle["oldest_waiting_seconds"]) == ("idle", 0, None)
    (parked,) = found["parked_kinds"]
    assert (parked["queue"], parked["kind"], parked["jobs"]) == ("ledger", "mystery", 1)
    table = call("stats", url=url).ok().stdout
    assert "Kinds that no relay knows:" in table
    assert "mystery" in table


def test_a_job_that_waits_for_its_retry_is_not_parked_any_more(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]], engine: Engine
) -> None:
    """A kind counts as unknown only until a relay that knows it has run the job."""
    late = Jobs()

    @late.handler(queue="ledger", kind="mystery", retry=Backoff(first_seconds=3600))
    def solve(ctx: Context) -> None:
        raise ValueError("not yet")

    with sessions.begin() as session:
        session.add_job(external("mystery", queue="ledger"))
    drain()
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET run_at = clock_timestamp()"))
    drain(late)
    found = call("stats", "--json", url=outboxq_database.url).ok().json
    (ledger,) = found["queues"]
    assert (ledger["scheduled"], ledger["parked"]) == (1, 0)
    assert found["parked_kinds"] == []
