"""A million rows in each large table, and what statements on them cost."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, event, text

from tests.support.dashboard import stage_dashboard

ROWS = 1_000_000
_STATEMENT = re.compile(r"\s*(?:SELECT|WITH|INSERT|UPDATE|DELETE)\b", re.IGNORECASE)
_READ_WHOLE = re.compile(r"Seq Scan on (?:outboxq\.)?(job|dead_job|done_job|inbox|effect)\b")
_ID = "CAST(lpad(to_hex(1759000000000 + g), 12, '0') || '70008000' || lpad(to_hex(g + {base}), 12, '0') AS uuid)"
_FILL = (
    f"""INSERT INTO outboxq.job (id, queue, kind, args, state, run_at, created_at)
SELECT {_ID.format(base=0)}, 'q' || g % 5, 'k' || g % 20,
  jsonb_build_object('order_id', g, 'customer', 'c' || g % 1000),
  CASE WHEN g % 10 < 8 THEN 'ready' ELSE 'scheduled' END, clock_timestamp() + make_interval(secs => g % 1000 - 500),
  clock_timestamp() FROM generate_series(1, {ROWS}) AS g""",
    f"""INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason,
  created_at, died_at) SELECT {_ID.format(base=5_000_000)}, 'q' || g % 5, 'k' || g % 20, '{{}}', '{{}}', 0, 3, 0,
  '[{{"attempt": 1, "type": "ValueError", "message": "x", "at": "2026-01-01T00:00:00Z"}}]',
  'gave up after 3 of 3 attempts: ValueError', clock_timestamp(), clock_timestamp()
FROM generate_series(1, {ROWS}) AS g""",
    f"""INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, seconds, expires_at)
SELECT {_ID.format(base=7_000_000)}, 'q' || g % 5, 'k' || g % 20, 'done', 1, clock_timestamp(), 0.1,
  clock_timestamp() + interval '1 day' FROM generate_series(1, {ROWS}) AS g""",
    f"""INSERT INTO outboxq.inbox (consumer, message_id, seen_at, expires_at)
SELECT 'c' || g % 3, 'm' || g, clock_timestamp(), clock_timestamp() + make_interval(secs => g)
FROM generate_series(1, {ROWS}) AS g""",
    f"""INSERT INTO outboxq.effect (scope, key, status, in_doubt, provider_key, attempts, lock_token, locked_until,
  first_called_at, changed_at, expires_at, result)
SELECT 's' || g % 3, 'order-' || g, 'done', false, gen_random_uuid(), 1, gen_random_uuid(), clock_timestamp(),
  clock_timestamp(), clock_timestamp(), clock_timestamp() + make_interval(secs => g), 'null'
FROM generate_series(1, {ROWS}) AS g""",
)
_FIRST = 200_000


def fill_millions(engine: Engine) -> None:
    """Something for every screen and command, and a million rows more of each sort."""
    stage_dashboard(engine, 90_000)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in _FILL:
            connection.exec_driver_sql(statement.replace("%", "%%"))
        connection.execute(text("VACUUM ANALYZE"))


def delete_heads(engine: Engine) -> None:
    """Delete the 200,000 jobs that would be claimed first, and the dead letters that died last."""
    with engine.begin() as connection:
        connection.execute(text(f"DELETE FROM outboxq.job WHERE seq <= (SELECT min(seq) + {_FIRST} FROM outboxq.job)"))
        connection.execute(
            text(
                "DELETE FROM outboxq.dead_job WHERE died_at AT TIME ZONE 'UTC' >= (SELECT died_at AT TIME ZONE 'UTC' "
                f"FROM outboxq.dead_job ORDER BY died_at AT TIME ZONE 'UTC' DESC OFFSET {_FIRST} LIMIT 1)"
            )
        )


@dataclass
class Costs:
    """What statements cost.

    Attributes:
        whole: The large tables that some read from end to end, each with the statement.
        slowest: The seconds of its session's processor that the dearest took, and the statement.
    """

    whole: set[str] = field(default_factory=set)
    slowest: tuple[float, str] = (0.0, "")


@contextmanager
def counting_costs() -> Iterator[Costs]:
    """What the statements of all engines of this process cost while the block runs.

    Each is explained before it is sent, in its transaction, with the settings that it has there. The processor's
    seconds are those of the statement alone: on an idle machine, and with all pages in memory, it takes as long.
    """
    found = Costs()
    begun: dict[int, float] = {}

    def before(connection: Connection, cursor: object, statement: str, parameters: Any, *_: object) -> None:
        raw: Any = connection.connection.driver_connection
        if _STATEMENT.match(statement):
            plan = "\n".join(row[0] for row in raw.execute(f"EXPLAIN {statement}", parameters).fetchall())
            found.whole.update(f"{table}: {statement[:300]}" for table in _READ_WHOLE.findall(plan))
        begun[raw.info.backend_pid] = processor_seconds(raw.info.backend_pid)

    def after(connection: Connection, cursor: object, statement: str, *_: object) -> None:
        raw: Any = connection.connection.driver_connection
        pid = raw.info.backend_pid
        found.slowest = max(found.slowest, (processor_seconds(pid) - begun.pop(pid), statement[:300]))

    event.listen(Engine, "before_cursor_execute", before)
    event.listen(Engine, "after_cursor_execute", after)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", before)
        event.remove(Engine, "after_cursor_execute", after)


def processor_seconds(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
