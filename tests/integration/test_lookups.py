"""Functions and operators of our statements are PostgreSQL's own, whatever stands beside them in `public`."""

import re
from collections.abc import Iterable, Iterator, Mapping

import psycopg
import pytest
from sqlalchemy import Connection, Engine, Executable, create_engine, text

from outboxq.driver import run_script
from outboxq.postgres import Server
from tests.migrations.catalog import libpq_url
from tests.support.overloads import make_overloads
from tests.support.parsed_sql import Names
from tests.support.statements import all_statements, compiled_text

FIRST_OID_OF_USERS = 16_384


@pytest.fixture(scope="module")
def hostile(outboxq_server: Server, outboxq_template: str) -> Iterator[Engine]:
    """A database in whose `public` overloads of all that our statements name match better."""
    named = [Names(compiled_text(statement)) for _, statement, _ in all_statements()]
    with outboxq_server.create_database(outboxq_template) as database:
        make_overloads(
            libpq_url(database.url),
            {operator for names in named for operator in names.operators},
            {(name[-1], arity) for names in named for name, arity in names.calls},
        )
        engine = create_engine(database.url, connect_args={"prepare_threshold": None})
        yield engine
        engine.dispose()


def test_every_statement_is_resolved_to_postgresqls_own(hostile: Engine) -> None:
    """By the trees that the server makes of them: also what stands where no row comes by."""
    theirs: dict[str, set[int]] = {}
    with hostile.connect() as connection:
        trees = read_trees(connection)
        for where, statement, parameters in all_statements():
            if isinstance(statement, str) and not Names(statement).are_queries:
                continue
            trees.clear()
            with connection.begin_nested() as savepoint:
                execute(connection, statement, parameters)
                savepoint.rollback()
            assert trees, f"{where}: the server has shown nothing"
            if found := user_oids(trees):
                theirs[where] = theirs.get(where, set()) | found
        connection.execute(text("SET debug_print_parse = off"))
        assert {where: signatures(connection, oids) for where, oids in theirs.items()} == {}


def read_trees(connection: Connection) -> list[str]:
    """What the server makes of each statement from now on, as it is sent."""
    trees: list[str] = []
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    driver.add_notice_handler(lambda notice: trees.append(notice.message_detail or ""))
    connection.execute(text("SET debug_print_parse = on; SET debug_pretty_print = off; SET client_min_messages = log"))
    return trees


def execute(connection: Connection, statement: Executable | str, parameters: Mapping[str, object]) -> None:
    """As it is sent."""
    if not isinstance(statement, str):
        connection.execute(statement, parameters)
        return
    run_script(connection, statement)
    if statement.startswith("PREPARE"):
        run_script(connection, "DEALLOCATE ALL")


def user_oids(trees: Iterable[str]) -> set[int]:
    """Of the functions and operators in these trees, those that PostgreSQL does not bring along."""
    one = re.compile(r":(?:opno|funcid|aggfnoid|winfnoid) (\d+)")
    row = re.compile(r":opnos \(o ([\d ]+)\)")
    found = {int(oid) for tree in trees for oid in [*one.findall(tree), *" ".join(row.findall(tree)).split()]}
    return {oid for oid in found if oid >= FIRST_OID_OF_USERS}


def signatures(connection: Connection, oids: set[int]) -> list[str]:
    found = text(
        "SELECT oid::pg_catalog.regoperator::text FROM pg_catalog.pg_operator "
        "WHERE oid OPERATOR(pg_catalog.=) ANY (CAST(:oids AS oid[])) "
        "UNION ALL SELECT oid::pg_catalog.regprocedure::text FROM pg_catalog.pg_proc "
        "WHERE oid OPERATOR(pg_catalog.=) ANY (CAST(:oids AS oid[])) ORDER BY 1"
    )
    return list(connection.execute(found, {"oids": sorted(oids)}).scalars())
