"""`outboxq relay --reload`: for development, a relay process that is restarted when the application changes."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.relay import RelayOptions
from outboxq.config import PARENT_PIPE_VARIABLE
from outboxq.relay.signals import stop_signals
from outboxq.relay.supervisor import EXIT_STUCK

# The time that a relay may take to give its jobs back after its time to drain.
_GRACE_SECONDS = 20.0
_LOOK_MILLISECONDS = 200
_log = logging.getLogger("outboxq.relay")


def run_reloading(options: RelayOptions, environment: Mapping[str, str]) -> NoReturn:
    """Run a relay in a process of its own, and restart it after each change of a .py file, until a signal.

    A relay that ends by itself, because of a syntax error for example, is started again after the next change.

    Raises:
        WrongUsage: watchfiles is not installed, or a directory that is to be watched is not there.
    """
    if find_spec("watchfiles") is None:
        raise WrongUsage("--reload needs watchfiles: pip install 'outboxq[reload]'")
    from watchfiles import PythonFilter, watch

    directories = options.reload_dirs or list(_directories_of(options.target))
    missing = [str(path) for path in directories if not path.is_dir()]
    if missing:
        raise WrongUsage(f"--reload-dir takes a directory, and there is none at {', '.join(missing)}")
    # watchfiles logs every change that it sees.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    stopping = threading.Event()
    relay = _Relay(options, environment)
    with stop_signals(stopping.set, before_death=relay.kill):
        # The process starts inside the loop, so that a change during its import is seen.
        for changes in watch(
            *directories,
            watch_filter=PythonFilter(),
            stop_event=stopping,
            rust_timeout=_LOOK_MILLISECONDS,
            yield_on_timeout=True,
            raise_interrupt=False,
        ):
            relay.tend(changed=[path for _, path in changes])
        relay.stop()
    raise typer.Exit(0)


def _directories_of(target: str) -> Iterable[Path]:
    """Yield the current directory and, if it is elsewhere, the directory of the registry's top-level package.

    These are watched for changes if the user names no directory.
    """
    here = Path.cwd()
    yield here
    name = target.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(name, [str(here), *sys.path])
    for place in map(Path, (spec.submodule_search_locations or ()) if spec is not None else ()):
        if not place.is_relative_to(here):
            yield place


class _Relay:
    """The relay process that `--reload` starts and restarts."""

    def __init__(self, options: RelayOptions, environment: Mapping[str, str]) -> None:
        self._command = options.of_one_process()
        if options.health_file is not None:
            self._command += ["--health-file", str(options.health_file)]
        # No bytecode cache: if a source is written twice within a second with the same size, Python would use the first
        # version's cache.
        self._environment = {**environment, "PYTHONDONTWRITEBYTECODE": "1"}
        self._stop_seconds = options.drain_seconds + _GRACE_SECONDS
        self._process: subprocess.Popen[bytes] | None = None
        self._has_said_its_end = False
        self._write_end = -1

    def tend(self, changed: list[str]) -> None:
        """Start the relay if it was never started, and restart it if files have changed.

        If the relay has ended by itself, log that once.
        """
        if changed:
            more = f", and {len(changed) - 1:,} more" if len(changed) > 1 else ""
            _log.info("%s has changed%s: starting the relay again", os.path.relpath(min(changed)), more)
            self.stop()
        if self._process is None:
            self._start()
        code = self._process.poll() if self._process is not None else None
        if code == EXIT_STUCK:
            self.stop()
        elif code is not None and not self._has_said_its_end:
            self._has_said_its_end = True
            _log.error("the relay ended with exit code %d: it starts again when a .py file changes", code)

    def stop(self) -> None:
        """Stop the relay, and wait until it has finished its running jobs; kill it if that takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(self._stop_seconds)
        except subprocess.TimeoutExpired:
            # The server rolls back uncommitted transactions.
            self.kill()
            self._process.wait()
        os.close(self._write_end)
        self._process = None

    def kill(self) -> None:
        """Kill the relay's process, if it runs."""
        if self._process is not None:
            self._process.kill()

    def _start(self) -> None:
        read_end, self._write_end = os.pipe()
        # A new session, so that Ctrl-C at the terminal reaches this process alone; and a pipe: the relay stops at its
        # end if this process is killed.
        self._process = subprocess.Popen(  # noqa: S603  # our own command line
            self._command,
            env={**self._environment, PARENT_PIPE_VARIABLE: str(read_end)},
            pass_fds=(read_end,),
            start_new_session=True,
        )
        os.close(read_end)
        self._has_said_its_end = False
