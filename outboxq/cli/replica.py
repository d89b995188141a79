"""Reading from a replica: `--read-url`, for the commands that only read, and what they say of its delay.

The only module that decides which server a command reads. Changes, and the doctor, go to the database itself.
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
    """The replicas of databases, by their names; of those that options have `given`, only by an option."""
    from outboxq import config

    return config.read_urls(read_urls, list(named), by_environment=not given)


@contextmanager
def open_reading(url: "URL", replica: "URL | None", schema: str) -> "Iterator[Begin]":
    """Open the replica, else the database itself.

    Raises:
        ConfigError, CommandFailed: of a replica, with words that say that it is one.
    """
    from outboxq.cli.database import naming, open_database

    whose = None if replica is None else "the server of --read-url (without OUTBOXQ_READ_URL the database is read)"
    with ExitStack() as stack:
        with naming(whose):
            begin = stack.enter_context(open_database((replica or url).render_as_string(hide_password=False), schema))
        yield begin


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingOptions(DatabaseOptions):
    """The options of a command that reads one database, or its replica."""

    read_url: ReadUrls = field(default=None, repr=False)

    @contextmanager
    def reading(self) -> "Iterator[Begin]":
        """Connect, for several transactions that only read."""
        from outboxq import config

        url = config.database_url(self.database_url)
        given = [self.database_url] if self.database_url else None
        replica = replicas_of({"": url}, self.read_url, given).get("")
        with open_reading(url, replica, self.schema) as begin:
            yield begin
