"""The PostgreSQL settings that outboxq's own statements need, in place of those of the role and the database.

Outboxq's own connections have these settings from the start. Its transactions set them again, because a pooler refuses
startup options, and a user's startup options win. On a caller's connection the settings apply during a call, and the
former values are then restored. The connections on which a relay runs handlers keep the user's settings; code that also
uses such connections depends on no setting: it reads times as numbers (`outboxq.tables.columns.Instant`).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import psycopg
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import DBAPIError

OUR_SETTINGS: Mapping[str, str] = {
    # psycopg cannot read other formats of times and intervals.
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    # Below 1, floats lose digits.
    "extra_float_digits": "1",
    # Compiling a plan that walks some thousand rows of each queue takes ten times as long as running it.
    "jit": "off",
}
# LOCAL, because a transaction pooler would keep another setting for its next client.
OURS_SET = tuple(f"SET LOCAL {name} = '{value}'" for name, value in OUR_SETTINGS.items())
SET_OURS = "".join(f"{statement}; " for statement in OURS_SET)

_PG = func.pg_catalog


@contextmanager
def our_settings(connection: Connection) -> Iterator[None]:
    """Apply outboxq's settings to a caller's connection in the block, and restore the former ones after it.

    After a database error no statement restores them: the rollback that follows does that.
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
