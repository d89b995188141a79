"""Chains: a job that is done is followed by the next one, once, whatever ran it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce

import msgspec
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import (
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    DeadLetter,
    Discard,
    Jobs,
    OutboxSession,
)
from outboxq.errors import ArgumentError, JobTooLarge, PayloadError
from outboxq.events import BatchFinished, Event, FollowerSuppressed, JobDied, JobDone
from outboxq.new_job import NewJob
from outboxq.observability.logging import log_event
from outboxq.outbox.stored_job import unfold_chain
from tests.support.app import Effect
from tests.support.ledger import of

jobs = Jobs()
SOON = Backoff(max_attempts=3, first_seconds=0.0, jitter=0.0)
Drain = Callable[..., list[Event]]


@jobs.handler(queue="chain", retry=SOON)
def alone(ctx: Context, name: str) -> None:
    ctx.session.add(Effect(name=name))


@jobs.handler(queue="chain-leased", claim="lease", retry=SOON)
def leased(ctx: Context, name: str) -> None:
    ctx.session.add(Effect(name=name))


@jobs.handler(queue="chain-leased", claim="lease", retry=SOON)
def leased_idle(ctx: Context, name: str) -> None:
    """Writes nothing: jobs like it are removed together."""


@jobs.handler(queue="chain-shared", batchable=True, retry=SOON)
def shared(ctx: Context, name: str) -> None:
    ctx.session.add(Effect(name=name))


@dataclass
class Line:
    name: str


@jobs.batch_handler(Line, queue="chain-lines", retry=SOON)
def lines(ctx: BatchContext, items: Sequence[BatchItem[Line]]) -> None:
    ctx.session.add_all(Effect(name=item.args.name) for item in items)


@jobs.handler(queue="chain", retry=SOON)
def ends_as(ctx: Context, outcome: str) -> object:
    ctx.session.add(Effect(name=f"{outcome} {ctx.job.attempt}"))
    if outcome == "retry" and ctx.job.attempt < 3:
        raise ValueError("not yet")
    return {"discard": Discard("so"), "dead": DeadLetter("so")}.get(outcome)


@jobs.handler(queue="reports")
def report(ctx: Context) -> None:
    ctx.session.add(Effect(name="report"))


def names(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT name FROM effect_ledger ORDER BY row")).scalars())


def left(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one())


@pytest.mark.first_and_last
@pytest.mark.parametrize("kind", [alone, leased, leased_idle, shared, lines], ids=lambda kind: kind.kind)
def test_each_job_of_a_chain_runs_once_behind_the_one_before_it(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, kind: object
) -> None:
    """In either mode, in shared batches and by batch handlers; also several chains of one claim."""
    assert kind in (alone, leased, leased_idle, shared, lines)
    with sessions.begin() as session:
        for number in range(5):
            first, second, third = (kind.job(name=f"{number} {step}") for step in ("a", "b", "c"))  # type: ignore[attr-defined]
            session.add_jobs([first.then(second).then(third)])
    events = drain(jobs, batch_size=10)
    assert left(engine) == 0
    assert len(of(events, JobDone)) == 15
    if kind is not leased_idle:
        found = names(engine)
        assert sorted(found) == sorted(f"{number} {step}" for number in range(5) for step in "abc")
        for number in range(5):
            assert [name for name in found if name.startswith(f"{number} ")] == [f"{number} {step}" for step in "abc"]


@pytest.mark.first_and_last
@pytest.mark.parametrize("outcome", ["done", "retry", "discard", "dead"])
def test_only_a_job_that_is_done_is_followed(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, outcome: str
) -> None:
    """A retry keeps the chain; a job that is discarded or dead ends it."""
    with sessions.begin() as session:
        session.add_jobs([ends_as.job(outcome=outcome).then(alone.job(name="next"))])
    drain(jobs)
    assert ("next" in names(engine)) is (outcome in ("done", "retry"))
    assert left(engine) == 0


def test_a_chain_keeps_the_options_of_each_of_its_jobs(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Queue, priority, headers, delay, group and key are those that the job was made with."""
    follower = leased.options(priority=7, headers={"trace": "x"}, delay=timedelta(hours=1), coalesce="k").job(name="b")
    with sessions.begin() as session:
        session.add_jobs([alone.job(name="a").then(follower)])
    drain(jobs)
    with engine.connect() as connection:
        (row,) = connection.execute(
            text("SELECT queue, kind, priority, state, headers ->> 'trace' AS trace, unique_key FROM outboxq.job")
        )
    assert tuple(row) == ("chain-leased", "leased", 7, "scheduled", "x", "leased\x1fk")


@pytest.mark.first_and_last
@pytest.mark.parametrize("kind", [alone, leased, leased_idle, shared, lines], ids=lambda kind: kind.kind)
def test_a_last_job_whose_key_is_taken_is_told(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
    kind: object,
) -> None:
    """No handle says that it was not added: an event does, and the log; if it was added, neither."""
    assert kind in (alone, leased, leased_idle, shared, lines)
    with sessions.begin() as session:
        standing = session.add_job(report.options(unique="taken", delay=timedelta(hours=1)))
        before = kind.job(name="before")  # type: ignore[attr-defined]  # of the parameter: an object
        ends = session.add_jobs([before.then(report.options(unique="taken").job())])[0]
        session.add_jobs([before.then(report.options(unique="free").job())])
    events = drain(jobs, batch_size=10)
    (told,) = of(events, FollowerSuppressed)
    assert (told.job.id, told.follower_kind, told.existing_id) == (ends.id, "report", standing.id)
    assert left(engine) == 1
    assert len(of(events, JobDone)) == 3
    with caplog.at_level("WARNING", "outboxq.relay"):
        log_event(told)
    assert f"follower_kind=report existing_id={standing.id}" in caplog.text


def test_a_chain_is_in_the_batch_of_its_first_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The batch is over when the last one of the chain is."""
    with sessions.begin() as session, jobs.batch(session, on_done=report.job()) as batch:
        batch.add_jobs([alone.job(name="a").then(leased.job(name="b")).then(shared.job(name="c"))])
    events = drain(jobs)
    assert names(engine) == ["a", "b", "c", "report"]
    assert len(of(events, BatchFinished)) == 1


def test_the_callback_of_a_batch_may_be_a_chain(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """What follows it is stored with it."""
    with sessions.begin() as session, jobs.batch(session, on_done=report.job().then(alone.job(name="z"))) as batch:
        batch.add_job(alone, name="a")
    drain(jobs)
    assert names(engine) == ["a", "report", "z"]


def test_chains_in_any_brackets_are_the_same() -> None:
    """`a.then(b).then(c)` and `a.then(b.then(c))`."""
    a, b, c = (alone.job(name=name) for name in "abc")
    for chain in (a.then(b).then(c), a.then(b.then(c))):
        assert [each.args for each in chain.followers] == [b.args, c.args]
        assert all(not each.followers for each in chain.followers)


def test_what_a_chain_refuses(sessions: sessionmaker[OutboxSession]) -> None:
    """At the call, with what to do."""
    first = alone.job(name="a")
    with pytest.raises(ArgumentError, match="then takes a job made by"):
        first.then(alone)  # type: ignore[arg-type]
    unique = alone.options(unique="key").job(name="b")
    for chain in (lambda: first.then(unique).then(first), lambda: first.then(unique.then(first))):
        with pytest.raises(ArgumentError, match="has a unique key, and cannot be between two jobs of a chain"):
            chain()
    # If it is the first one, its producer learns whether the chain was added; behind the last one is nothing.
    assert len(unique.then(first).then(unique).followers) == 2
    long = first.then(leased.job(name="b" * 200_000))
    with pytest.raises(
        JobTooLarge,
        match=r"^the jobs that follow 'alone' in its chain \('leased', 'shared'; headers included\) take 301,0.. bytes "
        ".* cap of 262,144: store the data .*, or let the last job of a shorter chain add",
    ) as refused:
        long.then(shared.job(name="c" * 100_000))
    assert (refused.value.kind, refused.value.size_bytes > 300_000) == ("alone", True)
    many = [report.job()] * 600
    with pytest.raises(JobTooLarge, match=r"report' and [0-9]+ more; "):
        reduce(NewJob.then, many, first)
    with sessions() as session, jobs.batch(session, on_done=report.job()) as batch:
        with pytest.raises(ArgumentError, match="in a batch by itself"):
            first.then(batch.of(alone.job(name="b")))
        session.rollback()


def stored(**changed: object) -> str:
    """The header of a job that is followed by one, of which something is changed."""
    return msgspec.json.encode([{"kind": "alone", "queue": "chain", "args": {"name": "after"}, **changed}]).decode()


# By SQL of users: add_job writes none of them.
BROKEN = {
    "no JSON": "[",
    "no list": "{}",
    "empty": "[]",
    "a job that is none": "[1]",
    "deep": "[" * 3_000,
    "an option of a newer version": stored(weight=1),
    "a kind that is too long": stored(kind="k" * 64),
    "a queue that cannot be": stored(queue="a,b"),
    "a control character": stored(kind="\0"),
    "a priority that is too high": stored(priority=2**15),
    "no attempt": stored(max_attempts=0),
    "a time that is too far": stored(run_at="9999-12-31T00:00:00Z"),
    "a time without a zone": stored(run_at="2027-01-01T00:00:00"),
    "a delay that is too long": stored(delay_seconds=1e300),
    "an expiry before now": stored(expires_seconds=-1),
    "a window of no length": stored(coalesce="c", every_seconds=0),
    "a long key": stored(group="g" * 1_025),
    "a key with NUL": stored(group="\0"),
    "a batch that is none": stored(batch="b"),
    "headers that are none": stored(headers={"a": 1}),
    "arguments that are none": stored(args=[]),
    "arguments with NUL": stored(args={"name": "\0"}),
    "a name with NUL": stored(args={"\0": 1}),
    "a number that is too large": stored(args={"n": msgspec.Raw(b"1e400000")}),
    "a lone surrogate": stored(args={"n": msgspec.Raw(rb'"\ud800"')}),
    "deep arguments": stored(args={"n": msgspec.Raw(b"[" * 5_000 + b"]" * 5_000)}),
    "large arguments": stored(args={"name": "x" * 300_000}),
}
KINDS = ("alone", "leased", "leased_idle", "shared", "lines")


@pytest.mark.first_and_last
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 50])
def test_a_chain_that_cannot_go_on_fails_its_job_before_the_handler_runs(
    kind: str, batch_size: int, sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain
) -> None:
    """The handler's rows would be kept, or the relay's work end, where the next job cannot be added."""
    handler = {each.kind: each for each in (alone, leased, leased_idle, shared, lines)}[kind]
    other = [{"outboxq.then": 1}, {"outboxq.then": {}}, {"outboxq.then": None}]
    headers = [{"outboxq.then": header} for header in BROKEN.values()] + other
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO outboxq.job (id, queue, kind, args, headers) VALUES (gen_random_uuid(), :q, :k, :a, :h)"),
            [
                {"q": handler.queue, "k": kind, "a": '{"name": "broken"}', "h": msgspec.json.encode(each).decode()}
                for each in headers
            ],
        )
    with sessions.begin() as session:
        session.add_job(handler, name="well")
    events = drain(jobs, batch_size=batch_size)
    assert {event.job.headers for event in of(events, JobDone)} == {"{}"}
    died = of(events, JobDied)
    assert [event.reason.rpartition(": ")[2] for event in died] == ["outboxq.errors.PayloadError"] * len(headers)
    assert names(engine) == ([] if kind == "leased_idle" else ["well"])


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_refused_of_a_chain_the_table_would_refuse(name: str) -> None:
    """And each by an error that says so."""
    with pytest.raises(PayloadError):
        unfold_chain(BROKEN[name])


def test_a_job_is_followed_whatever_its_other_headers_are(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A producer in SQL may store headers that are no texts."""
    with sessions.begin() as session:
        session.add_jobs([alone.job(name="first").then(alone.job(name="next"))])
    with engine.begin() as connection:
        connection.execute(text("""UPDATE outboxq.job SET headers = headers || '{"tries": 1e400}'"""))
    drain(jobs)
    assert names(engine) == ["first", "next"]
