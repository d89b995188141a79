"""psycopg without libpq: what to install is said, by the commands and by `import`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import environment
from tests.support.matrices import sampled

# A machine without libpq: neither wheel of psycopg's, and no library of the system's.
WITHOUT_LIBPQ = """
import ctypes.util
import sys
from importlib.abc import MetaPathFinder


class Nowhere(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("psycopg_binary", "psycopg_c"):
            raise ModuleNotFoundError(f"No module named {name!r}")


sys.meta_path.insert(0, Nowhere())
ctypes.util.find_library = lambda name: None
"""
WHAT_TO_DO = "pip install 'outboxq[binary]'"
DOCUMENTED = ["outboxq.http", "outboxq.inbox", "outboxq.migrations", "outboxq.testing", "outboxq.relay.relay"]


@pytest.fixture
def without_libpq(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LIBPQ)
    return {**environment(None), "PYTHONPATH": str(tmp_path)}


def python(arguments: list[str], variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.wide
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize(
    "command",
    sampled([["migrate"], ["relay", "tests.support.app:jobs"], ["stats"], ["migrate", "--sql"]], 2),
    ids=" ".join,
)
def test_a_command_without_libpq_says_what_to_install(command: list[str], without_libpq: dict[str, str]) -> None:
    """One line, no traceback, and the exit code of what no second try mends."""
    url = "postgresql://me@localhost/x"
    done = python(["-m", "outboxq", *command], {**without_libpq, "OUTBOXQ_DATABASE_URL": url})
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: psycopg finds no libpq")
    assert WHAT_TO_DO in line


@pytest.mark.wide
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("command", [["--help"], ["relay", "--help"], ["--version"]], ids=" ".join)
def test_help_needs_no_libpq(command: list[str], without_libpq: dict[str, str]) -> None:
    """It is what a user reads first."""
    assert python(["-m", "outboxq", *command], without_libpq).returncode == 0


@pytest.mark.wide
@pytest.mark.usefixtures("fresh_processes")
def test_what_is_imported_without_libpq_says_what_to_install(without_libpq: dict[str, str]) -> None:
    """Every public name, and every documented module, needs none or raises this one error."""
    program = f"""
import importlib, outboxq
for name in {DOCUMENTED} + outboxq.__all__:
    try:
        importlib.import_module(name) if "." in name else getattr(outboxq, name)
        print(name, "imported")
    except ImportError as error:
        print(name, type(error).__name__, {WHAT_TO_DO!r} in str(error))
"""
    done = python(["-c", program], without_libpq)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert set(said.values()) == {"imported", "LibpqMissing True"}
    assert {said[name] for name in (*DOCUMENTED, "Jobs", "OutboxSession", "Relay")} == {"LibpqMissing True"}
