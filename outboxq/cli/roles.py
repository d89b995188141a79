"""`outboxq roles`."""

from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import DEFAULT_SCHEMA, AsJson, Schema

if TYPE_CHECKING:
    from outboxq.admin.roles import Part


def roles(
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL that makes them.")] = False,
    producer: Annotated[
        str | None, typer.Option("--producer", metavar="NAME", help="The role that enqueues.", show_default=False)
    ] = None,
    receiver: Annotated[
        str | None,
        typer.Option(
            "--receiver",
            metavar="NAME",
            help="The role that accepts messages and calls effects outside of handlers.",
            show_default=False,
        ),
    ] = None,
    relay: Annotated[
        str | None, typer.Option("--relay", metavar="NAME", help="The role of the relays.", show_default=False)
    ] = None,
    reader: Annotated[
        str | None, typer.Option("--reader", metavar="NAME", help="The role that only looks.", show_default=False)
    ] = None,
    operator: Annotated[
        str | None,
        typer.Option(
            "--operator",
            metavar="NAME",
            help="The role that also cancels, retries, pauses, forgets and resolves.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Show the least that each part of a system needs in the database, or print the SQL that grants it.

    Without names it is about all of them: outboxq_producer, outboxq_receiver, outboxq_relay, outboxq_reader and
    outboxq_operator, groups that you grant to the roles which log in. With names, only about those. No database is
    asked. Run the SQL as the owner of the tables, and again after each migration: it grants what is missing. A
    producer of an earlier version, which could insert into every column of the jobs, is left those that it needs.

    \b
    Examples:
      outboxq roles
      outboxq roles --sql | psql mydb
      outboxq roles --sql --producer web --relay worker
    """
    from outboxq.admin.roles import PARTS, default_names, roles_sql

    if sql and as_json:
        raise WrongUsage("--sql prints SQL: leave --json out")
    given = zip(PARTS, (producer, receiver, relay, reader, operator), strict=True)
    named: dict[Part, str] = {part: name for part, name in given if name is not None}
    names = named or default_names()
    # Also where it is not printed, so that a name is refused either way.
    text = roles_sql(names, schema)
    if sql:
        typer.echo(text, nl=False)
    else:
        _show(names, as_json=as_json)


def _show(names: "dict[Part, str]", *, as_json: bool) -> None:
    from outboxq.admin.roles import RIGHTS
    from outboxq.cli.output import print_json, print_table

    found = [
        {
            "part": part,
            "role": name,
            "for": RIGHTS[part].purpose,
            "reads_all": RIGHTS[part].reads_all,
            "calls_functions": RIGHTS[part].calls_functions,
            "tables": RIGHTS[part].tables,
            "inserts": RIGHTS[part].inserts,
        }
        for part, name in names.items()
    ]
    if as_json:
        print_json({"roles": found})
        return
    print_table(
        ("role", "for", "rights"),
        [(row["role"], row["for"], _rights_in_words(part)) for part, row in zip(names, found, strict=True)],
    )


def _rights_in_words(part: "Part") -> str:
    from outboxq.admin.roles import RIGHTS

    rights = RIGHTS[part]
    words = ["SELECT on all tables"] if rights.reads_all else []
    words += [f"INSERT ({', '.join(columns)}) on {table}" for table, columns in rights.inserts.items()]
    words += [f"{', '.join(wanted)} on {table}" for table, wanted in rights.tables.items()]
    words += ["EXECUTE on all functions"] if rights.calls_functions else []
    return "; ".join(words)
