"""Reading from a replica: the option `--read-url` of commands that only read, and the connection to the replica.

This is the only module that decides which server a command reads. Changes and the doctor use the primary database.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from outboxq.cli.options import DatabaseOptions

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outboxq.cli.database import Begin

ReadUrls: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--read-url",
        metavar="URL",
        help="Read here instead: a hot standby of the database, whose delay is shown. Changes, and what the doctor "
        "looks at, stay with the database itself. For several databases one for each, in their order. Prefer the "
        "variable OUTBOXQ_READ_URL, which goes with OUTBOXQ_DATABASE_URL alone: databases that options name do "
        "without it.",
        show_default=False,
    ),
]


def replicas_of(
    named: "Mapping[str, URL]", read_urls: Sequence[str] | None, given: Sequence[str] | None
) -> "dict[str, URL]":
    """Return the URLs of replicas, by the names of their databases, from --read-url or from OUTBOXQ_READ_URL.

    The variable is used only if `given`, the values of the options that name databases, is empty.
    """
    from outboxq import config

    return config.read_urls(read_urls, list(named), by_environment=not given)


@contextmanager
def open_reading(url: "URL", replica: "URL | None", schema: str) -> "Iterator[Begin]":
    """Connect to the replica if one is given, otherwise to the database; yield a function that begins a transaction.

    The database is never read in place of a replica that fails.

    Raises:
        ConfigError, CommandFailed: an error of the replica; the message says that it comes from the replica.
    """
    from outboxq.cli.database import naming, open_database

    whose = None if replica is None else "the server of --read-url (without OUTBOXQ_READ_URL the database is read)"
    with ExitStack() as stack:
        with naming(whose):
            begin = stack.enter_context(open_database((replica or url).render_as_string(hide_password=False), schema))
        yield begin


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingOptions(DatabaseOptions):
    """The options of a command that reads from one database, or from its replica if --read-url is given."""

    read_url: ReadUrls = field(default=None, repr=False)

    @contextmanager
    def reading(self) -> "Iterator[Begin]":
        """Connect to the replica if there is one, otherwise to the database; yield a function to begin transactions."""
        from outboxq import config

        url = config.database_url(self.database_url)
        given = [self.database_url] if self.database_url else None
        replica = replicas_of({"": url}, self.read_url, given).get("")
        with open_reading(url, replica, self.schema) as begin:
            yield begin
