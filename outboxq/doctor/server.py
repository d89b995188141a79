"""Checks of the server: settings that disturb relays or risk data, used-up connections, standbys, old versions."""

import re
from collections.abc import Iterator, Mapping

from outboxq.doctor.findings import CheckContext, Finding
from outboxq.doctor.formatting import age
from outboxq.migrations.server import unsupported
from outboxq.statements.doctor import sessions as statements
from outboxq.statements.server import server_facts, standby_delay_seconds

_HOUR_SECONDS = 3_600.0
_LOCK_TIMEOUT_SECONDS = 1.0
_USED_UP = 0.9

_TIMEOUTS: Mapping[str, tuple[str, str]] = {
    "statement_timeout": ("statement-timeout-short", "statements of handlers that take longer are cancelled"),
    "idle_in_transaction_session_timeout": (
        "idle-in-transaction-timeout-short",
        "a handler that works or waits outside the database for longer loses its connection",
    ),
    "transaction_timeout": ("transaction-timeout-short", "handlers that take longer lose their connection"),
    "lock_timeout": ("lock-timeout-short", "handlers that wait for a row fail their attempt"),
    "idle_session_timeout": (
        "idle-session-timeout-short",
        "it ends the connection on which idle relays are woken, again and again",
    ),
}
_DURABILITY: Mapping[str, tuple[str, str]] = {
    "synchronous_commit": (
        "synchronous-commit-off",
        "jobs and effects that were reported as committed may be lost when the server crashes",
    ),
    "fsync": ("fsync-off", "a crash of the machine can destroy the database"),
    "full_page_writes": ("full-page-writes-off", "a crash of the machine can corrupt the database"),
    "autovacuum": ("autovacuum-off", "dead rows stay in every table, and claims slow down"),
    "track_counts": ("track-counts-off", "autovacuum cannot see dead rows, and does nothing"),
}
_UNITS = {"us": 1e-6, "ms": 1e-3, "": 1e-3, "s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}


def find_short_timeouts(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for server time-outs too short for relays, in sessions of this role or of roles for relays."""
    names = tuple(_TIMEOUTS)
    for row in context.rows(statements.settings(names)):
        yield from _short(context, row.name, row.value, None)
    for row in context.rows(statements.role_settings(context.schema, names)):
        yield from _short(context, row.name, row.value, row.role)


def _short(context: CheckContext, name: str, value: str, role: str | None) -> Iterator[Finding]:
    seconds = seconds_of(value)
    if not 0 < seconds < _shortest(context, name):
        return
    code, effect = _TIMEOUTS[name]
    whose = f"role {role}" if role else "sessions of this role"
    yield Finding(
        code,
        "warning",
        f"{name} is {value if role else age(seconds)} for {whose}: {effect}",
        {"setting": name, "seconds": seconds, "role": role},
        f"Give relays a role of their own, and: ALTER ROLE ... SET {name} = 0; or a time above what handlers take.",
    )


def _shortest(context: CheckContext, name: str) -> float:
    short = context.limits.short_timeout_seconds
    # An idle relay sleeps for long; waits for locks are short.
    return {"idle_session_timeout": max(short, _HOUR_SECONDS), "lock_timeout": min(short, _LOCK_TIMEOUT_SECONDS)}.get(
        name, short
    )


def seconds_of(value: str) -> float:
    """Return the seconds of a stored time-out: `30s`, `1.5min`, or milliseconds without a unit; otherwise 0."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) *([a-z]*)", value.strip())
    return float(match[1]) * _UNITS.get(match[2], 0.0) if match else 0.0


def find_unsafe_settings(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for settings, such as `fsync`, that protect committed data and are switched off."""
    for row in context.rows(statements.settings(tuple(_DURABILITY))):
        if row.value == "off":
            code, effect = _DURABILITY[row.name]
            yield Finding(
                code,
                "warning",
                f"{row.name} is off: {effect}",
                {"setting": row.name, "source": row.source},
                f"Set {row.name} = on in the place that sets it now ({row.source}), and reload the configuration.",
            )


def find_used_up_connections(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each connection limit of which at least 90 percent are in use."""
    for row in context.rows(statements.connection_room()):
        if row.allowed >= 0 and row.open >= _USED_UP * row.allowed:
            yield Finding(
                "connections-nearly-used-up",
                "warning",
                f"{row.open} of the {row.allowed} connections that {row.of} allows are open",
                {"of": row.of, "open": row.open, "allowed": row.allowed},
                "Run fewer slots or processes, put producers behind a pooler, or raise the limit (max_connections, or "
                "CONNECTION LIMIT of the role or database).",
            )


def find_standby(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding if this server is a standby: its sessions, locks and statistics are not those of the primary."""
    seconds = standby_delay_seconds(context.connection)
    if seconds is not None:
        yield Finding(
            "server-is-standby",
            "info",
            f"this server is a standby, {seconds:,.1f} s behind: relays cannot work here, and its sessions, locks and "
            "dead rows are not those of the primary",
            {"delay_seconds": seconds},
            "Run the doctor on the primary too.",
        )


def find_unsupported_server(context: CheckContext) -> Iterator[Finding]:
    """Yield findings if the server's version is too old, or the database's encoding is not UTF-8."""
    for reason, advice in unsupported(server_facts(context.connection)):
        yield Finding(
            "server-not-supported", "problem", reason, {"reason": reason}, f"{advice[0].upper()}{advice[1:]}."
        )
