"""The command line as tests use it: in a process of its own, or in this one where speed matters."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outboxq.__main__ import main
from tests.support.waiting import PATIENCE

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    def ok(self) -> "Outcome":
        """Itself, after a look at the exit code."""
        assert self.exit_code == 0, self
        return self


def environment(url: str | None = None, **more: str) -> dict[str, str]:
    """This process's environment, with `url` as the only database that outboxq knows."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOXQ_") and name != "COLUMNS"}
    return {**kept, **({"OUTBOXQ_DATABASE_URL": url} if url else {}), "PYTHONPATH": str(REPOSITORY), **more}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "outboxq", *map(str, arguments)]


def run(
    *arguments: object,
    url: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = 2 * PATIENCE,
) -> Outcome:
    """Run the command in a process of its own, with nothing on its standard input."""
    done = subprocess.run(
        command(*arguments),
        env={**environment(url), **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def call(*arguments: object, url: str | None = None) -> Outcome:
    """Run the command in this process."""
    given = [*map(str, arguments), *(("--database-url", url) if url else ())]
    stdin, hook = sys.stdin, sys.excepthook
    sys.stdin = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
            try:
                main(given)
                code: object = 0
            except SystemExit as end:
                code = end.code
    finally:
        sys.stdin, sys.excepthook = stdin, hook
    assert isinstance(code, int | None), code
    return Outcome(code or 0, stdout.getvalue(), stderr.getvalue())
