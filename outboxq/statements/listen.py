"""Sleeping and waking: the sleep flag is an advisory lock, which goes with the process that holds it.

The trigger of migration step 2 is the other side, and uses the same key and channel.
"""

from psycopg import sql


def channel_name(schema: str) -> str:
    """The channel and the advisory lock class of an installation."""
    return f"outboxq_{schema}"


def listen(schema: str) -> str:
    """Hear the wake-ups of an installation."""
    return sql.SQL("LISTEN {}").format(sql.Identifier(channel_name(schema))).as_string(None)


def try_sleep_flag(schema: str, queue: str) -> str:
    """Try to hold the sleep flag of a queue; never waits.

    False while another relay holds it, and while a producer's insert into the queue is not committed: the trigger holds
    it shared until then.
    """
    return (
        sql.SQL("SELECT pg_try_advisory_lock(hashtext({}), hashtext({}))")
        .format(sql.Literal(channel_name(schema)), sql.Literal(queue))
        .as_string(None)
    )


def drop_sleep_flag(schema: str, queue: str) -> str:
    """Let go of the sleep flag."""
    return (
        sql.SQL("SELECT pg_advisory_unlock(hashtext({}), hashtext({}))")
        .format(sql.Literal(channel_name(schema)), sql.Literal(queue))
        .as_string(None)
    )


def notify(schema: str, queue: str) -> str:
    """Wake the relays that sleep on a queue."""
    return (
        sql.SQL("SELECT pg_notify({}, {})")
        .format(sql.Literal(channel_name(schema)), sql.Literal(queue))
        .as_string(None)
    )


def next_due_seconds(schema: str, queues: tuple[str, ...]) -> str:
    """Seconds until the next scheduled job of these queues, negative where one is due, or NULL. A probe a queue."""
    return (
        sql.SQL(
            "SELECT extract(epoch FROM min(next.run_at) - clock_timestamp())::float8 "
            "FROM unnest({queues}::text[]) AS wanted (name) CROSS JOIN LATERAL (SELECT run_at FROM {job} "
            "WHERE queue = wanted.name AND state = 'scheduled' ORDER BY run_at LIMIT 1) AS next"
        )
        .format(queues=sql.Literal(list(queues)), job=sql.Identifier(schema, "job"))
        .as_string(None)
    )
