"""`outboxq roles`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import DEFAULT_SCHEMA, AsJson, Schema, takes
from outboxq.cli.output import print_json, print_table

if TYPE_CHECKING:
    from outboxq.admin.roles import Part, Rights


def _role(option: str, purpose: str) -> Any:
    return typer.Option(option, metavar="NAME", help=purpose, show_default=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolesOptions:
    """A field per option."""

    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL that makes the roles.")] = False
    producer: Annotated[str | None, _role("--producer", "The role that enqueues.")] = None
    receiver: Annotated[
        str | None, _role("--receiver", "The role that accepts messages and calls effects outside of handlers.")
    ] = None
    relay: Annotated[str | None, _role("--relay", "The role of the relays.")] = None
    reader: Annotated[str | None, _role("--reader", "The role that only looks.")] = None
    operator: Annotated[
        str | None, _role("--operator", "The role that also cancels, retries, pauses, forgets and resolves.")
    ] = None
    as_json: AsJson = False
    schema: Schema = DEFAULT_SCHEMA


@takes(RolesOptions)
def roles(options: RolesOptions) -> None:
    """Show the least rights that each part of a system needs in the database, or print the SQL that grants them.

    Without names, it covers all parts: outboxq_producer, outboxq_receiver, outboxq_relay, outboxq_reader and
    outboxq_operator, groups that you grant to the roles which log in. With names, only those. It connects to no
    database. Run the SQL as the owner of the tables, and again after each migration: it grants what is missing. A
    producer of an earlier version could insert into every column of a job: it keeps only the columns that it needs.

    \b
    Examples:
      outboxq roles
      outboxq roles --sql | psql mydb
      outboxq roles --sql --producer web --relay worker
    """
    from outboxq.admin.roles import PARTS, default_names, roles_sql

    if options.sql and options.as_json:
        raise WrongUsage("--sql prints SQL: leave --json out")
    given: dict[Part, str | None] = {part: getattr(options, part) for part in PARTS}
    named: dict[Part, str] = {part: name for part, name in given.items() if name is not None}
    names = named or default_names()
    # Made even if it is not printed, so that a wrong name is refused either way.
    text = roles_sql(names, options.schema)
    if options.sql:
        typer.echo(text, nl=False)
    else:
        _show(names, as_json=options.as_json)


def _show(names: "dict[Part, str]", *, as_json: bool) -> None:
    from outboxq.admin.roles import RIGHTS

    if as_json:
        print_json({"roles": [_rights_as_json(part, name, RIGHTS[part]) for part, name in names.items()]})
    else:
        rows = [(name, RIGHTS[part].purpose, _rights_in_words(RIGHTS[part])) for part, name in names.items()]
        print_table(("role", "for", "rights"), rows)


def _rights_as_json(part: "Part", name: str, rights: "Rights") -> dict[str, object]:
    return {
        "part": part,
        "role": name,
        "for": rights.purpose,
        "reads_all": rights.reads_all,
        "calls_functions": rights.calls_functions,
        "tables": rights.tables,
        "inserts": rights.inserts,
    }


def _rights_in_words(rights: "Rights") -> str:
    words = ["SELECT on all tables"] if rights.reads_all else []
    words += [f"INSERT ({', '.join(columns)}) on {table}" for table, columns in rights.inserts.items()]
    words += [f"{', '.join(wanted)} on {table}" for table, wanted in rights.tables.items()]
    words += ["EXECUTE on all functions"] if rights.calls_functions else []
    return "; ".join(words)
