"""Startup: the checks of a relay's database before it works: server, durability and tables, once it can connect."""

import logging
import threading
from collections.abc import Callable
from uuid import UUID

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import greenlet_spawn

from outboxq.admin import schedule_owners
from outboxq.config import RelayConfig
from outboxq.database.driver import run_script
from outboxq.database.engines import Engines
from outboxq.database.errors import (
    QUERY_CANCELED,
    NoConnection,
    describe_error,
    is_database_unavailable,
    is_transient,
    opening,
    sqlstate_of,
)
from outboxq.emitter import Emitter
from outboxq.errors import ConfigError, SchemaError
from outboxq.events import DatabaseLost
from outboxq.execution.keep import Keeper
from outboxq.handlers.resolved import Registry
from outboxq.migrations.server import check_server, refusing_bytes
from outboxq.relay.event_loop import LoopThread
from outboxq.relay.login import Login
from outboxq.statements.citus import citus_state
from outboxq.statements.done import may_write
from outboxq.statements.relays import kinds_at_relays, may_read_relays
from outboxq.statements.server import missing_installation, schema_version, synchronous_commit
from outboxq.tables import LATEST_VERSION, NEEDED_VERSION, OWNERS_VERSION, SCHEMA

logger = logging.getLogger("outboxq.relay")

_INSUFFICIENT_PRIVILEGE = "42501"

_FIRST_PAUSE_SECONDS, _PAUSE_CAP_SECONDS = 0.5, 10.0


def wait_for_database(
    engines: Engines,
    config: RelayConfig,
    loop: LoopThread,
    emit: Emitter,
    stopping: threading.Event,
    then: Callable[[Connection], None],
    login: Login,
) -> None:
    """Check the database; while it is down, emit `DatabaseLost` and try again, until the relay stops.

    Args:
        then: Called with the connection after the check.

    Raises:
        SchemaError: the tables are missing or too old.
        ConfigError: the server, or a setting of it, does not fit.
        LoginRefused: the server refuses the relay's login for too long.
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
            # A statement that was cancelled, or waited too long for a lock, may pass at the next try.
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
    """Refuse a database that the relay cannot work on.

    Raises:
        SchemaError: the tables are missing or too old.
        ConfigError: the server, or a setting of it, does not fit.
    """
    facts = check_server(connection)
    check_durability(connection, allowed=config.allow_asynchronous_commit)
    check_version(connection, config.schema)
    if facts.has_citus and not config.allow_one_phase:
        check_two_phase(connection, config.schema)


def declare_schedules(connection: Connection, schema: str, registry: Registry) -> None:
    """Store the schedules that the registry declares, and disable those that it no longer declares.

    Raises:
        ConfigError: the role may not write them.
        ScheduleOwned: another registry declares a schedule of the same name.
    """
    connection.rollback()
    mapped = connection.execution_options(isolation_level="READ COMMITTED", schema_translate_map={SCHEMA: schema})
    try:
        with mapped.begin():
            with_owners = (schema_version(mapped, schema) or 0) >= OWNERS_VERSION
            schedule_owners.declare(mapped, registry.schedules, with_owners=with_owners)
        if with_owners:
            # After a COMMIT: relays that start at the same time lock each set of rows in one order.
            with mapped.begin():
                _disable_gone(mapped, schema, registry)
    except DBAPIError as error:
        if sqlstate_of(error) != _INSUFFICIENT_PRIVILEGE:
            raise
        raise ConfigError(
            "the relay's role may not write the schedules that the code declares: run what `outboxq roles --sql` prints"
        ) from error


def _disable_gone(connection: Connection, schema: str, registry: Registry) -> None:
    """Disable the schedules that the registry's owners no longer declare, and log it."""
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
    """Return True if a live relay serves the queue of a schedule, and knows its kind."""
    if not connection.execute(may_read_relays(schema)).scalar_one():
        return False
    found = connection.execute(kinds_at_relays(schema, [(gone.queue, gone.kind)]))
    return any(row.knowing for row in found)


def find_keeper(connection: Connection, schema: str, registry: Registry, relay: UUID) -> Keeper:
    """Make the keeper of finished rows: of the kinds that handlers name, unless the relay may not write the table.

    Then their jobs run all the same, and a warning is logged: jobs must not depend on their finished rows.
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
    """Refuse sessions whose COMMIT returns before it is on disk, unless `allowed`.

    Raises:
        ConfigError: `synchronous_commit` is off; the message says where and what to do.
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
    """Refuse a Citus coordinator that would commit a job and the rows of its handler one after the other.

    Raises:
        ConfigError: there are distributed tables, and no guard; the message says what to do.
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
    """Refuse tables that this version of the code cannot work on.

    Raises:
        SchemaError: the tables are missing or older; the message gives the way out.
    """
    version = schema_version(connection, schema)
    if not version:
        raise SchemaError(f"found {missing_installation(connection, schema)}")
    if version < NEEDED_VERSION:
        raise SchemaError(
            f"found outboxq tables at step {version}, and step {NEEDED_VERSION} is needed: run `outboxq migrate`, or "
            f"call `outboxq.migrations.upgrade(op, to={LATEST_VERSION})` in a revision of your Alembic history"
        )
