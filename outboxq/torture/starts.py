"""Lines that handlers write to files, which survive SIGKILL and need no connection.

In mode `calls` a line is the start of a handler: a second one with the same lease token would be a second call without
a lost lease. In mode `windows` it is a message that the handler has sent.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from outboxq.job import Job

_MARK = ".misbehaved"


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a handler. `token` is the job's lease token, `at` the time in seconds since 1970."""

    job_id: UUID
    token: int
    pid: int
    at: float


def record_start(job: Job, directory: str) -> None:
    """Append the start of a handler to this process's file in `directory`; a written line survives SIGKILL."""
    with Path(directory, str(os.getpid())).open("ab", buffering=0) as file:
        file.write(f"{job.id} {job.lease_token} {time.time()!r}\n".encode())


def is_first_mark(job: Job, directory: str) -> bool:
    """Return True at the first call for this job: it creates a file, by which later calls know it."""
    try:
        Path(directory, f"{job.id}{_MARK}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def read_starts(directory: str) -> Iterator[Start]:
    """Yield the starts that all processes have recorded in the directory."""
    for path in Path(directory).iterdir():
        if path.suffix == _MARK:
            continue
        for line in path.read_text().splitlines():
            job_id, token, at = line.split()
            yield Start(UUID(job_id), int(token), int(path.name), float(at))
