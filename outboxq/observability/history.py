"""The upkeep of the history, the tables of what relays did: how many jobs ended, when, how, and after what time.

Rows of single minutes are merged into rows of hours, and old rows are removed.
"""

from sqlalchemy import Connection

from outboxq.database.driver import run_script
from outboxq.statements import history as statements

KEPT_MINUTES, KEPT_HOURS = "48 hours", "35 days"
_ROWS = 10_000


def roll_up_one_hour(connection: Connection, schema: str) -> bool:
    """Merge the rows of minutes of the oldest hour into rows of that hour, if it is older than two days.

    Returns False if there is no such hour, or if another session is merging at this moment.
    """
    ((is_due,),) = run_script(connection, statements.SETTINGS + statements.is_roll_up_due(schema))
    oldest = run_script(connection, statements.oldest_minute(schema, KEPT_MINUTES)) if is_due else ()
    for (minute,) in oldest:
        run_script(connection, statements.roll_up(schema, str(minute)))
    return bool(oldest)


def prune(connection: Connection, schema: str) -> None:
    """Remove hours older than 35 days, gauges older than two days, and relays that were not seen for a day."""
    pruning = (
        statements.prune_hours(schema, KEPT_HOURS, _ROWS),
        statements.prune_gauges(schema, KEPT_MINUTES, _ROWS),
        statements.prune_relays(schema),
    )
    run_script(connection, statements.SETTINGS + "; ".join(pruning))
