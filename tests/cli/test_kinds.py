"""`outboxq kinds`: one kind of a queue is paused, and the others go on."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig
from outboxq.events import Event, JobDone, JobsParked
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.cli import call
from tests.support.doctor import named
from tests.support.ledger import effects, rows
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
MODES = pytest.mark.parametrize("claim", ["transaction", "lease"])


def two_kinds(claim: str = "transaction") -> Jobs:
    jobs = Jobs()

    @jobs.handler(queue="mail", kind="send", claim=claim, retry=Backoff(max_attempts=1))  # type: ignore[arg-type]  # one of the two modes
    def send(ctx: Context) -> None:
        ctx.session.add(Effect(name="send"))

    @jobs.handler(queue="mail", kind="sort", claim=claim)  # type: ignore[arg-type]  # one of the two modes
    def sort(ctx: Context) -> None:
        ctx.session.add(Effect(name="sort"))

    return jobs


def add(sessions: sessionmaker[OutboxSession], jobs: Jobs, *kinds: str) -> None:
    registry = jobs.resolve()
    with sessions.begin() as session:
        for kind in kinds:
            session.add_job(registry.find(kind))


@pytest.mark.wide
@MODES
@pytest.mark.parametrize("batch_size", [1, 10])
def test_the_other_kinds_of_its_queue_go_on(
    outboxq_database: Database,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    claim: str,
    batch_size: int,
) -> None:
    """Jobs of the paused kind are put off, without an attempt counted, and found by no doctor as unknown."""
    jobs, url = two_kinds(claim), outboxq_database.url
    call("kinds", "pause", "send", "--queue", "mail", url=url).ok()
    add(sessions, jobs, "send", "sort", "send", "sort")
    events = drain(jobs, batch_size=batch_size)
    assert effects(engine) == ["sort", "sort"]
    assert sum(event.count for event in events if isinstance(event, JobsParked)) == 2
    assert rows(engine, "SELECT kind, state, attempt, parked > 0 FROM outboxq.job") == [
        ("send", "scheduled", 0, True),
        ("send", "scheduled", 0, True),
    ]
    assert not named(url, "kind-parked")
    assert call("stats", "--json", url=url).ok().json["parked_kinds"] == []
    (listed,) = call("kinds", "list", "--json", url=url).ok().json["kinds"]
    assert call("queues", "list", "--json", url=url).ok().json["paused_kinds"] == [listed]
    assert (listed["queue"], listed["kind"], listed["jobs"]) == ("mail", "send", 2)


def test_a_relay_hears_of_both_at_once(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Neither waits for the next beat of a lease; what was put off runs when the kind is resumed."""
    jobs, url = two_kinds(), outboxq_database.url
    with start_relay(jobs, RelayConfig(lease_seconds=3600, poll_seconds=3600)) as running:
        add(sessions, jobs, "sort")
        wait_until(lambda: running.of(JobDone), "the relay to work")
        call("kinds", "pause", "send", "--queue", "mail", url=url).ok()
        # Until the relay has heard of it.
        wait_until(lambda: pause_is_seen(sessions, jobs, running.of(JobsParked)), "a job to be put off")
        said = call("kinds", "resume", "send", "--queue", "mail", "--json", url=url).ok().json
        assert said["resumed"] == ["send"]
        wait_until(lambda: rows(engine, "SELECT count(*) FROM outboxq.job") == [(0,)], "all jobs to be done")
    assert not rows(engine, "SELECT FROM outboxq.dead_job")


def pause_is_seen(sessions: sessionmaker[OutboxSession], jobs: Jobs, parked: list[Event]) -> bool:
    if not parked:
        add(sessions, jobs, "send")
    return bool(parked)


def test_what_was_changed_is_said(outboxq_database: Database) -> None:
    """Also what was as it should be already."""
    url = outboxq_database.url
    assert "'send' is paused" in call("kinds", "pause", "send", "--queue", "mail", url=url).ok().stdout
    assert "'send' was paused already" in call("kinds", "pause", "send", "--queue", "mail", url=url).ok().stdout
    assert "'send' is resumed" in call("kinds", "resume", "send", "--queue", "mail", url=url).ok().stdout
    assert "'send' was not paused" in call("kinds", "resume", "send", "--queue", "mail", url=url).ok().stdout
    assert call("kinds", "pause", "", "--queue", "mail", url=url).exit_code != 0


@pytest.mark.wide
def test_the_doctor_names_a_kind_that_was_forgotten(outboxq_database: Database, engine: Engine) -> None:
    """A warning if it has been paused for long."""
    url = outboxq_database.url
    call("kinds", "pause", "send", "--queue", "mail", url=url).ok()
    assert [found["severity"] for found in named(url, "kind-paused")] == ["info"]
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.paused_kind SET paused_at = paused_at - interval '1 day'"))
    assert [found["severity"] for found in named(url, "kind-paused")] == ["warning"]


def test_a_kind_that_no_relay_knows_is_noted(outboxq_database: Database, engine: Engine) -> None:
    """It is paused, as it may come with a later version; without a relay that serves the queue nothing is noted."""
    url = outboxq_database.url
    assert call("kinds", "pause", "send_welcom", "--queue", "mail", url=url).ok().stderr == ""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, state, queues, kinds, slots, "
                "busy, listens, running, flush) VALUES (gen_random_uuid(), 'h', 1, '1', 11, 'serving', '{mail}', "
                "'{send_welcome}', 1, 0, true, '[]', 1)"
            )
        )
    said = call("kinds", "pause", "send_welcome", "send_wellcome", "--queue", "mail", url=url).ok()
    assert said.stderr == ("note: no relay that serves queue 'mail' knows the kind 'send_wellcome': was it meant?\n")
    assert call("kinds", "pause", "sent", "--queue", "post", url=url).ok().stderr == ""
