"""The command line at a terminal: with one answer typed into it, or with what it shows at a width."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping
from pathlib import Path

from tests.support.cli import Outcome, command, environment
from tests.support.waiting import PATIENCE

_ROWS = 50


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


def run_at_terminal(
    *arguments: object,
    columns: int = 80,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    with_errors: bool = False,
) -> Outcome:
    """Run the command in a process of its own, whose standard output is a terminal so wide.

    What it writes comes back as it was written, with the codes of colours; `with_errors`, what it writes to standard
    error too, in its place.
    """
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    written: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(screen, written))
    process = subprocess.Popen(
        command(*arguments),
        env={**environment(url), "TERM": "xterm-256color", **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal if with_errors else subprocess.PIPE,
        text=True,
    )
    os.close(terminal)
    reader.start()
    try:
        _, errors = process.communicate(timeout=2 * PATIENCE)
    finally:
        process.kill()
    reader.join(PATIENCE)
    os.close(screen)
    return Outcome(process.returncode, b"".join(written).decode(), errors or "")


def _read_all(screen: int, written: list[bytes]) -> None:
    while True:
        try:
            some = os.read(screen, 65_536)
        except OSError:
            # The last process that had the terminal has ended.
            return
        if not some:
            return
        written.append(some)
