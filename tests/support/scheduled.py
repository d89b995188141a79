"""Schedules of tests, and what they have fired."""

import time
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, func, select, text, update

from outboxq import external, schedules
from outboxq.tables import schedule

tick = external("tick", queue="ticks")

_LATE_SECOND = 54


def put(engine: Engine, name: str = "tick", cron: str = "* * * * *", **options: Any) -> None:
    """Make a schedule, by default of every minute, of a job that no registry needs to know."""
    with engine.begin() as connection:
        schedules.put(connection, name, options.pop("job", tick.job()), cron=cron, **options)


def young_minute(engine: Engine) -> datetime:
    """The database's time; if its minute is about to end, the next one is waited for: another time to fire."""
    while True:
        with engine.connect() as connection:
            now: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
        if now.second < _LATE_SECOND:
            return now
        time.sleep(60 - now.second)


def due_since(engine: Engine, name: str, ago: timedelta) -> datetime:
    """Have a schedule be due since the beginning of the minute of some time ago; that time.

    Beside relays that fire it, `young_minute` is asked before it is made: this moves its time back.
    """
    due = (young_minute(engine) - ago).replace(second=0, microsecond=0)
    with engine.begin() as connection:
        changed = connection.execute(update(schedule).where(schedule.c.name == name).values(next_at=due))
        assert changed.rowcount == 1
    return due


def fired(engine: Engine, name: str = "tick") -> list[datetime]:
    """The times for which a schedule's jobs wait, in the order in which they were added."""
    statement = text(
        "SELECT headers ->> 'outboxq.fire_time' FROM outboxq.job WHERE headers ->> 'outboxq.schedule' = :name "
        "ORDER BY seq"
    )
    with engine.connect() as connection:
        return [datetime.fromisoformat(found) for (found,) in connection.execute(statement, {"name": name})]
