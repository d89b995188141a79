"""Actions and their rows in the audit: together or not at all, whatever the role may write, and without any secret."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import ANY
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from outboxq.admin import audit
from outboxq.admin.actions import Actions, Actor, CancelJobs, CancelRunning, RetryDead
from outboxq.admin.audit import AuditFilter
from outboxq.admin.dead_letters import DeadFilter
from outboxq.admin.effects import WasApplied, WasNotApplied
from outboxq.admin.jobs import JobFilter
from outboxq.admin.schedules import NewSchedule
from outboxq.cron import Cron
from outboxq.errors import ArgumentError, AuditNotFound, EffectNotFound, InvalidKey, JobNotFound
from outboxq.migrations.runner import migrate
from outboxq.outbox.kinds import external
from outboxq.queue_limits import make_limits
from tests.admin.test_roles import Cast
from tests.admin.test_roles import roles as roles
from tests.support import operators
from tests.support.doctor import execute
from tests.support.operators import add, audited, beginning, count

ANNA = Actor("anna", via="api")
SECRET = "canary-4111-1111"

_EFFECT = """
INSERT INTO outboxq.effect (scope, key, status, in_doubt, provider_key, lock_token, locked_until)
VALUES ('pay', 'order-7', 'unknown', true, gen_random_uuid(), gen_random_uuid(), clock_timestamp())"""
_DONE = f"""
INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, seconds, args, headers, result, expires_at)
VALUES ('{UUID(int=7)}', 'q', 'k', 'done', 1, now(), 1, jsonb_build_object('a', CAST(:secret AS text)),
  jsonb_build_object('h', CAST(:secret AS text)), to_jsonb(CAST(:secret AS text)), now() + interval '1 day')"""
_MESSAGE = "INSERT INTO outboxq.inbox (consumer, message_id, expires_at) VALUES ('c', 'm', now() + interval '1 day')"

Act = Callable[[Actions, Connection, UUID], object]


def new_schedule(name: str = "nightly") -> NewSchedule:
    return NewSchedule(name=name, job=external("report", queue="q").job(token=SECRET), cron=Cron("@daily", "UTC"))


# What is done, and what the audit says of it: action, target, changed, and what was to become of it.
SINGLE: dict[str, tuple[Act, tuple[str, str | None, int, object]]] = {
    "pause": (lambda a, c, _: a.pause_queues(c, ["q"]), ("queue.pause", "q", 1, None)),
    "resume": (lambda a, c, _: a.resume_queues(c, ["q", "r"]), ("queue.resume", None, 0, None)),
    "limit": (
        lambda a, c, _: a.set_limits(c, ["q"], make_limits(running=5), ["rate"]),
        ("queue.set", "q", 1, {"running": 5, "no": ["rate"]}),
    ),
    "keep": (lambda a, c, _: a.keep_dead(c, ["q"], 3600), ("queue.keep_dead", "q", 1, {"seconds": 3600})),
    "pause kind": (lambda a, c, _: a.pause_kinds(c, "q", ["k"]), ("kind.pause", "k", 1, {"queue": "q"})),
    "resume kind": (lambda a, c, _: a.resume_kinds(c, "q", ["k"]), ("kind.resume", "k", 0, {"queue": "q"})),
    "schedule": (
        lambda a, c, _: a.put_schedule(c, new_schedule("weekly")),
        ("schedule.put", "weekly", 1,
         {"kind": "report", "queue": "q", "cron": "@daily", "time_zone": "UTC", "args": "not kept"}),
    ),
    "schedule as it is": (
        lambda a, c, _: a.put_schedule(c, new_schedule()),
        ("schedule.put", "nightly", 0,
         {"kind": "report", "queue": "q", "cron": "@daily", "time_zone": "UTC", "args": "not kept"}),
    ),
    "pause schedule": (lambda a, c, _: a.pause_schedules(c, ["nightly"]), ("schedule.pause", "nightly", 1, None)),
    "resume schedule": (lambda a, c, _: a.resume_schedules(c, ["nightly"]), ("schedule.resume", "nightly", 0, None)),
    "remove schedule": (lambda a, c, _: a.remove_schedules(c, ["nightly"]), ("schedule.remove", "nightly", 1, None)),
    "resolve": (
        lambda a, c, _: a.resolve_effect(c, "pay", "order-7", WasApplied(f'"{SECRET}"'), keep=timedelta(days=1)),
        ("effect.resolve", "pay/order-7", 1, {"verdict": "applied"}),
    ),
    "not applied": (
        lambda a, c, _: a.resolve_effect(c, "pay", "order-7", WasNotApplied()),
        ("effect.resolve", "pay/order-7", 1, {"verdict": "not applied"}),
    ),
    "forget": (lambda a, c, _: a.forget_messages(c, "c", ["m"]), ("message.forget", "m", 1, {"consumer": "c"})),
    "run again": (
        lambda a, c, _: a.run_again(c, UUID(int=7)),
        ("done.run_again", str(UUID(int=7)), 1, {"job": ANY}),
    ),
}  # fmt: skip


@pytest.fixture
def staged(engine: Engine) -> UUID:
    """A job, a dead letter, an effect, a message and a schedule, each with a secret wherever it can hold one."""
    (job_id,) = add(engine, 1, queue="q")
    add(engine, 1, "dead_job", queue="q")
    with engine.begin() as connection:
        connection.execute(text(_EFFECT))
        connection.execute(text(_MESSAGE))
        connection.execute(text(_DONE), {"secret": SECRET})
        for table, more in (("job", ""), ("dead_job", ", reason = :secret")):
            connection.execute(
                text(
                    f"UPDATE outboxq.{table} SET args = jsonb_build_object('a', CAST(:secret AS text)), headers = "
                    "jsonb_build_object('h', CAST(:secret AS text)), errors = jsonb_build_array(CAST(:secret AS text))"
                    f"{more}"
                ),
                {"secret": SECRET},
            )
        Actions(Actor("stage")).put_schedule(connection, new_schedule())
        connection.execute(text("DELETE FROM outboxq.audit"))
    return job_id


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", SINGLE)
def test_an_action_has_its_row(engine: Engine, staged: UUID, name: str) -> None:
    """Who, by which way and why; what it was done to, and how many rows it changed; and no secret."""
    act, (action, target, changed, change) = SINGLE[name]
    with engine.begin() as connection:
        act(Actions(Actor("anna", "admin", "web"), "a reason"), connection, staged)
    (row,) = audited(engine)
    assert (row["action"], row["target"], row["changed"], row["change"]) == (action, target, changed, change)
    assert (row["actor"], row["role"], row["via"], row["reason"]) == ("anna", "admin", "web", "a reason")
    assert row["finished_at"] is not None
    assert row["db_user"]
    assert SECRET not in operators.audit_text(engine)


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", SINGLE)
def test_an_action_that_is_rolled_back_has_none(engine: Engine, staged: UUID, name: str) -> None:
    """Neither stands without the other."""
    with engine.connect() as connection:
        SINGLE[name][0](Actions(ANNA), connection, staged)
        connection.rollback()
    assert audited(engine) == []


def test_a_cancellation_of_what_runs_counts_what_was_asked_for(engine: Engine, staged: UUID) -> None:
    """Also the jobs that a transaction holds, whose relays end them later."""
    (running,) = add(engine, 1, queue="q")
    ids = (staged, running, UUID(int=1))
    with engine.connect() as relay:
        relay.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": running})
        total = Actions(ANNA).run(beginning(engine), CancelRunning(JobFilter(ids=ids)))
        relay.rollback()
    assert (total.changed, total.requested, total.not_found) == (2, [running], [UUID(int=1)])
    (row,) = audited(engine)
    assert (row["action"], row["changed"], row["change"]) == ("job.cancel_running", 2, {"outcome": "discard"})
    assert row["filter"] == {"ids": [str(each) for each in ids]}


@pytest.fixture
def running(engine: Engine) -> Iterator[tuple[Connection, UUID]]:
    """A job in a transaction of its own, as a relay would have it."""
    (job_id,) = add(engine, 1, queue="q")
    with engine.connect() as relay:
        relay.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": job_id})
        yield relay, job_id


def test_a_backend_that_is_ended_has_its_row(engine: Engine, running: tuple[Connection, UUID]) -> None:
    """Whether there was one; a second look finds none."""
    relay, job_id = running
    assert Actions(ANNA).terminate(beginning(engine), job_id, "dead")
    with pytest.raises(DBAPIError):
        relay.execute(text("SELECT"))
    assert not Actions(ANNA).terminate(beginning(engine), UUID(int=1))
    rows = audited(engine)
    assert [(row["action"], row["target"], row["changed"]) for row in rows] == [
        ("job.terminate", str(job_id), 1), ("job.terminate", str(UUID(int=1)), 0),
    ]  # fmt: skip
    assert rows[0]["change"] == {"outcome": "dead"}
    assert all(row["finished_at"] is not None for row in rows)


def test_a_backend_is_ended_only_if_the_audit_says_so(engine: Engine, running: tuple[Connection, UUID]) -> None:
    """The row is refused at COMMIT: nothing was ended, as that could not be rolled back."""
    relay, job_id = running
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no row'; END$$; "
            "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON outboxq.audit DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
            "EXECUTE FUNCTION refuse()"
        )
    with pytest.raises(DBAPIError, match="no row"):
        Actions(ANNA).terminate(beginning(engine), job_id)
    assert relay.execute(text("SELECT 1")).scalar_one() == 1


def test_a_backend_that_may_have_been_ended_is_in_the_audit(engine: Engine, running: tuple[Connection, UUID]) -> None:
    """What ends this process after the act leaves the row, without its end."""
    relay, job_id = running
    begun = 0

    @contextmanager
    def begin() -> Iterator[Connection]:
        nonlocal begun
        begun += 1
        with engine.begin() as connection:
            yield connection
            if begun == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Actions(ANNA).terminate(begin, job_id)
    (row,) = audited(engine)
    assert (row["target"], row["changed"], row["finished_at"]) == (str(job_id), 0, None)
    with pytest.raises(DBAPIError):
        relay.execute(text("SELECT"))


def test_no_secret_of_a_job_comes_into_the_audit(engine: Engine, staged: UUID) -> None:
    """Of many rows: arguments, headers, errors and reasons of the jobs that were changed stay out."""
    actions = Actions(ANNA)
    actions.run(beginning(engine), RetryDead(DeadFilter(queue="q"), f'{{"a": "{SECRET}"}}'))
    actions.run(beginning(engine), CancelJobs(JobFilter(queue="q")))
    assert [row["changed"] for row in audited(engine)] == [1, 2]
    assert SECRET not in operators.audit_text(engine)


def test_a_job_that_is_run_again_is_named_in_its_row(engine: Engine, staged: UUID) -> None:
    """The finished one as the target, the new one as what became of it."""
    with engine.begin() as connection:
        added = Actions(ANNA).run_again(connection, UUID(int=7))
        assert connection.execute(text("SELECT count(*) FROM outboxq.job WHERE id = :id"), {"id": added}).scalar_one()
    assert audited(engine)[0]["change"] == {"job": str(added)}
    with pytest.raises(JobNotFound), engine.begin() as connection:
        Actions(ANNA).run_again(connection, UUID(int=8))
    assert len(audited(engine)) == 1


def test_an_action_that_fails_has_no_row(engine: Engine) -> None:
    """What was refused was not done."""
    with pytest.raises(EffectNotFound), engine.begin() as connection:
        Actions(ANNA).resolve_effect(connection, "pay", "no-such", WasNotApplied())
    assert audited(engine) == []


def test_an_actor_and_a_reason_can_be_stored() -> None:
    """Or are refused before anything is done."""
    for name in ("", "x" * 256, "a\x00b"):
        with pytest.raises(InvalidKey, match="actor's name"):
            Actor(name)
    with pytest.raises(InvalidKey, match="an actor's name takes"):
        Actor("")
    with pytest.raises(ArgumentError):
        Actor("anna", via="mail")  # type: ignore[arg-type]
    for reason in ("", "  ", "a\x00b", "\ud800", "x" * 2_001):
        with pytest.raises(ArgumentError):
            Actions(ANNA, reason)
    assert Actions(ANNA, "ä" * 1_000)


def test_the_audit_is_listed_and_shown(engine: Engine) -> None:
    """The latest first, by time, by actor, by action and by what stands before its dot."""
    with engine.begin() as connection:
        Actions(ANNA).pause_queues(connection, ["q"])
        Actions(Actor("bob")).pause_kinds(connection, "q", ["k"])
        Actions(Actor("bob")).resume_queues(connection, ["q"])
    with engine.connect() as connection:
        every = audit.list_audit(connection)
        since = audit.list_audit(connection, AuditFilter(since=every[0].at))
        by_bob = audit.list_audit(connection, AuditFilter(actor="bob"))
        of_queues = audit.list_audit(connection, AuditFilter(action="queue"))
        paused = audit.list_audit(connection, AuditFilter(action="queue.pause"), limit=1)
        shown = audit.show_audit(connection, by_bob[1].id)
        with pytest.raises(AuditNotFound):
            audit.show_audit(connection, UUID(int=0))
    assert [each.action for each in every] == ["queue.resume", "kind.pause", "queue.pause"]
    assert [each.action for each in since] == ["queue.resume"]
    assert [each.action for each in by_bob] == ["queue.resume", "kind.pause"]
    assert [each.action for each in of_queues] == ["queue.resume", "queue.pause"]
    assert [each.action for each in paused] == ["queue.pause"]
    assert (shown.entry, shown.filter, shown.change) == (by_bob[1], None, '{"queue": "q"}')


def reduced(roles: Cast, how: str) -> None:
    """The audit is out of reach: its table was never made, or the operator's right to write it not given."""
    if how == "missing":
        engine = create_engine(roles.database.url)
        with engine.begin() as connection:
            migrate(connection, to=10)
        engine.dispose()
    else:
        execute(
            roles.database.url,
            f'REVOKE INSERT ON outboxq.audit FROM "{roles.groups["operator"].replace(chr(34), chr(34) * 2)}"',
        )


@pytest.fixture
def operator(roles: Cast) -> Iterator[Engine]:
    engine = create_engine(roles.url("operator"))
    yield engine
    engine.dispose()


@pytest.mark.parametrize("how", ["missing", "forbidden"])
def test_without_an_audit_the_action_is_done_and_that_is_said_once(
    roles: Cast, engine: Engine, operator: Engine, how: str
) -> None:
    """On tables of before, and as a role that was made before: nothing is refused that worked until now."""
    add(engine, 250)
    reduced(roles, how)
    said: list[str] = []
    actions = Actions(ANNA, warn=said.append)
    total = actions.run(beginning(operator), CancelJobs(JobFilter(queue="many")))
    with operator.begin() as connection:
        actions.pause_queues(connection, ["q"])
    assert (total.changed, total.entry, count(engine, "job")) == (250, None, 0)
    assert len(said) == 1
    assert ("outboxq migrate" if how == "missing" else "outboxq roles") in said[0]


def test_an_operator_writes_the_audit_and_a_reader_reads_it(roles: Cast, operator: Engine) -> None:
    """A reader changes nothing: neither the rows nor the audit."""
    with operator.begin() as connection:
        Actions(ANNA).pause_queues(connection, ["q"])
    reader = create_engine(roles.url("reader"))
    with reader.connect() as connection:
        assert [each.actor for each in audit.list_audit(connection)] == ["anna"]
    with pytest.raises(DBAPIError, match="permission denied"), reader.begin() as connection:
        Actions(ANNA, warn=[].append).pause_queues(connection, ["r"])
    reader.dispose()
