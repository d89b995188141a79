"""The starts of calls: a line in a file for each, which outlives the process and needs no connection.

A call that begins twice under one token reached outside twice, although nothing took its job from it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from outboxq.job import Job


def record_start(job: Job, directory: str) -> None:
    """Append the job's id and token to this process's file: what is written, a SIGKILL does not take back."""
    with Path(directory, str(os.getpid())).open("ab", buffering=0) as file:
        file.write(f"{job.id} {job.lease_token}\n".encode())


def read_starts(directory: str) -> Iterator[tuple[UUID, int]]:
    """The id and token of each start, of all processes."""
    for path in Path(directory).iterdir():
        for line in path.read_text().splitlines():
            job_id, _, token = line.partition(" ")
            yield UUID(job_id), int(token)
