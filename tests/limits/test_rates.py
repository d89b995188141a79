"""Rates of queues: tokens are reserved before jobs begin, never more than the rate allows, and none for nothing."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.admin import queues
from outboxq.database.driver import run_script
from outboxq.postgres import Database, Server
from outboxq.queue_limits import Rate, make_limits
from outboxq.relay import admission
from outboxq.relay.admission import Admission, Query, SlotAdmission, Taken, TokenHands, chunk_of
from outboxq.relay.flow_settings import FlowSettings
from outboxq.relay.limits import RelayLimits
from outboxq.relay.planner import Asked, Planner
from outboxq.relay.poller import SharedPoller
from outboxq.statements.claim import Sort
from outboxq.statements.limit import take_slot
from outboxq.statements.rate import TokenRequest, begin_rate, reserve_tokens
from tests.conftest import StartRelay
from tests.limits.limited_run import Mode, lead
from tests.limits.rates_under_kills import check_rate
from tests.support.matrices import sampled
from tests.support.waiting import wait_until

Reserve = Callable[..., tuple[int, bool, int, float | None]]


def make_jobs(claim: str = "transaction") -> Jobs:
    jobs, failed = Jobs(), set[int]()

    @jobs.handler(queue="mail", claim=claim, retry=Backoff(first_seconds=0, jitter=0))
    def work(ctx: Context, number: int, fails: bool = False) -> None:
        engine = ctx.session.get_bind().engine  # type: ignore[union-attr]  # it is one
        with engine.begin() as beside:
            beside.execute(text("INSERT INTO effect_ledger (name) VALUES (clock_timestamp()::text)"))
        if fails and number not in failed:
            failed.add(number)
            raise ValueError(number)

    return jobs


def add(sessions: sessionmaker[OutboxSession], jobs: Jobs, count: int, **given: object) -> None:
    kind = jobs.resolve().find("work")
    with sessions.begin() as session:
        session.add_jobs(kind.job(number=number, **given) for number in range(count))


def starts(engine: Engine) -> list[float]:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT name FROM effect_ledger ORDER BY name::timestamptz")).scalars()
        return [datetime.fromisoformat(at + "00" if at[-3] in "+-" else at).timestamp() for at in found]


def limit(engine: Engine, **limits: object) -> None:
    with engine.begin() as connection:
        queues.set_limits(connection, ["mail"], make_limits(**limits))  # type: ignore[arg-type]  # as each test gives them


@pytest.fixture
def reserve(engine: Engine) -> Reserve:
    """Reserve tokens of the rate of the queue mail."""
    with engine.begin() as connection:
        run_script(connection, begin_rate("outboxq", "mail"))

    def send(most: int = 1, chunk: int = 1, each: float = 10.0, burst: int = 5, keep: float = 0.0) -> object:
        asked = TokenRequest(most=most, chunk=chunk, each_seconds=each, burst=burst, keep_seconds=keep)
        with engine.connect() as connection, connection.begin():
            return run_script(connection, reserve_tokens("outboxq", "mail", asked))[0]

    return send  # type: ignore[return-value]  # the row of the statement


def test_tokens_come_at_the_rate_after_the_burst(
    engine: Engine, sessions: sessionmaker[OutboxSession], reserve: Reserve
) -> None:
    """As many as the burst at once, then one for each turn; a refusal says when."""
    add(sessions, make_jobs(), 30)
    assert [reserve()[2] for _ in range(6)] == [1, 1, 1, 1, 1, 0]
    waiting, has_room, tokens, due = reserve()
    assert (waiting, has_room, tokens) == (1, True, 0)
    assert due is not None
    assert 5 < due <= 10
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.rate SET tat = tat - interval '20 seconds'"))
    # Two turns later: two tokens, for a slot that asks for more.
    assert reserve(most=4, chunk=2)[2] == 2
    assert reserve()[2] == 0


def test_a_look_at_many_jobs_reads_no_more_than_it_asks_for(engine: Engine) -> None:
    """By the indexes, in their order, also if statistics tell of few due jobs and suspects."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.job (id, queue, kind, args, state, run_at) SELECT gen_random_uuid(), CASE n % 2 "
                "WHEN 0 THEN 'mail' ELSE 'post' END, 'k', '{}', CASE WHEN n % 100 = 0 THEN 'suspect' WHEN n % 10 = 1 "
                "THEN 'scheduled' ELSE 'ready' END, clock_timestamp() + make_interval(secs => n - 100) "
                "FROM generate_series(1, 5000) AS n"
            )
        )
        connection.execute(text("ANALYZE outboxq.job"))
    asked = TokenRequest(most=50, chunk=10, each_seconds=0.002, burst=20, keep_seconds=0.02)
    before, _, behind = reserve_tokens("outboxq", "mail", asked).partition("WITH ")
    with engine.connect() as connection, connection.begin():
        run_script(connection, before.removesuffix("; "))
        plan = run_script(connection, f"EXPLAIN WITH {behind.removesuffix('; COMMIT')}")
    lines = [str(line) for (line,) in plan]
    assert not [line for line in lines if "Sort" in line or "Seq Scan" in line or "JIT" in line]
    assert {"job_ready", "job_scheduled", "job_suspect", "job_group"} <= set(re.findall(r"job_[a-z]+", " ".join(lines)))


def test_tokens_are_reserved_for_jobs_that_wait_and_for_no_more(
    sessions: sessionmaker[OutboxSession], reserve: Reserve
) -> None:
    """Without jobs nothing is reserved; with two jobs two tokens, whatever is wanted."""
    assert reserve(most=5)[:3] == (0, True, 0)
    add(sessions, make_jobs(), 2)
    assert reserve(most=5)[:3] == (2, True, 2)
    assert reserve(most=5, chunk=3)[:3] == (2, True, 2)
    assert reserve()[2] == 1
    assert reserve()[2] == 0


def test_tokens_that_may_be_kept_count_from_the_end_of_that_time(
    sessions: sessionmaker[OutboxSession], reserve: Reserve
) -> None:
    """Of a burst of five, four are left if they may be used ten seconds later: with the fifth it would be six then."""
    add(sessions, make_jobs(), 30)
    assert reserve(most=5, keep=10.0)[2] == 4
    assert reserve()[2] == 0


def test_a_changed_rate_holds_at_once(engine: Engine, sessions: sessionmaker[OutboxSession], reserve: Reserve) -> None:
    """What was reserved at one a day does not keep a rate of a hundred a second waiting for days."""
    add(sessions, make_jobs(), 30)
    assert [reserve(each=86_400.0)[2] for _ in range(5)] == [1] * 5
    assert reserve(each=0.01)[2] == 0
    wait_until(lambda: reserve(each=0.01)[2] == 1, "a token of the new rate")


def test_a_job_that_another_transaction_runs_costs_no_token(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, reserve: Reserve
) -> None:
    """Its row is still seen by every look, for as long as it runs."""
    jobs = make_jobs()
    limit(engine, rate="1/h", burst=3)
    add(sessions, jobs, 1)
    with engine.connect() as holder, holder.begin():
        holder.execute(text("DELETE FROM outboxq.job"))
        assert reserve(most=5)[:3] == (0, True, 0)
        with start_relay(jobs, RelayConfig(poll_seconds=0.05)), engine.connect() as connection:
            wait_until(lambda: _polls(engine) > 5, "some polls")
            spent = connection.scalar(text("SELECT tat > now() FROM outboxq.rate"))
        assert not spent
        holder.rollback()


def _polls(engine: Engine, seen: dict[str, int] = {}) -> int:  # noqa: B006  # counts its calls
    seen["looks"] = seen.get("looks", 0) + 1
    return seen["looks"]


def test_a_full_limit_costs_no_tokens(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Jobs that have no room do not use up the rate while they wait."""
    jobs = make_jobs()
    limit(engine, running=1, rate="1/h", burst=4)
    with engine.connect() as holder, holder.begin():
        run_script(holder, take_slot("outboxq", "mail", 1))
        add(sessions, jobs, 4)
        with start_relay(jobs, RelayConfig(poll_seconds=0.05, slots_per_queue=1)):
            wait_until(lambda: _polls(engine) % 40 == 0, "a while")
            with engine.connect() as connection:
                assert not connection.scalar(text("SELECT count(*) FROM outboxq.rate WHERE tat > now()"))
            holder.rollback()
            wait_until(lambda: len(starts(engine)) == 4, "all four of the burst")


@pytest.mark.wide
@pytest.mark.parametrize("claim", sampled(["transaction", "lease"]))
def test_jobs_begin_at_the_rate_of_their_queue(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, claim: str
) -> None:
    """Two relays keep to it together, and use the burst; each retry takes a token, too."""
    jobs = make_jobs(claim)
    limit(engine, rate="40/s", burst=8)
    add(sessions, jobs, 40, fails=True)
    config = RelayConfig(slots_per_queue=3)
    with start_relay(jobs, config), start_relay(jobs, config):
        wait_until(lambda: len(starts(engine)) == 80, "each job twice")
    began = starts(engine)
    assert lead(began, 40, 1.0, 8) <= 40 * 0.25
    assert began[-1] - began[0] > (80 - 8 - 10) / 40


def test_a_drain_waits_for_tokens(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """It ends when all jobs are done, however long the rate makes that."""
    jobs = make_jobs()
    jobs.limit("mail", rate="20/s", burst=1)
    add(sessions, jobs, 15)
    assert Relay(outboxq_database.url, jobs, RelayConfig(batch_size=10)).drain().done == 15
    began = starts(engine)
    assert began[-1] - began[0] > 0.5


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_drain_goes_on_after_a_hold_that_came_and_went_in_its_last_round(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    claim: str,
) -> None:
    """The round has passed over the queue: another slot found no token for it, and has given one back since."""
    jobs, make_round, rounds = make_jobs(claim), Planner._only_queue, list[str]()

    def passing_over(planner: Planner, name: str) -> Iterator[Asked]:
        rounds.append(name)
        if len(rounds) > 1:
            yield from make_round(planner, name)
            return
        shared = planner._state.admission
        shared._tokens_due_at[name] = shared.poller.hold(name, 60.0)
        shared.hands.add(name, 1, time.monotonic() + 60.0)
        shared.release_tokens(name)

    monkeypatch.setattr(Planner, "_only_queue", passing_over)
    add(sessions, jobs, 1)
    assert Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1)).drain().done == 1


def test_chunks_fit_into_the_burst() -> None:
    """However small the burst: half of it at most, and one at least."""
    assert [chunk_of(Rate(500, 1.0, burst)) for burst in (1, 2, 3, 20, 1_000)] == [1, 1, 1, 10, 10]
    assert chunk_of(Rate(1, 60.0, 100)) == 1
    hands = TokenHands(0.05)
    asked = hands.request("mail", Rate(500, 1.0, 20), 50)
    assert (asked.most, asked.chunk, asked.keep_seconds) == (20, 1, 0.02)


def test_tokens_in_hand_are_used_in_time_or_lost() -> None:
    """The next reservation asks for as many as were used."""
    hands = TokenHands(10.0)
    rate = Rate(500, 1.0, 100)
    assert hands.take("mail", 5).tokens == 0
    for tokens in (1, 2, 4, 8):
        hands.add("mail", tokens, float("inf"))
        assert hands.take("mail", 100).tokens == tokens
    assert hands.request("mail", rate, 1).most == 10
    hands.add("mail", 8, float("inf"))
    taken = hands.take("mail", 3)
    assert taken == Taken(3, float("inf"))
    hands.give_back("mail", Taken(1, 0.0))
    hands.give_back("mail", replace(taken, tokens=1))
    assert hands.take("mail", 100).tokens == 6


def test_the_claim_behind_a_reservation_has_its_tokens_however_late_it_comes() -> None:
    """If a slow machine lost them each time, no job would begin. The claims after it find none."""
    hands = TokenHands(10.0)
    hands.add("mail", 3, 0.0)
    assert hands.has("mail")
    late = hands.take("mail", 1)
    assert late == Taken(1, 0.0)
    hands.give_back("mail", late)
    assert not hands.has("mail")
    assert hands.take("mail", 1).tokens == 0
    assert hands.request("mail", Rate(500, 1.0, 100), 1).most == 1


@pytest.mark.parametrize("is_first", [True, False], ids=["before the hold", "after it"])
def test_a_token_that_comes_back_ends_the_hold_of_a_slot_that_found_none(is_first: bool) -> None:
    """The job would wait for the time of another token; tokens that are used leave the hold as it is."""
    poller, woken = SharedPoller("outboxq", ("mail",)), list[str]()
    flow = FlowSettings({"mail": make_limits(rate="2/h")})
    shared = Admission("outboxq", {}, flow, poller, RelayLimits(), woken.append)
    one, other = SlotAdmission(shared), SlotAdmission(shared)

    def answer(reserving: Iterator[Query], query: Query, tokens: int, due_seconds: float) -> None:
        query.rows = [(1, True, tokens, due_seconds)]
        assert list(reserving) == []

    ours, theirs = one.reserve("mail", 1), other.reserve("mail", 1)
    (our_query, their_query) = next(ours), next(theirs)
    answer(ours, our_query, 1, 0.0)
    # For due jobs, of which there are none.
    assert one.take("mail", 1) == 1
    if is_first:
        one.return_unused()
    answer(theirs, their_query, 0, 1_800.0)
    assert poller.is_held("mail") is not is_first
    one.return_unused()
    assert not poller.is_held("mail")
    assert woken == ["mail"]
    assert other.take("mail", 1) == 1
    poller.hold("mail", 1_800.0)
    other.return_unused(1)
    assert poller.is_held("mail")


def test_a_claim_that_finds_nothing_leaves_its_token_to_the_next(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look for due jobs, which comes before that for ready ones, does not cost a job its place."""
    jobs = make_jobs()
    limit(engine, rate="1/h", burst=5)
    # Each round of the slot begins with a look for due jobs, which takes longer than a token is kept for.
    monkeypatch.setattr(Planner, "_only_queue", _due_first)
    monkeypatch.setattr(admission, "_LEAST_KEEP_SECONDS", 0.0)
    monkeypatch.setattr(admission, "_KEPT_SHARE", 0.0)
    add(sessions, jobs, 5)
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=1)):
        wait_until(lambda: len(starts(engine)) == 5, "all of the burst")


def _due_first(planner: Planner, name: str) -> Iterator[Asked]:
    for sort in (Sort.DUE, Sort.READY):
        yield from planner._claims_of(name, sort)


@pytest.mark.large
@pytest.mark.parametrize("mode", ["lease"])
def test_a_rate_holds_under_kills(mode: Mode, outboxq_server: Server) -> None:
    """The short form of `python -m tests.limits.rates_under_kills`."""
    with outboxq_server.create_database() as database:
        check_rate(mode, 3.0, 1, database.url)
