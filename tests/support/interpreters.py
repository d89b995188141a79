"""Interpreters of this machine: on the PATH, and those that pyenv keeps beside it.

`python -m tests.support.interpreters` prints the newest one, if it is newer than the one that runs it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# The oldest version that the package takes: `requires-python`.
OLDEST = (3, 11)
# The newest one that its classifiers claim.
NEWEST = (3, 13)

_NAME = re.compile(r"python3\.\d+")
_PROBE = "import ensurepip, sys, venv; print(*sys.version_info[:2], sys.executable)"


def interpreters() -> dict[tuple[int, int], Path]:
    """A working interpreter of each version from 3.11 on that can make a venv, the oldest first."""
    found = {sys.version_info[:2]: Path(sys.executable)}
    for candidate in _candidates():
        try:
            done = subprocess.run([candidate, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            # A link that leads nowhere, or a file of another system.
            continue
        if done.returncode == 0:
            major, minor, executable = done.stdout.split(maxsplit=2)
            found.setdefault((int(major), int(minor)), Path(executable.strip()))
    return {version: found[version] for version in sorted(found) if OLDEST <= version <= NEWEST}


def _candidates() -> Iterator[Path]:
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [*map(Path, os.environ["PATH"].split(os.pathsep)), *sorted(pyenv.glob("versions/*/bin"))]
    for folder in folders:
        if folder.is_dir():
            yield from (each for each in sorted(folder.iterdir()) if _NAME.fullmatch(each.name))


if __name__ == "__main__":
    version, newest = list(interpreters().items())[-1]
    if version > sys.version_info[:2]:
        print(newest)  # noqa: T201  # for `.ci/run`
