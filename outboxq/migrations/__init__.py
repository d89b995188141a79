"""Installing and changing the tables: frozen, numbered steps that users call from Alembic revisions of their own.

Each step is one `DO` block that reads the version marker in the database and does nothing if the step already ran. So
the same SQL serves online and offline (`--sql`), several revisions may name a step, and two deployments that migrate at
the same time wait for each other.

    from outboxq import migrations

    def upgrade() -> None:
        migrations.upgrade(op, to=15)

    def downgrade() -> None:
        migrations.downgrade(op, to=0)
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from sqlalchemy import TextClause, text

from outboxq.config import check_schema
from outboxq.errors import ConfigError
from outboxq.migrations import (
    citus,
    step_01_tables,
    step_02_functions,
    step_03_leases,
    step_04_inbox,
    step_05_upkeep,
    step_06_headers,
    step_07_checks,
    step_08_validated,
    step_09_flow,
    step_10_flow_validated,
    step_11_history,
    step_12_indexes,
    step_13_ranges,
    step_14_ranges_validated,
    step_15_owners,
)
from outboxq.migrations.losses import LOCK_ALL, check_discard, guard_of, guard_of_all
from outboxq.migrations.refusals import refusals_in_short
from outboxq.statements.render import quote_identifier, quote_literal
from outboxq.statements.server import ENCODING, OLDEST_MAJOR

# No percent signs in SQL: Alembic doubles them offline, unless its environment sets paramstyle="named".
STEPS: tuple[tuple[str, str], ...] = (
    (step_01_tables.UP, step_01_tables.DOWN),
    (step_02_functions.UP, step_02_functions.DOWN),
    (step_03_leases.UP, step_03_leases.DOWN),
    (step_04_inbox.UP, step_04_inbox.DOWN),
    (step_05_upkeep.UP, step_05_upkeep.DOWN),
    (step_06_headers.UP, step_06_headers.DOWN),
    (step_07_checks.UP, step_07_checks.DOWN),
    (step_08_validated.UP, step_08_validated.DOWN),
    (step_09_flow.UP, step_09_flow.DOWN),
    (step_10_flow_validated.UP, step_10_flow_validated.DOWN),
    (step_11_history.UP, step_11_history.DOWN),
    (step_12_indexes.UP, step_12_indexes.DOWN),
    (step_13_ranges.UP, step_13_ranges.DOWN),
    (step_14_ranges_validated.UP, step_14_ranges_validated.DOWN),
    (step_15_owners.UP, step_15_owners.DOWN),
)
LATEST = len(STEPS)
# Steps whose lock makes all other work wait; the steps after them may take long.
COMMIT_BEHIND = (7, 9, 11, 13)

_MARKER = re.compile("@([a-z_]+)@")
_DOLLAR_QUOTES = ("$outboxq$", "$function$")

# A fixed search path: otherwise a role that may create objects in a schema of the caller's search path could have its
# functions called, and stored in a check or a default for every role to call.
_DO = """\
DO $outboxq$
DECLARE
  search_path_before text := pg_catalog.current_setting('search_path');
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
<<work>>
@block@
  PERFORM pg_catalog.set_config('search_path', search_path_before, true);
END
$outboxq$"""

_UPGRADE = """\
BEGIN
  -- Two deployments that migrate at the same time: the second waits here, then finds the step done.
  PERFORM pg_advisory_xact_lock(hashtext('outboxq migrations'), hashtext(@schema_literal@));
  @prepare@
  IF (SELECT coalesce(max(step), 0) FROM @schema@.migration) < @step@ THEN
@statements@
    INSERT INTO @schema@.migration (step) VALUES (@step@);
  END IF;
END work;"""

# A separate block before the first step: an older server may not even be able to parse a step.
_CHECK_SERVER = """\
BEGIN
  IF current_setting('server_version_num')::integer < @oldest@ * 10000 THEN
    RAISE EXCEPTION USING
      ERRCODE = 'feature_not_supported',
      MESSAGE = 'outboxq needs PostgreSQL @oldest@ or later, and this server is ' || current_setting('server_version'),
      HINT = 'Upgrade the server.';
  END IF;
  IF getdatabaseencoding() <> @encoding_literal@ THEN
    RAISE EXCEPTION USING
      ERRCODE = 'feature_not_supported',
      MESSAGE = 'outboxq needs a database whose encoding is ' || @encoding_literal@ || ', and this one is '
        || getdatabaseencoding(),
      HINT = 'Make one with CREATE DATABASE ... ENCODING ' || @encoding_literal@ || ' TEMPLATE template0, and move '
        || 'into it with pg_dump.';
  END IF;
END work;"""

_PREPARE = """\
-- CREATE SCHEMA IF NOT EXISTS asks for a right on the database even where the schema is there.
  IF to_regnamespace(@schema_identifier_literal@) IS NULL THEN
    CREATE SCHEMA @schema@;
    created_schema := true;
  END IF;
  IF to_regclass(@schema_identifier_literal@ || '.migration') IS NULL THEN
    CREATE TABLE @schema@.migration (
      step integer NOT NULL PRIMARY KEY,
      applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      created_schema boolean NOT NULL DEFAULT false
    );
    INSERT INTO @schema@.migration (step, created_schema) VALUES (0, created_schema);
  END IF;
  IF to_regclass(@schema_identifier_literal@ || '.job') IS NOT NULL AND NOT EXISTS (SELECT FROM @schema@.migration) THEN
    RAISE EXCEPTION USING
      ERRCODE = 'object_not_in_prerequisite_state',
      MESSAGE = 'outboxq: schema ' || @schema_identifier_literal@ || ' has tables without the rows of its table '
        || 'migration, as pg_dump --schema-only leaves them',
      HINT = 'Restore the rows of the tables migration and deployment too, or drop the schema and migrate again.';
  END IF;"""

# Runs before the first step down, so that a refusal leaves everything unchanged, even in AUTOCOMMIT.
_CHECK_DOWNGRADE = """\
DECLARE
  newest integer;
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('outboxq migrations'), hashtext(@schema_literal@));
  IF to_regclass(@schema_identifier_literal@ || '.migration') IS NULL THEN
    EXIT work;
  END IF;
  newest := (SELECT max(step) FROM @schema@.migration);
  IF newest > @latest@ THEN
    RAISE EXCEPTION USING
      ERRCODE = 'object_not_in_prerequisite_state',
      MESSAGE = 'outboxq: schema ' || @schema_identifier_literal@ || ' is at step ' || newest
        || ', and this outboxq knows steps up to @latest@',
      HINT = 'Run the downgrade with the newer outboxq that made step ' || newest || '.';
  END IF;
  IF newest <= @target@ THEN
    EXIT work;
  END IF;
@read_committed@
  -- Nothing may be added in between the look and the drop.
@lock@
@guards@
END work;"""

_CHECK_STEP = """\
  IF newest >= {step} AND @target@ < {step} THEN
{guard}
  END IF;"""

_NEEDS_READ_COMMITTED = """\
    -- An old snapshot would not see what somebody commits while the lock is waited for.
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
      RAISE EXCEPTION USING
        ERRCODE = 'active_sql_transaction',
        MESSAGE = 'outboxq: a downgrade that may lose rows needs READ COMMITTED, this transaction is '
          || upper(current_setting('transaction_isolation')),
        HINT = 'Give the engine of the migration isolation_level="READ COMMITTED".';
    END IF;"""

_GUARD_JOBS = """\
    IF EXISTS (SELECT FROM @schema@.job) OR EXISTS (SELECT FROM @schema@.dead_job) THEN
      RAISE EXCEPTION USING
        ERRCODE = 'object_in_use',
        MESSAGE = 'outboxq: the downgrade would drop '
          || CASE WHEN EXISTS (SELECT FROM @schema@.job) THEN 'jobs' ELSE 'dead letters' END
          || ' in schema ' || @schema_identifier_literal@,
        HINT = 'Let a relay work them off, or cancel and discard them (outboxq jobs cancel, outboxq dead discard).';
    END IF;"""

# An effect without an expiry may be in progress, in doubt or unknown; expired rows only wait to be pruned. now() and
# not clock_timestamp(), which no index could serve: it is earlier, and so refuses more.
_GUARD_MEMORY = """\
    IF EXISTS (SELECT FROM @schema@.effect WHERE expires_at IS NULL) THEN
      RAISE EXCEPTION USING
        ERRCODE = 'object_in_use',
        MESSAGE = 'outboxq: the downgrade would drop effects that are under way or whose outcome nobody knows'
          || ' in schema ' || @schema_identifier_literal@,
        HINT = 'Let calls that are under way end, and resolve the others: outboxq effects list, '
          || 'outboxq effects resolve.';
    END IF;
    IF EXISTS (SELECT FROM @schema@.effect WHERE expires_at > now())
        OR EXISTS (SELECT FROM @schema@.inbox WHERE expires_at > now()) THEN
      RAISE EXCEPTION USING
        ERRCODE = 'object_in_use',
        MESSAGE = 'outboxq: the downgrade would forget '
          || CASE WHEN EXISTS (SELECT FROM @schema@.effect WHERE expires_at > now())
             THEN 'effects that were called' ELSE 'messages that were accepted' END
          || ' in schema ' || @schema_identifier_literal@,
        HINT = 'A message that comes again would be accepted again, and an effect called again. If that is meant: '
          || 'TRUNCATE ' || @schema_identifier_literal@ || '.inbox, ' || @schema_identifier_literal@ || '.effect;';
    END IF;"""

# Losses of a step's tables that cannot be discarded on the way.
GUARDS: Mapping[int, str] = {1: _GUARD_JOBS, 4: _GUARD_MEMORY}

_DOWNGRADE = """\
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('outboxq migrations'), hashtext(@schema_literal@));
  IF to_regclass(@schema_identifier_literal@ || '.migration') IS NULL THEN
    EXIT work;
  END IF;
  IF (SELECT max(step) FROM @schema@.migration) = @step@ THEN
@guard@
@statements@
    DELETE FROM @schema@.migration WHERE step = @step@;
  END IF;
END work;"""

_REMOVE = """\
DECLARE
  created boolean;
BEGIN
  IF to_regclass(@schema_identifier_literal@ || '.migration') IS NULL THEN
    EXIT work;
  END IF;
  SELECT created_schema INTO created FROM @schema@.migration WHERE step = 0;
  DROP TABLE @schema@.migration;
  -- A schema that was there before us stays, for a role that may not create it again.
  IF created THEN
    DROP SCHEMA @schema@;
  END IF;
END work;"""


class SupportsExecute(Protocol):
    """The object through which a migration sends its SQL, such as Alembic's `op`."""

    def execute(self, sqltext: TextClause, /) -> object: ...


def upgrade(op: SupportsExecute, *, to: int | None = None, schema: str = "outboxq") -> None:
    """Bring the tables up to step `to` (None: the latest), from wherever they are.

    Your revision should name its step, so that it does the same thing for ever. The step fails on a server older than
    PostgreSQL 15, and in a database whose encoding is not UTF8.

    For tables that are in use, give steps 7, 9, 11 and 13 revisions of their own, each in a separate transaction: the
    step after each of them reads whole tables, and locks are released only by a commit.

    Args:
        op: Alembic's `op`, online or offline.
        to: 1 to `LATEST`.
        schema: The PostgreSQL schema to install into; created if it is missing.

    Raises:
        ConfigError: there is no such step, or the name cannot be a schema.
        MigrationRefused: the server or the database is not supported.
    """
    last = check_step(LATEST if to is None else to, lowest=1)
    with refusals_in_short():
        op.execute(_clause(_fill(_CHECK_SERVER, schema, oldest=OLDEST_MAJOR)))
        for step in range(1, last + 1):
            op.execute(step_clause(step, schema))
        op.execute(guard_clause(schema))


def downgrade(op: SupportsExecute, *, to: int = 0, schema: str = "outboxq", discard: Collection[str] = ()) -> None:
    """Take the tables back to step `to` (0: remove them all).

    The database refuses a downgrade that would lose rows that still count, or of tables that a newer outboxq made.

    Args:
        discard: Names of data that may be lost, as a refusal gives them, such as "schedules". Jobs, dead letters, and
            remembered messages and effects cannot be named.

    Raises:
        ConfigError: there is no such step or loss, or the name cannot be a schema.
        MigrationRefused: the database refused; nothing was changed. The message says what to do.
    """
    check_step(to, lowest=0)
    given = check_discard(discard)
    with refusals_in_short():
        op.execute(_clause(check_downgrade_sql(to, schema, given)))
        for number in range(LATEST, to, -1):
            op.execute(_clause(downgrade_sql(number, schema, given)))
        if to == 0:
            op.execute(_clause(_fill(citus.REMOVE, schema)))
            op.execute(_clause(_fill(_REMOVE, schema)))


def include_name(
    name: str | None, type_: str, parent_names: Mapping[str, str | None], *, schema: str = "outboxq"
) -> bool:
    """Keep Alembic's autogenerate away from outboxq's schema: return False for its name, True for any other name.

    Pass it to `context.configure(include_name=...)` if you set `include_schemas=True`. Without `include_schemas`,
    Alembic looks at the default schema only and this is not needed. For a schema of another name pass
    `functools.partial(include_name, schema="...")`.
    """
    del parent_names
    return not (type_ == "schema" and name == schema)


def step_clause(step: int, schema: str) -> TextClause:
    """Return the SQL that upgrades the tables by one step, to step `step`, for `op.execute`."""
    return _clause(upgrade_sql(step, schema))


def guard_clause(schema: str) -> TextClause:
    """Return the SQL for `op.execute` that installs the triggers for two-phase commit on a Citus coordinator.

    On other servers it does nothing.
    """
    return _clause(_fill(citus.INSTALL, schema))


def upgrade_sql(step: int, schema: str) -> str:
    """Return the `DO` block that upgrades the tables by one step, to step `step`."""
    template = _UPGRADE
    if step == 1:
        template = template.replace("BEGIN\n", "DECLARE\n  created_schema boolean := false;\nBEGIN\n", 1)
    # Filled from the outside in, because the parts contain markers of their own.
    template = template.replace("@prepare@", _PREPARE if step == 1 else "").replace("@statements@", STEPS[step - 1][0])
    return _fill(template, schema, step=step)


def check_downgrade_sql(to: int, schema: str, discard: Collection[str] = ()) -> str:
    """Return the `DO` block that refuses a downgrade to step `to` if rows that still count would be lost.

    Send it before anything is changed. It locks all tables at once, so that the steps then change them without waiting.
    `discard`: names of data that may be lost.
    """
    guards = {step: _guard(step, discard) for step in range(1, LATEST + 1)}
    checks = [_CHECK_STEP.format(step=step, guard=guard) for step, guard in GUARDS.items()]
    # All losses in one refusal, so that its hint lists every name to discard.
    checks.append(guard_of_all(discard))
    block = _CHECK_DOWNGRADE.replace("@guards@", "\n".join(checks)).replace("@lock@", LOCK_ALL)
    block = block.replace("@read_committed@", _read_committed(step for step in guards if step > to and guards[step]))
    return _fill(block, schema, latest=LATEST, target=to)


def downgrade_sql(step: int, schema: str, discard: Collection[str] = ()) -> str:
    """Return the `DO` block that undoes one step, or refuses to if rows that still count would be lost.

    `discard`: names of data that may be lost.
    """
    guard = _guard(step, discard)
    if guard:
        guard = f"{_NEEDS_READ_COMMITTED}\n{LOCK_ALL}\n{guard}"
    template = _DOWNGRADE.replace("@guard@", guard).replace("@statements@", STEPS[step - 1][1])
    return _fill(template, schema, step=step)


def _guard(step: int, discard: Collection[str]) -> str:
    return GUARDS.get(step) or guard_of(step, discard)


def _read_committed(guarded: Iterable[int]) -> str:
    """Return SQL that requires READ COMMITTED if a step in `guarded` would be undone; empty if `guarded` is."""
    steps = ", ".join(map(str, guarded))
    return f"  IF newest >= ANY (ARRAY[{steps}]) THEN\n{_NEEDS_READ_COMMITTED}\n  END IF;" if steps else ""


def check_step(to: int, *, lowest: int) -> int:
    """Return `to` after a check that it is a migration step of this version, from `lowest` to `LATEST`.

    Raises:
        ConfigError: not one of `lowest` to `LATEST`.
    """
    if not isinstance(to, int) or isinstance(to, bool) or not lowest <= to <= LATEST:
        raise ConfigError(f"this outboxq has steps {lowest} to {LATEST}, got to={to!r}: a newer outboxq may know it")
    return to


def _fill(block: str, schema: str, **numbers: int) -> str:
    identifier = quote_identifier(check_schema(schema))
    if any(quote in schema for quote in _DOLLAR_QUOTES):
        raise ConfigError(f"the schema name may not hold {' or '.join(_DOLLAR_QUOTES)}, got {schema!r}")
    values = {
        "schema": identifier,
        "schema_literal": quote_literal(schema),
        "schema_identifier_literal": quote_literal(identifier),
        "encoding_literal": quote_literal(ENCODING),
        "channel_literal": quote_literal(f"outboxq_{schema}"),
        **{name: str(number) for name, number in numbers.items()},
    }
    # In one pass, because a schema name may look like a marker.
    return _MARKER.sub(lambda marker: values[marker[1]], _DO.replace("@block@", block))


def _clause(statement: str) -> TextClause:
    # Without the backslash, a colon in a name would begin a bound parameter.
    return text(statement.replace(":", r"\:"))
