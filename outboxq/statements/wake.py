"""Sleeping and waking: a relay without work holds an advisory lock for each of its queues, the "sleep flag".

A producer's insert then finds the lock taken, and notifies the relay. The lock disappears with the process that holds
it. The trigger of migration step 2 is the producer's side, and uses the same key and channel.
"""

from collections.abc import Collection
from functools import lru_cache
from typing import LiteralString

from psycopg import sql
from sqlalchemy import text

from outboxq.statements.render import fill, render

# The most groups of a queue that a poll visits.
GROUPS_POLLED = 100

# Represents all queues in a notification. No queue has this name.
ALL_QUEUES = ""
# Represents operators' settings in a notification. No queue has this name either.
SETTINGS = "\x1fsettings"

# For producers, in their transaction, without locks and rows. SILENCE reads the old value before it sets the new one.
SILENCE = text(
    "SELECT coalesce(pg_catalog.current_setting('outboxq.notify', true), ''), "
    "pg_catalog.set_config('outboxq.notify', 'off', true)"
)
NOTIFY_AS_BEFORE = text("SELECT pg_catalog.set_config('outboxq.notify', :was, true)")
NOTIFY = text("SELECT pg_catalog.pg_notify(:channel, :payload)")


def channel_name(schema: str) -> str:
    """Return the name of the channel on which an installation's relays listen for wake-ups.

    The name's hash is also the first of the two keys of the sleep flags, which are advisory locks.
    """
    return f"outboxq_{schema}"


def listen(schema: str) -> str:
    """Return SQL that listens for the wake-ups of an installation, with client_encoding UTF8.

    In another encoding a queue's name could arrive garbled, and match no queue.
    """
    return fill("SET client_encoding TO 'UTF8'; LISTEN {channel}", channel=sql.Identifier(channel_name(schema)))


def listen_on(channel: str) -> str:
    """Return SQL that listens on one channel."""
    return fill("LISTEN {channel}", channel=sql.Identifier(channel))


def unlisten(channel: str) -> str:
    """Return SQL that stops listening on a channel."""
    return fill("UNLISTEN {channel}", channel=sql.Identifier(channel))


def notify_on(channel: str) -> str:
    """Return SQL that sends a notification without a text on one channel."""
    return fill("SELECT pg_catalog.pg_notify({channel}, '')", channel=channel)


def try_sleep_flags(schema: str, queues: Collection[str]) -> str:
    """Return SQL that tries to lock queues' sleep flags: advisory locks by which producers know that a relay sleeps.

    It returns a row for each queue: its name, and true if the flag is held now. It never waits: a flag is refused while
    another relay holds it, and while a producer's insert into the queue is not committed, because the trigger holds the
    flag in shared mode until then.
    """
    return fill(
        "SELECT name, pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext({channel}), pg_catalog.hashtext(name)) "
        "FROM pg_catalog.unnest({queues}::text[]) AS wanted (name)",
        channel=channel_name(schema),
        queues=sorted(queues),
    )


def drop_sleep_flags(schema: str, queues: Collection[str]) -> str:
    """Return SQL that unlocks the sleep flags (advisory locks) of these queues, which this session holds."""
    return fill(
        "SELECT pg_catalog.pg_advisory_unlock(pg_catalog.hashtext({channel}), pg_catalog.hashtext(name)) "
        "FROM pg_catalog.unnest({queues}::text[]) AS dropped (name)",
        channel=channel_name(schema),
        queues=sorted(queues),
    )


def notify(schema: str, queue: str) -> str:
    """Return SQL that wakes the relays that sleep on a queue."""
    return fill("SELECT pg_catalog.pg_notify({channel}, {queue})", channel=channel_name(schema), queue=queue)


@lru_cache(64)
def poll_queues(schema: str, queues: tuple[str, ...]) -> str:
    """Select those of these queues in which a relay will find a job, and when; a relay polls with it.

    Paused queues, and queues all of whose jobs are leased, are left out. A row has six columns: the queue's name; true
    if a job is ready; the seconds until the next scheduled job is due (negative if it is due, or NULL); true if a
    suspect (a job that ran when its relay died) waits; the seconds until the first job of a group may run (or NULL);
    and true if a suspect of a group waits. A job that is running in an uncommitted transaction counts too.

    Indexes: job_ready, job_scheduled, job_suspect and job_group_state, the first entry of each queue; job_group, the
    first jobs of its first 100 groups: if there may be more, one counts as due. No locks.
    """
    return render(schema, _POLL, queues=list(queues), groups=GROUPS_POLLED)


_POLL: LiteralString = """\
SELECT wanted.name, ready.found, due.seconds, suspect.found, grouped.seconds, group_suspect.found
FROM pg_catalog.unnest({queues}::text[]) AS wanted (name)
LEFT JOIN LATERAL (SELECT true AS found FROM {job} WHERE queue = wanted.name AND state = 'ready'
  ORDER BY (-priority), seq LIMIT 1) AS ready ON true
LEFT JOIN LATERAL (SELECT extract(epoch FROM run_at - pg_catalog.clock_timestamp())::float8 AS seconds FROM {job}
  WHERE queue = wanted.name AND state = 'scheduled' ORDER BY run_at LIMIT 1) AS due ON true
LEFT JOIN LATERAL (SELECT true AS found FROM {job} WHERE queue = wanted.name AND state = 'suspect'
  ORDER BY seq LIMIT 1) AS suspect ON true
LEFT JOIN LATERAL (
  WITH RECURSIVE heads AS (
    (SELECT group_key, state, run_at, 1 AS place FROM {job}
      WHERE queue = wanted.name AND state <> 'group_waiting' AND group_key COLLATE "C" > ''
      ORDER BY group_key COLLATE "C", seq LIMIT 1)
    UNION ALL
    SELECT head.group_key, head.state, head.run_at, heads.place + 1 FROM heads CROSS JOIN LATERAL (
      SELECT group_key, state, run_at FROM {job}
      WHERE queue = wanted.name AND state <> 'group_waiting' AND group_key COLLATE "C" > heads.group_key
      ORDER BY group_key COLLATE "C", seq LIMIT 1) AS head
    WHERE heads.place < {groups}
  )
  SELECT least(
    (SELECT extract(epoch FROM pg_catalog.min(run_at) - pg_catalog.clock_timestamp())::float8 FROM heads
      WHERE state = 'grouped'),
    (SELECT 0::float8 FROM heads WHERE place = {groups}),
    (SELECT extract(epoch FROM run_at - pg_catalog.clock_timestamp())::float8 FROM {job}
      WHERE queue = wanted.name AND state = 'group_waiting' ORDER BY run_at LIMIT 1)) AS seconds
) AS grouped ON true
LEFT JOIN LATERAL (SELECT true AS found FROM {job} WHERE queue = wanted.name AND state = 'group_suspect'
  ORDER BY run_at LIMIT 1) AS group_suspect ON true
WHERE (ready.found OR due.seconds IS NOT NULL OR suspect.found OR grouped.seconds IS NOT NULL OR group_suspect.found)
  AND NOT EXISTS (SELECT FROM {queue_table} WHERE name = wanted.name AND paused_at IS NOT NULL)"""
