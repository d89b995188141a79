"""Settings: frozen, and checked when they are made. No other module reads the environment."""

import os
import pwd
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy import URL

from outboxq.database.urls import host_names, psycopg_url
from outboxq.errors import ArgumentError, ConfigError
from outboxq.names import check_name, named_fields

DATABASE_URL_VARIABLE = "OUTBOXQ_DATABASE_URL"
LISTEN_URL_VARIABLE = "OUTBOXQ_LISTEN_URL"
READ_URL_VARIABLE = "OUTBOXQ_READ_URL"
TEST_DATABASE_URL_VARIABLE = "OUTBOXQ_TEST_DATABASE_URL"
PG_BIN_VARIABLE = "OUTBOXQ_PG_BIN"
PARENT_PIPE_VARIABLE = "OUTBOXQ_PARENT_PIPE"
HEARTBEAT_PIPE_VARIABLE = "OUTBOXQ_HEARTBEAT_PIPE"
METRICS_SOCKET_VARIABLE = "OUTBOXQ_METRICS_SOCKET"
DATABASE_LABEL_VARIABLE = "OUTBOXQ_DATABASE_LABEL"
ACTOR_VARIABLE = "OUTBOXQ_ACTOR"
NO_SCHEDULES_VARIABLE = "OUTBOXQ_NO_SCHEDULES"
DASHBOARD_TOKEN_VARIABLE = "OUTBOXQ_DASHBOARD_TOKEN"  # noqa: S105  # its name

# The time for which messages and effects are remembered.
DEFAULT_RETENTION = timedelta(days=30)
MIN_RETENTION, MAX_RETENTION = timedelta(seconds=1), timedelta(days=3_653)
MAX_SLOTS = 200
# The most slots of async handlers under a lease, which hold no connection while they wait.
MAX_ASYNC_CALLS = 2_000
MAX_BATCH_SIZE = 1_000


def database_url(given: str | None = None) -> URL:
    """Return the psycopg URL of the one database to work on: `given`, or else `OUTBOXQ_DATABASE_URL`.

    Raises:
        ConfigError: no database is named, or several are, or the URL is not a PostgreSQL URL.
    """
    found = database_urls([given] if given else None)
    if len(found) > 1:
        raise ConfigError(
            f"{DATABASE_URL_VARIABLE} names {len(found)} databases ({', '.join(found)}), and this works on one: pass "
            "--database-url"
        )
    return next(iter(found.values()))


def database_urls(given: Sequence[str] | None = None) -> dict[str, URL]:
    """Return the databases to work on: `given`, or else the URLs in `OUTBOXQ_DATABASE_URL`, separated by spaces.

    Returns:
        The psycopg URL of each database, by the database's name. If two databases have the same name, the host is put
        before it.

    Raises:
        ConfigError: no database is named, a URL is not a PostgreSQL URL, or a database is named twice. The message
            contains no URL.
    """
    texts = given or _several(os.environ.get(DATABASE_URL_VARIABLE, ""))
    if not texts:
        raise ConfigError(
            "no database is named: pass --database-url, or set "
            f"{DATABASE_URL_VARIABLE}=postgresql://user:password@host/database"
        )
    urls = _psycopg_urls(texts)
    short = [url.database or "postgres" for url in urls]
    hosts = [f"{','.join(host_names(url)) or 'localhost'}:{url.port or url.query.get('port') or 5432}" for url in urls]
    names = [name if short.count(name) == 1 else f"{host}/{name}" for name, host in zip(short, hosts, strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the database {name} is named twice: name each database once")
    return dict(zip(names, urls, strict=True))


def listen_url(given: str | None = None) -> str | None:
    """Return the URL for LISTEN, which bypasses a pooler: `given`, or else `OUTBOXQ_LISTEN_URL`; None without either.

    Raises:
        ConfigError: the URL is not a PostgreSQL URL.
    """
    url = given or os.environ.get(LISTEN_URL_VARIABLE)
    return psycopg_url(url).render_as_string(hide_password=False) if url else None


def _several(text: str) -> list[str]:
    # The name of a database may contain a space, so a space separates two URLs only before another URL.
    return [url for url in re.split(r"\s+(?=[A-Za-z][A-Za-z0-9+.-]*://)", text.strip()) if url]


def _psycopg_urls(texts: Sequence[str]) -> list[URL]:
    urls: list[URL] = []
    for number, text in enumerate(texts, 1):
        try:
            urls.append(psycopg_url(text))
        except ConfigError as error:
            if len(texts) == 1:
                raise
            raise ConfigError(f"URL {number} of {len(texts)}: {error}") from error
        # Otherwise the second URL would be taken for a part of the database's name, which messages repeat in full.
        if re.search(r"://[^/?]*[/?].*\s.*[:@]", text, re.DOTALL):
            raise ConfigError(
                f"the text after URL {number} and a space is no PostgreSQL URL: each begins with "
                "postgresql://, and spaces separate several"
            )
    return urls


def listen_urls(given: Sequence[str] | None, databases: int) -> list[str | None]:
    """Return the URL for LISTEN, which bypasses a pooler, of each of so many `databases`, in their order.

    The URLs are `given`, or else those in `OUTBOXQ_LISTEN_URL`; if neither is set, each item is None.

    Raises:
        ConfigError: the number of URLs is not `databases`, or one is not a PostgreSQL URL.
    """
    texts = given or _several(os.environ.get(LISTEN_URL_VARIABLE, ""))
    if texts and len(texts) != databases:
        raise ConfigError(
            f"{databases} databases take as many URLs to listen on, in the same order, or none, got {len(texts)}"
        )
    return [listen_url(text) for text in texts] or [None] * databases


def read_urls(given: Sequence[str] | None, databases: Sequence[str], *, by_environment: bool) -> dict[str, URL]:
    """Return the URL of each database's read replica, by the database's name: `given`, or else `OUTBOXQ_READ_URL`.

    The mapping is empty if neither is set. If a URL names several hosts, a standby is preferred, unless the URL says
    otherwise.

    Args:
        by_environment: True if `OUTBOXQ_DATABASE_URL` names the databases; if they are given otherwise,
            `OUTBOXQ_READ_URL` is ignored.

    Raises:
        ConfigError: the numbers of URLs and databases differ, or a URL is not a PostgreSQL URL.
    """
    texts = given or (_several(os.environ.get(READ_URL_VARIABLE, "")) if by_environment else [])
    if texts and len(texts) != len(databases):
        raise ConfigError(
            f"{len(databases)} databases take as many URLs to read at, in the same order, or none, got {len(texts)}"
        )
    return {
        name: url.update_query_dict({"target_session_attrs": "prefer-standby", **url.query})
        if len(host_names(url)) > 1
        else url
        for name, url in zip(databases, _psycopg_urls(texts), strict=False)
    }


def database_label() -> str | None:
    """Return the database's name for this relay's log lines; None unless a supervisor of several databases set it."""
    return os.environ.get(DATABASE_LABEL_VARIABLE) or None


def test_database_url() -> str | None:
    """Return the URL of the server that tests are to use; None if `OUTBOXQ_TEST_DATABASE_URL` is not set."""
    return os.environ.get(TEST_DATABASE_URL_VARIABLE) or None


def local_binaries() -> str | None:
    """Return the directory with `postgres` and `initdb` that tests are to use, if one is set."""
    return os.environ.get(PG_BIN_VARIABLE) or None


def actor_name() -> str:
    """Return the name of the person who runs a command, for the audit: `OUTBOXQ_ACTOR`, else the system's user."""
    given = os.environ.get(ACTOR_VARIABLE)
    if given:
        return given
    user = os.geteuid()
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"uid {user}"


def no_schedules() -> bool:
    """Return True if relays are to store no schedules: `OUTBOXQ_NO_SCHEDULES` is set, and not to 0."""
    return os.environ.get(NO_SCHEDULES_VARIABLE, "0") not in ("", "0")


def dashboard_token() -> str | None:
    """Return the token that logs in to the dashboard, if one is set."""
    return os.environ.get(DASHBOARD_TOKEN_VARIABLE) or None


def parent_pipe() -> int | None:
    """Return the descriptor of the pipe whose end of file stops a supervised relay; None without a supervisor.

    Only the first call returns it.
    """
    return _inherited_pipe(PARENT_PIPE_VARIABLE)


def heartbeat_pipe() -> int | None:
    """Return the descriptor of the pipe for a supervised relay's heartbeats; None if its supervisor wants none.

    Only the first call returns it.
    """
    return _inherited_pipe(HEARTBEAT_PIPE_VARIABLE)


def metrics_socket() -> int | None:
    """Return the descriptor of the socket by which a supervised relay sends its metrics; None if they are not wanted.

    Only the first call returns it.
    """
    return _inherited_pipe(METRICS_SOCKET_VARIABLE)


def _inherited_pipe(variable: str) -> int | None:
    # Removed from the environment: a handler's child processes inherit neither the pipe nor its number.
    given = os.environ.pop(variable, "")
    try:
        pipe = int(given)
        os.set_inheritable(pipe, False)
    except (ValueError, OSError):
        return None
    return pipe


def check_retention(retention: timedelta) -> timedelta:
    """Return the time for which keys are remembered, after a check that it is one second to ten years.

    Raises:
        ConfigError: not a timedelta, under a second, or over ten years.
    """
    if not isinstance(retention, timedelta) or not MIN_RETENTION <= retention <= MAX_RETENTION:
        given = retention if isinstance(retention, timedelta) else type(retention).__name__
        raise ConfigError(f"retention is a timedelta from 1 second to 10 years, got {given}")
    return retention


def check_schema(schema: str) -> str:
    """Return the name of a schema, after a check that it can also be part of the names of locks and NOTIFY channels.

    Raises:
        ConfigError: the name is invalid, over 48 bytes, or begins with `pg_`.
    """
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
    """A number of a relay's slots that serve the same queues; each slot runs one batch of jobs at a time.

    A slot claims from the first of its queues that has a job.

    `queues` is ordered by precedence; `*` means every queue of the registry that no group names.

    Args:
        in_turns: The queues of the group that take turns instead of having precedence over one another. The queues that
            `*` means always take turns.
    """

    queues: tuple[str, ...]
    slots: int = 1
    in_turns: frozenset[str] = field(default=frozenset(), kw_only=True)

    def __post_init__(self) -> None:
        given: object = self.queues
        if isinstance(given, str):
            raise ConfigError(f"queues takes a tuple of names, got the text: SlotGroup(({given!r},))")
        if not self.queues:
            raise ConfigError("a group of slots names at least one queue")
        if len(set(self.queues)) != len(self.queues):
            raise ConfigError(f"a queue is named twice in {', '.join(self.queues)!r}")
        if not self.in_turns <= set(self.queues):
            strangers = ", ".join(sorted(self.in_turns - set(self.queues)))
            raise ConfigError(f"in_turns names queues that are not in the group: {strangers}")
        for name in self.queues:
            if name != "*":
                try:
                    check_name("queue", name)
                except ArgumentError as error:
                    raise ConfigError(str(error)) from error
        if not 1 <= self.slots <= MAX_ASYNC_CALLS:
            raise ConfigError(
                f"queue {','.join(self.queues)!r} takes 1 to {MAX_SLOTS} slots, and up to {MAX_ASYNC_CALLS} for async "
                f"handlers in lease mode, got {self.slots}"
            )

    @classmethod
    def parse(cls, text: str) -> "SlotGroup":
        """Read `accounts=4`, `urgent,normal=2` or `*=2`; without a number, one slot.

        Raises:
            ConfigError: the text has another form.
        """
        names, equals, count = text.partition("=")
        if equals and not count.isdecimal():
            raise ConfigError(f"--queue takes NAMES=SLOTS, for example accounts=4 or urgent,normal=2, got {text!r}")
        return cls(tuple(name.strip() for name in names.split(",")), int(count) if equals else 1)


_CALL_CONNECTIONS = 20
_RANGES: Mapping[str, tuple[float, float]] = {
    "slots_per_queue": (1, MAX_ASYNC_CALLS),
    "batch_size": (1, MAX_BATCH_SIZE),
    "poll_seconds": (0.01, 3600),
    "drain_seconds": (0, 86_400),
    "lease_seconds": (1, 3600),
    "effect_lease_seconds": (0.5, 3600),
    "max_crashes": (1, 1_000),
}


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """The settings of a relay. Every time is in seconds.

    Args:
        groups: The slots and the queues that they serve; empty means `slots_per_queue` slots for every queue of the
            registry.
        slots_per_queue: Jobs of one queue that run at the same time, if `groups` is empty; 1 to 200, and up to 2000 for
            async handlers in lease mode.
        call_connections: The connections that the calls of a group in lease mode share: a call has one only from its
            session's first use to its COMMIT. By default 20, or as many as the group has slots if that is fewer.
        batch_size: Jobs that a slot claims into one transaction, 1 to 1000. More is faster for tiny handlers, and keeps
            the row locks of all of them until the batch commits. Not for lease mode, in which each job has a slot of
            its own.
        poll_seconds: The longest pause between two polls of an empty queue, by all slots together; the pauses grow from
            10 ms to this value. A sleeping relay is also woken by NOTIFY.
        drain_seconds: How long a stopping relay waits for its handlers before it rolls them back.
        lease_seconds: How long after its last sign of life a relay keeps its leases, 1 to 3600: on jobs in lease mode,
            and on suspects. Shorter means that other relays take over sooner, longer that a paused relay may still
            complete its jobs.
        heartbeat_seconds: How often the relay extends its leases and searches for expired ones; by default a sixth of
            `lease_seconds`, and at most a third.
        effect_lease_seconds: How long the lock on a call made by `ctx.once` lasts after its caller's last sign of life,
            0.5 to 3600. After that another run may take over. A call that is under way keeps the value that it began
            with.
        max_crashes: How often a job that runs in a transaction of its own may crash its relay, or lose its connection,
            before it becomes a dead letter.
        prune_seconds: The longest pause between two searches for messages and effects whose retention has ended, 1 to
            86400; 0 is never. A drain searches once, at its end.
        stats_seconds: The longest pause between two additions to the history, 1 to 3600; if the relay is killed, the
            outcomes since its last addition are missing there. 0 is never; the relay is still listed.
        reindex: Rebuild bloated indexes of the table `job` (REINDEX CONCURRENTLY), every ten minutes at the most. Only
            a relay whose role owns the tables does this; never through a pooler, and not in a drain.
        listen: LISTEN for new jobs; if False, the relay polls. With a transaction pooler, which drops LISTEN silently,
            turn it off or give `listen_url`.
        listen_url: A direct URL for LISTEN, if the relay's own URL leads to a transaction pooler.
        schema: The PostgreSQL schema that the tables were migrated into.
        declare_schedules: When the relay starts, store the schedules that the registry declares, and disable those that
            it no longer declares. If False, stored schedules still fire.
        allow_asynchronous_commit: Work although `synchronous_commit` is off on the relay's sessions: a crash of the
            server may then undo a job just reported as done, with its rows, and the job runs again.
        allow_one_phase: Work although tables that Citus distributes are committed before outboxq's: a crash in between
            loses jobs whose rows exist, and runs others twice.
    """

    groups: tuple[SlotGroup, ...] = field(default=())
    slots_per_queue: int = 2
    call_connections: int | None = None
    batch_size: int = 1
    poll_seconds: float = 1.0
    drain_seconds: float = 30.0
    lease_seconds: float = 30.0
    heartbeat_seconds: float | None = None
    effect_lease_seconds: float = 30.0
    max_crashes: int = 3
    prune_seconds: float = 60.0
    stats_seconds: float = 15.0
    reindex: bool = True
    listen: bool = True
    listen_url: str | None = None
    schema: str = "outboxq"
    declare_schedules: bool = True
    allow_asynchronous_commit: bool = False
    allow_one_phase: bool = False

    def __post_init__(self) -> None:
        self._check_groups()
        for name, (low, high) in _RANGES.items():
            given = getattr(self, name)
            if not isinstance(given, int | float) or not low <= given <= high:
                raise ConfigError(f"{name} takes {low} to {high}, got {given!r}")
        given = self.call_connections
        if given is not None and not (isinstance(given, int) and 1 <= given <= MAX_SLOTS):
            raise ConfigError(f"call_connections takes 1 to {MAX_SLOTS}, or None for the default, got {given!r}")
        if not 0.05 <= self.beat_seconds <= self.lease_seconds / 3:
            raise ConfigError(
                f"heartbeat_seconds takes 0.05 to a third of lease_seconds={self.lease_seconds:g}, so that one late "
                f"beat costs no lease, got {self.beat_seconds:g}: raise lease_seconds, or leave heartbeat_seconds out"
            )
        for name, most in (("prune_seconds", 86_400), ("stats_seconds", 3_600)):
            given = getattr(self, name)
            if not isinstance(given, int | float) or (given != 0 and not 1 <= given <= most):
                raise ConfigError(f"{name} takes 1 to {most}, or 0 for never, got {given!r}")
        check_schema(self.schema)

    def _check_groups(self) -> None:
        given: object = self.groups
        if isinstance(given, str | SlotGroup) or not isinstance(given, Iterable):
            raise ConfigError(f'groups takes a tuple, such as (SlotGroup(("accounts",), 4),), got {given!r}')
        for each in given:
            if isinstance(each, str):
                raise ConfigError(f"groups takes SlotGroups, got the text {each!r}: SlotGroup.parse({each!r})")
            if not isinstance(each, SlotGroup):
                raise ConfigError(f'groups takes SlotGroups, such as SlotGroup(("accounts",), 4), got {each!r}')

    def call_connections_of(self, slots: int) -> int:
        """Return the number of connections that the calls in a group of `slots` slots share."""
        return min(slots, _CALL_CONNECTIONS if self.call_connections is None else self.call_connections)

    @property
    def beat_seconds(self) -> float:
        """The seconds between two heartbeats: each extends the relay's leases, and searches for expired ones."""
        return self.lease_seconds / 6 if self.heartbeat_seconds is None else self.heartbeat_seconds


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of this process's environment with `extra`, for a child process."""
    return {**os.environ, **extra}
