"""`outboxq effects new-installation`: a copied database gets keys of its own."""

import os
import pty
import subprocess
from uuid import UUID, uuid5

import pytest
from sqlalchemy import Engine, text

from outboxq.errors import EffectUnknown
from outboxq.postgres import Database
from tests.support.cli import Outcome, call, command, environment
from tests.support.effects import SyncOnce, row

ADD = text(
    "INSERT INTO outboxq.effect (scope, key, status, in_doubt, provider_key, lock_token, locked_until, result, "
    "expires_at) SELECT 'charge', :key, :status, :in_doubt, gen_random_uuid(), gen_random_uuid(), "
    "clock_timestamp() - interval '1 second', CASE WHEN :status = 'done' THEN jsonb '\"stored\"' END, "
    "CASE WHEN :status IN ('done', 'failed') THEN clock_timestamp() + interval '1 day' END"
)
EFFECTS = {
    "done": ("done", False),
    "failed": ("failed", False),
    "died": ("started", True),
    "doubtful": ("retryable", True),
    "not applied": ("retryable", False),
    "unknown": ("unknown", False),
}


@pytest.fixture
def copied(engine: Engine) -> UUID:
    """A database with one effect of each sort, as it was copied; its id."""
    with engine.begin() as connection:
        for key, (status, in_doubt) in EFFECTS.items():
            connection.execute(ADD, {"key": key, "status": status, "in_doubt": in_doubt})
    return id_of(engine)


def id_of(engine: Engine) -> UUID:
    with engine.connect() as connection:
        found: UUID = connection.execute(text("SELECT id FROM outboxq.deployment")).scalar_one()
    return found


def renew(database: Database, *options: str) -> Outcome:
    return call("effects", "new-installation", *options, url=database.url)


def statuses(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT key, status FROM outboxq.effect"))
        return {row.key: row.status for row in found}


def test_a_new_id_is_given_and_what_became_of_open_calls_is_said(
    outboxq_database: Database, engine: Engine, copied: UUID
) -> None:
    """As JSON, with keys that stay."""
    said = renew(outboxq_database, "--yes", "--json").ok().json["installation"]
    assert said == {
        "id": str(id_of(engine)), "former_id": str(copied), "doubted": 2, "forgotten": 1, "unknown": 3,
    }  # fmt: skip
    assert id_of(engine) != copied


def test_a_new_id_is_told_in_words(outboxq_database: Database, engine: Engine, copied: UUID) -> None:
    """Both ids, the counts, and where to look on."""
    said = renew(outboxq_database, "--yes").ok()
    assert f"the installation's id is now {id_of(engine)}; it was {copied}" in said.stdout
    assert "3 effects are unknown" in said.stderr


def test_nothing_is_called_with_a_key_of_the_former_id(
    outboxq_database: Database, engine: Engine, copied: UUID
) -> None:
    """What may have been applied waits for an operator; what was not is called with a new key; results are replayed."""
    renew(outboxq_database, "--yes").ok()
    assert statuses(engine) == {
        "done": "done", "failed": "failed", "died": "unknown", "doubtful": "unknown", "unknown": "unknown",
    }  # fmt: skip
    assert "former installation" in row(engine, "died")["error"]
    once, keys = SyncOnce(engine), []
    for key in ("died", "doubtful", "unknown"):
        with pytest.raises(EffectUnknown):
            once("charge", key=key, call=keys.append)
    assert once("charge", key="done", call=keys.append) == "stored"
    once("charge", key="not applied", call=keys.append)
    once("charge", key="new", call=keys.append)
    once.dispose()
    assert keys == [str(uuid5(id_of(engine), f"charge\n{key}")) for key in ("not applied", "new")]


def test_a_caller_that_stood_still_cannot_record_over_it(
    outboxq_database: Database, engine: Engine, copied: UUID
) -> None:
    """Its token is worth nothing any more."""
    token = row(engine, "died")["lock_token"]
    renew(outboxq_database, "--yes").ok()
    assert row(engine, "died")["lock_token"] != token


@pytest.mark.parametrize("used", ["relay", "call"])
def test_an_installation_in_use_keeps_its_id(
    outboxq_database: Database, engine: Engine, copied: UUID, used: str
) -> None:
    """A relay that is alive, or a call under way, derived its keys from the id."""
    use = {
        "relay": "INSERT INTO outboxq.relay (id, alive_until) "
        "VALUES (gen_random_uuid(), clock_timestamp() + interval '1 minute')",
        "call": "UPDATE outboxq.effect SET locked_until = clock_timestamp() + interval '1 minute' WHERE key = 'died'",
    }
    with engine.begin() as connection:
        connection.execute(text(use[used]))
    before = statuses(engine)
    refused = renew(outboxq_database, "--yes")
    assert refused.exit_code == 1
    assert "is in use" in refused.stderr
    assert (id_of(engine), statuses(engine)) == (copied, before)


def test_it_asks_first_and_says_what_to_do_where_nobody_can_answer(
    outboxq_database: Database, engine: Engine, copied: UUID
) -> None:
    """In a script it takes --yes."""
    refused = renew(outboxq_database)
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert id_of(engine) == copied


def test_its_help_says_which_processes_it_does_not_see() -> None:
    """They would go on with keys of the former id: stopping them is left to the operator."""
    words = " ".join(call("effects", "new-installation", "--help").ok().stdout.split())
    assert "Relays in transaction mode, and other processes between two calls, are not seen." in words
    assert "stop all of them before, and start them again after the command" in words


def answered(database: Database, answer: str) -> int:
    """The exit code after this answer at a terminal."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            command("effects", "new-installation"),
            stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(database.url),
        )  # fmt: skip
        os.write(ours, f"{answer}\n".encode())
        return process.wait(60)
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_answer_at_a_terminal_decides(outboxq_database: Database, engine: Engine, copied: UUID) -> None:
    """No leaves the id as it is, yes does not."""
    assert answered(outboxq_database, "n") == 1
    assert id_of(engine) == copied
    assert answered(outboxq_database, "y") == 0
    assert id_of(engine) != copied
