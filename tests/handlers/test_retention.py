"""Windows: what is remembered for how long, refused where a retry outlives it, and forgotten by every sort of relay."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.errors import RegistryError
from outboxq.events import Event, JobDone, Pruned, RelayStopped
from outboxq.inbox import Inbox
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.support.cli import REPOSITORY, run
from tests.support.matrices import sampled
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
TARGET = "tests.support.app:jobs"
PAYMENTS = Inbox("payments", retention=timedelta(days=7))


@pytest.fixture
def drain(drain: Drain) -> Drain:
    """A drain that deletes what is over, as users' drains do."""
    return partial(drain, prune_seconds=60)


def accept(sessions: sessionmaker[OutboxSession], message_id: str) -> bool:
    with sessions.begin() as session:
        return PAYMENTS.accept(session, message_id)


def let_time_pass(engine: Engine, length: timedelta) -> None:
    """Move everything that is remembered into the past."""
    with engine.begin() as connection:
        for table in ("inbox", "effect"):
            connection.execute(
                text(f"UPDATE outboxq.{table} SET expires_at = expires_at - :length"), {"length": length}
            )


def remembered(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT message_id FROM outboxq.inbox ORDER BY 1")).scalars())


def test_a_message_is_new_again_when_its_retention_is_over(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A duplicate until then, and not a second earlier."""
    assert accept(sessions, "m")
    let_time_pass(engine, timedelta(days=7) - timedelta(minutes=1))
    drain()
    assert not accept(sessions, "m")
    let_time_pass(engine, timedelta(minutes=1))
    drain()
    assert accept(sessions, "m")


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_an_effect_is_remembered_as_its_scope_says(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, flavour: str
) -> None:
    """As declared, else 30 days; when that is over it is called anew, and never before."""
    jobs, calls = Jobs(), []
    charges = jobs.scope("stripe-charge", retention=timedelta(days=90))

    def call(provider_key: str) -> str:
        calls.append(provider_key)
        return "ok"

    async def call_async(provider_key: str) -> str:
        return call(provider_key)

    @jobs.handler(queue="sync", claim="lease")
    def charge_sync(ctx: Context) -> None:
        for scope in (charges, "undeclared"):
            ctx.once(scope, key="order 7", call=call)

    @jobs.handler(queue="async", claim="lease")
    async def charge_async(ctx: AsyncContext) -> None:
        for scope in (charges, "undeclared"):
            await ctx.once(scope, key="order 7", call=call_async)

    def charge() -> None:
        with sessions.begin() as session:
            session.add_job(charge_sync if flavour == "sync" else charge_async)
        assert [event for event in drain(jobs) if isinstance(event, JobDone)]

    charge()
    with engine.connect() as connection:
        kept = text("SELECT scope, expires_at - changed_at FROM outboxq.effect")
        assert dict(connection.execute(kept).all()) == {
            charges: pytest.approx(timedelta(days=90), abs=timedelta(seconds=1)),
            "undeclared": pytest.approx(timedelta(days=30), abs=timedelta(seconds=1)),
        }
    let_time_pass(engine, timedelta(days=29))
    charge()
    assert len(calls) == 2
    let_time_pass(engine, timedelta(days=2))
    drain()
    charge()
    assert len(calls) == 3, "the undeclared scope, whose 30 days are over"


def test_a_relay_whose_windows_are_too_short_does_not_start(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Refused before anything is claimed or connected; the job waits as it was."""
    jobs = Jobs()
    jobs.scope("stripe-charge", retention=timedelta(hours=1))

    @jobs.handler(retry=Backoff(max_attempts=15))
    def charge(ctx: Context) -> None: ...

    with sessions.begin() as session:
        session.add_job(charge)
    with pytest.raises(RegistryError, match="scope 'stripe-charge' is remembered for 1 hour, and handler 'charge' may"):
        Relay(outboxq_database.url, jobs)
    with engine.connect() as connection:
        waiting = connection.execute(text("SELECT state, attempt FROM outboxq.job")).all()
    assert waiting == [("ready", 0)]


def test_the_command_line_refuses_windows_that_are_too_short(outboxq_database: Database, tmp_path: Path) -> None:
    """Exit code 2: starting again does not help."""
    (tmp_path / "short.py").write_text(
        "from datetime import timedelta\n\nfrom outboxq import Context, Jobs\n\njobs = Jobs()\n"
        "payments = jobs.inbox('payments', retention=timedelta(minutes=1))\n\n\n"
        "@jobs.handler()\ndef pay(ctx: Context) -> None: ...\n"
    )
    refused = run("relay", "short:jobs", "--drain", url=outboxq_database.url, cwd=tmp_path)
    assert refused.exit_code == 2
    # Wrapped to the terminal's width.
    assert "consumer 'payments' is remembered for 1 minute" in " ".join(refused.stderr.replace("│", " ").split())


def test_a_drain_prunes_once_at_its_end(engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain) -> None:
    """In a cron job it may be the only relay there ever is; told before the relay says that it has stopped."""
    accept(sessions, "m")
    let_time_pass(engine, timedelta(days=8))
    events = drain()
    assert remembered(engine) == []
    assert [event for event in events if isinstance(event, Pruned | RelayStopped)] == [
        Pruned(1, 0),
        RelayStopped(done=0, failed_attempts=0, dead=0, abandoned=0),
    ]


def test_a_drain_that_is_stopped_does_not_prune(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Whoever stops it wants it to end."""
    accept(sessions, "m")
    let_time_pass(engine, timedelta(days=8))
    jobs = Jobs()

    @jobs.handler()
    def stop(ctx: Context) -> None:
        relay.stop()

    with sessions.begin() as session:
        session.add_job(stop)
    relay = Relay(outboxq_database.url, jobs, hooks=[])
    assert relay.drain().done == 1
    assert remembered(engine) == ["m"]


def test_pruning_can_be_turned_off(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, start_relay: StartRelay
) -> None:
    """`prune_seconds=0`: neither a drain nor a running relay forgets anything; another relay may."""
    accept(sessions, "m")
    let_time_pass(engine, timedelta(days=8))
    drain(prune_seconds=0)
    assert remembered(engine) == ["m"]
    with start_relay(config=RelayConfig(prune_seconds=0)) as silent, start_relay(config=RelayConfig(prune_seconds=1)):
        wait_until(lambda: remembered(engine) == [], "the other relay to prune")
    assert silent.of(Pruned) == []


@pytest.mark.wide
@pytest.mark.parametrize("processes", sampled([2, 1]))
def test_the_command_line_prunes_and_can_be_told_not_to(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], processes: int
) -> None:
    """`outboxq relay --prune-seconds`, also through the processes of a supervisor."""
    accept(sessions, "m")
    let_time_pass(engine, timedelta(days=8))
    words = ("relay", TARGET, "--drain", "--processes", processes)
    run(*words, "--prune-seconds", 0, url=outboxq_database.url, cwd=REPOSITORY).ok()
    assert remembered(engine) == ["m"]
    said = run(*words, "--log-level", "debug", url=outboxq_database.url, cwd=REPOSITORY).ok()
    assert remembered(engine) == []
    assert said.stderr.count("expired messages, effects, unique keys and finished jobs were deleted: messages=1 ") == 1


def test_the_command_line_refuses_pauses_that_make_no_sense(outboxq_database: Database) -> None:
    """With what it takes."""
    refused = run("relay", TARGET, "--prune-seconds", -1, url=outboxq_database.url, cwd=REPOSITORY)
    assert refused.exit_code == 2
    assert "prune_seconds takes 1 to 86400, or 0 for never" in " ".join(refused.stderr.replace("│", " ").split())
