"""The words that an SQL text begins with, and its code without literals, as PostgreSQL's lexer reads them.

Every character is looked at a bounded number of times: a pattern with a choice of ways through the same white space
takes time that doubles with each blank.
"""

import re
from collections.abc import Iterator

# Possessive (`*+`): what was passed over is never tried in another way. A line comment ends at a carriage return too.
_BLANKS = re.compile(r"(?:[ \t\n\r\f\v]++|--[^\n\r]*+)*+")
_COMMENT_EDGE = re.compile(r"/\*|\*/")
_WORD = re.compile(r"[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*+")

# What begins a literal, a quoted name or a comment. A tag's dollar does not stand behind a name, and $1 is a parameter.
_OPENING = re.compile(
    r"""'|"|(?<![\w$])[eE]'|--[^\n\r]*+|/\*|(?<![\w$])\$(?:[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_\x80-\U0010ffff]*+)?\$"""
)
_ESCAPED = re.compile(r"(?:[^'\\]++|\\.)*+'?", re.DOTALL)


def first_word(sql: str) -> str:
    """The verb of a statement in upper case; empty if it does not begin with a word."""
    word = _WORD.match(sql, _skip_blanks(sql, 0))
    return word.group().upper() if word else ""


def leading_words(sql: str) -> Iterator[str]:
    """The words at the beginning, in upper case, up to the first thing that is none."""
    at = 0
    while word := _WORD.match(sql, _skip_blanks(sql, at)):
        yield word.group().upper()
        at = word.end()


def without_literals(sql: str) -> str:
    """A statement with a blank in the place of each literal, quoted name and comment."""
    kept, at = [], 0
    while opening := _OPENING.search(sql, at):
        kept.append(sql[at : opening.start()])
        at = _end_of(opening, sql)
    return " ".join((*kept, sql[at:]))


def _end_of(opening: re.Match[str], sql: str) -> int:
    """Where it ends that begins here; two quotes within a literal are the end of one and the beginning of another."""
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
    """Where the comment that begins here ends: comments nest. One that is not closed reaches to the end."""
    depth = 0
    for edge in _COMMENT_EDGE.finditer(sql, at):
        depth += 1 if edge.group() == "/*" else -1
        if depth == 0:
            return edge.end()
    return len(sql)
