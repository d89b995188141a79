"""The doctor looks at what waits, and at who is there to do it."""

from uuid import uuid4

import pytest

from outboxq import Context, Jobs, Relay
from outboxq.postgres import Database
from tests.support.doctor import execute, named, only, open_session

APP = "tests.support.app:jobs"
LATE = "UPDATE outboxq.job SET run_at = run_at - interval '1 hour' WHERE queue = '{}'"


def add(kind: str, queue: str = "ledger", number: int = 1) -> str:
    return f"SELECT outboxq.add_job('{kind}', '{{}}', '{queue}') FROM generate_series(1, {number})"


def test_kinds_that_relays_put_off_are_named(outboxq_database: Database) -> None:
    """Parked jobs are counted per kind and queue; a scheduled one that was never parked is not."""
    url = outboxq_database.url
    execute(
        url,
        add("mystery", number=3),
        add("record"),
        "UPDATE outboxq.job SET state = 'scheduled', run_at = run_at + interval '1 minute'",
        "UPDATE outboxq.job SET parked = 2 WHERE kind = 'mystery'",
    )
    assert only(url, "kind-parked")["detail"] == {"queue": "ledger", "kind": "mystery", "jobs": 3}


def test_kinds_that_the_registry_does_not_know_are_named(outboxq_database: Database) -> None:
    """In a queue that it serves that is a warning, elsewhere it may be another service's."""
    url = outboxq_database.url
    execute(url, add("record"), add("mystery", number=2), add("ship", "depot"))
    found = {one["detail"]["kind"]: one for one in named(url, "kind-unknown-to-registry", APP)}
    assert {kind: (one["severity"], one["detail"]["jobs"]) for kind, one in found.items()} == {
        "mystery": ("warning", 2),
        "ship": ("info", 1),
    }
    assert named(url, "kind-unknown-to-registry") == []


@pytest.mark.wide
def test_a_queue_that_two_services_share_is_named(outboxq_database: Database) -> None:
    """A job that the registry knows, put off by a relay of another one, shows that both claim from its queue."""
    url = outboxq_database.url
    execute(url, add("record", number=2), add("mystery"), add("record", "depot"))
    assert named(url, "queue-shared", APP) == []
    assert "queues of its own" in only(url, "kind-unknown-to-registry", APP)["advice"]
    other = Jobs()

    @other.handler(queue="ledger")
    def mystery(ctx: Context) -> None: ...

    Relay(url, other).drain()
    found = only(url, "queue-shared", APP)
    assert found["detail"] == {"queue": "ledger", "kinds": ["record"], "jobs": 2}
    assert (found["severity"], "queues of its own" in found["advice"]) == ("warning", True)
    assert named(url, "queue-shared") == []


@pytest.mark.wide
@pytest.mark.parametrize("state", ["ready", "scheduled"])
def test_a_queue_that_nobody_serves_is_a_problem(outboxq_database: Database, state: str) -> None:
    """Jobs that have been due for long with no relay connected are a problem, with one they are a warning."""
    url = outboxq_database.url
    execute(url, add("record", number=2), add("record", "fresh"), LATE.format("ledger"))
    execute(url, f"UPDATE outboxq.job SET state = '{state}'")
    found = only(url, "no-relay")
    assert (found["severity"], found["detail"]["queue"], found["detail"]["jobs"]) == ("problem", "ledger", 2)
    assert found["detail"]["oldest_seconds"] > 3_500
    assert named(url, "no-relay", "--older-than", 7_200) == []
    with open_session(url, name="outboxq relay"):
        assert named(url, "no-relay") == []
        assert only(url, "queue-late")["detail"]["queue"] == "ledger"


def test_jobs_that_run_or_wait_for_their_time_are_not_late(outboxq_database: Database) -> None:
    """A job that a transaction holds, and one of tomorrow, keep nobody waiting."""
    url = outboxq_database.url
    execute(url, add("record"), add("record", "later"), LATE.format("ledger"))
    execute(
        url,
        "UPDATE outboxq.job SET state = 'scheduled', run_at = run_at + interval '1 day' WHERE queue = 'later'",
    )
    with open_session(url, "DELETE FROM outboxq.job WHERE queue = 'ledger'"):
        assert named(url, "no-relay", "--older-than", 0.001) == []
    assert only(url, "no-relay")["detail"]["queue"] == "ledger"


def test_a_paused_queue_with_jobs_is_told(outboxq_database: Database) -> None:
    """It is worth knowing, and a warning once its jobs are late; it is not called unserved."""
    url = outboxq_database.url
    execute(
        url, add("record"), "INSERT INTO outboxq.queue (name, paused_at) VALUES ('ledger', now()), ('empty', now())"
    )
    assert only(url, "queue-paused")["severity"] == "info"
    execute(url, LATE.format("ledger"))
    assert only(url, "queue-paused")["severity"] == "warning"
    assert named(url, "no-relay") == []


def test_suspects_are_told(outboxq_database: Database) -> None:
    """Jobs whose claim died are counted."""
    url = outboxq_database.url
    execute(url, add("record", number=2))
    assert named(url, "suspects-waiting") == []
    execute(url, "UPDATE outboxq.job SET state = 'suspect'")
    assert only(url, "suspects-waiting")["detail"] == {"jobs": 2, "queues": ["ledger"]}


def test_leases_of_dead_relays_are_a_problem(outboxq_database: Database) -> None:
    """Jobs leased by a relay that is past its time, or unknown, are named; those of a living one are not."""
    url = outboxq_database.url
    dead, alive, unknown = uuid4(), uuid4(), uuid4()
    execute(
        url,
        "INSERT INTO outboxq.relay (id, alive_until, host, pid) VALUES "
        f"('{dead}', now() - interval '5 minutes', 'alpha', 42), ('{alive}', now() + interval '1 minute', 'beta', 43)",
    )
    for owner in (dead, alive, unknown):
        execute(
            url,
            add("record"),
            f"UPDATE outboxq.job SET state = 'leased', lease_owner = '{owner}' WHERE state = 'ready'",
        )
    found = {one["detail"]["owner"]: one for one in named(url, "lease-orphaned")}
    assert set(found) == {str(dead), str(unknown)}
    assert "alpha, process 42" in found[str(dead)]["title"]
    assert found[str(dead)]["detail"]["jobs"] == 1
    assert "not known" in found[str(unknown)]["title"]


@pytest.mark.wide
def test_a_relay_with_a_living_lease_counts_as_connected(outboxq_database: Database) -> None:
    """A relay on an engine with another application_name is seen by its lease."""
    url = outboxq_database.url
    execute(url, add("record"), LATE.format("ledger"))
    only(url, "no-relay")
    execute(url, f"INSERT INTO outboxq.relay (id, alive_until) VALUES ('{uuid4()}', now() + interval '1 minute')")
    assert named(url, "no-relay") == []
    only(url, "queue-late")


def test_advice_can_be_copied_whatever_a_name_holds(outboxq_database: Database) -> None:
    """A kind that a producer made up to run something in an operator's shell is quoted."""
    url = outboxq_database.url
    execute(url, add("x; reboot"), "UPDATE outboxq.job SET state = 'scheduled', parked = 1")
    assert only(url, "kind-parked")["advice"].endswith("--kind 'x; reboot'")


def test_groups_that_are_held_up_are_named(outboxq_database: Database) -> None:
    """Those whose first job is put off while others wait behind it, with how many, and the job."""
    url = outboxq_database.url
    execute(
        url,
        add("record", number=4),
        "UPDATE outboxq.job SET state = 'grouped', group_key = CASE WHEN seq % 4 = 0 THEN 'b' ELSE 'a' END",
        "UPDATE outboxq.job SET run_at = run_at + interval '1 hour', attempt = 2 "
        "WHERE seq IN (SELECT min(seq) FROM outboxq.job GROUP BY group_key)",
    )
    found = only(url, "group-blocked")
    assert (found["detail"]["queue"], found["detail"]["groups"], found["detail"]["jobs"]) == ("ledger", 1, 2)
    assert found["detail"]["job"] in found["advice"]
