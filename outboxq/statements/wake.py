"""Sleeping and waking: the sleep flag is an advisory lock, which goes with the process that holds it.

The trigger of migration step 2 is the other side, and uses the same key and channel.
"""

from collections.abc import Collection
from functools import lru_cache

from psycopg import sql
from sqlalchemy import text

from outboxq.statements.render import fill, render

# Stands for all queues in a notification. No queue has this name.
ALL_QUEUES = ""

# For producers, in their transaction: no locks, no rows. SILENCE reads the old value before it sets the new one.
SILENCE = text(
    "SELECT coalesce(pg_catalog.current_setting('outboxq.notify', true), ''), "
    "pg_catalog.set_config('outboxq.notify', 'off', true)"
)
NOTIFY_AS_BEFORE = text("SELECT pg_catalog.set_config('outboxq.notify', :was, true)")
NOTIFY = text("SELECT pg_catalog.pg_notify(:channel, :payload)")


def channel_name(schema: str) -> str:
    """The channel and the advisory lock class of an installation."""
    return f"outboxq_{schema}"


def listen(schema: str) -> str:
    """Listen for the wake-ups of an installation, in UTF-8: a garbled queue name would match no sleep flag."""
    return fill("SET client_encoding TO 'UTF8'; LISTEN {channel}", channel=sql.Identifier(channel_name(schema)))


def try_sleep_flags(schema: str, queues: Collection[str]) -> str:
    """Try to hold the sleep flags of queues: a row for each, with its name and whether it is held now. Never waits.

    False while another relay holds the flag, and until a producer's insert into the queue is committed: the trigger
    holds the flag shared meanwhile.
    """
    return fill(
        "SELECT name, pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext({channel}), pg_catalog.hashtext(name)) "
        "FROM pg_catalog.unnest({queues}::text[]) AS wanted (name)",
        channel=channel_name(schema),
        queues=sorted(queues),
    )


def drop_sleep_flags(schema: str, queues: Collection[str]) -> str:
    """Release the sleep flags of queues."""
    return fill(
        "SELECT pg_catalog.pg_advisory_unlock(pg_catalog.hashtext({channel}), pg_catalog.hashtext(name)) "
        "FROM pg_catalog.unnest({queues}::text[]) AS dropped (name)",
        channel=channel_name(schema),
        queues=sorted(queues),
    )


def notify(schema: str, queue: str) -> str:
    """Wake the relays that sleep on a queue."""
    return fill("SELECT pg_catalog.pg_notify({channel}, {queue})", channel=channel_name(schema), queue=queue)


@lru_cache(64)
def poll_queues(schema: str, queues: tuple[str, ...]) -> str:
    """What waits in these queues: a row for each queue that is not paused and has a job that no lease holds.

    The queue's name, whether a job is ready, the seconds until the next scheduled one (negative if it is due, or NULL),
    and whether a suspect waits. A job that runs at this moment, in a transaction that is not committed, is seen too.
    Indexes: job_ready, job_scheduled and job_suspect, the first entry of each queue; no locks.
    """
    return render(
        schema,
        """\
SELECT wanted.name, ready.found, due.seconds, suspect.found FROM pg_catalog.unnest({queues}::text[]) AS wanted (name)
LEFT JOIN LATERAL (SELECT true AS found FROM {job} WHERE queue = wanted.name AND state = 'ready'
  ORDER BY (-priority), seq LIMIT 1) AS ready ON true
LEFT JOIN LATERAL (SELECT extract(epoch FROM run_at - pg_catalog.clock_timestamp())::float8 AS seconds FROM {job}
  WHERE queue = wanted.name AND state = 'scheduled' ORDER BY run_at LIMIT 1) AS due ON true
LEFT JOIN LATERAL (SELECT true AS found FROM {job} WHERE queue = wanted.name AND state = 'suspect'
  ORDER BY seq LIMIT 1) AS suspect ON true
WHERE (ready.found OR due.seconds IS NOT NULL OR suspect.found)
  AND NOT EXISTS (SELECT FROM {queue_table} WHERE name = wanted.name AND paused_at IS NOT NULL)""",
        queues=list(queues),
    )
