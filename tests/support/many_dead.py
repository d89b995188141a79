"""Many dead letters, and what waits until another process or thread has done something about them."""

import time
from collections.abc import Callable

from sqlalchemy import Engine, text

_PATIENCE_SECONDS = 60.0


def add_dead(engine: Engine, number: int, kind: str = "bulk") -> None:
    """Add dead letters of a kind, all of one age."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, max_attempts, "
                "crashes, errors, reason, created_at, died_at) SELECT gen_random_uuid(), 'many', :kind, '{}', '{}', 0, "
                "1, 1, 0, '[]', 'it broke', now() - interval '1 hour', now() - interval '1 minute' "
                "FROM generate_series(1, :number)"
            ),
            {"kind": kind, "number": number},
        )


def slow_down(engine: Engine, seconds: float) -> None:
    """Have each page of deletions from the dead letters take so long."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END $$"
            )
        )
        connection.execute(text("CREATE TRIGGER slow AFTER DELETE ON outboxq.dead_job EXECUTE FUNCTION slow()"))


def count_dead(engine: Engine, kind: str = "bulk") -> int:
    """How many dead letters of a kind there are."""
    with engine.connect() as connection:
        found: int = connection.execute(
            text("SELECT count(*) FROM outboxq.dead_job WHERE kind = :kind"), {"kind": kind}
        ).scalar_one()
        return found


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process or thread does."""
    ends_at = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < ends_at, "it did not happen in time"
        time.sleep(0.05)
