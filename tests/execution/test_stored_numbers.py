"""Numbers at the end of their type: whatever a row holds, its job ends, and no other job waits for it."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig
from outboxq.database.driver import run_script
from outboxq.events import Event, JobDied, JobDone
from outboxq.job import Job
from outboxq.outbox.kinds import JobKind
from outboxq.statements.lease import NEVER, reap
from outboxq.statements.lease_mode import release_leased
from tests.conftest import StartRelay
from tests.support import app
from tests.support.app import Effect
from tests.support.row_checks import drop_checks
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]

GREATEST_TOKEN = 2**63 - 1
EXTREMES = (
    "attempt = 2147483647",
    "attempt = -2147483648",
    "crashes = 32767",
    "crashes = -32768",
    "parked = 32767",
    "parked = -32768",
    f"lease_token = {GREATEST_TOKEN}",
    f"lease_token = {-GREATEST_TOKEN - 1}",
)
# What the table's checks allow, and not one more.
BOUNDS = ("attempt = 2147483646", "crashes = 32766", "parked = 32766", f"lease_token = {GREATEST_TOKEN - 1}")


def leased_jobs() -> Jobs:
    jobs = Jobs()

    @jobs.handler(queue="ledger", claim="lease", kind="record", retry=Backoff(max_attempts=3, first_seconds=0.0))
    def record(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))

    return jobs


def poison(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    extremes: tuple[str, ...],
    values: str = "",
    kind: JobKind[str] = app.record,
) -> None:
    """A job for each extreme number, named by it, with these other values in its row; and another job behind them."""
    for extreme in extremes:
        with sessions.begin() as session:
            handle = session.add_job(kind, name=extreme)
        with engine.begin() as connection:
            row = ", ".join(part for part in (extreme, values) if part)
            connection.execute(text(f"UPDATE outboxq.job SET {row} WHERE id = :id"), {"id": handle.id})
    with sessions.begin() as session:
        session.add_job(app.record, name="another")


@pytest.fixture
def unchecked(engine: Engine) -> None:
    """Rows as an installation may hold them that has not come to the step with the checks."""
    drop_checks(engine)


@pytest.fixture(params=["before the checks", "at their bounds"])
def extremes(request: pytest.FixtureRequest, engine: Engine) -> tuple[str, ...]:
    """What a row may hold; what relays write behind it, the checks allow."""
    if request.param == "at their bounds":
        return BOUNDS
    drop_checks(engine)
    return EXTREMES


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


def names(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return sorted(connection.execute(text("SELECT name FROM effect_ledger")).scalars())


@pytest.mark.first_and_last
@pytest.mark.parametrize("state", ["ready", "scheduled", "suspect"])
@pytest.mark.parametrize("mode", ["transaction", "lease"])
def test_a_job_with_any_number_is_done_and_holds_up_no_other(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    extremes: tuple[str, ...],
    mode: str,
    state: str,
) -> None:
    """Claimed in either mode, as ready, due or suspected jobs: all of their queue are done."""
    poison(engine, sessions, extremes, f"state = '{state}'")
    events = drain(leased_jobs() if mode == "lease" else app.jobs)
    assert names(engine) == sorted(["another", *extremes])
    assert len([event for event in events if isinstance(event, JobDone)]) == len(extremes) + 1


@pytest.mark.each_value
@pytest.mark.parametrize("state", ["ready", "suspect"])
def test_a_failing_job_with_any_number_is_given_up(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, extremes: tuple[str, ...], state: str
) -> None:
    """What its failure writes is in the range of the columns, too, and attempts are bounded whatever was stored."""
    poison(engine, sessions, extremes, f"state = '{state}'", kind=app.fail)
    drain(batch_size=2)
    assert names(engine) == ["another"]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT args->>'name', attempt, crashes FROM outboxq.job")).all() == []
        dead = "SELECT args->>'name' FROM outboxq.dead_job"
        assert sorted(connection.execute(text(dead)).scalars()) == sorted(extremes)


@pytest.mark.first_and_last
@pytest.mark.parametrize("state", ["ready", "scheduled", "suspect"])
def test_a_job_of_an_unknown_kind_with_any_number_is_parked(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, extremes: tuple[str, ...], state: str
) -> None:
    """By its claim or at the head of its queue: it waits for a relay that knows it."""
    poison(engine, sessions, extremes, f"state = '{state}', kind = 'unknown'")
    drain()
    assert names(engine) == ["another"]
    with engine.connect() as connection:
        later = "SELECT count(*) FROM outboxq.job WHERE state = 'scheduled' AND run_at > clock_timestamp()"
        assert connection.execute(text(later)).scalar_one() == len(extremes)


@pytest.mark.parametrize(("max_crashes", "dead"), [(3, 1), (NEVER, 0)])
def test_the_reaper_takes_a_job_with_any_number(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    connection: Connection,
    extremes: tuple[str, ...],
    max_crashes: int,
    dead: int,
) -> None:
    """Those of a dead relay come back or are buried, all in one sweep; the tokens they get are others."""
    poison(engine, sessions, extremes)
    tokens = "SELECT id, lease_token FROM outboxq.job"
    with connection.begin():
        connection.execute(text("UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid()"))
        before = set(connection.execute(text(tokens)).all())
        assert len(run_script(connection, reap("outboxq", max_crashes, 100))) == len(extremes) + 1
        after = set(connection.execute(text(f"{tokens} WHERE state = 'suspect'")).all())
    assert len(after) == len(extremes) + 1 - dead
    assert not before & after


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("token", [GREATEST_TOKEN, -GREATEST_TOKEN - 1, -1, 0, 41])
def test_a_job_that_is_given_back_has_another_token(
    engine: Engine, sessions: sessionmaker[OutboxSession], connection: Connection, token: int
) -> None:
    """Also behind the greatest there is: a handler that held it before can complete nothing of it."""
    poison(engine, sessions, (f"lease_token = {token}",), "attempt = -2147483648, state = 'leased'")
    with connection.begin():
        job_id = connection.execute(text("SELECT id FROM outboxq.job WHERE state = 'leased'")).scalar_one()
        run_script(connection, release_leased("outboxq", [held_job(job_id, token)]))
        after = text("SELECT state, lease_token FROM outboxq.job WHERE id = :id")
        state, given = connection.execute(after, {"id": job_id}).one()
    assert (state, given != token) == ("ready", True)


def held_job(job_id: object, token: int) -> Job:
    rest = dict.fromkeys((name for name in Job.__struct_fields__ if name not in ("id", "lease_token")), None)
    return Job(id=job_id, lease_token=token, **rest)


def test_the_greatest_token_fences_as_any_other(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """A job that is taken from its handler while it has the greatest token that may be runs again, and is done once."""
    jobs, taken = Jobs(), []

    @jobs.handler(queue="ledger", claim="lease", kind="record", retry=Backoff(max_attempts=1))
    def record(ctx: Context, name: str) -> None:
        if name != "another" and not taken:
            taken.append(ctx.job.lease_token)
            with engine.begin() as connection:
                connection.execute(text("UPDATE outboxq.relay SET alive_until = '0001-01-03 00:00:00+00'"))
                run_script(connection, reap("outboxq", 3, 100))
        ctx.session.add(Effect(name=name))

    almost = f"lease_token = {GREATEST_TOKEN - 2}"
    poison(engine, sessions, (almost,))
    with start_relay(jobs, RelayConfig(slots_per_queue=1, lease_seconds=1)) as running:
        wait_until(lambda: len(running.of(JobDone)) == 2, "both to be done")
    assert names(engine) == ["another", almost]
    assert taken == [GREATEST_TOKEN - 1]
    assert not running.of(JobDied)
