"""Reads SQL texts: their first words, the transaction verb, and the session state that a statement leaves.

The words of a text, and its literals, are found as PostgreSQL's lexer finds them. Every character is read a bounded
number of times: a pattern with a choice of ways through the same white space takes time that doubles with each blank.

A setting, a temporary table, a lock of the session or LISTEN outlives the transaction that made it, and would meet the
next job of the same slot. A statement leaves nothing if its first word is known for it, and if it names no function
that changes the session. Functions, procedures and triggers of users are not examined.
"""

import re
from collections.abc import Iterator
from itertools import islice, pairwise
from string import whitespace
from typing import NamedTuple

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

# Longer texts are read each time: kept, they would hold memory.
_KEPT_CHARACTERS, _MOST_KEPT = 10_000, 2_048

# What these do lasts as long as the transaction, or belongs to all sessions.
_LEAVE_NOTHING = frozenset(
    (
        *("select", "insert", "update", "delete", "merge", "with", "values", "table", "copy", "call"),
        *("savepoint", "release", "rollback", "lock", "notify", "truncate", "show"),
    )
)
_CODE_VERB = re.compile(r"[\s(]*+([a-z]++)")
_SET = re.compile(r"\s*+set\s++(local|transaction|constraints)\b")
_CODE_WORD = re.compile(r"[a-z_]\w*+")
# An UPDATE of the view pg_settings is a SET.
_NAME = re.compile(
    r"\b(?:set_config|pg_settings|setseed|set_limit|pg_(?:try_)?advisory_(?:un)?lock\w*+|dblink_connect\w*+"
    r"|pg_replication_origin_session_\w++)\b",
    re.IGNORECASE,
)
# The third argument of set_config says that it is for the transaction alone: in the text, or by a parameter.
_ARGUMENT = r"(?:'[^'\\]*+'|%\([^()]*+\)s)(?:::[A-Za-z]++)?"
_SET_LOCALLY = re.compile(
    rf'"?\s*+\(\s*+{_ARGUMENT}\s*+,\s*+{_ARGUMENT}\s*+,\s*+(?:true|%\((?P<name>[^()]*+)\)s(?:::BOOLEAN)?)\s*+\)',
    re.IGNORECASE,
)


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
    # Nearly all statements begin with their verb.
    word = _WORD.match(statement)
    verb = word.group().upper() if word else first_word(statement)
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


class Leavings(NamedTuple):
    """The state that a statement sets or leaves.

    `what` outlives the transaction, in words that hold no value; None if all ends with it, provided that the parameters
    named in `only_local` are true.
    """

    what: str | None
    only_local: tuple[str, ...] = ()


def left_by(statement: str) -> Leavings | None:
    """The state that a statement sets or leaves on its connection; None if it neither sets nor leaves any."""
    code = without_literals(statement).lower()
    first = _CODE_VERB.match(code)
    verb = first[1] if first else "a statement without a verb"
    local = _SET.match(code)
    if ";" in code.rstrip(f";{whitespace}"):
        return Leavings("several statements")
    if verb not in _LEAVE_NOTHING and local is None:
        return Leavings(verb.upper()[:63] if first else verb)
    if any(word == "into" and before not in ("insert", "merge") for before, word in pairwise(_CODE_WORD.findall(code))):
        return Leavings("SELECT INTO")
    sets, only_local = local is not None and local[1] != "constraints", []
    # Not in `code`, which lacks quoted names: a name in a literal costs a connection, and nothing else.
    for name in _NAME.finditer(statement):
        given = _SET_LOCALLY.match(statement, name.end()) if name[0].lower() == "set_config" else None
        if given is None:
            return Leavings(name[0].lower())
        sets = True
        if given["name"]:
            only_local.append(given["name"])
    return Leavings(None, tuple(only_local)) if sets else None


class Reading(NamedTuple):
    """The effects of a handler's statement besides those on rows: the functions of these names find them."""

    first_word: str = ""
    may_end_transaction: bool = True
    refused_verb: str | None = None
    left_by: Leavings | None = None


# Of the statements that were read last. A look costs no call: each statement of a handler is looked up.
readings: dict[str, Reading] = {}


def read(statement: str) -> Reading:
    """Read a statement, and add it to `readings`."""
    reading = Reading(
        first_word(statement), may_end_transaction(statement), refused_verb(statement), left_by(statement)
    )
    if len(statement) <= _KEPT_CHARACTERS:
        if len(readings) >= _MOST_KEPT:
            readings.clear()
        readings[statement] = reading
    return reading
