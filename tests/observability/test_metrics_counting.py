"""The numbers behind the metrics: they only grow, their series are bounded, and texts of others break nothing."""

from collections.abc import Iterator
from itertools import permutations
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry

from outboxq.errors import ConfigError
from outboxq.events import (
    ClaimsEmpty,
    ClaimsFailed,
    DatabaseBack,
    DatabaseLost,
    Event,
    JobCrashed,
    JobDied,
    JobDone,
    JobRetried,
    JobsClaimed,
)
from outboxq.observability.aggregate import KINDS_MOST, OTHER, Aggregate
from outboxq.observability.metrics.counter import EventCounter
from outboxq.observability.metrics.exposition import expose, registry_of
from outboxq.observability.metrics.families import FAMILIES, JOBS
from outboxq.observability.metrics.reading import MOST, Reading, without_kinds
from outboxq.observability.metrics.server import parse_address
from outboxq.relay.run import SLOT_STATES
from tests.support.events import job
from tests.support.metrics import parsed, promtool, value

HOSTILE = ('a"b', "a\\b", "a\nb", "a{b}", 'x"} 1\noutboxq_forged_total 1 #', "é✓", "\\\\n", " ")


def exposed(reading: Reading, database: str = "db") -> str:
    return expose(registry_of(lambda: {database: reading}))[0].decode()


def test_totals_grow_whether_they_were_taken_or_not() -> None:
    """What a flush takes is in the totals all the same, once."""
    aggregate = Aggregate()
    aggregate.add([JobDone(job(), 0.004)] * 3)
    assert aggregate.totals()["q", "k"].outcomes["done"] == 3
    aggregate.take()
    assert aggregate.totals()["q", "k"].outcomes["done"] == 3
    aggregate.add([JobDone(job(), 0.004)])
    taken = aggregate.take()
    totals = aggregate.totals()["q", "k"]
    assert taken["q", "k"].outcomes["done"] == 1
    assert (totals.outcomes["done"], sum(totals.run), totals.run_seconds) == (4, 4, pytest.approx(0.016))


@pytest.mark.large
def test_totals_of_many_kinds_are_bounded_and_none_falls() -> None:
    """Kinds that come too late are counted together, in every interval the same ones."""
    aggregate, before = Aggregate(), 0
    for turn in range(3):
        for number in range(KINDS_MOST):
            aggregate.add([JobDone(job(kind=f"k{turn}-{number}"), 0.0)])
            if number % 50 == 0:
                aggregate.take()
            totals = {kind: each.outcomes["done"] for (_, kind), each in aggregate.totals().items()}
            assert sum(totals.values()) == before + 1
            before += 1
    assert len(totals) <= KINDS_MOST + 1
    assert totals[OTHER] == 2 * KINDS_MOST


def events_of(number: int) -> Iterator[Event]:
    yield JobRetried(job(queue="q0"), f"Error{number}", "", (), 1.0)
    yield JobsClaimed(f"q{number}", 2, 0.003)
    yield ClaimsEmpty(f"q{number}", 1)
    yield ClaimsFailed(f"q{number}", 3)


@pytest.mark.wide
def test_the_number_of_series_is_bounded() -> None:
    """By queues and by types of errors; what is too much is counted under one name, and nothing is lost."""
    counter = EventCounter()
    sums = {"outboxq_job_errors_total": 0.0, "outboxq_claims_total": 0.0, "outboxq_claimed_jobs_total": 0.0}
    before: dict[object, float] = {}
    for number in range(2 * MOST["queue"]):
        for event in events_of(number):
            counter(event)
        if number % 20 == 19:
            after = parsed(exposed(counter.read()))
            assert all(after[series] >= found for series, found in before.items())
            before = dict(after)
    found = parsed(exposed(counter.read()))
    for name, factor in zip(sums, (1, 5, 2), strict=True):
        assert value(found, name) == factor * 2 * MOST["queue"]
    labels = [dict(labels) for name, labels in found if name == "outboxq_job_errors_total"]
    assert len(labels) == MOST["error_type"] + 1
    assert value(found, "outboxq_job_errors_total", error_type=OTHER) == 2 * MOST["queue"] - MOST["error_type"]
    assert value(found, "outboxq_claims_total", result="failed") == 3 * 2 * MOST["queue"]
    queues = {dict(labels)["queue"] for name, labels in found if name == "outboxq_claims_total"}
    assert len(queues) == MOST["queue"] + 1


def test_a_reading_goes_to_another_process_and_adds_up() -> None:
    """Counters and histograms; the gauges of a process that has ended are no more."""
    counter = EventCounter()
    counter(JobsClaimed("q", 2, 0.003))
    counter(DatabaseLost("gone", 1.0))
    reading = Reading.decoded(counter.read().encoded())
    total = Reading()
    total.merge(reading)
    total.merge(reading, without_gauges=True)
    found = parsed(exposed(total))
    assert value(found, "outboxq_claimed_jobs_total", queue="q", database="db") == 4
    assert value(found, "outboxq_claim_seconds_bucket", le="0.005") == 2
    assert value(found, "outboxq_claim_seconds_bucket", le="0.0025") == 0
    assert value(found, "outboxq_claim_seconds_count") == 2
    assert value(found, "outboxq_relay_database_lost") == 1
    counter(DatabaseBack(1.0))
    assert value(parsed(exposed(counter.read())), "outboxq_relay_database_lost") == 0


def test_a_sum_of_seconds_is_the_same_in_every_order() -> None:
    """Of processes that are added up in another order after one has ended; else the sum may fall by a last digit."""
    parts = []
    for seconds in (0.1, 0.2, 0.3, 5.840697, 1e-6):
        part = Reading()
        part.add_buckets("outboxq_claim_seconds", ("q",), [1] * 20, seconds)
        parts.append(part)
    sums = set()
    for order in permutations(parts):
        total = Reading()
        for part in order:
            total.merge(part)
        sums.add(value(parsed(exposed(total)), "outboxq_claim_seconds_sum"))
    assert sums == {6.440698}


def test_kinds_can_be_left_out() -> None:
    """The kinds of a queue are added up."""
    reading = Reading()
    for kind in ("a", "b"):
        reading.add(JOBS, ("q", kind, "done"), 2)
        reading.add_buckets("outboxq_job_run_seconds", ("q", kind), [1] * 20, 3.0)
    found = parsed(exposed(without_kinds(reading)))
    assert {dict(labels).get("kind", "") for _, labels in found} == {""}
    assert value(found, JOBS, queue="q", outcome="done") == 4
    assert value(found, "outboxq_job_run_seconds_sum") == 6.0


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", HOSTILE)
def test_texts_of_others_forge_no_series(name: str) -> None:
    """Whatever a queue, a kind, an error or a database is called: it is one label's value, and comes back as it was."""
    reading = Reading()
    reading.add(JOBS, (name, name, "done"), 7)
    reading.add("outboxq_job_errors_total", (name, name, name), 8)
    text = exposed(reading, database=name)
    labels = frozenset({"database": name, "queue": name, "kind": name, "outcome": "done"}.items())
    found = parsed(text)
    assert found[JOBS, labels] == 7
    assert len(found) == 2
    checked = promtool("check", "metrics", given=text)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_name_that_no_utf8_has_breaks_no_scrape() -> None:
    """A class may be called anything."""
    counter = EventCounter()
    counter(JobDied(job(), "why", error_type="\ud800"))
    assert value(parsed(exposed(counter.read())), "outboxq_job_errors_total") == 1


def test_every_metric_is_named_as_prometheus_wants_it() -> None:
    """Counters end in `_total`, and nothing else does."""
    for family in FAMILIES.values():
        assert family.name.endswith("_total") is (family.type == "counter"), family.name
        assert family.help.endswith(".")
    assert SLOT_STATES == ("busy", "idle", "asleep")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:9464", ("::1", 9464)),
        ("host:0", ("host", 0)),
    ],
)
def test_an_address_is_a_port_with_a_host_perhaps(text: str, address: tuple[str, int]) -> None:
    """Only this machine, unless a host is named."""
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "x", ":9464", "host:", "host:99999", "::1:9464", "-1", "host:١"])
def test_anything_else_is_refused(text: str) -> None:
    """With an example of what would do."""
    with pytest.raises(ConfigError, match="9464"):
        parse_address(text)


def test_a_crash_counts_as_one_and_as_a_death_if_it_was_the_last() -> None:
    """As the history counts it."""
    aggregate = Aggregate()
    aggregate.add([JobCrashed(uuid4(), "q", "k", 3, dead_letter=True)])
    outcomes = aggregate.totals()["q", "k"].outcomes
    assert (outcomes["crashed"], outcomes["died"]) == (1, 1)


def test_a_registry_reads_when_it_is_scraped_alone() -> None:
    """Nothing happens between scrapes, nor when the collector is registered."""
    reads: list[int] = []

    def read() -> dict[str, Reading]:
        reads.append(1)
        return {}

    registry = registry_of(read)
    assert isinstance(registry, CollectorRegistry)
    assert reads == []
    expose(registry)
    assert reads == [1]
