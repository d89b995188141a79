"""Signs of life: beats that a relay process sends to its supervisor, and a file that a container's probe reads.

Each is written by a separate thread. They show that the interpreter runs and what the relay is doing, without a
connection.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from outboxq.errors import ConfigError
from outboxq.events import DatabaseBack, DatabaseLost, Event, RelayStarted, RelayStopping

State: TypeAlias = Literal["starting", "serving", "waiting_for_database", "stopping"]
STATES: tuple[State, ...] = get_args(State)

BEAT_SECONDS = 0.5
WRITE_SECONDS = 1.0

logger = logging.getLogger("outboxq.relay")


@dataclass(frozen=True, slots=True)
class Health:
    """The activity of a relay process, or of a supervisor and its children, as the health file shows it.

    Args:
        processes: The number of relay processes that should run.
        running: The number of relay processes that run.
    """

    state: State
    processes: int = 1
    running: int = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a health file, which `judge` returns.

    Attributes:
        alive: True if the process that writes the file works.
        why: The state of the process, or the reason why it does not count as alive.
        health: The file's content; None if it is not readable.
    """

    alive: bool
    why: str
    health: dict[str, object] | None = None


class StateHook:
    """A hook that follows the relay's events; `state` is what this process's relay is doing now."""

    events = frozenset({RelayStarted, DatabaseBack, DatabaseLost, RelayStopping})

    def __init__(self) -> None:
        self.state: State = "starting"

    def __call__(self, event: Event) -> None:
        if self.state == "stopping":
            return
        match event:
            case RelayStarted() | DatabaseBack():
                self.state = "serving"
            case DatabaseLost():
                self.state = "waiting_for_database"
            case RelayStopping():
                self.state = "stopping"
            case _:
                pass


def send_beats(write_end: int, read_state: Callable[[], State]) -> None:
    """Start a thread that writes the state into the supervisor's pipe (`write_end`), a byte every half second.

    The thread ends when the pipe has no reader. It never blocks: nothing is written into a full pipe.
    """
    os.set_blocking(write_end, False)

    def beat() -> None:
        while True:
            try:
                os.write(write_end, bytes([STATES.index(read_state())]))
            except BlockingIOError:
                pass
            except OSError:
                return
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat, name="outboxq-heartbeat", daemon=True).start()


def read_beats(read_end: int) -> State | None:
    """Read all bytes that `send_beats` has written into a pipe; return the last one's state, or None if there are none.

    The pipe must be non-blocking.
    """
    try:
        beats = os.read(read_end, 65_536)
    except BlockingIOError:
        return None
    return STATES[beats[-1] % len(STATES)] if beats else None


@contextmanager
def health_file(
    path: Path | None, read_health: Callable[[], Health], write_seconds: float = WRITE_SECONDS
) -> Iterator[None]:
    """Write the health file `path` every `write_seconds` while the block runs; remove it at the end.

    Does nothing if `path` is None.

    Raises:
        ConfigError: the file cannot be written at the start. Later failures are logged, and the relay goes on.
    """
    if path is None:
        yield
        return
    try:
        _write(path, read_health())
    except OSError as error:
        raise ConfigError(
            f"the health file {str(path)!r} cannot be written ({error.strerror}): name a file in a directory that "
            "exists and is writable"
        ) from error
    done = threading.Event()

    def keep_writing() -> None:
        failing = False
        while not done.wait(write_seconds):
            try:
                _write(path, read_health())
            except OSError as error:
                if not failing:
                    logger.warning("health file cannot be written, trying again: %s", error)
                failing = True
            else:
                failing = False

    thread = threading.Thread(target=keep_writing, name="outboxq-health-file", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        # The file's directory may be gone by now, or read-only.
        with contextlib.suppress(OSError):
            path.unlink()


def _write(path: Path, health: Health) -> None:
    """Replace the health file in one step, so that a reader finds the old content or the new one, never a part."""
    document = {**asdict(health), "pid": os.getpid(), "at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(document) + "\n")
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def judge(path: Path, max_age_seconds: float) -> Verdict:
    """Read a health file and judge if the process that writes it is alive, for a container's probe.

    The process counts as alive if the file is at most `max_age_seconds` old and the state in it is not "stopping".
    """
    try:
        health = json.loads(path.read_text())
        state, written_at = health["state"], datetime.fromisoformat(health["at"])
        age_seconds = (datetime.now(UTC) - written_at).total_seconds()
    except FileNotFoundError:
        return Verdict(False, f"there is no file {str(path)!r}: no relay with --health-file runs, or it has ended")
    except OSError as error:
        return Verdict(False, f"the file {str(path)!r} cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError):
        return Verdict(False, f"the file {str(path)!r} is no health file of a relay")
    # abs: after the clock was set back, a time in the future proves nothing.
    if abs(age_seconds) > max_age_seconds:
        return Verdict(False, f"last written {age_seconds:.0f} s ago, over the limit of {max_age_seconds:g} s", health)
    return Verdict(state in STATES and state != "stopping", str(state), health)
