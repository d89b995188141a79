"""Job ids: UUIDv7 by the letter of RFC 9562, so that new rows go to the right end of the primary key."""

import dataclasses
import time
from uuid import RFC_4122, UUID

import pytest

from outboxq import JobHandle
from outboxq.job import uuid7


def test_a_job_id_has_the_version_and_the_variant_of_a_uuid7() -> None:
    """RFC 9562, section 5.7: version 7, variant 10."""
    for job_id in (uuid7() for _ in range(200)):
        assert (job_id.version, job_id.variant) == (7, RFC_4122)


def test_a_job_id_begins_with_the_milliseconds_of_its_making() -> None:
    """The first 48 bits are Unix milliseconds, which is what keeps the index's inserts together."""
    before = time.time_ns() // 1_000_000
    stamp = uuid7().int >> 80
    assert before <= stamp <= time.time_ns() // 1_000_000


def test_job_ids_of_one_millisecond_differ() -> None:
    """74 random bits follow the time."""
    assert len({uuid7() for _ in range(10_000)}) == 10_000


def test_every_bit_behind_the_time_but_version_and_variant_is_random() -> None:
    """No random bit is masked away by mistake: over many ids each is seen both as 0 and as 1."""
    ids = [uuid7().int for _ in range(400)]
    fixed = 0xF << 76 | 0x3 << 62
    random_bits = (1 << 80) - 1 & ~fixed
    ones, zeros = 0, 0
    for value in ids:
        ones |= value
        zeros |= ~value
    assert ones & zeros & random_bits == random_bits


def test_a_handle_cannot_be_changed() -> None:
    """What add_job returned stays what it was."""
    handle = JobHandle(UUID(int=1), "credit", "accounts")
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.queue = "other"  # type: ignore[misc]
