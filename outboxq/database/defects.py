"""Defects of outboxq itself: errors of the code that watches handlers, which no handler may take for its own.

That code then assumes the worst, and goes on; the defect is logged once for each place.
"""

import logging
import sys
from collections.abc import Iterator
from functools import lru_cache

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from outboxq.errors import OutboxqError

logger = logging.getLogger("outboxq.relay")

_EXPECTED = (OutboxqError, SQLAlchemyError, psycopg.Error)
_LIBRARIES = frozenset(("sqlalchemy", "psycopg", "psycopg_binary", "psycopg_c", "greenlet", *sys.stdlib_module_names))
# Modules that call users' code.
_CALLERS = frozenset(("outboxq.forks", "outboxq.execution.invoke", "outboxq.execution.surround"))
# Parts of the package that are applications themselves.
_APPLICATIONS = ("outboxq.demo", "outboxq.torture")


def is_defect(error: BaseException) -> bool:
    """Return True if an error comes from outboxq's own code: not the database, nor any code of the user's."""
    if not isinstance(error, Exception) or isinstance(error, _EXPECTED):
        return False
    modules = [module for module, _ in _places(error)]
    # Users' code in C has no frame: that of its caller is the innermost one.
    return all(map(_is_known, modules)) and (not modules or modules[-1] not in _CALLERS)


def contain(error: Exception) -> None:
    """Log a defect, for a watcher that goes on; any other error is raised again."""
    if not is_defect(error):
        raise error
    report(error)


def report(error: BaseException) -> None:
    """Log a defect once: its type and its place, and no text, which may quote a value."""
    *_, (module, line) = (place for place in _places(error) if place[0].startswith("outboxq."))
    _log(type(error).__name__, f"{module}:{line}")


# Kept so that a defect which each statement meets is one line of the log.
@lru_cache(256)
def _log(error_type: str, where: str) -> None:
    fields = {"error_type": error_type, "where": where}
    logger.error(
        "a defect of outboxq, please report it: a handler could not be watched, and each job of its batch runs alone: "
        "error_type=%s where=%s",
        *fields.values(),
        extra={f"outboxq_{name}": value for name, value in fields.items()},
    )


def _places(error: BaseException) -> Iterator[tuple[str, int]]:
    step = error.__traceback__
    while step is not None:
        yield str(step.tb_frame.f_globals.get("__name__", "")), step.tb_lineno
        step = step.tb_next


def _is_known(module: str) -> bool:
    top = module.partition(".")[0]
    return top in _LIBRARIES or (top == "outboxq" and not module.startswith(_APPLICATIONS))
