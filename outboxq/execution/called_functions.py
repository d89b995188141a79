"""Functions of the user's database that handlers have called: which of them leave nothing on a connection.

The catalogue is asked once for each name, when a slot connects anew because of it; the first query asks for words that
are syntax unless there is a function of that name. By PostgreSQL's rules a function that is declared IMMUTABLE or
STABLE has no side effects.
"""

from collections.abc import Set as AbstractSet

from sqlalchemy import Connection

from outboxq.database.driver import run_alone
from outboxq.database.session_state import CALLABLE_WORDS
from outboxq.statements.catalog import functions_without_side_effects

# The most names that are remembered: names that change all the time must not fill the memory.
_MOST = 10_000


class CalledFunctions:
    """The functions that a relay's slots have looked up. Any thread may ask; at worst two ask for the same names."""

    def __init__(self) -> None:
        self.harmless: set[str] = set()
        self._asked: set[str] = set()
        # Most handlers use some of these words, as syntax.
        self._unanswered = set(CALLABLE_WORDS)

    def ask_for(self, names: AbstractSet[str]) -> None:
        """Have these names looked up on the next connection, unless they were before."""
        if len(self._asked) < _MOST:
            self._unanswered |= names - self._asked

    def answer(self, connection: Connection) -> None:
        """Look up the names that were asked for, if any."""
        names = frozenset(self._unanswered)
        if names:
            statement = functions_without_side_effects(names - CALLABLE_WORDS, names & CALLABLE_WORDS)
            self.harmless.update(str(name) for (name,) in run_alone(connection, statement))
            self._asked |= names
            self._unanswered -= names
