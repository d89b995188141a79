"""The words that an SQL text begins with, its transaction verb, and its code without literals.

They are found as PostgreSQL's lexer reads them.

Every character is read a bounded number of times: a pattern with a choice of ways through the same white space
takes time that doubles with each blank.
"""

import re
from collections.abc import Iterator
from itertools import islice

# Possessive (`*+`): passed characters are never tried in another way. A line comment ends at a carriage return too.
_BLANKS = re.compile(r"(?:[ \t\n\r\f\v]++|--[^\n\r]*+)*+")
_COMMENT_EDGE = re.compile(r"/\*|\*/")
_WORD = re.compile(r"[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*+")

# The beginning of a literal, a quoted name or a comment. A tag's dollar does not follow a name; $1 is a parameter.
_OPENING = re.compile(
    r"""'|"|(?<![\w$])[eE]'|--[^\n\r]*+|/\*|(?<![\w$])\$(?:[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_\x80-\U0010ffff]*+)?\$"""
)
_ESCAPED = re.compile(r"(?:[^'\\]++|\\.)*+'?", re.DOTALL)

_TRANSACTION_VERBS = frozenset(("BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "PREPARE"))


def first_word(sql: str) -> str:
    """The verb of a statement in upper case; empty if it does not begin with a word."""
    word = _WORD.match(sql, _skip_blanks(sql, 0))
    return word.group().upper() if word else ""


def leading_words(sql: str) -> Iterator[str]:
    """The words at the beginning, in upper case, up to the first token that is no word."""
    at = 0
    while word := _WORD.match(sql, _skip_blanks(sql, at)):
        yield word.group().upper()
        at = word.end()


def may_end_transaction(statement: str) -> bool:
    """Return True if there may be a transaction verb in a statement that was let through.

    The server takes several statements at once if they come without parameters. One by one nothing but a verb ends
    a transaction: procedures and DO blocks cannot inside of a transaction block (2D000). A statement that does not
    begin with its verb may have one after a comment that only the server can read.
    """
    return ";" in statement or not statement.lstrip()[:1].isalpha()


def refused_verb(statement: str) -> str | None:
    """The transaction verb that a statement begins with, if a handler may not send it; else None."""
    # Each statement passes here, and nearly all of them end at once.
    verb = first_word(statement)
    if verb not in _TRANSACTION_VERBS:
        return None
    following = tuple(islice(leading_words(statement), 1, 3))
    if verb in ("START", "PREPARE"):
        return f"{verb} TRANSACTION" if following[:1] == ("TRANSACTION",) else None
    # ROLLBACK TO and the savepoint verbs stay allowed: SQLAlchemy's begin_nested() sends them.
    return None if verb == "ROLLBACK" and "TO" in following else verb


def without_literals(sql: str) -> str:
    """A statement with a blank in the place of each literal, quoted name and comment."""
    kept, at = [], 0
    while opening := _OPENING.search(sql, at):
        kept.append(sql[at : opening.start()])
        at = _end_of(opening, sql)
    return " ".join((*kept, sql[at:]))


def _end_of(opening: re.Match[str], sql: str) -> int:
    """The end of the literal, name or comment here; two quotes within a literal end one and begin another."""
    mark = opening.group()
    if mark == "/*":
        return _comment_end(sql, opening.start())
    if mark.startswith("--"):
        return opening.end()
    if mark in ("e'", "E'"):
        escaped = _ESCAPED.match(sql, opening.end())
        return escaped.end() if escaped else len(sql)
    closing = sql.find(mark, opening.end())
    return len(sql) if closing < 0 else closing + len(mark)


def _skip_blanks(sql: str, at: int) -> int:
    while True:
        blanks = _BLANKS.match(sql, at)
        at = blanks.end() if blanks else at
        if not sql.startswith("/*", at):
            return at
        at = _comment_end(sql, at)


def _comment_end(sql: str, at: int) -> int:
    """The end of the comment that begins here: comments nest. One that is not closed reaches to the end."""
    depth = 0
    for edge in _COMMENT_EDGE.finditer(sql, at):
        depth += 1 if edge.group() == "/*" else -1
        if depth == 0:
            return edge.end()
    return len(sql)
