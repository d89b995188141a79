"""Sets aside jobs whose rows make every claim fail, as dead letters or for a later time, so that other jobs can run.

A claim is one statement for many jobs, and so is the periodic statement that takes jobs back from dead relays. One bad
row makes the whole statement fail: a damaged row, a row whose text is too long, or a row that a user's trigger refuses.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias
from uuid import UUID

import psycopg
from sqlalchemy import Connection

from outboxq.database.driver import is_lost, run_script
from outboxq.database.errors import READ_ONLY, sqlstate_of
from outboxq.events import JobSetAside
from outboxq.statements.aside import WAITS, dead_letter_row, postpone_row, select_kind
from outboxq.statements.group_claim import AnyScript
from outboxq.statements.lease import NEVER
from outboxq.statements.park import clear_marks
from outboxq.statements.transaction import READABLE_DATES, UNTIMED

logger = logging.getLogger("outboxq.relay")

Rows: TypeAlias = "Sequence[tuple[object, ...]]"
_PUT_OFF_SECONDS = 300.0
# Classes of PostgreSQL's SQLSTATEs (manual, appendix A) for errors of a statement, a session or the server, for which
# no job is to blame. One row may cause any other error: data, constraints, limits, a damaged page, a user's trigger.
_OF_NO_ROW = (
    *("00", "01", "02", "03", "08", "0A", "0B", "0F", "0L", "0P", "0Z", "10", "24", "25", "26", "28", "2B", "2D"),
    *("34", "3B", "3D", "3F", "40", "42", "53", "55", "57", "58", "72", "F0", "HV"),
)
# Classes of errors that a row will cause again and again.
_FOR_GOOD = ("22", "54", "XX")


def take_one(
    run: Callable[[str], Rows], taking: Callable[[int], str], max_crashes: int, schema: str, job_id: UUID
) -> Rows:
    """Take back one job whose relay or connection was lost while the job ran; return one row about the job.

    The row has the job's id, queue, kind and crashes, and True if the job became a dead letter, as after `max_crashes`
    crashes. With fewer crashes, or if the server refuses to write the dead letter, it becomes a suspect: it runs alone
    next, so that another crash affects no other job. If the server refuses that too, return no row: a later call tries
    again.

    Args:
        run: Runs a statement in a transaction of its own.
        taking: Makes the statement that takes the job back; its argument is the number of crashes that makes a dead
            letter.

    Raises:
        psycopg.Error: a statement failed for a reason other than the job's row.
    """
    try:
        return run(taking(max_crashes))
    except psycopg.Error as error:
        if (error.sqlstate or "08").startswith(("08", "57P", READ_ONLY)):
            raise
        message = "a job could not be moved to the dead letters"
        say_of_job(logging.WARNING, message, kind_of(run, schema, job_id), job_id, describe(error))
    try:
        return run(taking(NEVER))
    except psycopg.Error as error:
        if not is_of_a_row(error):
            raise
        message = "a job that was lost could not be taken back"
        say_of_job(logging.WARNING, message, kind_of(run, schema, job_id), job_id, describe(error))
        return ()


def say_of_job(level: int, message: str, kind: str, job_id: UUID, why: str) -> None:
    """Log `message` about one job, with its kind, its id and the reason `why`; kind and id are also log fields."""
    extra = {"outboxq_kind": kind, "outboxq_job_id": str(job_id)}
    logger.log(level, "%s: kind=%s id=%s: %s", message, kind, job_id, why, extra=extra)


def kind_of(run: Callable[[str], Rows], schema: str, job_id: UUID) -> str:
    """Return the kind of a job, for a log line about it; `?` if its row is gone or cannot be read."""
    try:
        rows = run(select_kind(schema, job_id))
    except psycopg.Error as error:
        if not is_of_a_row(error):
            raise
        rows = ()
    return str(rows[0][0]) if rows else "?"


def set_aside_first(
    connection: Connection,
    schema: str,
    first: tuple[AnyScript, UUID],
    others: Iterable[tuple[AnyScript, UUID]],
    error: BaseException,
) -> tuple[JobSetAside, ...] | None:
    """Test if one job's row made a claim fail; if so, make the job a dead letter, or put it off by `_PUT_OFF_SECONDS`.

    The job's row is the cause if claiming this job alone fails again, and claiming another job succeeds. If all claims
    fail, the cause is a general one that an operator repairs, such as a missing partition that a trigger needs.

    Args:
        first: The script of the claim that failed, and the id of the first job that it would have taken.
        others: Jobs of the same queue, each as a script that claims it in the same way, and its id.
        error: The error of the failed claim.

    Returns:
        The event of a dead letter; no event if the job was put off; None if the job was left as it is.
    """
    if not is_of_a_row(error) or all(_failure(connection, schema, *other) for other in others):
        return None
    # After the other jobs: a shared cause may have been repaired just before another job passed.
    failure = _failure(connection, schema, *first)
    if failure is None:
        return None
    job_id, why = first[1], describe(failure)
    reason = f"it could not be claimed: {why}"
    # An error of users' code may be repaired.
    for dies in (True, False) if _of(failure, _FOR_GOOD) else (False, True):
        statement = (
            dead_letter_row(schema, job_id, WAITS, reason) if dies else postpone_row(schema, job_id, _PUT_OFF_SECONDS)
        )
        rows = _try(connection, statement)
        if rows and dies:
            return (JobSetAside(job_id, str(rows[0][1]), str(rows[0][2]), reason),)
        if rows:
            message = "a job that cannot be claimed was put off: repair or delete its row, or what refuses it"
            say_of_job(logging.ERROR, message, str(rows[0][1]), job_id, why)
            return ()
    kind = kind_of(partial(_try, connection), schema, job_id)
    message = "a job can be neither claimed nor moved to the dead letters nor put off: repair or delete its row"
    say_of_job(logging.ERROR, message, kind, job_id, why)
    return None


def _failure(connection: Connection, schema: str, script: AnyScript, job_id: UUID) -> psycopg.Error | None:
    """Claim one job by itself, and undo the claim; return the claim's error, or None if it succeeded.

    The undone claim leaves a mark in the job's row, by which relays would take the job for one of a dead relay. So this
    mark is overwritten.
    """
    failure = None
    with connection.begin():
        run_script(connection, UNTIMED, READABLE_DATES, "SAVEPOINT oq_probe")
        try:
            run_script(connection, script.one(job_id))
        except psycopg.Error as error:
            if is_lost(connection) or not is_of_a_row(error):
                raise
            failure = error
        run_script(connection, f"ROLLBACK TO SAVEPOINT oq_probe; {clear_marks(schema, [str(job_id)])}")
    return failure


def _try(connection: Connection, statement: str) -> Rows:
    try:
        with connection.begin():
            return run_script(connection, statement)
    except psycopg.Error as error:
        if is_lost(connection) or not is_of_a_row(error):
            raise
        return ()


def is_of_a_row(error: BaseException) -> bool:
    """Return True if, by its SQLSTATE, a statement's error may come from one of the rows that the statement touched.

    Other errors come from the statement, the session or the server.
    """
    return sqlstate_of(error) is not None and not _of(error, _OF_NO_ROW)


def _of(error: BaseException, classes: tuple[str, ...]) -> bool:
    return (sqlstate_of(error) or "").startswith(classes)


def describe(error: BaseException) -> str:
    """Return the error's type and SQLSTATE, for a log line; its text is left out, because it may hold a value."""
    return f"{type(error).__name__} ({sqlstate_of(error)})"
