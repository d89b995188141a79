"""Effects, recorded calls to other services, for operators: list them, and settle those with an unknown outcome.

Every function is one query or one change in the caller's transaction, and none waits for a row lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Executable, Row

from outboxq.admin.walks import latest_rows
from outboxq.codec.values import MAX_ARGS_BYTES, encode_value
from outboxq.config import DEFAULT_RETENTION
from outboxq.errors import ArgumentError, EffectError, EffectNotFound
from outboxq.names import MAX_SCOPE_BYTES, check_key
from outboxq.statements import effect_admin as statements
from outboxq.statements.effect_admin import EffectFilter as EffectFilter
from outboxq.statements.effects import Status
from outboxq.statements.stretches import stretches

# The error of a caller that needs the result of a call which an operator has resolved without one.
_WITHOUT_RESULT = "resolved as applied by an operator, without a result"
_NOT_APPLIED = "resolved as not applied by an operator"


@dataclass(frozen=True, slots=True)
class EffectRecord:
    """An effect: a recorded call to another service, and what is known of its outcome.

    `in_doubt`: True if an earlier attempt at the call may have been applied. `provider_key`: the idempotency key sent
    to the other side. `locked_until`: while the status is `started`, a caller is making the call, and no other does
    before this time. `expires_at`: the time after which the record may be deleted.
    """

    scope: str
    key: str
    status: Status
    in_doubt: bool
    provider_key: UUID
    attempts: int
    locked_until: datetime
    first_called_at: datetime
    changed_at: datetime
    expires_at: datetime | None
    error: str | None


@dataclass(frozen=True, slots=True)
class EffectDetail:
    """An effect with all of its columns, as `show_effect` returns it.

    `is_locked`: True if a caller is making the call: `locked_until` is in the future by the database's clock.
    `can_be_resolved`: True if `resolve_effect` would accept a verdict with a result. `fingerprint`: the hash of the
    call's payload, in hexadecimal. `result`: JSON text.
    """

    effect: EffectRecord
    is_locked: bool
    can_be_resolved: bool
    fingerprint: str | None
    result: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class WasApplied:
    """The verdict that the other side has applied the call; `result` is the call's result as JSON text.

    Without `result`, a later caller that needs the result gets an error.
    """

    result: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class WasNotApplied:
    """The verdict that the other side has not applied the call and never will: the next caller makes it again."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The outcome of `resolve_effects`.

    `resolved`: the effects with the new verdict. `left`: the effects that were not changed, because they were settled,
    called again or locked by a transaction after the caller had read them.
    """

    resolved: tuple[EffectRecord, ...]
    left: tuple[EffectRecord, ...]


Verdict: TypeAlias = WasApplied | WasNotApplied


def list_effects(connection: Connection, wanted: EffectFilter | None = None, *, limit: int = 50) -> list[EffectRecord]:
    """Return up to `limit` effects that match: unknown ones, then others that are not settled, then settled ones.

    The three parts are ordered by `changed_at`, `locked_until` and `expires_at`, each with the latest first. Results
    are left out, because they are users' data.
    """
    wanted = wanted or EffectFilter()
    found: dict[tuple[str, str], EffectRecord] = {}
    for part in statements.PARTS:
        if wanted.status is None or wanted.status in part.statuses:
            select = partial(statements.select_effects, wanted, part)
            # An effect that is settled while this runs is in two parts, and is shown as it was first seen.
            for row in latest_rows(connection, part.by, *part.where, select=select, limit=limit):
                found.setdefault((row.scope, row.key), EffectRecord(*row))
        if len(found) >= limit:
            break
    return list(found.values())[:limit]


def show_effect(connection: Connection, scope: str, key: str) -> EffectDetail:
    """Return one effect, with its result.

    Raises:
        EffectNotFound: the call was never made, or its effect was forgotten.
        InvalidKey: a scope or a key that no effect can have.
    """
    row = connection.execute(statements.select_effect(*_checked(scope, key))).one_or_none()
    if row is None:
        raise EffectNotFound(scope, key)
    return EffectDetail(_record_of(row), row.is_locked, row.can_be_resolved, row.fingerprint, row.result)


def find_unresolved(connection: Connection, wanted: EffectFilter) -> list[EffectRecord]:
    """Return all effects that match and that an operator could settle by `resolve_effect`, without their results."""
    found: dict[tuple[str, str], EffectRecord] = {}
    for part in statements.PARTS[:2]:
        for stretch in stretches(connection, part.by, *part.where):
            for row in connection.execute(statements.select_unresolved(wanted, stretch)):
                found.setdefault((row.scope, row.key), EffectRecord(*row))
    return list(found.values())


def resolve_effects(
    connection: Connection, named: Sequence[EffectRecord], verdict: Verdict, *, keep: timedelta = DEFAULT_RETENTION
) -> Resolved:
    """Record the same verdict on several effects; those that are settled or being called by now stay as they are.

    Args:
        named: The effects, as `find_unresolved` returns them.
        keep: The time for which the settled effects are remembered.

    Raises:
        ArgumentError: a result that JSON, or jsonb, cannot hold.
    """
    resolved, left = list[EffectRecord](), list[EffectRecord]()
    for each in named:
        row = connection.execute(_resolution(each.scope, each.key, verdict, keep)).one_or_none()
        (left if row is None or row.scope is None else resolved).append(each)
    return Resolved(tuple(resolved), tuple(left))


def resolve_effect(
    connection: Connection, scope: str, key: str, verdict: Verdict, *, keep: timedelta = DEFAULT_RETENTION
) -> EffectRecord:
    """Settle a call with an unknown outcome by an operator's verdict: the other side has applied it, or has not.

    Use it for calls that are `unknown` or in doubt, or whose caller died, and to add a result to a done call that has
    none. A caller that was suspended and resumes later cannot overwrite the verdict.

    Args:
        keep: The time for which the settled effect is remembered.

    Returns:
        The effect as it is now.

    Raises:
        EffectNotFound: the call was never made, or its effect was forgotten.
        EffectError: the outcome is known already, a caller is making the call, or another transaction has locked the
            row.
        ArgumentError: a result that JSON, or jsonb, cannot hold.
        InvalidKey: a scope or a key that no effect can have.
    """
    row = connection.execute(_resolution(*_checked(scope, key), verdict, keep)).one_or_none()
    if row is None:
        raise EffectNotFound(scope, key)
    if row.scope is None:
        raise EffectError(scope, key, _refusal(row))
    return _record_of(row)


def _checked(scope: str, key: str) -> tuple[str, str]:
    return check_key("scope", scope, MAX_SCOPE_BYTES), check_key("key", key)


def _resolution(scope: str, key: str, verdict: Verdict, keep: timedelta) -> Executable:
    if isinstance(verdict, WasNotApplied):
        return statements.resolve(scope, key, "retryable", result=None, error=_NOT_APPLIED, keep=keep)
    result = None if verdict.result is None else _check_json(verdict.result)
    error = _WITHOUT_RESULT if result is None else None
    return statements.resolve(scope, key, "done", result=result, error=error, keep=keep)


def _refusal(row: Row[Any]) -> str:
    if row.was_open:
        return "another transaction has it at this moment, or has just changed it: nothing was done, so look again"
    if row.was_status == "started":
        return f"a call is under way, and has {max(row.locked_seconds, 0):.0f} s left: ask again then"
    return (
        f"it is {row.was_status}, so there is nothing to resolve: only what is unknown, in doubt, was started by a "
        "caller that never came back, or is done without a result and gets one"
    )


def _check_json(text: str) -> str:
    """Check that a JSON text can be stored and read again; return the text unchanged."""
    try:
        value = msgspec.json.decode(text.encode())
    except (ValueError, RecursionError):
        # Without the exception's cause: its text may quote the value.
        raise ArgumentError(
            "the result is not JSON: give what the call returned, such as '{\"id\": 7}', '\"abc\"' or 'null'"
        ) from None
    size_bytes = len(encode_value("result", value))
    if size_bytes > MAX_ARGS_BYTES:
        raise ArgumentError(f"the result takes {size_bytes:,} bytes as JSON, over the cap of {MAX_ARGS_BYTES:,}")
    return text


def _record_of(row: Row[Any]) -> EffectRecord:
    return EffectRecord(*row[: len(statements.SUMMARY_COLUMNS)])
