"""The doctor and the rows that relays keep of themselves: queues and kinds that none of them serves or knows."""

import pytest

from outboxq.postgres import Database
from tests.doctor.test_work import LATE, add
from tests.support.doctor import execute, named, only, open_session

RELAY = (
    "INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, seen_at, state, queues, kinds, slots, "
    "busy, free, listens, running, flush) VALUES (gen_random_uuid(), '{host}', 7, '1', 11, now() - interval '{seen}', "
    "'{state}', '{queues}', '{kinds}', 2, 1, '{free}', true, '{running}', 1)"
)
RUNNING = (
    '[{"id": "00000000-0000-0000-0000-000000000001", "queue": "ledger", "kind": "slow", "attempt": 1, "seconds": 60.0, '
    '"pid": 9}]'
)


def relay(
    queues: str,
    kinds: str = "{record}",
    *,
    host: str = "alpha",
    seen: str = "1 second",
    state: str = "serving",
    free: str = "{}",
    running: str = "[]",
) -> str:
    values = {"host": host, "seen": seen, "state": state, "queues": queues, "kinds": kinds, "free": free}
    return RELAY.format(**values, running=running)


@pytest.mark.wide
def test_a_late_queue_that_no_living_relay_serves_is_a_problem(outboxq_database: Database) -> None:
    """With what is served, and the relay that served it last; once one serves it, it is late only."""
    url = outboxq_database.url
    execute(url, add("record"), LATE.format("ledger"), relay("{mail,post}"), relay("{ledger}", seen="5 minutes"))
    found = only(url, "queue-not-served")
    assert found["severity"] == "problem"
    assert found["detail"]["served"] == ["mail", "post"]
    assert 290 < found["detail"]["last_seen_seconds"] < 900
    assert "alpha (process 7)" in found["title"]
    for code in ("no-relay", "queue-late"):
        assert named(url, code) == []
    execute(url, relay("{ledger}", host="beta"))
    assert named(url, "queue-not-served") == []
    only(url, "queue-late")


def test_a_relay_that_stops_serves_no_queue(outboxq_database: Database) -> None:
    """It claims nothing any more."""
    url = outboxq_database.url
    execute(url, add("record"), LATE.format("ledger"), relay("{ledger}", state="stopping"), relay("{mail}"))
    assert only(url, "queue-not-served")["detail"]["served"] == ["mail"]


def test_a_relay_that_is_connected_and_not_seen_serves_no_queue(outboxq_database: Database) -> None:
    """It hangs; its connections are open. Without any connection there is no relay at all."""
    url = outboxq_database.url
    execute(url, add("record"), LATE.format("ledger"), relay("{ledger}", seen="5 minutes"))
    only(url, "no-relay")
    with open_session(url, name="outboxq relay"):
        assert only(url, "queue-not-served")["detail"]["served"] == []


@pytest.mark.parametrize(("free", "busy"), [("{}", True), ("{ledger}", False)])
def test_a_late_queue_is_told_with_its_slots(outboxq_database: Database, free: str, busy: bool) -> None:
    """Whether all of them work, and what takes long there."""
    url = outboxq_database.url
    execute(url, add("record"), LATE.format("ledger"), relay("{ledger}", free=free, running=RUNNING))
    found = only(url, "queue-late")
    assert (found["severity"], found["detail"]["slots_busy"], found["detail"]["relays"]) == ("warning", busy, 1)
    assert "'slow'" in found["title"]


def test_kinds_that_no_living_relay_knows_are_named(outboxq_database: Database) -> None:
    """Of the queues that they serve; paused and parked ones are told as such."""
    url = outboxq_database.url
    execute(
        url,
        add("record"),
        add("mystery", number=2),
        add("parked"),
        add("paused"),
        add("mystery", "unserved"),
        "UPDATE outboxq.job SET parked = 1, state = 'scheduled' WHERE kind = 'parked'",
        "INSERT INTO outboxq.paused_kind (queue, kind) VALUES ('ledger', 'paused')",
        relay("{ledger}"),
        relay("{mail}", "{mystery}"),
        relay("{ledger}", "{mystery}", seen="2 minutes"),
    )
    assert only(url, "kind-not-served")["detail"] == {"queue": "ledger", "kind": "mystery", "jobs": 2, "relays": 1}
    only(url, "kind-parked")
    execute(url, relay("{ledger}", "{mystery}", host="beta"))
    assert named(url, "kind-not-served") == []
