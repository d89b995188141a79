"""Every pair of options means what its row of the page says: a producer and a relay run it."""

import re
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig, Snooze
from outboxq.admin import queues
from outboxq.errors import ArgumentError
from outboxq.events import Event, JobExpired
from outboxq.handlers.handler import Handler
from outboxq.queue_limits import make_limits
from outboxq.relay.limits import RelayLimits
from tests.conftest import StartRelay
from tests.support.ledger import of, rows, waiting
from tests.support.matrices import sampled
from tests.support.waiting import wait_until

PAGE = (Path(__file__).parents[2] / "docs/option-pairs.md").read_text()
ROWS = {
    (first, second): runs
    for first, second, runs in re.findall(r"^\| `(\w+)` \+ `(\w+)` \| (.+?) \| .+ \|$", PAGE, re.MULTILINE)
}
REFUSED = {pair: runs.removeprefix("refused: ") for pair, runs in ROWS.items() if runs.startswith("refused: ")}
HOUR = timedelta(hours=1)
OPTIONS = (
    "delay", "priority", "expires", "unique", "coalesce", "every", "group", "batch", "chain", "limit", "rate", "keep",
)  # fmt: skip
GIVEN: Mapping[str, Mapping[str, Any]] = {
    "delay": {"delay": HOUR},
    "expires": {"expires": 2 * HOUR},
    "unique": {"unique": "k"},
    "coalesce": {"coalesce": "k"},
    "every": {"coalesce": "k", "every": HOUR},
    "group": {"group": "g"},
}


class Pair:
    """A kind with two options, and what has run of it."""

    def __init__(self, pair: tuple[str, str], claim: Any) -> None:
        self.pair, self.jobs, self.runs = pair, Jobs(), list[str]()
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()
        keep: Any = {"keep": HOUR} if "keep" in pair else {}

        @self.jobs.handler(queue="q", claim=claim, **keep)
        def work(ctx: Context, name: str) -> None:
            with self._lock:
                self.runs.append(name)
                self._running += 1
                self.most = max(self.most, self._running)
            if ctx.finished_batch is not None:
                assert ctx.finished_batch.failed == 0
            # Another one that ran beside it would be seen.
            ctx.session.execute(text("SELECT pg_sleep(0.02)"))
            with self._lock:
                self._running -= 1

        self.work: Handler[..., Any, Any] = work

    def new(self, number: int) -> Any:
        given = {name: value for option in self.pair for name, value in GIVEN.get(option, {}).items()}
        if "priority" in self.pair:
            given["priority"] = number
        new = self.work.options(**given).job(name=str(number))
        return new.then(self.work.job(name=f"{number}+")) if "chain" in self.pair else new

    def add(self, sessions: sessionmaker[OutboxSession], engine: Engine) -> None:
        with sessions.begin() as session:
            on_done = self.work.job(name="end")
            made = self.jobs.batch(session, on_done=on_done) if "batch" in self.pair else nullcontext()
            with made as batch:
                for number in (1, 2):
                    new = self.new(number)
                    session.add_jobs([new] if batch is None else batch.of([new]))
                    session.flush()
                    if number == 1 and "expires" in self.pair:
                        session.execute(text("UPDATE outboxq.job SET expires_at = now() - interval '1 second'"))


def test_the_page_has_a_row_for_each_pair() -> None:
    """In the order of the options."""
    assert list(ROWS) == list(combinations(OPTIONS, 2))


@pytest.mark.parametrize("pair", REFUSED, ids="+".join)
def test_a_pair_is_refused_with_the_reason_of_the_page(
    pair: tuple[str, str], sessions: sessionmaker[OutboxSession], engine: Engine
) -> None:
    """By an error, before anything is added."""
    with pytest.raises(ArgumentError, match=re.escape(REFUSED[pair])):
        Pair(pair, "transaction").add(sessions, engine)
    assert waiting(engine) == 0


@pytest.mark.first_and_last
@pytest.mark.parametrize("claim", sampled(["transaction", "lease"]))
@pytest.mark.parametrize("pair", [pair for pair in ROWS if pair not in REFUSED], ids="+".join)
def test_a_pair_runs_as_the_page_says(
    pair: tuple[str, str],
    claim: str,
    sessions: sessionmaker[OutboxSession],
    engine: Engine,
    drain: Callable[..., list[Event]],
) -> None:
    """And each of its options keeps its own promise."""
    running = Pair(pair, claim)
    with engine.begin() as connection:
        limits = {"running": 1 if "limit" in pair else None, "rate": "20/s" if "rate" in pair else None}
        if any(limits.values()):
            queues.set_limits(connection, ["q"], make_limits(**limits))  # type: ignore[arg-type]  # as each takes it
    running.add(sessions, engine)
    if {"delay", "every"} & {*pair}:
        drain(running.jobs)
        assert running.runs == []
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.job SET run_at = run_at - interval '2 hours'"))
    events = drain(running.jobs, slots_per_queue=2 if "limit" in pair else 1)

    expected = ROWS[pair].split(", ")
    if "chain" in pair:
        # What follows a job runs behind it, and the callback last; between the chains the order is open.
        assert sorted(running.runs) == sorted(expected)
        assert all(running.runs.index(name[0]) < running.runs.index(name) for name in expected if name.endswith("+"))
        assert running.runs[-1:] == expected[-1:] or "batch" not in pair
    else:
        assert running.runs == expected
    assert waiting(engine) == 0
    assert running.most == 1
    assert len(of(events, JobExpired)) == ("expires" in pair)
    assert len(rows(engine, "SELECT FROM outboxq.rate")) == ("rate" in pair)
    if "keep" in pair:
        kept = rows(engine, "SELECT outcome FROM outboxq.done_job ORDER BY outcome")
        assert [outcome for (outcome,) in kept] == ["done"] * len(expected) + ["expired"] * ("expires" in pair)
    assert rows(engine, "SELECT FROM outboxq.batch") == []


@pytest.mark.parametrize("claim", sampled(["transaction", "lease"]))
@pytest.mark.parametrize("ending", ["fail", "snooze"])
def test_a_job_that_would_be_tried_again_after_its_expiry_holds_nothing_up_till_then(
    ending: str,
    claim: Any,
    sessions: sessionmaker[OutboxSession],
    engine: Engine,
    drain: Callable[..., list[Event]],
) -> None:
    """It is dropped when it expires: its group goes on, and its batch is over."""
    jobs, runs = Jobs(), list[str]()

    @jobs.handler(queue="q", claim=claim, retry=Backoff(max_attempts=5, first_seconds=7_200.0, jitter=0.0))
    def work(ctx: Context, name: str) -> Snooze | None:
        runs.append(name)
        if name != "head":
            return None
        if ending == "fail":
            raise ValueError
        return Snooze(2 * HOUR)

    with sessions.begin() as session, jobs.batch(session, on_done=work.job(name="end")) as batch:
        session.add_jobs(batch.of([work.options(group="g", expires=HOUR).job(name="head")]))
        session.flush()
        session.add_jobs([work.options(group="g").job(name="next")])
    drain(jobs)
    assert runs == ["head"]
    later = "UPDATE outboxq.job SET run_at = run_at - interval '65 min', expires_at = expires_at - interval '65 min'"
    with engine.begin() as connection:
        connection.execute(text(later))
    events = drain(jobs)
    assert (sorted(runs), len(of(events, JobExpired)), waiting(engine)) == (["end", "head", "next"], 1, 0)


@pytest.mark.relay_limits(RelayLimits(first_prune_seconds=0.2))
def test_a_batch_whose_members_are_all_suppressed_is_over(
    sessions: sessionmaker[OutboxSession], engine: Engine, start_relay: StartRelay
) -> None:
    """It has no member: the sweep of a relay adds its callback."""
    jobs, runs = Jobs(), list[str]()

    @jobs.handler(queue="q")
    def work(ctx: Context, name: str) -> None:
        runs.append(name)

    unique = work.options(unique="k", delay=HOUR)
    with sessions.begin() as session:
        session.add_job(unique, name="1")
    with sessions.begin() as session, jobs.batch(session, on_done=work.job(name="end")) as batch:
        session.add_jobs(batch.of([unique.job(name="2")]))
    with start_relay(jobs, RelayConfig(slots_per_queue=1, prune_seconds=1)):
        wait_until(lambda: runs == ["end"], "the callback")
