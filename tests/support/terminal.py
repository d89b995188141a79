"""The command line at a terminal, with one answer typed into it."""

import os
import pty
import subprocess

from tests.support.cli import Outcome, command, environment
from tests.support.waiting import PATIENCE


def run_answered(*arguments: object, answer: str, url: str) -> Outcome:
    """Run the command in a process of its own, whose standard input is a terminal with this answer typed."""
    keyboard, terminal = pty.openpty()
    try:
        os.write(keyboard, f"{answer}\n".encode())
        done = subprocess.run(
            command(*arguments),
            env=environment(url),
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
    finally:
        os.close(keyboard)
        os.close(terminal)
    return Outcome(done.returncode, done.stdout, done.stderr)
