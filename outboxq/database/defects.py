"""Finds and logs defects of outboxq itself: errors in its code that watches handlers, which must not fail the handler.

After such an error that code assumes the worst about the handler's statement, and goes on. Each place of a defect is
logged once.
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
    """Return True if an error comes from outboxq's own code, and not from the database or from users' code."""
    if not isinstance(error, Exception) or isinstance(error, _EXPECTED):
        return False
    modules = [module for module, _ in _places(error)]
    # Users' code in C has no frame: the innermost frame is its caller's.
    return all(map(_is_known, modules)) and (not modules or modules[-1] not in _CALLERS)


def contain(error: Exception) -> None:
    """Log a defect, so that the watching code can go on; raise any other error again."""
    if not is_defect(error):
        raise error
    report(error)


def report(error: BaseException) -> None:
    """Log a defect, once for each type and place, without the error's text, which may quote a value."""
    *_, (module, line) = (place for place in _places(error) if place[0].startswith("outboxq."))
    _log(type(error).__name__, f"{module}:{line}")


# Remembered, so that a defect of each statement is logged once.
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
