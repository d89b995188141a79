"""Rows 1 to 7: how many jobs a second a relay works off, beside pgbench with the same statements."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import Session

from benchmarks import limits
from benchmarks.apps.accounts import Account
from benchmarks.apps.update import ADD
from benchmarks.bench import ACCOUNTS, CENTS, Bench, Workbench
from benchmarks.figures import Comparison, Series, Unsupported
from benchmarks.relays import RelayOptions, drain
from benchmarks.support import missing

Lines = list[Comparison | Unsupported]


@dataclass(frozen=True, slots=True)
class Limit:
    """A pgbench script, and how it is driven."""

    name: str
    script: str
    batch: int
    clients: int = 1


@dataclass(frozen=True, slots=True)
class Ours:
    """A relay, what it is held against, and the ratio that we want.

    Attributes:
        share: What part of the limit's rate it surely does not exceed: so many jobs are made for it.
        updates: Whether each job adds to an account, which is then checked.
    """

    what: str
    relay: RelayOptions
    limit: Limit
    target: float | None
    share: float = 1.0
    updates: bool = False


NOOP_LIMIT = Limit("pgbench, claim and delete 50, 1 client", limits.claim_and_delete(50), 50)
NOOP = Ours("no-op, batches of 50, one process", RelayOptions("noop", 50), NOOP_LIMIT, 0.45)
UPDATE_LIMIT = Limit("pgbench, one job and its UPDATE a transaction, 1 client", limits.claim_and_update_one(), 1)
UPDATE = Ours("Core UPDATE, one job a transaction, one slot", RelayOptions("update"), UPDATE_LIMIT, 0.45, updates=True)
_PIPELINED = Limit(
    "pgbench, 100 jobs a transaction with an UPDATE each, pipelined, 1 client",
    limits.claim_and_update_each(100, ACCOUNTS, pipelined=True),
    100,
)
_BATCH = 50
_ORM = f"SQLAlchemy alone: {_BATCH} entities loaded and changed a transaction"
_CORE = f"SQLAlchemy alone: {_BATCH} UPDATEs executed a transaction"


def noop(bench: Bench) -> Lines:
    """Row 1."""
    return compare(bench, 1, "noop", [NOOP])


def noop_processes(bench: Bench) -> Lines:
    """Row 2."""
    limit = Limit("pgbench, claim and delete 50, 4 clients", limits.claim_and_delete(50), 50, clients=4)
    relay = RelayOptions("noop", 50, slots=2, processes=2)
    return compare(bench, 2, "processes", [Ours("no-op, batches of 50, two processes", relay, limit, 0.45)])


def entity(bench: Bench) -> Lines:
    """Row 3."""
    what = "ORM handler with an entity, batchable, batches of 50"
    problem = missing("entity")
    if problem:
        return [Unsupported(3, "orm", what, problem)]
    shared = Ours(what, RelayOptions("entity", 50), _PIPELINED, 0.25, updates=True)
    locked = Ours(f"{what}, Locked", RelayOptions("locked", 50), _PIPELINED, 0.25, updates=True)
    alone = Ours("the same handler in batches of one", RelayOptions("entity", 1), _PIPELINED, 0.0, 0.1, updates=True)
    with bench.database() as workbench:
        each = _measures(bench, workbench, [shared, locked, alone])
        found = bench.alternate({**each, _ORM: partial(_alone, bench, workbench, _change_entities)}, "jobs/s")
    return [
        _line(3, "orm", shared, found),
        _line(3, "orm", locked, found),
        Comparison(3, "orm", what, found[shared.what], found[alone.what], alone.what, 10.0),
        Comparison(3, "orm", what, found[shared.what], found[_ORM], _ORM),
    ]


def _alone(bench: Bench, workbench: Workbench, change: Callable[[Session, list[int]], None]) -> float:
    """What a program without jobs does to the accounts of a batch, a transaction each."""
    workbench.fill(0)
    engine = create_engine(workbench.url)
    _change_for(bench.size.warm_up_seconds, engine, change)
    rate = _change_for(bench.size.seconds, engine, change)
    engine.dispose()
    return rate


def _change_for(seconds: float, engine: Engine, change: Callable[[Session, list[int]], None]) -> float:
    begun, transactions = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        with Session(engine) as session, session.begin():
            change(session, random.sample(range(1, ACCOUNTS + 1), _BATCH))
        transactions += 1
    return transactions * _BATCH / (time.perf_counter() - begun)


def _change_entities(session: Session, keys: list[int]) -> None:
    for account in session.scalars(select(Account).where(Account.id.in_(keys))):
        account.balance += CENTS


def _execute_updates(session: Session, keys: list[int]) -> None:
    for key in keys:
        session.execute(ADD, {"account": key, "cents": CENTS})


def core(bench: Bench) -> Lines:
    """Row 4."""
    plain = Limit(
        "pgbench, 100 jobs a transaction with an UPDATE each, 1 client",
        limits.claim_and_update_each(100, ACCOUNTS, pipelined=False),
        100,
    )
    executed = Ours(
        "Core UPDATE by a batchable handler, batches of 50", RelayOptions("executed", 50), plain, 0.5, updates=True
    )
    deferred = Ours("Core UPDATE deferred, batches of 50", RelayOptions("deferred", 50), _PIPELINED, 0.45, updates=True)
    problem = missing("deferred", "defer")
    wanted = [executed] if problem else [executed, deferred]
    with bench.database() as workbench:
        each = _measures(bench, workbench, wanted)
        found = bench.alternate({**each, _CORE: partial(_alone, bench, workbench, _execute_updates)}, "jobs/s")
    lines: Lines = [_line(4, "core", ours, found) for ours in wanted]
    lines.append(Comparison(4, "core", executed.what, found[executed.what], found[_CORE], _CORE))
    return [*lines, Unsupported(4, "core", deferred.what, problem)] if problem else lines


def set_based(bench: Bench) -> Lines:
    """Row 5."""
    what = "batch handler, one set-based UPDATE for 100"
    problem = missing("set_based")
    if problem:
        return [Unsupported(5, "batch", what, problem)]
    limit = Limit("pgbench, the same statement, 1 client", limits.claim_and_update_set(100), 100)
    return compare(bench, 5, "batch", [Ours(what, RelayOptions("set_based", 100), limit, 0.6, updates=True)])


def one_by_one(bench: Bench) -> Lines:
    """Row 6."""
    name = "pgbench, one job and its UPDATE a transaction, 8 clients"
    limit = Limit(name, limits.claim_and_update_one(), 1, clients=8)
    what = "Core UPDATE, one job a transaction, eight slots in one process"
    eight = Ours(what, RelayOptions("update", slots=8), limit, 0.35, updates=True)
    return compare(bench, 6, "one", [UPDATE, eight])


def leased(bench: Bench) -> Lines:
    """Row 7."""
    limit = Limit("pgbench, lease and delete 100 at a time, 1 client", limits.lease_and_delete(100), 100)
    return compare(
        bench, 7, "lease", [Ours("lease mode, no-op, 4 slots", RelayOptions("leased", slots=4), limit, None)]
    )


def compare(bench: Bench, number: int, scenario: str, wanted: Sequence[Ours]) -> Lines:
    """Measure each beside its limit."""
    found = measure(bench, wanted)
    return [_line(number, scenario, ours, found) for ours in wanted]


def measure(bench: Bench, wanted: Sequence[Ours]) -> Mapping[str, Series]:
    """Every limit and every relay, alternating, by their names."""
    with bench.database() as workbench:
        return bench.alternate(_measures(bench, workbench, wanted), "jobs/s")


def measure_limit(bench: Bench, limit: Limit) -> Series:
    """A limit alone."""
    with bench.database() as workbench:
        return bench.alternate({limit.name: partial(_limit, bench, workbench, limit, {})}, "jobs/s")[limit.name]


def _measures(bench: Bench, workbench: Workbench, wanted: Sequence[Ours]) -> dict[str, Callable[[], float]]:
    rates: dict[str, float] = {}
    each: dict[str, Callable[[], float]] = {}
    for ours in wanted:
        each.setdefault(ours.limit.name, partial(_limit, bench, workbench, ours.limit, rates))
        each[ours.what] = partial(_ours, bench, workbench, ours, rates)
    return each


def _limit(bench: Bench, workbench: Workbench, limit: Limit, rates: dict[str, float]) -> float:
    rates[limit.name] = bench.limit(workbench, limit.script, batch=limit.batch, clients=limit.clients)
    return rates[limit.name]


def _ours(bench: Bench, workbench: Workbench, ours: Ours, rates: Mapping[str, float]) -> float:
    rows = bench.rows(rates[ours.limit.name] * ours.share)
    workbench.fill(rows)
    size = bench.size
    drained = drain(
        workbench, ours.relay, rows, seconds=size.seconds, warm_up_seconds=size.warm_up_seconds, updates=ours.updates
    )
    return drained.rate


def _line(number: int, scenario: str, ours: Ours, found: Mapping[str, Series]) -> Comparison:
    limit = ours.limit
    return Comparison(number, scenario, ours.what, found[ours.what], found[limit.name], limit.name, ours.target)
