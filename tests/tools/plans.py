"""Print the plan of each statement of `outboxq/statements/`, on tables that hold some thousand jobs."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import psycopg
from pglast import ast, parse_sql, split
from sqlalchemy import Connection, Engine, Executable, create_engine, event, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError

from outboxq import config
from outboxq.migrations.runner import migrate_committing
from outboxq.postgres import find_server
from tests.support.statements import all_statements, compiled_text

_HELP = """\
Every function of outboxq/statements/ is called with the sample arguments of tests/support/statements.py, and PostgreSQL
is asked for the plan of what it returns (EXPLAIN, which executes nothing). The server is the one that
OUTBOXQ_TEST_DATABASE_URL names, or one that is started for this.

NAME is a function (jobs.select_jobs), or a module with all its functions (jobs).

How to read a plan: `Index Scan using job_ready` walks the index in its order and stops at the limit; `Seq Scan on job`
reads the whole table; `Sort` reads all of its input before the first row comes out; `LockRows` is FOR UPDATE. Compare
it with the index and the bound that the function's docstring promises.

examples:
  python -m tests.tools.plans --list
  python -m tests.tools.plans claim.ClaimStatements wake
  python -m tests.tools.plans --jobs 100000 jobs"""

_QUERIES = (ast.SelectStmt, ast.InsertStmt, ast.UpdateStmt, ast.DeleteStmt, ast.ExecuteStmt)
# A tenth each is scheduled and leased, and a hundredth suspect; half of all jobs are in the queue of the samples.
_FILL = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, run_at, lease_owner)
SELECT gen_random_uuid(), CASE WHEN n % 2 = 0 THEN 'mail' ELSE 'post' END, 'send', '{}',
  CASE WHEN n % 100 = 0 THEN 'suspect' WHEN n % 10 = 1 THEN 'scheduled' WHEN n % 10 = 2 THEN 'leased' ELSE 'ready' END,
  clock_timestamp() + make_interval(secs => n - 100), CASE WHEN n % 10 = 2 THEN gen_random_uuid() END
FROM generate_series(1, :jobs) AS n;
INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, created_at)
SELECT gen_random_uuid(), 'mail', 'send', '{}', '{}', 0, 1, 0, '[]', 'no luck', clock_timestamp()
FROM generate_series(1, :jobs / 10) AS n;
INSERT INTO outboxq.inbox (consumer, message_id, expires_at)
SELECT 'mail', n::text, clock_timestamp() + make_interval(secs => n) FROM generate_series(1, :jobs) AS n"""


@dataclass(frozen=True)
class Plan:
    """A statement and PostgreSQL's plan of it; no plan if there can be none, as for LISTEN."""

    name: str
    statement: str
    plan: str

    def __str__(self) -> str:
        indented = "\n".join(f"  {line}" for line in self.plan.splitlines())
        return f"== {self.name}\n{self.statement.strip()}\n\n{indented}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plans that the command line asks for; 1 if no statement has such a name."""
    options = _parser().parse_args(arguments)
    names = [name for name, _ in groupby(name for name, _, _ in all_statements())]
    if unknown := [name for name in options.names if not any(_is_meant(known, [name]) for known in names)]:
        print(f"no such statement: {', '.join(unknown)} (see --list)", file=sys.stderr)
        return 1
    if options.list:
        print("\n".join(names))
        return 0
    with (
        find_server(configured_url=config.test_database_url(), binaries=config.local_binaries()) as server,
        server.create_database() as database,
    ):
        engine = create_engine(database.url)
        fill(engine, options.jobs)
        for plan in plans(engine, options.names):
            print(plan)
        engine.dispose()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.plans",
        description=__doc__,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these functions or modules; all without any")
    parser.add_argument("--jobs", type=int, default=5_000, help="how many jobs the table holds (default: 5000)")
    parser.add_argument("--list", action="store_true", help="print the names, and no plans")
    return parser


def fill(engine: Engine, jobs: int) -> None:
    """Migrate an empty database, and fill its tables."""
    with engine.connect() as connection:
        migrate_committing(connection)
        with connection.begin():
            for statement in _FILL.split(";\n"):
                connection.execute(text(statement.replace("n::text", r"n\:\:text")), {"jobs": jobs})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))


def plans(engine: Engine, names: Sequence[str] = ()) -> Iterator[Plan]:
    """The plans of these statements, or of all, each text once; nothing is executed or kept."""
    seen = set[tuple[str, str]]()
    with engine.connect() as connection:
        for name, statement, parameters in all_statements():
            key = name, compiled_text(statement)
            if _is_meant(name, names) and key not in seen:
                seen.add(key)
                yield Plan(*key, _explain(connection, statement, parameters))


def _is_meant(name: str, names: Sequence[str]) -> bool:
    return not names or any(name == given or name.startswith(f"{given}.") for given in names)


def _explain(connection: Connection, statement: Executable | str, parameters: Mapping[str, object]) -> str:
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    try:
        with connection.begin_nested() as savepoint:
            if isinstance(statement, str):
                lines = _explain_text(driver, statement)
            else:
                lines = _explain_compiled(connection, statement, parameters)
            savepoint.rollback()
    except (psycopg.Error, DBAPIError) as error:
        return f"refused: {error}"
    return "\n".join(lines) or "no plan"


def _explain_compiled(connection: Connection, statement: Executable, parameters: Mapping[str, object]) -> list[str]:
    """The plan of a statement that SQLAlchemy sends, with its parameters."""
    lines: list[str] = []

    def ask(_connection: object, _cursor: object, sql: str, given: Any, *_: object) -> tuple[str, Any]:
        return f"EXPLAIN {sql}", given

    def read(_connection: object, cursor: Any, *_: object) -> None:
        lines.extend(line for (line,) in cursor.fetchall())

    event.listen(connection, "before_cursor_execute", ask, retval=True)
    event.listen(connection, "after_cursor_execute", read)
    try:
        connection.execute(statement, parameters)
    except InvalidRequestError:
        # The plan is a text, where the statement has a number.
        if not lines:
            raise
    finally:
        event.remove(connection, "before_cursor_execute", ask)
        event.remove(connection, "after_cursor_execute", read)
    return lines


def _explain_text(driver: "psycopg.Connection[Any]", script: str) -> list[str]:
    """The plans of a script's queries. What it sets is set for them, and what it prepares is prepared."""
    lines: list[str] = []
    for statement in split(script):
        (parsed,) = parse_sql(statement)
        if isinstance(parsed.stmt, ast.VariableSetStmt | ast.PrepareStmt):
            driver.execute(statement.encode())
        if isinstance(parsed.stmt, _QUERIES):
            lines += [line for (line,) in driver.execute(f"EXPLAIN {statement}".encode())]
        if isinstance(parsed.stmt, ast.ExecuteStmt):
            driver.execute(f"DEALLOCATE {parsed.stmt.name}".encode())
    return lines


if __name__ == "__main__":
    sys.exit(main())
