"""Row 17: the cost that the limit of a queue adds to a claim, in both modes."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from uuid import UUID

import psycopg

from benchmarks.bench import Bench
from benchmarks.figures import Better, Comparison, Unsupported
from outboxq.database.driver import PreparedStatements, ServerSession
from outboxq.statements.claim import ClaimScript, ClaimStatements

_QUEUE = "bench"
_OWNER = UUID(int=7)
_WAITING = 10_000
_CLAIMS = 400
_MOST = 5


def limits(bench: Bench) -> list[Comparison | Unsupported]:
    """A prepared claim of one job, with a limit of five and without, on one connection; each is rolled back."""
    plain = ClaimStatements("outboxq", _QUEUE, _OWNER)
    slots = ClaimStatements("outboxq", _QUEUE, _OWNER, most=_MOST)
    counts = ClaimStatements("outboxq", _QUEUE, _OWNER, most=_MOST, counts_leases=True)
    scripts = {
        "a claim": plain.ready,
        "a claim that takes a slot of a limit": slots.ready,
        "a claim under a lease": plain.lease_ready,
        "a claim under a lease that counts for a limit": counts.lease_ready,
    }
    with bench.database() as workbench, workbench.connected() as connection:
        workbench.fill(_WAITING)
        connection.execute("INSERT INTO outboxq.relay VALUES (%s, now() + interval '1 day')", [_OWNER])
        connection.commit()
        measures: dict[str, Callable[[], float]] = {
            name: partial(_microseconds, connection, script) for name, script in scripts.items()
        }
        found = bench.alternate(measures, "µs")
    names = list(scripts)
    return [
        Comparison(17, "limits", ours, found[ours], found[limit], limit, 1.5, Better.lower, is_paired=True)
        for limit, ours in (names[:2], names[2:])
    ]


def _microseconds(connection: psycopg.Connection, script: ClaimScript) -> float:
    prepared = PreparedStatements()
    prepared.succeeded(script.name)
    parts = script.parts(1, None, ServerSession(claims=prepared))
    execution = "; ".join(statement for _, statement in parts).encode()
    run = connection.pgconn.exec_
    run(f"DEALLOCATE ALL; {script.texts.definition}".encode())
    took: list[float] = []
    for _ in range(_CLAIMS):
        run(b"BEGIN")
        begun = time.perf_counter()
        run(execution)
        took.append(time.perf_counter() - begun)
        run(b"ROLLBACK")
    return statistics.median(took) * 1e6
