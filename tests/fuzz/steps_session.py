"""Steps that do something to the session as a whole, and those that add jobs."""

from typing import Any

from sqlalchemy import Connection, event, func, insert, select
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, object_session

from outboxq import external
from outboxq.outbox.session import add_job, add_jobs
from tests.fuzz.frame import Frame, on_held, step_function
from tests.fuzz.models import Note
from tests.fuzz.program import Task

ELSEWHERE = external("told", queue="elsewhere")


@step_function
def flush(frame: Frame) -> object:
    frame.session.flush()
    return None


@on_held
def flush_one(frame: Frame, entity: Any) -> object:
    frame.session.flush([entity])
    return None


@step_function
def commit(frame: Frame) -> object:
    """Commits nothing, and expires what is loaded."""
    frame.session.commit()
    return None


@step_function
def rollback(frame: Frame) -> object:
    frame.session.rollback()
    return None


@step_function
def close(frame: Frame) -> object:
    frame.session.close()
    return None


@step_function
def end_transaction(frame: Frame, how: str, through: str) -> object:
    """End the session's transaction by itself, past the session's own methods."""
    transaction = _session_of(frame, through).get_transaction()
    return "none" if transaction is None else getattr(transaction, how)()


@step_function
def end_savepoint(frame: Frame, how: str, through: str) -> object:
    """The same with its innermost savepoint."""
    transaction = _session_of(frame, through).get_nested_transaction()
    return "none" if transaction is None else getattr(transaction, how)()


@step_function
def leave_session(frame: Frame, how: str, through: str) -> object:
    """Close it, reset it, prepare it, or whatever else it can be left by."""
    return getattr(_session_of(frame, through), how)()


@step_function
def begin_in_vain(frame: Frame, text: str, through: str) -> object:
    """A transaction of the session's own that fails, and whose error is caught."""
    session = _session_of(frame, through)
    try:
        with session.begin():
            session.add(Note(text=text))
            raise ZeroDivisionError
    except (ZeroDivisionError, InvalidRequestError) as error:
        return type(error).__name__


def _session_of(frame: Frame, through: str) -> Session:
    """The handler's session, or the same one by way of a row."""
    entity = frame.at(0) if through == "row" else None
    return frame.session if entity is None else object_session(entity) or frame.session


@step_function
def expire_all(frame: Frame) -> object:
    frame.session.expire_all()
    return None


@step_function
def expunge_all(frame: Frame) -> object:
    frame.session.expunge_all()
    return None


@step_function
def autoflush_off(frame: Frame) -> object:
    frame.session.autoflush = False
    return None


@step_function
def leave_savepoint(frame: Frame) -> object:
    """A savepoint that nothing ends."""
    frame.session.begin_nested()
    return None


@step_function
def keep_in_info(frame: Frame, n: int) -> object:
    before = frame.session.info.get("fuzz")
    frame.session.info["fuzz"] = n
    return before


@step_function
def hook(frame: Frame, n: int) -> object:
    """A listener on this session: at its flushes it writes a row, and changes those that change."""

    def before_flush(session: Session, _context: object, _instances: object) -> None:
        changed = [type(entity).__name__ for entity in session.dirty]
        # By a statement: SQLAlchemy has no order for objects that are added while others leave the session.
        session.execute(insert(Note).values(text=f"hook {n} {','.join(sorted(changed))}"[:40]))

    event.listen(frame.session, "before_flush", before_flush, once=True)
    return None


@step_function
def hook_commit(frame: Frame, n: int) -> object:
    """A listener for the end of this session's transaction."""

    def before_commit(session: Session) -> None:
        session.add(Note(text=f"commit {n}"))

    event.listen(frame.session, "before_commit", before_commit, once=True)
    return None


@step_function
def hook_begin(frame: Frame, n: int) -> object:
    """A listener for the begin of this session's transaction on its connection."""

    def after_begin(_session: Session, _transaction: object, connection: Connection) -> None:
        connection.execute(insert(Note).values(text=f"begin {n}"))

    event.listen(frame.session, "after_begin", after_begin, once=True)
    return None


@step_function
def hook_load(frame: Frame, n: int) -> object:
    """A listener on this session: it leaves a sign in each row that the session loads."""

    def loaded(_session: Session, entity: Any) -> None:
        entity.__dict__["loaded_with"] = n

    event.listen(frame.session, "loaded_as_persistent", loaded)
    return None


@step_function
def set_here(frame: Frame, n: int) -> object:
    """A setting for the rest of the transaction."""
    frame.session.execute(select(func.set_config("fuzz.here", str(n), True)))
    return None


@step_function
def look_here(frame: Frame) -> object:
    """What `set_here` has set; only a job that has set it itself may look."""
    return frame.session.scalar(select(func.current_setting("fuzz.here")))


@step_function
def chain(frame: Frame, task: Task, priority: int = 0) -> object:
    """Add a job that runs after this batch."""
    frame.add_task(task, priority)
    return None


@step_function
def tell(frame: Frame, n: int) -> object:
    """Add jobs for another service."""
    add_jobs(frame.session, [ELSEWHERE.job(name=f"told {n}"), ELSEWHERE.job(name=f"told {n} too")])
    return None


@on_held
def tell_of(frame: Frame, entity: Any) -> object:
    """Add a job that is given a row."""
    add_job(frame.session, ELSEWHERE.options(priority=3), name="told of", entity=entity)
    return None


@step_function
def tell_of_new(frame: Frame, text: str) -> object:
    """Add a job that is given a row whose key is drawn at the flush."""
    new = Note(text=text)
    frame.session.add(new)
    add_job(frame.session, ELSEWHERE, name=f"told of {text}", new=new)
    return None
