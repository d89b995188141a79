"""Detects a transaction pooler: a proxy that gives a connection another backend for each transaction.

Relays cannot LISTEN through such a pooler.
"""

from collections.abc import Iterator

from sqlalchemy import Connection

from outboxq.database.driver import unprepared
from outboxq.doctor.findings import Connect, Finding
from outboxq.errors import OutboxqError
from outboxq.statements.doctor import sessions as statements

# A pooler assigns the backend that was released last, unless another client was quicker.
_ROUNDS = 5

SUBJECT = "whether the URL leads to a transaction pooler"


def unreachable(error: OutboxqError) -> Finding:
    """Make the finding for an error that kept the doctor from connecting to the database."""
    if "statement pooling" in str(error):
        return Finding(
            "pooler-statement-mode",
            "problem",
            "the URL leads to a pooler in statement mode, which allows no transactions",
            {},
            "Set pool_mode = transaction (or session) for this database in the pooler, or use a URL that leads to the "
            "server.",
        )
    return Finding(
        "database-unreachable",
        "problem",
        str(error),
        {},
        "Start the server, or mend the URL (--database-url, OUTBOXQ_DATABASE_URL), the password or pg_hba.conf, as the "
        "reason says.",
    )


def look_at_pooler(connection: Connection, connect: Connect, listen_connect: Connect | None) -> Iterator[Finding]:
    """Yield findings if the URL leads to a transaction pooler, or if the URL for listening does, or reaches no server.

    Through such a pooler a relay cannot LISTEN.
    """
    try:
        if shares_backends(connection, connect):
            has_listen_url = listen_connect is not None
            yield Finding(
                "pooler-transaction-mode",
                "info" if has_listen_url else "warning",
                "the URL leads to a transaction pooler: relays cannot LISTEN through it, so they poll",
                {"has_listen_url": has_listen_url},
                "Relays listen by the other URL; nothing to do."
                if has_listen_url
                else "Give relays, and the doctor, a direct way to the server with --listen-url (OUTBOXQ_LISTEN_URL), "
                "or start relays with --no-listen if polling once a second is enough.",
            )
    except OutboxqError as error:
        yield Finding(
            "check-not-made",
            "warning",
            f"could not look at {SUBJECT}: {error}",
            {"check": SUBJECT, "reason": str(error), "sqlstate": None, "grant": None},
            "It takes a second connection: see the other findings for limits of connections, and run the doctor again.",
        )
    if listen_connect is not None:
        yield from _look_at_listen_url(listen_connect)


def _look_at_listen_url(connect: Connect) -> Iterator[Finding]:
    try:
        with connect() as listening:
            if shares_backends(listening, connect):
                yield Finding(
                    "listen-url-pooled",
                    "problem",
                    "the URL for listening leads to a transaction pooler, which drops LISTEN",
                    {},
                    "Point --listen-url (OUTBOXQ_LISTEN_URL) at the server itself, or at a pool in session mode.",
                )
    except OutboxqError as error:
        yield Finding(
            "listen-url-unreachable",
            "problem",
            f"the URL for listening leads nowhere, so relays poll: {error}",
            {},
            "Mend --listen-url (OUTBOXQ_LISTEN_URL), or leave it out if the database URL leads to the server itself.",
        )


def shares_backends(first: Connection, connect: Connect) -> bool:
    """Return True if there is a transaction pooler: two connections use the same backend, or one changes its backend.

    `first` is one of the connections; `connect` opens the other one.
    """
    mine, others = set[int](), set[int]()
    with connect() as second, unprepared(second):
        for _ in range(_ROUNDS):
            mine.add(_backend(first))
            others.add(_backend(second))
            if len(mine) > 1 or len(others) > 1 or mine & others:
                return True
    return False


def _backend(connection: Connection) -> int:
    with connection.begin():
        return int(connection.execute(statements.backend_pid()).scalar_one())
