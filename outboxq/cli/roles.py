"""`outboxq roles`: show the database rights that each part of outboxq needs, or print SQL that grants them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import DEFAULT_SCHEMA, AsJson, Schema, takes
from outboxq.cli.output import print_json, print_wrapped

if TYPE_CHECKING:
    from outboxq.admin.roles import Part, Rights


def _role(option: str, purpose: str) -> Any:
    return typer.Option(option, metavar="NAME", help=purpose, show_default=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolesOptions:
    """The options of `outboxq roles`."""

    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL that makes the roles.")] = False
    producer: Annotated[str | None, _role("--producer", "The role that enqueues.")] = None
    unique_producer: Annotated[
        str | None, _role("--unique-producer", "The role that enqueues, also jobs with a unique key.")
    ] = None
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
    """Show the least database rights of each part, or print SQL that grants them.

    A part is a producer, a producer of unique jobs, a receiver, a relay, a reader or an operator.

    Without names, it covers all parts: outboxq_producer, outboxq_unique_producer, outboxq_receiver, outboxq_relay,
    outboxq_reader and outboxq_operator, groups that you grant to the roles which log in. With names, only those. It
    connects to no database. Run the SQL as the owner of the tables, and again after each migration: it grants what is
    missing. A producer of an earlier version could insert into every column of a job, and an operator insert into and
    update every column of the audit: they keep only the columns that they need.

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
    # The SQL is made even if it is not printed, so that a wrong name is refused either way.
    text = roles_sql(names, options.schema)
    if options.sql:
        typer.echo(text, nl=False)
    else:
        _show(names, as_json=options.as_json)


def _show(names: "dict[Part, str]", *, as_json: bool) -> None:
    from outboxq.admin.roles import RIGHTS

    if as_json:
        print_json({"roles": [_rights_as_json(part, name, RIGHTS[part]) for part, name in names.items()]})
        return
    for part, name in names.items():
        typer.echo(name)
        print_wrapped(RIGHTS[part].purpose, "  for     ", " " * 10)
        rights = rights_in_words(RIGHTS[part])
        for label, right in zip(("rights", *[""] * len(rights)), rights, strict=False):
            print_wrapped(right, f"  {label:<6}  ", " " * 10)


def _rights_as_json(part: "Part", name: str, rights: "Rights") -> dict[str, object]:
    return {
        "part": part,
        "role": name,
        "for": rights.purpose,
        "reads_all": rights.reads_all,
        "calls_functions": rights.calls_functions,
        "tables": rights.tables,
        "inserts": rights.inserts,
        "selects": rights.selects,
        "updates": rights.updates,
    }


def rights_in_words(rights: "Rights") -> list[str]:
    """Return a line for each combination of rights, such as SELECT and INSERT, with the tables that have it."""
    words = ["SELECT on all tables"] if rights.reads_all else []
    words += [f"INSERT ({', '.join(columns)}) on {table}" for table, columns in rights.inserts.items()]
    words += [f"SELECT ({', '.join(columns)}) on {table}" for table, columns in rights.selects.items()]
    words += [f"UPDATE ({', '.join(columns)}) on {table}" for table, columns in rights.updates.items()]
    tables: dict[tuple[str, ...], list[str]] = {}
    for table, wanted in rights.tables.items():
        tables.setdefault(wanted, []).append(table)
    words += [f"{', '.join(wanted)} on {', '.join(names)}" for wanted, names in tables.items()]
    words += ["EXECUTE on all functions"] if rights.calls_functions else []
    return words
