"""The doctor looks at queues whose jobs wait for a limit or a rate."""

import pytest
from sqlalchemy import Engine

from outboxq import Context, Jobs
from outboxq.admin import queues
from outboxq.postgres import Database
from outboxq.queue_limits import make_limits
from outboxq.statements.limit import take_slot
from tests.support.doctor import execute, named, only, open_session

LATE = "UPDATE outboxq.job SET run_at = run_at - interval '1 hour'"
# The first ready job of a queue runs under a lease.
LEASED = (
    "UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid(), lease_token = 1 WHERE id = ("
    "SELECT id FROM outboxq.job WHERE state = 'ready' AND queue = '{}' ORDER BY seq LIMIT 1)"
)
# So many seconds of tokens are reserved.
AHEAD = "INSERT INTO outboxq.rate VALUES ('{0}', clock_timestamp() + {1} * interval '1 second') ON CONFLICT (name) DO "
AHEAD += "UPDATE SET tat = excluded.tat"

jobs = Jobs()
jobs.limit("mail", running=1, rate="1/h")


@jobs.handler(queue="mail")
def send(ctx: Context) -> None: ...


APP = f"{__name__}:jobs"


def add(number: int, queue: str = "mail") -> str:
    return f"SELECT outboxq.add_job('send', '{{}}', '{queue}') FROM generate_series(1, {number})"


def limit(engine: Engine, queue: str = "mail", **limits: object) -> None:
    with engine.begin() as connection:
        queues.set_limits(connection, [queue], make_limits(**limits))  # type: ignore[arg-type]  # as each test gives them


def test_jobs_that_wait_long_for_a_full_limit_are_named(outboxq_database: Database, engine: Engine) -> None:
    """Slots of transactions and jobs under leases fill it alike; those of other queues do not."""
    url = outboxq_database.url
    limit(engine, running=2)
    limit(engine, "post", running=2)
    execute(url, add(3), add(5, "post"), LEASED.format("mail"), LEASED.format("post"), LATE)
    with open_session(url, take_slot("outboxq", "post", 1)):
        assert [one["detail"]["queue"] for one in named(url, "queue-limited")] == ["post"]
        with open_session(url, take_slot("outboxq", "mail", 2)):
            found = {one["detail"]["queue"]: one for one in named(url, "queue-limited")}
    assert set(found) == {"mail", "post"}
    detail = found["mail"]["detail"]
    assert (found["mail"]["severity"], detail["running"], detail["limit"]) == ("info", 2, 2)
    assert 3500 < detail["oldest_seconds"] < 3700
    assert "2 of 2 run" in found["mail"]["title"]
    assert "outboxq queues set mail --limit N" in found["mail"]["advice"]
    assert named(url, "queue-limited") == []


@pytest.mark.wide
def test_a_limit_that_the_applications_of_relays_declare_is_known(outboxq_database: Database, engine: Engine) -> None:
    """Of relays that live; of two versions that of the newer one; and what operators have set comes first."""
    url = outboxq_database.url
    row = (
        "INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, state, queues, kinds, slots, busy, "
        "listens, running, flush, limits, started_at, seen_at) SELECT gen_random_uuid(), 'h', 1, '1', 11, 'serving', "
        "'{{mail}}', '{{send}}', 1, 0, true, '[]', 1, '[{{\"name\": \"mail\", \"running\": {most}}}]', "
        "now() - interval '{started}', now() - interval '{seen}'"
    )
    execute(url, add(3), LEASED.format("mail"), LATE)
    execute(url, row.format(most=1, started="2 s", seen="2 min"))
    assert named(url, "queue-limited") == []
    execute(url, row.format(most=7, started="2 h", seen="1 s"))
    assert named(url, "queue-limited") == []
    execute(url, row.format(most=1, started="1 h", seen="2 s"))
    assert only(url, "queue-limited")["detail"]["limit"] == 1
    limit(engine, running=2)
    assert named(url, "queue-limited") == []


def test_a_full_limit_for_which_no_job_waits_long_is_not_named(outboxq_database: Database, engine: Engine) -> None:
    """To be full is what a limit is for."""
    url = outboxq_database.url
    limit(engine, running=1)
    execute(url, add(2), LEASED.format("mail"))
    assert named(url, "queue-limited") == []
    execute(url, LATE)
    assert only(url, "queue-limited")["detail"]["running"] == 1


@pytest.mark.wide
def test_jobs_that_wait_long_for_a_rate_are_named(outboxq_database: Database, engine: Engine) -> None:
    """If no token is there now: with a burst of three, when more than two lie ahead."""
    url = outboxq_database.url
    limit(engine, rate="6/min", burst=3)
    execute(url, add(1), LATE)
    assert named(url, "queue-throttled") == []
    execute(url, AHEAD.format("mail", 15), AHEAD.format("post", 1_000))
    assert named(url, "queue-throttled") == []
    execute(url, AHEAD.format("mail", 29))
    found = only(url, "queue-throttled")
    assert found["severity"] == "info"
    assert {name: found["detail"][name] for name in ("queue", "rate", "burst")} == {
        "queue": "mail", "rate": "6/min", "burst": 3,
    }  # fmt: skip
    assert "outboxq queues set mail --rate N/TIME" in found["advice"]
    execute(url, "UPDATE outboxq.job SET run_at = clock_timestamp()")
    assert named(url, "queue-throttled") == []


@pytest.mark.wide
def test_limits_that_an_application_declares_count_if_no_operator_has_set_others(
    outboxq_database: Database, engine: Engine
) -> None:
    """They are known with its registry only."""
    url = outboxq_database.url
    execute(url, add(2), LEASED.format("mail"), AHEAD.format("mail", 3_600), LATE)
    assert named(url, "queue-limited") == named(url, "queue-throttled") == []
    assert only(url, "queue-limited", APP)["detail"]["limit"] == 1
    assert only(url, "queue-throttled", APP)["detail"]["rate"] == "1/h"
    limit(engine, running=5)
    assert named(url, "queue-limited", APP) == []
    assert only(url, "queue-throttled", APP)["detail"]["burst"] == 1


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("lock", "whose"),
    [
        ("'outboxq_outboxq limit'), hashtext('mail' || chr(31) || 0", "limits"),
        ("'outboxq_outboxq group'), hashtext('mail' || chr(31) || 'g' || chr(31) || 1", "groups"),
        ("'outboxq_outboxq every'), hashtext('rebuild' || chr(31) || 'index'", "windows"),
    ],
    ids=["limit", "group", "window"],
)
def test_a_session_that_holds_the_turn_of_jobs_is_named(outboxq_database: Database, lock: str, whose: str) -> None:
    """Any login may take the advisory locks of relays, and stop their jobs."""
    url = outboxq_database.url
    with open_session(url, f"SELECT pg_advisory_lock(hashtext({lock}))", name="intruder") as pid:
        found = only(url, "turn-held")["detail"]
        assert (found["pid"], found["application_name"]) == (pid, "intruder")
        assert [name for name in ("limits", "groups", "windows") if found[name]] == [whose]
    assert named(url, "turn-held") == []
