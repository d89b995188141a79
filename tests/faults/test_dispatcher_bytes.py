"""A dispatcher whose connection is cut at any byte of the string that settles a job and claims, or of its answer."""

import pytest
from sqlalchemy import Engine

from outboxq.events import JobDone
from outboxq.postgres import Database
from outboxq.relay import outage
from tests.conftest import StartRelay
from tests.faults.test_dispatcher_faults import assert_each_once
from tests.support.byte_cut import ByteCut, Direction, byte_cut
from tests.support.calls import Calls, config
from tests.support.ledger import waiting
from tests.support.matrices import sampled
from tests.support.waiting import wait_until

# The statement that settles a job, and the setting before a claim.
BOTH = (b"/* as RELEASE SAVEPOINT", b"SET LOCAL statement_timeout = 0")
# The distance between two cuts of one case; all cases together cut at each byte.
CASES = 48
TRIES = 20


@pytest.mark.large
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", sampled(range(1, CASES + 1)))
@pytest.mark.parametrize("direction", ["request", "answer"])
def test_a_dispatcher_that_is_cut_off_at_any_byte_loses_no_job_and_runs_none_twice(
    engine: Engine,
    outboxq_database: Database,
    start_relay: StartRelay,
    monkeypatch: pytest.MonkeyPatch,
    direction: Direction,
    first: int,
) -> None:
    """One slot and two jobs: the first is settled and the second claimed, or neither; both are done once."""
    monkeypatch.setattr(outage, "_RECONNECT_FIRST_SECONDS", 0.01)
    calls, names = Calls(), list[str]()

    def run_two(cut: ByteCut, count: int | None) -> bool:
        pair = [f"{len(names):04} {which}" for which in "ab"]
        names.extend(pair)
        cut.arm(direction, count, *BOTH)
        calls.enqueue(engine, *pair)
        wait_until(lambda: len(running.of(JobDone)) >= len(names) and not waiting(engine), f"both at byte {count}")
        return bool(cut.passed) if count is None else cut.is_reached

    with byte_cut(outboxq_database.url) as cut:
        settings = config(1, lease_seconds=10, heartbeat_seconds=0.2, poll_seconds=0.2)
        with start_relay(calls.jobs, settings, engine=cut.url) as running:
            # If the first job is settled before its slot is free, the second is claimed by a string of its own. The
            # shortest: the first string of a connection also prepares its statements.
            length = min(cut.passed for _ in range(TRIES) if run_two(cut, None))
            for count in range(first, length + 1, CASES):
                is_reached = any(run_two(cut, count) for _ in range(TRIES))
                assert is_reached or count > length - 20, "the lengths of times and numbers differ"
    assert_each_once(calls, running, names)
