"""The settings that our statements need, in place of those of the role and the database. The one list of them.

Connections of ours have them from the start, and our transactions set them again: a pooler refuses startup options, and
those of the user win over ours. On the connection of a caller they hold for a call and are then as they were; a relay's
slots, where handlers run, keep the user's. Code that works there too does not depend on a setting: times are read as
numbers (`outboxq.tables.columns.Instant`).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import psycopg
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import DBAPIError

OUR_SETTINGS: Mapping[str, str] = {
    # psycopg reads no other forms of times and intervals.
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    # Below 1, floats lose digits.
    "extra_float_digits": "1",
    # To compile a plan that walks some thousand rows of each queue takes ten times as long as to run it.
    "jit": "off",
}
# LOCAL, because a transaction pooler would keep anything else for the next client.
OURS_SET = tuple(f"SET LOCAL {name} = '{value}'" for name, value in OUR_SETTINGS.items())
SET_OURS = "".join(f"{statement}; " for statement in OURS_SET)

_PG = func.pg_catalog


@contextmanager
def our_settings(connection: Connection) -> Iterator[None]:
    """Our settings on a caller's connection, within the block; after it those that were there.

    After an error of the database there is nothing to do: the rollback of the error rolls back the settings.
    """
    before = connection.execute(select(*(_PG.current_setting(name) for name in OUR_SETTINGS))).one()
    _set(connection, OUR_SETTINGS.values())
    try:
        yield
    except (DBAPIError, psycopg.Error):
        raise
    except BaseException:
        _set(connection, before)
        raise
    _set(connection, before)


def _set(connection: Connection, values: Iterable[object]) -> None:
    settings = zip(OUR_SETTINGS, values, strict=True)
    connection.execute(select(*(_PG.set_config(name, value, True) for name, value in settings)))
