"""Changes of many rows: asked about before, and counted without being made."""

import pytest
from sqlalchemy import Engine, text

from outboxq.postgres import Database
from tests.support.cli import call
from tests.support.terminal import run_answered

COMMANDS = {"dead retry": "retried", "dead discard": "discarded", "jobs cancel": "cancelled"}
EVERY_COMMAND = pytest.mark.parametrize("noun", list(COMMANDS))


def fill(engine: Engine, noun: str, number: int, kind: str = "k") -> None:
    """So many dead letters, or jobs, in queue `many`."""
    columns, values = "id, queue, kind, args", "gen_random_uuid(), 'many', :kind, '{}'"
    if noun.startswith("dead"):
        columns += ", headers, priority, attempt, crashes, errors, reason, created_at"
        values += ", '{}', 0, 1, 0, '[]', 'no', now()"
    with engine.begin() as connection:
        connection.execute(
            text(f"INSERT INTO {table(noun)} ({columns}) SELECT {values} FROM generate_series(1, :number)"),
            {"number": number, "kind": kind},
        )


def table(noun: str) -> str:
    return "outboxq.dead_job" if noun.startswith("dead") else "outboxq.job"


def left(engine: Engine, noun: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table(noun)}")).scalar_one())


@pytest.mark.first_and_last
@EVERY_COMMAND
def test_more_than_a_hundred_are_asked_about(noun: str, outboxq_database: Database, engine: Engine) -> None:
    """A filter that finds more changes nothing if the input is no terminal, and says with which words it would."""
    fill(engine, noun, 101)
    refused = call(*noun.split(), "--queue", "many", url=outboxq_database.url)
    assert refused.exit_code == 2
    assert "101" in refused.stderr
    assert "--yes" in refused.stderr
    assert "--dry-run" in refused.stderr
    assert left(engine, noun) == 101
    assert "101" in call(*noun.split(), "--queue", "many", "--yes", url=outboxq_database.url).ok().stdout
    assert left(engine, noun) == 0


@pytest.mark.first_and_last
@EVERY_COMMAND
def test_a_hundred_are_not_asked_about(noun: str, outboxq_database: Database, engine: Engine) -> None:
    """A filter that finds few is the operator's word."""
    fill(engine, noun, 100)
    call(*noun.split(), "--queue", "many", url=outboxq_database.url).ok()
    assert left(engine, noun) == 0


@pytest.mark.parametrize(("answer", "stay"), [("n", 101), ("y", 0)])
def test_the_answer_counts(answer: str, stay: int, outboxq_database: Database, engine: Engine) -> None:
    """At a terminal the question says how many; no changes nothing."""
    fill(engine, "dead discard", 101)
    said = run_answered("dead", "discard", "--queue", "many", answer=answer, url=outboxq_database.url)
    assert "Discard 101 dead letters?" in said.stderr
    assert said.exit_code == (1 if stay else 0)
    assert left(engine, "dead discard") == stay


@pytest.mark.first_and_last
@EVERY_COMMAND
@pytest.mark.parametrize("chosen", [("--queue", "many"), ("--all",)])
def test_a_dry_run_counts_and_changes_nothing(
    noun: str, chosen: tuple[str, ...], outboxq_database: Database, engine: Engine
) -> None:
    """By queue and kind, for people and as JSON; it asks nothing, however many there are."""
    fill(engine, noun, 150, "a")
    fill(engine, noun, 2, "b")
    said = call(*noun.split(), *chosen, "--dry-run", "--json", url=outboxq_database.url).ok().json
    assert said == {
        "dry_run": True,
        f"would_be_{COMMANDS[noun]}": 152,
        "kinds": [{"queue": "many", "kind": "a", "count": 150}, {"queue": "many", "kind": "b", "count": 2}],
        "not_found": 0,
    }
    shown = call(*noun.split(), *chosen, "--dry-run", url=outboxq_database.url).ok().stdout
    assert [line.split() for line in shown.splitlines() if line.split()[:1] == ["many"]] == [
        ["many", "a", "150"],
        ["many", "b", "2"],
    ]
    assert f"152 {'jobs' if noun == 'jobs cancel' else 'dead letters'} would be {COMMANDS[noun]}" in shown
    assert left(engine, noun) == 152


@EVERY_COMMAND
def test_a_dry_run_of_ids_says_which_number_is_not_there(noun: str, outboxq_database: Database, engine: Engine) -> None:
    """Ids are counted too; one that is not there makes the exit code 1, as it would."""
    fill(engine, noun, 1)
    with engine.connect() as connection:
        here = str(connection.execute(text(f"SELECT id FROM {table(noun)}")).scalar_one())
    gone = "01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10"
    said = call(*noun.split(), here, here, gone, "--dry-run", "--json", url=outboxq_database.url)
    assert (said.exit_code, said.json["not_found"]) == (1, 1)
    assert said.json[f"would_be_{COMMANDS[noun]}"] == 1
    assert left(engine, noun) == 1


def test_a_dry_run_of_a_retry_leaves_out_what_would_be_refused(outboxq_database: Database, engine: Engine) -> None:
    """A dead letter whose id a job has would stay."""
    fill(engine, "dead retry", 2)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.job (id, queue, kind, args) "
                "SELECT id, 'many', 'k', '{}' FROM outboxq.dead_job LIMIT 1"
            )
        )
    said = call("dead", "retry", "--queue", "many", "--dry-run", "--json", url=outboxq_database.url).ok().json
    assert said["would_be_retried"] == 1
