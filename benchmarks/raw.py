"""The limit of one call at a time: psycopg alone, which leases a job, calls, and deletes it with the next lease.

Prepared statements in one string, as a relay sends them: each transaction is committed by itself, and a call costs one
round trip. No handler is looked up, no deadline kept, no failure expected.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import psycopg

from benchmarks import limits
from benchmarks.bench import Workbench, conninfo
from benchmarks.relays import Counted

_PREPARE = (
    f"PREPARE lease AS {limits.lease_one()}",
    "PREPARE done (uuid, bigint) AS DELETE FROM outboxq.job WHERE id = $1 AND lease_token = $2",
)
_LEASE = "BEGIN; EXECUTE lease; COMMIT"
# BEGIN, DELETE, COMMIT, BEGIN: then what the lease returned.
_RESULTS_BEFORE_LEASE = 4

_Row: TypeAlias = tuple[object, ...]
# The options of `call_one_by_one` and `await_one_by_one`: the seconds that they run at most.
Run: TypeAlias = Callable[[Workbench, float], Counted]


def call_one_by_one(workbench: Workbench, seconds: float) -> Counted:
    """Plain calls, until no job waits or the time has ended."""
    done = 0
    with psycopg.connect(conninfo(workbench.url), autocommit=True, prepare_threshold=None) as connection:
        for statement in _PREPARE:
            connection.execute(statement.encode())
        row, begun = _leased(connection.execute(_LEASE.encode()), 1), time.monotonic()
        while row is not None and time.monotonic() - begun < seconds:
            _nothing(**_arguments(row))
            done += 1
            row = _leased(connection.execute(_following(row)), _RESULTS_BEFORE_LEASE)
        return Counted(done, time.monotonic() - begun)


def await_one_by_one(workbench: Workbench, seconds: float) -> Counted:
    """Async calls, in the same way."""
    return asyncio.run(_await_one_by_one(workbench, seconds))


async def _await_one_by_one(workbench: Workbench, seconds: float) -> Counted:
    done = 0
    connecting = psycopg.AsyncConnection.connect(conninfo(workbench.url), autocommit=True, prepare_threshold=None)
    async with await connecting as connection:
        for statement in _PREPARE:
            await connection.execute(statement.encode())
        row, begun = _leased(await connection.execute(_LEASE.encode()), 1), time.monotonic()
        while row is not None and time.monotonic() - begun < seconds:
            await _nothing_async(**_arguments(row))
            done += 1
            row = _leased(await connection.execute(_following(row)), _RESULTS_BEFORE_LEASE)
        return Counted(done, time.monotonic() - begun)


def _following(row: _Row) -> bytes:
    return f"BEGIN; EXECUTE done('{row[0]}', {row[-1]}); COMMIT; {_LEASE}".encode()


def _leased(cursor: psycopg.Cursor[_Row] | psycopg.AsyncCursor[_Row], place: int) -> _Row | None:
    """The row of the lease, which is the result at this place: cursors of both sorts have all results by now."""
    for _ in range(place):
        cursor.nextset()
    result = cursor.pgresult
    assert result is not None
    if result.ntuples == 0:
        return None
    return tuple((result.get_value(0, column) or b"").decode() for column in range(result.nfields))


def _arguments(row: _Row) -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(str(row[2]))
    return found


def _nothing(account: int, cents: int, reference: str) -> None:
    pass


async def _nothing_async(account: int, cents: int, reference: str) -> None:
    pass
