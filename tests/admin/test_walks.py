"""Large tables are read a stretch at a time: what is found is the same, however short the stretches are."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text

from outboxq.admin import dead_letters, effects, finished, installation, jobs, kinds, messages
from outboxq.admin.actions import CancelJobs, DiscardDead, preview
from outboxq.admin.dead_letters import DeadFilter
from outboxq.admin.effects import EffectFilter
from outboxq.admin.finished import DoneFilter
from outboxq.admin.jobs import JobFilter
from outboxq.admin.messages import MessageFilter
from outboxq.postgres import Database
from outboxq.statements import stretches
from outboxq.statements.stretches import stretches as each_stretch
from outboxq.tables import dead_job
from tests.support.doctor import only, open_session

ROWS = 40
_IN_LONG_GONE_TIMES = datetime(2000, 1, 1, tzinfo=UTC)
# Two of each time, millisecond and expiry, and one kind in ten that is rare.
_FILL = (
    (
        "INSERT INTO outboxq.job (id, queue, kind, args, state, parked, run_at) SELECT "
        "CAST('01929e1c-5a7d-7cc3-9a55-' || lpad((n * 7 % 40)::text, 12, '0') AS uuid), 'q' || n % 3, "
        "CASE WHEN n % 10 = 0 THEN 'rare' ELSE 'often' END, '{}', "
        "CASE WHEN n % 4 = 0 THEN 'scheduled' ELSE 'ready' END, n % 3, now() + interval '1 hour' "
        "FROM generate_series(1, 40) AS n"
    ),
    (
        "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, "
        "created_at, died_at) SELECT gen_random_uuid(), 'q' || n % 3, "
        "CASE WHEN n % 10 = 0 THEN 'rare' ELSE 'often' END, '{}', '{}', 0, 1, 0, '[]', "
        "'gone ' || n, now(), now() - (n / 2) * interval '1 minute' "
        "FROM generate_series(1, 40) AS n"
    ),
    (
        "INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, seconds, expires_at) SELECT "
        "gen_random_uuid(), 'q' || n % 3, CASE WHEN n % 10 = 0 THEN 'rare' ELSE 'often' END, 'done', 1, now(), 0.1, "
        "now() + interval '1 day' FROM generate_series(1, 40) AS n"
    ),
    (
        "INSERT INTO outboxq.effect (scope, key, status, provider_key, lock_token, locked_until, expires_at) SELECT "
        "'s' || n % 3, 'k' || n, CASE WHEN n % 5 = 0 THEN 'unknown' WHEN n % 5 = 1 THEN 'retryable' ELSE 'done' END, "
        "gen_random_uuid(), gen_random_uuid(), now() - (n / 2) * interval '1 minute', "
        "CASE WHEN n % 5 > 0 THEN now() + (n / 2) * interval '1 minute' END FROM generate_series(1, 40) AS n"
    ),
    (
        "INSERT INTO outboxq.inbox (consumer, message_id, seen_at, expires_at) SELECT 'c' || n % 3, 'm' || n, "
        "now() - interval '1 day', now() + (n / 2) * interval '1 minute' FROM generate_series(1, 40) AS n"
    ),
    "INSERT INTO outboxq.paused_kind (queue, kind) VALUES ('q0', 'rare'), ('q1', 'often'), ('q2', 'nothing')",
)


def _pages(connection: Connection) -> list[object]:
    found: list[object] = []
    while page := jobs.find_ids(connection, JobFilter(kind="often"), after=found[-1] if found else None, limit=7):
        found += page
    return found


# What may come in any order is sorted.
LOOKS: dict[str, Callable[[Connection], Any]] = {
    "jobs": lambda on: jobs.list_jobs(on, limit=ROWS),
    "first jobs": lambda on: jobs.list_jobs(on, limit=5),
    "jobs that run": lambda on: jobs.list_jobs(on, running=True),
    "rare jobs": lambda on: jobs.list_jobs(on, JobFilter(kind="rare")),
    "jobs by id": lambda on: jobs.list_jobs(on, JobFilter(ids=tuple(each.id for each in jobs.list_jobs(on, limit=9)))),
    "no jobs": lambda on: jobs.list_jobs(on, JobFilter(kind="no")),
    "pages of ids": _pages,
    "counted jobs": lambda on: jobs.count_matching(on, JobFilter()),
    "counted jobs of a state": lambda on: jobs.count_matching(on, JobFilter(state="scheduled", queue="q1")),
    "so many jobs": lambda on: sum(each.count for each in jobs.count_matching(on, JobFilter(), most=25)),
    "dead letters": lambda on: {(each.died_at, each.reason) for each in dead_letters.list_dead(on, limit=ROWS)},
    "times of dead letters": lambda on: [each.died_at for each in dead_letters.list_dead(on, limit=11)],
    "dead letters of a queue": lambda on: [each.died_at for each in dead_letters.list_dead(on, DeadFilter(queue="q1"))],
    "rare dead letters": lambda on: [each.reason for each in dead_letters.list_dead(on, DeadFilter(kind="rare"))],
    "dead letters for a reason": lambda on: dead_letters.list_dead(on, DeadFilter(reason="GONE 33")),
    "ids of dead letters": lambda on: dead_letters.find_ids(on, DeadFilter(kind="often"), limit=30),
    "counted dead letters": lambda on: dead_letters.count_matching(on, DeadFilter(kind="often"), to_retry=True),
    "finished jobs": lambda on: finished.list_finished(on, limit=ROWS),
    "rare finished jobs": lambda on: finished.list_finished(on, DoneFilter(kind="rare")),
    "effects": lambda on: {each.key for each in effects.list_effects(on, limit=ROWS)},
    "effects in order": lambda on: [(each.expires_at, each.status) for each in effects.list_effects(on, limit=15)],
    "effects of a scope": lambda on: {each.key for each in effects.list_effects(on, EffectFilter("s1", "done"))},
    "messages": lambda on: [each.expires_at for each in messages.list_messages(on, limit=25)],
    "messages of a consumer": lambda on: messages.list_messages(on, MessageFilter(consumer="c1")),
    "one message": lambda on: messages.list_messages(on, MessageFilter(message_id="m3")),
    "latest messages": lambda on: messages.list_messages(on, MessageFilter(since=_IN_LONG_GONE_TIMES, consumer="c2")),
    "paused kinds": kinds.list_paused,
    "jobs that were put off": lambda on: kinds.put_off_ids(on, "q1", ["often", "rare"]),
}


# Several blocks of rows in no order, one in fifty of which is rare.
_RARE = "CASE WHEN n % 50 = 0 THEN 'rare' ELSE 'often' END"
_FILL_BLOCKS = (
    (
        "INSERT INTO outboxq.job (id, queue, kind, args, run_at) SELECT gen_random_uuid(), 'q' || n % 3, "
        f"{_RARE}, '{{}}', now() FROM generate_series(1, 1000) AS n"
    ),
    (
        "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, "
        f"created_at, died_at) SELECT gen_random_uuid(), 'q0', {_RARE}, '{{}}', '{{}}', 0, 1, 0, '[]', 'gone', now(), "
        "now() - random() * interval '1 day' FROM generate_series(1, 1000) AS n"
    ),
    (
        "INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, seconds, expires_at) SELECT "
        f"gen_random_uuid(), 'q0', {_RARE}, 'done', 1, now(), 0.1, now() FROM generate_series(1, 1000) AS n"
    ),
    (
        "INSERT INTO outboxq.effect (scope, key, status, provider_key, lock_token, locked_until, expires_at) SELECT "
        f"{_RARE}, 'k' || n, 'done', gen_random_uuid(), gen_random_uuid(), now(), now() + random() * interval '1 day' "
        "FROM generate_series(1, 1000) AS n"
    ),
    (
        f"INSERT INTO outboxq.inbox (consumer, message_id, expires_at) SELECT {_RARE}, 'm' || n, "
        "now() + random() * interval '1 day' FROM generate_series(1, 1000) AS n"
    ),
)
RARE: dict[str, Callable[[Connection], Sequence[object]]] = {
    "jobs": lambda on: jobs.list_jobs(on, JobFilter(kind="rare"), limit=15),
    "jobs of a state": lambda on: jobs.list_jobs(on, JobFilter(kind="rare", state="ready"), limit=15),
    "dead letters": lambda on: dead_letters.list_dead(on, DeadFilter(kind="rare"), limit=15),
    "dead letters of a queue": lambda on: dead_letters.list_dead(on, DeadFilter(queue="q0", kind="rare"), limit=15),
    "finished jobs": lambda on: finished.list_finished(on, DoneFilter(kind="rare"), limit=15),
    "effects": lambda on: effects.list_effects(on, EffectFilter(scope="rare"), limit=15),
    "messages": lambda on: messages.list_messages(on, MessageFilter(consumer="rare"), limit=15),
}


@pytest.fixture
def filled(engine: Engine) -> Engine:
    with engine.begin() as connection:
        for statement in _FILL:
            connection.execute(text(statement))
    return engine


@pytest.mark.wide
def test_short_stretches_find_what_one_long_stretch_finds(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list, count and page of ids, with rows that share their time; and no more statements than it takes."""
    with filled.connect() as connection:
        at_once = {name: look(connection) for name, look in LOOKS.items()}
        for rows in (1, 3, 7, ROWS):
            monkeypatch.setattr(stretches, "STRETCH_ROWS", rows)
            for name, look in LOOKS.items():
                assert look(connection) == at_once[name], (name, rows)
    assert [name for name, found in at_once.items() if not found] == ["jobs that run", "no jobs"]
    assert {len(at_once[name]) for name in ("jobs", "dead letters", "finished jobs", "effects")} == {ROWS}


@pytest.mark.wide
@pytest.mark.parametrize("blocks", [1, 7])
def test_lists_of_rare_rows_are_the_same_by_blocks_and_by_index(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """However many blocks a stretch has, a list has the rows that it would have by an index alone, in order."""
    with engine.begin() as connection:
        for statement in _FILL_BLOCKS:
            connection.execute(text(statement))
    with engine.connect() as connection:
        by_index = {name: look(connection) for name, look in RARE.items()}
        monkeypatch.setattr(stretches, "STRETCH_ROWS", 2)
        monkeypatch.setattr(stretches, "STRETCH_BLOCKS", blocks)
        for name, look in RARE.items():
            assert look(connection) == by_index[name], name
    assert all(len(found) == 15 for found in by_index.values())


def test_a_job_that_moves_while_blocks_are_read_is_listed_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a relay that puts it back: it was read in one block, and is read again in another."""
    monkeypatch.setattr(stretches, "STRETCH_ROWS", 2)
    monkeypatch.setattr(stretches, "STRETCH_BLOCKS", 1)
    with engine.begin() as connection:
        connection.execute(text(_FILL_BLOCKS[0].replace("'rare'", "'often'")))
        place = "SELECT id FROM outboxq.job WHERE ctid < '(1,0)' OR ctid >= '(9,0)' ORDER BY ctid"
        first, *_, last = connection.execute(text(place)).scalars()
        rare = "UPDATE outboxq.job SET kind = 'rare' WHERE id = :id"
        connection.execute(text(rare), [{"id": first}, {"id": last}])
    looks: list[str] = []

    def move(_: object, __: object, statement: str, *___: object) -> None:
        if "ctid" not in statement:
            return
        looks.append(statement)
        if len(looks) == 2:
            with other.begin() as connection:
                connection.execute(text("DELETE FROM outboxq.job WHERE id = :id RETURNING *"), {"id": first})
                moved = "INSERT INTO outboxq.job (id, queue, kind, args) VALUES (:id, 'q0', 'rare', '{}')"
                connection.execute(text(moved), {"id": first})

    other = create_engine(engine.url)
    event.listen(engine, "before_cursor_execute", move)
    with engine.connect() as connection:
        found = [each.id for each in jobs.list_jobs(connection, JobFilter(kind="rare"))]
    other.dispose()
    assert len(looks) > 2
    assert sorted(found) == sorted([first, last])


def test_a_stretch_has_so_many_rows_and_those_of_its_last_value(
    filled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they have each row once."""
    monkeypatch.setattr(stretches, "STRETCH_ROWS", 5)
    found: list[list[object]] = []
    with filled.connect() as connection:
        for stretch in each_stretch(connection, dead_job.c.died_at, dead_job.c.queue != "q0", is_backwards=True):
            rows = connection.execute(dead_job.select().where(*stretch)).all()
            found.append([row.id for row in rows])
    assert all(5 <= len(each) <= 6 for each in found[:-1])
    together = [job_id for each in found for job_id in each]
    assert len(together) == len(set(together)) == sum(n % 3 > 0 for n in range(1, 41))


def test_a_list_stops_at_the_stretch_that_fills_it(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the stretches behind it nothing is asked."""
    monkeypatch.setattr(stretches, "STRETCH_ROWS", 10)
    sent: list[str] = []
    event.listen(filled, "before_cursor_execute", lambda _, __, statement, *___: sent.append(statement))
    with filled.connect() as connection:
        assert len(dead_letters.list_dead(connection, limit=10)) == 10
    assert len(sent) == 2


def test_a_list_of_nothing_is_empty(filled: Engine) -> None:
    """As it was asked for."""
    with filled.connect() as connection:
        assert jobs.list_jobs(connection, limit=0) == []
        assert dead_letters.list_dead(connection, limit=0) == []
        assert finished.list_finished(connection, limit=0) == []
        assert effects.list_effects(connection, limit=0) == []


def test_a_copy_forgets_in_short_stretches_too(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that were not applied are forgotten, wherever they are."""
    monkeypatch.setattr(stretches, "STRETCH_ROWS", 3)
    with filled.begin() as connection:
        connection.execute(text("UPDATE outboxq.effect SET expires_at = NULL WHERE key = 'k1'"))
        renewed = installation.renew_installation(connection)
        left = connection.execute(text("SELECT count(*) FROM outboxq.effect WHERE status = 'retryable'")).scalar_one()
    assert (renewed.forgotten, left) == (8, 0)


def test_the_jobs_of_a_session_are_counted_in_short_stretches_too(
    filled: Engine, outboxq_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many lie between them; but no more than a number of stretches."""
    url = outboxq_database.url
    with open_session(url, "UPDATE outboxq.job SET parked = 1 WHERE kind = 'rare'"):
        assert only(url, "jobs-held-by-session", "--older-than", 0)["detail"]["jobs"] == 4
        monkeypatch.setattr(stretches, "STRETCH_ROWS", 3)
        assert only(url, "jobs-held-by-session", "--older-than", 0)["detail"]["jobs"] == 4
        monkeypatch.setattr("outboxq.doctor.sessions._MOST_STRETCHES", 3)
        assert only(url, "jobs-held-by-session", "--older-than", 0)["detail"]["jobs"] < 4


def test_a_count_ends_at_its_time(filled: Engine) -> None:
    """A walk has many statements, and no time-out of one of them would end it."""
    retry = DiscardDead(DeadFilter(kind="no"))
    with filled.connect() as connection:
        assert preview(connection, retry, seconds=60).count == 0
        with pytest.raises(TimeoutError):
            preview(connection, retry, seconds=-1)
        with pytest.raises(TimeoutError):
            preview(connection, CancelJobs(JobFilter(kind="no")), seconds=-1)
