"""Errors of commands, and their message and exit code: 1 if something failed, 2 if the command was wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from outboxq.errors import ArgumentError, ConfigError, InvalidKey, LoginRefused, OutboxqError

# Typer's error for options and commands that do not exist and values that do not fit. It exports only one such class,
# which has this base.
_REFUSAL = typer.BadParameter.__mro__[2]


@dataclass(frozen=True, slots=True)
class Failure:
    """The message of an error for the user of the command line, and the exit code; `explain` returns it."""

    message: str
    exit_code: int


class DatabaseUnreachable(OutboxqError):
    """No connection to the database could be opened.

    Attributes:
        refused: True if a server answered, but refused the database, the role or the password.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class WrongUsage(ConfigError):
    """A command was called with options that contradict one another, or without a required one; its exit code is 2."""


class CommandFailed(OutboxqError):
    """A command could not do its work; its exit code is 1."""


def run_command(words: Sequence[str]) -> int:
    """Run a command of the command line. If it fails, print the error as a line or, with --json, as a JSON object.

    Returns:
        The exit code.
    """
    from outboxq.cli.app import app
    from outboxq.cli.output import fail, speaking_json

    as_json = "--json" in words
    with speaking_json(as_json):
        try:
            check_encoding(words)
            # Otherwise typer prints its own refusals, and ends the process.
            return int(app(words, prog_name="outboxq", standalone_mode=not as_json) or 0)
        except typer.Abort:
            fail("it was not confirmed, so nothing was changed", 1, "Abort")
            return 1
        except Exception as error:
            failure = explain(error)
            if failure is None:
                raise
            fail(failure.message, failure.exit_code, type(error).__name__)
            return failure.exit_code


def check_encoding(arguments: Sequence[str]) -> None:
    """Refuse arguments that are not UTF-8.

    Python turns their invalid bytes into lone surrogates, which no name or text in the database can have.

    Raises:
        WrongUsage: there are such bytes. The message names only their position, because the text may be a secret.
    """
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise WrongUsage(
                f"word {number} of the command line is not UTF-8: names and values are UTF-8 text"
            ) from None


def explain(error: Exception) -> Failure | None:
    """Return the message and exit code of `error`; None for a bug in outboxq, which needs its traceback."""
    if isinstance(error, ConfigError | ArgumentError | InvalidKey):
        return Failure(str(error), 2)
    if isinstance(error, _REFUSAL):
        refused: Any = error
        return Failure(refused.format_message(), refused.exit_code)
    if isinstance(error, LoginRefused):
        from outboxq.relay.supervisor import EXIT_REFUSED

        return Failure(str(error), EXIT_REFUSED)
    if isinstance(error, OutboxqError):
        return Failure(str(error), 1)
    return _explain_database(error)


def _explain_database(error: Exception) -> Failure | None:
    import psycopg
    from sqlalchemy.exc import DBAPIError

    from outboxq.database.errors import INSUFFICIENT_PRIVILEGE

    original = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(original, psycopg.Error):
        return None
    if original.sqlstate is None and isinstance(original, psycopg.DataError):
        return Failure("a row holds a value that cannot be read: run `outboxq migrate`, which repairs such rows", 1)
    if original.sqlstate is None:
        return Failure(f"the connection to the database was lost ({type(original).__name__})", 1)
    # Class 22, data exceptions, quotes the offending value, and DETAIL quotes rows: neither is shown.
    if original.sqlstate.startswith("22"):
        return Failure(f"the database refused a value (SQLSTATE {original.sqlstate})", 1)
    hint = f" {original.diag.message_hint}" if original.diag.message_hint else ""
    if original.sqlstate == INSUFFICIENT_PRIVILEGE:
        hint += (
            " This role lacks a right there: `outboxq roles` shows the rights of each part, and `outboxq roles --sql` "
            "prints the SQL that grants them, for the owner of the tables to run"
        )
    return Failure(f"the database refused: {original.diag.message_primary} (SQLSTATE {original.sqlstate}).{hint}", 1)
