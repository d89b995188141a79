"""The starts of calls: a line in a file for each, which outlives the process and needs no connection.

A call that begins twice under one token reached outside twice, although nothing took its job from it.
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
    """One start of a call: in which process, under which token, and when, in seconds since 1970."""

    job_id: UUID
    token: int
    pid: int
    at: float


def record_start(job: Job, directory: str) -> None:
    """Append the start to this process's file: a SIGKILL does not take back a written line."""
    with Path(directory, str(os.getpid())).open("ab", buffering=0) as file:
        file.write(f"{job.id} {job.lease_token} {time.time()!r}\n".encode())


def read_starts(directory: str) -> Iterator[Start]:
    """The starts of all processes."""
    for path in Path(directory).iterdir():
        for line in path.read_text().splitlines():
            job_id, token, at = line.split()
            yield Start(UUID(job_id), int(token), int(path.name), float(at))
