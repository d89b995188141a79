"""The starts of handlers of mode `calls`, a line in a file for each, which survives SIGKILL and needs no connection.

A handler that starts twice with the same lease token would have called a service twice without having lost its lease,
which is a broken promise.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from outboxq.job import Job


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a handler: the job, its lease token, the process, and the time in seconds since 1970."""

    job_id: UUID
    token: int
    pid: int
    at: float


def record_start(job: Job, directory: str) -> None:
    """Append the start of a handler to this process's file in `directory`; a written line survives SIGKILL."""
    with Path(directory, str(os.getpid())).open("ab", buffering=0) as file:
        file.write(f"{job.id} {job.lease_token} {time.time()!r}\n".encode())


def read_starts(directory: str) -> Iterator[Start]:
    """Yield the starts that all processes have recorded in the directory."""
    for path in Path(directory).iterdir():
        for line in path.read_text().splitlines():
            job_id, token, at = line.split()
            yield Start(UUID(job_id), int(token), int(path.name), float(at))
