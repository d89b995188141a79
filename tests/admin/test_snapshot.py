"""The snapshot of `outboxq top`: the same as each of its parts, in bounded time, and never in the way."""

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, DeadLetter, Jobs, OutboxSession
from outboxq.admin.dead_letters import DeadFilter, list_dead, show_dead
from outboxq.admin.snapshot import find_dead_groups, take_snapshot
from outboxq.admin.stats import collect_stats
from outboxq.error_record import read_attempts
from outboxq.postgres import Database
from tests.admin.test_roles import Cast
from tests.admin.test_roles import roles as roles
from tests.support.doctor import execute, open_session
from tests.support.staged import stage

_STAT = """\
INSERT INTO outboxq.stat (grain, at, queue, kind, done, retried, died, wait, run)
SELECT 60, date_bin('1 minute', now(), '2000-01-01') - n * interval '1 minute', 'accounts', 'charge', 60, 6, 1,
  array_fill(0::bigint, ARRAY[20]), array_fill(0::bigint, ARRAY[20]) FROM generate_series(0, 30) AS n"""
_RELAY = """\
INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, seen_at, state, queues, kinds, slots, busy,
  listens, running, flush)
VALUES (gen_random_uuid(), 'here', 1, '1', 11, now(), 'serving', '{accounts,idle}', '{charge}', 4, 1, true, '[]', 1),
  (gen_random_uuid(), 'there', 2, '1', 11, now() - interval '2 minutes', 'serving', '{mail}', '{}', 4, 1, true, '[]', 1)
"""
_DEAD = """\
INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, created_at)
SELECT gen_random_uuid(), 'mail', 'send', '{{}}', '{{}}', 0, 1, 0, CAST(:errors AS jsonb), :reason, now()
FROM generate_series(1, {number})"""


def test_a_snapshot_has_what_its_parts_have(engine: Engine) -> None:
    """Queues with their counts, their rates and the relays that live; those, too, that only a relay knows."""
    stage(engine)
    with engine.begin() as connection:
        connection.execute(text(_STAT))
        connection.execute(text(_RELAY))
    with engine.connect() as connection:
        found, stats = take_snapshot(connection), collect_stats(connection)
    queues = {queue.queue: queue for queue in found.queues}
    assert {queue.queue: queue.ready for queue in stats.queues}.items() <= {
        name: queue.ready for name, queue in queues.items()
    }.items()
    # Six minutes, of which the last has begun.
    assert 60 <= queues["accounts"].done_per_minute <= 72
    assert 7 <= queues["accounts"].failed_per_minute <= 8.4
    assert [queues[name].relays for name in ("accounts", "idle", "mail")] == [1, 1, 0]
    assert [relay.state for relay in found.relays] == ["serving", "dead"]
    assert found.unknown_effects == stats.unknown_effects
    assert found.not_known == ()


def test_dead_letters_are_grouped_by_what_they_died_of(engine: Engine) -> None:
    """The type and the innermost line of the last error, or the reason; the largest group first."""
    error = '[{"type": "KeyError"}, {"type": "ValueError", "where": ["app.py:1 in f", "app.py:9 in g"]}]'
    with engine.begin() as connection:
        connection.execute(text(_DEAD.format(number=3)), {"errors": error, "reason": "gave up"})
        connection.execute(text(_DEAD.format(number=2)), {"errors": "[]", "reason": "crashed 3 of 3 times"})
    with engine.connect() as connection:
        first, second = find_dead_groups(connection)
    assert (first.queue, first.kind, first.error, first.line, first.jobs) == (
        "mail", "send", "ValueError", "app.py:9 in g", 3,
    )  # fmt: skip
    assert (second.error, second.line, second.jobs) == ("crashed 3 of 3 times", None, 2)
    assert first.first_died_at <= first.last_died_at


def test_what_a_reason_quotes_makes_no_groups(engine: Engine) -> None:
    """A reason without an error counts up to its first colon: behind it is what differs from job to job."""
    with engine.begin() as connection:
        for number, why in ((2, "no row 7"), (1, "no row 8")):
            values = {"errors": "[]", "reason": f"it could not be claimed: {why}"}
            connection.execute(text(_DEAD.format(number=number)), values)
    with engine.connect() as connection:
        (group,) = find_dead_groups(connection)
        assert (group.error, group.jobs) == ("it could not be claimed", 3)
        assert len(list_dead(connection, DeadFilter(error=group.error))) == 3
        assert list_dead(connection, DeadFilter(error="it could not be claimed: no row 8")) == []


def test_a_job_that_its_handler_gave_up_died_of_that(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain
) -> None:
    """Not of an earlier error, nor of a text of its own."""
    jobs = Jobs()

    @jobs.handler(queue="given-up", retry=Backoff(first_seconds=0))
    def give_up(ctx: Context, name: str) -> DeadLetter:
        if ctx.job.attempt == 1:
            raise ValueError
        return DeadLetter(f"nothing can be done for {name}")

    with sessions.begin() as session:
        session.add_jobs(give_up.job(name=name) for name in ("anna", "bob"))
    drain(jobs)
    with engine.connect() as connection:
        (group,) = find_dead_groups(connection)
        assert (group.error, group.jobs) == ("outboxq.DeadLetter", 2)
        (one, _) = list_dead(connection, DeadFilter(error="outboxq.DeadLetter"))
        errors = read_attempts(show_dead(connection, one.id).errors)
    assert [each.type for each in errors] == ["ValueError", "outboxq.DeadLetter"]
    assert errors[1].message == one.reason


def test_a_part_that_takes_too_long_is_left_out(engine: Engine, outboxq_database: Database) -> None:
    """As behind a table that is locked: the other parts are there, and the transaction is as it was before."""
    stage(engine)
    with (
        open_session(outboxq_database.url, "LOCK TABLE outboxq.job"),
        engine.connect() as connection,
    ):
        before = connection.execute(text("SHOW statement_timeout")).scalar_one()
        found = take_snapshot(connection)
        assert connection.execute(text("SHOW statement_timeout")).scalar_one() == before
    (missing,) = found.not_known
    assert (missing.part, "locked a table" in missing.reason) == ("queues", True)
    assert found.dead_groups


def test_a_refused_part_says_so(engine: Engine) -> None:
    """As on tables of an earlier step, which have no history."""
    with engine.connect() as connection:
        connection.execute(text("DROP TABLE outboxq.relay_status"))
        found = take_snapshot(connection)
        connection.rollback()
    (missing,) = found.not_known
    assert (missing.part, "outboxq migrate" in missing.reason) == ("relays", True)


def test_a_right_that_is_missing_is_named(roles: Cast) -> None:
    """And what gives it."""
    execute(
        roles.database.url, 'REVOKE SELECT ON outboxq.stat FROM "{}"'.format(roles.groups["reader"].replace('"', '""'))
    )
    engine = create_engine(roles.url("reader"))
    with engine.connect() as connection:
        found = take_snapshot(connection)
    engine.dispose()
    (missing,) = found.not_known
    assert (missing.part, "permission denied for table stat" in missing.reason) == ("kinds", True)
    assert "outboxq roles --sql" in missing.reason
