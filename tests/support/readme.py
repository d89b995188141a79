"""Run the shell sessions of a README, and compare what they print with what it says.

A block marked `console` is run: each line behind `$ ` is a command, and what stands beneath it must be what it prints,
where `...` stands for anything. A command with nothing beneath it may print what it likes. Each must end with 0. Blocks
with any other mark are not run.
"""

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARKER = "\x1e"
# The shell leads a process group of its own: with it ends what the session has left running.
_END_WITH_ALL = "trap 'kill -KILL 0' EXIT\n"


@dataclass(frozen=True)
class Step:
    """A command, and what is said to come of it."""

    command: str
    expected: str


def read_steps(readme: str) -> list[Step]:
    """The commands of all `console` blocks, in their order."""
    return [step for mark, block in _BLOCK.findall(readme) if mark == "console" for step in _steps(block)]


def _steps(block: str) -> list[Step]:
    steps = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, expected = re.sub(r"\\\n", "\\\\\0", part).partition("\n")
        steps.append(Step(command.replace("\0", "\n"), expected.strip()))
    return steps


def blocks(readme: str, mark: str) -> str:
    """All blocks with a mark, one behind the other."""
    return "".join(block for found, block in _BLOCK.findall(readme) if found == mark)


def run_steps(steps: list[Step], *, directory: Path, environment: Mapping[str, str], limit_seconds: float) -> None:
    """Run the steps in one shell, and fail at the first that prints or ends otherwise than it should."""
    said_of_each = [f"{step.command}\nprintf '{_MARKER}%s{_MARKER}' $?\n" for step in steps]
    script = "".join([_END_WITH_ALL, *said_of_each])
    # Not a pipe: what a session leaves running would keep it open.
    with tempfile.TemporaryFile("w+") as output:
        shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-c", script],
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(limit_seconds)
            is_late = False
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            if shell.returncode is None:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
        output.seek(0)
        said = output.read()
    assert not is_late, f"not at its end after {limit_seconds} s, but here:\n{said}"
    _compare(steps, said)


def _compare(steps: list[Step], said: str) -> None:
    results = said.split(_MARKER)
    for position, step in enumerate(steps):
        printed, status, *_ = [*results[2 * position : 2 * position + 2], "no status"]
        shown = f"$ {step.command}\n{printed}"
        assert status == "0", f"it ended with {status}:\n{shown}"
        assert not step.expected or matches(step.expected, printed), f"expected:\n{step.expected}\nbut:\n{shown}"


def matches(expected: str, printed: str) -> bool:
    """Whether the lines are those that were expected, where `...` stands for anything."""
    pattern = ".*?".join(re.escape(part) for part in _without_ends(expected).split("..."))
    return re.fullmatch(pattern, _without_ends(printed), re.DOTALL) is not None


def _without_ends(lines: str) -> str:
    return "\n".join(line.rstrip() for line in lines.strip().splitlines())
