"""Unique jobs: a job is inserted only if its key is free, and its handle then shows if it was.

A producer's flush takes the keys and inserts the jobs in one statement. A flush in a handler inserts the jobs alone;
their keys are taken at the COMMIT of the relay's transaction, which deletes the jobs whose keys other jobs have. So a
handler holds no key for which a producer would wait, and jobs that are rolled back, to any savepoint, take no key.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from outboxq.database.driver import Rows
from outboxq.database.errors import INSUFFICIENT_PRIVILEGE, missing_tables_explained, sqlstate_of
from outboxq.database.guard import guard_of
from outboxq.errors import EnqueueError
from outboxq.new_job import UniqueJob
from outboxq.statements.enqueue import JOBS_PER_INSERT
from outboxq.statements.unique import add_unique, insert_without_keys, key_owners, take_keys

T = TypeVar("T")


def statements_that_take_keys(schema: str, added: Mapping[str, UniqueJob]) -> list[str]:
    """Return statements that take the keys of inserted jobs, and delete jobs whose keys other jobs have.

    Keys are taken in the order of their bytes, so that two transactions that want the same keys wait in one order.
    """
    return [take_keys(schema, part) for part in parts(_sorted(added))]


def record_taken(added: MutableMapping[str, UniqueJob], found: Rows) -> tuple[UniqueJob, ...]:
    """Record in the handles of unique jobs if they were added; return the jobs that were not, and empty `added`.

    Args:
        added: The jobs, by id, for which `statements_that_take_keys` was called.
        found: The rows of these statements.
    """
    rows = [(str(row[0]), bool(row[1]), row[2]) for row in found]
    answered = {job_id: added[job_id] for job_id, *_ in rows}
    _answer(answered, rows)
    added.clear()
    return tuple(job for job in answered.values() if not job.answer.added)


def insert_unique(connection: Connection, jobs: Mapping[str, UniqueJob]) -> None:
    """Insert unique jobs if their keys are free; in a handler insert all, and leave the decision to COMMIT.

    Of two jobs of one key the first wins. The keys are taken in the order of their bytes, over all of the jobs: two
    flushes that want the same keys wait in one order.

    Raises:
        EnqueueError: the role lacks a right.
        SchemaError: the tables are missing, or too old.
    """
    guard = guard_of(connection)
    if guard is not None and guard.collects:
        for some in parts(jobs):
            connection.execute(*insert_without_keys(some))
        guard.added.update(jobs)
        return
    first: dict[str, str] = {}
    for job_id, job in jobs.items():
        first.setdefault(job.key.key, job_id)
    wanted = {job_id: jobs[job_id] for job_id in first.values()}
    if len(wanted) > JOBS_PER_INSERT:
        # One statement takes its keys in their order by itself, and keeps the order of the jobs.
        wanted = _sorted(wanted)
    with missing_tables_explained(), _missing_rights_explained():
        rows = [row for some in parts(wanted) for row in _add(connection, some)]
    _answer(jobs, rows)


def _add(connection: Connection, jobs: Mapping[str, UniqueJob]) -> list[tuple[str, bool, str | None]]:
    """Insert jobs of different keys if their keys are free.

    Returns:
        For each job: its id in hex, True if it was added, and otherwise the id of the job with its key, if known.
    """
    found = connection.execute(*add_unique(jobs)).all()
    ids = list(jobs)
    rows = [(ids[row[0] - 1], row[1], row[2]) for row in found]
    # Another transaction took the key while this statement waited: only a new statement sees which job has it.
    unknown = [jobs[job_id].key.key for job_id, added, owner in rows if not added and owner is None]
    if not unknown:
        return rows
    owners = {row[0]: row[1] for row in connection.execute(key_owners(unknown))}
    return [(job_id, added, owner or owners.get(jobs[job_id].key.key)) for job_id, added, owner in rows]


def _answer(jobs: Mapping[str, UniqueJob], rows: Sequence[tuple[str, bool, object]]) -> None:
    """Record the outcome in the handles of all jobs.

    `rows` are those of `_add`, for one job of each key: other jobs of the key were not added.
    """
    owners: dict[str, object] = {}
    for job_id, added, owner in rows:
        if added or owner is not None:
            owners[jobs[job_id].key.key] = job_id if added else owner
    for job_id, job in jobs.items():
        owner = owners.get(job.key.key)
        existing_id = None if owner is None else UUID(str(owner))
        job.answer.give(added=owner == job_id, existing_id=existing_id)


def _sorted(jobs: Mapping[str, UniqueJob]) -> dict[str, UniqueJob]:
    # A stable sort: the first job of a key stays first.
    return dict(sorted(jobs.items(), key=lambda item: item[1].key.key.encode()))


def parts(jobs: Mapping[str, T]) -> Iterator[dict[str, T]]:
    """Yield jobs by their ids, in parts of the size that one statement inserts."""
    rest = iter(jobs.items())
    while some := dict(islice(rest, JOBS_PER_INSERT)):
        yield some


@contextmanager
def _missing_rights_explained() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if sqlstate_of(error) != INSUFFICIENT_PRIVILEGE:
            raise
        # The message names the table in every language.
        is_key = "unique_key" in str(error.orig)
        missing = (
            "SELECT, INSERT and UPDATE on unique_key"
            if is_key
            else "INSERT on job, and SELECT on its columns id, state, expires_at and xmax"
        )
        raise EnqueueError(
            f"this role may not add unique jobs, which takes {missing}: run what `outboxq roles --sql "
            "--unique-producer ROLE` prints"
        ) from error
