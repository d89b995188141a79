"""Jobs: values that show no payload; their ids are UUIDv7 (RFC 9562), so new rows go to the primary key's right end."""

import pickle
import time
from datetime import UTC, datetime
from uuid import RFC_4122, UUID

import pytest

from outboxq.clock import uuid7s
from outboxq.job import Job


def job_ids(count: int) -> list[UUID]:
    return [UUID(text) for text in uuid7s(count)]


def test_a_job_id_has_the_version_and_the_variant_of_a_uuid7() -> None:
    """RFC 9562, section 5.7: version 7, variant 10."""
    for job_id in job_ids(200):
        assert (job_id.version, job_id.variant) == (7, RFC_4122)


def test_a_job_id_begins_with_the_milliseconds_of_its_making() -> None:
    """The first 48 bits are Unix milliseconds, which is what keeps the index's inserts together."""
    before = time.time_ns() // 1_000_000
    stamp = job_ids(1)[0].int >> 80
    assert before <= stamp <= time.time_ns() // 1_000_000


def test_job_ids_of_one_millisecond_are_in_the_order_of_their_making() -> None:
    """The fraction of the millisecond follows it, to a quarter of a microsecond: no two calls are that close."""
    ids = [job_ids(1)[0] for _ in range(1_000)]
    assert len({job_id.int >> 80 for job_id in ids}) < 1_000
    assert ids == sorted(ids)


def test_job_ids_of_one_call_differ() -> None:
    """61 random bits follow the time, and then each id is above the one before."""
    assert len(set(job_ids(10_000))) == 10_000


def test_every_bit_behind_the_time_and_the_variant_is_random() -> None:
    """No random bit is masked away by mistake: over many ids each is seen both as 0 and as 1."""
    ids = [job_ids(1)[0].int for _ in range(400)]
    # The bit behind the variant is kept for what a call for many adds up.
    random_bits = (1 << 61) - 1
    ones, zeros = 0, 0
    for value in ids:
        ones |= value
        zeros |= ~value
    assert ones & zeros & random_bits == random_bits


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_job_ids_of_one_call_ascend_whatever_is_drawn(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    """Their rows go into the index in order, and no two are the same: also where all bits that are drawn are alike."""
    monkeypatch.setattr("os.urandom", lambda size: bytes([byte]) * size)
    ids = job_ids(10_000)
    assert ids == sorted(set(ids))
    assert {(job_id.version, job_id.variant) for job_id in ids} == {(7, RFC_4122)}


def test_a_job_is_a_value_that_does_not_show_its_payload() -> None:
    """Jobs are compared, hashed and pickled by their fields; their repr has no arguments, headers and errors."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    job = Job(UUID(int=7), "mail", "send", "args-x", "headers-x", 0, 1, None, 0, 0, None, None, "errors-x", now, now, 1)
    again = pickle.loads(pickle.dumps(job))
    assert (again, hash(again)) == (job, hash(job))
    assert "-x" not in repr(job)
    assert repr(job).startswith(f"Job(id={UUID(int=7)!r}, queue='mail', kind='send', priority=0, attempt=1, ")
    with pytest.raises(AttributeError):
        job.queue = "other"
