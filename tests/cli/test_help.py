"""What the command line says of itself, and how little it needs for that."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from outboxq import RelayConfig, __version__
from tests.support.cli import call, environment, run

COMMANDS = [
    ("demo",),
    ("migrate",),
    ("relay",),
    ("dashboard",),
    ("top",),
    ("stats",),
    ("history",),
    ("relays", "list"),
    ("doctor",),
    ("explain",),
    ("health",),
    ("metrics",),
    ("roles",),
    ("torture",),
    ("queues", "list"),
    ("queues", "pause"),
    ("queues", "resume"),
    ("queues", "set"),
    ("schedules", "list"),
    ("schedules", "show"),
    ("schedules", "put"),
    ("schedules", "pause"),
    ("schedules", "resume"),
    ("schedules", "run-now"),
    ("schedules", "adopt"),
    ("schedules", "remove"),
    ("batches", "list"),
    ("batches", "show"),
    ("jobs", "list"),
    ("jobs", "show"),
    ("jobs", "watch"),
    ("jobs", "cancel"),
    ("jobs", "change"),
    ("kinds", "list"),
    ("kinds", "pause"),
    ("kinds", "resume"),
    ("dead", "list"),
    ("dead", "show"),
    ("dead", "retry"),
    ("dead", "discard"),
    ("audit", "list"),
    ("audit", "show"),
    ("audit", "prune"),
    ("bulk", "resume"),
    ("bulk", "stop"),
    ("done", "list"),
    ("done", "show"),
    ("done", "run-again"),
    ("inbox", "list"),
    ("inbox", "show"),
    ("inbox", "forget"),
    ("effects", "list"),
    ("effects", "show"),
    ("effects", "resolve"),
    ("effects", "new-installation"),
]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.first_and_last
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_teaches_with_an_example_of_itself(words: tuple[str, ...]) -> None:
    """`--help` of each command shows at least one complete command line."""
    said = call(*words, "--help").ok().stdout
    examples = said.partition("Example")[2]
    assert f"  outboxq {' '.join(words)}" in examples


def test_the_help_names_every_command() -> None:
    """`outboxq --help` lists what there is."""
    said = run("--help").ok().stdout
    for word in {words[0] for words in COMMANDS}:
        assert f"\n  {word} " in said


def test_the_help_lists_every_command_under_a_heading() -> None:
    """What to start with, what to run, what to look at and what to mend, each with a whole sentence."""
    said = run("--help").ok().stdout
    assert re.findall(r"^([A-Z]\w+):$", said, re.MULTILINE) == ["Options", "Start", "Run", "Look", "Mend"]
    listed = re.findall(r"^  ([a-z-]+(?: [a-z-]+)?)  ", said.partition("Start:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(" ".join(words) for words in COMMANDS)
    assert "..." not in said.partition("Start:")[2]


@pytest.mark.first_and_last
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_plain_and_fits(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """No brackets within brackets or types of Python, each argument and option described, 80 columns at most."""
    monkeypatch.setenv("COLUMNS", "80")
    said = call(*words, "--help").ok().stdout
    assert max(map(len, said.splitlines())) <= 80
    assert not re.search(r"[{}<>]|\[\[|<=x|default: \(", re.sub(r"'\{.*\}'|\.dead > 0|\| psql", "", said))
    options = said.partition("Options:")[2]
    for name in re.findall(r"^  (-[^\s,]+(?:, \S+)?(?: [A-Z=_]+)?)", options, re.MULTILINE):
        assert re.search(rf"^  {re.escape(name)}(  +|\n {{10,}})\S", options, re.MULTILINE), name
    for name in re.findall(r"[A-Z_]+(?::[A-Z]+)?", said.splitlines()[0].partition("[OPTIONS]")[2]):
        assert re.search(rf"^  {name}  +\S", said.partition("Arguments:")[2], re.MULTILINE), name


def test_no_command_at_all_shows_the_help() -> None:
    """`outboxq` alone is a question, not a mistake that needs explaining."""
    said = run()
    assert "Start:" in said.stdout + said.stderr
    assert "Traceback" not in said.stderr


def test_the_version_is_printed() -> None:
    """`--version` prints one line that names the installed version."""
    assert run("--version").ok().stdout == f"outboxq {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    """`--help` is quick because neither SQLAlchemy, the driver, Alembic nor rich is imported for it."""
    done = python(
        "import sys\n"
        "from outboxq.__main__ import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'sqlalchemy', 'psycopg', 'alembic', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_console_script_is_this_command_line() -> None:
    """The installed `outboxq` and `python -m outboxq` are the same."""
    script = Path(sys.executable).with_name("outboxq")
    done = subprocess.run([script, "--version"], env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout == f"outboxq {__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing: str) -> None:
    """A plain `pip install outboxq` has the script, but not what it needs: no traceback, but the extra's name."""
    done = python(f"import sys\nsys.modules[{missing!r}] = None\nfrom outboxq.__main__ import main\nmain(['--help'])\n")
    assert done.returncode == 2
    assert done.stderr == f"Error: the command line needs {missing}: pip install 'outboxq[cli]'\n"


def test_the_relays_defaults_are_those_of_its_configuration() -> None:
    """`outboxq relay` without options is `Relay` with a plain `RelayConfig`."""
    said = " ".join(call("relay", "--help").ok().stdout.split())
    defaults = RelayConfig()
    for option, value in [
        ("--batch-size", defaults.batch_size),
        ("--poll-seconds", defaults.poll_seconds),
        ("--drain-seconds", defaults.drain_seconds),
        ("--schema", defaults.schema),
    ]:
        assert f"default: {value}" in said.partition(f"{option} ")[2].partition(" --")[0]
