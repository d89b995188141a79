"""`outboxq dead`: looking at dead letters, putting them back to work, dropping them."""

import json
from collections.abc import Callable
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.events import Event
from outboxq.outbox.handle import JobHandle
from outboxq.postgres import Database
from outboxq.tables import dead_job, job
from tests.support import app
from tests.support.cli import call, run
from tests.support.plain_rows import insert_row


@pytest.fixture
def dead(sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]) -> dict[str, JobHandle]:
    """Three dead letters, made by a relay: two that failed too often, one that its handler gave up."""
    with sessions.begin() as session:
        handles = {
            "one": session.add_job(app.fail, name="one"),
            "two": session.add_job(app.fail, name="two"),
            "given up": session.add_job(app.end, how="dead"),
        }
    drain()
    return handles


def ids(engine: Engine, table: object) -> set[UUID]:
    with engine.connect() as connection:
        return set(connection.execute(select(table.c.id)).scalars())


def listed(*options: object, url: str) -> set[str]:
    return {row["id"] for row in call("dead", "list", "--json", *options, url=url).ok().json["dead"]}


def test_the_list_tells_why(outboxq_database: Database, dead: dict[str, JobHandle]) -> None:
    """Each dead letter stands there with its reason."""
    said = run("dead", "list", url=outboxq_database.url).ok().stdout
    (line,) = [line for line in said.splitlines() if str(dead["one"].id) in line]
    assert "gave up after 3 of 3 attempts: ValueError" in line


def test_the_reason_has_the_message_of_the_last_error(
    outboxq_database: Database, dead: dict[str, JobHandle], engine: Engine
) -> None:
    """In the list, in full and for `--reason`; a reason of its own has no other message behind it."""
    url = outboxq_database.url
    with engine.connect() as connection:
        errors = connection.execute(select(dead_job.c.errors).where(dead_job.c.id == dead["one"].id)).scalar_one()
    message = json.loads(errors)[-1]["message"]
    assert message
    told = f"gave up after 3 of 3 attempts: ValueError: {message}"
    reasons = {row["id"]: row["reason"] for row in call("dead", "list", "--json", url=url).ok().json["dead"]}
    assert reasons[str(dead["one"].id)] == told
    assert reasons[str(dead["given up"].id)].count(":") == 0
    assert call("dead", "show", dead["one"].id, "--json", url=url).ok().json["reason"] == told
    assert str(dead["one"].id) in listed("--reason", told, url=url)


def test_filters_narrow_the_list(outboxq_database: Database, dead: dict[str, JobHandle]) -> None:
    """Queue and kind match exactly, a reason by any part of it in any case, without wildcards."""
    url = outboxq_database.url
    failed = {str(dead[name].id) for name in ("one", "two")}
    assert listed("--queue", "ledger", url=url) == {str(handle.id) for handle in dead.values()}
    assert listed("--kind", "end", url=url) == {str(dead["given up"].id)}
    assert listed("--reason", "valueERROR", url=url) == failed
    assert listed("--reason", "cannot be done", url=url) == {str(dead["given up"].id)}
    assert listed("--reason", "%", url=url) == set()
    assert listed("--queue", "nosuch", url=url) == set()


def test_the_keys_of_the_list_stay(outboxq_database: Database, dead: dict[str, JobHandle]) -> None:
    """Programs rely on these keys; the payload is not among them."""
    said = call("dead", "list", "--limit", 1, "--json", url=outboxq_database.url).ok().json
    assert said["more"] is True
    assert list(said["dead"][0]) == [
        "id", "queue", "kind", "reason", "attempt", "max_attempts", "crashes", "created_at", "died_at",
    ]  # fmt: skip


def test_show_has_every_error(outboxq_database: Database, dead: dict[str, JobHandle]) -> None:
    """One dead letter in full: arguments, and each attempt's error with its place."""
    said = call("dead", "show", dead["one"].id, "--json", url=outboxq_database.url).ok().json
    assert said["args"] == {"name": "one"}
    assert [error["attempt"] for error in said["errors"]] == [1, 2, 3]
    assert "ValueError" in run("dead", "show", dead["one"].id, url=outboxq_database.url).ok().stdout


def test_show_of_an_unknown_id_ends_with_1(outboxq_database: Database, dead: dict[str, JobHandle]) -> None:
    """An id that is not there is said to be so; a dead letter asked for as a job is told where it is."""
    missing = call("dead", "show", uuid4(), url=outboxq_database.url)
    assert missing.exit_code == 1
    assert "no dead letter with id" in missing.stderr
    moved = call("jobs", "show", dead["one"].id, url=outboxq_database.url)
    assert moved.exit_code == 1
    assert f"outboxq dead show {dead['one'].id}" in moved.stderr


@pytest.mark.wide
def test_retry_by_id_starts_over_and_keeps_the_errors(
    outboxq_database: Database, engine: Engine, dead: dict[str, JobHandle], drain: Callable[..., list[Event]]
) -> None:
    """The job is ready with all attempts before it, has its id, arguments and history, and a relay runs it."""
    one, missing = dead["one"].id, uuid4()
    said = run("dead", "retry", one, missing, "--json", url=outboxq_database.url)
    assert said.exit_code == 1
    assert said.json == {"retried": 1, "held": [], "not_found": [str(missing)], "refused": [], "key_taken": []}
    assert one not in ids(engine, dead_job)
    again = call("jobs", "show", one, "--json", url=outboxq_database.url).ok().json
    assert (again["state"], again["attempt"], again["crashes"]) == ("ready", 0, 0)
    assert again["args"] == {"name": "one"}
    assert len(again["errors"]) == 3
    drain()
    died_again = call("dead", "show", one, "--json", url=outboxq_database.url).ok().json
    assert [error["attempt"] for error in died_again["errors"]] == [1, 2, 3, 1, 2, 3]


def test_retry_by_filter_takes_what_matches(
    outboxq_database: Database, engine: Engine, dead: dict[str, JobHandle]
) -> None:
    """Only the dead letters with this reason are back, and none is in both tables."""
    said = call("dead", "retry", "--reason", "ValueError", url=outboxq_database.url).ok()
    assert said.stdout == "retried 2 dead letters\n"
    assert ids(engine, dead_job) == {dead["given up"].id}
    assert ids(engine, job) == {dead["one"].id, dead["two"].id}


def test_discard_by_id_and_by_filter(outboxq_database: Database, engine: Engine, dead: dict[str, JobHandle]) -> None:
    """What is discarded is in no table any more."""
    url = outboxq_database.url
    assert run("dead", "discard", dead["one"].id, url=url).ok().stdout == "discarded 1 dead letter\n"
    assert call("dead", "discard", "--kind", "end", "--json", url=url).ok().json == {
        "discarded": 1, "held": [], "not_found": [],
    }  # fmt: skip
    assert ids(engine, dead_job) == {dead["two"].id}
    assert ids(engine, job) == set()


@pytest.mark.parametrize("verb", ["retry", "discard"])
def test_what_another_operator_holds_is_reported_and_not_waited_for(
    outboxq_database: Database, engine: Engine, dead: dict[str, JobHandle], verb: str
) -> None:
    """Two operators who retry and discard the same dead letters do not block each other, and no job runs twice."""
    with engine.connect() as other:
        other.execute(text("DELETE FROM outboxq.dead_job WHERE id = :id"), {"id": dead["one"].id})
        said = call("dead", verb, "--kind", "fail", "--json", url=outboxq_database.url)
        assert said.exit_code == 1
        assert list(said.json.values())[:3] == [1, [str(dead["one"].id)], []]
        other.commit()
    assert dead["one"].id not in ids(engine, job)


def test_a_dead_letter_whose_job_waits_again_is_named_and_the_others_are_retried(
    outboxq_database: Database, engine: Engine, dead: dict[str, JobHandle]
) -> None:
    """One id that a job has already costs the others of its page nothing."""
    waits = dead["two"].id
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO outboxq.job (id, queue, kind, args) VALUES (:id, 'q', 'k', '{}')"), {"id": waits}
        )
    for selection in ((waits, dead["one"].id), ("--kind", "fail")):
        said = call("dead", "retry", *selection, "--json", url=outboxq_database.url)
        assert said.exit_code == 1
        assert said.json["refused"] == [str(waits)]
        assert f"a job with its id waits or runs already, or no job may be as it is (too long, perhaps): {waits}" in (
            said.stderr
        )
    assert ids(engine, dead_job) == {waits, dead["given up"].id}
    assert ids(engine, job) == {waits, dead["one"].id}


def test_what_no_job_may_be_is_named_and_the_others_are_retried(
    outboxq_database: Database, engine: Engine, dead: dict[str, JobHandle]
) -> None:
    """A row of SQL's that the checks of `job` refuse costs the others nothing, and a preview does not count it."""
    url, odd = outboxq_database.url, set[UUID]()
    values = ({"kind": "''"}, {"kind": "repeat('k', 64)"}, {"queue": "''"}, {"args": "'[]'"}, {"priority": "-32768"})
    with engine.begin() as connection:
        for value in values:
            odd.add(connection.exec_driver_sql(f"{insert_row('dead_job', value)} RETURNING id").scalar_one())
    assert call("dead", "retry", "--all", "--dry-run", "--json", url=url).ok().json["would_be_retried"] == 3
    said = call("dead", "retry", "--all", "--yes", "--json", url=url)
    assert said.exit_code == 1
    assert said.json["retried"] == 3
    assert set(map(UUID, said.json["refused"])) == odd == ids(engine, dead_job)
    assert ids(engine, job) == {handle.id for handle in dead.values()}


@pytest.mark.parametrize("verb", ["retry", "discard"])
def test_all_takes_every_page(outboxq_database: Database, engine: Engine, verb: str) -> None:
    """`--all --yes` works through more rows than one transaction takes."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, "
                "reason, created_at) SELECT gen_random_uuid(), 'q', 'k', '{}', '{}', 0, 1, 0, '[]', 'no', now() "
                "FROM generate_series(1, 2300)"
            )
        )
    said = call("dead", verb, "--all", "--yes", url=outboxq_database.url).ok()
    assert " 2,300 dead letters" in said.stdout
    assert ids(engine, dead_job) == set()
    assert len(ids(engine, job)) == (2300 if verb == "retry" else 0)
