"""Startup: the slots of a relay, and the checks of its database (server, durability, tables) before it works."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias
from uuid import UUID

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import greenlet_spawn

from outboxq.admin import schedule_owners
from outboxq.config import MAX_SLOTS, RelayConfig, SlotGroup
from outboxq.database.driver import run_script
from outboxq.database.engines import Engines, check_capacity
from outboxq.database.errors import (
    INSUFFICIENT_PRIVILEGE,
    QUERY_CANCELED,
    NoConnection,
    describe_error,
    is_database_unavailable,
    is_refused,
    is_transient,
    opening,
    outage_reason,
    sqlstate_of,
)
from outboxq.emitter import Emitter
from outboxq.errors import ConfigError, LoginRefused, SchemaError
from outboxq.events import DatabaseLost
from outboxq.execution.keep import Keeper
from outboxq.handlers.handler import Flavour
from outboxq.handlers.options import ClaimMode
from outboxq.handlers.resolved import Registry
from outboxq.migrations.server import check_server, refusing_bytes
from outboxq.relay.event_loop import LoopThread
from outboxq.statements.citus import citus_state
from outboxq.statements.done import may_write
from outboxq.statements.relays import kinds_at_relays, may_read_relays
from outboxq.statements.server import missing_installation, schema_version, synchronous_commit
from outboxq.tables import LATEST_VERSION, NEEDED_VERSION, OWNERS_VERSION, SCHEMA

logger = logging.getLogger("outboxq.relay")

FlavouredGroup: TypeAlias = tuple[SlotGroup, Flavour, ClaimMode]
# The flavour and the claim mode of a queue.
_Sort: TypeAlias = tuple[Flavour, ClaimMode]

_FIRST_PAUSE_SECONDS, _PAUSE_CAP_SECONDS = 0.5, 10.0


class Login:
    """The time since which the database has refused the relay's login, which all slots share.

    If the database refuses it for longer than `patience_seconds`, the relay ends, because the password may have changed
    and the relay's next start may have the new one.

    Args:
        patience_seconds: The longest time for which the login may be refused.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._refused_since: float | None = None

    def succeeded(self) -> None:
        """Record that a connection was opened, so that the login is not refused any more."""
        self._refused_since = None

    def failed(self, error: BaseException) -> None:
        """Record that no connection could be opened, because of `error`.

        Raises:
            LoginRefused: the server has refused the role, password or database for too long.
        """
        if not is_refused(error):
            self._refused_since = None
            return
        now = time.monotonic()
        self._refused_since = since = self._refused_since or now
        if now - since >= self._patience_seconds:
            raise LoginRefused(outage_reason(error) or type(error).__name__, now - since) from error


def wait_for_database(
    engines: Engines,
    config: RelayConfig,
    loop: LoopThread,
    emit: Emitter,
    stopping: threading.Event,
    then: Callable[[Connection], None],
    login: Login,
) -> None:
    """Connect to the database and check it; while it is down, emit `DatabaseLost` and try again, until the relay stops.

    Args:
        then: Called with the connection after the check.

    Raises:
        SchemaError: the tables are missing or too old.
        ConfigError: the server, or one of its settings, is unsuitable.
        LoginRefused: the server has refused the relay's login for too long.
    """
    pause_seconds = _FIRST_PAUSE_SECONDS
    while not stopping.is_set():
        try:
            if engines.sync is not None:
                _connect_and_check(engines.sync, config, then)
            else:
                assert engines.asynchronous is not None
                loop.call(greenlet_spawn(_connect_and_check, engines.asynchronous.sync_engine, config, then))
        except (DBAPIError, psycopg.Error, NoConnection, OSError) as error:
            login.failed(error)
            # A statement that was cancelled, or waited too long for a lock, may succeed at the next try.
            is_passing = is_database_unavailable(error) or is_transient(error) or sqlstate_of(error) == QUERY_CANCELED
            if not is_passing:
                raise
            emit(DatabaseLost(describe_error(error), pause_seconds))
            stopping.wait(pause_seconds)
            pause_seconds = min(pause_seconds * 2, _PAUSE_CAP_SECONDS)
        else:
            return


def _connect_and_check(engine: Engine, config: RelayConfig, then: Callable[[Connection], None]) -> None:
    with opening(), refusing_bytes(engine):
        opened = engine.connect()
    with opened as connection:
        check_database(connection, config)
        then(connection)


def check_database(connection: Connection, config: RelayConfig) -> None:
    """Raise an error for a database on which the relay cannot work.

    Raises:
        SchemaError: the tables are missing or too old.
        ConfigError: the server, or one of its settings, is unsuitable.
    """
    facts = check_server(connection)
    check_durability(connection, allowed=config.allow_asynchronous_commit)
    check_version(connection, config.schema)
    if facts.has_citus and not config.allow_one_phase:
        check_two_phase(connection, config.schema)


def declare_schedules(connection: Connection, schema: str, registry: Registry) -> None:
    """Write the schedules that the registry declares; disable those that it declared before and declares no longer.

    Raises:
        ConfigError: the relay's role may not write schedules.
        ScheduleOwned: another registry declares a schedule of the same name.
    """
    connection.rollback()
    mapped = connection.execution_options(isolation_level="READ COMMITTED", schema_translate_map={SCHEMA: schema})
    try:
        with mapped.begin():
            with_owners = (schema_version(mapped, schema) or 0) >= OWNERS_VERSION
            schedule_owners.declare(mapped, registry.schedules, with_owners=with_owners)
        if with_owners:
            # After a COMMIT, because relays that start at the same time lock each set of rows in one order.
            with mapped.begin():
                _disable_gone(mapped, schema, registry)
    except DBAPIError as error:
        if sqlstate_of(error) != INSUFFICIENT_PRIVILEGE:
            raise
        raise ConfigError(
            "the relay's role may not write the schedules that the code declares: run what `outboxq roles --sql` prints"
        ) from error


def _disable_gone(connection: Connection, schema: str, registry: Registry) -> None:
    """Disable the stored schedules that this registry declared before and declares no longer, and log each of them.

    A schedule that may belong to another registry is only logged.
    """
    for gone in schedule_owners.find_gone(connection, registry.schedules, registry.owners):
        is_known = gone.kind in registry.handlers or gone.queue in registry.flavours
        said: str | None = None
        if gone.owner is None:
            said = "goes on, as it is not known whose it was: see `outboxq schedules remove`" if is_known else None
        elif not is_known and _is_at_relays(connection, schema, gone):
            said = (
                "goes on, as a relay of another registry knows its kind: if that is another application, give each "
                "registry a name of its own, Jobs(name=...)"
            )
        elif schedule_owners.disable(connection, gone):
            said = "is disabled: see `outboxq schedules list`"
        if said is not None:
            logger.warning(
                "schedule %r of kind %r is no longer declared in the code, and %s",
                gone.name,
                gone.kind,
                said,
                extra={"outboxq_schedule": gone.name},
            )


def _is_at_relays(connection: Connection, schema: str, gone: schedule_owners.Gone) -> bool:
    """Return True if a live relay serves a schedule's queue and has a handler for its kind.

    Then the schedule may belong to that relay's application.
    """
    if not connection.execute(may_read_relays(schema)).scalar_one():
        return False
    found = connection.execute(kinds_at_relays(schema, [(gone.queue, gone.kind)]))
    return any(row.knowing for row in found)


def find_keeper(connection: Connection, schema: str, registry: Registry, relay: UUID) -> Keeper:
    """Make the object that writes rows of finished jobs, for kinds with `keep=`.

    If the relay may not write the table, the object keeps nothing and a warning is logged: jobs must run all the same.
    """
    keeper = Keeper.of(registry, relay)
    if not keeper.kinds or run_script(connection, may_write(schema))[0][0]:
        return keeper
    logger.warning(
        "finished jobs are not kept: the table done_job is missing, or the role may not write it: run `outboxq "
        "migrate`, and what `outboxq roles --sql` prints, then start the relay again",
        extra={"outboxq_kinds": sorted(keeper.kinds)},
    )
    keeper.keep_nothing()
    return keeper


def check_durability(connection: Connection, *, allowed: bool) -> None:
    """Raise an error if the relay's COMMITs return before they are on disk, unless that is `allowed`.

    Raises:
        ConfigError: `synchronous_commit` is off; the message says in which place, and what to do.
    """
    if allowed:
        return
    setting, source = synchronous_commit(connection)
    if setting == "off":
        raise ConfigError(
            f"synchronous_commit is off on the relay's sessions (set by: {source}), so a crash of the server could "
            "undo jobs that were reported as done: ALTER ROLE <the relay's role> SET synchronous_commit = on, or "
            "allow it by name with --allow-asynchronous-commit (RelayConfig(allow_asynchronous_commit=True))"
        )


def check_two_phase(connection: Connection, schema: str) -> None:
    """Raise an error if Citus would not commit a job and the rows of its handler together, but one after the other.

    Raises:
        ConfigError: there are distributed tables, and tables of outboxq lack the trigger for two-phase commits; the
            message says what to do.
    """
    state = connection.execute(citus_state(schema)).one()
    if state.has_distributed and state.unguarded:
        raise ConfigError(
            "this database has tables that Citus distributes, and commits their rows before those of outboxq "
            f"({', '.join(state.unguarded)}), so a crash in between could lose jobs, and run others twice: run "
            "`outboxq migrate`, which has both committed in two phases, or take that risk by name with "
            "--allow-one-phase (RelayConfig(allow_one_phase=True))"
        )


def check_version(connection: Connection, schema: str) -> None:
    """Raise a `SchemaError` for tables on which this version of the code cannot work."""
    version = schema_version(connection, schema)
    if not version:
        raise SchemaError(f"found {missing_installation(connection, schema)}")
    if version < NEEDED_VERSION:
        raise SchemaError(
            f"found outboxq tables at step {version}, and step {NEEDED_VERSION} is needed: run `outboxq migrate`, or "
            f"call `outboxq.migrations.upgrade(op, to={LATEST_VERSION})` in a revision of your Alembic history"
        )


def resolve_groups(config: RelayConfig, registry: Registry) -> list[FlavouredGroup]:
    """Return the groups of slots, each with its flavour and claim mode; `*` becomes all queues that no group names.

    Raises:
        ConfigError: a queue has no handlers, or is in two groups; a group has both flavours, both claim modes or too
            many slots; or lease mode has a `batch_size`.
    """
    groups = _find_groups(config, registry)
    for group, flavour, claim in groups:
        if group.slots > MAX_SLOTS and (flavour, claim) != ("async", "lease"):
            raise ConfigError(
                f"queue {','.join(group.queues)!r} takes 1 to {MAX_SLOTS} slots, got {group.slots}: only async "
                'handlers in lease mode (claim="lease") wait without a thread or a connection'
            )
    if config.batch_size > 1 and all(claim == "lease" for *_, claim in groups):
        raise ConfigError(
            f"batch_size={config.batch_size} is for queues in transaction mode, and this relay has none: in lease mode "
            "each job has a slot of its own, and one claim takes jobs for many free slots. Leave batch_size out, and "
            f"give the queues more slots instead, such as {groups[0][0].queues[0]}={config.batch_size}"
        )
    return groups


def _find_groups(config: RelayConfig, registry: Registry) -> list[FlavouredGroup]:
    if not config.groups:
        flavours: list[tuple[str, Flavour]] = sorted(registry.flavours.items())
        return [
            (SlotGroup((name,), config.slots_per_queue), flavour, registry.claims[name]) for name, flavour in flavours
        ]
    named = [name for group in config.groups for name in group.queues]
    for name in dict.fromkeys(named):
        if name != "*" and name not in registry.flavours:
            known = ", ".join(sorted(registry.flavours))
            raise ConfigError(f"queue {name!r} has no handlers in this registry (queues with handlers: {known})")
        if named.count(name) > 1:
            raise ConfigError(f"queue {name!r} is named by two groups: give each queue to one")
    unnamed = tuple(sorted(registry.flavours.keys() - set(named)))
    return [each for group in config.groups for each in _by_sort(group, unnamed, registry)]


def _by_sort(group: SlotGroup, unnamed: tuple[str, ...], registry: Registry) -> list[FlavouredGroup]:
    names = tuple(name for given in group.queues for name in (unnamed if given == "*" else (given,)))
    sorts: dict[str, _Sort] = {name: (registry.flavours[name], registry.claims[name]) for name in names}
    if "*" not in group.queues:
        if len({flavour for flavour, _ in sorts.values()}) > 1:
            raise ConfigError(
                f"the queues {', '.join(names)} have sync and async handlers, which cannot share slots: "
                "give each flavour a group of its own"
            )
        if len(set(sorts.values())) > 1:
            raise ConfigError(
                f"the queues {', '.join(names)} are in transaction mode and in lease mode, which cannot share slots: "
                "give each mode a group of its own"
            )
    in_turns = group.in_turns.union(unnamed if "*" in group.queues else ())
    found: list[FlavouredGroup] = []
    for flavour, claim in dict.fromkeys(sorts.values()):
        own = tuple(name for name in names if sorts[name] == (flavour, claim))
        found.append((SlotGroup(own, group.slots, in_turns=in_turns.intersection(own)), flavour, claim))
    return found


def connections_of(group: SlotGroup, claim: ClaimMode, config: RelayConfig) -> int:
    """Return the most connections that the slots of a group have at a time."""
    return group.slots if claim == "transaction" else 1 + config.call_connections_of(group.slots)


def check_engines(groups: list[FlavouredGroup], engines: Engines, config: RelayConfig) -> None:
    """Raise an error for slots that have no engine, or an engine whose pool has too few connections.

    Raises:
        ConfigError: the message names the queues or the engine.
    """
    for flavour, engine, hint in (
        ("sync", engines.sync, "give Relay a sync Engine or a URL, and the AsyncEngine as async_engine="),
        ("async", engines.asynchronous, "give Relay async_engine=..., or a URL"),
    ):
        own = [group for group in groups if group[1] == flavour]
        if own and engine is None:
            names = ", ".join(name for group, *_ in own for name in group.queues)
            raise ConfigError(f"the queues {names} have {flavour} handlers, but there is no {flavour} engine: {hint}")
        if own and engine is not None:
            check_capacity(engine, sum(connections_of(group, claim, config) for group, _, claim in own) + 1)
