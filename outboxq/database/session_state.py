"""Session state that a statement leaves on its connection when its transaction has ended.

A setting, a temporary table, a lock of the session or LISTEN would meet the next job of the same slot. A statement
leaves nothing if its first word is known for it, and if it names no function that changes the session. Functions,
procedures and triggers of users are not examined.
"""

import re
from functools import lru_cache
from itertools import pairwise
from string import whitespace
from typing import NamedTuple

from outboxq.database.sql_words import without_literals

# Longer texts are read each time: kept, they would hold memory.
_KEPT_CHARACTERS = 10_000

# What these do lasts as long as the transaction, or belongs to all sessions.
_LEAVE_NOTHING = frozenset(
    (
        *("select", "insert", "update", "delete", "merge", "with", "values", "table", "copy", "call"),
        *("savepoint", "release", "rollback", "lock", "notify", "truncate", "show"),
    )
)
_FIRST_WORD = re.compile(r"[\s(]*+([a-z]++)")
_SET = re.compile(r"\s*+set\s++(local|transaction|constraints)\b")
_WORD = re.compile(r"[a-z_]\w*+")
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


class Leavings(NamedTuple):
    """The state that a statement sets or leaves.

    `what` outlives the transaction, in words that hold no value; None if all ends with it, provided that the parameters
    named in `only_local` are true.
    """

    what: str | None
    only_local: tuple[str, ...] = ()


def left_by(statement: str) -> Leavings | None:
    """The state that a statement sets or leaves on its connection; None if it neither sets nor leaves any."""
    return _kept(statement) if len(statement) <= _KEPT_CHARACTERS else _read(statement)


def _read(statement: str) -> Leavings | None:
    code = without_literals(statement).lower()
    first = _FIRST_WORD.match(code)
    verb = first[1] if first else "a statement without a verb"
    local = _SET.match(code)
    if ";" in code.rstrip(f";{whitespace}"):
        return Leavings("several statements")
    if verb not in _LEAVE_NOTHING and local is None:
        return Leavings(verb.upper()[:63] if first else verb)
    if any(word == "into" and before not in ("insert", "merge") for before, word in pairwise(_WORD.findall(code))):
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


_kept = lru_cache(2_048)(_read)
