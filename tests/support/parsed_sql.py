"""What an SQL text names, by PostgreSQL's own parser."""

from typing import Any

from pglast import ast, parse_sql, split
from pglast.visitors import Skip, Visitor

_QUERIES = (ast.SelectStmt, ast.InsertStmt, ast.UpdateStmt, ast.DeleteStmt, ast.PrepareStmt)


def queries(sql: str) -> list[str]:
    """Of the statements of a text, those that look for rows, or change some."""
    return [each for each in split(sql) if isinstance(parse_sql(each)[0].stmt, _QUERIES)]


class Names(Visitor):
    """The names in a text.

    `calls`: functions, a name in its parts and the number of arguments. `tables`: their schema, None without one, and
    their name. `operators`: those without a schema, also where only syntax says them.
    """

    def __init__(self, sql: str) -> None:
        super().__init__()
        self.calls: set[tuple[tuple[str, ...], int]] = set()
        self.tables: set[tuple[str | None, str]] = set()
        self.operators: set[str] = set()
        self._ctes: set[str] = set()
        statements = parse_sql(sql)
        self(statements)
        self.tables -= {(None, name) for name in self._ctes}

    @property
    def unqualified(self) -> list[str]:
        """Functions and tables that the session's search path decides on."""
        # Of several arrays, and without a schema, unnest() is syntax.
        functions = {
            name[-1] for name, arity in self.calls if len(name) == 1 and (name, arity > 1) != (("unnest",), True)
        }
        return sorted(functions | {name for schema, name in self.tables if schema is None})

    def visit_FuncCall(self, _: Any, node: ast.FuncCall) -> None:  # noqa: N802  # the parser's names
        # What only a keyword says, such as EXTRACT, comes with its schema.
        self.calls.add((tuple(part.sval for part in node.funcname), len(node.args or ())))

    def visit_A_Expr(self, _: Any, node: ast.A_Expr) -> None:  # noqa: N802  # the parser's names
        name = tuple(part.sval for part in node.name)
        if len(name) == 1:
            self.operators |= {">=", "<="} if "BETWEEN" in name[0] else {name[0]}

    def visit_JoinExpr(self, _: Any, node: ast.JoinExpr) -> None:  # noqa: N802  # the parser's names
        if node.usingClause:
            self.operators.add("=")

    def visit_SubLink(self, _: Any, node: ast.SubLink) -> None:  # noqa: N802  # the parser's names
        if node.testexpr is not None:
            self.operators |= {part.sval for part in node.operName or ()} or {"="}

    def visit_CaseExpr(self, _: Any, node: ast.CaseExpr) -> None:  # noqa: N802  # the parser's names
        if node.arg is not None:
            self.operators.add("=")

    def visit_CommonTableExpr(self, _: Any, node: ast.CommonTableExpr) -> None:  # noqa: N802  # the parser's names
        self._ctes.add(node.ctename)

    def visit_LockingClause(self, _ancestors: Any, _node: ast.LockingClause) -> object:  # noqa: N802  # the parser's names
        # FOR UPDATE OF names what FROM has named.
        return Skip

    def visit_RangeVar(self, _: Any, node: ast.RangeVar) -> None:  # noqa: N802  # the parser's names
        self.tables.add((node.schemaname, node.relname))
