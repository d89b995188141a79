"""`outboxq explain`: what it prints, its JSON, and how it ends."""

import re
from uuid import uuid4

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.admin import queues
from outboxq.admin.explain import CODES
from outboxq.postgres import Database
from tests.support import app
from tests.support.cli import REPOSITORY, call
from tests.support.doctor import execute, open_session
from tests.support.terminal import run_at_terminal

PAGE = (REPOSITORY / "docs/explain.md").read_text()


def test_the_verdict_comes_first_with_what_to_do(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Then what holds besides; a queue is told with its next job."""
    with sessions.begin() as session:
        job_id = session.add_job(app.record, name="one").id
    with engine.begin() as connection:
        queues.pause(connection, ["ledger"])
    said = call("explain", job_id, url=outboxq_database.url).ok().stdout.splitlines()
    assert said[0] == f"job {job_id} of kind 'record' in queue 'ledger':"
    assert said[1].startswith("  queue-paused: queue 'ledger' has been paused for ")
    assert said[2] == "      When the reason is gone: outboxq queues resume ledger"
    assert said[3] == "Also:"
    assert said[4].startswith("  no-relay: ")
    whole = call("explain", "--queue", "ledger", url=outboxq_database.url).ok().stdout.splitlines()
    assert whole[0] == f"queue 'ledger', where the next one is job {job_id} of kind 'record':"
    assert [line for line in whole[1:] if "queue-paused" not in line] == [*said[2:]]


def test_the_keys_of_the_json_stay(outboxq_database: Database, sessions: sessionmaker[OutboxSession]) -> None:
    """Programs rely on them."""
    with sessions.begin() as session:
        job_id = session.add_job(app.record, name="one").id
    found = call("explain", job_id, "--json", url=outboxq_database.url).ok().json
    assert list(found) == ["job_id", "queue", "kind", "reasons"]
    assert (found["job_id"], found["queue"], found["kind"]) == (str(job_id), "ledger", "record")
    (reason,) = found["reasons"]
    assert list(reason) == ["code", "text", "details", "advice"]
    assert (reason["code"], reason["details"]) == ("no-relay", {"queue": "ledger"})
    empty = call("explain", "--queue", "nothing", "--json", url=outboxq_database.url).ok().json
    assert (empty["job_id"], empty["kind"], empty["reasons"][0]["code"]) == (None, None, "queue-empty")


def test_no_such_job_is_exit_code_1(outboxq_database: Database) -> None:
    """The answer is printed all the same; a reason why nothing can be seen is an answer."""
    url = outboxq_database.url
    unknown = call("explain", uuid4(), url=url)
    assert (unknown.exit_code, "not-found" in unknown.stdout, unknown.stderr) == (1, True, "")
    with open_session(url, "LOCK TABLE outboxq.job IN ACCESS EXCLUSIVE MODE"):
        locked = call("explain", uuid4(), "--json", url=url)
    assert (locked.exit_code, [reason["code"] for reason in locked.json["reasons"]]) == (
        0, ["table-locked", "not-known"],
    )  # fmt: skip


@pytest.mark.parametrize("words", [(), (uuid4(), "--queue", "mail"), ("--queue", ""), ("no-id",)])
def test_a_wrong_call_is_exit_code_2(outboxq_database: Database, words: tuple[object, ...]) -> None:
    """Neither a job nor a queue, both, or something that is none."""
    assert call("explain", *words, url=outboxq_database.url).exit_code == 2


def test_it_fits_a_terminal_of_80_columns(outboxq_database: Database) -> None:
    """Lines are broken between words, and ids stay whole."""
    job_id = uuid4()
    said = run_at_terminal("explain", job_id, columns=80, url=outboxq_database.url).stdout.splitlines()
    assert said[0] == f"job {job_id}:"
    assert said[1].startswith("  not-found: there is no such job")
    assert 60 < max(map(len, said)) <= 80


def test_texts_of_strangers_are_printed_without_control_sequences(outboxq_database: Database) -> None:
    """The reason of a dead letter may be made to deceive."""
    job_id = uuid4()
    execute(
        outboxq_database.url,
        "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, "
        f"created_at) VALUES ('{job_id}', 'mail', 'send', '{{}}', '{{}}', 0, 1, 0, '[]', E'a\\x1b[2Jb', now())",
    )
    said = run_at_terminal("explain", job_id, columns=80, url=outboxq_database.url).ok().stdout
    assert "dead: it became a dead letter" in said
    assert "\x1b[2J" not in said


def test_the_page_lists_every_code_in_its_order() -> None:
    """One row for each, what it means, and what to do."""
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(CODES)
    assert all(meaning and advice for _, meaning, advice in rows)
