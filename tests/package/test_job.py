"""Job ids: UUIDv7 by the letter of RFC 9562, so that new rows go to the right end of the primary key."""

import time
from collections.abc import Callable
from uuid import RFC_4122, UUID

import pytest

from outboxq.job import uuid7, uuid7s


def one_by_one(count: int) -> list[UUID]:
    return [uuid7() for _ in range(count)]


def together(count: int) -> list[UUID]:
    return [UUID(text) for text in uuid7s(count)]


Make = Callable[[int], list[UUID]]
both_ways = pytest.mark.parametrize("make", [one_by_one, together])


@both_ways
def test_a_job_id_has_the_version_and_the_variant_of_a_uuid7(make: Make) -> None:
    """RFC 9562, section 5.7: version 7, variant 10."""
    for job_id in make(200):
        assert (job_id.version, job_id.variant) == (7, RFC_4122)


@both_ways
def test_a_job_id_begins_with_the_milliseconds_of_its_making(make: Make) -> None:
    """The first 48 bits are Unix milliseconds, which is what keeps the index's inserts together."""
    before = time.time_ns() // 1_000_000
    stamp = make(1)[0].int >> 80
    assert before <= stamp <= time.time_ns() // 1_000_000


@both_ways
def test_job_ids_of_one_millisecond_differ(make: Make) -> None:
    """74 random bits follow the time."""
    assert len(set(make(10_000))) == 10_000


# A call for many keeps a bit for what it adds up.
@pytest.mark.parametrize(("make", "kept"), [(one_by_one, 0), (together, 1 << 61)])
def test_every_bit_behind_the_time_but_version_and_variant_is_random(make: Make, kept: int) -> None:
    """No random bit is masked away by mistake: over many ids each is seen both as 0 and as 1."""
    ids = [make(1)[0].int for _ in range(400)]
    fixed = 0xF << 76 | 0x3 << 62 | kept
    random_bits = (1 << 80) - 1 & ~fixed
    ones, zeros = 0, 0
    for value in ids:
        ones |= value
        zeros |= ~value
    assert ones & zeros & random_bits == random_bits


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_job_ids_of_one_call_ascend_whatever_is_drawn(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    """Their rows go into the index in order, and no two are the same: also where all bits that are drawn are alike."""
    monkeypatch.setattr("os.urandom", lambda size: bytes([byte]) * size)
    ids = together(10_000)
    assert ids == sorted(set(ids))
    assert {(job_id.version, job_id.variant) for job_id in ids} == {(7, RFC_4122)}
