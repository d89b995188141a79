"""`outboxq migrate`: install, upgrade or downgrade outboxq's tables."""

from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.errors import CommandFailed, WrongUsage
from outboxq.cli.options import DEFAULT_SCHEMA, AsJson, DatabaseUrl, Schema
from outboxq.cli.output import notice, print_json

if TYPE_CHECKING:
    from psycopg.errors import Diagnostic


def migrate(
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            metavar="STEP",
            help="The step to reach; 0 removes the tables. Without it: the latest.",
            show_default=False,
        ),
    ] = None,
    discard: Annotated[
        list[str] | None,
        typer.Option(
            "--discard",
            metavar="NAME",
            help="What a downgrade may lose, by the name that its refusal gives. May be repeated.",
            show_default=False,
        ),
    ] = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL instead; no database is asked.")] = False,
    schema: Schema = DEFAULT_SCHEMA,
    as_json: AsJson = False,
    database_url: DatabaseUrl = None,
) -> None:
    """Install outboxq's tables, or bring them up to date.

    Running it again changes nothing. --to with a lower step goes back, and is refused while that would lose what still
    counts: jobs and dead letters, messages and effects that are remembered, schedules, open batches and more. With an
    Alembic history of your own, call outboxq.migrations.upgrade(op, to=15) in a revision instead.

    \b
    Examples:
      outboxq migrate
      outboxq migrate --sql | psql mydb
    """
    from outboxq.migrations.runner import migration_sql

    if discard and to is None:
        raise WrongUsage("--discard is for a way down: give --to, the lower step to reach")
    if sql and discard:
        raise WrongUsage("--sql prints the way up, which loses nothing: leave --discard out")
    if sql and as_json:
        raise WrongUsage("--sql prints SQL: leave --json out")
    if sql:
        typer.echo(migration_sql(to=to, schema=schema))
        return
    before, after = _run(database_url, to, schema, discard or [])
    if as_json:
        print_json({"schema": schema, "before": before, "after": after})
    elif before == after:
        typer.echo(f"schema {schema!r} is at step {after} already")
    else:
        typer.echo(f"schema {schema!r} went from step {before} to step {after}")


def _run(database_url: str | None, to: int | None, schema: str, discard: list[str]) -> tuple[int, int]:
    from sqlalchemy.exc import DBAPIError

    from outboxq import config
    from outboxq.cli.database import connect
    from outboxq.database.driver import dbapi_connection
    from outboxq.database.errors import INSUFFICIENT_PRIVILEGE, sqlstate_of
    from outboxq.migrations.runner import migrate_committing

    url = config.database_url(database_url)
    config.check_schema(schema)
    with connect(url) as connection:
        dbapi_connection(connection).add_notice_handler(_tell_notice)
        try:
            return migrate_committing(connection, to=to, schema=schema, waits=_tell_of_wait, discard=discard)
        except DBAPIError as error:
            if sqlstate_of(error) != INSUFFICIENT_PRIVILEGE:
                raise
            # None of the roles of `outboxq roles` may migrate.
            said = getattr(getattr(error.orig, "diag", None), "message_primary", None)
            raise CommandFailed(
                f"the database refused: {said} (SQLSTATE {INSUFFICIENT_PRIVILEGE}). Migrate as the owner of the "
                "tables, who may also CREATE in the database if their schema is to be made"
            ) from error


def _tell_notice(diagnostic: "Diagnostic") -> None:
    notice(str(diagnostic.message_primary).removeprefix("outboxq: "))


def _tell_of_wait(holders: list[str]) -> None:
    notice(f"waiting for another migration: {'; '.join(holders) or 'it ended just now'}")
