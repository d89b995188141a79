"""Our statements say in which schema each function and table of theirs is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import outboxq
from tests.support.parsed_sql import Names
from tests.support.statements import all_statements, compiled_text

PACKAGE = Path(outboxq.__file__).parent
# Syntax with the looks of a function.
SYNTAX = frozenset({"any", "array", "coalesce", "greatest", "least"})


@pytest.mark.wide
def test_no_statement_leaves_a_function_or_a_table_to_the_search_path() -> None:
    """A role that may create in a schema of that path could have a better-matching function of its own run."""
    found = ((where, Names(compiled_text(statement)).unqualified) for where, statement, _ in all_statements())
    assert {where: names for where, names in found if names} == {}


@pytest.mark.wide
def test_no_expression_leaves_a_function_to_the_search_path() -> None:
    """Also where an expression is built outside of `statements/`: `func.name(...)` is for what only syntax can say."""
    found = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in _functions(path)
        if node.attr not in SYNTAX | {"pg_catalog"}
    }
    assert {place for place in found if not place.startswith("statements/builtin.py:")} == set()


def _functions(path: Path) -> Iterator[ast.Attribute]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "func":
            yield node


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("SELECT count(*) FROM pg_catalog.pg_class", ["count"]),
        ("SELECT FROM pg_class", ["pg_class"]),
        ("PREPARE p AS SELECT FROM unnest($1::text[])", ["unnest"]),
        ("SELECT FROM unnest($1::text[], $2::text[])", []),
        ("WITH a AS (SELECT 1) SELECT pg_catalog.count(*) FROM a", []),
        ("SELECT least(coalesce(1, 2), extract(epoch FROM now())::int)", ["now"]),
    ],
)
def test_what_the_search_path_decides_on_is_found(sql: str, names: list[str]) -> None:
    """Not what a WITH names, nor what is syntax."""
    assert Names(sql).unqualified == names
