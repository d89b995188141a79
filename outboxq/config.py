"""Settings: frozen, checked where they enter. The only place that reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError as SQLAlchemyArgumentError

from outboxq.codec import check_name
from outboxq.errors import ArgumentError, ConfigError

DATABASE_URL_VARIABLE = "OUTBOXQ_DATABASE_URL"
LISTEN_URL_VARIABLE = "OUTBOXQ_LISTEN_URL"
TEST_DATABASE_URL_VARIABLE = "OUTBOXQ_TEST_DATABASE_URL"
PG_BIN_VARIABLE = "OUTBOXQ_PG_BIN"
PARENT_PIPE_VARIABLE = "OUTBOXQ_PARENT_PIPE"

MAX_SLOTS = 200
MAX_BATCH_SIZE = 1_000


def database_url(given: str | None = None) -> URL:
    """The database to work on: `given`, else `OUTBOXQ_DATABASE_URL`, as a psycopg URL.

    Raises:
        ConfigError: none is set, or it is not a PostgreSQL URL.
    """
    url = given or os.environ.get(DATABASE_URL_VARIABLE)
    if not url:
        raise ConfigError(
            "no database is named: pass --database-url, or set "
            f"{DATABASE_URL_VARIABLE}=postgresql://user:password@host/database"
        )
    return psycopg_url(url)


def listen_url(given: str | None = None) -> str | None:
    """The direct way to the server for LISTEN: `given`, else `OUTBOXQ_LISTEN_URL`, if any.

    Raises:
        ConfigError: it is not a PostgreSQL URL.
    """
    url = given or os.environ.get(LISTEN_URL_VARIABLE)
    return psycopg_url(url).render_as_string(hide_password=False) if url else None


def test_database_url() -> str | None:
    """The server that tests were told to use, if any."""
    return os.environ.get(TEST_DATABASE_URL_VARIABLE) or None


def local_binaries() -> str | None:
    """The directory with `postgres` and `initdb` that tests were told to use, if any."""
    return os.environ.get(PG_BIN_VARIABLE) or None


def parent_pipe() -> int | None:
    """The pipe at whose end a supervised relay stops, if a supervisor started it."""
    given = os.environ.get(PARENT_PIPE_VARIABLE, "")
    return int(given) if given.isdecimal() else None


def psycopg_url(url: str | URL) -> URL:
    """Any spelling of a PostgreSQL URL (`postgres://`, `postgresql+asyncpg://`, ...) as SQLAlchemy's psycopg one.

    Raises:
        ConfigError: not a PostgreSQL URL. The message never holds the URL, which may hold a password.
    """
    try:
        parsed = make_url(url)
    except (SQLAlchemyArgumentError, ValueError) as error:
        raise ConfigError(
            "the database URL cannot be parsed: expected postgresql://user:password@host/database"
        ) from error
    if parsed.drivername.split("+")[0] not in ("postgres", "postgresql"):
        raise ConfigError(f"the database URL is for {parsed.drivername!r}: outboxq needs postgresql://...")
    return parsed.set(drivername="postgresql+psycopg")


def check_schema(schema: str) -> str:
    """Refuse a schema name that could not be an identifier, an advisory key and a channel."""
    try:
        check_name("schema", schema)
    except ArgumentError as error:
        raise ConfigError(str(error)) from error
    if len(schema.encode()) > 48:
        raise ConfigError(f"the schema name takes at most 48 bytes (its channel's name is longer), got {schema!r}")
    if schema.startswith("pg_"):
        raise ConfigError(f"the schema name may not begin with pg_, which PostgreSQL keeps for itself, got {schema!r}")
    return schema


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Slots that serve the same queues: each claims from the first queue that has a job.

    `queues` is ordered by precedence; `("*",)` stands for every queue of the registry that no other group names.
    """

    queues: tuple[str, ...]
    slots: int = 1

    def __post_init__(self) -> None:
        if not self.queues:
            raise ConfigError("a group of slots names at least one queue")
        if len(set(self.queues)) != len(self.queues):
            raise ConfigError(f"a queue is named twice in {', '.join(self.queues)!r}")
        for name in self.queues:
            if name != "*":
                try:
                    check_name("queue", name)
                except ArgumentError as error:
                    raise ConfigError(str(error)) from error
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ConfigError(f"queue {','.join(self.queues)!r} takes 1 to {MAX_SLOTS} slots, got {self.slots}")

    @classmethod
    def parse(cls, text: str) -> "SlotGroup":
        """Read `accounts=4`, `urgent,normal=2` or `*=2`; without a number, one slot.

        Raises:
            ConfigError: neither of these forms.
        """
        names, equals, count = text.partition("=")
        if equals and not count.isdecimal():
            raise ConfigError(f"--queue takes NAMES=SLOTS, for example accounts=4 or urgent,normal=2, got {text!r}")
        return cls(tuple(name.strip() for name in names.split(",")), int(count) if equals else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """How a relay works. Every time is in seconds.

    Args:
        groups: Which slots serve which queues; empty means `slots_per_queue` slots for every queue of the registry.
        slots_per_queue: Jobs of one queue that run at the same time, where `groups` is empty.
        batch_size: Jobs that a slot claims into one transaction, 1 to 1000. More is faster for tiny handlers, and
            keeps the row locks of all of them until the batch commits.
        poll_seconds: The longest pause between two looks at an empty queue; the pauses grow from 10 ms to it. A
            sleeping relay is also woken by NOTIFY.
        drain_seconds: How long a stopping relay waits for its handlers before it rolls them back.
        listen: Whether to LISTEN for new jobs; without, the relay polls. Turn it off behind a transaction pooler, which
            drops LISTEN without a word, or give `listen_url`.
        listen_url: A direct URL for LISTEN where the relay's own URL leads to a transaction pooler.
        schema: The PostgreSQL schema that the tables were migrated into.
    """

    groups: tuple[SlotGroup, ...] = field(default=())
    slots_per_queue: int = 2
    batch_size: int = 1
    poll_seconds: float = 1.0
    drain_seconds: float = 30.0
    listen: bool = True
    listen_url: str | None = None
    schema: str = "outboxq"

    def __post_init__(self) -> None:
        if not 1 <= self.slots_per_queue <= MAX_SLOTS:
            raise ConfigError(f"slots_per_queue takes 1 to {MAX_SLOTS}, got {self.slots_per_queue}")
        if not 1 <= self.batch_size <= MAX_BATCH_SIZE:
            raise ConfigError(f"batch_size takes 1 to {MAX_BATCH_SIZE}, got {self.batch_size}")
        if not 0.01 <= self.poll_seconds <= 3600:
            raise ConfigError(f"poll_seconds takes 0.01 to 3600, got {self.poll_seconds}")
        if not 0 <= self.drain_seconds <= 86_400:
            raise ConfigError(f"drain_seconds takes 0 to 86400, got {self.drain_seconds}")
        check_schema(self.schema)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `extra`, for a process that it starts."""
    return {**os.environ, **extra}
