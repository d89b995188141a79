"""Reads the SQL statements of handlers: their first words, and the session state that they leave on a connection.

The words of a text, and its literals, are found as PostgreSQL's lexer finds them. Every character is read a bounded
number of times: a regular expression that can match the same blanks in several ways would take exponential time.

Session state, such as a setting, a temporary table, a session lock or LISTEN, outlives its transaction, and would
affect the next job on the same connection. A statement counts as leaving no state if its first word is known to leave
none, and it names no function that changes the session. Users' functions, procedures and triggers are not examined.
"""

import re
from collections.abc import Iterator
from itertools import islice, pairwise
from string import whitespace
from typing import NamedTuple

# Possessive (`*+`): no character is tried twice. A line comment also ends at a carriage return.
_BLANKS = re.compile(r"(?:[ \t\n\r\f\v]++|--[^\n\r]*+)*+")
_COMMENT_EDGE = re.compile(r"/\*|\*/")
_WORD = re.compile(r"[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*+")

# The beginning of a literal, a quoted name or a comment. A tag's dollar does not follow a name; $1 is a parameter.
_OPENING = re.compile(
    r"""'|"|(?<![\w$])[eE]'|--[^\n\r]*+|/\*|(?<![\w$])\$(?:[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_\x80-\U0010ffff]*+)?\$"""
)
_ESCAPED = re.compile(r"(?:[^'\\]++|\\.)*+'?", re.DOTALL)

_TRANSACTION_VERBS = frozenset(("BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "PREPARE"))

# Longer texts are read each time: caching them would hold memory.
_KEPT_CHARACTERS, _MOST_KEPT = 10_000, 2_048

# The effects of these last as long as the transaction, or concern all sessions.
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
# The third argument of set_config, in the text or as a parameter, restricts it to the transaction.
_ARGUMENT = r"(?:'[^'\\]*+'|%\([^()]*+\)s)(?:::[A-Za-z]++)?"
_SET_LOCALLY = re.compile(
    rf'"?\s*+\(\s*+{_ARGUMENT}\s*+,\s*+{_ARGUMENT}\s*+,\s*+(?:true|%\((?P<name>[^()]*+)\)s(?:::BOOLEAN)?)\s*+\)',
    re.IGNORECASE,
)


def first_word(sql: str) -> str:
    """Return the first word of a statement (after comments) in upper case; empty if it does not begin with a word."""
    word = _WORD.match(sql, _skip_blanks(sql, 0))
    return word.group().upper() if word else ""


def leading_words(sql: str) -> Iterator[str]:
    """Yield the words at the beginning of a statement, in upper case, up to the first token that is no word."""
    at = 0
    while word := _WORD.match(sql, _skip_blanks(sql, at)):
        yield word.group().upper()
        at = word.end()


def may_end_transaction(statement: str) -> bool:
    """Return True if a statement may end the transaction although `refused_verb` finds no COMMIT or the like in front.

    A statement may if it has a semicolon, since the server accepts several statements at once if they have no
    parameters; or if it begins with anything but a letter, such as a comment that only the server can read. No other
    statement can: inside a transaction block, procedures and DO blocks are refused a COMMIT (2D000).
    """
    return ";" in statement or not statement.lstrip()[:1].isalpha()


def refused_verb(statement: str) -> str | None:
    """Return a statement's first word (or words) if it begins or ends a transaction, such as COMMIT; else None.

    A handler may not send such a statement. ROLLBACK TO a savepoint is allowed, and returns None.
    """
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
    """Return a statement with a blank in place of each literal, quoted name and comment, to search it for words."""
    kept, at = [], 0
    while opening := _OPENING.search(sql, at):
        kept.append(sql[at : opening.start()])
        at = _end_of(opening, sql)
    return " ".join((*kept, sql[at:]))


def _end_of(opening: re.Match[str], sql: str) -> int:
    """Return the index of the end of the literal, quoted name or comment that begins at `opening`.

    A doubled quote within a literal is read as the end of one literal and the beginning of another.
    """
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
    """Return the index of the end of the comment that begins at `at`; comments nest, and may be unclosed."""
    depth = 0
    for edge in _COMMENT_EDGE.finditer(sql, at):
        depth += 1 if edge.group() == "/*" else -1
        if depth == 0:
            return edge.end()
    return len(sql)


class Leavings(NamedTuple):
    """The session state that a statement sets, as `left_by` found it: for the transaction only, or beyond its end.

    Attributes:
        what: Names the state that outlives the transaction, in words without values; None if there is none.
        only_local: The names of parameters of the statement, each the third argument of a `set_config`. If one is not
            True, its setting outlives the transaction, although `what` is None.
    """

    what: str | None
    only_local: tuple[str, ...] = ()


def left_by(statement: str) -> Leavings | None:
    """Return the session state that a statement sets or leaves on its connection; None if it does neither."""
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
    # Not searched in `code`, which lacks quoted names: such a name within a literal costs a new connection, and no
    # more.
    for name in _NAME.finditer(statement):
        given = _SET_LOCALLY.match(statement, name.end()) if name[0].lower() == "set_config" else None
        if given is None:
            return Leavings(name[0].lower())
        sets = True
        if given["name"]:
            only_local.append(given["name"])
    return Leavings(None, tuple(only_local)) if sets else None


class Reading(NamedTuple):
    """The results of this module's functions for one statement: each field is named after its function."""

    first_word: str = ""
    may_end_transaction: bool = True
    refused_verb: str | None = None
    left_by: Leavings | None = None


# The statements that were read last. Looking one up costs no call: every statement of a handler is looked up.
readings: dict[str, Reading] = {}


def read(statement: str) -> Reading:
    """Apply this module's functions to a statement; keep the result in `readings` if the text is not very long.

    Texts of more than 10,000 characters (`_KEPT_CHARACTERS`) are read each time.
    """
    reading = Reading(
        first_word(statement), may_end_transaction(statement), refused_verb(statement), left_by(statement)
    )
    if len(statement) <= _KEPT_CHARACTERS:
        if len(readings) >= _MOST_KEPT:
            readings.clear()
        readings[statement] = reading
    return reading
