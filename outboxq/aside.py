"""Set aside: a job that no statement of a relay can take becomes a dead letter, so that no other job waits for it.

A claim or a reaper's sweep is one statement for many jobs, and fails for all of them if it fails for one: for a row
that cannot be read or changed, because it is damaged, because its text is more than there can be, or because a trigger
of the users' refuses it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias
from uuid import UUID, uuid4

import psycopg
from sqlalchemy import Connection

from outboxq.claim import ClaimRequest
from outboxq.driver import is_lost, run_script, sqlstate_of
from outboxq.events import JobSetAside
from outboxq.statements.aside import WAITS, bury_row, put_off_row
from outboxq.statements.claim import clear_marks
from outboxq.statements.lease import NEVER
from outboxq.statements.session import READABLE_DATES, UNTIMED

logger = logging.getLogger("outboxq.relay")

Rows: TypeAlias = "Sequence[tuple[object, ...]]"
_PUT_OFF_SECONDS = 300.0
# What may be wrong with one row: data, constraints, an external routine, limits, a trigger that raises, a damaged page.
# Anything else ails the statement, the session or the server: then no job is to blame.
_OF_A_ROW = ("22", "23", "38", "39", "54", "P0", "XX")


def take_one(run: Callable[[str], Rows], taking: Callable[[int], str], bury: str, max_crashes: int) -> Rows:
    """Take one job from where it was lost, by the gentlest way that its row allows.

    As it should be; without burying it; as a dead letter as it stands. No rows where none of it is possible: it stays
    where it is, and is tried again with the next sweep.

    Args:
        run: Runs a statement in a transaction of its own.
        taking: The statement that takes the job back, given after how many crashes it is buried.
        bury: The statement that makes a dead letter of the row.

    Raises:
        psycopg.Error: the connection is lost.
    """
    for statement in (taking(max_crashes), taking(NEVER)):
        try:
            return run(statement)
        except psycopg.Error as error:
            _tell_of_lost(error)
            failure = error
    try:
        return run(bury) if is_of_a_row(failure) else ()
    except psycopg.Error as error:
        _tell_of_lost(error)
        return ()


def _tell_of_lost(error: psycopg.Error) -> None:
    if (error.sqlstate or "08").startswith(("08", "57P")):
        raise error
    logger.warning("a job that was lost could not be taken back: %s", describe(error))


def set_aside_unclaimable(
    connection: Connection, request: ClaimRequest, schema: str, picked: Sequence[UUID], error: BaseException
) -> tuple[JobSetAside, ...] | None:
    """After a claim that failed: find the jobs for which it fails, each by itself, and make dead letters of them.

    None where it fails without any job too, or for none alone, or where nothing can be done about them: the claim would
    fail again.

    Args:
        picked: What the claim would have taken.
        error: What it failed with.
    """
    # Of no job: what fails then is not a row's.
    if not is_of_a_row(error) or _failure(connection, request, schema, uuid4()) is not None:
        return None
    found = ((job_id, _failure(connection, request, schema, job_id)) for job_id in picked)
    guilty = [(job_id, describe(failure)) for job_id, failure in found if failure is not None]
    aside = [
        _set_aside(connection, schema, job_id, why) or _put_off(connection, schema, job_id) for job_id, why in guilty
    ]
    return tuple(event for event in aside if isinstance(event, JobSetAside)) if any(aside) else None


def _failure(connection: Connection, request: ClaimRequest, schema: str, job_id: UUID) -> psycopg.Error | None:
    """What the claim of this job alone fails with. It is not kept, and the mark that this leaves is cleared."""
    failure = None
    with connection.begin():
        run_script(connection, f"{UNTIMED}{READABLE_DATES}SAVEPOINT oq_probe")
        try:
            run_script(connection, request.script.one(job_id))
        except psycopg.Error as error:
            if is_lost(connection) or not is_of_a_row(error):
                raise
            failure = error
        run_script(connection, f"ROLLBACK TO SAVEPOINT oq_probe; {clear_marks(schema, [str(job_id)])}")
    return failure


def _set_aside(connection: Connection, schema: str, job_id: UUID, why: str) -> JobSetAside | None:
    """The row as a dead letter; None where that cannot be, or it is gone."""
    reason = f"it could not be claimed: {why}"
    rows = _try(connection, bury_row(schema, job_id, WAITS, reason))
    return JobSetAside(job_id, str(rows[0][1]), str(rows[0][2]), reason) if rows else None


def _put_off(connection: Connection, schema: str, job_id: UUID) -> bool:
    is_put_off = bool(_try(connection, put_off_row(schema, job_id, _PUT_OFF_SECONDS)))
    logger.error(
        "a job can be neither claimed nor buried%s: repair or delete its row",
        "" if is_put_off else " nor put off",
        extra={"outboxq_job_id": str(job_id)},
    )
    return is_put_off


def _try(connection: Connection, statement: str) -> Rows:
    try:
        with connection.begin():
            return run_script(connection, statement)[0].rows
    except psycopg.Error as error:
        if is_lost(connection) or not is_of_a_row(error):
            raise
        return ()


def is_of_a_row(error: BaseException) -> bool:
    """Whether a statement may have failed for what is in one of its rows."""
    return (sqlstate_of(error) or "").startswith(_OF_A_ROW)


def describe(error: BaseException) -> str:
    """Its type and SQLSTATE: its text may hold a value."""
    return f"{type(error).__name__} ({sqlstate_of(error)})"
