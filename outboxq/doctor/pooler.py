"""Whether the URL leads to a transaction pooler: behind one, two connections are given each other's backends."""

from sqlalchemy import Connection

from outboxq.database.driver import driver_connection
from outboxq.doctor.findings import Connect, Finding
from outboxq.errors import OutboxqError
from outboxq.statements.doctor import sessions as statements

# A pooler hands out the backend that was released last, unless another client was quicker.
_ROUNDS = 5

SUBJECT = "whether the URL leads to a transaction pooler"


def unreachable(error: OutboxqError) -> Finding:
    """The finding if no connection could be opened."""
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


def look_at_pooler(connection: Connection, connect: Connect, listen_connect: Connect | None) -> list[Finding]:
    """Findings about the URL, and about the one for listening if there is one."""
    findings = []
    try:
        if shares_backends(connection, connect):
            findings.append(_transaction_mode(has_listen_url=listen_connect is not None))
    except OutboxqError as error:
        findings.append(_no_second_connection(error))
    if listen_connect is not None:
        findings += _look_at_listen_url(listen_connect)
    return findings


def _look_at_listen_url(connect: Connect) -> list[Finding]:
    try:
        with connect() as listening:
            return [_LISTEN_URL_POOLED] if shares_backends(listening, connect) else []
    except OutboxqError as error:
        return [_listen_url_unreachable(error)]


def shares_backends(first: Connection, connect: Connect) -> bool:
    """Whether `first` and another connection to the same place change backends between transactions."""
    mine, others = set[int](), set[int]()
    with connect() as second:
        driver_connection(second).prepare_threshold = None
        for _ in range(_ROUNDS):
            mine.add(_backend(first))
            others.add(_backend(second))
            if len(mine) > 1 or len(others) > 1 or mine & others:
                return True
    return False


def _backend(connection: Connection) -> int:
    with connection.begin():
        return int(connection.execute(statements.backend_pid()).scalar_one())


def _transaction_mode(*, has_listen_url: bool) -> Finding:
    return Finding(
        "pooler-transaction-mode",
        "info" if has_listen_url else "warning",
        "the URL leads to a transaction pooler: relays cannot LISTEN through it, so they poll",
        {"has_listen_url": has_listen_url},
        "Relays listen by the other URL; nothing to do."
        if has_listen_url
        else "Give relays, and the doctor, a direct way to the server with --listen-url (OUTBOXQ_LISTEN_URL), or start "
        "relays with --no-listen if polling once a second is enough.",
    )


_LISTEN_URL_POOLED = Finding(
    "listen-url-pooled",
    "problem",
    "the URL for listening leads to a transaction pooler, which drops LISTEN",
    {},
    "Point --listen-url (OUTBOXQ_LISTEN_URL) at the server itself, or at a pool in session mode.",
)


def _no_second_connection(error: OutboxqError) -> Finding:
    return Finding(
        "check-not-made",
        "warning",
        f"could not look at {SUBJECT}: {error}",
        {"check": SUBJECT, "reason": str(error), "sqlstate": None, "grant": None},
        "It takes a second connection: see the other findings for limits of connections, and run the doctor again.",
    )


def _listen_url_unreachable(error: OutboxqError) -> Finding:
    return Finding(
        "listen-url-unreachable",
        "problem",
        f"the URL for listening leads nowhere, so relays poll: {error}",
        {},
        "Mend --listen-url (OUTBOXQ_LISTEN_URL), or leave it out if the database URL leads to the server itself.",
    )
