"""Session state: what a statement may leave behind on its connection when its transaction is over.

A setting, a temporary table, a lock of the session, LISTEN: all of them would meet the next job of the same slot. So
statements are known to leave nothing, or they count as leaving something. Known are the statements that work on rows,
with functions that are known. What the schema itself does for such a statement (triggers, defaults, views, operators)
is not looked at.

A text is read once, token by token, and each character a bounded number of times. What cannot be read for certain, a
backslash or a dollar quote, counts as leaving something.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from outboxq.database.known_functions import HARMLESS

# Longer texts are read each time: kept, they would hold memory.
_KEPT_CHARACTERS = 10_000

_TOKEN = re.compile(
    r"""
    (?P<blank>[ \t\n\r\f\v]++ | --[^\n\r]*+ | /\*[^*/]*+\*/)
    # SQLAlchemy's places for the values of an IN, and for a schema's name.
    | (?P<value>'[^'\\]*+' | %\([^()]*+\)[sbt] | %[sbt%] | [0-9]++ | __\[POSTCOMPILE_[A-Za-z0-9_]*+\])
    | (?P<word>__\[SCHEMA_[^\]]*+\] | [A-Za-z_\x80-\U0010ffff][A-Za-z0-9_\x80-\U0010ffff]*+)
    | (?P<quoted>"[^"]*+")
    | (?P<mark>:: | [().;])
    | (?P<other>[,+*<>=~!@#%^&|?:\[\]-] | /(?!\*))
    """,
    re.VERBOSE,
)
# The third argument of set_config says that it is for the transaction alone: in the text, or by a parameter.
_ARGUMENT = r"(?:'[^'\\]*+'|%\([^()]*+\)s)(?:::[A-Za-z]++)?"
_SET_CONFIG = re.compile(
    rf"\(\s*+{_ARGUMENT}\s*+,\s*+{_ARGUMENT}\s*+,\s*+(?:true|%\((?P<name>[^()]*+)\)s(?:::BOOLEAN)?)\s*+\)",
    re.IGNORECASE,
)

_ROWS = frozenset(("select", "insert", "update", "delete", "merge", "values"))
# Verbs whose effect lasts as long as the transaction.
_BOUND = frozenset(("savepoint", "release", "rollback", "lock", "notify", "truncate", "show"))
_VERBS = _ROWS | _BOUND | {"set", "with"}
_BOUND_SETS = frozenset(("local", "constraints", "transaction"))
# What may stand before a parenthesis, and calls nothing: no function can have such a name without quotes.
_SYNTAX_WORDS = """
    all and any array as between case cast current_time current_timestamp distinct do else except exists fetch from
    group grouping having in intersect into lateral limit localtime localtimestamp not offset on or order returning row
    select some symmetric then union using values when where window with
"""
_SYNTAX = frozenset(_SYNTAX_WORDS.split())
# The same, but a function can have such a name too: it calls one if the database has one.
_CALLABLE_WORDS = """
    by conflict cube escape filter ilike is join like materialized over overlaps rollup set sets similar varying zone
"""
CALLABLE_WORDS = frozenset(_CALLABLE_WORDS.split())
# Behind these comes the name of a type, an alias, a table or a CTE, and none of a function.
_BEFORE_NAMES = frozenset(("as", "into", "with", "recursive"))


class Leavings(NamedTuple):
    """What a statement may leave on its connection.

    `what` names what is certainly left, in words that hold no value. `functions` are those called that are not known.
    The parameters named in `only_local` have to be true. `sets_locally`: it sets something for the transaction alone.
    """

    what: str | None = None
    functions: frozenset[str] = frozenset()
    only_local: tuple[str, ...] = ()
    sets_locally: bool = False


NOTHING = Leavings()


def left_by(statement: str) -> Leavings:
    """What a statement may leave on its connection; `NOTHING` if it is known to leave nothing."""
    return _kept(statement) if len(statement) <= _KEPT_CHARACTERS else _read(statement)


def _read(statement: str) -> Leavings:
    return _Reading(statement).leavings()


_kept = lru_cache(2_048)(_read)


class _Reading:
    """One statement, read token by token."""

    def __init__(self, statement: str) -> None:
        self._statement = statement
        self._verb = ""
        self._functions: set[str] = set()
        self._only_local: list[str] = []
        self._sets_locally = False
        # The last token that was not blank, and the name (or its last part) that it was, if it was one.
        self._last = ""
        self._name: str | None = None
        self._schema: str | None = None
        # Whether a parenthesis behind it calls it; not if it is the name of a type, an alias, a table or a CTE.
        self._is_called = True
        self._names_follow = False
        # Between the WITH of a statement and its verb a comma goes on to the next CTE.
        self._depth = 0
        self._lists_ctes = False

    def leavings(self) -> Leavings:
        at, end = 0, len(self._statement)
        while at < end:
            token = _TOKEN.match(self._statement, at)
            if token is None:
                return Leavings("a statement that cannot be read for certain")
            at = token.end()
            if token.lastgroup == "blank":
                continue
            what = self._meet(token, token.lastgroup)
            if what is not None:
                return Leavings(what)
        if not self._verb:
            return Leavings("a statement without a text")
        if not (self._functions or self._sets_locally):
            return NOTHING
        return Leavings(None, frozenset(self._functions), tuple(self._only_local), self._sets_locally)

    def _meet(self, token: "re.Match[str]", group: str | None) -> str | None:
        text = token.group().lower() if group == "word" else token.group()
        if self._last == ";":
            return "several statements"
        if self._last == "set" == self._verb:
            if text not in _BOUND_SETS:
                return "SET"
            self._sets_locally = text != "constraints"
        if not self._verb and text != "(":
            self._verb = text
            if group != "word" or text not in _VERBS:
                return text.upper()[:63] if group == "word" else "a statement without a verb"
            self._lists_ctes = text == "with" and self._depth == 0
        elif self._lists_ctes and self._depth == 0 and text == "table":
            return "TABLE"
        elif self._lists_ctes and self._depth == 0 and text in _ROWS:
            self._lists_ctes = False
        what = self._meet_name(text) if group in ("word", "quoted") else self._meet_mark(text, token.start())
        self._last = text
        return what

    def _meet_name(self, text: str) -> str | None:
        if text.strip('"') == "pg_settings":
            # An UPDATE of the view pg_settings is a SET.
            return "pg_settings"
        if self._last == ".":
            self._schema, self._name = self._name, text
        elif text == "into" and self._last not in ("insert", "merge"):
            return "SELECT INTO"
        elif text in _SYNTAX or (text == "recursive" and self._last == "with"):
            self._name, self._names_follow = None, text in _BEFORE_NAMES
        else:
            self._schema, self._name, self._is_called = None, text, not self._names_follow
            self._names_follow = False
        return None

    def _meet_mark(self, text: str, at: int) -> str | None:
        if text == ".":
            return None
        what = self._call(at) if text == "(" and self._name is not None and self._is_called else None
        self._depth += {"(": 1, ")": -1}.get(text, 0)
        self._name = None
        self._names_follow = text == "::" or (text == "," and self._lists_ctes and self._depth == 0)
        return what

    def _call(self, at: int) -> str | None:
        # A quoted name is spelled as in the catalogue; no name that is listed has a quote inside.
        name = (self._name or "").strip('"')
        if name == "set_config":
            return self._set_config(at)
        if self._schema not in (None, "pg_catalog") or name not in HARMLESS:
            self._functions.add(name)
        return None

    def _set_config(self, at: int) -> str | None:
        local = _SET_CONFIG.match(self._statement, at)
        if local is None:
            return "set_config()"
        self._sets_locally = True
        if local["name"]:
            self._only_local.append(local["name"])
        return None
