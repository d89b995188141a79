"""The functions of the schema: whether they are there, and as the migrations make them for it.

A function names its schema in its text, which ALTER SCHEMA ... RENAME leaves as it was.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from outboxq.doctor.findings import CheckContext, Finding
from outboxq.migrations import LATEST, upgrade_sql
from outboxq.statements.doctor import tables as statements
from outboxq.statements.render import quote_identifier


@dataclass(frozen=True, slots=True)
class Made:
    """A function as the migrations leave it.

    Args:
        body: What PostgreSQL keeps of its text, in `pg_proc.prosrc`.
        sql: Statements that make it so again, and leave the rights on it as they are.
    """

    body: str
    sql: str


def made_by_migrations(schema: str, step: int = LATEST) -> dict[str, Made]:
    """Each function as the steps up to this one leave it in a schema, by name: read from what the steps send."""
    prefix = re.escape(quote_identifier(schema))
    made = re.compile(
        rf"CREATE (?:OR REPLACE )?FUNCTION {prefix}\.(?P<made>\w+)\(.*? AS \$function\$(?P<body>.*?)\$function\$;"
        rf"|ALTER FUNCTION {prefix}\.(?P<altered>\w+)\b[^;]*;",
        re.DOTALL,
    )
    found: dict[str, Made] = {}
    for change in made.finditer("\n".join(upgrade_sql(number, schema) for number in range(1, step + 1))):
        if change["made"] is not None:
            again = change[0].replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)
            found[change["made"]] = Made(change["body"], again)
        else:
            before = found[change["altered"]]
            found[change["altered"]] = replace(before, sql=f"{before.sql}\n{change[0]}")
    return found


def find_different_functions(context: CheckContext) -> Iterator[Finding]:
    """Functions that are not there, or that say something else than the migrations wrote for this schema."""
    rows = context.rows(statements.functions(context.schema))
    for name, made in sorted(made_by_migrations(context.schema).items()):
        bodies = [row.body for row in rows if row.name == name]
        if not bodies:
            yield Finding(
                "function-missing",
                "problem",
                f"function {name!r} is missing",
                {"function": name, "sql": made.sql},
                "Make it again, with the SQL in `detail` (--json), as the owner of the tables; then run what `outboxq "
                "roles --sql` prints.",
            )
        elif made.body not in bodies:
            yield Finding(
                "function-different",
                "problem",
                f"the text of function {name!r} is not the one that the migrations make for schema "
                f"{context.schema!r}: a schema that was renamed keeps its old name there",
                {"function": name, "sql": made.sql},
                "Give the schema its old name back, or mend the function with the SQL in `detail` (--json), as the "
                "owner of the tables.",
            )
